"""Dead letters: the evidence, the decisions a person may take, and the refusals, each with its cure."""

import hashlib
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field, StrictBool, StrictInt, ValidationError, ValidationInfo

from contracts.base import Json, Model, UtcTime, problems_of, tell
from contracts.canonical import json_problem, json_size
from contracts.failures import AttemptRecord, Category, SideEffect
from contracts.limits import INLINE, Limits
from contracts.runs import ApprovalGrant, NodeId, RunId

__all__ = [
    "DECISIONS",
    "MAX_ATTEMPTS_SHOWN",
    "MAX_DECISIONS_SHOWN",
    "REFUSALS",
    "Action",
    "CheckDecision",
    "Decision",
    "DecisionOutcome",
    "DecisionRecord",
    "Delivery",
    "DiscardDecision",
    "Eligibility",
    "Entry",
    "EntryStatus",
    "ErrorInfo",
    "MalformedDecisionError",
    "ReconcileDecision",
    "RedriveDecision",
    "RefusalCode",
    "RefusalRule",
    "ResolveDecision",
    "Runtime",
    "ToolRef",
    "failure_fingerprint",
    "kept",
    "merged",
    "parse_decision",
]

MAX_ATTEMPTS_SHOWN: Final = 200
MAX_DECISIONS_SHOWN: Final = 200
"""The newest; the ledger has every accepted one."""
_MAX_DECISION_BYTES: Final = 256 * 1024

_VARIABLE_PART: Final = re.compile(r"[\w:.+-]*\d[\w:.+-]*")


class Action(StrEnum):
    """What a person may ask for: the names of the signals and updates."""

    REDRIVE = "redrive"
    DISCARD = "discard"
    RESOLVE = "resolve"
    RECONCILE = "reconcile"
    CHECK = "check"


class EntryStatus(StrEnum):
    """Where a dead letter stands."""

    AWAITING_DECISION = "AWAITING_DECISION"
    REDRIVEN = "REDRIVEN"
    DISCARDED = "DISCARDED"
    RESOLVED = "RESOLVED"
    OBSOLETE = "OBSOLETE"
    """Closed without a decision: its run is gone and no effect is possible."""


class DecisionOutcome(StrEnum):
    """What became of a decision."""

    ACCEPTED = "ACCEPTED"
    REFUSED = "REFUSED"
    REJECTED = "REJECTED"
    """Malformed."""
    NOTED = "NOTED"


class RefusalCode(StrEnum):
    """Why a decision is refused."""

    RUN_CLOSED = "RUN_CLOSED"
    RUN_CANCELLING = "RUN_CANCELLING"
    NODE_CLOSED = "NODE_CLOSED"
    TOOL_MISSING = "TOOL_MISSING"
    TOOL_CHANGED = "TOOL_CHANGED"
    INPUT_INVALID = "INPUT_INVALID"
    APPROVAL_EXPIRED = "APPROVAL_EXPIRED"
    APPROVAL_REVOKED = "APPROVAL_REVOKED"
    APPROVAL_VOID = "APPROVAL_VOID"
    SIDE_EFFECT_UNRESOLVED = "SIDE_EFFECT_UNRESOLVED"
    EFFECT_CONFIRMED = "EFFECT_CONFIRMED"
    DEDUPE_WINDOW_EXPIRED = "DEDUPE_WINDOW_EXPIRED"
    REDRIVE_LIMIT = "REDRIVE_LIMIT"
    EVIDENCE_CHANGED = "EVIDENCE_CHANGED"
    ALREADY_DECIDED = "ALREADY_DECIDED"


class RefusalRule(Model):
    """When a refusal is given, what a person can do about it, and whether ``override`` may name it."""

    when: str
    cure: str
    overridable: bool = False


def _rule(when: str, cure: str, overridable: bool = False) -> RefusalRule:
    return RefusalRule(when=when, cure=cure, overridable=overridable)


_NEW_APPROVAL: Final = "bring a new approval along with the redrive"

