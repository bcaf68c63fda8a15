"""What travels between workflows and activities: facts about a tool, the dispatch envelope, and the answers."""

from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from contracts.base import Json, Model, UtcTime
from contracts.canonical import content_hash
from contracts.dead_letters import (
    Action,
    DecisionRecord,
    Delivery,
    Entry,
    EntryStatus,
    ErrorInfo,
    RefusalCode,
    ToolRef,
)
from contracts.failures import AttemptRecord, Category, Code, SideEffect
from contracts.identity import OperationId
from contracts.limits import INLINE, Limits
from contracts.runs import ApprovalGrant, NodeId, NodeResult, NodeState, NodeStatus, Revocation, RunId, Source
from contracts.sweep import RunExecution

__all__ = [
    "Admission",
    "Approved",
    "CallResult",
    "CancelRequest",
    "Change",
    "DeadLetterInput",
    "DeadLetterResult",
    "DecideAnswer",
    "DecideRequest",
    "Dispatch",
    "Evidence",
    "EvidenceRequest",
    "FailureDetails",
    "MadeAtOnce",
    "NodeChange",
    "NodeEnd",
    "NodeInput",
    "NodeReport",
    "OutputsRequest",
    "PreflightAnswer",
    "PreflightRequest",
    "QueuedDecision",
    "ReconcileAnswer",
    "ReconcileRequest",
    "Redriven",
    "Refusal",
    "ReportTo",
    "ToolFacts",
    "Verdict",
]


_MAX_WORKFLOW_ID: Final = 1000


class ToolFacts(Model):
    """What the workflows need to know of a tool, as the catalog had it when it was looked at."""

    name: str
    version: str
    fingerprint: str
    timeout: timedelta
    absent_after: timedelta
    task_queue: str
    rated: bool
    """Whether it has a rate, and so a task queue of its own."""
    askable: bool
    """Whether it has a reconcile URL."""
    largest_output: int = INLINE.output
    """How many bytes its output may have."""

    @property
    def reference(self) -> ToolRef:
        """What a dead letter shows of it."""
        return ToolRef(name=self.name, version=self.version, fingerprint=self.fingerprint)


class Admission(Model):
    """The answer of ``admit``: every problem, or the facts about every tool of the run."""

    problems: list[str] = []
    tools: dict[str, ToolFacts] = {}
    limits: Limits = INLINE


class Refusal(Model):
    """Why nothing may be sent for a node, found before any delivery."""

    category: Category
    code: Code
    message: str


class Approved(Model):
    """An approval and what it covers: one tool by fingerprint and one input by content."""

    grant: ApprovalGrant
    fingerprint: str
    input_hash: str

    def covers(self, fingerprint: str, value: Json) -> bool:
        """Whether it covers that tool and that input."""
        return self.fingerprint == fingerprint and self.input_hash == content_hash(value)


class NodeInput(Model):
    """What a run starts a node with."""

    run_id: RunId
    node_id: NodeId
    started_by: RunExecution
    begun_at: UtcTime
    """When the run began with it, whatever has been started for it since: a younger ledger has forgotten something."""
    tool: ToolFacts
    input: Json
    refusal: Refusal | None = None
    """Set where the input could not be resolved: a dead letter without a call."""
    approval: ApprovalGrant | None = None
    revoked: list[Revocation] = []
    deadline: timedelta
    not_before: UtcTime | None = None
    """Set where the run itself has made the first attempt: when the next one is planned."""
    failure: ErrorInfo | None = None
    """Set where that attempt has ended for good: there is no other before a person has decided."""
    correlation_id: str | None
    trace_id: str
    limits: Limits = INLINE


class NodeChange(Model):
    """What a node tells its run when a person is, or is no longer, needed."""

    node_id: str
    state: NodeState
    reason: str = ""


class NodeReport(Model):
    """How a node ended, told to a run that did not start it: its result, or how it failed."""

    node_id: str
    status: NodeStatus
    result: NodeResult | None = None


def _within_temporals_limit(workflow_id: str) -> str:
    if len(workflow_id.encode("utf-8", "surrogatepass")) > _MAX_WORKFLOW_ID:
        raise ValueError(f"a workflow id has at most {_MAX_WORKFLOW_ID} bytes")
    return workflow_id


