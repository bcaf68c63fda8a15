"""A sweep that is killed at a point: what it was to find, and what must hold when the next one is done.

A sweep looks at all of a task queue: so each has a bench of its own. What it is to find is left behind on it by a run
that an operator has ended, two of each kind, so that a worker can die between the first and the second.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from temporalio.client import WorkflowExecution, WorkflowFailureError, WorkflowHandle

from activities.ledger import open_ledger
from contracts.dead_letters import EntryStatus
from contracts.dispatch import NodeEnd
from contracts.failures import SideEffect
from contracts.identity import dead_letter_workflow_id, node_workflow_id
from contracts.runs import NodeStatus
from contracts.sweep import Found, SweepResult
from tests.faults.crash_bench import dying
from tests.faults.crash_cells import Pair, Way
from tests.lab import Bench
from tests.waiting import eventually

__all__ = ["sweep_problems"]

_Handle = WorkflowHandle[Any, Any]

_WITHIN: Final = 300.0
"""Seconds for whatever must come in the end, on a busy machine too: that a sweep is lost is noticed after 30."""
_LOOK: Final = 1.0
"""Seconds between two looks at the server's lists."""
_SHORT: Final = "1s"
_HORIZON: Final = timedelta(seconds=2)
"""Its timeout, and as long again for what is still on its way."""
_HOUR: Final = {"RATE_LIMITED": {"initial": "1h", "maximum": "1h"}}


@dataclass(frozen=True)
class _Left:
    """A node that was left behind, and what has become of it when it has been swept.

    Attributes:
        steps: What its tool's calls meet.
        status: Its own, as Temporal has it.
        calls: How often its tool was called; None: it only reads, and may be called when the worker dies.
        effects: What came of that.
        opened: How often a dead letter was opened for it, the one that an operator has ended included.
        letter: Where its last dead letter stands.
    """

    steps: list[dict[str, Any]]
    status: str
    calls: int | None = 1
    effects: int = 0
    opened: int = 0
    letter: EntryStatus | None = None
    side_effect: SideEffect = SideEffect.NONE
    tool: Mapping[str, Any] = field(default_factory=dict)


_WAITING: Final = _Left([{"status": 429}, {}], "FAILED", tool={"retry": _HOUR})
_REFUSED: Final = _Left([{"status": 403}, {}], "TERMINATED", opened=1, letter=EntryStatus.OBSOLETE)
_LOST: Final = _Left(
    [{"status": 500, "commit": True}, {}],
    "TERMINATED",
    effects=1,
    opened=2,
    letter=EntryStatus.AWAITING_DECISION,
    side_effect=SideEffect.POSSIBLE,
    tool={"timeout": _SHORT},
)

_STOPPED: Final = "stopped"
"""The run is gone, and its nodes do not know."""
_UNDECIDED: Final = "undecided"
"""The run and its nodes are gone, and their dead letters do not know."""
_ORPHANED: Final = "orphaned"
"""The run, its nodes and their dead letters are gone, and an effect is uncertain."""
_AGAIN: Final = "again"
"""The run was started again and waits for what it has not started, and an operator has ended that."""
_ENDED: Final = "ended"
_UNLETTERED: Final = "unlettered"

_RUNS: Final[Mapping[str, Mapping[str, _Left]]] = {
    _STOPPED: {"waiting-1": _WAITING, "waiting-2": _WAITING},
    _UNDECIDED: {"refused-1": _REFUSED, "refused-2": _REFUSED},
    _ORPHANED: {"lost-1": _LOST, "lost-2": _LOST},
    _AGAIN: {
        _ENDED: _Left([{"status": 429}, {}], "COMPLETED", calls=None, tool={"retry": _HOUR, "effect": "read"}),
        # Started again it is not called again: its failure stands.
        _UNLETTERED: _Left([{"status": 403}, {}], "RUNNING", opened=2, letter=EntryStatus.AWAITING_DECISION),
    },
}