REFUSALS: Final[Mapping[RefusalCode, RefusalRule]] = {
    RefusalCode.RUN_CLOSED: _rule("the run has ended", "start a new run; resolve or discard to settle the record"),
    RefusalCode.RUN_CANCELLING: _rule("the run is being cancelled", "wait for its end, then start a new run"),
    RefusalCode.NODE_CLOSED: _rule(
        "the node no longer waits for this entry", "look at the node; nothing is left to do"
    ),
    RefusalCode.TOOL_MISSING: _rule("the catalog has no such tool any more", "put the tool back into the catalog"),
    RefusalCode.TOOL_CHANGED: _rule("the tool is not the one that failed", "look at the change, then override", True),
    RefusalCode.INPUT_INVALID: _rule("the input breaks the tool's present schema", "redrive with an edited input"),
    RefusalCode.APPROVAL_EXPIRED: _rule("the node's approval has expired", _NEW_APPROVAL),
    RefusalCode.APPROVAL_REVOKED: _rule("the node's approval was revoked", _NEW_APPROVAL),
    RefusalCode.APPROVAL_VOID: _rule("the approval does not cover this tool and input", _NEW_APPROVAL),
    RefusalCode.SIDE_EFFECT_UNRESOLVED: _rule(
        "the effect may have happened, and sending again could repeat it",
        "find out at the tool, then resolve or reconcile; override to send again all the same",
        True,
    ),
    RefusalCode.EFFECT_CONFIRMED: _rule("the effect has happened; sending again would repeat it", "resolve it instead"),
    RefusalCode.DEDUPE_WINDOW_EXPIRED: _rule(
        "the tool no longer remembers the key, and the effect may have happened",
        "find out at the tool, then resolve or reconcile; override to send again all the same",
        True,
    ),
    RefusalCode.REDRIVE_LIMIT: _rule("the tool's max_redrives is reached", "resolve, discard, or override", True),
    RefusalCode.EVIDENCE_CHANGED: _rule(
        "the entry has been redriven since it was looked at", "look again, then decide"
    ),
    RefusalCode.ALREADY_DECIDED: _rule("another decision was first", "look at the entry's decisions"),
}
"""One row for each refusal."""


class ToolRef(Model):
    """The tool that failed."""

    name: str
    version: str
    fingerprint: str


class ErrorInfo(Model):
    """The failure that ended the node's attempts."""

    category: Category
    code: str
    message: str
    http_status: int | None = None


class Delivery(Model):
    """Temporal's delivery that the failure came from."""

    workflow_id: str
    workflow_run_id: str
    activity_id: str
    task_queue: str
    attempt: int


class Runtime(Model):
    """The versions that were at work."""

    redrive: str
    temporalio: str
    build_id: str


class DecisionRecord(Model):
    """What was decided, by whom, and what became of it; for a rejected one ``reason`` says what is malformed."""

    decision_id: str
    action: str
    decided_by: str
    reason: str
    at: UtcTime
    outcome: DecisionOutcome
    refusals: list[RefusalCode] = []


class Eligibility(Model):
    """Whether a plain redrive would be accepted, at the time of the last check."""

    redrivable: bool
    refusals: list[RefusalCode]
    checked_at: UtcTime


class Entry(Model):
    """A dead letter's whole evidence: the answer of the ``entry`` query."""

    run_id: RunId
    node_id: NodeId
    operation_id: str
    idempotency_key: str
    logical_attempt: int
    status: EntryStatus
    tool: ToolRef
    input: Json
    error: ErrorInfo
    side_effect: SideEffect
    attempts: list[AttemptRecord]
    first_failed_at: UtcTime
    last_failed_at: UtcTime
    delivery: Delivery
    runtime: Runtime
    correlation_id: str | None
    trace_id: str
    failure_fingerprint: str
    redrives: int
    attempts_omitted: int
    decisions: list[DecisionRecord]
    eligibility: Eligibility


def _names_overridable_codes(codes: list[RefusalCode]) -> list[RefusalCode]:
    for code in codes:
        if not REFUSALS[code].overridable:
            allowed = ", ".join(code for code, rule in REFUSALS.items() if rule.overridable)
            raise ValueError(f"{code} cannot be overridden ({REFUSALS[code].cure}); these can: {allowed}")
    return codes


def _no_larger_than(largest: Callable[[Limits], int]) -> AfterValidator:
    """A limit of those in the validation's context."""

    def check(value: Json, info: ValidationInfo) -> Json:
        limit = largest(info.context or INLINE)
        size = json_size(value)
        if size > limit:
            raise ValueError(f"has {size} bytes as JSON; {limit} are allowed")
        return value

    return AfterValidator(check)


