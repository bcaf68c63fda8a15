"""Deploys: workers stop and start under load, and differ in their catalogs. Nothing is lost, and nothing is repeated.

The tools have no key unless said otherwise: whatever was called twice would have acted twice.
"""

import asyncio
import copy
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from temporalio.client import WorkflowHandle

from activities.ledger import open_ledger
from activities.ledger.records import OperationState, OperationView
from contracts.identity import OperationId
from contracts.tools import load_catalog
from tests.faults.lookup import node_result, operation
from tests.lab import Bench
from tests.postgres import PostgresServer
from tests.waiting import eventually
from tests.worker_process import WorkerProcess

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]  # workers start and stop, again and again

_WORKER: Final = ("cli.main", "worker")
"""`redrive worker` itself."""
_IN_FLIGHT: Final = 30
_RUNS: Final = 60
_WINDOW: Final = 6
"""Runs that are under way at once."""
_BEGUN: Final = 8

Run = WorkflowHandle[Any, Any]


def _key(run: Run, node: str) -> str:
    return OperationId(run_id=run.id, node_id=node, logical_attempt=1).idempotency_key


async def _views(bench: Bench, runs: Sequence[Run], node: str) -> list[OperationView]:
    ledger = await open_ledger(bench.ledger_url)
    try:
        ids = [OperationId(run_id=run.id, node_id=node, logical_attempt=1) for run in runs]
        views = [await ledger.operation(str(operation)) for operation in ids]
    finally:
        await ledger.close()
    return [view for view in views if view is not None]


async def _performed_once(bench: Bench, runs: Sequence[Run], node: str, tool: str) -> None:
    """Each operation of the runs' node was called once, acted once, and was the first attempt at it."""
    once = dict.fromkeys((_key(run, node) for run in runs), 1)
    assert Counter(call.key for call in await bench.tools.calls(bench.unique(tool))) == once
    assert Counter(effect.key for effect in await bench.tools.effects(bench.unique(tool))) == once
    views = await _views(bench, runs, node)
    assert [(view.state, view.epoch, len(view.attempts)) for view in views] == [("SUCCEEDED", 1, 1)] * len(runs)


async def _stopping(worker: WorkerProcess) -> None:
    await eventually(lambda: "stopping" in worker.log, "the worker to stop")


async def test_calls_in_flight_at_sigterm_are_performed_once_and_their_runs_finish_on_the_next_worker(
    bench: Bench,
) -> None:
    gate = bench.unique("gate")
    await bench.tool("held", [{"gate": gate}], timeout="100s", concurrency=_IN_FLIGHT)
    await bench.tool("after", [{}])
    nodes: list[dict[str, Any]] = [{"id": "call", "tool": "held"}, {"id": "then", "tool": "after", "after": ["call"]}]
    async with WorkerProcess.start(bench, program=_WORKER) as worker:
        runs = [await bench.start(*nodes) for _ in range(_IN_FLIGHT)]
        await bench.tools.wait_for(bench.unique("held"), calls=_IN_FLIGHT, timeout=90)
        worker.terminate()
        await _stopping(worker)
        runs += [await bench.start(*nodes) for _ in range(5)]
        await bench.tools.open_gate(gate)
        assert await worker.exit_code() == 0, worker.log
    # All that it had begun is committed, and of all the rest it has taken nothing; nobody else has been there yet.
    states = [view.state for view in await _views(bench, runs, "call")]
    assert states == [OperationState.SUCCEEDED] * _IN_FLIGHT
    assert len(await bench.tools.calls(bench.unique("held"))) == _IN_FLIGHT
    assert not await bench.tools.calls(bench.unique("after"))
    async with WorkerProcess.start(bench, program=_WORKER):
        results = await asyncio.gather(*(run.result() for run in runs))
    assert [result["status"] for result in results] == ["SUCCEEDED"] * len(runs)
    await _performed_once(bench, runs, "call", "held")
    await _performed_once(bench, runs, "then", "after")


