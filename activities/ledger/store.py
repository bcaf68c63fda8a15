"""The ledger's rules as transactions over one database connection, the same for every database.

Everything here is synchronous and runs inside one transaction that its caller opens and commits.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Protocol

from activities.ledger.records import (
    Busy,
    ClaimAnswer,
    ClaimRequest,
    Granted,
    Mismatch,
    NodeView,
    OperationView,
    Settled,
    Settlement,
    Spent,
    Stale,
    Unsettled,
)
from activities.ledger.rows import (
    LOST_MESSAGE,
    Row,
    category_of,
    current_operation,
    decisions_of,
    failures_of,
    is_at_risk,
    is_unknown,
    output_of,
    record_of,
    redriven_of,
    state_of,
    to_json,
    to_text,
    to_time,
)
from contracts.base import Json
from contracts.canonical import canonical_json
from contracts.dead_letters import DecisionOutcome, Delivery, RefusalCode
from contracts.dispatch import Change, DecideAnswer, DecideRequest, NodeEnd
from contracts.failures import (
    UNCOUNTED,
    Category,
    Code,
    Outcome,
    SideEffect,
    operation_side_effect,
)
from contracts.identity import OperationId
from contracts.runs import Source

__all__ = ["LeaseClock", "Store"]


class LeaseClock(Protocol):
    """The clock that leases run by; never a wall clock, and never compared across machines."""

    def read(self, connection: Any, /) -> tuple[str, float]:
        """Which clock it is (it changes when the clock starts anew), and its time in seconds."""
        ...


class Store:
    """The transactions, over the queries of one SQL dialect."""

    def __init__(self, queries: Any, clock: LeaseClock, lease: timedelta) -> None:
        self._sql = queries
        self._clock = clock
        self._lease = lease

    def claim(self, connection: Any, request: ClaimRequest, now: datetime) -> ClaimAnswer:
        """See `Ledger.claim`. The order of the questions is the order of the answers' table in the semantics."""
        operation = request.operation
        ids = {"run_id": operation.run_id, "node_id": operation.node_id}
        node, forgotten = self._node_of(connection, request)
        attempts = list(self._sql.attempts(connection, **ids))
        if node["ended"] is not None:
            return self._settled(connection, node, attempts)
        if (operation.logical_attempt, request.redrives) < (node["logical_attempt"], node["redrives"]):
            return Stale(current=redriven_of(node), attempt_count=len(attempts))
        row = self._operation_of(connection, request)
        if forgotten and request.risk is not SideEffect.NONE:
            born_at = to_time(self._sql.birth(connection)["born_at"])
            number = len(attempts) + 1
            self._insert_attempt(connection, request, number, row["epoch"], born_at, Code.LEDGER_LOST)
            attempts = list(self._sql.attempts(connection, **ids))
        if node["cancelled_at"] is not None:
            return Settled(
                end=NodeEnd.CANCELLED,
                output=None,
                source=None,
                operation_id=str(operation),
                attempt_count=len(attempts),
            )
        if node["fence"] is not None and request.scheduled_at < to_time(node["fence"]):
            return Stale(current=None, attempt_count=len(attempts))
        if row["input_hash"] != request.input_hash:
            return Mismatch()
        if request.scheduled_at < to_time(row["scheduled_at"]):
            return Stale(current=None, attempt_count=len(attempts))
        if request.scheduled_at > to_time(row["scheduled_at"]):
            self._sql.see_delivery(connection, operation_id=str(operation), scheduled_at=to_text(request.scheduled_at))
        if busy := self._busy(connection, row, attempts, node["budget_from"], now):
            return busy
        counted = [attempt for attempt in attempts if attempt["attempt"] > node["budget_from"]]
        if spent := _spent(counted, request.budgets, str(operation)):
            return spent
        mine = [attempt for attempt in attempts if attempt["operation_id"] == str(operation)]
        first_sent_at = to_time(mine[0]["started_at"]) if mine else now
        unsettled = [attempt for attempt in mine if is_at_risk(attempt)]
        if unsettled and (request.despite_epoch is None or unsettled[-1]["epoch"] > request.despite_epoch):
            return Unsettled(
                epoch=row["epoch"],
                attempts=[record_of(attempt) for attempt in unsettled],
                side_effect=operation_side_effect([SideEffect(attempt["side_effect"]) for attempt in unsettled]),
                first_sent_at=first_sent_at,
                resendable=not any(attempt["result_unusable"] for attempt in unsettled),
            )
        return self._grant(connection, request, row, attempts, counted, first_sent_at, now)

    def _node_of(self, connection: Any, request: ClaimRequest) -> tuple[Row, bool]:
        """The node's row, and whether this ledger has forgotten something of it.

        It has if the node is older than the ledger, or if the dispatch knows of redrives that the ledger does not: it
        was lost, or is an older copy. What was sent in the meantime is then unknown.
        """
        operation = request.operation
        ids = {"run_id": operation.run_id, "node_id": operation.node_id}
        present = {
            "logical_attempt": operation.logical_attempt,
            "redrives": request.redrives,
            "fingerprint": request.fingerprint,
            "input": canonical_json(request.input),
        }
        node = self._sql.node(connection, **ids)
        if node is not None and node["ended"] is not None:
            return node, False
        older = request.redrives > 0 or request.node_started_at < to_time(self._sql.birth(connection)["born_at"])
        if node is None:
            self._sql.insert_node(connection, **ids, **present, tool=request.tool)
        elif node["tool"] == "":
            # Only a cancel knows of it; what the node did before is as unknown as without one.
            self._sql.advance_node(connection, **ids, **present, tool=request.tool)
        elif (node["logical_attempt"], node["redrives"]) < (operation.logical_attempt, request.redrives):
            self._sql.advance_node(connection, **ids, **present, tool=request.tool)
            older = True
        else:
            return node, False
        return self._sql.node(connection, **ids), older

    def _operation_of(self, connection: Any, request: ClaimRequest) -> Row:
        operation = request.operation
        row = self._sql.operation(connection, operation_id=str(operation))
        if row is None:
            self._sql.insert_operation(
                connection,
                operation_id=str(operation),
                run_id=operation.run_id,
                node_id=operation.node_id,
                logical_attempt=operation.logical_attempt,
                idempotency_key=operation.idempotency_key,
                tool=request.tool,
                fingerprint=request.fingerprint,
                input_hash=request.input_hash,
                scheduled_at=to_text(request.scheduled_at),
            )
            row = self._sql.operation(connection, operation_id=str(operation))
        found: Row = row
        return found

    def _busy(
        self, connection: Any, operation: Row, attempts: Sequence[Row], budget_from: int, now: datetime
    ) -> Busy | None:
        lease_left = self._lease_left(connection, operation)
        if lease_left > timedelta(0):
            return Busy(remaining=lease_left)
        last = attempts[-1] if attempts else None
        # A redrive is a person's decision against the tool's wish to be left alone; nothing else is.
        if last is not None and last["not_before"] is not None and last["attempt"] > budget_from:
            wait = to_time(last["not_before"]) - now
            return Busy(remaining=wait, floor=True) if wait > timedelta(0) else None
        return None

    def _grant(
        self,
        connection: Any,
        request: ClaimRequest,
        row: Row,
        attempts: Sequence[Row],
        counted: Sequence[Row],
        first_sent_at: datetime,
        now: datetime,
    ) -> Granted:
        epoch = row["epoch"] + 1
        attempt = attempts[-1]["attempt"] + 1 if attempts else 1
        boot, clock = self._clock.read(connection)
        self._sql.lease_operation(
            connection,
            operation_id=str(request.operation),
            epoch=epoch,
            owner=request.owner,
            boot=boot,
            until=clock + self._lease.total_seconds(),
        )
        self._insert_attempt(connection, request, attempt=attempt, epoch=epoch, started_at=now, code=None)
        return Granted(
            epoch=epoch,
            attempt=attempt,
            fingerprint=row["fingerprint"],
            failures=failures_of(counted),
            last_category=category_of(attempts[-1]) if attempts else None,
            first_sent_at=first_sent_at,
        )

    def _insert_attempt(
        self,
        connection: Any,
        request: ClaimRequest,
        attempt: int,
        epoch: int,
        started_at: datetime,
        code: Code | None,
    ) -> None:
        self._sql.insert_attempt(
            connection,
            run_id=request.operation.run_id,
            node_id=request.operation.node_id,
            attempt=attempt,
            operation_id=str(request.operation),
            epoch=epoch,
            worker=request.worker,
            delivery=request.delivery.model_dump_json(),
            started_at=to_text(started_at),
            side_effect=request.risk,
            code=code,
        )

    def _settled(self, connection: Any, node: Row, attempts: Sequence[Row]) -> Settled:
        operation_id = current_operation(node)
        operation = self._sql.operation(connection, operation_id=str(operation_id))
        return Settled(
            end=NodeEnd(node["ended"]),
            output=output_of(node, operation),
            source=Source(node["source"]) if node["source"] else None,
            operation_id=str(operation_id),
            attempt_count=len(attempts),
        )

    def renew(self, connection: Any, operation: OperationId, epoch: int) -> bool:
        """See `Ledger.renew`."""
        boot, clock = self._clock.read(connection)
        until = clock + self._lease.total_seconds()
        changed: int = self._sql.renew_lease(
            connection, operation_id=str(operation), epoch=epoch, boot=boot, until=until
        )
        return changed == 1

    def succeed(self, connection: Any, operation: OperationId, epoch: int, output: Json, now: datetime) -> bool:
        """See `Ledger.succeed`."""
        if not self._holds(connection, operation, epoch):
            self._note_late(connection, operation, epoch, "succeeded", now)
            return False
        self._end_attempt(connection, operation, epoch, now, side_effect=SideEffect.CONFIRMED)
        self._sql.settle_attempts(connection, operation_id=str(operation), epoch=epoch, settled=Settlement.SUCCESS)
        self._sql.succeed_operation(connection, operation_id=str(operation), result=to_json(output), now=to_text(now))
        self._end_node(connection, operation, NodeEnd.SUCCEEDED, Source.EXECUTED, None, now)
        return True

    def fail(
        self,
        connection: Any,
        operation: OperationId,
        epoch: int,
        outcome: Outcome,
        next_eligible_at: datetime | None,
        not_before: datetime | None,
        now: datetime,
    ) -> bool:
        """See `Ledger.fail`."""
        if not self._holds(connection, operation, epoch):
            self._note_late(connection, operation, epoch, f"failed: {outcome.code}", now)
            return False
        self._end_attempt(
            connection,
            operation,
            epoch,
            now,
            category=outcome.category,
            code=outcome.code,
            message=outcome.message,
            http_status=outcome.http_status,
            side_effect=outcome.side_effect,
            next_eligible_at=to_text(next_eligible_at) if next_eligible_at else None,
            not_before=to_text(not_before) if not_before else None,
        )
        if outcome.code == Code.RESULT_UNUSABLE:
            self._sql.confirm_attempts(connection, operation_id=str(operation))
        self._sql.release_lease(connection, operation_id=str(operation))
        return True

    def _end_attempt(self, connection: Any, operation: OperationId, epoch: int, now: datetime, **values: Any) -> None:
        blank = dict.fromkeys(("category", "code", "message", "http_status", "next_eligible_at", "not_before"))
        self._sql.end_attempt(
            connection, operation_id=str(operation), epoch=epoch, now=to_text(now), **(blank | values)
        )

    def _holds(self, connection: Any, operation: OperationId, epoch: int) -> bool:
        row = self._sql.operation(connection, operation_id=str(operation))
        return row is not None and row["epoch"] == epoch and row["owner"] is not None

    def _note_late(self, connection: Any, operation: OperationId, epoch: int, what: str, now: datetime) -> None:
        self._sql.note_late_answer(
            connection,
            operation_id=str(operation),
            epoch=epoch,
            now=to_text(now),
            code=Code.FENCED,
            message=f"came back after it had been given up, and changed nothing ({what})",
        )

    def _end_node(
        self,
        connection: Any,
        operation: OperationId,
        end: NodeEnd,
        source: Source | None,
        output: str | None,
        now: datetime,
    ) -> None:
        self._sql.end_node(
            connection,
            run_id=operation.run_id,
            node_id=operation.node_id,
            ended=end,
            source=source,
            output=output,
            now=to_text(now),
        )

    def settle_absent(self, connection: Any, operation: OperationId, epoch: int) -> None:
        """See `Ledger.settle_absent`."""
        self._sql.settle_attempts(connection, operation_id=str(operation), epoch=epoch, settled=Settlement.ABSENT)
        self._sql.fence_operation(connection, operation_id=str(operation), epoch=epoch)

    def settle_committed(
        self, connection: Any, operation: OperationId, epoch: int, output: Json, now: datetime
    ) -> None:
        """See `Ledger.settle_committed`."""
        node = self._sql.node(connection, run_id=operation.run_id, node_id=operation.node_id)
        if node is None or node["ended"] is not None:
            return
        self._sql.settle_attempts(connection, operation_id=str(operation), epoch=epoch, settled=Settlement.COMMITTED)
        self._sql.fence_operation(connection, operation_id=str(operation), epoch=_EVERY_EPOCH)
        self._sql.succeed_operation(connection, operation_id=str(operation), result=to_json(output), now=to_text(now))
        self._end_node(connection, operation, NodeEnd.SUCCEEDED, Source.RECONCILED, None, now)

    def confirm(self, connection: Any, operation: OperationId) -> None:
        """See `Ledger.confirm`."""
        self._sql.confirm_attempts(connection, operation_id=str(operation))

    def born_at(self, connection: Any) -> datetime:
        """See `Ledger.born_at`."""
        return to_time(self._sql.birth(connection)["born_at"])

    def decide(self, connection: Any, request: DecideRequest, fence: datetime, now: datetime) -> DecideAnswer:
        """See `Ledger.decide`."""
        ids = {"run_id": request.run_id, "node_id": request.node_id}
        node = self._sql.node(connection, **ids)
        if node is None:
            # The ledger was lost; the dead letter is what is left of the node.
            self._sql.insert_node(
                connection,
                **ids,
                logical_attempt=request.logical_attempt,
                redrives=request.redrives,
                tool=request.tool.name if request.tool else "",
                fingerprint=request.tool.fingerprint if request.tool else "",
                input=canonical_json(request.input),
            )
            node = self._sql.node(connection, **ids)
        decisions = decisions_of(node)
        for earlier in decisions:
            if earlier.decision_id == request.record.decision_id:
                return DecideAnswer(record=earlier, redriven=redriven_of(node) if node["ended"] is None else None)
        if refusal := _too_late(node, request):
            refused = {"outcome": DecisionOutcome.REFUSED, "refusals": [refusal]}
            return DecideAnswer(record=request.record.model_copy(update=refused))
        # A ledger that was lost, or is an older copy, knows of fewer redrives than the entry.
        operation = OperationId(**ids, logical_attempt=max(node["logical_attempt"], request.logical_attempt))
        self._sql.fence_operation(connection, operation_id=str(operation), epoch=_EVERY_EPOCH)
        match request.change:
            case Change.REDRIVE:
                self._redrive(connection, request, node, operation)
            case Change.RESOLVE:
                self._sql.settle_attempts(
                    connection, operation_id=str(operation), epoch=_EVERY_EPOCH, settled=Settlement.DECISION
                )
                self._end_node(connection, operation, NodeEnd.RESOLVED, request.source, to_json(request.output), now)
            case Change.DISCARD:
                self._end_node(connection, operation, NodeEnd.DISCARDED, None, None, now)
        text = "[" + ",".join(record.model_dump_json() for record in [*decisions, request.record]) + "]"
        self._sql.record_decision(connection, **ids, decisions=text, fence=to_text(fence))
        changed = self._sql.node(connection, **ids)
        return DecideAnswer(
            record=request.record, redriven=redriven_of(changed) if request.change is Change.REDRIVE else None
        )

    def _redrive(self, connection: Any, request: DecideRequest, node: Row, operation: OperationId) -> None:
        assert request.tool is not None
        self._sql.accept_risk(connection, operation_id=str(operation), decision_id=request.record.decision_id)
        self._sql.redrive_node(
            connection,
            run_id=request.run_id,
            node_id=request.node_id,
            logical_attempt=operation.logical_attempt + (1 if request.new_operation else 0),
            redrives=max(node["redrives"], request.redrives) + 1,
            fingerprint=request.tool.fingerprint,
            input=canonical_json(request.input),
            approval=request.approval.model_dump_json() if request.approval else "null",
        )
        if not request.new_operation:
            self._sql.adopt_fingerprint(connection, operation_id=str(operation), fingerprint=request.tool.fingerprint)

    def cancel(self, connection: Any, run_id: str, node_ids: list[str], fence: datetime, now: datetime) -> None:
        """See `Ledger.cancel`."""
        for node_id in node_ids:
            self._sql.cancel_node(connection, run_id=run_id, node_id=node_id, now=to_text(now), fence=to_text(fence))

    def node(self, connection: Any, run_id: str, node_id: str) -> NodeView | None:
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
        leased = self._leased(connection, operation)
        running = operation["epoch"] if operation and leased else None
        return NodeView(
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
            first_sent_at=to_time(mine[0]["started_at"]) if mine else None,
            last_sent_at=to_time(at_risk[-1]["started_at"]) if at_risk else None,
        )

    def operation(self, connection: Any, operation_id: str) -> OperationView | None:
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
        leased = self._leased(connection, row)
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

    def _leased(self, connection: Any, operation: Row | None) -> bool:
        return operation is not None and self._lease_left(connection, operation) > timedelta(0)

    def _lease_left(self, connection: Any, operation: Row) -> timedelta:
        boot, clock = self._clock.read(connection)
        if operation["owner"] is None or operation["lease_boot"] != boot:
            return timedelta(0)
        return timedelta(seconds=operation["lease_until"] - clock)


