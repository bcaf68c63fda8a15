"""``gather_evidence``: all that the ledger knows of a node, for its dead letter."""

from datetime import UTC, datetime
from importlib.metadata import version

from temporalio import activity

from activities.context import Context
from contracts.dead_letters import MAX_ATTEMPTS_SHOWN
from contracts.dispatch import Evidence, EvidenceRequest
from contracts.failures import SideEffect
from contracts.tools import Effect

__all__ = ["GatherEvidence", "may_have_forgotten"]


class GatherEvidence:
    """The activity that reads a node's evidence."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @activity.defn(name="gather_evidence")
    async def gather_evidence(self, request: EvidenceRequest) -> Evidence:
        """Reads it; for a node without attempts nothing was sent, unless an earlier ledger was lost."""
        node = await self._context.ledger.node(request.run_id, request.node_id)
        attempts = node.attempts if node is not None else []
        side_effect = node.side_effect if node is not None else SideEffect.NONE
        if not attempts and await may_have_forgotten(self._context, request.tool, request.node_started_at):
            side_effect = SideEffect.POSSIBLE
        return Evidence(
            attempts=attempts[-MAX_ATTEMPTS_SHOWN:],
            attempts_omitted=max(0, len(attempts) - MAX_ATTEMPTS_SHOWN),
            attempt_count=len(attempts),
            side_effect=side_effect,
            delivery=node.delivery if node is not None else None,
            decisions=node.decisions if node is not None else [],
            redrives=node.redrives if node is not None else 0,
            end=node.end if node is not None else None,
            output=node.output if node is not None else None,
            source=node.source if node is not None else None,
            in_flight=node.in_flight if node is not None else False,
            at=datetime.now(UTC),
            redrive_version=version("redrive"),
            temporalio_version=version("temporalio"),
        )


async def may_have_forgotten(context: Context, tool_name: str, node_started_at: datetime | None) -> bool:
    """Whether an earlier ledger, lost since, may have known of calls of a node that can have had an effect."""
    tool = context.catalog.get(tool_name)
    if tool is not None and tool.effect is Effect.READ:
        return False
    return node_started_at is None or activity.info().started_time - node_started_at > await context.ledger.age()