async def test_signals_that_repeat_themselves_do_not_cut_a_call_short(bench: Bench) -> None:
    gate = bench.unique("gate")
    await bench.tool("held", [{"gate": gate}], timeout="100s")
    async with WorkerProcess.start(bench, program=_WORKER) as worker:
        run = await bench.start({"id": "call", "tool": "held"})
        await bench.tools.wait_for(bench.unique("held"), calls=1)
        worker.send_signal(signal.SIGINT)
        await _stopping(worker)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            worker.send_signal(number)
        # The gate is opened from here: it had all the time that this takes to come to its senses, or not.
        await bench.tools.open_gate(gate)
        assert await worker.exit_code() == 0, worker.log
    assert "Traceback" not in worker.log
    await _performed_once(bench, [run], "call", "held")
    async with bench.worker():
        await run.result()


async def test_a_worker_that_is_told_to_stop_before_any_work_takes_none(bench: Bench) -> None:
    await bench.tool("pay", [{}], timeout="10m")
    async with WorkerProcess.start(bench, program=_WORKER) as worker:
        worker.terminate()
        await _stopping(worker)
        run = await bench.start({"id": "call", "tool": "pay"})
        assert await worker.exit_code() == 0, worker.log
    assert not await bench.tools.calls(bench.unique("pay"))
    async with bench.worker():
        await run.result()
    await _performed_once(bench, [run], "call", "pay")


@pytest.fixture
async def own_postgres() -> AsyncIterator[PostgresServer]:
    """A server of the test's own, since it will be killed."""
    async with PostgresServer.running() as server:
        yield server


async def test_an_answer_kept_while_the_ledger_is_away_is_committed_by_the_worker_that_is_stopping(
    bench: Bench, own_postgres: PostgresServer
) -> None:
    bench.ledger = own_postgres.url(await own_postgres.database())
    gate = bench.unique("gate")
    await bench.tool("held", [{"gate": gate}], timeout="60s")
    async with WorkerProcess.start(bench, program=_WORKER) as worker:
        run = await bench.start({"id": "call", "tool": "held"})
        await bench.tools.wait_for(bench.unique("held"), calls=1)
        await own_postgres.kill()
        worker.terminate()
        await _stopping(worker)
        await bench.tools.open_gate(gate)
        await eventually(lambda: "is kept" in worker.log, "the answer to be kept")
        assert worker.running
        await own_postgres.start()
        assert await worker.exit_code() == 0, worker.log
    await _performed_once(bench, [run], "call", "held")
    async with bench.worker():
        await run.result()
    node = await node_result(bench, run, "call")
    # Of a fast run's own call, the run hears from the ledger.
    source = "REPLAYED" if bench.node_mode == "fast" else "EXECUTED"
    assert (node["source"], node["attempt_count"]) == (source, 1)


async def _load(bench: Bench, rolled: asyncio.Event) -> list[Run]:
    """Runs, always some of them under way, until the restart is over and there were enough."""
    window = asyncio.Semaphore(_WINDOW)
    runs: list[Run] = []

    async def one() -> None:
        try:
            run = await bench.start({"id": "blind", "tool": "blind"}, {"id": "key", "tool": "key", "after": ["blind"]})
            runs.append(run)
            result = await run.result()
            assert result["status"] == "SUCCEEDED"
        finally:
            window.release()

    async with asyncio.TaskGroup() as group:
        begun = 0
        while begun < _RUNS or not rolled.is_set():
            await window.acquire()
            group.create_task(one())
            begun += 1
    return runs


@pytest.fixture(params=["sqlite", "postgres"])
def shared(request: pytest.FixtureRequest) -> PostgresServer | None:
    """Where the ledger of all workers is, if not in a file."""
    return request.getfixturevalue("postgres") if request.param == "postgres" else None


