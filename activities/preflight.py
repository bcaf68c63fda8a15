"""``preflight``: everything a redrive is checked against the present with. The rules are pure."""

import asyncio
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum, auto

from temporalio import activity

from activities.context import Context, facts
from activities.evidence import may_have_forgotten
from activities.executions import describe
from activities.ledger.records import NodeView
from activities.requests import input_problems
from contracts.canonical import content_hash
from contracts.dead_letters import RefusalCode
from contracts.dispatch import Approved, PreflightAnswer, PreflightRequest
from contracts.failures import SideEffect
from contracts.identity import node_workflow_id
from contracts.limits import INLINE, Limits
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
    since_first_send: timedelta | None
    now: datetime
    limits: Limits = INLINE


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
            side_effect=await self._side_effect(request, node),
            since_first_send=node.since_first_send if node is not None else None,
            # Temporal's clock: an approval is not to expire sooner on one machine than on another.
            now=activity.info().started_time,
            limits=self._context.limits,
        )
        # In a thread: leases are renewed on this loop, and a large input takes seconds.
        return await asyncio.to_thread(self._answer, request, present, node)

    def _answer(self, request: PreflightRequest, present: Present, node: NodeView | None) -> PreflightAnswer:
        tool = present.tool
        return PreflightAnswer(
            refusals=refusals(request, present),
            side_effect=present.side_effect,
            run_gone=present.run is Lifecycle.CLOSED,
            tool=facts(tool, self._context) if tool is not None else None,
            approval=approval_after(request, tool),
            output_problems=(
                schema_problems(tool.output_schema, request.resolution, "output") if request.resolves and tool else []
            ),
            redrives=node.redrives if node is not None else 0,
            attempt_count=len(node.attempts) if node is not None else 0,
            ended=node.end if node is not None else None,
            output=node.output if node is not None else None,
            source=node.source if node is not None else None,
            at=present.now,
        )

    async def _side_effect(self, request: PreflightRequest, node: NodeView | None) -> SideEffect:
        """The current operation's; where the ledger has no attempt none was made, unless it has forgotten it."""
        if node is not None and node.attempts:
            return node.side_effect
        forgotten = request.attempts_seen > 0 or request.redrives > (node.redrives if node is not None else 0)
        if forgotten or await may_have_forgotten(self._context, request.tool.name, request.node_started_at):
            return SideEffect.POSSIBLE
        return SideEffect.NONE

    async def _node_waits(self, request: PreflightRequest, node: NodeView | None) -> bool:
        if node is not None and (node.end is not None or node.redrives > request.redrives):
            return False
        return await self._lifecycle(node_workflow_id(request.run_id, request.node_id)) is Lifecycle.OPEN

    async def _lifecycle(self, workflow_id: str) -> Lifecycle:
        found = await describe(activity.client(), workflow_id)
        if found is None or found.ended_at is not None:
            return Lifecycle.CLOSED
        return Lifecycle.CANCELLING if found.cancelling else Lifecycle.OPEN


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
    if request.unresolved or input_problems(tool, request.input, present.limits.input):
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
    if dedupes and tool.harmless_to_repeat(present.since_first_send or timedelta(0)):
        return None
    if present.side_effect is SideEffect.CONFIRMED:
        return RefusalCode.EFFECT_CONFIRMED
    return RefusalCode.DEDUPE_WINDOW_EXPIRED if dedupes else RefusalCode.SIDE_EFFECT_UNRESOLVED
