"""Bare Temporal: the smallest honest code of the same shape, without a ledger, evidence or dead letters.

``python -m benchmarks.contenders.bare ADDRESS URL`` is its worker.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from temporalio.client import Client
from temporalio.worker import Worker

from benchmarks.calls import http_client
from benchmarks.contenders.bare_workflows import ActivityPerNode, Calls, ChildPerNode, Node
from benchmarks.contenders.temporal import Server, temporal_server
from benchmarks.lab import Engine, Lab, unique_id
from benchmarks.processes import Program, program

__all__ = ["bare_engine"]

Shape = Literal["ChildPerNode", "ActivityPerNode"]

_QUEUE = "bare"
_WARM_UP = 20


@dataclass
class _Bare:
    server: Server
    worker: Program
    shape: Shape

    @property
    def parts(self) -> Mapping[str, int]:
        return {"server": self.server.pid, "worker": self.worker.pid}

    async def run(self, nodes: int) -> None:
        run_id = unique_id()
        work = [{"id": f"n{number}", "input": {"n": number}} for number in range(nodes)]
        started = await self.server.client.start_workflow(self.shape, work, id=run_id, task_queue=_QUEUE)
        await self.worker.during(started.result())


@asynccontextmanager
async def _bare(lab: Lab, shape: Shape) -> AsyncGenerator[_Bare]:
    folder = lab.folder("bare")
    async with temporal_server(lab) as server:
        command = (sys.executable, "-m", "benchmarks.contenders.bare", server.address, lab.tools.url("ok"))
        async with program(*command, log=folder / "worker.log") as worker:
            running = _Bare(server, worker, shape)
            await running.run(_WARM_UP)
            yield running


def bare_engine(label: str, shape: Shape) -> Engine:
    """For the measurements that compare."""
    return Engine(label, lambda lab: _bare(lab, shape))


async def _work(address: str, url: str) -> None:
    client = await Client.connect(address)
    async with http_client() as http:
        calls = Calls(http, url)
        async with Worker(
            client, task_queue=_QUEUE, workflows=[ChildPerNode, Node, ActivityPerNode], activities=[calls.call_tool]
        ):
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_work(sys.argv[1], sys.argv[2]))
