"""``gather_evidence``: all that the ledger knows of a node, for its dead letter."""

from datetime import UTC, datetime
from importlib.metadata import version

from temporalio import activity

from activities.context import Context
from contracts.dead_letters import MAX_ATTEMPTS_SHOWN
from contracts.dispatch import Evidence, EvidenceRequest
from contracts.failures import SideEffect

__all__ = ["GatherEvidence"]


class GatherEvidence:
    """The activity that reads a node's evidence."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @activity.defn(name="gather_evidence")
    async def gather_evidence(self, request: EvidenceRequest) -> Evidence:
        """Reads it; a node that the ledger does not know has no attempts, and nothing was sent for it."""
        node = await self._context.ledger.node(request.run_id, request.node_id)
        attempts = node.attempts if node is not None else []
        return Evidence(
            attempts=attempts[-MAX_ATTEMPTS_SHOWN:],
            attempts_omitted=max(0, len(attempts) - MAX_ATTEMPTS_SHOWN),
            attempt_count=len(attempts),
            side_effect=node.side_effect if node is not None else SideEffect.NONE,
            delivery=node.delivery if node is not None else None,
            decisions=node.decisions if node is not None else [],
            redrives=node.redrives if node is not None else 0,
            at=datetime.now(UTC),
            redrive_version=version("redrive"),
            temporalio_version=version("temporalio"),
        )
