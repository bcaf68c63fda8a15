"""What an operator may do with the plain `temporal` command: nothing is sent twice, nothing is lost, decisions stay.

Each cell of a matrix has a run of its own: one node in some state, and another one that keeps the run open meanwhile.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from temporalio.client import WorkflowExecutionStatus, WorkflowHandle

from activities.ledger import open_ledger
from contracts.dead_letters import DecisionOutcome
from contracts.identity import OperationId
from tests.integration.temporal_cli import TemporalCli
from tests.lab import Bench
from tests.waiting import eventually

# Each command is a process, and a matrix has many: on a busy machine it takes a while.
pytestmark = pytest.mark.timeout(600)

Run = WorkflowHandle[Any, Any]

GATED = "200s"
"""A tool's timeout where the test decides when it answers."""
HOUR = {"RATE_LIMITED": {"initial": "1h", "maximum": "1h"}}
OK = {"body": {"id": "ok"}}
REFUSED = {"status": 403}
PATIENCE = 120


@dataclass(frozen=True)
class State:
    """Where a node is when the operator comes; how often its tool is then called in all, and how it ends."""

    steps: tuple[dict[str, Any], ...]
    calls: int
    decision: str | None = None
    """What was decided before the operator came."""
    later: str | None = None
    """What is decided afterwards."""
    ends: str = "SUCCEEDED"
    effects: int = 1
    has_dead_letter: bool = False


STATES = {
    "in backoff": State(({"status": 429}, OK), calls=2),
    "in mid-call": State(({"gate": "GATE", **OK},), calls=1),
    "parked": State((REFUSED, OK), calls=2, later="redrive", has_dead_letter=True),
    "resolved": State((REFUSED,), calls=1, decision="resolve", effects=0, has_dead_letter=True),
    "discarded": State((REFUSED,), calls=1, decision="discard", ends="DISCARDED", effects=0, has_dead_letter=True),
    "redriven": State((REFUSED, OK), calls=2, decision="redrive", has_dead_letter=True),
    "done": State((OK,), calls=1),
}
PAYLOADS: dict[str, dict[str, Any]] = {"resolve": {"output": {"id": "by hand"}}}


@dataclass
class Cell:
    """One run, and what is done to it."""

    bench: Bench
    cli: TemporalCli
    name: str
    state: State
    run: Run

    @property
    def gate(self) -> str:
        return f"{self.bench.name}-{self.name}"

    @property
    def node_id(self) -> str:
        return f"{self.run.id}/n"

    @property
    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"id": "n", "tool": self.name, "input": {"amount": 1}, "on_discard": "continue"},
            {"id": "hold", "tool": f"{self.name}.hold", "input": {}},
        ]

    async def prepare(self) -> None:
        """The run as it is when the operator comes."""
        self.run = await self.bench.start(*self.nodes, run_id=self.run.id)
        await self.bench.tools.wait_for(self.bench.unique(self.name), calls=1)
        await self.bench.tools.wait_for(self.bench.unique(f"{self.name}.hold"), calls=1)
        if self.state.has_dead_letter:
            await self.bench.parked(self.run, "n")
        if self.state.decision is not None:
            await self.decide(self.state.decision)
        if self.state.decision is not None or self.state == STATES["done"]:
            await self.node_is(self.state.ends)

    async def node_is(self, status: str) -> None:
        async def so() -> bool:
            return (await self.bench.status(self.run)).nodes["n"].status == status

        await eventually(so, f"the node of {self.name} to be {status}", PATIENCE)

    async def decide(self, action: str) -> None:
        record = await self.bench.decide(
            self.run, "n", action, decision_id=f"{self.name}-{action}", **PAYLOADS.get(action, {})
        )
        assert record.outcome is DecisionOutcome.ACCEPTED, (self.name, record)

    async def finish(self) -> None:
        """What people do when the operator has gone; then everything is as it would have been without him."""
        self.run = self.bench.client.get_workflow_handle(self.run.id)
        if self.state == STATES["in backoff"]:
            await self._call_again()
        if self.state.later is not None:
            await eventually(self._dead_letter_is_open, f"the dead letter of {self.name} to be open", PATIENCE)
            await asyncio.wait_for(self.bench.parked(self.run, "n"), PATIENCE)
            await self.decide(self.state.later)
        await self.bench.tools.open_gate(self.gate)
        async with asyncio.timeout(PATIENCE):
            result = await self.run.result()
        expected: dict[str, int] = {}
        for status in (self.state.ends, "SUCCEEDED"):
            expected[status] = expected.get(status, 0) + 1
        assert result["counts"] == expected, self.name
        await self.check()

    async def _call_again(self) -> None:
        """Does not wait for an hour, if the operator has not brought the next attempt about already."""

        async def called() -> bool:
            if len(await self.bench.tools.calls(self.bench.unique(self.name))) == self.state.calls:
                return True
            await self.cli.run("activity", "reset", "-w", self.node_id, "-a", "call_tool")
            return False

        await eventually(called, f"the second attempt of {self.name}", PATIENCE)

    async def _dead_letter_is_open(self) -> bool:
        # A closed one still answers queries.
        return (await self.bench.dead_letter(self.run, "n").describe()).status is WorkflowExecutionStatus.RUNNING

    async def check(self) -> None:
        """One key, no second effect, every decision kept."""
        calls = await self.bench.tools.calls(self.bench.unique(self.name))
        key = OperationId(run_id=self.run.id, node_id="n", logical_attempt=1).idempotency_key
        assert [call.key for call in calls] == [key] * self.state.calls, self.name
        assert len(await self.bench.tools.effects(self.bench.unique(self.name))) == self.state.effects, self.name
        assert len(await self.bench.tools.calls(self.bench.unique(f"{self.name}.hold"))) == 1, self.name
        ledger = await open_ledger(self.bench.ledger_url)
        try:
            node = await ledger.node(self.run.id, "n")
        finally:
            await ledger.close()
        assert node is not None
        decided = [f"{self.name}-{action}" for action in (self.state.decision, self.state.later) if action]
        assert [record.decision_id for record in node.decisions] == decided, self.name
        ended = {"resolve": "RESOLVED", "discard": "DISCARDED"}
        assert node.end == ended.get(self.state.decision or "", "SUCCEEDED"), self.name

    async def reset(self, workflow_id: str, where: str) -> None:
        await self.cli.done("workflow", "reset", "-w", workflow_id, "-t", where, "--reason", "to see")

    async def terminate(self, workflow_id: str) -> None:
        await self.cli.done("workflow", "terminate", "-w", workflow_id, "--reason", "to see")


