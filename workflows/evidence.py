"""From a failed call to a dead letter's entry: what ended the attempts, and the whole evidence."""

from collections.abc import Sequence
from typing import Final

from temporalio import workflow
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    CancelledError,
    FailureError,
    RetryState,
)

with workflow.unsafe.imports_passed_through():
    from contracts.base import Json
    from contracts.dead_letters import (
        DecisionRecord,
        Delivery,
        Eligibility,
        Entry,
        EntryStatus,
        ErrorInfo,
        Runtime,
        failure_fingerprint,
        merged,
    )
    from contracts.dispatch import Evidence, NodeInput, Refusal, ToolFacts
    from contracts.failures import AttemptRecord, Category, Code, clip_message
    from contracts.identity import OperationId
    from workflows.calls import failure_details

__all__ = [
    "entry_of",
    "failed_by_hand",
    "failure_of",
    "known_absent",
    "made_by_hand",
    "message_of",
    "refreshed",
    "with_remark",
]

_FAILED_BY_HAND: Final = "the call was failed by hand: "
_COMPLETED_BY_HAND: Final = (
    "the call was completed by hand, with nothing that its entry could have answered; resolve it"
)


def failure_of(error: ActivityError, evidence: Evidence, refused: Refusal | None) -> ErrorInfo:
    """What ended the attempts: the entry's own words where it had any, else what Temporal says."""
    cause = error.cause
    called_off = isinstance(cause, CancelledError) or error.retry_state is RetryState.CANCEL_REQUESTED
    if called_off and refused is not None:
        return ErrorInfo(category=refused.category, code=refused.code, message=refused.message)
    if (details := failure_details(error)) is not None:
        if error.retry_state is not RetryState.TIMEOUT:
            return details.error
        late = with_remark(details.error, "the node's deadline has passed")
        return late.model_copy(update={"code": Code.DEADLINE_EXCEEDED})
    if isinstance(cause, ApplicationError):
        return _by_hand(evidence.attempts, _FAILED_BY_HAND + cause.message)
    last = evidence.attempts[-1] if evidence.attempts else None
    return ErrorInfo(
        category=last.category if last is not None and last.category is not None else Category.TRANSIENT,
        code=Code.CANCELLED if called_off else Code.DEADLINE_EXCEEDED,
        message=clip_message(message_of(error) or error.message),
    )


def failed_by_hand(error: ActivityError) -> ErrorInfo | None:
    """The failure of a first attempt that a person has failed; None: it has ended otherwise."""
    if error.retry_state is not RetryState.TIMEOUT and isinstance(error.cause, ApplicationError):
        return _by_hand([], _FAILED_BY_HAND + error.cause.message)
    return None


def entry_of(
    node: NodeInput,
    tool: ToolFacts,
    operation: OperationId,
    value: Json,
    failure: ErrorInfo,
    evidence: Evidence,
    decisions: list[DecisionRecord],
) -> Entry:
    """The entry of a node's dead letter: its input as it was sent, and every decision that came before."""
    info = workflow.info()
    times = [attempt.ended_at or attempt.started_at for attempt in evidence.attempts] or [evidence.at]
    return Entry(
        run_id=node.run_id,
        node_id=node.node_id,
        operation_id=str(operation),
        idempotency_key=operation.idempotency_key,
        logical_attempt=operation.logical_attempt,
        status=EntryStatus.AWAITING_DECISION,
        tool=tool.reference,
        input=value,
        error=failure,
        side_effect=evidence.side_effect,
        attempts=evidence.attempts,
        first_failed_at=times[0],
        last_failed_at=times[-1],
        delivery=evidence.delivery
        or Delivery(
            workflow_id=info.workflow_id,
            workflow_run_id=info.run_id,
            activity_id="call_tool",
            task_queue=tool.task_queue,
            attempt=1,
        ),
        runtime=Runtime(
            redrive=evidence.redrive_version,
            temporalio=evidence.temporalio_version,
            build_id=info.get_current_build_id(),
        ),
        correlation_id=node.correlation_id,
        trace_id=node.trace_id,
        failure_fingerprint=failure_fingerprint(tool.name, failure),
        redrives=evidence.redrives,
        attempts_omitted=evidence.attempts_omitted,
        decisions=merged(decisions, evidence.decisions),
        eligibility=Eligibility(redrivable=False, refusals=[], checked_at=evidence.at),
    )


def refreshed(entry: Entry, evidence: Evidence) -> Entry:
    """The entry with what has been tried since it was opened."""
    last = evidence.attempts[-1]
    return entry.model_copy(
        update={
            "attempts": evidence.attempts,
            "attempts_omitted": evidence.attempts_omitted,
            "side_effect": evidence.side_effect,
            "last_failed_at": last.ended_at or last.started_at,
            "delivery": evidence.delivery or entry.delivery,
        }
    )


def made_by_hand(evidence: Evidence | None = None, _refused: Refusal | None = None) -> ErrorInfo:
    """The failure of a call that a person has completed with something that is no result of it."""
    return _by_hand(evidence.attempts if evidence is not None else [], _COMPLETED_BY_HAND)


def _by_hand(attempts: Sequence[AttemptRecord], message: str) -> ErrorInfo:
    last = attempts[-1] if attempts else None
    category = last.category if last is not None and last.category is not None else Category.UNKNOWN_SIDE_EFFECT
    return ErrorInfo(category=category, code=Code.BY_HAND, message=clip_message(message))


def message_of(error: ActivityError) -> str:
    """What the activity itself said, or nothing."""
    return error.cause.message if isinstance(error.cause, FailureError) else ""


def with_remark(failure: ErrorInfo, remark: str) -> ErrorInfo:
    """The failure with something added to its message."""
    return failure.model_copy(update={"message": clip_message(f"{failure.message} ({remark})")})


def known_absent(failure: ErrorInfo) -> ErrorInfo:
    """The failure of an operation whose tool says that nothing happened."""
    return with_remark(failure, "reconcile: the tool says that nothing happened")