class ReportTo(Model):
    """Asks a node or a dead letter that is already open to tell this workflow, too, how it ends."""

    workflow_id: Annotated[str, Field(min_length=1), AfterValidator(_within_temporals_limit)]
    execution: RunExecution | None = None
    """Of the run that asks."""


class Dispatch(Model):
    """The dispatch envelope: it locates the work, it carries no run state."""

    run_id: str
    node_id: str
    logical_attempt: int
    redrives: int
    tool: str
    fingerprint: str
    input: Json
    deadline: UtcTime
    node_started_at: UtcTime
    correlation_id: str | None
    trace_id: str
    approval: ApprovalGrant | None = None
    refusal: Refusal | None = None
    first_attempt: bool = False
    """Made by the run itself: of an operation that has been attempted before, this is left to its node's workflow."""
    made_at: UtcTime | None = None
    """By Temporal's clock; for a local activity, whose own times are its worker's."""

    @property
    def operation(self) -> OperationId:
        """The operation that is to be performed."""
        return OperationId(run_id=self.run_id, node_id=self.node_id, logical_attempt=self.logical_attempt)


class NodeEnd(StrEnum):
    """How a node ended, as the ledger has it."""

    SUCCEEDED = "SUCCEEDED"
    RESOLVED = "RESOLVED"
    DISCARDED = "DISCARDED"
    CANCELLED = "CANCELLED"


class Redriven(Model):
    """Where an accepted redrive has put a node: the operation that is now current."""

    logical_attempt: int
    input: Json
    fingerprint: str
    redrives: int
    approval: Approved | None = None


class CallResult(Model):
    """The answer of ``call_tool`` when nothing failed.

    Either the node has ended (``end``), or it has been redriven since (``redriven``: dispatch anew).
    """

    end: NodeEnd | None = None
    output: Json = None
    source: Source | None = None
    operation_id: str
    attempt_count: int
    redriven: Redriven | None = None
    tool: ToolFacts | None = None
    """The tool as the catalog now has it, where the node was redriven."""


class FailureDetails(Model):
    """The retry envelope: the details of every failure of ``call_tool``."""

    operation_id: str
    attempt: int
    category: Category
    code: str
    message: str
    http_status: int | None
    side_effect: SideEffect
    next_eligible_at: UtcTime | None
    delivery: Delivery

    @property
    def error(self) -> ErrorInfo:
        """What a dead letter shows of it."""
        return ErrorInfo(category=self.category, code=self.code, message=self.message, http_status=self.http_status)


class MadeAtOnce(Model):
    """The answer of ``call_at_once``."""

    answer: CallResult | FailureDetails | None
    """None: ``call_tool`` is to go on."""
    seconds: float
    """How long it took: what a run decides by that has to stand in its history."""


class Verdict(StrEnum):
    """What a tool says became of an operation."""

    COMMITTED = "COMMITTED"
    ABSENT = "ABSENT"
    NO_ANSWER = "NO_ANSWER"


class ReconcileRequest(Model):
    """Asks what became of an operation.

    ``once``: for a person who waits; one question, and no answer is an answer. Otherwise it is asked again under the
    policy of ``DEPENDENCY_DOWN``, and "absent" is waited for until the horizon.
    """

    run_id: str
    node_id: str
    logical_attempt: int
    tool: str
    input: Json
    correlation_id: str | None
    trace_id: str
    once: bool = False

    @property
    def operation(self) -> OperationId:
        """The operation that is asked about."""
        return OperationId(run_id=self.run_id, node_id=self.node_id, logical_attempt=self.logical_attempt)


class ReconcileAnswer(Model):
    """What the tool said; ``output`` only counts where it is COMMITTED and usable."""

    verdict: Verdict
    usable: bool = False
    output: Json = None
    message: str = ""
    may_resend: bool = False
    """ABSENT, and the operation may be sent again by itself."""
    attempt_count: int = 0


class EvidenceRequest(Model):
    """Asks for all that the ledger knows of a node."""

    run_id: str
    node_id: str
    node_started_at: UtcTime
    tool: str