_By = Annotated[str, Field(min_length=1, max_length=200)]
_Reason = Annotated[str, Field(min_length=1, max_length=1000)]


class Decision(Model):
    """What every decision may carry.

    Attributes:
        decision_id: One seen before changes nothing and gets the first one's record.
        if_redrives: The ``redrives`` that the person was looking at.
    """

    decided_by: _By
    reason: _Reason
    decision_id: str | None = Field(default=None, min_length=1, max_length=200)
    if_redrives: StrictInt | None = Field(default=None, ge=0)


class RedriveDecision(Decision):
    """Send again: the same operation, or a new one.

    An edited ``input`` is always a new operation.
    """

    input: Annotated[Json, _no_larger_than(lambda limits: limits.input)] = None
    new_operation: StrictBool = False
    approval: ApprovalGrant | None = None
    override: Annotated[list[RefusalCode], AfterValidator(_names_overridable_codes)] = []

    @property
    def edits_input(self) -> bool:
        """Whether an input was given (null is one)."""
        return "input" in self.model_fields_set

    @property
    def is_new_operation(self) -> bool:
        """Whether it is sent under a new key."""
        return self.new_operation or self.edits_input


class DiscardDecision(Decision):
    """Give the node up."""


class ResolveDecision(Decision):
    """End the node with a result that the person vouches for."""

    output: Annotated[Json, _no_larger_than(lambda limits: limits.output)]


class ReconcileDecision(Decision):
    """Ask the tool again what happened."""

    reason: str = Field(default="", max_length=1000)


class CheckDecision(Decision):
    """Refresh ``eligibility``; decide nothing."""

    decided_by: str = Field(default="", max_length=200)
    reason: str = Field(default="", max_length=1000)


DECISIONS: Final[Mapping[Action, type[Decision]]] = {
    Action.REDRIVE: RedriveDecision,
    Action.DISCARD: DiscardDecision,
    Action.RESOLVE: ResolveDecision,
    Action.RECONCILE: ReconcileDecision,
    Action.CHECK: CheckDecision,
}


class MalformedDecisionError(ValueError):
    """The payload of a decision is not usable; the message names every problem with its place."""


def parse_decision(action: Action, payloads: list[Any], limits: Limits = INLINE) -> Decision:
    """Reads the payload of a decision from whatever was sent.

    Raises:
        MalformedDecisionError: with every problem.
    """
    if not payloads and action is Action.CHECK:
        return CheckDecision()
    if len(payloads) != 1:
        raise MalformedDecisionError(f"{action} takes one argument, a JSON object; {len(payloads)} were sent")
    payload = payloads[0]
    if problem := json_problem(payload):
        raise MalformedDecisionError(f"the payload cannot be read: {problem}")
    if not isinstance(payload, dict):
        raise MalformedDecisionError(f"{action} takes a JSON object, not {tell(payload)}")
    try:
        return DECISIONS[action].model_validate(payload, context=limits)
    except ValidationError as error:
        raise MalformedDecisionError("; ".join(problems_of(error))) from None


def failure_fingerprint(tool: str, error: ErrorInfo) -> str:
    """Equal for failures of the same kind: tool, category, code, and the message without its ids, numbers and times."""
    kind = _VARIABLE_PART.sub("#", error.message)
    text = f"{tool}\n{error.category}\n{error.code}\n{kind}"
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def kept(records: list[DecisionRecord]) -> list[DecisionRecord]:
    """The newest decisions, as many as a dead letter carries: two hundred, and 256 KiB."""
    size = 0
    newest: list[DecisionRecord] = []
    for record in reversed(records[-MAX_DECISIONS_SHOWN:]):
        size += len(record.model_dump_json().encode())
        if size > _MAX_DECISION_BYTES:
            break
        newest.append(record)
    return newest[::-1]


def merged(records: list[DecisionRecord], more: list[DecisionRecord]) -> list[DecisionRecord]:
    """Both lists, each decision once, the newest of them last and no more than a dead letter carries."""
    by_id = {record.decision_id: record for record in [*more, *records]}
    return kept(sorted(by_id.values(), key=lambda record: record.at))
