"""``Run``: a graph of nodes; what depends on what, how many at once, what becomes of each, how it ends."""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Collection, Iterable
from datetime import datetime, timedelta
from typing import Any, Final
from urllib.parse import quote

from temporalio import workflow
from temporalio.common import Priority, SearchAttributePair, TypedSearchAttributes
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    CancelledError,
    ChildWorkflowError,
    FailureError,
    TerminatedError,
    WorkflowAlreadyStartedError,
    is_cancelled_exception,
)
from temporalio.exceptions import TimeoutError as WorkflowTimeoutError
from temporalio.workflow import ChildWorkflowCancellationType, ParentClosePolicy

with workflow.unsafe.imports_passed_through():
    from activities import stubs
    from contracts.base import Json
    from contracts.canonical import json_problem, json_size
    from contracts.dead_letters import ErrorInfo
    from contracts.dispatch import (
        CallResult,
        CancelRequest,
        Dispatch,
        FailureDetails,
        NodeChange,
        NodeEnd,
        NodeInput,
        NodeReport,
        OutputsRequest,
        Refusal,
        ReportTo,
        ToolFacts,
    )
    from contracts.failures import Category, Code
    from contracts.identity import OperationId, fairness_key_of, node_workflow_id, trace_id_of
    from contracts.limits import INLINE
    from contracts.progress import RunProgress
    from contracts.runs import (
        MAX_NODES_SHOWN,
        InputTooLargeError,
        MissingOutputError,
        NodeResult,
        NodeState,
        NodeStatus,
        Revocation,
        RunResult,
        RunSpec,
        RunState,
        RunStatus,
    )
    from contracts.sweep import NodeGone, RunExecution
    from workflows.attributes import RUN_ID, STATUS, TOOL
    from workflows.calls import FIRST_CALL_RETRY, call_at_once, failure_details, read_answer, result_of, start_call
    from workflows.evidence import failed_by_hand, made_by_hand
    from workflows.graph import Graph
    from workflows.options import ASK_AGAIN, COMMIT_TIMEOUT, LONGEST_PATIENCE, NODE_CANCELLED, PATIENT_RETRY
    from workflows.payloads import read_signal

__all__ = ["Run"]

NodeHandle = workflow.ChildWorkflowHandle[Any, NodeResult]
_Places = dict[str, dict[str, Json]]
"""By node and pointer, what is in outputs of earlier executions."""

_MAX_REVOCATIONS: Final = 100
"""Every node carries them."""
_NAMED: Final = 50
"""How many waiting nodes are named in the UI."""
_BATCH_BYTES: Final = 2 * 1024 * 1024
"""What one workflow task may begin calls and children with; beyond 4 MiB the server would terminate the run."""
_CARRIED_BYTES: Final = 384 * 1024
"""What of the outputs goes along when a run continues as new; with a specification of 1 MiB it has to fit into 2."""
_FIRST_TASK: Final = 3
"""Events of a history at its first workflow task: that the workflow was started, its task scheduled, and begun."""
_AT_ONCE: Final = 100
"""How many calls are made within one workflow task; the next one is an activity, which ends it: signals and queries
come between tasks alone."""
_BREATH: Final = timedelta(seconds=1)
"""How soon the next task comes at the latest, if that activity takes longer; and for how long one makes calls."""
_DRAINED_WITHIN: Final = timedelta(seconds=10)
"""How long calls in flight are waited for before a run continues as new; later ones go on as workflows of their own."""
_SIGNALLED_AT_ONCE: Final = 200
"""Temporal ends a workflow that has 2,000 signals to others under way."""