async def test_a_rolling_restart_under_load_repeats_nothing_and_loses_nothing(
    bench: Bench, shared: PostgresServer | None
) -> None:
    if shared is not None:
        bench.ledger = shared.url(await shared.database())
    await bench.tool("blind", [{"delay": 0.5}], timeout="30s")
    await bench.tool("key", [{"delay": 0.5}], dedupe=True, idempotency="key", timeout="30s")
    rolled = asyncio.Event()
    async with AsyncExitStack() as stack:

        async def begin() -> WorkerProcess:
            return await stack.enter_async_context(WorkerProcess.start(bench, program=_WORKER))

        workers = [await begin() for _ in range(3)]
        load = asyncio.create_task(_load(bench, rolled))
        for worker in workers:
            before = len(await bench.tools.calls(bench.unique("blind")))
            await bench.tools.wait_for(bench.unique("blind"), calls=before + 1, timeout=60)
            worker.terminate()
            assert await worker.exit_code() == 0, worker.log
            await begin()
        rolled.set()
        # Not one of them waits for a person: there is no dead letter.
        runs = await load
    assert len(runs) >= _RUNS
    for tool in ("blind", "key"):
        await _performed_once(bench, runs, tool, tool)


def _with_new_catalog(bench: Bench, folder: Path) -> Bench:
    """The same queue and ledger, and a catalog in which `pay` is version 2 elsewhere, `gone` is not, and `fresh` is."""
    folder.mkdir()
    catalog = copy.deepcopy(bench.catalog)
    catalog["pay"] |= {"url": bench.tools.tool_url(bench.unique("pay-2")), "version": "2"}
    del catalog["gone"]
    catalog["fresh"] = catalog["pay"] | {"url": bench.tools.tool_url(bench.unique("fresh"))}
    return replace(bench, folder=folder, catalog=catalog, ledger=bench.ledger_url)


async def _handed_over(bench: Bench, run: Run) -> bool:
    """Waits for the end of a run whose tool only one of two workers knows: done, or handed over after six times at the
    other one, which has no policy for a tool that it does not know."""

    async def ended() -> str | None:
        status = (await bench.status(run)).status
        return status if status in ("SUCCEEDED", "BLOCKED") else None

    if await eventually(ended, "the run to be done, or to wait for a person", within=300) == "SUCCEEDED":
        return False
    error = (await bench.parked(run, "call")).error
    assert (error.category, error.code) == ("TRANSIENT", "tool_missing")
    return True


async def test_beside_a_changed_catalog_each_operation_goes_to_the_version_it_began_with(
    bench: Bench, tmp_path: Path
) -> None:
    gate = bench.unique("gate")
    # As many repetitions as it takes: a delivery that the wrong worker has taken comes back as a TRANSIENT failure.
    retry = {
        category: {"initial": "20ms", "maximum": "100ms", "attempts": 100} for category in ("TRANSIENT", "RATE_LIMITED")
    }
    for name in ("pay", "gone"):
        steps: list[dict[str, Any]] = [{"status": 429, "gate": gate}] * _BEGUN
        await bench.tool(name, [*steps, {}], timeout="60s", retry=retry)
    new = _with_new_catalog(bench, tmp_path / "new")
    fingerprints = {
        name: load_catalog(one.write()).tools["pay"].fingerprint for name, one in (("pay", bench), ("pay-2", new))
    }
    async with WorkerProcess.start(bench, program=_WORKER) as old:
        paid = [await bench.start({"id": "call", "tool": "pay"}) for _ in range(_BEGUN)]
        gone = [await bench.start({"id": "call", "tool": "gone"}) for _ in range(_BEGUN)]
        for name in ("pay", "gone"):
            await bench.tools.wait_for(bench.unique(name), calls=_BEGUN, timeout=60)
        async with WorkerProcess.start(new, program=_WORKER):
            await bench.tools.open_gate(gate)
            later = [await bench.start({"id": "call", "tool": "pay"}) for _ in range(2 * _BEGUN)]
            await asyncio.gather(*(run.result() for run in [*paid, *later]))
            handed_over = {_key(run, "call") for run in gone if await _handed_over(bench, run)}
            old.terminate()
            assert await old.exit_code() == 0, old.log
            last = await bench.start({"id": "call", "tool": "pay"}, {"id": "fresh", "tool": "fresh"})
            assert (await last.result())["counts"] == {"SUCCEEDED": 2}
    effects = {
        name: [effect.key for effect in await bench.tools.effects(bench.unique(name))]
        for name in ("pay", "pay-2", "gone", "fresh")
    }
    calls = {
        name: Counter(call.key for call in await bench.tools.calls(bench.unique(name)))
        for name in ("pay", "pay-2", "gone", "fresh")
    }
    for name, runs in (("pay", paid), ("gone", gone)):
        keys = {_key(run, "call") for run in runs} - handed_over
        assert keys <= set(effects[name])
        assert {calls[name][key] for key in keys} <= {2}  # turned away once, and then performed
    assert {calls["gone"][key] for key in handed_over} <= {1}
    # What was admitted later went where its admission said, once, whichever worker called it.
    views = dict(
        zip([_key(run, "call") for run in [*later, last]], await _views(bench, [*later, last], "call"), strict=True)
    )
    assert fingerprints["pay"] != fingerprints["pay-2"]
    for key, view in views.items():
        (at,) = [name for name, fingerprint in fingerprints.items() if fingerprint == view.fingerprint]
        assert {name: calls[name][key] for name in fingerprints} == {name: int(name == at) for name in fingerprints}
    assert _key(last, "call") in effects["pay-2"]
    everything = [key for name in effects for key in effects[name]]
    assert len(everything) == len(set(everything)) == 4 * _BEGUN + 2 - len(handed_over)
    # The refusals of the wrong worker are listed, and say that nothing was sent.
    for view in await _views(bench, [*paid, *gone, *later], "call"):
        for attempt in view.attempts[:-1]:
            assert (attempt.code, attempt.side_effect) in [
                ("http_429", "NONE"),
                ("tool_changed", "NONE"),
                ("tool_missing", "NONE"),
            ]