class _Scene:
    """What is left behind on one bench."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.runs: dict[str, _Handle] = {}

    @property
    def nodes(self) -> list[tuple[_Handle, str, _Left]]:
        """The run, the id and the fate of each."""
        return [(self.runs[name], node, left) for name, nodes in _RUNS.items() for node, left in nodes.items()]

    def node(self, run: str, node: str) -> _Handle:
        return self._bench.client.get_workflow_handle(node_workflow_id(self.runs[run].id, node))

    def letter(self, run: str, node: str) -> _Handle:
        return self._bench.dead_letter(self.runs[run], node)

    async def script(self) -> None:
        """Before there is a worker."""
        for nodes in _RUNS.values():
            for node, left in nodes.items():
                await self._bench.tool(node, left.steps, **left.tool)

    async def leave(self) -> None:
        """Runs, parks, and ends as an operator would, until a sweep has all of it to find."""
        bench = self._bench
        for name in _RUNS:
            await self._start(name)
        for run, node, left in self.nodes:
            await bench.tools.wait_for(bench.unique(node), calls=1, timeout=_WITHIN)
            if left.opened:
                await bench.parked(run, node)
        for run in self.runs.values():
            await run.terminate("to see")
        for name in (_UNDECIDED, _ORPHANED):
            for node in _RUNS[name]:
                await self.node(name, node).terminate("to see")
        for node in _RUNS[_ORPHANED]:
            await self.letter(_ORPHANED, node).terminate("to see")
        await self.node(_AGAIN, _UNLETTERED).terminate("to see")
        await self._start(_AGAIN)
        # Only what has not been started by whoever waits for it ends unheard.
        await _asked(self.node(_AGAIN, _ENDED))
        await self.node(_AGAIN, _ENDED).terminate("to see")
        await _asked(self.letter(_AGAIN, _UNLETTERED))
        await self.letter(_AGAIN, _UNLETTERED).terminate("to see")
        await self._to_be_found()

    async def _start(self, run: str) -> None:
        nodes = [{"id": node, "tool": node, "input": {"amount": 1}} for node in _RUNS[run]]
        self.runs[run] = await self._bench.start(*nodes, run_id=f"{self._bench.name}-{run}")

    async def _to_be_found(self) -> None:
        """The horizon is over, and the server's lists, which are a little behind, have all of it."""
        ledger = await open_ledger(self._bench.ledger_url)
        expected = {
            *(self.node(_STOPPED, node).id for node in _RUNS[_STOPPED]),
            *(self.letter(_UNDECIDED, node).id for node in _RUNS[_UNDECIDED]),
            self.runs[_AGAIN].id,
            self.node(_AGAIN, _UNLETTERED).id,
        }

        async def past() -> bool:
            views = [await ledger.node(self.runs[_ORPHANED].id, node) for node in _RUNS[_ORPHANED]]
            return all(view and (view.since_last_send or timedelta(0)) >= _HORIZON for view in views)

        async def listed() -> bool:
            running = {found.id for found in await self._listed("ExecutionStatus = 'Running'")}
            ended = {found.id for found in await self._listed("ExecutionStatus = 'Terminated'")}
            waits = {found.id for found in await self._listed(f"RedriveStatus = '{NodeStatus.DEAD_LETTERED}'")}
            return (
                running == expected
                and self.node(_AGAIN, _ENDED).id in ended
                and self.node(_AGAIN, _UNLETTERED).id in waits
            )

        try:
            await eventually(past, "the horizon", _WITHIN)
        finally:
            await ledger.close()
        await eventually(listed, "the lists", _WITHIN, _LOOK)

    async def problems(self) -> list[str]:
        """Everything that is not as it must be when all has been swept."""
        listed = await self._listed("WorkflowType IN ('Node', 'DeadLetter')")
        opened = Counter(found.id for found in listed)
        newest = {found.id: found for found in sorted(listed, key=lambda found: found.start_time)}
        found: list[str] = []
        for run, node, left in self.nodes:
            execution = newest.get(node_workflow_id(run.id, node))
            status = execution.status.name if execution is not None and execution.status is not None else "missing"
            calls = await self._bench.tools.calls(self._bench.unique(node))
            effects = await self._bench.tools.effects(self._bench.unique(node))
            letters = opened[dead_letter_workflow_id(run.id, node)]
            seen: dict[str, Any] = {"status": status, "keys": len({call.key for call in calls}), "opened": letters}
            wanted: dict[str, Any] = {"status": left.status, "keys": 1, "opened": left.opened}
            if left.calls is not None:
                seen |= {"calls": len(calls), "effects": len(effects)}
                wanted |= {"calls": left.calls, "effects": left.effects}
            if left.letter is not None and letters == left.opened:
                entry = await self._bench.entry(run, node)
                # An attempt may have been over before it was sent: the machine may be busy.
                evident = len(entry.attempts) >= len(calls)
                seen |= {"letter": entry.status, "side_effect": entry.side_effect, "in evidence": evident}
                wanted |= {"letter": left.letter, "side_effect": left.side_effect, "in evidence": True}
            found += [
                f"{node}: {name} is {value}, not {wanted[name]}"
                for name, value in seen.items()
                if value != wanted[name]
            ]
        return found

    async def _listed(self, term: str) -> list[WorkflowExecution]:
        query = f"TaskQueue = '{self._bench.queue}' AND {term}"
        return [found async for found in self._bench.client.list_workflows(query)]

    async def decide(self) -> list[str]:
        """A person ends what waits for one; what was uncertain is certain then, and nothing is called for it."""
        for run, node, left in self.nodes:
            if left.letter is EntryStatus.AWAITING_DECISION:
                record = await self._bench.decide(run, node, "resolve", output={"id": "seen"})
                assert record.outcome == "ACCEPTED", f"{node}: {record}"
        result = await self.runs[_AGAIN].result()
        found = [f"the run that was started again ended with {result['counts']}"] * (
            result["counts"] != {"SUCCEEDED": 2}
        )
        ledger = await open_ledger(self._bench.ledger_url)
        try:
            for node in _RUNS[_ORPHANED]:
                view = await ledger.node(self.runs[_ORPHANED].id, node)
                if view is None or view.end is not NodeEnd.RESOLVED:
                    found.append(f"{node} was decided, and the ledger does not know: {view}")
                elif len(await self._bench.tools.calls(self._bench.unique(node))) != 1:
                    found.append(f"{node} was decided, and called again")
        finally:
            await ledger.close()
        return found


