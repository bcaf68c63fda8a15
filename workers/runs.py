"""Runs, from outside: starting one safely, how it is doing, following it, cancelling it, listing them.

Everything here is plain functions over a Temporal client. What the server knows is asked by its raw service where the SDK's
own call raises for a *paused* workflow (``describe``, ``list_workflows``): one of those must not hide the others.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from pydantic import ValidationError
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import HistoryEventFilterType, WorkflowExecutionStatus
from temporalio.api.workflow.v1 import WorkflowExecutionInfo
from temporalio.api.workflowservice.v1 import (
    DescribeWorkflowExecutionRequest,
    GetWorkflowExecutionHistoryRequest,
    ListWorkflowExecutionsRequest,
)
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle, WorkflowQueryFailedError
from temporalio.common import SearchAttributeKey, TypedSearchAttributes, WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.converter import decode_typed_search_attributes
from temporalio.exceptions import ApplicationError, FailureError, WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from contracts.base import Json, Model, UtcTime, problems_of
from contracts.canonical import canonical_json
from contracts.runs import RunState, RunStatus, parse_run
from workflows.attributes import STATUS

__all__ = [
    "ANSWER_WITHIN",
    "OPEN",
    "RUN_STATUSES",
    "Execution",
    "NoAnswerError",
    "OtherSpecError",
    "RunFailure",
    "RunNotFoundError",
    "RunView",
    "Start",
    "StartOutcome",
    "cancel_run",
    "describe",
    "executions",
    "list_runs",
    "matches",
    "no_answer",
    "query",
    "quote_value",
    "start_run",
    "view_run",
    "watch_run",
]

ANSWER_WITHIN: Final = timedelta(seconds=8)
"""How long a worker may take to answer a query, or to take up an update; without one, Temporal would wait for ever."""

OPEN: Final = "CloseTime IS NULL"
"""A list filter: every execution that has not ended, paused ones included."""

_TOOK_TOO_LONG: Final = frozenset({RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED})
_PAGE: Final = 200
_START_TRIES: Final = 10
_PREFIX: Final = "WORKFLOW_EXECUTION_STATUS_"

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


class NoAnswerError(Exception):
    """No worker answers; the message names the task queue and the cure."""


# What the server knows of a workflow, whoever is at work.


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution of a workflow, as the server has it; ``status`` is Temporal's own name, such as ``CONTINUED_AS_NEW``."""

    workflow_id: str
    workflow_run_id: str
    workflow_type: str
    status: str
    started_at: datetime
    ended_at: datetime | None
    task_queue: str
    attributes: TypedSearchAttributes

    @property
    def run_status(self) -> str:
        """The status of the run that this is an execution of."""
        if self.ended_at is not None:
            return _ENDED_AS.get(self.status, self.status)
        return "PAUSED" if self.status == "PAUSED" else self.attributes.get(STATUS) or RunStatus.RUNNING


def _execution(info: WorkflowExecutionInfo, task_queue: str = "") -> Execution:
    try:
        status = WorkflowExecutionStatus.Name(info.status).removeprefix(_PREFIX)
    except ValueError:
        # A newer server's; it is shown as it came rather than hiding the workflow.
        status = f"STATUS_{info.status}"
    return Execution(
        workflow_id=info.execution.workflow_id,
        workflow_run_id=info.execution.run_id,
        workflow_type=info.type.name,
        status=status,
        started_at=info.start_time.ToDatetime(UTC),
        ended_at=info.close_time.ToDatetime(UTC) if info.HasField("close_time") else None,
        task_queue=info.task_queue or task_queue,
        attributes=decode_typed_search_attributes(info.search_attributes),
    )


async def describe(client: Client, workflow_id: str) -> Execution | None:
    """The newest execution of a workflow id, paused or not, or None."""
    try:
        answer = await client.workflow_service.describe_workflow_execution(
            DescribeWorkflowExecutionRequest(
                namespace=client.namespace, execution=WorkflowExecution(workflow_id=workflow_id)
            ),
            retry=True,
        )
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND and not _of_namespace(error):
            return None
        raise
    return _execution(answer.workflow_execution_info, answer.execution_config.task_queue.name)


