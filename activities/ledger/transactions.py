"""A ledger over a database: each method is one transaction of the `Store`, whatever database it runs in."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import aiosql

from activities.ledger.clock import Moment
from activities.ledger.housekeeping import Housekeeping
from activities.ledger.interface import LEASE
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
from activities.ledger.store import Store
from contracts.base import Json
from contracts.dispatch import DecideAnswer, DecideRequest
from contracts.failures import OperationState, Outcome
from contracts.identity import OperationId, node_workflow_id

__all__ = ["DatabaseLedger"]

_HERE: Final = Path(__file__).parent
_AT_ONCE: Final = 200
"""How many nodes one transaction cancels, or forgets: each is locked until it ends."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


class DatabaseLedger(ABC):
    """See `Ledger`; each method says there what it promises."""

    def __init__(self, dialect: str, name: str) -> None:
        self.name = name
        queries = aiosql.from_path(_HERE / "queries.sql", dialect, mandatory_parameters=False)
        self._store = Store(queries, LEASE)
        self._housekeeping = Housekeeping(queries)

    @abstractmethod
    async def _transaction(
        self,
        nodes: Sequence[str],
        work: Callable[Concatenate[Any, Moment, _P], _T],
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _T:
        """Does some work in one transaction, alone with these nodes: no other transaction has any of them meanwhile.

        The work may be done twice, if the answer to the first time was lost.

        Raises:
            LedgerUnavailableError: it could not be done, or nobody knows whether it was.
        """

    async def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """See `Ledger.claim`."""
        return await self._transaction(_node_of(request.operation), self._store.claim, request)

    async def renew(self, operation: OperationId, epoch: int) -> bool:
        """See `Ledger.renew`."""
        return await self._transaction(_node_of(operation), self._store.renew, operation, epoch)

    async def succeed(self, operation: OperationId, epoch: int, output: Json) -> bool:
        """See `Ledger.succeed`."""
        return await self._transaction(_node_of(operation), self._store.succeed, operation, epoch, output)

    async def fail(
        self,
        operation: OperationId,
        epoch: int,
        outcome: Outcome,
        wait: timedelta | None = None,
        floor: timedelta | None = None,
    ) -> bool:
        """See `Ledger.fail`."""
        return await self._transaction(_node_of(operation), self._store.fail, operation, epoch, outcome, wait, floor)

    async def settle_absent(self, operation: OperationId, epoch: int) -> None:
        """See `Ledger.settle_absent`."""
        await self._transaction(_node_of(operation), self._store.settle_absent, operation, epoch)

    async def settle_committed(self, operation: OperationId, epoch: int, output: Json) -> bool:
        """See `Ledger.settle_committed`."""
        return await self._transaction(_node_of(operation), self._store.settle_committed, operation, epoch, output)

    async def confirm(self, operation: OperationId) -> None:
        """See `Ledger.confirm`."""
        await self._transaction(_node_of(operation), self._store.confirm, operation)

    async def decide(self, request: DecideRequest, fence: datetime) -> DecideAnswer:
        """See `Ledger.decide`."""
        node = [node_workflow_id(request.run_id, request.node_id)]
        return await self._transaction(node, self._store.decide, request, fence)

    async def cancel(self, run_id: str, node_ids: list[str], fence: datetime, *, for_good: bool = True) -> list[str]:
        """See `Ledger.cancel`."""
        uncertain: list[str] = []
        ended: list[str] = []
        # In one order for all, so that two cancels of one run never wait for each other.
        waiting = iter(sorted(node_ids))
        while batch := list(itertools.islice(waiting, _AT_ONCE)):
            nodes = [node_workflow_id(run_id, node_id) for node_id in batch]
            at_risk, over = await self._transaction(nodes, self._store.cancel, run_id, batch, fence, for_good)
            uncertain += at_risk
            ended += over
        return [*uncertain, *ended]

    async def node(self, run_id: str, node_id: str) -> NodeView | None:
        """See `Ledger.node`."""
        return await self._transaction([node_workflow_id(run_id, node_id)], self._store.node, run_id, node_id)

    async def operation(self, operation_id: str) -> OperationView | None:
        """See `Ledger.operation`."""
        return await self._transaction([], self._store.operation, operation_id)

    async def age(self) -> timedelta:
        """See `Ledger.age`."""
        return await self._transaction([], self._store.age)

    async def unsettled(self, after: str, limit: int) -> list[UnsettledOperation]:
        """See `Ledger.unsettled`."""
        return await self._transaction([], self._housekeeping.unsettled, after, limit)

    async def operations(self, state: OperationState, run_id: str | None, after: str, limit: int) -> list[OperationRow]:
        """See `Ledger.operations`."""
        return await self._transaction([], self._housekeeping.operations, state, run_id, after, limit)

    async def ended_runs(self, before: datetime, after: str, limit: int) -> list[EndedRun]:
        """See `Ledger.ended_runs`."""
        return await self._transaction([], self._housekeeping.ended_runs, before, after, limit)

    async def prune(self, run: EndedRun, before: datetime, *, dry_run: bool = False) -> Pruned:
        """See `Ledger.prune`."""
        done = Pruned()
        waiting = iter(sorted(run.node_ids))
        while batch := list(itertools.islice(waiting, _AT_ONCE)):
            nodes = [node_workflow_id(run.run_id, node_id) for node_id in batch]
            part = await self._transaction(nodes, self._housekeeping.prune, run.run_id, batch, before, dry_run)
            done = Pruned(
                nodes=done.nodes + part.nodes,
                operations=done.operations + part.operations,
                attempts=done.attempts + part.attempts,
            )
        return done

    @abstractmethod
    async def close(self) -> None:
        """See `Ledger.close`."""


def _node_of(operation: OperationId) -> Sequence[str]:
    return [node_workflow_id(operation.run_id, operation.node_id)]
