"""``preflight``: everything a redrive is checked against the present with. The rules are pure."""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, auto

from temporalio import activity
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import WorkflowExecutionStatus
from temporalio.api.workflowservice.v1 import DescribeWorkflowExecutionRequest
from temporalio.service import RPCError, RPCStatusCode

from activities.context import Context, facts
from activities.ledger.records import NodeView
from activities.requests import input_problems
from contracts.canonical import content_hash
from contracts.dead_letters import RefusalCode
from contracts.dispatch import Approved, PreflightAnswer, PreflightRequest
from contracts.failures import SideEffect
from contracts.identity import node_workflow_id
from contracts.schemas import schema_problems
from contracts.tools import Approval, Effect, Idempotency, Tool

__all__ = ["Lifecycle", "Preflight", "Present", "approval_after", "refusals"]


class Lifecycle(Enum):
    """Where a workflow stands."""

    OPEN = auto()
    CANCELLING = auto()
    CLOSED = auto()


@dataclass(frozen=True, slots=True)
class Present:
    """The present facts that a redrive is judged by."""

    run: Lifecycle
    node_waits: bool
    tool: Tool | None
    side_effect: SideEffect
    first_sent_at: datetime | None
    now: datetime


class Preflight:
    """The activity that checks whether a redrive would be accepted."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @activity.defn(name="preflight")
    async def preflight(self, request: PreflightRequest) -> PreflightAnswer:
        """Checks the run, the node, the catalog, the approval, the schema, the dedupe window and the ledger."""
        node = await self._context.ledger.node(request.run_id, request.node_id)
        tool = self._context.catalog.get(request.tool.name)
        present = Present(
            run=await self._lifecycle(request.run_id),
            node_waits=await self._node_waits(request, node),
            tool=tool,
            side_effect=node.side_effect if node is not None else SideEffect.POSSIBLE,
            first_sent_at=node.first_sent_at if node is not None else None,
            now=datetime.now(UTC),
        )
        return PreflightAnswer(
            refusals=refusals(request, present),
            side_effect=present.side_effect,
            run_gone=present.run is Lifecycle.CLOSED,
            tool=facts(tool, self._context.task_queue) if tool is not None else None,
            approval=approval_after(request, tool),
            output_problems=(
                schema_problems(tool.output_schema, request.resolution, "output") if request.resolves and tool else []
            ),
            redrives=node.redrives if node is not None else 0,
            ended=node.end if node is not None else None,
            output=node.output if node is not None else None,
            source=node.source if node is not None else None,
            at=present.now,
        )

    async def _node_waits(self, request: PreflightRequest, node: NodeView | None) -> bool:
        if node is not None and (node.end is not None or node.redrives > request.redrives):
            return False
        return await self._lifecycle(node_workflow_id(request.run_id, request.node_id)) is Lifecycle.OPEN

    async def _lifecycle(self, workflow_id: str) -> Lifecycle:
        client = activity.client()
        # Not handle.describe(): it cannot read the status of a paused workflow.
        try:
            answer = await client.workflow_service.describe_workflow_execution(
                DescribeWorkflowExecutionRequest(
                    namespace=client.namespace, execution=WorkflowExecution(workflow_id=workflow_id)
                )
            )
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return Lifecycle.CLOSED
            raise
        if answer.workflow_execution_info.HasField("close_time") or answer.workflow_execution_info.status not in (
            WorkflowExecutionStatus.WORKFLOW_EXECUTION_STATUS_RUNNING,
            WorkflowExecutionStatus.WORKFLOW_EXECUTION_STATUS_PAUSED,
        ):
            return Lifecycle.CLOSED
        return Lifecycle.CANCELLING if answer.workflow_extended_info.cancel_requested else Lifecycle.OPEN


def refusals(request: PreflightRequest, present: Present) -> list[RefusalCode]:
    """Everything that stands in the way of a redrive."""
    found: list[RefusalCode] = []
    if present.run is Lifecycle.CLOSED:
        found.append(RefusalCode.RUN_CLOSED)
    elif present.run is Lifecycle.CANCELLING:
        found.append(RefusalCode.RUN_CANCELLING)
    elif not present.node_waits:
        found.append(RefusalCode.NODE_CLOSED)
    tool = present.tool
    if tool is None:
        return [*found, RefusalCode.TOOL_MISSING]
    if tool.fingerprint != request.tool.fingerprint:
        found.append(RefusalCode.TOOL_CHANGED)
    if request.unresolved or input_problems(tool, request.input):
        found.append(RefusalCode.INPUT_INVALID)
    if (approval := _approval_refusal(request, tool, present.now)) is not None:
        found.append(approval)
    if (effect := _effect_refusal(request, present, tool)) is not None:
        found.append(effect)
    if request.redrives >= tool.max_redrives:
        found.append(RefusalCode.REDRIVE_LIMIT)
    return found


def _approval_refusal(request: PreflightRequest, tool: Tool, now: datetime) -> RefusalCode | None:
    approved = approval_after(request, tool)
    if approved is None:
        return RefusalCode.APPROVAL_VOID if tool.approval is Approval.REQUIRED else None
    if approved.grant.id in request.revoked:
        return RefusalCode.APPROVAL_REVOKED
    if approved.grant.expired(now):
        return RefusalCode.APPROVAL_EXPIRED
    return None if approved.covers(tool.fingerprint, request.input) else RefusalCode.APPROVAL_VOID


def approval_after(request: PreflightRequest, tool: Tool | None) -> Approved | None:
    """The approval a redriven node would go on under: a new one is bound to the present tool and the input sent."""
    if request.new_approval is None or tool is None:
        return request.approval
    return Approved(grant=request.new_approval, fingerprint=tool.fingerprint, input_hash=content_hash(request.input))


def _effect_refusal(request: PreflightRequest, present: Present, tool: Tool) -> RefusalCode | None:
    if present.side_effect is SideEffect.NONE or tool.effect is Effect.READ:
        return None
    # A new operation has a new key: nothing at the tool knows it for a repetition.
    dedupes = tool.idempotency is Idempotency.KEY and not request.new_operation
    window_over = (
        tool.dedupe_window is not None
        and present.first_sent_at is not None
        and present.now >= present.first_sent_at + tool.dedupe_window
    )
    if dedupes and not window_over:
        return None
    if present.side_effect is SideEffect.CONFIRMED:
        return RefusalCode.EFFECT_CONFIRMED
    return RefusalCode.DEDUPE_WINDOW_EXPIRED if dedupes else RefusalCode.SIDE_EFFECT_UNRESOLVED