def _of_namespace(error: RPCError) -> bool:
    return error.message.startswith("Namespace ")


async def executions(
    client: Client, filters: Sequence[str], wanted: Callable[[Execution], bool] | None = None
) -> AsyncIterator[Execution]:
    """Every execution that fits all of the list filters, as the server orders them (newest first); paused ones too."""
    request = ListWorkflowExecutionsRequest(
        namespace=client.namespace, page_size=_PAGE, query=" AND ".join(f"({term})" for term in filters)
    )
    while True:
        page = await client.workflow_service.list_workflow_executions(request, retry=True)
        for info in page.executions:
            execution = _execution(info)
            if wanted is None or wanted(execution):
                yield execution
        if not page.next_page_token:
            return
        request.next_page_token = page.next_page_token


def quote_value(value: str) -> str | None:
    """A value inside a list filter; None where the filter's own language cannot hold it, so that it must be compared here.

    The server unescapes a backslash and a double quote wrongly: with either in a value, nothing is ever found.
    """
    if "\\" in value or '"' in value:
        return None
    escaped = value.replace("'", "\\'")
    return f"'{escaped}'"


def matches(execution: Execution, wanted: Mapping[SearchAttributeKey[str], str]) -> bool:
    """Whether an execution has these search attributes."""
    return all(execution.attributes.get(key) == value for key, value in wanted.items())


async def query(client: Client, execution: Execution, name: str) -> Json:
    """Asks a workflow.

    Raises:
        NoAnswerError: no worker answers in time, or it cannot.
    """
    handle = client.get_workflow_handle(execution.workflow_id)
    try:
        answer: Json = await handle.query(name, rpc_timeout=ANSWER_WITHIN)
    except RPCError as error:
        if error.status in _TOOK_TOO_LONG:
            raise no_answer(execution) from error
        if error.status is RPCStatusCode.FAILED_PRECONDITION:
            raise NoAnswerError(f"{execution.workflow_id} cannot be asked now: {error.message}") from error
        raise
    except WorkflowQueryFailedError as error:
        raise NoAnswerError(f"{execution.workflow_id} cannot be asked: {error.message}") from error
    return answer


def no_answer(execution: Execution) -> NoAnswerError:
    """That nobody is at work on a workflow."""
    return NoAnswerError(
        f"no worker answers on task queue {execution.task_queue!r}: start one with `redrive worker` (or look at its log)"
    )


# Runs.


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


