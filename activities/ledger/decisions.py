"""What people decide, and how nodes end: each inside one transaction that its caller opens and commits."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from activities.ledger.clock import Moment
from activities.ledger.reads import Reads
from activities.ledger.records import Settlement
from activities.ledger.rows import Row, decisions_of, is_at_risk, redriven_of, to_json, to_text
from contracts.canonical import canonical_json
from contracts.dead_letters import DecisionOutcome, RefusalCode
from contracts.dispatch import Change, DecideAnswer, DecideRequest, NodeEnd
from contracts.identity import OperationId
from contracts.runs import Source

__all__ = ["EVERY_EPOCH", "Decisions"]

EVERY_EPOCH: Final = 2**62
"""Later than any epoch that is ever granted."""


class Decisions(Reads):
    """The transactions of decisions and cancels."""

    def decide(self, connection: Any, moment: Moment, request: DecideRequest, fence: datetime) -> DecideAnswer:
        """See `Ledger.decide`."""
        ids = {"run_id": request.run_id, "node_id": request.node_id}
        node = self._sql.node(connection, **ids)
        if node is None:
            # The ledger was lost; the dead letter is what is left of the node.
            node = self._sql.insert_node(
                connection,
                **ids,
                logical_attempt=request.logical_attempt,
                redrives=request.redrives,
                tool=request.tool.name if request.tool else "",
                fingerprint=request.tool.fingerprint if request.tool else "",
                input=canonical_json(request.input),
            )
        decisions = decisions_of(node)
        for earlier in decisions:
            if earlier.decision_id == request.record.decision_id:
                return DecideAnswer(record=earlier, redriven=redriven_of(node) if node["ended"] is None else None)
        attempts = list(self._sql.attempts(connection, **ids))
        if refusal := _too_late(node, request) or _unseen(attempts, request):
            refused = {"outcome": DecisionOutcome.REFUSED, "refusals": [refusal]}
            return DecideAnswer(record=request.record.model_copy(update=refused))
        # A ledger that was lost, or is an older copy, knows of fewer redrives than the entry.
        operation = OperationId(**ids, logical_attempt=max(node["logical_attempt"], request.logical_attempt))
        self._sql.fence_operation(connection, operation_id=str(operation), epoch=EVERY_EPOCH)
        match request.change:
            case Change.REDRIVE:
                self._redrive(connection, request, node, operation)
            case Change.RESOLVE:
                self._sql.settle_attempts(
                    connection, operation_id=str(operation), epoch=EVERY_EPOCH, settled=Settlement.DECISION
                )
                self._end_node(connection, moment, operation, NodeEnd.RESOLVED, request.source, to_json(request.output))
            case Change.DISCARD:
                self._end_node(connection, moment, operation, NodeEnd.DISCARDED, None, None)
        text = "[" + ",".join(record.model_dump_json() for record in [*decisions, request.record]) + "]"
        self._sql.record_decision(connection, **ids, decisions=text, fence=to_text(fence))
        changed = self._sql.node(connection, **ids)
        return DecideAnswer(
            record=request.record, redriven=redriven_of(changed) if request.change is Change.REDRIVE else None
        )

    def _redrive(self, connection: Any, request: DecideRequest, node: Row, operation: OperationId) -> None:
        assert request.tool is not None
        if request.accepts_risk:
            self._sql.accept_risk(connection, operation_id=str(operation), decision_id=request.record.decision_id)
        self._sql.allow_repetition(connection, operation_id=str(operation))
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

    def cancel(
        self, connection: Any, moment: Moment, run_id: str, node_ids: list[str], fence: datetime, for_good: bool
    ) -> tuple[list[str], list[str]]:
        """See `Ledger.cancel`: what is uncertain, and what has ended."""
        at = to_text(moment.now) if for_good else None
        uncertain: list[str] = []
        ended: list[str] = []
        for node_id in node_ids:
            ids = {"run_id": run_id, "node_id": node_id}
            if not self._sql.cancel_node(connection, **ids, now=at, fence=to_text(fence)):
                # What has ended is not changed.
                ended.append(node_id)
            elif any(is_at_risk(attempt) for attempt in self._sql.attempts(connection, **ids)):
                uncertain.append(node_id)
        return uncertain, ended

    def _end_node(
        self,
        connection: Any,
        moment: Moment,
        operation: OperationId,
        end: NodeEnd,
        source: Source | None,
        output: str | None,
    ) -> None:
        self._sql.end_node(
            connection,
            run_id=operation.run_id,
            node_id=operation.node_id,
            ended=end,
            source=source,
            output=output,
            now=to_text(moment.now),
        )


def _too_late(node: Row, request: DecideRequest) -> RefusalCode | None:
    if node["ended"] is not None:
        decided = node["ended"] in (NodeEnd.RESOLVED, NodeEnd.DISCARDED)
        return RefusalCode.ALREADY_DECIDED if decided else RefusalCode.NODE_CLOSED
    if node["redrives"] > request.redrives:
        return RefusalCode.ALREADY_DECIDED
    if node["cancelled_at"] is not None and request.change is Change.REDRIVE:
        return RefusalCode.RUN_CANCELLING
    return None


def _unseen(attempts: Sequence[Row], request: DecideRequest) -> RefusalCode | None:
    """Whoever decided was shown fewer attempts than there are now: the newer ones may have had an effect."""
    seen = request.attempts_seen
    return RefusalCode.EVIDENCE_CHANGED if seen is not None and len(attempts) > seen else None
