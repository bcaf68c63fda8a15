"""Deep and dense graphs: do they complete, and what does deciding which node is next cost?"""

import random
import time
from collections.abc import Sequence

from benchmarks.contenders.redrive import Node, node, redrive
from benchmarks.lab import Lab
from benchmarks.measuring import Ratio, Row, Series, Target
from benchmarks.processes import usage
from contracts.runs import NodeSpec, NodeState, NodeStatus
from workflows.graph import Graph

__all__ = ["graphs"]


async def graphs(lab: Lab) -> Row:
    """A chain, and a graph with ten edges a node."""
    chain = _chain(lab.sizes.chain_nodes)
    dense = _dense(lab.sizes.graph_nodes, lab.sizes.graph_edges)
    row = Row(title="Deep and dense graphs, fast mode")
    await _measure(lab, f"chain of {len(chain):,}", chain, row)
    await _measure(lab, f"{len(dense):,} nodes, {lab.sizes.graph_edges:,} edges", dense, row)
    return row


def _chain(nodes: int) -> list[Node]:
    return [node(number, after=[f"n{number - 1}"] if number else []) for number in range(nodes)]


def _dense(nodes: int, edges: int) -> list[Node]:
    """Edges from earlier nodes to later ones, the same in every run: as many for each node as there are on average."""
    chance = random.Random(1)
    upstream: list[list[int]] = []
    taken = 0
    for number in range(nodes):
        # What the first nodes had no room for, the next ones take.
        share = edges * (number + 1) // nodes - taken
        upstream.append(chance.sample(range(number), min(number, share)))
        taken += len(upstream[-1])
    return [node(number, after=[f"n{up}" for up in ups]) for number, ups in enumerate(upstream)]


async def _measure(lab: Lab, label: str, nodes: Sequence[Node], row: Row) -> None:
    async with redrive(lab, "fast") as engine:
        before = usage(engine.worker.pid).cpu_seconds
        began = time.monotonic()
        async with lab.exactly(len(nodes)):
            await engine.perform(nodes)
        took = time.monotonic() - began
        worker = usage(engine.worker.pid).cpu_seconds - before
    scheduling = _scheduling([NodeSpec.model_validate(each) for each in nodes])
    row.series += [
        Series(label=f"{label}: throughput", unit="nodes/s", values=[len(nodes) / took]),
        Series(label=f"{label}: worker CPU", unit="s", values=[worker]),
        Series(label=f"{label}: of it scheduling", unit="s", values=[scheduling]),
    ]
    row.ratios.append(
        Ratio(
            label=f"{label}: scheduling's share of the worker's CPU",
            values=[100 * scheduling / worker],
            unit="%",
            target=Target(most=5),
        )
    )


def _scheduling(nodes: Sequence[NodeSpec]) -> float:
    """The CPU seconds that a run's graph takes when nodes end as soon as they start: the decisions alone."""
    began = time.process_time()
    graph = Graph(nodes)
    while (name := graph.next_ready()) is not None:
        graph.input_of(name)
        graph.start(name, NodeState(status=NodeStatus.RUNNING))
        graph.end(name, NodeState(status=NodeStatus.SUCCEEDED), {"id": 1})
    if not graph.finished:
        raise AssertionError("the graph did not finish")
    return time.process_time() - began
