"""A long run: does it slow down, do histories and memory stay bounded?"""

import asyncio
from collections.abc import Sequence

from temporalio.client import Client

from benchmarks.contenders.redrive import Mode, Redrive, node, redrive
from benchmarks.lab import Lab
from benchmarks.measuring import Ratio, Row, Series, Target
from benchmarks.processes import usage

__all__ = ["long_run"]


async def long_run(lab: Lab) -> Row:
    """One run of very many nodes, in both modes."""
    row = Row(title=f"A run of {lab.sizes.long_nodes:,} nodes")
    for mode in ("workflow", "fast"):
        async with redrive(lab, mode) as engine:
            await _measure(lab, engine, mode, row)
    return row


async def _measure(lab: Lab, engine: Redrive, mode: Mode, row: Row) -> None:
    nodes = lab.sizes.long_nodes
    memory: list[tuple[float, float]] = []
    loop = asyncio.get_running_loop()

    async def weigh() -> None:
        while True:
            memory.append((loop.time(), usage(engine.worker.pid).memory_mb))
            await asyncio.sleep(1)

    weighing = asyncio.create_task(weigh())
    async with lab.exactly(nodes):
        run = await engine.perform([node(number) for number in range(nodes)])
    weighing.cancel()
    # The loop's clock is the machine's monotonic one, as the tool server's is.
    done = sorted((await lab.tools.report()).done)
    fifths = [_rate(done[index * nodes // 5 : (index + 1) * nodes // 5]) for index in range(5)]
    settled = [megabytes for at, megabytes in memory if at >= done[nodes // 5]] or [memory[-1][1]]
    events = await _events(engine.client, run.id)
    row.series += [
        Series(label=f"{mode}: whole run", unit="nodes/s", values=[_rate(done)]),
        Series(label=f"{mode}: first fifth", unit="nodes/s", values=[fifths[0]]),
        Series(label=f"{mode}: last fifth", unit="nodes/s", values=[fifths[-1]]),
        Series(label=f"{mode}: worker memory at the end", unit="MB", values=[settled[-1]]),
    ]
    row.ratios += [
        Ratio(label=f"{mode}: last fifth / first", values=[fifths[-1] / fifths[0]], target=Target(least=0.85)),
        Ratio(label=f"{mode}: events of the longest history", values=[max(events)], target=Target(most=10_000)),
        Ratio(
            label=f"{mode}: worker memory, growth since the first fifth",
            values=[max(settled) - settled[0]],
            unit="MB",
            target=Target(most=50),
        ),
    ]
    row.notes.append(f"{mode}: the run took {len(events)} executions")


def _rate(times: Sequence[float]) -> float:
    return (len(times) - 1) / (times[-1] - times[0])


async def _events(client: Client, run_id: str) -> list[int]:
    """The events of each execution of a run; asked again until the list knows all of them."""
    while True:
        found = [execution async for execution in client.list_workflows(f'WorkflowId = "{run_id}"')]
        if found and all(execution.close_time is not None for execution in found):
            return [execution.history_length for execution in found]
        await asyncio.sleep(0.2)
