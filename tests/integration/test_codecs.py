"""Whoever wires a worker with an own client may encrypt what Temporal keeps; that is the client's data converter."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import pytest
from temporalio.api.common.v1 import Payload
from temporalio.client import Client
from temporalio.converter import (
    ActivitySerializationContext,
    PayloadCodec,
    SerializationContext,
    WithSerializationContext,
    WorkflowSerializationContext,
)

from tests.lab import NODE_MODES, Bench
from workers.client import DATA_CONVERTER

SECRET = "4111 1111 1111 1111"


class Sealing(PayloadCodec):
    """Seals payloads: what it writes nobody else reads."""

    def seal(self) -> bytes:
        return b"sealed"

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        return [
            Payload(metadata={"encoding": b"sealed", "by": self.seal()}, data=payload.SerializeToString()[::-1])
            for payload in payloads
        ]

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        for payload in payloads:
            assert payload.metadata["by"] == self.seal(), (payload.metadata["by"], self.seal())
        return [Payload.FromString(payload.data[::-1]) for payload in payloads]


class SealingForOne(Sealing, WithSerializationContext):
    """Seals each with a key of its own, made from what the payload belongs to."""

    context: SerializationContext | None = None

    def with_context(self, context: SerializationContext) -> Self:
        bound = type(self)()
        bound.context = context
        return bound

    def seal(self) -> bytes:
        match self.context:
            case ActivitySerializationContext() as context:
                return f"{context.workflow_id} {context.activity_type}".encode()
            case WorkflowSerializationContext() as context:
                return context.workflow_id.encode()
            case _:
                return b"nobody's"


@pytest.mark.parametrize("codec", [Sealing(), SealingForOne()], ids=["one key", "a key for each workflow"])
@pytest.mark.parametrize("mode", NODE_MODES)
async def test_a_client_with_a_codec_keeps_what_it_encodes_from_temporal(
    bench: Bench, codec: PayloadCodec, mode: str
) -> None:
    config: Any = bench.client.config()
    config["data_converter"] = dataclasses.replace(DATA_CONVERTER, payload_codec=codec)
    sealed = dataclasses.replace(bench, client=Client(**config), node_mode=mode)
    await sealed.tool("pay", [{"status": 403}, {"body": {"id": SECRET}}])
    async with sealed.worker():
        run = await sealed.start({"id": "pay", "tool": "pay", "input": {"card": SECRET}})
        entry = await sealed.parked(run, "pay")
        assert entry.input == {"card": SECRET}
        await sealed.decide(run, "pay", "redrive")
        assert (await run.result())["outputs"] == {"pay": {"id": SECRET}}
        for workflow in (run.id, f"{run.id}/pay", f"{run.id}/pay/dead-letter"):
            history = await bench.client.get_workflow_handle(workflow).fetch_history()
            kept = b"".join(event.SerializeToString() for event in history.events)
            assert b"sealed" in kept
            assert SECRET.encode() not in kept
