"""``read_outputs``: what nodes have ended with, for a run that does not carry it all along."""

from collections.abc import Sequence
from contextlib import suppress

from temporalio import activity

from activities.context import Context
from contracts.base import Json
from contracts.canonical import json_size
from contracts.dispatch import OutputsRequest
from contracts.limits import INLINE
from contracts.pointers import at_pointer

__all__ = ["ReadOutputs"]


class ReadOutputs:
    """The activity that reads outputs back from the ledger."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @activity.defn(name="read_outputs")
    async def read_outputs(self, request: OutputsRequest) -> dict[str, dict[str, Json]]:
        """What the first of these nodes have at these places, as many nodes as travel together, but one at least.

        A node that the ledger does not know to have ended is left out, and a place that is not in its output.
        """
        found: dict[str, dict[str, Json]] = {}
        left = INLINE.run_outputs
        for node_id, pointers in request.pointers.items():
            node = await self._context.ledger.node(request.run_id, node_id)
            if node is None or node.end is None:
                continue
            places = _places(node.output, pointers)
            left -= sum(map(json_size, places.values()))
            if found and left < 0:
                break
            found[node_id] = places
        return found


def _places(output: Json, pointers: Sequence[str]) -> dict[str, Json]:
    """What is at these places; all of an output, which others may need as well, unless it is a large one."""
    if "" in pointers or not INLINE.is_large(json_size(output)):
        return {"": output}
    places: dict[str, Json] = {}
    for pointer in pointers:
        with suppress(LookupError):
            places[pointer] = at_pointer(output, pointer)
    return places
