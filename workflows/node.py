"""``Node``: one operation at a time, until it has a result or a person has decided.

It calls one activity and knows nothing of HTTP: retries happen on the server, where the UI shows them.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from temporalio import workflow
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    ChildWorkflowError,
    FailureError,
    TerminatedError,
    WorkflowAlreadyStartedError,
)
from temporalio.exceptions import TimeoutError as WorkflowTimeoutError

with workflow.unsafe.imports_passed_through():
    from activities import stubs
    from contracts.base import Json
    from contracts.canonical import content_hash
    from contracts.dead_letters import (
        DecisionRecord,
        Entry,
        EntryStatus,
        ErrorInfo,
    )
    from contracts.dispatch import (
        Approved,
        CallResult,
        CancelRequest,
        DeadLetterInput,
        DeadLetterResult,
        Dispatch,
        Evidence,
        EvidenceRequest,
        NodeChange,
        NodeEnd,
        NodeInput,
        NodeReport,
        ReconcileAnswer,
        ReconcileRequest,
        Redriven,
        Refusal,
        ReportTo,
        ToolFacts,
        Verdict,
    )
    from contracts.failures import Category, Code, SideEffect, clip_message
    from contracts.identity import OperationId, dead_letter_workflow_id, node_workflow_id
    from contracts.runs import ApprovalGrant, NodeResult, NodeState, NodeStatus, Revocation, Source
    from contracts.sweep import GONE, RunExecution, RunGone
    from workflows.attributes import STATUS
    from workflows.calls import CALL_RETRY, read_answer, result_of, start_call
    from workflows.evidence import entry_of, failure_of, known_absent, made_by_hand, message_of, with_remark
    from workflows.opening import DeadLetterHandle, open_dead_letter
    from workflows.options import (
        ASK_AGAIN,
        COMMIT_TIMEOUT,
        HEARTBEAT_TIMEOUT,
        LONGEST_PATIENCE,
        MARGIN,
        NODE_CANCELLED,
        NODE_DISCARDED,
        PATIENT_RETRY,
        QUICK_RETRY,
        RECONCILE_RETRY,
    )
    from workflows.payloads import read_one, read_signal

__all__ = ["Node"]

_SHOWN: Final = 300
"""How much of an error's message is shown beside its node."""
_NO_ANSWER: Final = "no worker could read the ledger"


