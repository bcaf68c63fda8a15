"""What the ledger tells: readings of it, each inside one transaction that its caller opens and ends."""

import json
from datetime import timedelta
from typing import Any

from activities.ledger.clock import Moment
from activities.ledger.records import NodeView, OperationView
from activities.ledger.rows import (
    Row,
    current_operation,
    decisions_of,
    elapsed,
    is_unknown,
    lease_left,
    output_of,
    record_of,
    state_of,
    to_time,
)
from contracts.dead_letters import Delivery
from contracts.dispatch import NodeEnd
from contracts.failures import SideEffect, operation_side_effect
from contracts.runs import Source

__all__ = ["Reads"]


class Reads:
    """The readings, over the queries of one SQL dialect."""

    def __init__(self, queries: Any) -> None:
        self._sql = queries

    def age(self, connection: Any, moment: Moment) -> timedelta:
        """See `Ledger.age`."""
        return moment.now - to_time(self._sql.birth(connection)["born_at"])

    def node(self, connection: Any, moment: Moment, run_id: str, node_id: str) -> NodeView | None:
        """See `Ledger.node`."""
        node = self._sql.node(connection, run_id=run_id, node_id=node_id)
        if node is None:
            return None
        attempts = list(self._sql.attempts(connection, run_id=run_id, node_id=node_id))
        operation_id = str(current_operation(node))
        operation = self._sql.operation(connection, operation_id=operation_id)
        mine = [attempt for attempt in attempts if attempt["operation_id"] == operation_id]
        # A person's acceptance of a risk settles nothing: the effect is as possible as it was.
        unsettled = [attempt for attempt in mine if attempt["settled"] is None]
        at_risk = [attempt for attempt in unsettled if attempt["side_effect"] != SideEffect.NONE]
        counted = [attempt for attempt in attempts if attempt["attempt"] > node["budget_from"]]
        leased = self._leased(moment, operation)
        running = operation["epoch"] if operation and leased else None
        return NodeView(
            tool=node["tool"],
            input=json.loads(node["input"]),
            logical_attempt=node["logical_attempt"],
            fingerprint=node["fingerprint"],
            redrives=node["redrives"],
            cancelled=node["cancelled_at"] is not None,
            end=NodeEnd(node["ended"]) if node["ended"] else None,
            output=output_of(node, operation),
            source=Source(node["source"]) if node["source"] else None,
            decisions=decisions_of(node),
            attempts=[record_of(attempt, running if attempt in mine else None) for attempt in attempts],
            operation_id=operation_id,
            epoch=operation["epoch"] if operation else 0,
            side_effect=operation_side_effect([SideEffect(attempt["side_effect"]) for attempt in unsettled]),
            in_flight=leased,
            unknown_failures=sum(1 for attempt in counted if is_unknown(attempt)),
            delivery=Delivery.model_validate_json(attempts[-1]["delivery"]) if attempts else None,
            since_first_send=elapsed(moment, mine[0]) if mine else None,
            since_last_send=elapsed(moment, at_risk[-1]) if at_risk else None,
        )

    def operation(self, connection: Any, moment: Moment, operation_id: str) -> OperationView | None:
        """See `Ledger.operation`."""
        row = self._sql.operation(connection, operation_id=operation_id)
        if row is None:
            return None
        node = self._sql.node(connection, run_id=row["run_id"], node_id=row["node_id"])
        attempts = [
            attempt
            for attempt in self._sql.attempts(connection, run_id=row["run_id"], node_id=row["node_id"])
            if attempt["operation_id"] == operation_id
        ]
        side_effect = operation_side_effect(
            [SideEffect(attempt["side_effect"]) for attempt in attempts if attempt["settled"] is None]
        )
        leased = self._leased(moment, row)
        return OperationView(
            operation_id=operation_id,
            idempotency_key=row["idempotency_key"],
            run_id=row["run_id"],
            node_id=row["node_id"],
            logical_attempt=row["logical_attempt"],
            tool=row["tool"],
            fingerprint=row["fingerprint"],
            state=state_of(row, side_effect, leased),
            side_effect=side_effect,
            epoch=row["epoch"],
            attempts=[record_of(attempt, row["epoch"] if leased else None) for attempt in attempts],
            node_end=NodeEnd(node["ended"]) if node["ended"] else None,
            node_cancelled=node["cancelled_at"] is not None,
            redrives=node["redrives"],
            decisions=decisions_of(node),
        )

    def _leased(self, moment: Moment, operation: Row | None) -> bool:
        return operation is not None and lease_left(moment, operation) > timedelta(0)
