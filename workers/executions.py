"""Asking a workflow, from outside, without waiting for ever."""

from datetime import UTC, datetime, timedelta
from typing import Final, TypeVar

from pydantic import ValidationError
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.api.workflowservice.v1 import GetWorkflowExecutionHistoryRequest
from temporalio.client import Client, WorkflowQueryFailedError
from temporalio.service import RPCError, RPCStatusCode

from activities.executions import Execution
from contracts.base import Json, Model, problems_of
from workers.storage import foreign_reference

__all__ = [
    "ANSWER_WITHIN",
    "TOOK_TOO_LONG",
    "NoAnswerError",
    "failed_call",
    "inputs_of",
    "next_attempt",
    "no_answer",
    "query",
    "read_answer",
]

ANSWER_WITHIN: Final = timedelta(seconds=7)
"""How long a worker may take to answer a query, or to take up an update; without one, Temporal would wait for ever."""

TOOK_TOO_LONG: Final = frozenset({RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED})
"""How the SDK says that a call's own time limit was reached."""

_M = TypeVar("_M", bound=Model)


class NoAnswerError(Exception):
    """No worker answers; the message names the task queue and the cure."""


async def inputs_of(client: Client, execution: Execution) -> list[Json] | None:
    """What a run was started with; None if the server has forgotten.

    An execution that continues an earlier one takes, first of all, what that was started with.
    """
    try:
        answer = await client.workflow_service.get_workflow_execution_history(
            GetWorkflowExecutionHistoryRequest(
                namespace=client.namespace,
                execution=WorkflowExecution(workflow_id=execution.workflow_id, run_id=execution.workflow_run_id),
                maximum_page_size=1,
            ),
            retry=True,
        )
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return None
        raise
    started = answer.history.events[0].workflow_execution_started_event_attributes
    payloads = started.input.payloads[:1] if started.continued_execution_run_id else started.input.payloads
    try:
        return await client.data_converter.decode(payloads)
    except (RuntimeError, ValueError, KeyError) as error:
        if foreign_reference(error) is not None:
            raise
        # Bytes, or an encoding that this client does not know: not what it would send.
        return []


async def failed_call(client: Client, workflow_id: str) -> PendingActivityInfo | None:
    """A node's call that has failed and is made again; None if there is none."""
    try:
        pending = (await client.get_workflow_handle(workflow_id).describe()).raw_description.pending_activities
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return None
        raise
    failed = (call for call in pending if call.activity_type.name == "call_tool" and call.HasField("last_failure"))
    return next(failed, None)


def next_attempt(call: PendingActivityInfo) -> datetime | None:
    """When a pending call is made again; None: it is under way."""
    if call.state != PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED:
        return None
    planned = call.next_attempt_schedule_time if call.HasField("next_attempt_schedule_time") else call.scheduled_time
    return planned.ToDatetime(UTC)


async def query(client: Client, execution: Execution, name: str, *arguments: Json) -> Json:
    """Asks a workflow.

    Raises:
        NoAnswerError: no worker answers in time, or it cannot.
    """
    handle = client.get_workflow_handle(execution.workflow_id)
    try:
        answer: Json = await handle.query(name, args=arguments, rpc_timeout=ANSWER_WITHIN)
    except RPCError as error:
        if error.status in TOOK_TOO_LONG:
            raise no_answer(execution) from error
        if error.status is RPCStatusCode.FAILED_PRECONDITION:
            raise NoAnswerError(
                f"{execution.workflow_id} cannot be asked now: {error.message} The log of the worker on task queue "
                f"{execution.task_queue!r} says why, and so does the workflow's history"
            ) from error
        raise
    except WorkflowQueryFailedError as error:
        raise NoAnswerError(f"{execution.workflow_id} cannot be asked: {error.message}") from error
    return answer


def read_answer(kind: type[_M], answer: Json, execution: Execution) -> _M:
    """What a workflow answered.

    Raises:
        NoAnswerError: in a form that this version does not know.
    """
    try:
        return kind.model_validate(answer)
    except ValidationError as error:
        raise NoAnswerError(
            f"{execution.workflow_id} answers in a form that this version does not know "
            f"({'; '.join(problems_of(error)[:3])}): use the redrive that its worker has"
        ) from error


def no_answer(execution: Execution) -> NoAnswerError:
    """That nobody is at work on a workflow."""
    return NoAnswerError(
        f"no worker answers on task queue {execution.task_queue!r}: start one with `redrive worker`, or look at its log"
    )
