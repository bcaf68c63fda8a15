"""Very many dead letters that wait for people: what they hold, how soon they are listed, whom they slow down."""

import asyncio
import statistics
import sys
import time

from benchmarks.contenders.redrive import Redrive, node, redrive
from benchmarks.lab import Lab
from benchmarks.measuring import Ratio, Row, Series, Target
from benchmarks.processes import program, usage
from workers.dead_letters import Filter, list_dead_letters

__all__ = ["parked"]

_A_RUN = 1_000
"""As many nodes as a run may have waiting at once: the next run starts when all of them have their dead letter."""
_FLAT_MB = 50
_PAGE = 100
_LISTS = 5
_WAITING = "WorkflowType = 'DeadLetter' AND ExecutionStatus = 'Running'"
_QUIET = 0.1
"""Cores; below it nothing of the parking is going on any more."""


async def parked(lab: Lab) -> Row:
    """Nodes that a tool refuses for good, a run at a time: a workflow each for the node and for its dead letter."""
    count = lab.sizes.parked
    refused = {"url": lab.tools.url("forbidden")}
    async with redrive(lab, max_parallel=min(count, _A_RUN), tool=refused) as engine:
        idle = await _latency(lab, engine)
        empty = usage(engine.worker.pid).memory_mb
        before = engine.cpu_seconds()
        paces: list[float] = []
        memories: list[float] = []
        for first in range(0, count, _A_RUN):
            size = min(_A_RUN, count - first)
            began = time.monotonic()
            await engine.start([node(number, "other") for number in range(size)])
            await engine.counted(_WAITING, first + size)
            paces.append(size / (time.monotonic() - began))
            memories.append(usage(engine.worker.pid).memory_mb)
        await _quiet(engine)
        cpu = {part: (spent - before[part]) / count * 1000 for part, spent in engine.cpu_seconds().items()}
        beside = await _latency(lab, engine)
        worker, server = usage(engine.worker.pid).memory_mb, usage(engine.server.pid).memory_mb
        page, command = await _first_page(lab, engine)
    return Row(
        title=f"{count:,} dead letters that wait",
        series=[
            Series(label="a node of a run beside them, p50", unit="ms", values=[beside]),
            Series(label="the same without them, p50", unit="ms", values=[idle]),
            Series(label="redrive dlq list, as a command", unit="ms", values=[command]),
            Series(label="worker memory", unit="MB", values=[worker]),
            Series(label="worker memory without them", unit="MB", values=[empty]),
            Series(label="server memory", unit="MB", values=[server]),
            Series(label="how fast they came", unit="dead letters/s", values=paces, cpu_ms=cpu),
        ],
        ratios=[
            Ratio(label="one node beside them / without them", values=[beside / idle], target=Target(most=1.3)),
            Ratio(label=f"first page of {_PAGE} in the list", values=[page], unit="ms", target=Target(most=1_000)),
            Ratio(
                label=f"worker memory, growth since the first {_A_RUN:,}",
                values=[worker - memories[0]],
                unit="MB",
                target=Target(most=_FLAT_MB),
            ),
        ],
    )


async def _latency(lab: Lab, engine: Redrive) -> float:
    taken: list[float] = []
    for _ in range(lab.sizes.latencies):
        began = time.monotonic()
        await engine.run(1)
        taken.append((time.monotonic() - began) * 1000)
    return statistics.median(taken)


async def _quiet(engine: Redrive) -> None:
    """Until worker and server have nothing left to do."""
    busy = 1.0
    while busy > _QUIET:
        before = sum(engine.cpu_seconds().values())
        await asyncio.sleep(2)
        busy = (sum(engine.cpu_seconds().values()) - before) / 2


async def _first_page(lab: Lab, engine: Redrive) -> tuple[float, float]:
    """Milliseconds of the list, and of the whole command with its start; medians."""
    lists: list[float] = []
    commands: list[float] = []
    for _ in range(_LISTS):
        began = time.monotonic()
        rows, _ = await list_dead_letters(engine.client, Filter(), _PAGE)
        lists.append((time.monotonic() - began) * 1000)
        assert rows
        began = time.monotonic()
        command = (sys.executable, "-m", "cli.main", "dlq", "list", "--limit", str(_PAGE))
        log = lab.folder("list") / "log"
        async with program(*command, log=log, environment=engine.environment) as listing:
            await listing.done()
        commands.append((time.monotonic() - began) * 1000)
    return statistics.median(lists), statistics.median(commands)
