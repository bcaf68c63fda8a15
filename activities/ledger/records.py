"""What the ledger holds and what `claim` answers."""

from collections.abc import Mapping
from datetime import timedelta
from enum import StrEnum

from contracts.base import Json, Model, UtcTime
from contracts.dead_letters import DecisionRecord, Delivery
from contracts.dispatch import NodeEnd, Redriven
from contracts.failures import AttemptRecord, Category, OperationState, Outcome, SideEffect
from contracts.identity import OperationId
from contracts.runs import Source

__all__ = [
    "Begun",
    "Busy",
    "ClaimAnswer",
    "ClaimRequest",
    "EndedRun",
    "Granted",
    "Mismatch",
    "NodeView",
    "OperationRow",
    "OperationState",
    "OperationView",
    "Paused",
    "Pruned",
    "Settled",
    "Settlement",
    "Spent",
    "Stale",
    "Unsettled",
    "UnsettledOperation",
]


class ClaimRequest(Model):
    """Asks for the right to send.

    Attributes:
        fingerprint: The tool's, as the dispatch has it; the operation keeps the one it was first claimed with.
        scheduled_at: The delivery's ``current_attempt_scheduled_time``, by Temporal's clock.
        node_started_at: When the node's workflow first started, by Temporal's clock.
        now: The present, by the same one.
        owner: Who asks; unique for each delivery in each process.
        worker: Who asks, for people.
        redrives: How often the node had been redriven when this dispatch was made.
        budgets: How many attempts each category has, since the last accepted redrive.
        risk: What a lost attempt may have done: POSSIBLE, or NONE for a tool that only reads.
        interval: How far apart the calls of this tool have to be, whoever makes them; None: it has no rate.
        first_only: Grant nothing but the node's first attempt.
        despite_epoch: The asker has seen that attempts up to this epoch are unsettled, and may repeat them.
    """

    operation: OperationId
    redrives: int
    tool: str
    fingerprint: str
    input: Json
    input_hash: str
    scheduled_at: UtcTime
    node_started_at: UtcTime
    now: UtcTime
    delivery: Delivery
    owner: str
    worker: str
    budgets: Mapping[Category, int]
    risk: SideEffect
    interval: timedelta | None = None
    first_only: bool = False
    despite_epoch: int | None = None


class Granted(Model):
    """Send. ``epoch`` fences whatever is committed; ``fingerprint`` is the operation's.

    ``since_first_send`` is by the ledger's clock: no worker's clock is ever compared with another's. ``wait`` is how
    long to let pass before: until then it is the turn of others.
    """

    epoch: int
    attempt: int
    fingerprint: str
    failures: Mapping[Category, int]
    last_category: Category | None
    since_first_send: timedelta
    wait: timedelta


class Settled(Model):
    """The node has ended, or the operation has succeeded: this is how."""

    end: NodeEnd
    output: Json
    source: Source | None
    operation_id: str
    attempt_count: int


class Unsettled(Model):
    """An earlier attempt may have had its effect, up to ``epoch``."""

    epoch: int
    attempts: list[AttemptRecord]
    side_effect: SideEffect
    since_first_send: timedelta
    resendable: bool
    """False where the effect is confirmed and its result unusable: never repeated by itself."""


class Busy(Model):
    """Another owner's lease still runs, or (``floor``) the tool asked not to be called yet."""

    remaining: timedelta
    floor: bool = False


class Begun(Model):
    """Only a first attempt was asked for, and there has been one, which has ended or is lost."""


class Paused(Model):
    """The tool has asked everybody to be left alone, is down (the category), or is called as often as its rate allows.

    That costs no attempt.

    Attributes:
        remaining: In how long to ask again.
        probing: One call is finding out whether it is over.
        paced: It is the rate.
    """

    remaining: timedelta
    category: Category
    probing: bool = False
    paced: bool = False


class Stale(Model):
    """This delivery is not the node's current one; ``current`` is where the node stands."""

    current: Redriven | None
    attempt_count: int = 0


class Mismatch(Model):
    """The same operation id with another input."""


class Spent(Model):
    """The category's budget is spent: the earlier failure stands."""

    outcome: Outcome
    attempt: int


ClaimAnswer = Granted | Settled | Begun | Unsettled | Busy | Paused | Stale | Mismatch | Spent


class Settlement(StrEnum):
    """What has settled an attempt's side effect."""

    SUCCESS = "SUCCESS"
    ABSENT = "ABSENT"
    COMMITTED = "COMMITTED"
    DECISION = "DECISION"


class NodeView(Model):
    """What the ledger knows of a node: the newest attempts last."""

    tool: str
    """Empty where nothing but a cancel is known of the node."""
    input: Json
    logical_attempt: int
    fingerprint: str
    redrives: int
    cancelled: bool
    end: NodeEnd | None
    output: Json
    """Of a node that has ended with one."""
    source: Source | None
    decisions: list[DecisionRecord]
    attempts: list[AttemptRecord]
    operation_id: str
    epoch: int
    side_effect: SideEffect
    """The current operation's: the worst over its attempts that nothing has settled since."""
    in_flight: bool
    """Whether somebody's lease on the current operation still runs."""
    unknown_failures: int
    """Attempts of unknown effect since the last accepted redrive; each has been, or is to be, reconciled."""
    delivery: Delivery | None
    since_first_send: timedelta | None
    """How long ago, by the ledger's clock, the current operation's first attempt started."""
    since_last_send: timedelta | None
    """The same of its newest attempt with an effect that nothing has settled: its horizon counts from there."""


class OperationRow(Model):
    """An operation in a list."""

    operation_id: str
    run_id: str
    node_id: str
    tool: str
    state: OperationState
    side_effect: SideEffect
    attempts: int
    first_sent_at: UtcTime | None
    last_sent_at: UtcTime | None


class UnsettledOperation(Model):
    """A node's current operation whose effect is uncertain, and that neither an answer nor a person has ended."""

    operation_id: str
    run_id: str
    node_id: str
    tool: str


class EndedRun(Model):
    """A run of which nothing is left to be done, as far as the ledger knows."""

    run_id: str
    node_ids: list[str]


class Pruned(Model):
    """What was forgotten."""

    nodes: int = 0
    operations: int = 0
    attempts: int = 0


class OperationView(Model):
    """What ``redrive ledger show`` prints."""

    operation_id: str
    idempotency_key: str
    run_id: str
    node_id: str
    logical_attempt: int
    tool: str
    fingerprint: str
    state: OperationState
    side_effect: SideEffect
    epoch: int
    attempts: list[AttemptRecord]
    node_end: NodeEnd | None
    node_cancelled: bool
    redrives: int
    decisions: list[DecisionRecord]