async def _asked(handle: _Handle) -> None:
    """Waits until somebody who did not start it has asked how it ends."""

    async def so() -> bool:
        history = await handle.fetch_history()
        return any(
            event.workflow_execution_signaled_event_attributes.signal_name == "report_to" for event in history.events
        )

    await eventually(so, f"{handle.id} to be asked", _WITHIN)


async def sweep_problems(bench: Bench, pair: Pair[Way]) -> list[str]:
    """Kills a sweep at its point, sweeps again, and says what is not as it must be."""
    try:
        async with asyncio.timeout(4 * _WITHIN):
            found = await _problems(bench, pair)
    except (AssertionError, TimeoutError, WorkflowFailureError) as error:
        found = [repr(error)]
    return [f"{pair} ({bench.name}): {problem}" for problem in found]


async def _problems(bench: Bench, pair: Pair[Way]) -> list[str]:
    scene = _Scene(bench)
    first = f"{bench.name}-sweep"
    await scene.script()
    async with dying(bench, {first: str(pair.point)}) as passed:
        await scene.leave()
        await _sweep(bench, first)
    if first not in passed.held:
        return ["it never came to its point"]
    found = [f"it passed {point}, which has no name among the points" for point in sorted(passed.unknown)]
    async with bench.worker():
        # Long before Temporal has noticed that the first one is lost; which then goes on, and must find nothing to do.
        results = [await _result(await _sweep(bench, f"{first}-next"))]
        found += await _settled(scene)
        results.append(await _result(bench.client.get_workflow_handle(first)))
        results.append(await _quiet(bench, first))
        found += [f"a sweep is not complete: {result}" for result in results if not result.complete or result.problem]
        found += await scene.problems()
        found += await scene.decide()
        await _quiet(bench, f"{first}-decided")
    return found


async def _sweep(bench: Bench, workflow_id: str) -> _Handle:
    return await bench.client.start_workflow("Sweep", id=workflow_id, task_queue=bench.queue)


async def _result(sweep: _Handle) -> SweepResult:
    return SweepResult.model_validate(await sweep.result())


async def _settled(scene: _Scene) -> list[str]:
    """What is not as it must be, however long one waits."""
    last: list[str] = []

    async def so() -> bool:
        last[:] = await scene.problems()
        return not last

    try:
        await eventually(so, "all of it to be swept", _WITHIN, _LOOK)
    except AssertionError:
        return last
    return []


async def _quiet(bench: Bench, name: str) -> SweepResult:
    """Sweeps until there is nothing left to do: what was asked is not asked again."""
    number = 0

    async def so() -> SweepResult | None:
        nonlocal number
        number += 1
        result = await _result(await _sweep(bench, f"{name}-quiet-{number}"))
        return None if any(part.count for _, part in result if isinstance(part, Found)) else result

    return await eventually(so, "a sweep that has nothing to do", _WITHIN, _LOOK)
