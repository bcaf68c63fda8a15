"""Wall clocks that are wrong, that differ, and that jump: nothing that matters is told by them.

Leases, horizons, floors and windows run by the ledger's own clock, deadlines by Temporal's, and what a worker measures
itself, by one that does not jump. Each is compared with itself alone.
"""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any, Final

import pytest
from temporalio.client import WorkflowHandle

from tests.faults.deliveries import Consumer, details, dispatch
from tests.faults.lock import locked
from tests.faults.lookup import node_result, operation
from tests.lab import Bench
from tests.postgres import PostgresServer
from tests.tool_server import Call
from tests.waiting import eventually
from tests.worker_process import WorkerProcess

pytestmark = pytest.mark.timeout(240)  # horizons are waited for, and a busy machine takes its time

_HOUR: Final = 3600.0
_DEADLINE: Final = 900
"""Of every node, in seconds: less than the clocks are wrong by."""
_EACH: Final = 4
"""Runs of each tool."""
_files = itertools.count()


@asynccontextmanager
async def _worker(bench: Bench, wrong_by: float) -> AsyncGenerator[tuple[WorkerProcess, Path]]:
    """A worker whose wall clock is wrong by so many seconds, and the file that changes that."""
    shift = bench.folder / f"shift-{next(_files)}"
    _set(shift, wrong_by)
    async with WorkerProcess.start(bench, program=("tests.faults.clock_worker", str(shift))) as worker:
        yield worker, shift


def _set(shift: Path, seconds: float) -> None:
    whole = shift.with_suffix(".new")
    whole.write_text(str(seconds))
    whole.rename(shift)


async def _start(bench: Bench, tool: str) -> WorkflowHandle[Any, Any]:
    return await bench.start({"id": "call", "tool": tool, "input": {"amount": 1}, "deadline_seconds": _DEADLINE})


async def _pairs(bench: Bench, tool: str) -> list[tuple[Call, Call]]:
    """The calls of a tool, each with the next one of the same operation."""
    by_key: defaultdict[str | None, list[Call]] = defaultdict(list)
    for call in await bench.tools.calls(bench.unique(tool)):
        by_key[call.key].append(call)
    return [pair for calls in by_key.values() for pair in itertools.pairwise(calls)]


async def _one_effect_each(bench: Bench, runs: Sequence[WorkflowHandle[Any, Any]], tool: str) -> None:
    keys = [effect.key for effect in await bench.tools.effects(bench.unique(tool))]
    nodes = [await node_result(bench, run, "call") for run in runs]
    assert sorted(str(key) for key in keys) == sorted(node["idempotency_key"] for node in nodes)


async def _busy(bench: Bench, tool: str, run: WorkflowHandle[Any, Any]) -> timedelta:
    """How long a delivery to a worker whose clock is right is told to wait for the operation."""
    async with Consumer.of(bench) as consumer:
        error = await consumer.refused(
            dispatch(bench, tool, run.id), scheduled=datetime.now(UTC) + timedelta(seconds=1)
        )
    assert details(error).code == "busy"
    assert error.next_retry_delay is not None
    return error.next_retry_delay


def _date(after: float = 0) -> str:
    return format_datetime(datetime.now(UTC) + timedelta(seconds=after), usegmt=True)


