"""What the ledger's rows say: pure readings of them, and the text forms that they are kept in."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from activities.ledger.clock import Moment
from contracts.base import Json
from contracts.dead_letters import DecisionRecord
from contracts.dispatch import Approved, Redriven
from contracts.failures import UNCOUNTED, AttemptRecord, Category, Code, OperationState, SideEffect
from contracts.identity import OperationId

__all__ = [
    "LOST_MESSAGE",
    "Row",
    "category_of",
    "current_operation",
    "decisions_of",
    "elapsed",
    "failures_of",
    "is_at_risk",
    "is_lost",
    "is_unknown",
    "lease_left",
    "output_of",
    "own_time",
    "record_of",
    "redriven_of",
    "state_of",
    "to_json",
    "to_text",
    "to_time",
]

Row = Mapping[str, Any]

LOST_MESSAGE: Final = "the worker was lost before the attempt had an end"
_LEDGER_LOST_MESSAGE: Final = "the node is older than this ledger: what an earlier ledger knew of it is lost"


def failures_of(attempts: Sequence[Row]) -> Counter[Category]:
    """How often each category has failed; what was our own fault is not counted."""
    return Counter(category_of(attempt) for attempt in attempts if attempt["code"] not in UNCOUNTED)


def category_of(attempt: Row) -> Category:
    """An attempt without an end counts as TRANSIENT."""
    return Category(attempt["category"]) if attempt["category"] else Category.TRANSIENT


def is_at_risk(attempt: Row) -> bool:
    """Whether a blind repetition could be a second effect."""
    return attempt["side_effect"] != SideEffect.NONE and attempt["settled"] is None and attempt["accepted_by"] is None


def is_lost(attempt: Row) -> bool:
    """Whether nobody committed an end: neither a success nor a failure (a fenced one came back too late for either)."""
    return attempt["category"] is None and (attempt["ended_at"] is None or attempt["code"] is not None)


def is_unknown(attempt: Row) -> bool:
    """Whether nobody knows what the attempt did."""
    return attempt["category"] == Category.UNKNOWN_SIDE_EFFECT or is_lost(attempt)


def state_of(operation: Row, side_effect: SideEffect, leased: bool) -> OperationState:
    """Where an operation stands."""
    if operation["succeeded_at"] is not None:
        return OperationState.SUCCEEDED
    if leased:
        return OperationState.IN_FLIGHT
    return OperationState.FAILED if side_effect is SideEffect.NONE else OperationState.UNSETTLED


def record_of(attempt: Row, running: int | None = None) -> AttemptRecord:
    """An attempt as people see it; one whose worker was lost says so, the running one (by its epoch) does not."""
    lost = is_lost(attempt) and attempt["epoch"] != running
    message = _LEDGER_LOST_MESSAGE if attempt["code"] == Code.LEDGER_LOST else LOST_MESSAGE
    return AttemptRecord(
        attempt=attempt["attempt"],
        started_at=to_time(attempt["started_at"]),
        ended_at=to_time(attempt["ended_at"]) if attempt["ended_at"] else None,
        worker=attempt["worker"],
        category=category_of(attempt) if lost or attempt["category"] else None,
        code=attempt["code"] or (Code.WORKER_LOST if lost else None),
        message=attempt["message"] or (message if lost else None),
        http_status=attempt["http_status"],
        side_effect=SideEffect(attempt["side_effect"]),
        next_eligible_at=to_time(attempt["next_eligible_at"]) if attempt["next_eligible_at"] else None,
    )


def current_operation(node: Row) -> OperationId:
    """The operation that a node is at."""
    return OperationId(run_id=node["run_id"], node_id=node["node_id"], logical_attempt=node["logical_attempt"])


def output_of(node: Row, operation: Row | None) -> Json:
    """What a node has ended with: what a person vouched for, or the operation's result."""
    text = node["output"] if node["output"] is not None else operation["result"] if operation else None
    value: Json = None if text is None else json.loads(text)
    return value


def redriven_of(node: Row) -> Redriven:
    """Where a node stands, for a dispatch that is behind."""
    approval = json.loads(node["approval"])
    return Redriven(
        logical_attempt=node["logical_attempt"],
        input=json.loads(node["input"]),
        fingerprint=node["fingerprint"],
        redrives=node["redrives"],
        approval=Approved.model_validate(approval) if approval else None,
    )


def decisions_of(node: Row) -> list[DecisionRecord]:
    """The decisions that a node has accepted."""
    return [DecisionRecord.model_validate(record) for record in json.loads(node["decisions"])]


def to_json(value: Json) -> str:
    """As JSON is kept."""
    return json.dumps(value, separators=(",", ":"))


def to_text(moment: datetime) -> str:
    """As times are kept: UTC, sortable."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def to_time(text: str) -> datetime:
    """The reverse of `to_text`."""
    return datetime.fromisoformat(text)


def lease_left(moment: Moment, operation: Row) -> timedelta:
    """How long somebody's lease on an operation still runs; one of another boot is over."""
    if operation["owner"] is None or operation["lease_boot"] != moment.boot:
        return timedelta(0)
    return timedelta(seconds=operation["lease_until"] - moment.seconds)


def own_time(moment: Moment, attempt: Row) -> datetime:
    """The present as an attempt has it: the wall clock of its start, and what has passed since; that does not jump."""
    return to_time(attempt["started_at"]) + elapsed(moment, attempt)


def elapsed(moment: Moment, attempt: Row) -> timedelta:
    """How long ago an attempt started; by the wall clock only where the other has started anew since."""
    if attempt["started_boot"] == moment.boot:
        return timedelta(seconds=moment.seconds - attempt["started_clock"])
    return moment.now - to_time(attempt["started_at"])
