"""One killed worker and the many operations it dies in: from their start to their end, with a person who decides."""

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.service import RPCError, RPCStatusCode

from contracts.dead_letters import Entry
from contracts.dispatch import DeadLetterInput
from contracts.failures import SideEffect
from tests.faults.crash_cells import Cell, Pair
from tests.lab import Bench
from tests.tool_server import Call
from tests.worker_process import WorkerProcess
from workers.client import DATA_CONVERTER

__all__ = ["Crash", "Passed", "crashed", "dying"]

_TO_THE_POINT: Final = 300.0
"""Seconds within which all must have come to their points, on a busy machine too."""
_TO_THE_END: Final = 500.0
"""Seconds after the kill within which all must have ended: the longest timeout that notices a loss, and patience."""
_LOOK: Final = 2.0
"""Seconds between two looks at the list of dead letters: a list costs the server more than many a workflow."""
_PATIENCE: Final = 10.0
"""Seconds after which a person who sees a dead letter still open thinks again."""


def nodes_of(cell: Cell) -> list[str]:
    """The ids of a run's nodes."""
    return [f"call-{number}" for number in range(1, cell.nodes + 1)]


@dataclass
class _Letter:
    """A dead letter, and what a person has done about it."""

    handle: WorkflowHandle[Any, Any]
    entry: Entry
    decisions: int = 0
    decided_at: float = 0


@dataclass
class Passed:
    """What a worker has passed until it died.

    Attributes:
        held: The runs, or sweeps, that were at their point when the worker died.
        unknown: Points that the worker passed, and that have no name.
    """

    held: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)


