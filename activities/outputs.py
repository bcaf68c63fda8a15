"""``read_outputs``: what nodes have ended with, for a run that does not carry it all along."""

from temporalio import activity

from activities.context import Context
from contracts.base import Json
from contracts.canonical import json_size
from contracts.dispatch import OutputsRequest
from contracts.limits import INLINE

__all__ = ["ReadOutputs"]


class ReadOutputs:
    """The activity that reads outputs back from the ledger."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @activity.defn(name="read_outputs")
    async def read_outputs(self, request: OutputsRequest) -> dict[str, Json]:
        """The outputs of the first of these nodes, as many as travel together, but of one at least.

        A node that the ledger does not know to have ended is left out.
        """
        found: dict[str, Json] = {}
        left = INLINE.run_outputs
        for node_id in request.node_ids:
            node = await self._context.ledger.node(request.run_id, node_id)
            if node is None or node.end is None:
                continue
            left -= json_size(node.output)
            if found and left < 0:
                break
            found[node_id] = node.output
        return found