_EVERY_EPOCH: Final = 2**62


def _too_late(node: Row, request: DecideRequest) -> RefusalCode | None:
    if node["ended"] is not None:
        decided = node["ended"] in (NodeEnd.RESOLVED, NodeEnd.DISCARDED)
        return RefusalCode.ALREADY_DECIDED if decided else RefusalCode.NODE_CLOSED
    if node["redrives"] > request.redrives:
        return RefusalCode.ALREADY_DECIDED
    if node["cancelled_at"] is not None and request.change is Change.REDRIVE:
        return RefusalCode.RUN_CANCELLING
    return None


def _spent(counted: Sequence[Row], budgets: Mapping[Category, int], operation_id: str) -> Spent | None:
    """The last failure of this operation, if its category has been tried as often as it may be."""
    if not counted or counted[-1]["operation_id"] != operation_id:
        return None
    last = counted[-1]
    category = category_of(last)
    if (
        last["code"] in UNCOUNTED
        or last["code"] == Code.LEDGER_LOST
        or failures_of(counted)[category] < budgets[category]
    ):
        return None
    record = record_of(last)
    return Spent(
        attempt=record.attempt,
        outcome=Outcome(
            category=category,
            code=record.code or Code.WORKER_LOST,
            message=record.message or LOST_MESSAGE,
            side_effect=record.side_effect,
            http_status=record.http_status,
        ),
    )
