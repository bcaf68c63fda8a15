"""The one interface that the ledger's callers know, whatever database stands behind it."""

from datetime import datetime, timedelta
from typing import Protocol

from activities.ledger.records import ClaimAnswer, ClaimRequest, NodeView, OperationView
from contracts.base import Json
from contracts.dispatch import DecideAnswer, DecideRequest
from contracts.failures import Outcome
from contracts.identity import OperationId

__all__ = ["LEASE", "RENEW_EVERY", "Ledger"]

LEASE = timedelta(seconds=10)
"""How long a claim holds without being renewed."""
RENEW_EVERY = timedelta(seconds=3)


class Ledger(Protocol):
    """What was sent, what came of it, and what a person decided.

    Every method is one transaction, durable when it returns. Each raises `LedgerUnavailableError` when the database
    cannot be read or written; then nothing is known to have been changed.
    """

    async def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """Asks for the right to send; the attempt's row is committed before `Granted` is answered."""
        ...

    async def renew(self, operation: OperationId, epoch: int) -> bool:
        """Extends the lease; False if the epoch is not the current one any more."""
        ...

    async def succeed(self, operation: OperationId, epoch: int, output: Json) -> bool:
        """Ends the attempt, the operation and the node with a result; False if the epoch is not current any more."""
        ...

    async def fail(
        self,
        operation: OperationId,
        epoch: int,
        outcome: Outcome,
        next_eligible_at: datetime | None = None,
        not_before: datetime | None = None,
    ) -> bool:
        """Ends the attempt with a failure; False if the epoch is not the current one any more.

        Args:
            operation: The operation.
            epoch: As it was granted.
            outcome: How the attempt failed.
            next_eligible_at: When the next one is planned.
            not_before: When the tool allows the next one; no claim is granted earlier.
        """
        ...

    async def settle_absent(self, operation: OperationId, epoch: int) -> None:
        """The tool says that nothing up to that epoch has happened, or will: all of it is settled, and fenced."""
        ...

    async def settle_committed(self, operation: OperationId, epoch: int, output: Json) -> None:
        """The tool says that it happened, with this result: ends the operation and the node (``RECONCILED``)."""
        ...

    async def confirm(self, operation: OperationId) -> None:
        """The tool says that it happened, but without a usable result: the effect is confirmed."""
        ...

    async def node(self, run_id: str, node_id: str) -> NodeView | None:
        """What is known of a node, or None."""
        ...

    async def born_at(self) -> datetime:
        """When this ledger began; what started earlier may have been recorded in one that was lost."""
        ...

    async def decide(self, request: DecideRequest, fence: datetime) -> DecideAnswer:
        """Commits a decision, once; a second one of the same id gets the first one's record.

        Args:
            request: The decision and what it changes.
            fence: Temporal's time of the decision; a delivery scheduled earlier does not send any more.
        """
        ...

    async def cancel(self, run_id: str, node_ids: list[str], fence: datetime) -> None:
        """Marks nodes as cancelled; nothing new is sent for one, ever. What has ended stays as it is."""
        ...

    async def operation(self, operation_id: str) -> OperationView | None:
        """What is known of an operation, or None."""
        ...

    async def close(self) -> None:
        """Finishes what is under way and lets go of the database."""
        ...