@workflow.defn(name="Node")
class Node:
    """A node of a run. Runs start it; nobody else needs to."""

    def __init__(self) -> None:
        self._node: NodeInput
        self._tool: ToolFacts
        self._input: Json = None
        self._refusal: Refusal | None = None
        self._approval: Approved | None = None
        self._logical_attempt = 1
        self._redrives = 0
        self._deadline = workflow.now()
        self._call: workflow.ActivityHandle[Any] | None = None
        self._parked = False
        self._cancelling = False
        self._decisions: list[DecisionRecord] = []
        self._revoked: dict[str, Revocation] = {}
        self._report_to: dict[str, None] = {}
        self._told: NodeChange | None = None
        self._settled: DeadLetterResult | None = None
        self._troubled = False
        self._attached: list[RunExecution] = []
        self._begun = False
        self._look_again = False

    @workflow.run
    async def run(self, *payloads: Any) -> NodeResult:
        """Performs the node.

        Raises:
            ApplicationError: ``NodeDiscarded``, ``NodeCancelled``: it ended without a result.
        """
        self._node = read_one(NodeInput, payloads, "InvalidNode")
        self._tool = self._node.tool
        self._input = self._node.input
        self._refusal = self._node.refusal
        self._revoked |= {revocation.approval_id: revocation for revocation in self._node.revoked}
        if self._node.approval is not None:
            self._approval = self._bind(self._node.approval)
        self._fresh_deadline()
        self._attached.insert(0, self._node.started_by)
        self._begun = True
        work = asyncio.create_task(self._work())
        try:
            await workflow.wait_condition(work.done)
        except asyncio.CancelledError:
            await self._cancel()
            await workflow.wait_condition(work.done)
            await self._report(work)
            if isinstance(error := work.exception(), ApplicationError) and error.type == NODE_CANCELLED:
                raise
        else:
            await self._report(work)
        return work.result()

    async def _work(self) -> NodeResult:
        await self._wait_for_its_time()
        outcome: NodeResult | None = None
        if (failure := self._node.failure) is not None and not self._cancelling:
            outcome = await self._failed(lambda _evidence, _refused: failure)
        while outcome is None:
            if self._cancelling:
                return await self._settle_cancelled()
            try:
                result = read_answer(await self._perform(), self._node.run_id, self._node.node_id)
            except ActivityError as error:
                outcome = await self._failed(functools.partial(failure_of, error))
            except asyncio.CancelledError:
                # Called off in the very moment of its answer, which is lost by that, but not to the ledger.
                continue
            else:
                outcome = await (self._answered(result) if result is not None else self._failed(made_by_hand))
        return outcome

    async def _wait_for_its_time(self) -> None:
        """The wait that the run's own first attempt has asked for."""
        if self._node.not_before is None or self._node.not_before <= workflow.now():
            return
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(
                lambda: self._cancelling or self._refused() is not None,
                timeout=self._node.not_before - workflow.now(),
                timeout_summary=f"{self._tool.name} again",
            )

    async def _perform(self) -> Any:
        """One dispatch: the server retries it as the entry says, and this waits for the outcome."""
        dispatch = Dispatch(
            run_id=self._node.run_id,
            node_id=self._node.node_id,
            logical_attempt=self._logical_attempt,
            redrives=self._redrives,
            tool=self._tool.name,
            fingerprint=self._tool.fingerprint,
            input=self._input,
            deadline=self._deadline,
            node_started_at=self._node.begun_at,
            correlation_id=self._node.correlation_id,
            trace_id=self._node.trace_id,
            approval=self._approval.grant if self._approval else None,
            refusal=self._refused(),
        )
        self._call = start_call(dispatch, self._tool, "call_tool", CALL_RETRY)
        try:
            return await self._call
        finally:
            self._call = None

    def _refused(self) -> Refusal | None:
        """Why nothing may be sent, as far as only the node knows it."""
        if self._refusal is not None:
            return self._refusal
        if self._approval is None or (revocation := self._revoked.get(self._approval.grant.id)) is None:
            return None
        message = f"the approval {revocation.approval_id!r} was revoked by {revocation.revoked_by}"
        if revocation.reason:
            message += f": {revocation.reason}"
        return Refusal(category=Category.PERMISSION, code=Code.APPROVAL_REVOKED, message=clip_message(message))

    async def _answered(self, result: CallResult) -> NodeResult | None:
        """What an answer means; None: go on."""
        if result.redriven is not None:
            self._go_on_as(result.redriven, result.tool)
            return None
        match result.end:
            case NodeEnd.DISCARDED:
                raise _ended(NODE_DISCARDED, "the node was discarded")
            case NodeEnd.CANCELLED:
                return await self._settle_cancelled()
            case _:
                return self._result(result.output, result.source, result)

    def _result(self, output: Json, source: Source | None, result: CallResult) -> NodeResult:
        if self._troubled:
            workflow.upsert_search_attributes([STATUS.value_set(NodeStatus.SUCCEEDED)])
        return result_of(result, output, source)

    async def _failed(self, reading: Callable[[Evidence, Refusal | None], ErrorInfo]) -> NodeResult | None:
        """The call has failed for good: reconcile what is uncertain, then hand over to a person; None: go on."""
        evidence = await self._gather()
        if evidence.end is not None:
            return self._ended_before(evidence.end, evidence)
        if self._overtaken(evidence):
            return None
        failure = reading(evidence, self._refused())
        if evidence.side_effect is not SideEffect.NONE and self._tool.askable:
            answer = await self._reconcile()
            if answer.verdict is Verdict.COMMITTED and answer.usable:
                return self._reconciled(answer)
            if answer.verdict is Verdict.ABSENT:
                if answer.may_resend and failure.category is Category.UNKNOWN_SIDE_EFFECT and not self._cancelling:
                    return None
                failure = known_absent(failure)
            else:
                failure = with_remark(failure, f"reconcile: {answer.message or answer.verdict}")
            evidence = await self._gather()
            if self._overtaken(evidence):
                return None
        if self._cancelling and evidence.side_effect is SideEffect.NONE:
            # That evidence may be older than the cancel.
            return await self._settle_cancelled()
        return await self._hand_over(failure, evidence)

    def _overtaken(self, evidence: Evidence) -> bool:
        """Whether a person has redriven the node since its call was made, through a dead letter opened before.

        Then the ledger answers the next dispatch with what was decided; another dead letter would ask for it again.
        """
        return evidence.redrives > self._redrives and not self._cancelling

    async def _settle_cancelled(self) -> NodeResult:
        """The ledger says that the node was cancelled; what it may have done is settled all the same."""
        self._cancelling = True
        evidence = await self._gather()
        patience = timedelta(seconds=1)
        while evidence.in_flight:
            # Another delivery's call. It is bounded by its tool's timeout, and by its lease if its worker is lost.
            await workflow.sleep(patience, summary="a call is in flight")
            patience = min(patience * 2, _LOOK_AGAIN)
            evidence = await self._gather()
        if evidence.end is not None:
            return self._ended_before(evidence.end, evidence)
        if evidence.side_effect is SideEffect.NONE:
            raise _ended(NODE_CANCELLED, "the node was cancelled")
        lost = evidence.attempts[-1] if evidence.attempts else None
        failure = ErrorInfo(
            category=Category.UNKNOWN_SIDE_EFFECT,
            code=lost.code or Code.UNSETTLED if lost else Code.UNSETTLED,
            message="the node was cancelled while its effect was uncertain",
        )
        if self._tool.askable:
            answer = await self._reconcile()
            if answer.verdict is Verdict.COMMITTED and answer.usable:
                return self._reconciled(answer)
            if answer.verdict is Verdict.ABSENT:
                raise _ended(NODE_CANCELLED, "the node was cancelled; its tool says that nothing happened")
        settled = await self._hand_over(failure, evidence)
        if settled is None:
            raise _ended(NODE_CANCELLED, "the node was cancelled before it was sent again")
        return settled

    def _ended_before(self, end: NodeEnd, evidence: Evidence) -> NodeResult:
        """What the ledger has committed counts, also where nobody heard of it: a cancel does not undo an effect."""
        if end is NodeEnd.DISCARDED:
            raise _ended(NODE_DISCARDED, "the node was discarded")
        result = CallResult(operation_id=str(self._operation), attempt_count=evidence.attempt_count)
        source = evidence.source if evidence.source not in (None, Source.EXECUTED) else Source.REPLAYED
        return self._result(evidence.output, source, result)

    def _reconciled(self, answer: ReconcileAnswer) -> NodeResult:
        result = CallResult(operation_id=str(self._operation), attempt_count=answer.attempt_count)
        return self._result(answer.output, Source.RECONCILED, result)

    async def _gather(self) -> Evidence:
        request = EvidenceRequest(
            run_id=self._node.run_id,
            node_id=self._node.node_id,
            node_started_at=self._node.begun_at,
            tool=self._tool.name,
        )
        try:
            return await workflow.execute_activity(
                stubs.gather_evidence,
                request,
                start_to_close_timeout=COMMIT_TIMEOUT,
                retry_policy=QUICK_RETRY,
                summary="what the ledger knows",
            )
        except ActivityError:
            # The ledger is away. A person must be told all the same; an effect that nobody can rule out is possible.
            return Evidence(
                attempts=[],
                attempts_omitted=0,
                attempt_count=0,
                side_effect=SideEffect.POSSIBLE,
                delivery=None,
                decisions=[],
                redrives=self._redrives,
                at=workflow.now(),
                redrive_version="",
                temporalio_version="",
            )

    async def _reconcile(self) -> ReconcileAnswer:
        """Asks the tool, as often as the policy of a dependency that is down allows."""
        request = ReconcileRequest(
            run_id=self._node.run_id,
            node_id=self._node.node_id,
            logical_attempt=self._logical_attempt,
            tool=self._tool.name,
            input=self._input,
            correlation_id=self._node.correlation_id,
            trace_id=self._node.trace_id,
        )
        try:
            return await workflow.execute_activity(
                stubs.reconcile,
                request,
                start_to_close_timeout=self._tool.timeout + MARGIN,
                schedule_to_close_timeout=_LONGEST_RECONCILE + self._tool.timeout + self._tool.absent_after,
                heartbeat_timeout=HEARTBEAT_TIMEOUT,
                retry_policy=RECONCILE_RETRY,
                summary=f"what became of {self._operation}?",
            )
        except ActivityError as error:
            return ReconcileAnswer(verdict=Verdict.NO_ANSWER, message=message_of(error) or _NO_ANSWER)

    async def _hand_over(self, failure: ErrorInfo, evidence: Evidence) -> NodeResult | None:
        """Opens the dead letter and waits for its decision; None: go on."""
        self._redrives = evidence.redrives
        entry = entry_of(self._node, self._tool, self._operation, self._input, failure, evidence, self._decisions)
        decided = await self._decision(entry, evidence.attempt_count)
        if decided is None:
            raise _ended(NODE_CANCELLED, "the run was cancelled, or is gone; the dead letter outlives it")
        self._decisions = decided.decisions
        match decided.status:
            case EntryStatus.REDRIVEN:
                if decided.redriven is not None:
                    self._go_on_as(decided.redriven, decided.tool)
                await self._tell(NodeStatus.RUNNING, evidence.attempt_count, "")
                return None
            case EntryStatus.RESOLVED:
                result = CallResult(operation_id=str(self._operation), attempt_count=evidence.attempt_count)
                return self._result(decided.output, decided.source or Source.RESOLVED, result)
            case EntryStatus.DISCARDED:
                raise _ended(
                    NODE_DISCARDED, f"discarded by {decided.record.decided_by}" if decided.record else "discarded"
                )
            case _:
                raise _ended(NODE_CANCELLED, "the run was gone before anybody decided")

    async def _decision(self, entry: Entry, attempt_count: int) -> DeadLetterResult | None:
        """The decision on a dead letter; None if the node was cancelled before there was one."""
        patience = ASK_AGAIN
        self._settled = None
        while True:
            try:
                child: DeadLetterHandle | None = await open_dead_letter(
                    DeadLetterInput(
                        entry=entry,
                        approval=self._approval,
                        unresolved=self._refusal is not None,
                        revoked=list(self._revoked),
                        limits=self._node.limits,
                        node_gone=self._cancelling,
                        node_started_at=self._node.begun_at,
                    )
                )
            except WorkflowAlreadyStartedError:
                child = None
                if not await self._attach():
                    continue
            self._parked, self._look_again = True, False
            if patience == ASK_AGAIN:
                reason = f"{entry.error.category} {entry.error.code}: {entry.error.message[:_SHOWN]}"
                await self._tell(NodeStatus.DEAD_LETTERED, attempt_count, reason)
            with contextlib.suppress(TimeoutError):
                await workflow.wait_condition(
                    functools.partial(self._goes_on, child),
                    timeout=patience if child is None else None,
                    timeout_summary="is the dead letter still there?",
                )
            self._parked = False
            if self._cancelling and not self._has_settled(child):
                await self._leave()
                return None
            if child is None:
                if (settled := self._settled_meanwhile()) is not None:
                    return settled
                # It may have been terminated, which only `Sweep` tells: it is asked again, or opened again.
                patience = min(patience * 2, LONGEST_PATIENCE)
                continue
            try:
                return await child
            except ChildWorkflowError as error:
                # Ended by an operator: nothing undecided ever ends that way, so it is opened again.
                if not isinstance(error.cause, TerminatedError | WorkflowTimeoutError):
                    raise RuntimeError("a dead letter has failed by itself") from error

    def _settled_meanwhile(self) -> DeadLetterResult | None:
        """What `dead_letter_settled` has brought."""
        return self._settled

    def _goes_on(self, child: DeadLetterHandle | None) -> bool:
        return self._cancelling or self._has_settled(child) or (child is None and self._look_again)

    def _has_settled(self, child: DeadLetterHandle | None) -> bool:
        return child.done() if child is not None else self._settled is not None

    async def _leave(self) -> None:
        """Tells the dead letter that nobody waits for it any more; it outlives the node."""
        try:
            await self._dead_letter().signal("node_gone")
        except FailureError:
            workflow.logger.info("the dead letter had closed before the node was cancelled")

    async def _attach(self) -> bool:
        """Asks a dead letter that an earlier execution opened to tell this one, too; False if it has closed."""
        try:
            await self._dead_letter().signal(
                "report_to", ReportTo(workflow_id=node_workflow_id(self._node.run_id, self._node.node_id))
            )
        except FailureError:
            return False
        return True

    def _dead_letter(self) -> workflow.ExternalWorkflowHandle[Any]:
        return workflow.get_external_workflow_handle(dead_letter_workflow_id(self._node.run_id, self._node.node_id))

    def _go_on_as(self, redriven: Redriven, tool: ToolFacts | None) -> None:
        """Takes up the operation that an accepted redrive has made current, with a fresh deadline."""
        self._logical_attempt = redriven.logical_attempt
        self._input = redriven.input
        self._redrives = redriven.redrives
        self._approval = redriven.approval
        self._refusal = None
        self._tool = (tool or self._tool).model_copy(update={"fingerprint": redriven.fingerprint})
        self._fresh_deadline()

    def _fresh_deadline(self) -> None:
        self._deadline = workflow.now() + self._node.deadline

    def _bind(self, grant: ApprovalGrant) -> Approved:
        return Approved(grant=grant, fingerprint=self._tool.fingerprint, input_hash=content_hash(self._input))

    @property
    def _operation(self) -> OperationId:
        return OperationId(run_id=self._node.run_id, node_id=self._node.node_id, logical_attempt=self._logical_attempt)

    async def _cancel(self, for_good: bool = True) -> None:
        """Nothing new is sent from here on; what is in flight runs to its end."""
        await workflow.execute_activity(
            stubs.cancel_nodes,
            CancelRequest(run_id=self._node.run_id, node_ids=[self._node.node_id], for_good=for_good),
            start_to_close_timeout=COMMIT_TIMEOUT,
            retry_policy=PATIENT_RETRY,
            summary="no more calls",
        )
        # Not before: until the ledger knows of it, a delivery that nobody counts on any more can still be granted.
        self._cancelling = True
        if self._call is not None:
            self._call.cancel()

    async def _tell(self, status: NodeStatus, attempt_count: int, reason: str) -> None:
        """Tells the run, and whoever looks at this node in the UI, that a person is (no longer) needed."""
        self._troubled = True
        waits = status is NodeStatus.DEAD_LETTERED
        entry_id = dead_letter_workflow_id(self._node.run_id, self._node.node_id)
        workflow.upsert_search_attributes([STATUS.value_set(status)])
        workflow.set_current_details(f"waits for a decision on `{entry_id}`: {reason}" if waits else "redriven")
        change = NodeChange(
            node_id=self._node.node_id,
            state=NodeState(
                status=status,
                operation_id=str(self._operation),
                attempt_count=attempt_count,
                dead_letter=entry_id if waits else None,
            ),
            reason=reason,
        )
        self._told = change
        await self._tell_run(change)

    async def _tell_run(self, change: NodeChange) -> None:
        try:
            await workflow.get_external_workflow_handle(self._node.run_id).signal("node_changed", change)
        except FailureError:
            workflow.logger.info("the run is closed: nobody to tell")

    @workflow.signal
    async def revoke_approval(self, *payloads: Any) -> None:
        """The run says that an approval was revoked."""
        revocation = read_signal(Revocation, payloads)
        if revocation is None:
            return
        self._revoked[revocation.approval_id] = revocation
        if self._call is not None and self._refused() is not None:
            # Between attempts it ends at once; in flight it runs to its end, and counts.
            self._call.cancel()
        if self._parked:
            try:
                await self._dead_letter().signal("revoke_approval", revocation)
            except FailureError:
                workflow.logger.info("the dead letter had closed before the approval was revoked")

    @workflow.signal
    async def report_to(self, *payloads: Any) -> None:
        """A run that did not start this node wants to hear how it ends, and whether a person is needed meanwhile."""
        asked = read_signal(ReportTo, payloads)
        if asked is None:
            return
        self._report_to[asked.workflow_id] = None
        if asked.execution is not None and asked.execution not in self._attached[-1:]:
            self._attached.append(asked.execution)
        if self._parked and self._told is not None:
            await self._tell_run(self._told)

    @workflow.signal
    async def run_gone(self, *payloads: Any) -> None:
        """`Sweep` says that the run is closed: nothing new is sent, what is in flight is settled, then this ends.

        It is not cancelled for good: the same run, started again, goes on with the same operation.
        """
        gone = read_signal(RunGone, payloads)
        await workflow.wait_condition(lambda: self._begun)
        if gone is None or self._cancelling or self._has_newer(gone.execution):
            return
        workflow.upsert_memo({GONE: True})
        await self._cancel(for_good=False)

    def _has_newer(self, closed: RunExecution | None) -> bool:
        """Whether another execution of the run than the closed one, or one of its chain, has attached since."""
        newest = self._attached[-1]
        if closed is None:
            return False
        return closed.first_run_id != newest.first_run_id or closed in self._attached[:-1]

    @workflow.signal
    def dead_letter_gone(self) -> None:
        """`Sweep` says that the dead letter was ended by an operator."""
        self._look_again = True

    @workflow.signal
    def dead_letter_settled(self, *payloads: Any) -> None:
        """A dead letter that this execution did not open says what was decided."""
        self._settled = read_signal(DeadLetterResult, payloads) or self._settled

    async def _report(self, work: asyncio.Task[NodeResult]) -> None:
        """Tells whoever asked how the node has ended; a bug is no end."""
        error = work.exception()
        if error is not None and not isinstance(error, ApplicationError):
            return
        status, result = NodeStatus.DISCARDED, None
        if error is None:
            status, result = NodeStatus.SUCCEEDED, work.result()
        elif error.type == NODE_CANCELLED:
            status = NodeStatus.CANCELLED
        report = NodeReport(node_id=self._node.node_id, status=status, result=result)
        while self._report_to or not workflow.all_handlers_finished():
            # Whoever asks while the last handlers finish is told as well.
            await workflow.wait_condition(lambda: bool(self._report_to) or workflow.all_handlers_finished())
            while self._report_to:
                run = workflow.get_external_workflow_handle(self._report_to.popitem()[0])
                try:
                    await run.signal("node_ended", report)
                except FailureError:
                    workflow.logger.info("the run that asked is closed: nobody to tell")


_LOOK_AGAIN: Final = timedelta(seconds=30)
"""How often, at the least, a cancelled node looks whether a call that is still in flight has ended."""
_LONGEST_RECONCILE: Final = timedelta(days=2)
"""Far beyond what any policy allows; it only bounds a ledger or a worker that never comes back."""


def _ended(error_type: str, message: str) -> ApplicationError:
    return ApplicationError(message, type=error_type, non_retryable=True)
