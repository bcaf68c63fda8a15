"""Workers that are killed, or freeze, at the worst moments: one effect, and the run goes on.

Each scenario waits for Temporal to notice a lost worker; so all of them run at once, and each test waits for its own.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.client import WorkflowHandle

from activities.ledger.records import OperationState, OperationView
from contracts.dead_letters import Entry
from contracts.dispatch import NodeEnd
from tests.faults.lookup import node_result, operation, pending_call
from tests.lab import NODE_MODES, Bench
from tests.tool_server import Call, ToolServer
from tests.waiting import eventually
from tests.worker_process import WorkerProcess
from workers.embedded import EmbeddedServer

pytestmark = pytest.mark.timeout(300)  # the first test waits for most of it, and a busy machine takes its time

_NOTICED = timedelta(seconds=15)
"""The heartbeat timeout."""
_SECONDS = timedelta(seconds=30)
"""What a busy machine may add to it."""


@dataclass(frozen=True)
class Ending:
    """What became of one run with one node, `call`."""

    result: Any
    node: Any
    calls: list[Call]
    effects: int
    view: OperationView
    entry: Entry | None = None

    @property
    def one_key(self) -> bool:
        return {call.key for call in self.calls} == {self.node["idempotency_key"]}


async def _ending(bench: Bench, run: WorkflowHandle[Any, Any], tool: str, entry: Entry | None = None) -> Ending:
    result = await run.result()
    return Ending(
        result=result,
        node=await node_result(bench, run, "call"),
        calls=await bench.tools.calls(bench.unique(tool)),
        effects=len(await bench.tools.effects(bench.unique(tool))),
        view=await operation(bench, run, "call"),
        entry=entry,
    )


async def _start(bench: Bench, tool: str) -> WorkflowHandle[Any, Any]:
    return await bench.start({"id": "call", "tool": tool, "input": {"amount": 1}})


async def _killed_in_mid_call(bench: Bench) -> dict[str, Ending]:
    """Tools that have acted (but `absent`), and a worker that is killed before it hears of it, or before it tells."""
    stuck, silent = {"gate": bench.unique("never")}, {"gate": bench.unique("never"), "commit": False}
    await bench.tool("key", [stuck, {}], dedupe=True, idempotency="key", timeout="60s")
    await bench.tool("asked", [stuck], reconcile=True, timeout="60s")
    await bench.tool("blind", [stuck], timeout="60s")
    await bench.tool("read", [silent, {"commit": False}], effect="read", timeout="60s")
    await bench.tool("answered", [{}])
    # Its timeout is part of the horizon, which is waited for; so it is called last.
    await bench.tool("absent", [silent, {}], reconcile=True, timeout="20s")
    runs: dict[str, WorkflowHandle[Any, Any]] = {}
    async with WorkerProcess.start(bench, hold_acks=True) as worker:
        for name in bench.catalog:
            runs[name] = await _start(bench, name)
            await bench.tools.wait_for(bench.unique(name), calls=1)

            async def committed() -> bool | None:
                return (await operation(bench, runs["answered"], "call")).state is OperationState.SUCCEEDED

            if name == "answered":
                await eventually(committed, "the ledger to have the result")
        await worker.kill()
    async with bench.worker():
        entry = await bench.parked(runs["blind"], "call")
        assert entry.eligibility.refusals == ["SIDE_EFFECT_UNRESOLVED"]
        await bench.decide(runs["blind"], "call", "resolve", output={"id": "looked it up"})
        return {name: await _ending(bench, run, name, entry if name == "blind" else None) for name, run in runs.items()}


async def _killed_before_the_dispatch(bench: Bench) -> Ending:
    """The node is ready and its activity scheduled; nobody was ever told."""
    await bench.tool("blind", [{}])
    async with WorkerProcess.start(bench, only_workflows=True) as worker:
        run = await _start(bench, "blind")

        async def ready() -> bool | None:
            return await pending_call(bench, run, "call") is not None

        await eventually(ready, "the dispatch")
        await worker.kill()
    call = await pending_call(bench, run, "call")
    assert call is not None
    assert call.state == PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED
    assert not await bench.tools.calls(bench.unique("blind"))
    async with bench.worker():
        return await _ending(bench, run, "blind")


async def _killed_every_time(bench: Bench) -> Ending:
    """A tool that takes its worker down whenever it is called, until a person has seen to it."""
    gate = bench.unique("mended")
    retry = {"TRANSIENT": {"attempts": 2}}
    await bench.tool("deadly", [{"gate": gate}], dedupe=True, idempotency="key", timeout="60s", retry=retry)
    run: WorkflowHandle[Any, Any] | None = None
    for crash in (1, 2):
        async with WorkerProcess.start(bench) as worker:
            run = run or await _start(bench, "deadly")
            await bench.tools.wait_for(bench.unique("deadly"), calls=crash, timeout=60)
            await worker.kill()
    assert run is not None
    async with bench.worker():
        entry = await bench.parked(run, "call")
        assert len(await bench.tools.calls(bench.unique("deadly"))) == 2
        await bench.tools.open_gate(gate)
        await bench.decide(run, "call", "redrive")
        return await _ending(bench, run, "deadly", entry)


async def _frozen_in_mid_call(bench: Bench) -> dict[str, Ending]:
    """A worker that sleeps past its leases while another takes over, and then brings its answers.

    For `key` it finds its successor in mid-call, for `blind`, which cannot be called again, a dead letter.
    """
    first, second, late = bench.unique("first"), bench.unique("second"), bench.unique("late")
    await bench.tool("key", [{"gate": first}, {"gate": second}], dedupe=True, idempotency="key", timeout="60s")
    await bench.tool("blind", [{"gate": late}], timeout="60s")
    async with WorkerProcess.start(bench, slots=2) as frozen:
        runs = {name: await _start(bench, name) for name in bench.catalog}
        for name in bench.catalog:
            await bench.tools.wait_for(bench.unique(name), calls=1)
        await frozen.freeze()
        async with bench.worker():
            await bench.tools.wait_for(bench.unique("key"), calls=2, timeout=60)

            async def given_up() -> bool | None:
                return await pending_call(bench, runs["blind"], "call") is None

            await eventually(given_up, "the call of `blind` to be given up")
            frozen.resume()
            entry = await bench.parked(runs["blind"], "call")

            async def came_back() -> bool | None:
                views = [await operation(bench, run, "call") for run in runs.values()]
                return all(view.attempts[0].ended_at is not None for view in views)

            await bench.tools.open_gate(first)
            await bench.tools.open_gate(late)
            await eventually(came_back, "the late answers")
            assert (await operation(bench, runs["key"], "call")).state is OperationState.IN_FLIGHT
            await bench.tools.open_gate(second)
            await bench.dead_letter(runs["blind"], "call").signal(
                "resolve", {"decided_by": "tester", "reason": "seen at the tool", "output": {"id": "seen"}}
            )
            endings = {"key": await _ending(bench, runs["key"], "key")}
            with contextlib.suppress(TimeoutError):  # its own test says what is missing then
                async with asyncio.timeout(20):
                    endings["blind"] = await _ending(bench, runs["blind"], "blind", entry)
            return endings


@dataclass(frozen=True)
class Scenarios:
    killed_in_mid_call: asyncio.Task[dict[str, Ending]]
    killed_before_the_dispatch: asyncio.Task[Ending]
    killed_every_time: asyncio.Task[Ending]
    frozen_in_mid_call: asyncio.Task[dict[str, Ending]]


@pytest.fixture(scope="module", params=NODE_MODES)
async def scenarios(
    temporal: EmbeddedServer,
    tool_server: ToolServer,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> AsyncIterator[Scenarios]:
    """Every scenario, under way."""
    mode: str = request.param

    def bench(scenario: str) -> Bench:
        name = f"{mode}-{scenario}"
        return Bench(temporal.client, tool_server, tmp_path_factory.mktemp(name), name, node_mode=mode)

    begin = asyncio.create_task
    scenarios = Scenarios(
        killed_in_mid_call=begin(_killed_in_mid_call(bench("killed"))),
        killed_before_the_dispatch=begin(_killed_before_the_dispatch(bench("killed-early"))),
        killed_every_time=begin(_killed_every_time(bench("killed-always"))),
        frozen_in_mid_call=begin(_frozen_in_mid_call(bench("frozen"))),
    )
    tasks: list[asyncio.Task[Any]] = list(vars(scenarios).values())
    yield scenarios
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_tool_that_dedupes_is_called_again_with_the_key_of_the_lost_call(scenarios: Scenarios) -> None:
    ending = (await scenarios.killed_in_mid_call)["key"]
    assert ending.effects == 1
    assert len(ending.calls) == 2
    assert ending.one_key
    assert (ending.node["source"], ending.node["attempt_count"]) == ("EXECUTED", 2)
    assert ending.result["outputs"]["call"]["key"] == ending.node["idempotency_key"]


async def test_a_lost_worker_is_noticed_within_the_heartbeat_timeout_and_seconds(scenarios: Scenarios) -> None:
    ending = (await scenarios.killed_in_mid_call)["key"]
    lost, again = ending.view.attempts
    assert again.started_at - lost.started_at < _NOTICED + _SECONDS


async def test_the_attempt_of_a_killed_worker_is_listed_as_lost(scenarios: Scenarios) -> None:
    ending = (await scenarios.killed_in_mid_call)["key"]
    lost, again = ending.view.attempts
    assert (lost.ended_at, lost.category, lost.code, lost.side_effect) == (None, "TRANSIENT", "worker_lost", "POSSIBLE")
    assert lost.worker != again.worker
    assert (again.category, again.side_effect) == (None, "CONFIRMED")
    assert again.ended_at is not None
    assert ending.view.side_effect == "NONE"


async def test_a_tool_that_can_be_asked_is_asked_and_not_called_again(scenarios: Scenarios) -> None:
    ending = (await scenarios.killed_in_mid_call)["asked"]
    assert (ending.effects, len(ending.calls)) == (1, 1)
    assert ending.node["source"] == "RECONCILED"
    assert ending.result["outputs"]["call"]["key"] == ending.node["idempotency_key"]


async def test_a_tool_that_says_it_did_nothing_is_called_again(scenarios: Scenarios) -> None:
    ending = (await scenarios.killed_in_mid_call)["absent"]
    assert (ending.effects, len(ending.calls)) == (1, 2)
    assert ending.one_key
    assert (ending.node["source"], ending.node["attempt_count"]) == ("EXECUTED", 2)


async def test_a_tool_that_only_reads_is_called_again(scenarios: Scenarios) -> None:
    ending = (await scenarios.killed_in_mid_call)["read"]
    assert len(ending.calls) == 2
    assert (ending.node["source"], ending.node["attempt_count"]) == ("EXECUTED", 2)


async def test_a_tool_that_can_neither_dedupe_nor_be_asked_waits_for_a_person(scenarios: Scenarios) -> None:
    ending = (await scenarios.killed_in_mid_call)["blind"]
    assert (ending.effects, len(ending.calls)) == (1, 1)
    assert ending.entry is not None
    assert (ending.entry.error.category, ending.entry.error.code) == ("UNKNOWN_SIDE_EFFECT", "worker_lost")
    assert ending.entry.side_effect == "POSSIBLE"
    assert [(attempt.code, attempt.ended_at) for attempt in ending.entry.attempts] == [("worker_lost", None)]
    assert ending.node["source"] == "RESOLVED"
    assert ending.result["outputs"] == {"call": {"id": "looked it up"}}


async def test_what_was_committed_but_never_told_is_answered_by_the_ledger(scenarios: Scenarios) -> None:
    ending = (await scenarios.killed_in_mid_call)["answered"]
    assert (ending.effects, len(ending.calls)) == (1, 1)
    assert (ending.node["source"], ending.node["attempt_count"]) == ("REPLAYED", 1)
    assert ending.result["outputs"]["call"]["key"] == ending.node["idempotency_key"]


async def test_what_was_ready_but_never_dispatched_is_dispatched_in_the_end(scenarios: Scenarios) -> None:
    ending = await scenarios.killed_before_the_dispatch
    assert (ending.effects, len(ending.calls)) == (1, 1)
    assert (ending.node["source"], ending.node["attempt_count"]) == ("EXECUTED", 1)


async def test_a_tool_that_kills_its_worker_every_time_ends_as_a_dead_letter(scenarios: Scenarios) -> None:
    entry = (await scenarios.killed_every_time).entry
    assert entry is not None
    assert (entry.error.category, entry.error.code, entry.side_effect) == ("TRANSIENT", "worker_lost", "POSSIBLE")
    assert [(attempt.attempt, attempt.code, attempt.category) for attempt in entry.attempts] == [
        (1, "worker_lost", "TRANSIENT"),
        (2, "worker_lost", "TRANSIENT"),
    ]
    assert len({attempt.worker for attempt in entry.attempts}) == 2
    assert entry.first_failed_at <= entry.last_failed_at <= datetime.now(UTC)


async def test_a_tool_that_killed_its_workers_succeeds_once_it_is_mended_and_redriven(scenarios: Scenarios) -> None:
    ending = await scenarios.killed_every_time
    assert (ending.effects, len(ending.calls)) == (1, 3)
    assert ending.one_key
    assert (ending.node["source"], ending.node["attempt_count"]) == ("EXECUTED", 3)


async def test_the_late_answer_of_a_frozen_worker_changes_nothing_and_says_so(scenarios: Scenarios) -> None:
    ending = (await scenarios.frozen_in_mid_call)["key"]
    late, current = ending.view.attempts
    assert (late.code, late.side_effect) == ("fenced", "POSSIBLE")
    assert late.ended_at is not None
    assert current.ended_at is not None
    assert late.ended_at < current.ended_at
    assert (current.category, current.side_effect) == (None, "CONFIRMED")
    assert (ending.view.state, ending.view.epoch) == ("SUCCEEDED", 2)


async def test_a_frozen_worker_and_its_successor_have_one_effect_under_one_key(scenarios: Scenarios) -> None:
    ending = (await scenarios.frozen_in_mid_call)["key"]
    assert (ending.effects, len(ending.calls)) == (1, 2)
    assert ending.one_key
    assert (ending.node["source"], ending.node["attempt_count"]) == ("EXECUTED", 2)


async def test_an_answer_that_comes_while_a_person_is_asked_leaves_no_run_waiting(scenarios: Scenarios) -> None:
    endings = await scenarios.frozen_in_mid_call
    assert "blind" in endings, "the run still waits, after its call's answer and a person's decision"
    ending = endings["blind"]
    assert ending.entry is not None
    assert (ending.entry.error.category, ending.entry.side_effect) == ("UNKNOWN_SIDE_EFFECT", "POSSIBLE")
    assert (ending.effects, len(ending.calls)) == (1, 1)
    assert ending.result["status"] == "SUCCEEDED"
    assert ending.view.node_end in (NodeEnd.SUCCEEDED, NodeEnd.RESOLVED)
