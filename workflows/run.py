"""``Run``: a graph of nodes, each a workflow of its own; what depends on what, how many at once, how it ends."""

import asyncio
import contextlib
import functools
from datetime import timedelta
from typing import Any, Final
from urllib.parse import quote

from temporalio import workflow
from temporalio.common import SearchAttributePair, TypedSearchAttributes
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
    from contracts.dispatch import CancelRequest, NodeChange, NodeInput, NodeReport, Refusal, ReportTo, ToolFacts
    from contracts.failures import Category, Code
    from contracts.identity import OperationId, node_workflow_id, trace_id_of
    from contracts.runs import (
        MAX_INPUT_BYTES,
        MAX_RUN_OUTPUT_BYTES,
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
    from workflows.attributes import RUN_ID, STATUS, TOOL
    from workflows.graph import Graph
    from workflows.options import ASK_AGAIN, COMMIT_TIMEOUT, LONGEST_PATIENCE, NODE_CANCELLED, PATIENT_RETRY
    from workflows.payloads import read_signal

__all__ = ["Run"]

NodeHandle = workflow.ChildWorkflowHandle[Any, NodeResult]

_MAX_REVOCATIONS: Final = 100
"""Every node carries them."""
_NAMED: Final = 50
"""How many waiting nodes are named in the UI."""
_MAX_EVENTS: Final = 45_000
_MAX_HISTORY_BYTES: Final = 40 * 1024 * 1024
_BATCH_BYTES: Final = 2 * 1024 * 1024
"""What one workflow task may start children with; beyond 4 MiB the server would terminate the run."""


@workflow.defn(name="Run")
class Run:
    """A run; see ``CONTRACT.md`` for what it takes, answers and obeys."""

    def __init__(self) -> None:
        self._run_id = workflow.info().workflow_id
        self._graph = Graph([])
        self._tools: dict[str, ToolFacts] = {}
        self._status = RunStatus.RUNNING
        self._children: dict[str, NodeHandle] = {}
        self._reports: dict[str, NodeReport] = {}
        self._attached: set[str] = set()
        self._reasons: dict[str, str] = {}
        self._revoked: dict[str, Revocation] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._cancelling = False
        self._progressed = False
        self._bug: BaseException | None = None

    @workflow.run
    async def run(self, *payloads: Any) -> RunResult:
        """Executes the run.

        Raises:
            ApplicationError: ``InvalidRun`` at once, naming every problem; ``RunFailed`` with the result as details.
        """
        try:
            spec = await self._admit(list(payloads))
        except (asyncio.CancelledError, ActivityError) as error:
            if is_cancelled_exception(error):
                self._show(RunStatus.CANCELLED)
            raise
        workflow.upsert_search_attributes([RUN_ID.value_set(self._run_id), STATUS.value_set(self._status)])
        self._graph = Graph(spec.nodes)
        try:
            await self._execute(spec)
        except asyncio.CancelledError:
            await self._cancel()
            self._show(RunStatus.CANCELLED)
            await workflow.wait_condition(workflow.all_handlers_finished)
            raise
        await workflow.wait_condition(workflow.all_handlers_finished)
        result = self._result()
        self._show(result.status)
        if result.status is RunStatus.FAILED:
            failed = self._graph.not_succeeded
            raise ApplicationError(
                f"{len(failed)} of {len(self._graph)} nodes did not succeed: {', '.join(failed[:20])}"
                + (" (the run's history is full; make several runs of it)" if self._full() else ""),
                result,
                type="RunFailed",
                non_retryable=True,
            )
        return result

    async def _admit(self, payloads: list[Json]) -> RunSpec:
        # What cannot travel to `admit` cannot be admitted either.
        unreadable = [problem for payload in payloads if (problem := json_problem(payload)) is not None]
        if unreadable:
            message = f"the specification cannot be read: {unreadable[0]}"
            raise ApplicationError(message, type="InvalidRun", non_retryable=True)
        # Local: it looks at the worker's own catalog, takes milliseconds, and its answer is all that has to be durable.
        admission = await workflow.execute_local_activity(
            stubs.admit,
            args=[self._run_id, payloads],
            start_to_close_timeout=COMMIT_TIMEOUT,
            summary="is this a run that can be executed?",
        )
        if admission.problems:
            raise ApplicationError("\n".join(admission.problems), type="InvalidRun", non_retryable=True)
        self._tools = admission.tools
        return RunSpec.model_validate(payloads[0])

    async def _execute(self, spec: RunSpec) -> None:
        while not self._graph.finished:
            room = 0 if self._full() else spec.max_parallel - len(self._running)
            batch = 0
            revocations = json_size([revocation.model_dump(mode="json") for revocation in self._revoked.values()])
            while room > 0 and batch < _BATCH_BYTES and (name := self._graph.next_ready()) is not None:
                node = self._node_input(spec, name)
                batch += json_size(node.input) + revocations
                room -= 1
                self._graph.start(name, self._started(name))
                self._running[name] = asyncio.create_task(self._drive(node))
                self._running[name].add_done_callback(self._noticed)
            if self._full() and not self._running:
                # What has not been started never will be.
                self._graph.give_up(NodeStatus.SKIPPED)
                break
            self._show(self._graph.status)
            if batch >= _BATCH_BYTES:
                # The rest in another workflow task.
                await workflow.sleep(timedelta(milliseconds=1))
                continue
            self._progressed = False
            await workflow.wait_condition(lambda: self._progressed)
            if self._bug is not None:
                raise self._bug

    def _full(self) -> bool:
        """Whether this history is too near to where the server would end it to start anything more."""
        info = workflow.info()
        return info.get_current_history_length() > _MAX_EVENTS or info.get_current_history_size() > _MAX_HISTORY_BYTES

    def _noticed(self, task: asyncio.Task[None]) -> None:
        """A bug in `_drive` fails the workflow task, as it would anywhere else; it must not leave the run waiting."""
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._bug = bug
        self._progressed = True

    def _node_input(self, spec: RunSpec, name: str) -> NodeInput:
        node = self._graph.spec(name)
        value: Json = None
        refusal = None
        try:
            value = self._graph.input_of(name)
        except MissingOutputError as error:
            value = node.input
            refusal = Refusal(category=Category.INVALID_INPUT, code=Code.OUTPUT_MISSING, message=str(error))
        except InputTooLargeError as error:
            refusal = Refusal(category=Category.INVALID_INPUT, code=Code.INPUT_TOO_LARGE, message=str(error))
        if (problem := json_problem(value)) is not None:
            value = None
            message = f"the resolved input cannot be sent: {problem}"
            refusal = Refusal(category=Category.INVALID_INPUT, code=Code.INPUT_INVALID, message=message)
        elif (size := json_size(value)) > MAX_INPUT_BYTES:
            value = None
            refusal = Refusal(
                category=Category.INVALID_INPUT,
                code=Code.INPUT_TOO_LARGE,
                message=f"the resolved input has {size} bytes; {MAX_INPUT_BYTES} are allowed",
            )
        return NodeInput(
            run_id=self._run_id,
            node_id=name,
            tool=self._tools[node.tool],
            input=value,
            refusal=refusal,
            approval=node.approval,
            deadline=node.deadline,
            correlation_id=spec.correlation_id or quote(self._run_id, safe="!#$&'()*+,-./:;=?@[]_~"),
            trace_id=trace_id_of(self._run_id, spec.traceparent),
        )

    def _started(self, name: str) -> NodeState:
        operation = OperationId(run_id=self._run_id, node_id=name, logical_attempt=1)
        return NodeState(status=NodeStatus.RUNNING, operation_id=str(operation))

    async def _drive(self, node: NodeInput) -> None:
        """Sees a node to its end, whatever ends its workflow."""
        name = node.node_id
        report: NodeReport | None = None
        while report is None:
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
        self._graph.end(name, self._graph.state(name).model_copy(update=update), output)
        self._progressed = True

    async def _run_child(self, node: NodeInput) -> NodeReport:
        name = node.node_id
        # As of now: the node may be started again long after its input was made.
        node = node.model_copy(update={"revoked": list(self._revoked.values())})
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
        )
        self._children[name] = child
        if self._cancelling:
            child.cancel()
        for revocation in list(self._revoked.values()):
            if revocation not in node.revoked:
                await self._forward(name, revocation)
        return NodeReport(node_id=name, status=NodeStatus.SUCCEEDED, result=await child)

    async def _attach(self, name: str) -> NodeReport | None:
        """Waits for a node that an earlier execution started; None if it has closed: it is to be started again."""
        self._attached.add(name)
        patience = ASK_AGAIN
        try:
            while name not in self._reports:
                # Asked again from time to time: nobody is told of a node that was terminated.
                await self._node_workflow(name).signal("report_to", ReportTo(workflow_id=self._run_id))
                for revocation in list(self._revoked.values()):
                    await self._node_workflow(name).signal("revoke_approval", revocation)
                if self._cancelling:
                    await self._node_workflow(name).cancel()
                with contextlib.suppress(TimeoutError):
                    await workflow.wait_condition(
                        functools.partial(self._reports.__contains__, name),
                        timeout=patience,
                        timeout_summary=f"is {name} still there?",
                    )
                patience = min(patience * 2, LONGEST_PATIENCE)
        except FailureError:
            return None
        finally:
            self._attached.discard(name)
        return self._reports.pop(name)

    def _node_workflow(self, name: str) -> workflow.ExternalWorkflowHandle[Any]:
        return workflow.get_external_workflow_handle(node_workflow_id(self._run_id, name))

    async def _cancel(self) -> None:
        """Nothing new is sent; what is in flight is settled; then the run is over."""
        self._cancelling = True
        names = self._graph.open_nodes()
        self._graph.give_up(NodeStatus.CANCELLED)
        if names:
            await workflow.execute_activity(
                stubs.cancel_nodes,
                CancelRequest(run_id=self._run_id, node_ids=names),
                start_to_close_timeout=COMMIT_TIMEOUT,
                retry_policy=PATIENT_RETRY,
                summary=f"no more calls for {len(names)} nodes",
            )
        for child in self._children.values():
            child.cancel()
        for name in sorted(self._attached):
            with contextlib.suppress(FailureError):
                await self._node_workflow(name).cancel()
        await workflow.wait_condition(lambda: not self._running)
        for name in self._graph.open_nodes():
            state = self._graph.state(name)
            self._graph.change(name, state.model_copy(update={"status": NodeStatus.CANCELLED}))

    def _result(self) -> RunResult:
        outputs: dict[str, Json] = {}
        omitted: list[str] = []
        left = MAX_RUN_OUTPUT_BYTES
        for name, output in self._graph.outputs().items():
            size = json_size(output)
            if size <= left:
                outputs[name] = output
                left -= size
            else:
                omitted.append(name)
        return RunResult(
            run_id=self._run_id,
            status=RunStatus.FAILED if self._graph.failed else RunStatus.SUCCEEDED,
            counts=self._graph.counts,
            outputs=outputs,
            outputs_omitted=omitted or None,
        )

    @workflow.query
    def status(self) -> RunState:
        """How the run and each of its nodes is doing."""
        return self._graph.states(self._run_id, self._status)

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
        for name in [*self._children, *sorted(self._attached)]:
            await self._forward(name, revocation)

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
        if change is None or change.node_id not in self._running:
            return
        self._graph.change(change.node_id, change.state)
        self._reasons[change.node_id] = change.reason
        self._progressed = True

    @workflow.signal
    def node_ended(self, *payloads: Any) -> None:
        """A node that this execution did not start says how it ended."""
        report = read_signal(NodeReport, payloads)
        if report is not None and report.node_id in self._running:
            self._reports[report.node_id] = report

    def _show(self, status: RunStatus) -> None:
        """What a person sees who opens the run in the Temporal UI, or lists runs."""
        blocked = self._graph.blocked
        counts = ", ".join(f"{count} {status}" for status, count in self._graph.counts.items())
        lines = [f"**{status}**: {counts}"]
        lines += [
            f"- **{name}** waits for a decision on `{self._graph.state(name).dead_letter}`: {self._reasons[name]}"
            for name in blocked[:_NAMED]
        ]
        lines += [f"- and {len(blocked) - _NAMED} more"] if len(blocked) > _NAMED else []
        workflow.set_current_details("\n".join(lines))
        if status is not self._status:
            self._status = status
            workflow.upsert_search_attributes([STATUS.value_set(status)])


def _status_after(error: ChildWorkflowError) -> NodeStatus:
    cause = error.cause
    if isinstance(cause, CancelledError) or (isinstance(cause, ApplicationError) and cause.type == NODE_CANCELLED):
        return NodeStatus.CANCELLED
    return NodeStatus.DISCARDED
