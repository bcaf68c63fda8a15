"""Runs, from outside: starting one safely, how it is doing, following it, cancelling it, listing them."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import ApplicationError, FailureError, WorkflowAlreadyStartedError

from activities.executions import NEWEST, OPEN, Execution, describe, executions
from contracts.base import Json, Model, UtcTime
from contracts.canonical import canonical_json
from contracts.identity import node_workflow_id
from contracts.runs import NodeStatus, RunState, RunStatus, parse_run
from workers.executions import NoAnswerError, failed_call, inputs_of, next_attempt, query, read_answer
from workers.settings import Settings
from workflows.attributes import STATUS

__all__ = [
    "RUN_STATUSES",
    "OtherSpecError",
    "Retry",
    "RunFailure",
    "RunNotFoundError",
    "RunView",
    "Start",
    "StartOutcome",
    "cancel_run",
    "list_runs",
    "start_run",
    "status_of",
    "view_run",
    "watch_run",
]

_START_TRIES: Final = 10
_PATIENCE: Final = 1.0
_LOOKED_AT: Final = 20
"""Of how many nodes at work the server is asked what they wait for."""

_ENDED_AS: Final[Mapping[str, str]] = {
    "COMPLETED": RunStatus.SUCCEEDED,
    "FAILED": RunStatus.FAILED,
    "CANCELED": RunStatus.CANCELLED,
}
"""How a run has ended, by how its workflow has; what Temporal ended (``TERMINATED``, ``TIMED_OUT``) keeps its name."""

RUN_STATUSES: Final[Mapping[str, str]] = {
    RunStatus.RUNNING: f"{OPEN} AND (RedriveStatus IS NULL OR RedriveStatus != '{RunStatus.BLOCKED}')",
    RunStatus.BLOCKED: f"{OPEN} AND RedriveStatus = '{RunStatus.BLOCKED}'",
    RunStatus.SUCCEEDED: "ExecutionStatus = 'Completed'",
    RunStatus.FAILED: "ExecutionStatus = 'Failed'",
    RunStatus.CANCELLED: "ExecutionStatus = 'Canceled'",
    "TERMINATED": "ExecutionStatus = 'Terminated'",
    "TIMED_OUT": "ExecutionStatus = 'TimedOut'",
}
"""What runs can be listed by, each with its list filter."""


class RunNotFoundError(Exception):
    """Temporal knows no run of that id; the message says what it knows instead."""


class OtherSpecError(Exception):
    """The id is used by a run with another specification; nothing was started."""


def status_of(execution: Execution) -> str:
    """The status of the run that this is an execution of, as far as the server knows it."""
    if execution.ended_at is not None:
        return _ENDED_AS.get(execution.status, execution.status)
    return "PAUSED" if execution.status == "PAUSED" else execution.attributes.get(STATUS) or RunStatus.RUNNING


async def _find_run(client: Client, run_id: str) -> Execution:
    execution = await describe(client, run_id)
    if execution is None:
        raise RunNotFoundError(f"there is no run {run_id!r} in namespace {client.namespace!r}")
    if execution.workflow_type != "Run":
        raise RunNotFoundError(f"workflow {run_id!r} is a {execution.workflow_type}, not a Run")
    return execution


class StartOutcome(StrEnum):
    """What starting a run has done."""

    STARTED = "STARTED"
    RESTARTED = "RESTARTED"
    """It had ended without success: the ledger answers for what was done already."""
    ALREADY_RUNNING = "ALREADY_RUNNING"
    ALREADY_SUCCEEDED = "ALREADY_SUCCEEDED"


class Start(Model):
    """The run that now stands under the id."""

    run_id: str
    outcome: StartOutcome
    status: str
    workflow_run_id: str


async def start_run(client: Client, settings: Settings, run_id: str, spec: Json) -> Start:
    """Starts a run; safe to repeat, by any number of callers at once.

    Raises:
        InvalidRunError: the specification is not usable; the tools and their schemas are only checked by a worker.
        OtherSpecError: the id is used by a run with another specification, or by something that is no run.
    """
    parse_run(run_id, [spec], settings.limits)
    for _ in range(_START_TRIES):
        existing = await describe(client, run_id)
        if existing is not None:
            await _require_same_spec(client, existing, spec)
            outcome = _already(existing)
            if outcome is not None:
                return Start(
                    run_id=run_id,
                    outcome=outcome,
                    status=status_of(existing),
                    workflow_run_id=existing.workflow_run_id,
                )
        try:
            handle: WorkflowHandle[Any, Any] = await client.start_workflow(
                "Run",
                spec,
                id=run_id,
                task_queue=settings.task_queue,
                # Whatever happens between the look and the start is refused by the server, and looked at again.
                id_reuse_policy=(
                    WorkflowIDReusePolicy.REJECT_DUPLICATE
                    if existing is None
                    else WorkflowIDReusePolicy.ALLOW_DUPLICATE_FAILED_ONLY
                ),
                id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
            )
        except WorkflowAlreadyStartedError:
            await asyncio.sleep(0.1)
            continue
        return Start(
            run_id=run_id,
            outcome=StartOutcome.STARTED if existing is None else StartOutcome.RESTARTED,
            status=RunStatus.RUNNING,
            workflow_run_id=handle.first_execution_run_id or "",
        )
    raise OtherSpecError(f"others keep starting and ending {run_id!r}: nothing was started from here")


def _already(existing: Execution) -> StartOutcome | None:
    if existing.ended_at is None:
        return StartOutcome.ALREADY_RUNNING
    return StartOutcome.ALREADY_SUCCEEDED if status_of(existing) == RunStatus.SUCCEEDED else None


async def _require_same_spec(client: Client, existing: Execution, spec: Json) -> None:
    run_id = existing.workflow_id
    if existing.workflow_type != "Run":
        raise OtherSpecError(
            f"the id {run_id!r} is used by a workflow of type {existing.workflow_type}: choose another"
        )
    inputs = await inputs_of(client, existing)
    if inputs is None:
        raise OtherSpecError(
            f"the start of run {run_id!r} is past its namespace's retention, so nobody can tell whether it had this "
            "specification: choose another id"
        )
    if len(inputs) == 1 and _canonical(inputs[0]) == canonical_json(spec):
        return
    if status_of(existing) == RunStatus.FAILED:
        _, failure = await _outcome(client, existing)
        if failure is not None and failure.type == "InvalidRun":
            # It was none: nothing was executed.
            return
    raise OtherSpecError(
        f"run {run_id!r} ({status_of(existing)}) has another specification: choose another id, or send what it has"
    )


def _canonical(value: Json) -> str | None:
    try:
        return canonical_json(value)
    except (ValueError, TypeError):
        # Not a JSON value: whoever started it sent something else, such as bytes.
        return None


class RunFailure(Model):
    """How a run failed: ``InvalidRun``, ``RunFailed``, or what Temporal calls its end."""

    type: str
    message: str
    details: Json = None


class Retry(Model):
    """A node's call that has failed, and is made again by itself.

    Attributes:
        attempt: Temporal's number of the next one, or of the one under way.
        next_at: When it comes; None: it is under way.
    """

    node_id: str
    attempt: int
    category: str
    message: str
    next_at: UtcTime | None


class RunView(Model):
    """How a run is doing.

    Attributes:
        status: As in `RunState`, or what an operator has made of it: ``TERMINATED``, ``TIMED_OUT``, ``PAUSED``.
        state: What the run itself says; None where nobody could be asked.
        tools: The tool of each node, as far as it is known.
        unanswered: Why the run could not be asked just now; `state` is then what it said before.
        retrying: What is tried again just now, of the first nodes at work.
    """

    run_id: str
    status: str
    started_at: UtcTime
    ended_at: UtcTime | None = None
    state: RunState | None = None
    tools: dict[str, str] = {}
    result: Json = None
    failure: RunFailure | None = None
    unanswered: str | None = None
    retrying: list[Retry] = []

    def document(self) -> dict[str, Json]:
        """As JSON: the answer of the ``status`` query, and for a run that has ended its result or failure."""
        document: dict[str, Json] = {"run_id": self.run_id, "status": self.status}
        if self.state is not None:
            document = self.state.model_dump(mode="json") | document
        if self.unanswered is not None:
            document["unanswered"] = self.unanswered
        if self.retrying:
            document["retrying"] = [retry.model_dump(mode="json") for retry in self.retrying]
        if self.ended_at is not None and self.failure is None:
            document["result"] = self.result
        elif self.failure is not None:
            document["failure"] = self.failure.model_dump(mode="json")
        return document


async def view_run(client: Client, run_id: str) -> RunView:
    """How a run is doing.

    Raises:
        RunNotFoundError: there is none of that id.
        NoAnswerError: it is open, and no worker answers. A run that has ended is shown as far as the server knows it.
    """
    execution = await _find_run(client, run_id)
    view = await _begin_view(client, execution)
    try:
        state = await _state(client, execution)
    except NoAnswerError as error:
        if execution.ended_at is None:
            raise
        return view.model_copy(update={"unanswered": str(error)})
    status = state.status if execution.ended_at is None and view.status != "PAUSED" else view.status
    retrying = await _retrying(client, state) if execution.ended_at is None else []
    return view.model_copy(update={"state": state, "status": status, "retrying": retrying})


async def _retrying(client: Client, state: RunState) -> list[Retry]:
    at_work = (name for name, node in state.nodes.items() if node.status is NodeStatus.RUNNING)
    names = list(itertools.islice(at_work, _LOOKED_AT))
    calls = await asyncio.gather(*(failed_call(client, node_workflow_id(state.run_id, name)) for name in names))
    return [
        Retry(
            node_id=name,
            attempt=call.attempt,
            category=call.last_failure.application_failure_info.type,
            message=call.last_failure.message,
            next_at=next_attempt(call),
        )
        for name, call in zip(names, calls, strict=True)
        if call is not None
    ]


async def _begin_view(client: Client, execution: Execution) -> RunView:
    """All that the server knows by itself."""
    result, failure = await _outcome(client, execution) if execution.ended_at is not None else (None, None)
    return RunView(
        run_id=execution.workflow_id,
        status=status_of(execution),
        started_at=await _started_at(client, execution),
        ended_at=execution.ended_at,
        tools=_tools(await inputs_of(client, execution)),
        result=result,
        failure=failure,
    )


def _tools(inputs: list[Json] | None) -> dict[str, str]:
    """The tool of each node; whatever was sent, since it may be an invalid run that is looked at."""
    spec = inputs[0] if inputs else None
    nodes = spec.get("nodes") if isinstance(spec, dict) else None
    return {
        node_id: tool
        for node in (nodes if isinstance(nodes, list) else [])
        if isinstance(node, dict)
        and isinstance(node_id := node.get("id"), str)
        and isinstance(tool := node.get("tool"), str)
    }


async def _state(client: Client, execution: Execution) -> RunState:
    """What the run itself says, of all its nodes: those of a large run are told page by page."""
    state = read_answer(RunState, await query(client, execution, "status"), execution)
    nodes = dict(state.nodes)
    while state.next is not None:
        state = read_answer(RunState, await query(client, execution, "status", {"after": state.next}), execution)
        nodes |= state.nodes
    return state.model_copy(update={"nodes": nodes})


async def _started_at(client: Client, execution: Execution) -> datetime:
    """When the run began, however often it has continued as new since; as far back as the server knows."""
    if execution.first_run_id in ("", execution.workflow_run_id):
        return execution.started_at
    first = await describe(client, execution.workflow_id, execution.first_run_id)
    return first.started_at if first is not None else execution.started_at


async def _outcome(client: Client, execution: Execution) -> tuple[Json, RunFailure | None]:
    handle = client.get_workflow_handle(execution.workflow_id, run_id=execution.workflow_run_id)
    try:
        return await handle.result(follow_runs=False), None
    except WorkflowFailureError as error:
        cause = error.cause
        if isinstance(cause, ApplicationError):
            details = cause.details[0] if cause.details else None
            return None, RunFailure(type=cause.type or "ApplicationError", message=cause.message, details=details)
        message = cause.message if isinstance(cause, FailureError) else str(cause)
        return None, RunFailure(type=type(cause).__name__.removesuffix("Error"), message=message)


async def watch_run(client: Client, run_id: str, every: float = 0.5) -> AsyncGenerator[RunView]:
    """Follows a run to its end: a view whenever something has changed, the last one of the run as it ended.

    Without a worker it goes on waiting for one, and says so in ``unanswered``.

    Raises:
        RunNotFoundError: there is none of that id.
    """
    execution = await _find_run(client, run_id)
    shown: RunView | None = None
    while execution.ended_at is None:
        view = await _begin_view(client, execution)
        end = asyncio.create_task(_ended(client, execution))
        look = asyncio.create_task(_look(client, execution, view))
        try:
            while True:
                await asyncio.wait([look, end], timeout=_PATIENCE, return_when=asyncio.FIRST_COMPLETED)
                if shown is None and not look.done():
                    # Perhaps nobody answers; what the server itself knows is shown meanwhile.
                    yield view
                    shown = view
                await asyncio.wait([look, end], return_when=asyncio.FIRST_COMPLETED)
                if look.done():
                    view = await look
                    if view != shown:
                        yield view
                        shown = view
                await asyncio.wait([end], timeout=every)
                if end.done():
                    await end
                    break
                look = asyncio.create_task(_look(client, execution, view))
        finally:
            end.cancel()
            look.cancel()
            await asyncio.gather(end, look, return_exceptions=True)
        # Usually ended now; else somebody has started it again in the meantime, and it is followed on.
        execution = await _find_run(client, run_id)
    yield await view_run(client, run_id)


async def _look(client: Client, execution: Execution, before: RunView) -> RunView:
    try:
        state = await _state(client, execution)
    except NoAnswerError as error:
        return before.model_copy(update={"unanswered": str(error)})
    return before.model_copy(update={"state": state, "status": state.status, "unanswered": None})


async def _ended(client: Client, execution: Execution) -> None:
    handle = client.get_workflow_handle(execution.workflow_id, run_id=execution.workflow_run_id)
    try:
        await handle.result()
    except WorkflowFailureError:
        # How it ended is looked at afterwards.
        return


async def cancel_run(client: Client, run_id: str) -> Execution:
    """Asks a run to cancel; one that has ended is left as it is, which the answer shows.

    Raises:
        RunNotFoundError: there is none of that id.
    """
    execution = await _find_run(client, run_id)
    if execution.ended_at is None:
        await client.get_workflow_handle(run_id).cancel()
    return execution


async def list_runs(client: Client, status: str | None, limit: int) -> tuple[list[Execution], bool]:
    """The newest executions of runs, and whether there are more; one of `RUN_STATUSES` narrows them down."""
    filters = ["WorkflowType = 'Run'", NEWEST]
    if status is not None:
        filters.append(RUN_STATUSES[status])
    found: list[Execution] = []
    async for execution in executions(client, filters):
        if len(found) == limit:
            return found, True
        found.append(execution)
    return found, False
