"""A row of an outcome table: what a tool does, and what must come of it; and how all rows are performed at once.

Every row is a tool and a node of its own. The whole table is one run under one worker.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from temporalio.client import WorkflowHandle

from activities.ledger import open_ledger
from activities.ledger.interface import Ledger
from contracts.failures import AttemptRecord
from contracts.identity import node_workflow_id
from contracts.runs import NodeState, NodeStatus
from tests.lab import Bench
from tests.tool_server import Call
from tests.waiting import eventually

Kind = Literal["plain", "key", "read"]
Step = dict[str, Any]

KINDS: Final[Mapping[Kind, dict[str, Any]]] = {
    "plain": {"effect": "write", "idempotency": "none"},
    "key": {"effect": "write", "idempotency": "key"},
    "read": {"effect": "read"},
}
"""A tool that writes, one that writes and dedupes by key, one that only reads."""

BUDGETS: Final = {"TRANSIENT": 2, "RATE_LIMITED": 3, "DEPENDENCY_DOWN": 4}
"""The attempts that a row's tool allows: different ones, so that the calls tell which policy was at work."""

RETRY: Final = {
    category: {"initial": "20ms", "maximum": "100ms", "attempts": attempts} for category, attempts in BUDGETS.items()
}

PATIENCE: Final = 90.0
"""Only bounds a failing test."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What came of a node.

    Attributes:
        end: The result's source, or the dead letter's category and code.
        side_effect: The dead letter's; empty for a result.
        attempts: Of each in the ledger: category (or SUCCESS), code and side effect.
        calls: How often the tool was called.
        effects: How often it acted.
        asked: How often it was asked what had happened.
    """

    end: str
    side_effect: str = ""
    attempts: tuple[str, ...]
    calls: int
    effects: int
    asked: int = 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """A tool, its script, and what must come of a node that calls it.

    Attributes:
        name: The node's, and the tool's.
        want: What must come of it; None if the test looks for itself.
        steps: The tool's script.
        reconcile: False: the tool cannot be asked.
        asked_steps: The script of its reconcile route; by default it tells the truth.
        tool: More of its catalog entry.
        node: More of the node's specification.
        any_code: The code depends on the machine; it is written as `*`.
    """

    name: str
    want: Ending | None = None
    steps: Sequence[Step] = ()
    kind: Kind = "plain"
    reconcile: bool | dict[str, Any] = False
    asked_steps: Sequence[Step] = ()
    tool: Mapping[str, Any] = field(default_factory=dict)
    node: Mapping[str, Any] = field(default_factory=dict)
    any_code: bool = False


@dataclass(frozen=True, kw_only=True)
class Seen:
    """All that is known of a row's node at its end."""

    ending: Ending
    output: Any
    attempts: list[AttemptRecord]
    calls: list[Call]
    asked: list[Call]


def failed(category: str, code: str, side_effect: str) -> str:
    """A failed attempt, as `Ending.attempts` has it."""
    return f"{category} {code} {side_effect}"


def succeeded(kind: Kind = "plain") -> str:
    """An attempt that succeeded; whatever only reads has no side effect."""
    return f"SUCCESS {'NONE' if kind == 'read' else 'CONFIRMED'}"


def dead(
    category: str,
    code: str,
    side_effect: str,
    *,
    attempts: int,
    calls: int | None = None,
    effects: int = 0,
    asked: int = 0,
) -> Ending:
    """A dead letter after so many attempts of one kind, each of which called the tool if nothing else is said."""
    return Ending(
        end=f"{category} {code}",
        side_effect=side_effect,
        attempts=(failed(category, code, side_effect),) * attempts,
        calls=attempts if calls is None else calls,
        effects=effects,
        asked=asked,
    )


def executed(*failures: str, kind: Kind = "plain") -> Ending:
    """A result after these failed attempts; the effect happened once, unless the tool only reads."""
    return Ending(
        end="EXECUTED",
        attempts=(*failures, succeeded(kind)),
        calls=len(failures) + 1,
        effects=0 if kind == "read" else 1,
    )


def reconciled(*failures: str, asked: int = 1) -> Ending:
    """A result that the tool told when it was asked, after these failed attempts, one of which had the effect."""
    return Ending(end="RECONCILED", attempts=failures, calls=len(failures), effects=1, asked=asked)


async def add(bench: Bench, row: Row) -> dict[str, Any]:
    """Adds a row's tool to the catalog, and returns its node."""
    remote = bench.unique(row.name)
    settings: dict[str, Any] = {"timeout": "30s", "retry": RETRY, **KINDS[row.kind], **row.tool}
    await bench.tool(row.name, list(row.steps), dedupe=row.kind == "key", reconcile=row.reconcile, **settings)
    if row.asked_steps:
        await bench.tools.reconcile_script(remote, row.asked_steps)
    return {"id": row.name, "tool": row.name, "input": {"row": row.name}, **row.node}