async def start_run(client: Client, task_queue: str, run_id: str, spec: Json) -> Start:
    """Starts a run; safe to repeat, by any number of callers at once.

    Raises:
        InvalidRunError: the specification is not usable; the tools and their schemas are only checked by a worker.
        OtherSpecError: the id is used by a run with another specification, or by something that is no run.
    """
    parse_run(run_id, [spec])
    for _ in range(_START_TRIES):
        existing = await describe(client, run_id)
        if existing is not None:
            await _require_same_spec(client, existing, spec)
            outcome = _already(existing)
            if outcome is not None:
                return Start(
                    run_id=run_id,
                    outcome=outcome,
                    status=existing.run_status,
                    workflow_run_id=existing.workflow_run_id,
                )
        try:
            handle: WorkflowHandle[Any, Any] = await client.start_workflow(
                "Run",
                spec,
                id=run_id,
                task_queue=task_queue,
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
    return StartOutcome.ALREADY_SUCCEEDED if existing.run_status == RunStatus.SUCCEEDED else None


async def _require_same_spec(client: Client, existing: Execution, spec: Json) -> None:
    run_id = existing.workflow_id
    if existing.workflow_type != "Run":
        raise OtherSpecError(f"the id {run_id!r} is used by a workflow of type {existing.workflow_type}: choose another")
    inputs = await _inputs(client, existing)
    if inputs is None:
        raise OtherSpecError(
            f"the start of run {run_id!r} is past its namespace's retention, so nobody can tell whether it had this "
            "specification: choose another id"
        )
    if len(inputs) != 1 or _canonical(inputs[0]) != canonical_json(spec):
        raise OtherSpecError(
            f"run {run_id!r} ({existing.run_status}) has another specification: choose another id, or send the same file"
        )


def _canonical(value: Json) -> str | None:
    try:
        return canonical_json(value)
    except (ValueError, TypeError):
        # Not a JSON value: whoever started it sent something else, such as bytes.
        return None


async def _inputs(client: Client, execution: Execution) -> list[Json] | None:
    """What a workflow was started with, before it ever continued as new; None if the server has forgotten."""
    run_id = execution.workflow_run_id
    for _ in range(2):
        try:
            answer = await client.workflow_service.get_workflow_execution_history(
                GetWorkflowExecutionHistoryRequest(
                    namespace=client.namespace,
                    execution=WorkflowExecution(workflow_id=execution.workflow_id, run_id=run_id),
                    maximum_page_size=1,
                    history_event_filter_type=HistoryEventFilterType.HISTORY_EVENT_FILTER_TYPE_ALL_EVENT,
                ),
                retry=True,
            )
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return None
            raise
        started = answer.history.events[0].workflow_execution_started_event_attributes
        if not started.continued_execution_run_id:
            try:
                return await client.data_converter.decode(started.input.payloads)
            except (RuntimeError, ValueError, KeyError):
                # Bytes, or an encoding that this client does not know: not what it would send.
                return []
        run_id = started.first_execution_run_id
    return None


class RunFailure(Model):
    """How a run failed: ``InvalidRun``, ``RunFailed``, or what Temporal calls its end."""

    type: str
    message: str
    details: Json = None


class RunView(Model):
    """How a run is doing.

    Attributes:
        status: As in `RunState`, or what an operator has made of it: ``TERMINATED``, ``TIMED_OUT``, ``PAUSED``.
        state: What the run itself says; None where nobody could be asked.
        tools: The tool of each node, as far as it is known.
        unanswered: Why the run could not be asked just now; `state` is then what it said before.
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

    def document(self) -> dict[str, Json]:
        """As JSON: the answer of the ``status`` query, and for a run that has ended its result or failure."""
        document: dict[str, Json] = {"run_id": self.run_id, "status": self.status}
        if self.state is not None:
            document = self.state.model_dump(mode="json") | document
        if self.unanswered is not None:
            document["unanswered"] = self.unanswered
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
    return view.model_copy(update={"state": state, "status": status})


async def _begin_view(client: Client, execution: Execution) -> RunView:
    """All that the server knows by itself."""
    result, failure = await _outcome(client, execution) if execution.ended_at is not None else (None, None)
    return RunView(
        run_id=execution.workflow_id,
        status=execution.run_status,
        started_at=execution.started_at,
        ended_at=execution.ended_at,
        tools=_tools(await _inputs(client, execution)),
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
    answer = await query(client, execution, "status")
    try:
        return RunState.model_validate(answer)
    except ValidationError as error:
        raise NoAnswerError(
            f"run {execution.workflow_id!r} answers in a form that this version does not know "
            f"({'; '.join(problems_of(error)[:3])}): use the redrive that its worker has"
        ) from error


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
    while execution.ended_at is None:
        view = await _begin_view(client, execution)
        end = asyncio.create_task(_ended(client, execution))
        try:
            while not end.done():
                now = await _look(client, execution, view)
                if now != view or view.state is None:
                    yield now
                view = now
                await asyncio.wait([end], timeout=every)
            await end
        finally:
            end.cancel()
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
    filters = ["WorkflowType = 'Run'", "ExecutionStatus != 'ContinuedAsNew'"]
    if status is not None:
        filters.append(RUN_STATUSES[status])
    found: list[Execution] = []
    async for execution in executions(client, filters):
        if len(found) == limit:
            return found, True
        found.append(execution)
    return found, False