@workflow.defn(name="Run")
class Run:
    """A run; see ``CONTRACT.md`` for what it takes, answers and obeys."""

    @workflow.init
    def __init__(self, *payloads: Any) -> None:
        self._run_id = workflow.info().workflow_id
        self._payloads = list(payloads)
        # Of many runs with work in a queue each has its share, unless whoever started this one has set another key.
        shared = workflow.info().priority.fairness_key is None
        self._priority = Priority(fairness_key=fairness_key_of(self._run_id)) if shared else Priority.default
        self._graph = Graph([])
        self._spec: RunSpec
        self._tools: dict[str, ToolFacts] = {}
        self._admitted_at = workflow.now()
        self._limits = INLINE
        self._taken = 0
        self._status = RunStatus.RUNNING
        self._calls: dict[str, workflow.ActivityHandle[Any]] = {}
        self._at_once: set[str] = set()
        # Only the first task of an execution has so few events before it, and then nothing was lost of this one.
        self._is_first_task = workflow.info().get_current_history_length() <= _FIRST_TASK
        self._batch = 0
        self._emptied: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._begin_task()
        if not self._is_first_task:
            self._committed_at = workflow.info().workflow_start_time
        self._children: dict[str, NodeHandle] = {}
        self._starting: set[str] = set()
        self._attached: dict[str, asyncio.Event] = {}
        self._told: set[str] = set()
        self._reports: dict[str, NodeReport] = {}
        self._asking: asyncio.Task[None] | None = None
        self._reasons: dict[str, str] = {}
        self._revoked: dict[str, Revocation] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._cancelling = False
        self._unsettled: set[str] | None = None
        self._progressed = False
        self._bug: BaseException | None = None
        self._continues = workflow.info().continued_run_id is not None and len(payloads) == 2
        if self._continues:
            # Before any handler runs: nodes that tell how they end do not tell it twice.
            self._go_on(*payloads)

    @workflow.run
    async def run(self, *_payloads: Any) -> RunResult:
        """Executes the run.

        Raises:
            ApplicationError: ``InvalidRun`` at once, naming every problem; ``RunFailed`` with the result as details.
        """
        if self._continues:
            for name in self._graph.begun_nodes():
                self._begin_driving(name, None)
        else:
            try:
                await self._admit()
            except (asyncio.CancelledError, ActivityError) as error:
                if is_cancelled_exception(error):
                    await self._cancel_unadmitted()
                    self._show(RunStatus.CANCELLED)
                raise
        workflow.upsert_search_attributes([RUN_ID.value_set(self._run_id), STATUS.value_set(self._status)])
        try:
            await self._execute()
            result = await self._result()
        except asyncio.CancelledError:
            await self._cancel()
            self._show(RunStatus.CANCELLED)
            await workflow.wait_condition(workflow.all_handlers_finished)
            raise
        await workflow.wait_condition(workflow.all_handlers_finished)
        self._show(result.status)
        if result.status is RunStatus.FAILED:
            failed = self._graph.not_succeeded
            raise ApplicationError(
                f"{len(failed)} of {len(self._graph)} nodes did not succeed: {', '.join(failed[:20])}",
                result,
                type="RunFailed",
                non_retryable=True,
            )
        return result

    def _go_on(self, payload: Json, progress: Json) -> None:
        """Takes up the run where the execution that this one continues has left off."""
        self._spec = RunSpec.model_validate(payload)
        before = RunProgress.model_validate(progress)
        names = [node.id for node in self._spec.nodes]
        self._tools = before.tools
        self._limits = before.limits
        self._admitted_at = before.admitted_at
        self._revoked = {revocation.approval_id: revocation for revocation in before.revoked}
        self._reasons = dict(before.reasons)
        self._told = before.told(names)
        states = before.states(self._run_id, names)
        self._graph = Graph(self._spec.nodes, states, before.outputs, before.named(names, before.elsewhere))

    async def _admit(self) -> None:
        # What cannot travel to `admit` cannot be admitted either.
        unreadable = [problem for payload in self._payloads if (problem := json_problem(payload)) is not None]
        if unreadable:
            message = f"the specification cannot be read: {unreadable[0]}"
            raise ApplicationError(message, type="InvalidRun", non_retryable=True)
        # Local: it looks at the worker's own catalog, takes milliseconds, and its answer is all that has to be durable.
        admission = await workflow.execute_local_activity(
            stubs.admit,
            args=[self._run_id, self._payloads],
            start_to_close_timeout=COMMIT_TIMEOUT,
            summary="is this a run that can be executed?",
        )
        if admission.problems:
            raise ApplicationError("\n".join(admission.problems), type="InvalidRun", non_retryable=True)
        self._tools = admission.tools
        self._limits = admission.limits
        self._admitted_at = workflow.now()
        self._spec = RunSpec.model_validate(self._payloads[0])
        self._graph = Graph(self._spec.nodes)

    async def _cancel_unadmitted(self) -> None:
        """A task that was lost may have begun with calls: what of them is uncertain is not left behind."""
        if self._is_first_task:
            return
        with contextlib.suppress(ApplicationError):
            await self._admit()
            await self._cancel()

    async def _execute(self) -> None:
        while not self._graph.finished:
            while (
                not self._is_long()
                and self._graph.running < self._spec.max_parallel
                and self._large_at_once() < self._limits.at_once
                and self._left_at_once >= 0
                and (name := self._graph.next_ready()) is not None
            ):
                places = await self._fetch(name)
                at_once = self._may_call_at_once(name)
                node = self._node_input(name, self._committed_at if at_once else workflow.now(), places)
                size = json_size(node.input)
                self._taken += size
                if not at_once:
                    await self._make_room(size)
                self._graph.start(name, self._at_work(name))
                self._begin_driving(name, node, at_once)
            self._show(self._graph.status)
            breath = None
            if not self._at_once:
                # No call is made within this task any more.
                breath = _BREATH if self._left_at_once < 0 else None
                self._begin_task()
            if self._is_long():
                await self._continue_as_new()
            else:
                self._progressed = False
                with contextlib.suppress(TimeoutError):
                    await workflow.wait_condition(lambda: self._progressed, timeout=breath)
            if self._bug is not None:
                raise self._bug

    def _at_work(self, name: str) -> NodeState:
        operation = OperationId(run_id=self._run_id, node_id=name, logical_attempt=1)
        return NodeState(status=NodeStatus.RUNNING, operation_id=str(operation))

    def _begin_task(self) -> None:
        self._committed_at = workflow.now()
        self._elapsed = 0.0
        self._left_at_once = _AT_ONCE

    def _may_call_at_once(self, name: str) -> bool:
        """Whether a node's first attempt is made within this workflow task; what is not, ends it.

        A task is bounded by time as well: by what the calls say that they took. The present is no measure: in a replay,
        a task that took so long that the server was asked for more time has another one.
        """
        node = self._graph.spec(name)
        if self._spec.node_mode != "fast" or self._tools[node.tool].rated:
            return False
        self._left_at_once -= 1
        if self._elapsed >= _BREATH.total_seconds():
            self._left_at_once = -1
        return self._left_at_once >= 0

    async def _make_room(self, size: int) -> None:
        """Waits for another workflow task if this one begins as much as it may; only a timer makes sure of another."""
        while self._batch >= _BATCH_BYTES:
            if self._emptied is None:
                self._emptied = asyncio.create_task(self._empty())
            await workflow.wait_condition(lambda: self._batch < _BATCH_BYTES)
        # Revocations go along with each child.
        self._batch += size + sum(
            json_size(revocation.model_dump(mode="json")) for revocation in self._revoked.values()
        )

    async def _empty(self) -> None:
        await workflow.sleep(timedelta(milliseconds=1))
        self._batch = 0
        self._emptied = None

    def _is_long(self) -> bool:
        """Whether to go on in another execution; Temporal counts a payload that is kept elsewhere as its reference."""
        return workflow.info().is_continue_as_new_suggested() or self._taken > self._limits.taken

    def _large_at_once(self) -> int:
        """What the large outputs may come to of the nodes that are at work, not parked."""
        if not any(self._limits.is_large(tool.largest_output) for tool in self._tools.values()):
            return 0
        sizes = (
            self._tools[self._graph.spec(name).tool].largest_output
            for name in self._running
            if self._graph.state(name).status is NodeStatus.RUNNING
        )
        return sum(filter(self._limits.is_large, sizes))

    async def _continue_as_new(self) -> None:
        """Goes on in another execution, unless the run ends meanwhile.

        Nodes outlive this one. A call that the run itself has made does not: it is waited for, or its node is given a
        workflow, which the ledger tells what became of it.
        """
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(lambda: not self._calls, timeout=_DRAINED_WITHIN)
        # A child whose start is under way would be nobody's.
        await workflow.wait_condition(lambda: not self._starting and workflow.all_handlers_finished())
        if self._graph.finished or self._bug is not None:
            return
        outputs: dict[str, Json] = {}
        elsewhere = set(self._graph.elsewhere)
        left = _CARRIED_BYTES
        for name, output in self._graph.needed.items():
            left -= json_size(output)
            if left >= 0:
                outputs[name] = output
            else:
                elsewhere.add(name)
        progress = RunProgress(
            tools=self._tools,
            limits=self._limits,
            admitted_at=self._admitted_at,
            letters="",
            outputs=outputs,
            revoked=list(self._revoked.values()),
            reasons={name: self._reasons[name] for name in self._named() if name in self._reasons},
        )
        # Whose report has come, but was not acted on, is asked once more.
        told = self._told - self._reports.keys()
        workflow.continue_as_new(args=[self._payloads[0], progress.with_nodes(self._graph.states, told, elsewhere)])

    async def _fetch(self, name: str) -> _Places | None:
        """Brings back what a node's input needs of outputs that this execution does not carry; None: it is too much.

        Of large ones only the places that are referred to, unless many others need them as well and there is room:
        those are at hand from then on, as small ones are.
        """
        pointers = self._graph.to_fetch(name)
        fetched: _Places = {}
        left = self._limits.input
        while pointers and left >= 0:
            room = not self._is_long()
            found = await self._read_outputs(
                {node: [""] if room and self._graph.is_shared(node) else wanted for node, wanted in pointers.items()}
            )
            for node, places in found.items():
                sizes = {pointer: json_size(value) for pointer, value in places.items()}
                self._taken += sum(sizes.values())
                left -= sum(sizes.get(pointer, 0) for pointer in pointers[node])
                if "" in places:
                    self._graph.fetched(node, places[""])
                else:
                    fetched[node] = places
            pointers = {node: wanted for node, wanted in pointers.items() if node not in found} if found else {}
        return fetched if left >= 0 else None

    async def _read_outputs(self, pointers: dict[str, list[str]]) -> _Places:
        return await workflow.execute_activity(
            stubs.read_outputs,
            OutputsRequest(run_id=self._run_id, pointers=pointers),
            # A run's own calls have the names of their nodes; no node has such a name.
            activity_id=f"read_outputs/{next(self._numbers)}",
            start_to_close_timeout=COMMIT_TIMEOUT,
            retry_policy=PATIENT_RETRY,
            summary="outputs that the run does not carry along",
        )

    def _begin_driving(self, name: str, node: NodeInput | None, at_once: bool = False) -> None:
        if at_once:
            self._at_once.add(name)
        self._running[name] = asyncio.create_task(self._drive(name, node))
        self._running[name].add_done_callback(self._noticed)

    def _noticed(self, task: asyncio.Task[None]) -> None:
        """A bug in `_drive` fails the workflow task, as it would anywhere else; it must not leave the run waiting."""
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._bug = bug
        self._progressed = True

    def _node_input(self, name: str, begun_at: datetime, places: _Places | None) -> NodeInput:
        node = self._graph.spec(name)
        value: Json = None
        refusal = None
        try:
            if places is None:
                raise InputTooLargeError(self._limits.input)
            value = self._graph.input_of(name, self._limits.input, places)
        except MissingOutputError as error:
            value = node.input
            refusal = Refusal(category=Category.INVALID_INPUT, code=Code.OUTPUT_MISSING, message=str(error))
        except InputTooLargeError as error:
            refusal = Refusal(category=Category.INVALID_INPUT, code=Code.INPUT_TOO_LARGE, message=str(error))
        if (problem := json_problem(value)) is not None:
            value = None
            message = f"the resolved input cannot be sent: {problem}"
            refusal = Refusal(category=Category.INVALID_INPUT, code=Code.INPUT_INVALID, message=message)
        elif (size := json_size(value)) > self._limits.input:
            value = None
            refusal = Refusal(
                category=Category.INVALID_INPUT,
                code=Code.INPUT_TOO_LARGE,
                message=f"the resolved input has {size} bytes; {self._limits.input} are allowed",
            )
        return NodeInput(
            run_id=self._run_id,
            node_id=name,
            started_by=self._execution(),
            begun_at=begun_at,
            tool=self._tools[node.tool],
            input=value,
            refusal=refusal,
            approval=node.approval,
            deadline=node.deadline,
            correlation_id=self._spec.correlation_id or quote(self._run_id, safe="!#$&'()*+,-./:;=?@[]_~"),
            trace_id=trace_id_of(self._run_id, self._spec.traceparent),
            limits=self._limits,
        )

    def _execution(self) -> RunExecution:
        info = workflow.info()
        return RunExecution(first_run_id=info.first_execution_run_id, run_id=info.run_id)

    async def _drive(self, name: str, node: NodeInput | None) -> None:
        """Sees a node to its end, whatever ends its workflow; without its input, one that has been started before."""
        report: NodeReport | None = None
        # What is called at once takes none before it goes on.
        room = node is not None and name not in self._at_once
        if node is None:
            report = await self._attach(name)
            if report is None:
                # It was begun at some time since.
                node = self._node_input(name, self._admitted_at, await self._fetch(name))
        elif (
            self._spec.node_mode == "fast" and node.refusal is None and not (self._is_revoked(node) or self._cancelling)
        ):
            report, node = await self._attempt(node)
            room = False
        self._at_once.discard(name)
        while report is None:
            assert node is not None
            if not room:
                await self._make_room(json_size(node.input))
            room = False
            try:
                report = await self._run_child(node)
            except WorkflowAlreadyStartedError:
                report = await self._attach(name)
            except ChildWorkflowError as error:
                # Ended by an operator, not by itself: it is started again, and the ledger knows what was done.
                if not isinstance(error.cause, TerminatedError | WorkflowTimeoutError) or self._cancelling:
                    report = NodeReport(node_id=name, status=_status_after(error))
        self._children.pop(name, None)
        self._running.pop(name, None)
        self._reasons.pop(name, None)
        update: dict[str, Any] = {"status": report.status}
        if report.status is not NodeStatus.CANCELLED:
            # A cancelled node's dead letter may outlive it; the others' have been decided.
            update["dead_letter"] = None
        if report.result is not None:
            update |= {"operation_id": report.result.operation_id, "attempt_count": report.result.attempt_count}
        output = report.result.output if report.result is not None else None
        self._taken += json_size(output)
        self._graph.end(name, self._graph.state(name).model_copy(update=update), output)
        self._progressed = True

    async def _attempt(self, node: NodeInput) -> tuple[NodeReport | None, NodeInput]:
        """The first attempt, made by the run itself: what came of it, or what the node's own workflow begins with."""
        name = node.node_id
        begun = workflow.now()
        dispatch = Dispatch(
            run_id=self._run_id,
            node_id=name,
            logical_attempt=1,
            redrives=0,
            tool=node.tool.name,
            fingerprint=node.tool.fingerprint,
            input=node.input,
            deadline=begun + node.deadline,
            node_started_at=node.begun_at,
            correlation_id=node.correlation_id,
            trace_id=node.trace_id,
            approval=node.approval,
            first_attempt=True,
        )
        answer = await self._first_answer(dispatch, node)
        not_before = failure = None
        match answer:
            case CallResult(end=NodeEnd.SUCCEEDED | NodeEnd.RESOLVED):
                result = result_of(answer, answer.output, answer.source)
                return NodeReport(node_id=name, status=NodeStatus.SUCCEEDED, result=result), node
            case FailureDetails(next_eligible_at=None):
                failure = answer.error
            case FailureDetails():
                not_before = answer.next_eligible_at
            case ErrorInfo():
                failure = answer
            case None | CallResult(end=NodeEnd.CANCELLED) if await self._ends_cancelled(name):
                return NodeReport(node_id=name, status=NodeStatus.CANCELLED), node
            case _:
                pass
        left = max(node.deadline - (workflow.now() - begun), timedelta(0))
        return None, node.model_copy(update={"deadline": left, "not_before": not_before, "failure": failure})

    async def _first_answer(
        self, dispatch: Dispatch, node: NodeInput
    ) -> CallResult | FailureDetails | ErrorInfo | None:
        """What came of a first attempt; None: nothing, or nobody knows."""
        name = node.node_id
        try:
            if name in self._at_once:
                answer = await self._call_at_once(dispatch, node.tool)
                if answer is not None:
                    return answer
                await self._make_room(json_size(node.input))
                if self._is_revoked(node):
                    return None
            if self._cancelling:
                # From then on nothing new is sent: the ledger only tells what has been.
                await workflow.wait_condition(lambda: self._unsettled is not None)
            call = self._calls[name] = start_call(dispatch, node.tool, name, FIRST_CALL_RETRY, self._priority)
            return read_answer(await call, self._run_id, name) or made_by_hand()
        except ActivityError as error:
            return failure_details(error) or failed_by_hand(error)
        except asyncio.CancelledError:
            # Called off in the very moment of its answer, which is lost by that.
            return None
        finally:
            self._calls.pop(name, None)

    async def _call_at_once(self, dispatch: Dispatch, tool: ToolFacts) -> CallResult | FailureDetails | None:
        began = self._elapsed
        call = self._calls[dispatch.node_id] = call_at_once(dispatch, tool, dispatch.node_id)
        try:
            made = await call
            self._elapsed = max(self._elapsed, began + made.seconds)
            return made.answer
        except (FailureError, asyncio.CancelledError):
            # It was called off, or its worker too busy: as unknown as if that had been lost.
            self._elapsed = _BREATH.total_seconds()
            return None
        finally:
            self._at_once.discard(dispatch.node_id)
            self._progressed = True

    async def _ends_cancelled(self, name: str) -> bool:
        """Whether a node ends with its cancelled run: the ledger says that there is nothing to settle of it."""
        if not self._cancelling:
            return False
        await workflow.wait_condition(lambda: self._unsettled is not None)
        return self._unsettled is not None and name not in self._unsettled

    def _is_revoked(self, node: NodeInput) -> bool:
        return node.approval is not None and node.approval.id in self._revoked

    async def _run_child(self, node: NodeInput) -> NodeReport:
        name = node.node_id
        # As of now: the node may be started again long after its input was made.
        node = node.model_copy(update={"revoked": list(self._revoked.values())})
        self._starting.add(name)
        try:
            child: NodeHandle = await workflow.start_child_workflow(
                "Node",
                node,
                id=node_workflow_id(self._run_id, name),
                result_type=NodeResult,
                # Any other policy would end the nodes of a long run when it continues as new.
                parent_close_policy=ParentClosePolicy.ABANDON,
                cancellation_type=ChildWorkflowCancellationType.WAIT_CANCELLATION_COMPLETED,
                search_attributes=TypedSearchAttributes(
                    [SearchAttributePair(RUN_ID, self._run_id), SearchAttributePair(TOOL, node.tool.name)]
                ),
                static_summary=f"{name}: {node.tool.name}",
                priority=self._priority,
            )
        finally:
            self._starting.discard(name)
        self._children[name] = child
        if self._cancelling:
            child.cancel()
        for revocation in list(self._revoked.values()):
            if revocation not in node.revoked:
                await self._forward(name, revocation)
        return NodeReport(node_id=name, status=NodeStatus.SUCCEEDED, result=await child)

    async def _attach(self, name: str) -> NodeReport | None:
        """Waits for a node that an earlier execution started; None if it has closed: it is to be started again."""
        news = self._attached[name] = asyncio.Event()
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_again())
            self._asking.add_done_callback(self._noticed)
        try:
            if name not in self._told and not await self._ask(name):
                return None
            self._told.add(name)
            while name not in self._reports:
                await news.wait()
                news.clear()
                # Without a report it is `Sweep` that has told of it: an operator may have ended it.
                if name not in self._reports and not await self._ask(name):
                    return None
        finally:
            del self._attached[name]
            self._told.discard(name)
        report = self._reports.pop(name)
        # Stopped because an earlier execution was gone, it goes on, unless the ledger says that it was cancelled.
        return None if report.status is NodeStatus.CANCELLED and not self._cancelling else report

    async def _ask(self, name: str) -> bool:
        """Asks an open node to tell this run how it ends; False if it has closed."""
        node = self._node_workflow(name)
        try:
            await node.signal("report_to", ReportTo(workflow_id=self._run_id, execution=self._execution()))
            for revocation in list(self._revoked.values()):
                await node.signal("revoke_approval", revocation)
            if self._cancelling:
                await node.cancel()
        except FailureError:
            return False
        return True

    async def _ask_again(self) -> None:
        """Asks from time to time, one after the other: only `Sweep` tells of a node that was terminated."""
        patience = LONGEST_PATIENCE if self._told else ASK_AGAIN
        while True:
            await workflow.sleep(patience, summary="are the nodes still there?")
            for name in sorted(self._attached):
                if name in self._attached and not await self._ask(name) and name in self._attached:
                    self._attached[name].set()
            patience = min(patience * 2, LONGEST_PATIENCE)

    def _node_workflow(self, name: str) -> workflow.ExternalWorkflowHandle[Any]:
        return workflow.get_external_workflow_handle(node_workflow_id(self._run_id, name))

    async def _cancel(self) -> None:
        """Nothing new is sent; what is in flight is settled; then the run is over."""
        self._cancelling = True
        names = self._graph.open_nodes()
        waiting = set(names) - self._running.keys()
        self._graph.give_up(NodeStatus.CANCELLED)
        unsettled: list[str] = []
        if names:
            unsettled = await workflow.execute_activity(
                stubs.cancel_nodes,
                CancelRequest(run_id=self._run_id, node_ids=names),
                activity_id=f"cancel_nodes/{next(self._numbers)}",
                start_to_close_timeout=COMMIT_TIMEOUT,
                retry_policy=PATIENT_RETRY,
                summary=f"no more calls for {len(names)} nodes",
            )
        self._unsettled = set(unsettled)
        for work in [*self._calls.values(), *self._children.values()]:
            work.cancel()
        await self._to_each(sorted(self._attached), self._cancel_node)
        if self._spec.node_mode == "fast":
            # More than one task can have begun are an earlier run's.
            await self._settle_lost([name for name in unsettled if name in waiting][: _AT_ONCE + 1])
        await self._ended(self._running)
        for name in self._graph.open_nodes():
            state = self._graph.state(name)
            self._graph.change(name, state.model_copy(update={"status": NodeStatus.CANCELLED}))

    async def _settle_lost(self, names: list[str]) -> None:
        """Settles what was begun by a workflow task that was lost, each by its node's workflow; inputs need outputs."""
        left = set(names)
        while left:
            batch = [name for name in names if name in left and not left.intersection(self._graph.upstream(name))]
            left.difference_update(batch)
            for name in batch:
                node = self._node_input(name, self._admitted_at, await self._fetch(name))
                await self._make_room(json_size(node.input))
                self._graph.change(name, self._at_work(name))
                self._begin_driving(name, node)
            await self._ended(batch)

    async def _ended(self, names: Collection[str]) -> None:
        await workflow.wait_condition(lambda: self._bug is not None or not any(name in self._running for name in names))
        if self._bug is not None:
            raise self._bug

    async def _cancel_node(self, name: str) -> None:
        with contextlib.suppress(FailureError):
            await self._node_workflow(name).cancel()

    async def _to_each(self, names: Iterable[str], send: Callable[[str], Awaitable[None]]) -> None:
        waiting = iter(names)
        while batch := list(itertools.islice(waiting, _SIGNALLED_AT_ONCE)):
            await asyncio.gather(*map(send, batch))

    async def _result(self) -> RunResult:
        outputs: dict[str, Json] = {}
        omitted: list[str] = []
        left = self._limits.run_outputs
        names = self._graph.sinks_to_fetch()
        found = self._graph.outputs()
        while True:
            for name, output in found.items():
                size = json_size(output)
                if size <= left:
                    outputs[name] = output
                    left -= size
                else:
                    omitted.append(name)
            names = [name for name in names if name not in found]
            if not names or omitted:
                # What does not fit any more is not fetched either.
                omitted += names
                break
            read = await self._read_outputs({name: [""] for name in names})
            found = {name: places[""] for name, places in read.items()}
            if not found:
                omitted += names
                break
        return RunResult(
            run_id=self._run_id,
            status=RunStatus.FAILED if self._graph.failed else RunStatus.SUCCEEDED,
            counts=self._graph.counts,
            outputs={name: outputs[name] for name in self._graph.states if name in outputs},
            outputs_omitted=omitted or None,
        )

    @workflow.query
    def status(self, *payloads: Any) -> RunState:
        """How the run is doing, and each of its nodes, a thousand at a time.

        Takes, if anything, ``{"after": node id}``: the nodes after that one, in the specification's order.
        """
        after = payloads[0].get("after") if payloads and isinstance(payloads[0], dict) else None
        names = iter(self._graph.states)
        if after is not None:
            for name in names:
                if name == after:
                    break
        page = list(itertools.islice(names, MAX_NODES_SHOWN))
        blocked = self._graph.blocked
        return RunState(
            run_id=self._run_id,
            status=self._status,
            counts=self._graph.counts,
            nodes={name: self._graph.state(name) for name in page},
            blocked=[name for name in self._graph.states if name in blocked] if blocked else [],
            next=page[-1] if page and next(names, None) is not None else None,
        )

    @workflow.signal
    async def revoke_approval(self, *payloads: Any) -> None:
        """Takes an approval back: nothing is sent under it any more."""
        revocation = read_signal(Revocation, payloads)
        if revocation is None:
            return
        if len(self._revoked) >= _MAX_REVOCATIONS:
            workflow.logger.error("more than %d revocations: %s is ignored", _MAX_REVOCATIONS, revocation.approval_id)
            return
        self._revoked[revocation.approval_id] = revocation
        # To every node: by a redrive it may go on under another approval than the one it was specified with.
        for name, call in self._calls.items():
            approval = self._graph.spec(name).approval
            if approval is not None and approval.id == revocation.approval_id:
                # In flight it runs to its end, and counts.
                call.cancel()
        await self._to_each([*self._children, *sorted(self._attached)], lambda name: self._forward(name, revocation))

    async def _forward(self, name: str, revocation: Revocation) -> None:
        try:
            await self._node_workflow(name).signal("revoke_approval", revocation)
        except FailureError:
            # The node has ended in the meantime; there is nothing left to revoke.
            workflow.logger.info("node %s had ended before its approval was revoked", name)

    @workflow.signal
    def node_changed(self, *payloads: Any) -> None:
        """A node says that it waits for a person, or does no longer."""
        change = read_signal(NodeChange, payloads)
        if change is None or not self._graph.has_begun(change.node_id):
            return
        self._graph.change(change.node_id, change.state)
        self._reasons[change.node_id] = change.reason
        self._progressed = True

    @workflow.signal
    def node_ended(self, *payloads: Any) -> None:
        """A node that this execution did not start says how it ended."""
        report = read_signal(NodeReport, payloads)
        if report is not None and self._graph.has_begun(report.node_id):
            self._reports[report.node_id] = report
            if report.node_id in self._attached:
                self._attached[report.node_id].set()

    @workflow.signal
    def node_gone(self, *payloads: Any) -> None:
        """`Sweep` says that an operator has ended a node; one that this execution did not start is started again."""
        gone = read_signal(NodeGone, payloads)
        if gone is not None and gone.node_id in self._attached:
            self._attached[gone.node_id].set()

    def _show(self, status: RunStatus) -> None:
        """What a person sees who opens the run in the Temporal UI, or lists runs."""
        counts = ", ".join(f"{count} {status}" for status, count in self._graph.counts.items())
        lines = [f"**{status}**: {counts}"]
        lines += [
            f"- **{name}** waits for a decision on `{self._graph.state(name).dead_letter}`: "
            + self._reasons.get(name, "see there")
            for name in self._named()
        ]
        more = len(self._graph.blocked) - _NAMED
        lines += [f"- and {more} more"] if more > 0 else []
        workflow.set_current_details("\n".join(lines))
        if status is not self._status:
            self._status = status
            workflow.upsert_search_attributes([STATUS.value_set(status)])

    def _named(self) -> list[str]:
        return list(itertools.islice(self._graph.blocked, _NAMED))


def _status_after(error: ChildWorkflowError) -> NodeStatus:
    cause = error.cause
    if isinstance(cause, CancelledError) or (isinstance(cause, ApplicationError) and cause.type == NODE_CANCELLED):
        return NodeStatus.CANCELLED
    return NodeStatus.DISCARDED