Operation = Callable[[Cell], Awaitable[None]]


async def restart_run(cell: Cell) -> None:
    await cell.terminate(cell.run.id)
    await cell.bench.start(*cell.nodes, run_id=cell.run.id)


RUN: dict[str, Operation] = {
    "terminated and started again": restart_run,
    "reset to its first task": lambda cell: cell.reset(cell.run.id, "FirstWorkflowTask"),
    "reset to its last task": lambda cell: cell.reset(cell.run.id, "LastWorkflowTask"),
}
NODE: dict[str, Operation] = {
    "terminated": lambda cell: cell.terminate(cell.node_id),
    "reset to its first task": lambda cell: cell.reset(cell.node_id, "FirstWorkflowTask"),
    "reset to its last task": lambda cell: cell.reset(cell.node_id, "LastWorkflowTask"),
}
DEAD_LETTER: dict[str, Operation] = {
    "terminated": lambda cell: cell.terminate(f"{cell.node_id}/dead-letter"),
    "reset to its first task": lambda cell: cell.reset(f"{cell.node_id}/dead-letter", "FirstWorkflowTask"),
    "reset to its last task": lambda cell: cell.reset(f"{cell.node_id}/dead-letter", "LastWorkflowTask"),
}
CLOSED = frozenset({"resolved", "discarded", "redriven", "done"})
"""States in which the node and its dead letter have ended, so that there is nothing to terminate."""


FAST_NODES = frozenset({"parked", "resolved", "discarded", "redriven"})
"""States in which a fast node has a workflow of its own."""


def states(bench: Bench, of_node: bool) -> list[str]:
    """The states that an operator may come upon; a fast node's backoff is a timer, which nobody can cut short."""
    if bench.node_mode != "fast":
        return list(STATES)
    return [state for state in STATES if state != "in backoff" and (state in FAST_NODES or not of_node)]


async def run_matrix(bench: Bench, cells: list[tuple[str, Operation]]) -> None:
    """Every cell at once, on one worker."""
    cli = TemporalCli(bench.client.service_client.config.target_host)
    made: list[tuple[Cell, Operation]] = []
    for number, (name, operation) in enumerate(cells):
        state = STATES[name]
        tool = f"{name.replace(' ', '-')}.{number}"
        handle: Run = bench.client.get_workflow_handle(f"{bench.name}-{tool}")
        cell = Cell(bench, cli, tool, state, handle)
        steps = [step | ({"gate": cell.gate} if "gate" in step else {}) for step in state.steps]
        await bench.tool(tool, steps, timeout=GATED, retry=HOUR)
        await bench.tool(f"{tool}.hold", [{"gate": cell.gate, **OK}], timeout=GATED)
        made.append((cell, operation))

    async def through(cell: Cell, operation: Operation) -> None:
        await cell.prepare()
        await operation(cell)
        await cell.finish()

    async with bench.worker():
        try:
            outcomes = await asyncio.gather(*(through(*each) for each in made), return_exceptions=True)
        finally:
            for cell, _ in made:
                with contextlib.suppress(Exception):
                    await bench.tools.open_gate(cell.gate)
    failed = {cell.name: outcome for (cell, _), outcome in zip(made, outcomes, strict=True) if outcome is not None}
    if failed:
        raise ExceptionGroup("cells that do not hold", [_named(name, error) for name, error in failed.items()])


def _named(name: str, error: BaseException) -> Exception:
    error.add_note(f"in the cell {name}")
    return error if isinstance(error, Exception) else RuntimeError(f"{name}: {error!r}")


@pytest.mark.parametrize("operation", RUN)
async def test_a_run(bench: Bench, operation: str) -> None:
    await run_matrix(bench, [(state, RUN[operation]) for state in states(bench, of_node=False)])


@pytest.mark.parametrize("operation", NODE)
async def test_a_node(bench: Bench, operation: str) -> None:
    open_only = operation == "terminated"
    found = states(bench, of_node=True)
    await run_matrix(bench, [(state, NODE[operation]) for state in found if not (open_only and state in CLOSED)])


@pytest.mark.parametrize("operation", DEAD_LETTER)
async def test_a_dead_letter(bench: Bench, operation: str) -> None:
    open_only = operation == "terminated"
    cells = [
        (name, DEAD_LETTER[operation])
        for name, state in STATES.items()
        if state.has_dead_letter and not (open_only and name in CLOSED)
    ]
    await run_matrix(bench, cells)
