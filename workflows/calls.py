"""How an operation is dispatched: by its node, or, for a first attempt, by the run itself."""

from datetime import timedelta
from typing import Any, Final

from pydantic import ValidationError
from temporalio import workflow
from temporalio.common import Priority, RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.workflow import ActivityCancellationType

with workflow.unsafe.imports_passed_through():
    from activities import stubs
    from contracts.base import Json
    from contracts.dispatch import CallResult, Dispatch, FailureDetails, MadeAtOnce, ToolFacts
    from contracts.failures import TERMINAL_CATEGORIES, Category
    from contracts.identity import OperationId, node_workflow_id
    from contracts.runs import NodeResult, Source
    from workflows.options import HEARTBEAT_TIMEOUT, MARGIN

__all__ = [
    "CALL_RETRY",
    "FIRST_CALL_RETRY",
    "call_at_once",
    "failure_details",
    "read_answer",
    "result_of",
    "start_call",
]

_UNSUITABLE: Final = "PayloadsTooLarge"
_SOON: Final = timedelta(seconds=2)
"""For how long a workflow task waits for a worker that is busy: it has ten seconds, and should never need more."""
_LOST: Final = ("TemporalTimeout:StartToClose", "TemporalTimeout:Heartbeat")

CALL_RETRY: Final = RetryPolicy(
    # The entry decides when (`next_retry_delay`) and whether; this is only for what never got as far as to decide.
    initial_interval=timedelta(seconds=1),
    backoff_coefficient=1.0,
    non_retryable_error_types=[*TERMINAL_CATEGORIES, _UNSUITABLE],
)

FIRST_CALL_RETRY: Final = RetryPolicy(
    # As above, until there was an attempt: the node's own workflow goes on from there, also if its worker was lost.
    initial_interval=timedelta(seconds=1),
    backoff_coefficient=1.0,
    non_retryable_error_types=[*TERMINAL_CATEGORIES, _UNSUITABLE, *_LOST],
)


def start_call(
    dispatch: Dispatch, tool: ToolFacts, activity_id: str, retry: RetryPolicy, priority: Priority = Priority.default
) -> workflow.ActivityHandle[Any]:
    """Dispatches an operation: the server retries it as the entry says. A node's workflow has its priority already."""
    return workflow.start_activity(
        stubs.call_tool,
        dispatch,
        activity_id=activity_id,
        task_queue=tool.task_queue,
        schedule_to_close_timeout=max(dispatch.deadline - workflow.now(), timedelta(0)) + tool.timeout + MARGIN,
        start_to_close_timeout=tool.timeout + MARGIN,
        heartbeat_timeout=HEARTBEAT_TIMEOUT,
        retry_policy=retry,
        cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        summary=f"{activity_id}: {tool.name}" if dispatch.first_attempt else f"{tool.name} {dispatch.operation}",
        priority=priority,
    )


def call_at_once(dispatch: Dispatch, tool: ToolFacts, activity_id: str) -> workflow.ActivityHandle[MadeAtOnce]:
    """Dispatches a first attempt within the workflow task; without an answer it is to be dispatched by `start_call`."""
    return workflow.start_local_activity(
        stubs.call_at_once,
        dispatch.model_copy(update={"made_at": workflow.now()}),
        activity_id=activity_id,
        schedule_to_start_timeout=_SOON,
        start_to_close_timeout=tool.timeout + MARGIN,
        retry_policy=RetryPolicy(maximum_attempts=1),
        cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        summary=f"{activity_id}: {tool.name}",
    )


def read_answer(answer: Any, run_id: str, node_id: str) -> CallResult | None:
    """The entry's answer; None for what somebody else has completed the activity with."""
    try:
        result = CallResult.model_validate(answer)
    except ValidationError:
        return None
    theirs = result.operation_id.rpartition("/")[0]
    return result if theirs == node_workflow_id(run_id, node_id) else None


def result_of(answer: CallResult, output: Json, source: Source | None) -> NodeResult:
    """What a node ends with."""
    operation = OperationId.parse(answer.operation_id)
    return NodeResult(
        node_id=operation.node_id,
        operation_id=answer.operation_id,
        idempotency_key=operation.idempotency_key,
        output=output,
        attempt_count=answer.attempt_count,
        source=source or Source.EXECUTED,
    )


def failure_details(error: ActivityError) -> FailureDetails | None:
    """The entry's own words about a failed call; None where it had none."""
    cause = error.cause
    if isinstance(cause, ApplicationError) and cause.type in Category.__members__ and cause.details:
        return FailureDetails.model_validate(cause.details[0])
    return None
