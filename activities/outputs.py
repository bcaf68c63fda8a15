"""``read_outputs``: what nodes have ended with, for a run that does not carry it all along."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from temporalio import activity

from activities.context import Context
from activities.threads import look_into
from contracts.base import Json
from contracts.canonical import json_size
from contracts.dispatch import OutputsRequest
from contracts.limits import BY_REFERENCE, INLINE
from contracts.pointers import at_pointer

__all__ = ["ReadOutputs"]

_SMALL: Final = 16 * 1024
"""Bytes of an output that is answered as a whole, for others that may need it as well."""


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
        # Of large outputs little may be answered, but reading them takes as long.
        left, to_read = INLINE.run_outputs, BY_REFERENCE.output
        for node_id, pointers in request.pointers.items():
            node = await self._context.ledger.node(request.run_id, node_id)
            if node is None or node.end is None:
                continue
            size = await look_into(node.output, json_size, node.output)
            if size <= _SMALL or "" in pointers:
                places, answered = {"": node.output}, size
            else:
                places, answered = await look_into(node.output, self._places, node.output, pointers)
            left -= answered
            if found and left < 0:
                break
            found[node_id] = places
            to_read -= size
            if to_read < 0:
                break
        return found

    def _places(self, output: Json, pointers: Sequence[str]) -> tuple[dict[str, Json], int]:
        """What is at these places, and its bytes; no more than one place beyond what an input may have."""
        places: dict[str, Json] = {}
        size = 0
        for pointer in pointers:
            if size > self._context.limits.input:
                break
            with suppress(LookupError):
                places[pointer] = at_pointer(output, pointer)
                size += json_size(places[pointer])
        return places, size
