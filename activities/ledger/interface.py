"""The one interface that the ledger's callers know, whatever database stands behind it."""

from datetime import datetime, timedelta
from typing import Protocol

from activities.ledger.records import (
    ClaimAnswer,
    ClaimRequest,
    EndedRun,
    NodeView,
    OperationRow,
    OperationView,
    Pruned,
    UnsettledOperation,
)
from contracts.base import Json
from contracts.dispatch import DecideAnswer, DecideRequest
from contracts.failures import OperationState, Outcome
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

    name: str
    """Where it is, without its secrets."""

    async def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """Asks for the right to send; the attempt's row is committed before `Granted` is answered.

        The same owner that asks again, because the answer was lost, is given the same grant.
        """
        ...

    async def renew(self, operation: OperationId, epoch: int) -> bool:
        """Extends the lease; False if it has run out, or the epoch is not the current one any more."""
        ...

    async def succeed(self, operation: OperationId, epoch: int, output: Json) -> bool:
        """Ends the attempt, the operation and the node with a result; False if the epoch is not current any more."""
        ...

    async def fail(
        self,
        operation: OperationId,
        epoch: int,
        outcome: Outcome,
        wait: timedelta | None = None,
        floor: timedelta | None = None,
    ) -> bool:
        """Ends the attempt with a failure; False if the epoch is not the current one any more.

        What it says of the tool holds for all who want to call it: see `Paused`.

        Args:
            operation: The operation.
            epoch: As it was granted.
            outcome: How the attempt failed.
            wait: In how long the next one is planned.
            floor: How long the tool asks to be left alone from now on; no claim is granted earlier.
        """
        ...

    async def settle_absent(self, operation: OperationId, epoch: int) -> None:
        """The tool says that nothing up to that epoch has happened, or will: all of it is settled, and fenced."""
        ...

    async def settle_committed(self, operation: OperationId, epoch: int, output: Json) -> bool:
        """The tool says that it happened, with this result: ends the operation and the node (``RECONCILED``).

        False if the node has ended otherwise meanwhile, or if a person has made another operation its current one: then
        only the effect is settled.
        """
        ...

    async def confirm(self, operation: OperationId) -> None:
        """The tool says that it happened, but without a usable result: the effect is confirmed."""
        ...

    async def node(self, run_id: str, node_id: str) -> NodeView | None:
        """What is known of a node, or None."""
        ...

    async def age(self) -> timedelta:
        """How long there has been this ledger; what is older may have been recorded in one that was lost."""
        ...

    async def decide(self, request: DecideRequest, fence: datetime) -> DecideAnswer:
        """Commits a decision, once; a second one of the same id gets the first one's record.

        Args:
            request: The decision and what it changes.
            fence: Temporal's time of the decision; a delivery scheduled earlier does not send any more.
        """
        ...

    async def cancel(self, run_id: str, node_ids: list[str], fence: datetime, *, for_good: bool = True) -> list[str]:
        """Marks nodes as cancelled; nothing new is sent for one, ever. What has ended stays as it is.

        Answers those with an attempt whose effect nothing has settled, be it under way or not; and then those that have
        ended.

        Args:
            run_id: Their run.
            node_ids: The nodes.
            fence: Temporal's time of the cancel; a delivery scheduled earlier does not send any more.
            for_good: False: only the fence is set, and later deliveries send again.
        """
        ...

    async def operation(self, operation_id: str) -> OperationView | None:
        """What is known of an operation, or None."""
        ...

    async def unsettled(self, after: str, limit: int) -> list[UnsettledOperation]:
        """Operations that nodes are at, whose effect is uncertain, by their id: those after the given one."""
        ...

    async def operations(self, state: OperationState, run_id: str | None, after: str, limit: int) -> list[OperationRow]:
        """Operations in a state, of one run or of all, by their id: those after the given one."""
        ...

    async def ended_runs(self, before: datetime, after: str, limit: int) -> list[EndedRun]:
        """Runs all of whose nodes had ended, or were cancelled, before that time, and of which nothing is unsettled.

        By their id: those after the given one.
        """
        ...

    async def prune(self, run: EndedRun, before: datetime, *, dry_run: bool = False) -> Pruned:
        """Forgets these nodes of a run, if it still is as `ended_runs` has it: their operations would be new ones.

        Args:
            run: The run.
            before: As `ended_runs` was asked.
            dry_run: Only counts what would be forgotten.
        """
        ...

    async def close(self) -> None:
        """Finishes what is under way and lets go of the database."""
        ...
