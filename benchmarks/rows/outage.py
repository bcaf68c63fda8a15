"""A tool that is down while very many nodes wait for it, and then comes back: is it flooded?"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from temporalio.client import WorkflowHandle

from benchmarks.contenders.redrive import node, redrive
from benchmarks.lab import Lab
from benchmarks.measuring import Ratio, Row, Series, Target

__all__ = ["busiest", "outage"]

_A_RUN = 1_000
"""As many nodes as a run may have waiting at once."""
_WITHIN = Target(most=1.1)
"""Calls that were sent on time still arrive with some jitter."""
_WAITING = "WorkflowType = 'Node' AND ExecutionStatus = 'Running'"
_RETRY = {"DEPENDENCY_DOWN": {"initial": "1s", "maximum": "5s", "attempts": 1000}}
"""Minutes become seconds: by default it waits from 5 s to 10 min."""


async def outage(lab: Lab) -> Row:
    """The tool answers 503 until every node waits for it and the time is over, then as it should."""
    nodes, rate = lab.sizes.waiting_nodes, lab.sizes.rate
    fragile = {"url": lab.tools.url("fragile"), "rate_per_second": rate, "retry": _RETRY}
    async with redrive(lab, max_parallel=min(nodes, _A_RUN), tool=fragile) as engine:
        async with lab.exactly(nodes):
            await lab.tools.stop_serving()
            began = time.monotonic()
            batches = [min(_A_RUN, nodes - first) for first in range(0, nodes, _A_RUN)]
            runs = [await engine.start([node(number, "other") for number in range(size)]) for size in batches]
            await engine.counted(_WAITING, nodes)
            await asyncio.sleep(max(0.0, lab.sizes.down_seconds - (time.monotonic() - began)))
            back = time.monotonic()
            await lab.tools.serve_again()
            await engine.worker.during(_results(runs))
            ended = time.monotonic()
        report = await lab.tools.report()
    second, ten_seconds = busiest(report.arrivals, 1), busiest(report.arrivals, 10)
    return Row(
        title=f"{nodes:,} nodes wait for a tool that is down for {back - began:.0f} s; it allows {rate:g} calls/s",
        series=[
            Series(label="calls while it was down", unit="calls/s", values=[(report.calls - nodes) / (back - began)]),
            Series(label="the busiest second", unit="calls/s", values=[second]),
            Series(label="the busiest ten seconds", unit="calls/s", values=[ten_seconds]),
            Series(label="effects once it was back", unit="calls/s", values=[nodes / (ended - back)]),
        ],
        ratios=[
            Ratio(label="the busiest second / what it allows", values=[second / rate], target=_WITHIN),
            Ratio(label="the busiest ten seconds / what it allows", values=[ten_seconds / rate], target=_WITHIN),
            Ratio(label="effects once it was back / what it allows", values=[nodes / (ended - back) / rate]),
        ],
    )


async def _results(runs: Sequence[WorkflowHandle[Any, Any]]) -> None:
    await asyncio.gather(*(run.result() for run in runs))


def busiest(arrivals: Sequence[float], seconds: float) -> float:
    """The most calls a second over any span of so many seconds, wherever it begins."""
    most = 0
    window: deque[float] = deque()
    for arrival in sorted(arrivals):
        window.append(arrival)
        while window[0] <= arrival - seconds:
            window.popleft()
        most = max(most, len(window))
    return most / seconds