@dataclass
class Crash:
    """What became of the operations of one bench.

    Attributes:
        runs: Which pair each run is.
        passed: What the worker that died has passed.
        letters: The dead letters of each run, as they were opened.
        ended: How each run ended, as Temporal has it.
        open_letters: Dead letters that were not closed in the end.
        alerts: What the webhook was told.
    """

    bench: Bench
    runs: Mapping[str, Pair[Cell]]
    passed: Passed = field(default_factory=Passed)
    letters: dict[str, list[Entry]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    open_letters: dict[str, Entry] = field(default_factory=dict)
    alerts: list[Call] = field(default_factory=list)

    def tool(self, run_id: str) -> str:
        """The name under which the tool server knows a run's tool."""
        return self.bench.unique(run_id)


class _Person:
    """Decides every dead letter, by signals, whether a worker is there or not; cancels the runs that are to be."""

    def __init__(self, crash: Crash) -> None:
        self._crash = crash
        self._bench = crash.bench
        self._client: Client = crash.bench.client
        self._letters: dict[str, _Letter] = {}
        self._all_ended = asyncio.Event()

    async def wait(self) -> None:
        """Returns when nothing is left to decide or to wait for."""
        await self._all_ended.wait()

    async def work(self) -> None:
        """Looks, decides, and looks again."""
        async with asyncio.TaskGroup() as tasks:
            for run_id, pair in self._crash.runs.items():
                tasks.create_task(self._follow(run_id))
                if pair.cell.cancelled:
                    tasks.create_task(self._cancel(run_id))
            while True:
                await self._look()
                await asyncio.sleep(_LOOK)

    async def _follow(self, run_id: str) -> None:
        run = self._client.get_workflow_handle(run_id)
        with contextlib.suppress(WorkflowFailureError):
            await run.result()
        status = (await run.describe()).status
        self._crash.ended[run_id] = status.name if status is not None else ""

    async def _cancel(self, run_id: str) -> None:
        within = _TO_THE_POINT + _TO_THE_END
        await self._bench.tools.wait_for(self._crash.tool(run_id), calls=1, timeout=within)
        with _closed_already():
            await self._client.get_workflow_handle(run_id).cancel()

    async def _look(self) -> None:
        queue = f"TaskQueue = '{self._bench.queue}'"
        found = [
            execution
            async for execution in self._client.list_workflows(
                f"{queue} AND WorkflowType = 'DeadLetter' AND ExecutionStatus = 'Running'"
            )
        ]
        for execution in found:
            if execution.run_id not in self._letters:
                await self._read(execution.id, execution.run_id)
            await self._decide(self._letters[execution.run_id])
        self._crash.open_letters = {execution.id: self._letters[execution.run_id].entry for execution in found}
        waiting = [letter for letter in self._crash.open_letters.values() if not self._obsolete(letter)]
        if len(self._crash.ended) == len(self._crash.runs) and not waiting:
            self._all_ended.set()

    def _obsolete(self, entry: Entry) -> bool:
        """Whether it waits for nobody: its run is gone, and it says that no effect is possible."""
        return entry.run_id in self._crash.ended and entry.side_effect is SideEffect.NONE

    async def _read(self, workflow_id: str, run_id: str) -> None:
        """Reads a dead letter as its node has opened it; which needs no worker."""
        handle = self._client.get_workflow_handle(workflow_id, run_id=run_id)
        first = await anext(handle.fetch_history_events(page_size=1))
        payloads = first.workflow_execution_started_event_attributes.input.payloads
        (start,) = await DATA_CONVERTER.decode(payloads, [DeadLetterInput])
        self._letters[run_id] = _Letter(handle, start.entry)
        self._crash.letters.setdefault(start.entry.run_id, []).append(start.entry)

    async def _decide(self, letter: _Letter) -> None:
        now = asyncio.get_running_loop().time()
        if letter.decisions and now < letter.decided_at + _PATIENCE:
            return
        if not await self._announced(letter.entry):
            return
        action, payload = self._decision(letter)
        letter.decisions += 1
        letter.decided_at = now
        payload |= {"decided_by": "tester", "decision_id": f"{letter.handle.run_id}-{letter.decisions}"}
        with _closed_already():
            await letter.handle.signal(action, payload)

    def _decision(self, letter: _Letter) -> tuple[str, dict[str, Any]]:
        cell = self._crash.runs[letter.entry.run_id].cell
        resolve = ("resolve", {"reason": "looked it up", "output": {"id": "seen"}})
        if letter.decisions:
            return resolve
        if cell.decision == "reconcile":
            return "reconcile", {}
        if cell.decision == "discard":
            return "discard", {"reason": "not needed"}
        return resolve if letter.entry.side_effect is not SideEffect.NONE else ("redrive", {"reason": "try again"})

    async def _announced(self, entry: Entry) -> bool:
        """Where the alert is what is killed, a person decides only what they have been told of."""
        point = self._crash.runs[entry.run_id].point
        if point.subject != "activity.alert":
            return True
        told = [
            call
            for call in await self._bench.tools.calls(self._bench.unique("webhook"))
            if call.body is not None and (call.body["run_id"], call.body["redrives"]) == (entry.run_id, entry.redrives)
        ]
        # The one that was killed before its acknowledgement is repeated.
        return len(told) >= (2 if point.when == "ack" and entry.redrives == 0 else 1)


@contextlib.contextmanager
def _closed_already() -> Generator[None]:
    """It may have closed since it was listed."""
    try:
        yield
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:
            raise


async def crashed(bench: Bench, pairs: Sequence[Pair[Cell]]) -> Crash:
    """Runs the cells, kills the worker in the middle of all of them, and sees them to their end with another one."""
    crash = Crash(bench, {f"{bench.name}-{number:03}": pair for number, pair in enumerate(pairs)})
    bench.webhook = bench.tools.tool_url(bench.unique("webhook"))
    for run_id, pair in crash.runs.items():
        await bench.tool(run_id, pair.cell.steps, **pair.cell.tool)
        if pair.cell.asks:
            await bench.tools.reconcile_script(bench.unique(run_id), pair.cell.asks)
    person = _Person(crash)
    await _start(crash)
    work = asyncio.create_task(person.work())
    try:
        async with dying(bench, {run_id: str(pair.point) for run_id, pair in crash.runs.items()}) as crash.passed:
            pass
        async with bench.worker():
            with contextlib.suppress(TimeoutError):  # who has not ended is seen by the checks
                async with asyncio.timeout(_TO_THE_END):
                    await asyncio.wait([work, asyncio.create_task(person.wait())], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            await work
    finally:
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
    crash.alerts = await bench.tools.calls(bench.unique("webhook"))
    return crash


async def _start(crash: Crash) -> None:
    for run_id, pair in crash.runs.items():
        nodes = [{"id": node, "tool": run_id, "input": {"amount": 1}} for node in nodes_of(pair.cell)]
        await crash.bench.start(*nodes, run_id=run_id, node_mode=pair.cell.mode)


@contextlib.asynccontextmanager
async def dying(bench: Bench, plan: Mapping[str, str]) -> AsyncGenerator[Passed]:
    """A worker that dies when all of these runs, or sweeps, have come to their points; on leaving, it has."""
    passed = Passed()
    path, log = bench.folder / "plan.json", bench.folder / "points.log"
    path.write_text(json.dumps(plan))
    async with WorkerProcess.start(bench, program=("tests.faults.crash_worker", str(path), str(log))) as worker:
        yield passed
        with contextlib.suppress(subprocess.TimeoutExpired):  # who has not come is seen by the checks
            await worker.exit_code(_TO_THE_POINT)
    for line in log.read_text().splitlines():
        match line.split():
            case ["held", run_id]:
                passed.held.add(run_id)
            case ["unknown", point]:
                passed.unknown.add(point)
            case _:
                pass