class Evidence(Model):
    """All that the ledger knows of a node, newest attempts last."""

    attempts: list[AttemptRecord]
    attempts_omitted: int
    attempt_count: int
    side_effect: SideEffect
    delivery: Delivery | None
    decisions: list[DecisionRecord]
    redrives: int
    end: NodeEnd | None = None
    """Set where the node has ended: only the answer of its call was lost."""
    output: Json = None
    source: Source | None = None
    in_flight: bool = False
    """Somebody is at work on it just now."""
    at: UtcTime
    redrive_version: str
    temporalio_version: str


class OutputsRequest(Model):
    """Asks for what nodes have ended with: of each, the places in its output that are needed (JSON Pointers)."""

    run_id: str
    pointers: dict[str, list[str]]


class QueuedDecision(Model):
    """A decision by signal that had not had its turn when a dead letter continued as new."""

    action: Action
    payload: Json
    decision_id: str


class DeadLetterInput(Model):
    """What a node starts its dead letter with."""

    entry: Entry
    approval: Approved | None
    unresolved: bool = False
    """The entry's input could not be resolved, or is too large: a redrive has to bring another."""
    revoked: list[str] = []
    """Ids of approvals that were revoked."""
    limits: Limits = INLINE
    node_gone: bool = False
    """The node has been cancelled and waits for nothing: the entry outlives it."""
    node_started_at: UtcTime | None = None
    """None where it is not the node that starts it."""
    announced: bool = False
    """The alert has gone out already: this execution continues an earlier one."""
    queue: list[QueuedDecision] = []
    report_to: list[str] = []
    """Workflow ids of nodes that did not start it and want to hear what it ends with."""


class DeadLetterResult(Model):
    """What a dead letter ends with: the decision for the node to act on."""

    status: EntryStatus
    record: DecisionRecord | None = None
    redriven: Redriven | None = None
    tool: ToolFacts | None = None
    output: Json = None
    source: Source | None = None
    decisions: list[DecisionRecord] = []


class PreflightRequest(Model):
    """Everything a redrive is checked against the present with."""

    run_id: str
    node_id: str
    logical_attempt: int
    tool: ToolRef
    input: Json
    unresolved: bool = False
    """The input could not be resolved, or is too large: as it is, it can never be sent."""
    new_operation: bool = False
    approval: Approved | None = None
    new_approval: ApprovalGrant | None = None
    revoked: list[str] = []
    redrives: int
    attempts_seen: int = 0
    """How many attempts the entry knows of: a ledger that has none is not the one that they were written to."""
    node_started_at: UtcTime | None = None
    resolution: Json = None
    resolves: bool = False
    """Whether ``resolution`` is an output to be checked against the tool's present schema."""


class PreflightAnswer(Model):
    """What stands in the way, and the present facts."""

    refusals: list[RefusalCode]
    side_effect: SideEffect
    run_gone: bool
    tool: ToolFacts | None = None
    approval: Approved | None = None
    """The approval that the redriven node would go on under."""
    output_problems: list[str] = []
    redrives: int = 0
    """As the ledger has it."""
    attempt_count: int = 0
    """The same."""
    ended: NodeEnd | None = None
    """Set where the node has ended without this entry's decision: its answer came late, but it came."""
    output: Json = None
    source: Source | None = None
    at: UtcTime


class Change(StrEnum):
    """What an accepted decision does to the node."""

    REDRIVE = "REDRIVE"
    RESOLVE = "RESOLVE"
    DISCARD = "DISCARD"


class DecideRequest(Model):
    """Commits an accepted decision to the node's row, before anything acts on it."""

    run_id: str
    node_id: str
    redrives: int
    logical_attempt: int
    record: DecisionRecord
    change: Change
    attempts_seen: int | None = None
    """How many attempts of the node the decision was made in view of; None where their number does not matter."""
    accepts_risk: bool = False
    """The person has overridden what stood against a second effect."""
    new_operation: bool = False
    input: Json = None
    tool: ToolRef | None = None
    approval: Approved | None = None
    output: Json = None
    source: Source = Source.RESOLVED


class DecideAnswer(Model):
    """The record that counts: the one sent, the first one under its id, or a refusal; and where the node now stands."""

    record: DecisionRecord
    redriven: Redriven | None = None


class CancelRequest(Model):
    """Marks nodes as cancelled, so that nothing new is sent for them, ever.

    Not ``for_good``: only what is under way now is held back. The same run, started again, goes on with them.
    """

    run_id: str
    node_ids: list[str]
    for_good: bool = True
