"""The ledger's rules as transactions over one database connection, the same for every database.

Everything here is synchronous and runs inside one transaction that its caller opens and commits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from activities.ledger.clock import Moment
from activities.ledger.decisions import EVERY_EPOCH, Decisions
from activities.ledger.pauses import Pauses
from activities.ledger.records import (
    Begun,
    Busy,
    ClaimAnswer,
    ClaimRequest,
    Granted,
    Mismatch,
    Paused,
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
    elapsed,
    failures_of,
    is_at_risk,
    lease_left,
    output_of,
    own_time,
    record_of,
    redriven_of,
    to_json,
    to_text,
    to_time,
)
from contracts.base import Json
from contracts.canonical import canonical_json
from contracts.dispatch import NodeEnd
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

__all__ = ["Store"]

_NUL: Final = "\N{SYMBOL FOR NULL}"
"""Stands for a character that PostgreSQL cannot keep."""


class Store(Decisions):
    """The transactions, over the queries of one SQL dialect."""

    def __init__(self, queries: Any, lease: timedelta) -> None:
        super().__init__(queries)
        self._lease = lease
        self._pauses = Pauses(queries)

    def claim(self, connection: Any, moment: Moment, request: ClaimRequest) -> ClaimAnswer:
        """See `Ledger.claim`. The order of the questions is the order of the answers' table in the semantics."""
        operation = request.operation
        ids = {"run_id": operation.run_id, "node_id": operation.node_id}
        known = self._sql.node(connection, **ids)
        # A new node has no operation yet, and so no attempt.
        attempts = list(self._sql.attempts(connection, **ids)) if known is not None else []
        node, forgotten = self._node_of(connection, moment, request, known)
        if node["ended"] is not None:
            return self._settled(connection, node, attempts)
        if (operation.logical_attempt, request.redrives) < (node["logical_attempt"], node["redrives"]):
            return Stale(current=redriven_of(node), attempt_count=len(attempts))
        row = self._sql.operation(connection, operation_id=str(operation)) if known is not None else None
        if row is None:
            row = self._insert_operation(connection, request)
        if forgotten and request.risk is not SideEffect.NONE:
            born_at = to_time(self._sql.birth(connection)["born_at"])
            number = len(attempts) + 1
            lost = Moment(now=born_at, boot="", seconds=0)
            self._insert_attempt(connection, lost, request, number, row["epoch"], Code.LEDGER_LOST)
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
        epoch = row["epoch"] + 1
        again: Row | None = None
        if row["owner"] == request.owner and lease_left(moment, row) > timedelta(0):
            # It was granted before; only the answer was lost on its way.
            epoch = row["epoch"]
            again = attempts.pop()
        elif request.first_only and attempts and lease_left(moment, row) <= timedelta(0):
            return Begun()
        elif busy := _busy(moment, row, attempts, node["budget_from"]):
            return busy
        counted = [attempt for attempt in attempts if attempt["attempt"] > node["budget_from"]]
        if spent := _spent(counted, request.budgets, str(operation)):
            return spent
        mine = [attempt for attempt in attempts if attempt["operation_id"] == str(operation)]
        since_first_send = elapsed(moment, mine[0]) if mine else timedelta(0)
        unsettled = [attempt for attempt in mine if is_at_risk(attempt)]
        if unsettled and (request.despite_epoch is None or unsettled[-1]["epoch"] > request.despite_epoch):
            return Unsettled(
                epoch=row["epoch"],
                attempts=[record_of(attempt) for attempt in unsettled],
                side_effect=operation_side_effect([SideEffect(attempt["side_effect"]) for attempt in unsettled]),
                since_first_send=since_first_send,
                resendable=not any(attempt["result_unusable"] for attempt in unsettled),
            )
        granted = self._grant(connection, moment, request, row, epoch, attempts, counted, since_first_send)
        if isinstance(granted, Granted) and again is not None:
            # Its turn may still be to come.
            return granted.model_copy(update={"wait": max(-elapsed(moment, again), timedelta(0))})
        return granted

    def _node_of(self, connection: Any, moment: Moment, request: ClaimRequest, known: Row | None) -> tuple[Row, bool]:
        """The node's row, brought up to date, and whether this ledger has forgotten something of it.

        It has if the node is older than the ledger, or if the dispatch knows of redrives that the ledger does not: it
        was lost, or is an older copy. What was sent in the meantime is then unknown. Ages are compared, not moments:
        the node's is by Temporal's clock, and the ledger's by its own.
        """
        operation = request.operation
        if known is None or (known["ended"] is None and known["tool"] == ""):
            # At most a cancel knows of it; then what the node did before is as unknown as without one.
            older = request.redrives > 0 or request.now - request.node_started_at > self.age(connection, moment)
        elif known["ended"] is None and (operation.logical_attempt, request.redrives) > (
            known["logical_attempt"],
            known["redrives"],
        ):
            older = True
        else:
            return known, False
        keep = self._sql.insert_node if known is None else self._sql.advance_node
        node = keep(
            connection,
            run_id=operation.run_id,
            node_id=operation.node_id,
            logical_attempt=operation.logical_attempt,
            redrives=request.redrives,
            tool=request.tool,
            fingerprint=request.fingerprint,
            input=canonical_json(request.input),
        )
        return node, older

    def _insert_operation(self, connection: Any, request: ClaimRequest) -> Row:
        operation = request.operation
        row: Row = self._sql.insert_operation(
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
        return row

    def _grant(
        self,
        connection: Any,
        moment: Moment,
        request: ClaimRequest,
        row: Row,
        epoch: int,
        attempts: Sequence[Row],
        counted: Sequence[Row],
        since_first_send: timedelta,
    ) -> Granted | Paused:
        renewed = epoch > row["epoch"]
        wait = self._pauses.wait(connection, moment, request, epoch) if renewed else timedelta(0)
        if isinstance(wait, Paused):
            return wait
        attempt = attempts[-1]["attempt"] + 1 if attempts else 1
        self._sql.lease_operation(
            connection,
            operation_id=str(request.operation),
            epoch=epoch,
            owner=request.owner,
            boot=moment.boot,
            until=moment.seconds + self._lease.total_seconds(),
        )
        if renewed:
            # What is called later can act later: horizons count from the call.
            called = replace(moment, now=moment.now + wait, seconds=moment.seconds + wait.total_seconds())
            self._insert_attempt(connection, called, request, attempt, epoch, code=None)
        return Granted(
            epoch=epoch,
            attempt=attempt,
            fingerprint=row["fingerprint"],
            failures=failures_of(counted),
            last_category=category_of(attempts[-1]) if attempts else None,
            since_first_send=since_first_send,
            wait=wait,
        )

    def _insert_attempt(
        self,
        connection: Any,
        moment: Moment,
        request: ClaimRequest,
        attempt: int,
        epoch: int,
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
            started_at=to_text(moment.now),
            started_boot=moment.boot,
            started_clock=moment.seconds,
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

    def renew(self, connection: Any, moment: Moment, operation: OperationId, epoch: int) -> bool:
        """See `Ledger.renew`."""
        until = moment.seconds + self._lease.total_seconds()
        changed: int = self._sql.renew_lease(
            connection, operation_id=str(operation), epoch=epoch, boot=moment.boot, until=until, now=moment.seconds
        )
        return changed == 1

    def succeed(self, connection: Any, moment: Moment, operation: OperationId, epoch: int, output: Json) -> bool:
        """See `Ledger.succeed`."""
        attempt = {"operation_id": str(operation), "epoch": epoch}
        result, now = to_json(output), to_text(moment.now)
        if not self._sql.succeed_operation(connection, **attempt, result=result, now=now):
            row = self._sql.operation(connection, operation_id=str(operation))
            if row is None or row["epoch"] != epoch:
                self._note_late(connection, moment, operation, epoch, "succeeded")
                return False
            # It has an end already: this very one, if only the answer to the first commit was lost.
            return bool(row["result"] == result)
        self._sql.succeed_attempt(connection, **attempt, settled=Settlement.SUCCESS, now=now)
        self._pauses.answered(connection, operation, epoch)
        self._end_node(connection, moment, operation, NodeEnd.SUCCEEDED, Source.EXECUTED, None)
        return True

    def fail(
        self,
        connection: Any,
        moment: Moment,
        operation: OperationId,
        epoch: int,
        outcome: Outcome,
        wait: timedelta | None,
        floor: timedelta | None,
    ) -> bool:
        """See `Ledger.fail`."""
        message = outcome.message.replace("\0", _NUL)
        row = self._sql.operation(connection, operation_id=str(operation))
        if row is None or row["epoch"] != epoch:
            self._note_late(connection, moment, operation, epoch, f"failed: {outcome.code}")
            return False
        if row["owner"] is None:
            ended = self._sql.attempt(connection, operation_id=str(operation), epoch=epoch)
            return ended is not None and (ended["code"], ended["message"]) == (outcome.code, message)
        attempt = self._sql.attempt(connection, operation_id=str(operation), epoch=epoch)
        self._end_attempt(
            connection,
            moment,
            operation,
            epoch,
            category=outcome.category,
            code=outcome.code,
            message=message,
            http_status=outcome.http_status,
            side_effect=outcome.side_effect,
            next_eligible_at=to_text(moment.now + wait) if wait is not None else None,
            # Once a person is asked, only the others are held back by it.
            not_before=to_text(own_time(moment, attempt) + floor) if floor is not None and wait is not None else None,
        )
        if outcome.code == Code.RESULT_UNUSABLE:
            self._sql.confirm_attempts(connection, operation_id=str(operation))
        self._sql.release_lease(connection, operation_id=str(operation))
        self._pauses.failed(connection, moment, row, outcome, wait, floor)
        return True

    def _end_attempt(self, connection: Any, moment: Moment, operation: OperationId, epoch: int, **values: Any) -> None:
        blank = dict.fromkeys(("category", "code", "message", "http_status", "next_eligible_at", "not_before"))
        self._sql.end_attempt(
            connection, operation_id=str(operation), epoch=epoch, now=to_text(moment.now), **(blank | values)
        )

    def _note_late(self, connection: Any, moment: Moment, operation: OperationId, epoch: int, what: str) -> None:
        self._sql.note_late_answer(
            connection,
            operation_id=str(operation),
            epoch=epoch,
            now=to_text(moment.now),
            code=Code.FENCED,
            message=f"came back after it had been given up, and changed nothing ({what})",
        )

    def settle_absent(self, connection: Any, _moment: Moment, operation: OperationId, epoch: int) -> None:
        """See `Ledger.settle_absent`."""
        self._sql.settle_attempts(connection, operation_id=str(operation), epoch=epoch, settled=Settlement.ABSENT)
        self._sql.fence_operation(connection, operation_id=str(operation), epoch=epoch)

    def settle_committed(
        self, connection: Any, moment: Moment, operation: OperationId, epoch: int, output: Json
    ) -> bool:
        """See `Ledger.settle_committed`."""
        node = self._sql.node(connection, run_id=operation.run_id, node_id=operation.node_id)
        if node is None:
            return False
        if node["ended"] is not None:
            row = self._sql.operation(connection, operation_id=str(operation))
            return row is not None and row["result"] == to_json(output)
        self._sql.settle_attempts(connection, operation_id=str(operation), epoch=epoch, settled=Settlement.COMMITTED)
        self._sql.fence_operation(connection, operation_id=str(operation), epoch=EVERY_EPOCH)
        if node["logical_attempt"] != operation.logical_attempt:
            return False
        self._sql.reconcile_operation(
            connection, operation_id=str(operation), result=to_json(output), now=to_text(moment.now)
        )
        self._end_node(connection, moment, operation, NodeEnd.SUCCEEDED, Source.RECONCILED, None)
        return True

    def confirm(self, connection: Any, _moment: Moment, operation: OperationId) -> None:
        """See `Ledger.confirm`."""
        self._sql.confirm_attempts(connection, operation_id=str(operation))


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


def _busy(moment: Moment, operation: Row, attempts: Sequence[Row], budget_from: int) -> Busy | None:
    lease = lease_left(moment, operation)
    if lease > timedelta(0):
        return Busy(remaining=lease)
    last = attempts[-1] if attempts else None
    # A redrive is a person's decision against what the tool has asked of this one; what it has asked of all is a pause.
    if last is not None and last["not_before"] is not None and last["attempt"] > budget_from:
        wait = to_time(last["not_before"]) - own_time(moment, last)
        return Busy(remaining=wait, floor=True) if wait > timedelta(0) else None
    return None