async def test_workers_whose_clocks_differ_by_hours_agree_on_leases_horizons_floors_windows_and_deadlines(
    bench: Bench, postgres: PostgresServer
) -> None:
    bench.ledger = postgres.url(await postgres.database())
    await bench.tool("blind", [{"delay": 0.2}])
    await bench.tool("held", [{"gate": bench.unique("gate")}], timeout="10m")
    await bench.tool("limited", [{"status": 429, "headers": {"retry-after": "4"}}] * _EACH + [{}])
    dated = {"date": _date(), "retry-after": _date(5)}
    await bench.tool("dated", [{"status": 503, "headers": dated}] * _EACH + [{}])
    # It has acted, and says nothing: until the window is over the key may be sent again.
    acted: list[dict[str, Any]] = [{"fault": "hang"}] * _EACH
    await bench.tool("key", [*acted, {}], dedupe=True, idempotency="key", dedupe_window="10m", timeout="2s")
    lost: list[dict[str, Any]] = [{"fault": "hang", "commit": False}] * _EACH
    await bench.tool("lost", [*lost, {}], reconcile={"absent_after": "4s"}, timeout="2s")
    async with _worker(bench, _HOUR), _worker(bench, -_HOUR):
        runs = {tool: [await _start(bench, tool) for _ in range(_EACH)] for tool in bench.catalog}
        await bench.tools.wait_for(bench.unique("held"), calls=_EACH)
        waits = [await _busy(bench, "held", run) for run in runs["held"]]
        # Not longer because one clock is ahead, and they are there although another is behind.
        assert all(timedelta(0) < wait <= timedelta(seconds=30) for wait in waits)
        await bench.tools.open_gate(bench.unique("gate"))
        async with asyncio.timeout(120):
            await asyncio.gather(*(run.result() for one in runs.values() for run in one))
    for tool in bench.catalog:
        await _one_effect_each(bench, runs[tool], tool)
    for tool, apart in (("limited", 4), ("dated", 5), ("lost", 6)):
        pairs = await _pairs(bench, tool)
        assert len(pairs) == _EACH
        assert min(second.at - first.at for first, second in pairs) >= timedelta(seconds=apart), tool
    assert len(await _pairs(bench, "key")) == _EACH


@pytest.mark.parametrize("jump", [_HOUR, -_HOUR])
async def test_a_clock_that_jumps_ends_no_lease_no_wait_and_no_call(bench: Bench, jump: float) -> None:
    for name in ("held", "kept"):
        await bench.tool(name, [{"gate": bench.unique(name)}], timeout="10m")
    await bench.tool("limited", [{"status": 429, "headers": {"retry-after": "4"}}, {}])
    await bench.tool("left-alone", [{"status": 429, "headers": {"retry-after": "600"}}, {}])
    lost = {"fault": "hang", "commit": False}
    await bench.tool("lost", [lost, {}], reconcile={"absent_after": "6s"}, timeout="2s")
    async with _worker(bench, 0) as (worker, shift):
        runs = {tool: await _start(bench, tool) for tool in bench.catalog}
        for name in bench.catalog:
            await bench.tools.wait_for(bench.unique(name), calls=1)

        async def noted() -> bool:
            views = [await operation(bench, runs[name], "call") for name in ("limited", "left-alone")]
            return all(view.attempts[0].ended_at is not None for view in views)

        await eventually(noted, "the rejections to be noted")
        await bench.tools.wait_for(bench.unique("lost"), reconcile_calls=1)
        _set(shift, jump)
        # In mid-call, and as nobody else may.
        assert await _busy(bench, "held", runs["held"]) <= timedelta(seconds=30)
        async with locked(bench.folder / "ledger.db"):
            await bench.tools.open_gate(bench.unique("kept"))
            await eventually(lambda: "is kept" in worker.log, "the answer to be kept")
        async with asyncio.timeout(60):
            await asyncio.gather(*(runs[name].result() for name in ("kept", "limited", "lost")))
        await bench.tools.open_gate(bench.unique("held"))
        await runs["held"].result()
        for name in ("held", "kept"):
            view = await operation(bench, runs[name], "call")
            assert (view.state, view.epoch, len(view.attempts)) == ("SUCCEEDED", 1, 1)
        # A floor that was noted before the jump, asked for after it.
        wait = await _busy(bench, "left-alone", runs["left-alone"])
        assert timedelta(seconds=400) < wait <= timedelta(seconds=600)
        await runs["left-alone"].cancel()
        for name in ("held", "kept", "limited", "lost"):
            await _one_effect_each(bench, [runs[name]], name)
        for name, apart in (("limited", 4), ("lost", 8)):
            ((first, second),) = await _pairs(bench, name)
            assert second.at - first.at >= timedelta(seconds=apart), name
