"""``gather_evidence``: all that the ledger knows of a node, for its dead letter."""

from datetime import UTC, datetime
from importlib.metadata import version

from temporalio import activity

from activities.context import Context
from contracts.dead_letters import MAX_ATTEMPTS_SHOWN
from contracts.dispatch import Evidence, EvidenceRequest
from contracts.failures import SideEffect
from contracts.tools import Effect

__all__ = ["GatherEvidence"]


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
        if not attempts and await self._forgotten(request):
            side_effect = SideEffect.POSSIBLE
        return Evidence(
            attempts=attempts[-MAX_ATTEMPTS_SHOWN:],
            attempts_omitted=max(0, len(attempts) - MAX_ATTEMPTS_SHOWN),
            attempt_count=len(attempts),
            side_effect=side_effect,
            delivery=node.delivery if node is not None else None,
            decisions=node.decisions if node is not None else [],
            redrives=node.redrives if node is not None else 0,
            at=datetime.now(UTC),
            redrive_version=version("redrive"),
            temporalio_version=version("temporalio"),
        )

    async def _forgotten(self, request: EvidenceRequest) -> bool:
        """Whether an earlier ledger, lost since, may have known of calls that can have had an effect."""
        tool = self._context.catalog.get(request.tool)
        reads = tool is not None and tool.effect is Effect.READ
        return not reads and request.node_started_at < await self._context.ledger.born_at()
