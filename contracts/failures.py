"""The error taxonomy: what kind of failure, can the effect have happened, and what to do next.

The two questions are always separate. Everything here is a table or a pure function over one.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Final

from pydantic import Field

from contracts.base import Model, UtcTime

__all__ = [
    "MAX_DELIVERIES_WITHOUT_ATTEMPT",
    "MAX_MESSAGE_BYTES",
    "MAX_RESENDS_AFTER_ABSENT",
    "POLICIES",
    "TERMINAL_CATEGORIES",
    "UNCOUNTED",
    "AttemptRecord",
    "Category",
    "Code",
    "OperationState",
    "Outcome",
    "Policy",
    "SideEffect",
    "budget_left",
    "clip_message",
    "operation_side_effect",
]

MAX_MESSAGE_BYTES: Final = 2048
MAX_RESENDS_AFTER_ABSENT: Final = 3
"""How often the same operation is sent again by itself because its tool said that it did not happen."""
MAX_DELIVERIES_WITHOUT_ATTEMPT: Final = 20
"""Deliveries in a row that never got as far as an attempt (busy, no slot, ledger away) before a person is told."""


class Category(StrEnum):
    """What kind of failure it was."""

    TRANSIENT = "TRANSIENT"
    RATE_LIMITED = "RATE_LIMITED"
    DEPENDENCY_DOWN = "DEPENDENCY_DOWN"
    INVALID_INPUT = "INVALID_INPUT"
    PERMISSION = "PERMISSION"
    UNKNOWN_SIDE_EFFECT = "UNKNOWN_SIDE_EFFECT"


class SideEffect(StrEnum):
    """Whether the effect can have happened."""

    NONE = "NONE"
    """Certainly not executed."""
    POSSIBLE = "POSSIBLE"
    CONFIRMED = "CONFIRMED"
    """Executed; the result is lost or unusable."""

    @property
    def severity(self) -> int:
        """Orders side effects: none, possible, confirmed."""
        return list(SideEffect).index(self)


class Code(StrEnum):
    """The codes that are not a status of HTTP (those are ``http_403`` and the like)."""

    CONNECT_FAILED = "connect_failed"
    CONNECT_TIMEOUT = "connect_timeout"
    POOL_EXHAUSTED = "pool_exhausted"
    NO_SLOT = "no_slot"
    READ_TIMEOUT = "read_timeout"
    WRITE_TIMEOUT = "write_timeout"
    CONNECTION_LOST = "connection_lost"
    PROTOCOL_ERROR = "protocol_error"
    RESULT_LOST = "result_lost"
    RESULT_UNUSABLE = "result_unusable"
    CANCELLED = "cancelled"
    WORKER_LOST = "worker_lost"
    LEASE_LOST = "lease_lost"
    FENCED = "fenced"
    BUSY = "busy"
    UNSETTLED = "unsettled"
    LEDGER_UNAVAILABLE = "ledger_unavailable"
    LEDGER_LOST = "ledger_lost"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    INPUT_INVALID = "input_invalid"
    INPUT_TOO_LARGE = "input_too_large"
    OUTPUT_MISSING = "output_missing"
    INPUT_MISMATCH = "input_mismatch"
    TOOL_MISSING = "tool_missing"
    TOOL_CHANGED = "tool_changed"
    BY_HAND = "by_hand"
    APPROVAL_REQUIRED = "approval_required"
    APPROVAL_EXPIRED = "approval_expired"
    APPROVAL_REVOKED = "approval_revoked"


UNCOUNTED: Final = frozenset({Code.POOL_EXHAUSTED, Code.CANCELLED, Code.LEASE_LOST})
"""Ends of attempts that were our own fault: they cost nothing of a category's budget."""


class Policy(Model):
    """How often and how soon a category is tried again.

    Attributes:
        initial: The first wait.
        backoff: What each further wait is multiplied with.
        maximum: The longest wait.
        attempts: Attempts in all, the first included, since the last accepted redrive.
    """

    initial: timedelta
    backoff: float = Field(ge=1)
    maximum: timedelta
    attempts: int = Field(ge=1)

    def wait_after(self, failures: int, jitter: float) -> timedelta:
        """The wait after that many failures (1 or more); jitter (0 to 1) only ever adds, a quarter at most."""
        # The exponent is bounded because a float overflows long before a patient user's attempt count does.
        wait = min(self.initial.total_seconds() * self.backoff ** min(failures - 1, 64), self.maximum.total_seconds())
        return timedelta(seconds=wait * (1 + jitter / 4))


def _policy(initial: float, maximum: float, attempts: int) -> Policy:
    return Policy(
        initial=timedelta(seconds=initial), backoff=2.0, maximum=timedelta(seconds=maximum), attempts=attempts
    )


POLICIES: Final[Mapping[Category, Policy]] = {
    Category.TRANSIENT: _policy(1, 30, 6),
    Category.RATE_LIMITED: _policy(5, 300, 10),
    Category.DEPENDENCY_DOWN: _policy(5, 600, 12),
}
"""The default policy of each category that is retried; the others are not."""

TERMINAL_CATEGORIES: Final = (Category.INVALID_INPUT, Category.PERMISSION, Category.UNKNOWN_SIDE_EFFECT)
"""What Temporal must not retry by itself."""


class Outcome(Model):
    """How an attempt failed: the answer to both questions."""

    category: Category
    code: str
    message: str
    side_effect: SideEffect
    http_status: int | None = None
    retry_after: timedelta | None = None
    """What the tool asked for, a floor."""


class OperationState(StrEnum):
    """Where an operation stands."""

    IN_FLIGHT = "IN_FLIGHT"
    UNSETTLED = "UNSETTLED"
    """Nobody is at work on it, and its effect is possible or confirmed without a result."""
    FAILED = "FAILED"
    SUCCEEDED = "SUCCEEDED"


class AttemptRecord(Model):
    """One attempt of a node as the ledger keeps it and a dead letter shows it.

    ``ended_at`` is None for one whose worker was lost: it has no end, and its request may have been acted on.
    """

    attempt: int
    started_at: UtcTime
    ended_at: UtcTime | None = None
    worker: str
    category: Category | None = None
    code: str | None = None
    message: str | None = None
    http_status: int | None = None
    side_effect: SideEffect
    next_eligible_at: UtcTime | None = None


def budget_left(policy: Policy | None, failures: int) -> bool:
    """Whether a category that has failed so often since the last redrive may be tried once more."""
    return policy is not None and failures < policy.attempts


def operation_side_effect(unsettled: Sequence[SideEffect]) -> SideEffect:
    """An operation's side effect: the worst over its attempts that nothing has settled since."""
    return max(unsettled, key=lambda effect: effect.severity, default=SideEffect.NONE)


def clip_message(message: str, limit: int = MAX_MESSAGE_BYTES) -> str:
    """A message within a limit in bytes, cut at a character's boundary."""
    encoded = message.encode("utf-8", "replace")
    if len(encoded) <= limit:
        return encoded.decode()
    return encoded[: limit - 3].decode("utf-8", "ignore") + "…"
