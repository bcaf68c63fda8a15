"""``DeadLetter``: holds the evidence, tells people, and waits for their decision for as long as it takes."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Self

from temporalio import workflow
from temporalio.common import RawValue, RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, FailureError

with workflow.unsafe.imports_passed_through():
    from activities import stubs
    from contracts.base import Json
    from contracts.canonical import json_size
    from contracts.dead_letters import (
        MAX_DECISIONS_SHOWN,
        REFUSALS,
        Action,
        Decision,
        DecisionOutcome,
        DecisionRecord,
        Eligibility,
        Entry,
        EntryStatus,
        MalformedDecisionError,
        RedriveDecision,
        RefusalCode,
        ResolveDecision,
        kept,
        parse_decision,
    )
    from contracts.dispatch import (
        Change,
        DeadLetterInput,
        DeadLetterResult,
        DecideRequest,
        Evidence,
        EvidenceRequest,
        NodeEnd,
        PreflightAnswer,
        PreflightRequest,
        QueuedDecision,
        ReconcileAnswer,
        ReconcileRequest,
        ReportTo,
        ToolFacts,
        Verdict,
    )
    from contracts.failures import SideEffect, clip_message
    from contracts.limits import INLINE
    from contracts.runs import Revocation, Source
    from contracts.sweep import GONE
    from workflows.attributes import STATUS
    from workflows.evidence import refreshed
    from workflows.options import COMMIT_TIMEOUT, HEARTBEAT_TIMEOUT, MARGIN, PATIENT_RETRY, QUICK_RETRY
    from workflows.payloads import read_one, read_signal

__all__ = ["DeadLetter"]

_OBSOLETE_FOR: Final = timedelta(hours=24)
"""How long an entry that nobody needs to decide any more stays open to be looked at."""
_ALERT_TIMEOUT: Final = timedelta(seconds=30)
_ALERT_RETRY: Final = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_interval=timedelta(minutes=5))
_MAX_REASON: Final = 1000
_MAX_NAME: Final = 200
_ACTIONS: Final = frozenset(Action)
_READ_AT_ONCE: Final = 2_000
"""How many decisions one workflow task reads; the server lets a second pass before the next."""
_MAX_REPLAYED: Final = 256 * 1024 * 1024
"""Of events times bytes of input: about what a history of 4 MiB, when Temporal suggests a new one, comes to."""
_MAX_QUEUED: Final = 200
_MAX_QUEUED_BYTES: Final = 256 * 1024
"""How many decisions may wait for their turn, and what of them fits into the input of the next execution."""

_EFFECT_REFUSALS: Final = frozenset(
    {RefusalCode.SIDE_EFFECT_UNRESOLVED, RefusalCode.DEDUPE_WINDOW_EXPIRED, RefusalCode.EFFECT_CONFIRMED}
)
"""Refusals that the tool itself may lift by saying what happened."""

_ACCEPTED_RISKS: Final = frozenset(code for code in _EFFECT_REFUSALS if REFUSALS[code].overridable)
"""Whoever overrides one of these accepts that there may be a second effect."""

_STATUS_AFTER: Final = {
    Change.REDRIVE: EntryStatus.REDRIVEN,
    Change.RESOLVE: EntryStatus.RESOLVED,
    Change.DISCARD: EntryStatus.DISCARDED,
}


@dataclass(slots=True)
class _Pending:
    """A decision in the queue, and the record that answers it."""

    action: Action
    decision: Decision
    payload: Json
    decision_id: str
    size: int
    waited_for: bool = False
    """Somebody waits for the answer, so that this execution has to give it."""
    record: DecisionRecord | None = None

    @classmethod
    def of(cls, action: Action, decision: Decision, decision_id: str = "", waited_for: bool = False) -> Self:
        """As it arrives; without an id it is given one."""
        payload = decision.model_dump(mode="json", exclude_unset=True)
        named = decision_id or decision.decision_id or str(workflow.uuid4())
        return cls(action, decision, payload, named, json_size(payload), waited_for)


@workflow.defn(name="DeadLetter")
class DeadLetter:
    """A dead letter; see ``CONTRACT.md`` for its query and its decisions."""

    @workflow.init
    def __init__(self, *payloads: Any) -> None:
        # Read before any handler runs: signals may come before the first workflow task, and are re-applied by a reset.
        self._bad_start: ApplicationError | None = None
        try:
            self._start = read_one(DeadLetterInput, payloads, "InvalidDeadLetter")
        except ApplicationError as error:
            self._bad_start = error
            return
        self._entry = self._start.entry
        self._input_size = json_size(self._entry.input)
        self._shown = self._entry.status
        self._queue = deque(
            _Pending.of(
                queued.action, parse_decision(queued.action, [queued.payload], self._start.limits), queued.decision_id
            )
            for queued in self._start.queue
        )
        self._inbox: deque[_Pending | tuple[str, tuple[Any, ...]]] = deque()
        self._result: DeadLetterResult | None = None
        self._revoked = list(self._start.revoked)
        self._node_gone = self._start.node_gone
        self._known_gone = False
        self._outdated = True
        self._obsolete_at = workflow.now() + _OBSOLETE_FOR if self._entry.status is EntryStatus.OBSOLETE else None
        self._report_to = dict.fromkeys(self._start.report_to)

    @workflow.run
    async def run(self, *_payloads: Any) -> DeadLetterResult:
        """Waits for a decision, and ends with it."""
        if self._bad_start is not None:
            raise self._bad_start
        alert = None if self._start.announced else asyncio.create_task(self._announce())
        work = asyncio.create_task(self._serve())
        while not work.done():
            try:
                await workflow.wait_condition(work.done)
            except asyncio.CancelledError:
                # Cancelling a run must never hide an uncertain effect; a decision ends this, nothing else does.
                workflow.logger.info("a dead letter is not cancelled; decide it")
        result = work.result()
        if result is None:
            await workflow.wait_condition(workflow.all_handlers_finished)
            while self._inbox:
                self._read_inbox()
            workflow.continue_as_new(
                self._start.model_copy(
                    update={
                        "entry": self.entry(),
                        "queue": [
                            QueuedDecision(action=one.action, payload=one.payload, decision_id=one.decision_id)
                            for one in self._queue
                        ],
                        "revoked": self._revoked,
                        "node_gone": self._node_gone,
                        "announced": alert is None or alert.done(),
                        "report_to": list(self._report_to),
                    }
                )
            )
        if alert is not None and not alert.done():
            alert.cancel()
        await self._report(result)
        await workflow.wait_condition(workflow.all_handlers_finished)
        return result

    async def _serve(self) -> DeadLetterResult | None:
        """One decision at a time, in the order of their arrival; None: continue as new."""
        while self._result is None:
            if self._inbox:
                self._read_inbox()
                if self._inbox:
                    # The rest in another workflow task, and after those that have to be decided before it.
                    await workflow.sleep(timedelta(milliseconds=1))
                    if not self._queue:
                        continue
            # Before a check, which the next execution begins with: where people ask for one after the other, one would
            # always be due.
            if self._is_long():
                return None
            if self._outdated:
                self._outdated = False
                await self._check()
                # The check may have found that there is nothing left to decide.
                continue
            try:
                await workflow.wait_condition(
                    lambda: bool(self._inbox or self._queue) or self._outdated or self._is_long(),
                    timeout=self._obsolete_at - workflow.now() if self._obsolete_at is not None else None,
                    timeout_summary="nobody needs to decide this any more",
                )
            except TimeoutError:
                self._result = self._end(EntryStatus.OBSOLETE)
            while self._queue and self._result is None and not self._is_long():
                pending = self._queue.popleft()
                pending.record = await self._decide(pending)
        for late in self._queue:
            late.record = self._answer_late(late)
        while self._inbox:
            self._read_inbox()
        return self._result.model_copy(update={"decisions": self.entry().decisions})

    def _is_long(self) -> bool:
        """Whether to continue as new; who sent a signal does not wait, and what he has decided goes along."""
        return (
            self._has_long_history
            and not self._inbox
            and not any(pending.waited_for for pending in self._queue)
            and self._queued_bytes <= _MAX_QUEUED_BYTES
        )

    @property
    def _has_long_history(self) -> bool:
        # Temporal counts a payload that is kept elsewhere as its reference, but each event may bring the input along.
        info = workflow.info()
        replayed = info.get_current_history_length() * self._input_size
        return info.is_continue_as_new_suggested() or replayed > _MAX_REPLAYED

    @property
    def _queued_bytes(self) -> int:
        return sum(pending.size for pending in self._queue)

    # What people send. Each decision is a signal and an update of one name; an unreadable signal is kept as rejected.

    @workflow.query
    def entry(self) -> Entry:
        """The whole evidence."""
        if self._bad_start is not None:
            raise self._bad_start
        return self._entry.model_copy(update={"decisions": kept(self._entry.decisions)})

    @workflow.signal(
        name="redrive", description="Send again: decided_by, reason, input, new_operation, approval, override"
    )
    def signal_redrive(self, *payloads: Any) -> None:
        """See `contracts.dead_letters.RedriveDecision`."""
        self._signalled(Action.REDRIVE, payloads)

    @workflow.signal(name="discard", description="Give the node up: decided_by, reason")
    def signal_discard(self, *payloads: Any) -> None:
        """See `contracts.dead_letters.DiscardDecision`."""
        self._signalled(Action.DISCARD, payloads)

    @workflow.signal(name="resolve", description="End the node with a result you vouch for: decided_by, reason, output")
    def signal_resolve(self, *payloads: Any) -> None:
        """See `contracts.dead_letters.ResolveDecision`."""
        self._signalled(Action.RESOLVE, payloads)

    @workflow.signal(name="reconcile", description="Ask the tool again what happened: decided_by")
    def signal_reconcile(self, *payloads: Any) -> None:
        """See `contracts.dead_letters.ReconcileDecision`."""
        self._signalled(Action.RECONCILE, payloads)

    @workflow.signal(name="check", description="Refresh the eligibility; decides nothing")
    def signal_check(self, *payloads: Any) -> None:
        """See `contracts.dead_letters.CheckDecision`."""
        self._signalled(Action.CHECK, payloads)

    @workflow.update(
        name="redrive", description="Send again: decided_by, reason, input, new_operation, approval, override"
    )
    async def update_redrive(self, *payloads: Any) -> DecisionRecord:
        """See `contracts.dead_letters.RedriveDecision`."""
        return await self._updated(Action.REDRIVE, payloads)

    @workflow.update(name="discard", description="Give the node up: decided_by, reason")
    async def update_discard(self, *payloads: Any) -> DecisionRecord:
        """See `contracts.dead_letters.DiscardDecision`."""
        return await self._updated(Action.DISCARD, payloads)

    @workflow.update(name="resolve", description="End the node with a result you vouch for: decided_by, reason, output")
    async def update_resolve(self, *payloads: Any) -> DecisionRecord:
        """See `contracts.dead_letters.ResolveDecision`."""
        return await self._updated(Action.RESOLVE, payloads)

    @workflow.update(name="reconcile", description="Ask the tool again what happened: decided_by")
    async def update_reconcile(self, *payloads: Any) -> DecisionRecord:
        """See `contracts.dead_letters.ReconcileDecision`."""
        return await self._updated(Action.RECONCILE, payloads)

    @workflow.update(name="check", description="Refresh the eligibility; decides nothing")
    async def update_check(self, *payloads: Any) -> DecisionRecord:
        """See `contracts.dead_letters.CheckDecision`."""
        return await self._updated(Action.CHECK, payloads)

    @update_redrive.validator
    def _validate_redrive(self, *payloads: Any) -> None:
        self._parsed(Action.REDRIVE, payloads)

    @update_discard.validator
    def _validate_discard(self, *payloads: Any) -> None:
        self._parsed(Action.DISCARD, payloads)

    @update_resolve.validator
    def _validate_resolve(self, *payloads: Any) -> None:
        self._parsed(Action.RESOLVE, payloads)

    @update_reconcile.validator
    def _validate_reconcile(self, *payloads: Any) -> None:
        self._parsed(Action.RECONCILE, payloads)

    @update_check.validator
    def _validate_check(self, *payloads: Any) -> None:
        self._parsed(Action.CHECK, payloads)

    @workflow.signal(dynamic=True)
    def unknown_signal(self, name: str, _payloads: Sequence[RawValue]) -> None:
        """A decision of no known name: kept as rejected, so that its sender can find out."""
        self._signalled(name, ())

    def _parsed(self, action: Action, payloads: Sequence[Any]) -> Decision:
        limits = self._start.limits if self._bad_start is None else INLINE
        return parse_decision(action, list(payloads), limits)

    # What the other workflows send.

    @workflow.signal
    def node_gone(self) -> None:
        """The node was cancelled and waits no longer."""
        self._node_gone = True
        self._outdated = True

    @workflow.signal
    def revoke_approval(self, *payloads: Any) -> None:
        """The run says that an approval was revoked."""
        revocation = read_signal(Revocation, payloads)
        if self._bad_start is None and revocation is not None and revocation.approval_id not in self._revoked:
            self._revoked.append(revocation.approval_id)
            self._outdated = True

    @workflow.signal
    def report_to(self, *payloads: Any) -> None:
        """A node that did not open this wants to hear the decision."""
        asked = read_signal(ReportTo, payloads)
        if asked is not None and self._bad_start is None:
            self._report_to[asked.workflow_id] = None
            # It may have tried again before it found this open.
            self._outdated = True
            self._outdated = self._outdated or self._node_gone
            self._node_gone = False

    def _signalled(self, name: str, payloads: tuple[Any, ...]) -> None:
        if self._bad_start is None:
            self._arrived((name, payloads))

    def _arrived(self, decision: _Pending | tuple[str, tuple[Any, ...]]) -> None:
        """Only puts it down: thousands may arrive in one workflow task, which has seconds for all of them."""
        self._inbox.append(decision)
        if self._result is not None:
            self._read_inbox()

    def _read_inbox(self) -> None:
        """Reads some of what has arrived, while there is room: it is given its turn, or kept as rejected."""
        for _ in range(min(len(self._inbox), _READ_AT_ONCE)):
            arrived = self._inbox.popleft()
            if isinstance(arrived, _Pending):
                if self._result is not None:
                    arrived.record = self._answer_late(arrived)
                else:
                    self._queue.append(arrived)
                continue
            name, payloads = arrived
            if name not in _ACTIONS:
                self._reject(name, (), f"there is no decision {name[:100]!r}; there are {', '.join(Action)}")
                continue
            action = Action(name)
            try:
                decision = self._parsed(action, payloads)
            except MalformedDecisionError as error:
                self._reject(action, payloads, f"malformed: {error}")
                continue
            if action is Action.CHECK and not decision.decided_by and not decision.decision_id:
                # Only a look: however many ask for it, one answers them all.
                self._outdated = True
                continue
            pending = _Pending.of(action, decision)
            if self._result is not None:
                self._answer_late(pending)
            elif not self._is_crowded(pending):
                self._queue.append(pending)
            elif self._has_long_history:
                # What waits has to fit into the input of the next execution.
                self._reject(
                    action, payloads, "too many decisions wait for their turn: send it again after they had it"
                )
            else:
                self._inbox.appendleft(arrived)
                return

    def _is_crowded(self, pending: _Pending) -> bool:
        if len(self._queue) >= _MAX_QUEUED:
            return True
        return bool(self._queue) and self._queued_bytes + pending.size > _MAX_QUEUED_BYTES

    async def _updated(self, action: Action, payloads: tuple[Any, ...]) -> DecisionRecord:
        if self._bad_start is not None:
            raise self._bad_start
        pending = _Pending.of(action, self._parsed(action, payloads), waited_for=True)
        # In its turn after what was signalled before, and never between two executions.
        self._arrived(pending)
        await workflow.wait_condition(lambda: pending.record is not None)
        assert pending.record is not None
        return pending.record

    def _reject(self, action: str, payloads: tuple[Any, ...], reason: str) -> None:
        if self._bad_start is not None:
            return
        said = payloads[0] if payloads and isinstance(payloads[0], dict) else {}
        by, decision_id = said.get("decided_by"), said.get("decision_id")
        self._keep(
            DecisionRecord(
                decision_id=clip_message(decision_id, _MAX_NAME)
                if isinstance(decision_id, str)
                else str(workflow.uuid4()),
                action=clip_message(action, _MAX_NAME),
                decided_by=clip_message(by, _MAX_NAME) if isinstance(by, str) else "",
                reason=clip_message(reason, _MAX_REASON),
                at=workflow.now(),
                outcome=DecisionOutcome.REJECTED,
            )
        )

    async def _decide(self, pending: _Pending) -> DecisionRecord:
        """One decision, from its arrival to its record."""
        if (earlier := self._seen(pending)) is not None:
            return earlier
        decision = pending.decision
        if decision.if_redrives is not None and decision.if_redrives != self._entry.redrives:
            return self._keep(self._record(pending, DecisionOutcome.REFUSED, [RefusalCode.EVIDENCE_CHANGED]))
        match pending.action:
            case Action.CHECK:
                await self._check()
                record = self._record(pending, DecisionOutcome.NOTED)
                # An anonymous check is a look, not something to remember.
                return self._keep(record) if decision.decided_by or decision.decision_id else record
            case Action.RECONCILE:
                return await self._reconcile(pending)
            case Action.REDRIVE:
                assert isinstance(decision, RedriveDecision)
                return await self._redrive(pending, decision)
            case Action.RESOLVE:
                assert isinstance(decision, ResolveDecision)
                return await self._resolve(pending, decision)
            case Action.DISCARD:
                return await self._commit(pending, self._request(pending, Change.DISCARD))

    def _seen(self, pending: _Pending) -> DecisionRecord | None:
        """The record of a decision that came before under the same id; a malformed one may be sent again, corrected."""
        for earlier in self._entry.decisions:
            if earlier.decision_id == pending.decision_id and earlier.outcome is not DecisionOutcome.REJECTED:
                return earlier
        return None

    def _answer_late(self, pending: _Pending) -> DecisionRecord:
        refused = self._record(pending, DecisionOutcome.REFUSED, [RefusalCode.ALREADY_DECIDED])
        return self._seen(pending) or self._keep(refused)

    async def _check(self) -> PreflightAnswer:
        """Checks a plain redrive against the present; what it finds is the eligibility."""
        answer = await self._preflight(self._plain())
        settled_since = answer.attempt_count > 0 and answer.side_effect is not self._entry.side_effect
        if answer.attempt_count > self._attempts_known or settled_since:
            # The node was reset, or a delivery came late: who decides has to see what has been tried since, and what is
            # not in doubt any more.
            self._entry = refreshed(self._entry, await self._gather())
        self._note(answer)
        return answer

    @property
    def _attempts_known(self) -> int:
        return len(self._entry.attempts) + self._entry.attempts_omitted

    async def _gather(self) -> Evidence:
        return await workflow.execute_activity(
            stubs.gather_evidence,
            EvidenceRequest(
                run_id=self._entry.run_id,
                node_id=self._entry.node_id,
                node_started_at=self._start.node_started_at or self._entry.first_failed_at,
                tool=self._entry.tool.name,
            ),
            start_to_close_timeout=COMMIT_TIMEOUT,
            retry_policy=PATIENT_RETRY,
            summary="what has been tried since?",
        )

    def _note(self, answer: PreflightAnswer) -> None:
        refusals = answer.refusals
        if self._node_gone and not {RefusalCode.RUN_CLOSED, RefusalCode.RUN_CANCELLING, RefusalCode.NODE_CLOSED} & set(
            refusals
        ):
            refusals = [RefusalCode.NODE_CLOSED, *refusals]
        if answer.ended is not None and self._result is None:
            # Its answer came late, when it had been given up, but it came: there is nothing left to decide.
            status = EntryStatus.DISCARDED if answer.ended is NodeEnd.DISCARDED else EntryStatus.RESOLVED
            late = {"output": answer.output, "source": answer.source}
            self._result = self._end(status).model_copy(update=late)
        if answer.redrives > self._entry.redrives and self._result is None:
            # The ledger is ahead: this entry was decided, and its history has been reset since.
            self._result = self._end(EntryStatus.REDRIVEN)
        eligibility = Eligibility(redrivable=not refusals, refusals=refusals, checked_at=answer.at)
        self._update(eligibility=eligibility, side_effect=answer.side_effect)
        gone = answer.run_gone or self._node_gone
        if gone is not self._known_gone:
            self._known_gone = gone
            workflow.upsert_memo({GONE: gone})
        if gone and answer.side_effect is SideEffect.NONE and self._entry.status is EntryStatus.AWAITING_DECISION:
            self._obsolete_at = workflow.now() + _OBSOLETE_FOR
            self._update(status=EntryStatus.OBSOLETE)
        if not gone and self._entry.status is EntryStatus.OBSOLETE:
            # The run was started again, and its node has come back.
            self._obsolete_at = None
            self._update(status=EntryStatus.AWAITING_DECISION)
        self._show()

    def _plain(self) -> PreflightRequest:
        return PreflightRequest(
            run_id=self._entry.run_id,
            node_id=self._entry.node_id,
            logical_attempt=self._entry.logical_attempt,
            tool=self._entry.tool,
            input=self._entry.input,
            unresolved=self._start.unresolved,
            approval=self._start.approval,
            revoked=self._revoked,
            redrives=self._entry.redrives,
            attempts_seen=self._attempts_known,
            node_started_at=self._start.node_started_at,
        )

    async def _preflight(self, request: PreflightRequest) -> PreflightAnswer:
        return await workflow.execute_activity(
            stubs.preflight,
            request,
            start_to_close_timeout=COMMIT_TIMEOUT,
            retry_policy=PATIENT_RETRY,
            summary="would a redrive be accepted?",
        )

    async def _redrive(self, pending: _Pending, decision: RedriveDecision) -> DecisionRecord:
        request = self._plain().model_copy(
            update={
                "input": decision.input if decision.edits_input else self._entry.input,
                "unresolved": self._start.unresolved and not decision.edits_input,
                "new_operation": decision.is_new_operation,
                "new_approval": decision.approval,
            }
        )
        answer = await self._preflight(request)
        uncertain = set(_standing(answer, decision)) <= _EFFECT_REFUSALS and _EFFECT_REFUSALS & set(answer.refusals)
        if uncertain and not self._node_gone and answer.tool is not None and answer.tool.askable:
            asked = await self._ask(answer.tool)
            if asked.verdict is Verdict.COMMITTED and asked.usable:
                return await self._reconciled(pending, asked, DecisionOutcome.ACCEPTED)
            answer = await self._preflight(request)
        standing = _standing(answer, decision)
        if self._node_gone and not standing:
            standing = [RefusalCode.NODE_CLOSED]
        if standing:
            self._outdated = True
            return self._keep(self._record(pending, DecisionOutcome.REFUSED, standing))
        change = {
            "attempts_seen": answer.attempt_count,
            "accepts_risk": bool(_ACCEPTED_RISKS & set(answer.refusals)),
            "input": request.input,
            "new_operation": decision.is_new_operation,
            "tool": answer.tool.reference if answer.tool is not None else self._entry.tool,
            "approval": answer.approval,
        }
        return await self._commit(
            pending, self._request(pending, Change.REDRIVE).model_copy(update=change), answer.tool
        )

    async def _resolve(self, pending: _Pending, decision: ResolveDecision) -> DecisionRecord:
        request = self._plain().model_copy(update={"resolution": decision.output, "resolves": True})
        answer = await self._preflight(request)
        if answer.output_problems:
            problems = "; ".join(answer.output_problems)
            record = self._record(pending, DecisionOutcome.REJECTED)
            return self._keep(record.model_copy(update={"reason": f"malformed: {problems}"[:_MAX_REASON]}))
        change = {"output": decision.output}
        return await self._commit(pending, self._request(pending, Change.RESOLVE).model_copy(update=change))

    async def _reconcile(self, pending: _Pending) -> DecisionRecord:
        answer = await self._check()
        if answer.tool is None or not answer.tool.askable:
            return self._keep(
                self._record(pending, DecisionOutcome.NOTED, said="the tool cannot be asked: it has no reconcile URL")
            )
        asked = await self._ask(answer.tool)
        if asked.verdict is Verdict.COMMITTED and asked.usable:
            return await self._reconciled(pending, asked, DecisionOutcome.NOTED)
        await self._check()
        said = f"{asked.verdict}{': ' if asked.message else ''}{asked.message}"
        return self._keep(self._record(pending, DecisionOutcome.NOTED, said=said))

    async def _ask(self, tool: ToolFacts) -> ReconcileAnswer:
        """Asks the tool once: a person waits."""
        try:
            return await workflow.execute_activity(
                stubs.reconcile,
                ReconcileRequest(
                    run_id=self._entry.run_id,
                    node_id=self._entry.node_id,
                    logical_attempt=self._entry.logical_attempt,
                    tool=self._entry.tool.name,
                    input=self._entry.input,
                    correlation_id=self._entry.correlation_id,
                    trace_id=self._entry.trace_id,
                    once=True,
                ),
                start_to_close_timeout=tool.timeout + MARGIN,
                heartbeat_timeout=HEARTBEAT_TIMEOUT,
                retry_policy=QUICK_RETRY,
                summary=f"what became of {self._entry.operation_id}?",
            )
        except ActivityError as error:
            message = error.cause.message if isinstance(error.cause, ApplicationError) else error.message
            return ReconcileAnswer(verdict=Verdict.NO_ANSWER, message=message)

    async def _reconciled(self, pending: _Pending, asked: ReconcileAnswer, outcome: DecisionOutcome) -> DecisionRecord:
        said = "the tool says that it happened; its result is taken"
        change = {
            "record": self._record(pending, outcome, said=said),
            # The tool has spoken of all of them.
            "attempts_seen": None,
            "output": asked.output,
            "source": Source.RECONCILED,
        }
        return await self._commit(pending, self._request(pending, Change.RESOLVE).model_copy(update=change))

    def _request(self, pending: _Pending, change: Change) -> DecideRequest:
        return DecideRequest(
            run_id=self._entry.run_id,
            node_id=self._entry.node_id,
            redrives=self._entry.redrives,
            logical_attempt=self._entry.logical_attempt,
            record=self._record(pending, DecisionOutcome.ACCEPTED),
            change=change,
            attempts_seen=self._attempts_known,
            tool=self._entry.tool,
        )

    async def _commit(self, pending: _Pending, request: DecideRequest, tool: ToolFacts | None = None) -> DecisionRecord:
        """Commits an accepted decision to the node's row; the node acts on it when this has closed."""
        decided = await workflow.execute_activity(
            stubs.decide,
            request,
            start_to_close_timeout=COMMIT_TIMEOUT,
            retry_policy=PATIENT_RETRY,
            summary=f"{pending.action} by {pending.decision.decided_by}",
        )
        record = self._keep(decided.record)
        self._outdated = True
        if record.outcome is not DecisionOutcome.REFUSED:
            result = self._end(_STATUS_AFTER[request.change], record)
            self._result = result.model_copy(
                update={
                    "redriven": decided.redriven,
                    "tool": tool,
                    "output": request.output,
                    "source": request.source,
                }
            )
        return record

    def _end(self, status: EntryStatus, record: DecisionRecord | None = None) -> DeadLetterResult:
        self._update(status=status)
        self._show()
        return DeadLetterResult(status=status, record=record)

    def _record(
        self,
        pending: _Pending,
        outcome: DecisionOutcome,
        refusals: Sequence[RefusalCode] = (),
        said: str = "",
    ) -> DecisionRecord:
        return DecisionRecord(
            decision_id=pending.decision_id,
            action=pending.action,
            decided_by=pending.decision.decided_by,
            reason=" -> ".join(part for part in (pending.decision.reason, said) if part)[:_MAX_REASON],
            at=workflow.now(),
            outcome=outcome,
            refusals=list(refusals),
        )

    def _keep(self, record: DecisionRecord) -> DecisionRecord:
        # Thousands may arrive in one workflow task; how many bytes they are is only looked at when they leave.
        self._update(decisions=[*self._entry.decisions[1 - MAX_DECISIONS_SHOWN :], record])
        return record

    def _update(self, **changes: Any) -> None:
        self._entry = self._entry.model_copy(update=changes)

    def _show(self) -> None:
        """What a person sees who opens this in the Temporal UI, or lists dead letters."""
        entry = self._entry
        standing = "".join(
            f"\n- {code}: {REFUSALS[code].when}; {REFUSALS[code].cure}" for code in entry.eligibility.refusals
        )
        workflow.set_current_details(
            f"**{entry.status}** ({entry.error.category} {entry.error.code}, effect {entry.side_effect})\n\n"
            f"{entry.error.message}\n\n"
            + (f"A redrive would be refused:{standing}" if standing else "A redrive would be accepted.")
        )
        if entry.status is not self._shown:
            self._shown = entry.status
            workflow.upsert_search_attributes([STATUS.value_set(entry.status)])

    async def _announce(self) -> None:
        # Decided before anybody could be told, or nobody is there to be told: the history shows that.
        with contextlib.suppress(ActivityError):
            await workflow.execute_activity(
                stubs.alert,
                self._entry,
                start_to_close_timeout=_ALERT_TIMEOUT,
                retry_policy=_ALERT_RETRY,
                summary="tell people",
            )

    async def _report(self, result: DeadLetterResult) -> None:
        while self._report_to:
            try:
                node = workflow.get_external_workflow_handle(self._report_to.popitem()[0])
                await node.signal("dead_letter_settled", result)
            except FailureError:
                workflow.logger.info("the node that asked is closed: nobody to tell")


def _standing(answer: PreflightAnswer, decision: RedriveDecision) -> list[RefusalCode]:
    """The refusals that the person has not overridden; which of them can be is the contract's table."""
    return [code for code in answer.refusals if code not in decision.override or not REFUSALS[code].overridable]
