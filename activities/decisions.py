"""``decide`` and ``cancel_nodes``: what is committed to the ledger before anything acts on it."""

from temporalio import activity

from activities.context import Context
from contracts.dispatch import CancelRequest, DecideAnswer, DecideRequest

__all__ = ["CommitDecisions"]


class CommitDecisions:
    """The activities that commit decisions and cancels.

    Their own ``current_attempt_scheduled_time`` is the fence: Temporal's clock, as is that of the
    deliveries it is compared with.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    @activity.defn(name="decide")
    async def decide(self, request: DecideRequest) -> DecideAnswer:
        """Commits a decision to its node's row, once."""
        return await self._context.ledger.decide(request, activity.info().current_attempt_scheduled_time)

    @activity.defn(name="cancel_nodes")
    async def cancel_nodes(self, request: CancelRequest) -> list[str]:
        """Marks nodes as cancelled, or as stopped, so that nothing new is sent for them.

        Answers those of them for which something has been sent whose effect is not known, or not yet; and then those
        that have ended otherwise.
        """
        fence = activity.info().current_attempt_scheduled_time
        return await self._context.ledger.cancel(request.run_id, request.node_ids, fence, for_good=request.for_good)
