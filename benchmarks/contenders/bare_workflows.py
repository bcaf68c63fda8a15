"""What the bare worker runs."""

import asyncio
from datetime import timedelta
from typing import Any

from temporalio import activity, workflow

with workflow.unsafe.imports_passed_through():
    import httpx

    from benchmarks.calls import call

__all__ = ["ActivityPerNode", "Calls", "ChildPerNode", "Node"]

_TIMEOUT = timedelta(seconds=30)
_WINDOW = 100
"""As many nodes at once as Redrive has by default. With all at once it is slower: by a third with 500 children."""


class Calls:
    """The activity."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self._http = http
        self._url = url

    @activity.defn
    async def call_tool(self, node: dict[str, Any]) -> Any:
        info = activity.info()
        return await call(self._http, self._url, f"{info.workflow_id}/{node['id']}")


@workflow.defn
class Node:
    @workflow.run
    async def run(self, node: dict[str, Any]) -> Any:
        return await workflow.execute_activity_method(Calls.call_tool, node, start_to_close_timeout=_TIMEOUT)


@workflow.defn
class ChildPerNode:
    @workflow.run
    async def run(self, nodes: list[dict[str, Any]]) -> int:
        window = asyncio.Semaphore(_WINDOW)
        run_id = workflow.info().workflow_id

        async def perform(node: dict[str, Any]) -> None:
            async with window:
                await workflow.execute_child_workflow(Node.run, node, id=f"{run_id}/{node['id']}")

        await asyncio.gather(*(perform(node) for node in nodes))
        return len(nodes)


@workflow.defn
class ActivityPerNode:
    @workflow.run
    async def run(self, nodes: list[dict[str, Any]]) -> int:
        window = asyncio.Semaphore(_WINDOW)

        async def perform(node: dict[str, Any]) -> None:
            async with window:
                await workflow.execute_activity_method(Calls.call_tool, node, start_to_close_timeout=_TIMEOUT)

        await asyncio.gather(*(perform(node) for node in nodes))
        return len(nodes)
