"""What is looked for in the whole ledger, and what is dropped from it: each inside one transaction of its caller."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from activities.ledger.clock import Moment
from activities.ledger.records import (
    EndedRun,
    OperationRow,
    Pruned,
    UnsettledOperation,
)
from activities.ledger.rows import Row, lease_left, state_of, to_text, to_time
from contracts.failures import OperationState, SideEffect

__all__ = ["Housekeeping"]

_RISKS: Final = (SideEffect.NONE, SideEffect.POSSIBLE, SideEffect.CONFIRMED)
"""By their rank in the queries."""


class Housekeeping:
    """The transactions, over the queries of one SQL dialect."""

    def __init__(self, queries: Any) -> None:
        self._sql = queries

    def unsettled(self, connection: Any, _moment: Moment, after: str, limit: int) -> list[UnsettledOperation]:
        """See `Ledger.unsettled`."""
        rows = self._sql.unsettled(connection, after=after, limit=limit)
        return [
            UnsettledOperation(
                operation_id=row["operation_id"], run_id=row["run_id"], node_id=row["node_id"], tool=row["tool"]
            )
            for row in rows
        ]

    def operations(
        self, connection: Any, moment: Moment, state: OperationState, run_id: str | None, after: str, limit: int
    ) -> list[OperationRow]:
        """See `Ledger.operations`."""
        found: list[OperationRow] = []
        while len(found) < limit:
            rows = list(
                self._sql.operations(
                    connection,
                    succeeded=int(state is OperationState.SUCCEEDED),
                    run_id=run_id,
                    after=after,
                    limit=limit,
                )
            )
            # Whether a lease still runs is asked of a clock, not of the database.
            found += [operation for row in rows if (operation := _operation(moment, row)).state is state]
            if len(rows) < limit:
                break
            after = rows[-1]["operation_id"]
        return found[:limit]

    def ended_runs(self, connection: Any, _moment: Moment, before: datetime, after: str, limit: int) -> list[EndedRun]:
        """See `Ledger.ended_runs`."""
        rows = list(self._sql.ended_runs(connection, before=to_text(before), after=after, limit=limit))
        return [EndedRun(run_id=row["run_id"], node_ids=self._nodes(connection, row["run_id"])) for row in rows]

    def _nodes(self, connection: Any, run_id: str) -> list[str]:
        return [row["node_id"] for row in self._sql.node_ids(connection, run_id=run_id)]

    def prune(
        self, connection: Any, _moment: Moment, run_id: str, node_ids: Sequence[str], before: datetime, dry_run: bool
    ) -> Pruned:
        """See `Ledger.prune`; these nodes of the run."""
        if self._sql.ended_run(connection, run_id=run_id, before=to_text(before)) is None:
            return Pruned()
        operations = attempts = 0
        for node_id in node_ids:
            ids = {"run_id": run_id, "node_id": node_id}
            size = self._sql.size_of_node(connection, **ids)
            operations += size["operations"]
            attempts += size["attempts"]
            if not dry_run:
                # In the order of their foreign keys.
                self._sql.forget_attempts(connection, **ids)
                self._sql.forget_operations(connection, **ids)
                self._sql.forget_node(connection, **ids)
        return Pruned(nodes=len(node_ids), operations=operations, attempts=attempts)


def _operation(moment: Moment, row: Row) -> OperationRow:
    side_effect = _RISKS[row["risk"]]
    return OperationRow(
        operation_id=row["operation_id"],
        run_id=row["run_id"],
        node_id=row["node_id"],
        tool=row["tool"],
        state=state_of(row, side_effect, lease_left(moment, row) > timedelta(0)),
        side_effect=side_effect,
        attempts=row["attempts"],
        first_sent_at=to_time(row["first_sent_at"]) if row["first_sent_at"] else None,
        last_sent_at=to_time(row["last_sent_at"]) if row["last_sent_at"] else None,
    )