async def test_what_began_under_a_catalog_that_is_gone_waits_for_a_person(bench: Bench, tmp_path: Path) -> None:
    gate = bench.unique("gate")
    retry = {
        category: {"initial": "20ms", "maximum": "100ms", "attempts": 3} for category in ("TRANSIENT", "RATE_LIMITED")
    }
    for name in ("pay", "gone"):
        await bench.tool(
            name, [{"status": 429, "gate": gate, "headers": {"retry-after": "1"}}, {}], timeout="60s", retry=retry
        )
    new = _with_new_catalog(bench, tmp_path / "new")
    async with WorkerProcess.start(bench, program=_WORKER) as old:
        runs = {name: await bench.start({"id": "call", "tool": name}) for name in ("pay", "gone")}
        for name in runs:
            await bench.tools.wait_for(bench.unique(name), calls=1)
        old.terminate()
        await _stopping(old)
        await bench.tools.open_gate(gate)
        assert await old.exit_code() == 0, old.log
    async with new.worker():
        for name, code, refusal in (("pay", "tool_changed", "TOOL_CHANGED"), ("gone", "tool_missing", "TOOL_MISSING")):
            entry = await bench.parked(runs[name], "call")
            assert (entry.error.category, entry.error.code, entry.side_effect) == ("TRANSIENT", code, "NONE")
            assert entry.eligibility.refusals == [refusal]
            record = await bench.decide(runs[name], "call", "redrive")
            assert (record.outcome, record.refusals) == ("REFUSED", [refusal])
        assert not await bench.tools.calls(bench.unique("pay-2"))
        record = await bench.decide(runs["pay"], "call", "redrive", override=["TOOL_CHANGED"])
        assert record.outcome == "ACCEPTED"
        assert (await runs["pay"].result())["status"] == "SUCCEEDED"
        (call,) = await bench.tools.calls(bench.unique("pay-2"))
        assert call.key == _key(runs["pay"], "call")
        for name in runs:
            assert len(await bench.tools.calls(bench.unique(name))) == 1
    # The catalog that knows the tool is back: so is the way on.
    async with bench.worker():

        async def redrivable() -> bool:
            await bench.dead_letter(runs["gone"], "call").signal("check", {})
            return (await bench.entry(runs["gone"], "call")).eligibility.redrivable

        await eventually(redrivable, "the entry to be redrivable")
        assert (await bench.decide(runs["gone"], "call", "redrive")).outcome == "ACCEPTED"
        assert (await runs["gone"].result())["status"] == "SUCCEEDED"
    assert (await operation(bench, runs["gone"], "call")).state is OperationState.SUCCEEDED
    assert len(await bench.tools.effects(bench.unique("gone"))) == 1
