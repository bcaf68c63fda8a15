"""Starts the runs, meets some of them with an operator's mishaps, and waits for each to end or to be parked."""

import asyncio
import contextlib
import functools
import json
import random
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Final

from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowQueryFailedError
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from tests.chaos.cluster import QUEUE
from tests.chaos.graphs import PlannedRun
from tests.chaos.journal import Journal
from tests.chaos.operator import Operator

_LOOK_SECONDS: Final = 0.5


class Driver:
    """Sees every run through.

    Attributes:
        ended: Operations of runs that have ended, been parked, or not done either in the time they had.
    """

    def __init__(self, client: Client, operator: Operator, journal: Journal, *, at_once: int, patience: float) -> None:
        self._client = client
        self._operator = operator
        self._journal = journal
        self._at_once = asyncio.Semaphore(at_once)
        self._patience = patience
        self.ended = 0

    async def drive(self, runs: Iterable[PlannedRun]) -> None:
        """All of them, so many at once."""
        async with asyncio.TaskGroup() as group:
            for run in runs:
                await self._at_once.acquire()
                group.create_task(self._see_through(run))

    async def settle(self, runs: Iterable[PlannedRun]) -> None:
        """Waits until every run has ended or is blocked at a parked dead letter, as long as patience lasts."""
        with contextlib.suppress(TimeoutError):  # what is still left is stuck, and the checker says so
            async with asyncio.timeout(self._patience):
                for run in runs:
                    await _until(functools.partial(self._at_rest, run))

    async def _nodes_at_rest(self, run: PlannedRun) -> bool:
        """Whether each node has ended, or waits at a dead letter."""
        for node in run.nodes:
            node_id = f"{run.id}/{node['id']}"
            if await self._open(node_id) and not await self._open(f"{node_id}/dead-letter"):
                return False
        return True

    async def _at_rest(self, run: PlannedRun) -> bool:
        if await self._closed(run.id):
            return run.tampering != "abandon_run" or await self._nodes_at_rest(run)
        if run.id not in self._operator.parked:
            return False
        try:
            state: dict[str, Any] = await self._client.get_workflow_handle(run.id).query("status")
        except (RPCError, WorkflowQueryFailedError):
            return False
        return bool(state["status"] == "BLOCKED")

    async def _see_through(self, run: PlannedRun) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await self._start(run)
                await self._tamper(run)
                await _until(lambda: self._over(run))
        except TimeoutError:
            pass  # others have their turn; `settle` comes back to it
        finally:
            self.ended += len(run.nodes)
            self._at_once.release()

    async def _over(self, run: PlannedRun) -> bool:
        return run.id in self._operator.parked or await self._closed(run.id)

    async def _start(self, run: PlannedRun) -> None:
        async def start() -> None:
            with contextlib.suppress(WorkflowAlreadyStartedError):  # an earlier try has reached the server
                await self._client.start_workflow("Run", run.spec, id=run.id, task_queue=QUEUE)

        await insist(start)

    async def _closed(self, run_id: str) -> bool:
        try:
            status = (await self._client.get_workflow_handle(run_id).describe()).status
        except RPCError:
            return False
        return status is not WorkflowExecutionStatus.RUNNING

    async def _open(self, workflow_id: str) -> bool:
        try:
            status = (await self._client.get_workflow_handle(workflow_id).describe()).status
        except RPCError as error:
            return error.status is not RPCStatusCode.NOT_FOUND
        return status is WorkflowExecutionStatus.RUNNING

    async def _has_begun(self, run: PlannedRun) -> bool:
        """Whether the first node is there, which waits for no other; of a fast run, whether that is there."""
        first = run.id if run.fast else f"{run.id}/{run.nodes[0]['id']}"
        try:
            await self._client.get_workflow_handle(first).describe()
        except RPCError:
            return await self._closed(run.id)
        return True

    async def _tamper(self, run: PlannedRun) -> None:
        if run.tampering is None:
            return
        await _until(lambda: self._has_begun(run))
        await asyncio.sleep(run.tampered_after)
        node = random.Random(f"tamper {run.id}").choice(run.nodes)["id"]
        self._journal.write("tamper", run=run.id, node=node, what=run.tampering)
        match run.tampering:
            case "cancel":
                await self._if_there(self._client.get_workflow_handle(run.id).cancel)
            case "terminate_run":
                await self._if_there(self._client.get_workflow_handle(run.id).terminate)
                await self._start(run)
            case "abandon_run":
                # Not started again: what its nodes do is for the next sweep to find.
                await self._if_there(self._client.get_workflow_handle(run.id).terminate)
            case "reset_run":
                await self._if_there(lambda: self._reset(run.id))
            case "terminate_node":
                await self._if_there(self._client.get_workflow_handle(f"{run.id}/{node}").terminate)
            case "reset_node":
                await self._if_there(lambda: self._reset(f"{run.id}/{node}"))
            case "terminate_dead_letter":
                await self._terminate_a_dead_letter(run)
            case _:
                raise ValueError(run.tampering)

    async def _terminate_a_dead_letter(self, run: PlannedRun) -> None:
        """The first that is there before the run is over."""
        while not await self._closed(run.id) and run.id not in self._operator.parked:
            for node in run.nodes:
                dead_letter = self._client.get_workflow_handle(f"{run.id}/{node['id']}/dead-letter")
                if await self._if_there(dead_letter.terminate):
                    return
            await asyncio.sleep(1)

    async def _if_there(self, what: Callable[[], Any]) -> bool:
        """Does it, unless its workflow does not exist or has ended; insists, where the server is away."""
        there = True

        async def do() -> None:
            nonlocal there
            try:
                await what()
            except RPCError as error:
                if error.status not in (RPCStatusCode.NOT_FOUND, RPCStatusCode.INVALID_ARGUMENT):
                    raise
                there = False

        await insist(do)
        return there

    async def _reset(self, workflow_id: str) -> None:
        """Back to one of its completed workflow tasks."""
        handle = self._client.get_workflow_handle(workflow_id)
        described = await handle.describe()
        events = [
            event.event_id
            async for event in self._client.get_workflow_handle(
                workflow_id, run_id=described.run_id
            ).fetch_history_events()
            if event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED
        ]
        if not events:
            return
        request = ResetWorkflowExecutionRequest(
            namespace=self._client.namespace,
            workflow_execution=WorkflowExecution(workflow_id=workflow_id, run_id=described.run_id),
            workflow_task_finish_event_id=random.Random(f"reset {workflow_id}").choice(events),
            reason="chaos",
            request_id=f"chaos-{workflow_id}",
        )
        await self._client.workflow_service.reset_workflow_execution(request)


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    while True:
        if await condition():
            return
        await asyncio.sleep(_LOOK_SECONDS)


async def insist(what: Callable[[], Any]) -> None:
    """Does something, again and again while Temporal is away."""
    while True:
        try:
            async with asyncio.timeout(15):
                await what()
            return
        except (RPCError, TimeoutError):
            await asyncio.sleep(0.5)


class Called:
    """How many operations the tools have heard of, from their log as it grows."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._read = 0
        self._keys: set[str] = set()

    def count(self) -> int:
        """So many by now."""
        if self._log.exists():
            with self._log.open("rb") as file:
                file.seek(self._read)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._read += len(line)
                    event = json.loads(line)
                    if event["event"] == "call":
                        self._keys.add(event["key"])
        return len(self._keys)