async def perform(bench: Bench, rows: Sequence[Row]) -> dict[str, Seen]:
    """Performs all rows at once in one run, and looks at each when its node has a result or waits for a person."""
    nodes = [await add(bench, row) for row in rows]
    async with bench.worker(), opened_ledger(bench) as ledger:
        run = await bench.start(*nodes, max_parallel=len(nodes))
        states = await settled(bench, run)
        few = asyncio.Semaphore(12)

        async def look(row: Row) -> Seen:
            async with few:
                return await seen(bench, run, ledger, row, states[row.name])

        found = await asyncio.gather(*map(look, rows))
    return {row.name: one for row, one in zip(rows, found, strict=True)}


def assert_as_wanted(rows: Sequence[Row], all_seen: Mapping[str, Seen]) -> None:
    """Compares every row, so that a failure shows all that differ."""
    __tracebackhide__ = True
    pairs = {row.name: (row, all_seen[row.name].ending) for row in rows if row.want is not None}
    wrong = {
        name: {"want": row.want, "seen": blurred}
        for name, (row, ending) in pairs.items()
        if (blurred := _blurred(row, ending)) != row.want
    }
    assert not wrong, "\n".join(f"{name}\n  want {it['want']}\n  seen {it['seen']}" for name, it in wrong.items())


@asynccontextmanager
async def opened_ledger(bench: Bench) -> AsyncGenerator[Ledger]:
    """The bench's ledger, beside its worker."""
    ledger = await open_ledger(bench.ledger_url)
    try:
        yield ledger
    finally:
        await ledger.close()


async def settled(bench: Bench, run: WorkflowHandle[Any, Any]) -> Mapping[str, NodeState]:
    """Waits until every node has ended or waits for a person."""

    async def states() -> Mapping[str, NodeState] | None:
        # Not as often as can be: every question is work for the worker that is to do the table.
        await asyncio.sleep(0.4)
        found = (await bench.status(run)).nodes
        moving = any(state.status in (NodeStatus.PENDING, NodeStatus.RUNNING) for state in found.values())
        return found if found and not moving else None

    return await eventually(states, "every node to end or to wait for a person", within=PATIENCE)


async def seen(bench: Bench, run: WorkflowHandle[Any, Any], ledger: Ledger, row: Row, state: NodeState) -> Seen:
    """All that is known of a node; what the ledger, the entry, the result and the tool say of it must agree."""
    node = await ledger.node(run.id, row.name)
    assert node is not None
    remote = bench.unique(row.name)
    calls = await bench.tools.calls(remote)
    effects = await bench.tools.effects(remote)
    asked = await bench.tools.reconcile_calls(remote)
    assert state.attempt_count == len(node.attempts), row.name
    assert [attempt.attempt for attempt in node.attempts] == list(range(1, len(node.attempts) + 1)), row.name
    output = None
    if state.status is NodeStatus.DEAD_LETTERED:
        entry = await bench.entry(run, row.name)
        assert entry.status == "AWAITING_DECISION"
        assert entry.attempts == node.attempts, row.name
        assert node.side_effect == entry.side_effect, row.name
        key = entry.idempotency_key
        end, side_effect = f"{entry.error.category} {entry.error.code}", str(entry.side_effect)
    else:
        assert state.status is NodeStatus.SUCCEEDED, (row.name, state.status)
        result = await bench.client.get_workflow_handle(node_workflow_id(run.id, row.name)).result()
        key, end, side_effect, output = result["idempotency_key"], result["source"], "", result["output"]
    # One operation: one key on the wire, whatever happens.
    assert {call.key for call in calls} <= {key}, row.name
    ending = Ending(
        end=end,
        side_effect=side_effect,
        attempts=tuple(map(told, node.attempts)),
        calls=len(calls),
        effects=len(effects),
        asked=len(asked),
    )
    return Seen(ending=ending, output=output, attempts=node.attempts, calls=calls, asked=asked)


def told(attempt: AttemptRecord) -> str:
    """An attempt, as `Ending.attempts` has it."""
    if attempt.category is None:
        return f"SUCCESS {attempt.side_effect}"
    return failed(attempt.category, attempt.code or "?", attempt.side_effect)


def _blurred(row: Row, ending: Ending) -> Ending:
    if row.any_code:
        attempts = tuple(f"{attempt.split()[0]} * {attempt.split()[-1]}" for attempt in ending.attempts)
        ending = replace(ending, end=f"{ending.end.split()[0]} *", attempts=attempts)
    return ending
