"""What must hold of every operation in which a worker has died."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from datetime import datetime

from activities.ledger import open_ledger
from activities.ledger.interface import Ledger
from activities.ledger.records import OperationView
from contracts.dead_letters import Entry
from contracts.failures import SideEffect
from contracts.identity import OperationId
from contracts.runs import Source
from tests.faults.crash_bench import Crash, nodes_of
from tests.faults.crash_cells import Cell
from tests.faults.lookup import node_result
from tests.tool_server import Call, Effect

__all__ = ["problems"]

_AT_ONCE = 10


async def problems(crash: Crash) -> list[str]:
    """Everything that is not as it must be, each with its cell and its point."""
    found = [f"the worker passed {point}, which has no name among the points" for point in sorted(crash.passed.unknown)]
    found += _alerts(crash)
    ledger = await open_ledger(crash.bench.ledger_url)
    slots = asyncio.Semaphore(_AT_ONCE)

    async def of(run_id: str) -> list[str]:
        async with slots:
            return [f"{crash.runs[run_id]} ({run_id}): {problem}" async for problem in _of_run(crash, ledger, run_id)]

    try:
        for several in await asyncio.gather(*(of(run_id) for run_id in crash.runs)):
            found += several
    finally:
        await ledger.close()
    return found


def _alerts(crash: Crash) -> list[str]:
    keys: defaultdict[tuple[str, int], set[str | None]] = defaultdict(set)
    for call in crash.alerts:
        if call.body is None:  # it died before it had sent it
            continue
        keys[call.body["operation_id"], call.body["redrives"]].add(call.key)
    return [f"{failure} was announced under several keys: {them}" for failure, them in keys.items() if len(them) > 1]


async def _of_run(crash: Crash, ledger: Ledger, run_id: str) -> AsyncIterator[str]:
    cell = crash.runs[run_id].cell
    if run_id not in crash.passed.held:
        yield "it never came to its point"
    status = crash.ended.get(run_id, "RUNNING")
    calls = await crash.bench.tools.calls(crash.tool(run_id))
    # Whoever cancels a run waits for its tool to be called.
    expected = "COMPLETED" if cell.cancelled and not calls else cell.ends
    if status != expected:
        yield f"the run ended as {status}, not {expected}"
    effects = await crash.bench.tools.effects(crash.tool(run_id))
    for node in nodes_of(cell):
        operation = OperationId(run_id=run_id, node_id=node, logical_attempt=1)
        key = operation.idempotency_key
        letters = [letter for letter in crash.letters.get(run_id, []) if letter.node_id == node]
        mine = [call for call in calls if call.key == key]
        done = [effect for effect in effects if effect.key == key]
        view = await ledger.operation(str(operation))
        for problem in [
            *_of_calls(cell, mine, done),
            *_of_letters(cell, letters, done),
            *_of_ledger(cell, status, view, mine, letters),
        ]:
            yield problem
        if status == "COMPLETED":
            run = crash.bench.client.get_workflow_handle(run_id)
            result = await node_result(crash.bench, run, node)
            for problem in _of_result(cell, Source(result["source"]), done, letters):
                yield problem
        calls = [call for call in calls if call.key != key]
    if calls:
        yield f"it was called under other keys than its operations': {[call.key for call in calls]}"
    for workflow_id, entry in crash.open_letters.items():
        if entry.run_id == run_id and (run_id not in crash.ended or entry.side_effect is not SideEffect.NONE):
            yield f"{workflow_id} is still open"


def _of_calls(cell: Cell, calls: Sequence[Call], effects: Sequence[Effect]) -> list[str]:
    """At most one effect; and what can neither dedupe nor only reads is not called again once it has acted."""
    if cell.reads:
        return []
    found = [f"{len(effects)} effects"] * (len(effects) > 1)
    acted = [index for index, call in enumerate(calls) if call.committed]
    if not cell.dedupes and acted and acted[0] != len(calls) - 1:
        found.append("it was called again after its effect")
    return found


def _of_letters(cell: Cell, letters: Sequence[Entry], effects: Sequence[Effect]) -> list[str]:
    """A dead letter that says that nothing happened tells the truth."""

    def happened_before(moment: datetime) -> bool:
        return any(effect.at <= moment for effect in effects)

    return [
        f"its dead letter says NONE ({letter.error.code}), but the effect had happened"
        for letter in letters
        if not cell.reads and letter.side_effect is SideEffect.NONE and happened_before(letter.last_failed_at)
    ]


def _of_ledger(
    cell: Cell, status: str, view: OperationView | None, calls: Sequence[Call], letters: Sequence[Entry]
) -> list[str]:
    if view is None:
        return ["it was called without a record"] * bool(calls)
    found = ["it was called more often than the ledger has attempts"] * (len(calls) > len(view.attempts))
    lost = any(attempt.ended_at is None for attempt in view.attempts)
    uncertain = [letter for letter in letters if letter.side_effect is not SideEffect.NONE]
    if lost and not (cell.reads or cell.dedupes or cell.askable) and not uncertain:
        found.append("an attempt was lost, and nobody was told")
    if status in ("COMPLETED", "FAILED") and view.node_end is None:
        found.append("the run has ended, but not its node in the ledger")
    if status == "COMPLETED" and view.side_effect is not SideEffect.NONE:
        found.append(f"the run has succeeded, and the ledger still says {view.side_effect}")
    return found


def _of_result(cell: Cell, source: Source, effects: Sequence[Effect], letters: Sequence[Entry]) -> list[str]:
    if source is not Source.RESOLVED:
        return [f"{source}, with {len(effects)} effects"] * (not cell.reads and len(effects) != 1)
    if not any(letter.side_effect is not SideEffect.NONE for letter in letters):
        return ["it was resolved by a person who was not told that an effect is possible"]
    return []
