"""Redrive as its documentation has it: ``redrive worker``, a catalog, a ledger in SQLite, the minute's sweep."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w
from temporalio.client import Client, WorkflowHandle

from benchmarks.contenders.temporal import Server, ServerKind, temporal_server
from benchmarks.lab import Engine, Lab, unique_id
from benchmarks.processes import Program, program, usage
from workers.schedules import schedule_sweep

__all__ = ["Mode", "Redrive", "node", "redrive", "redrive_engine"]

Mode = Literal["workflow", "fast"]
Node = Mapping[str, Any]

_QUEUE = "redrive"
_WARM_UP = 20
_WORKER = (sys.executable, "-m", "cli.main", "worker")


def node(number: int, tool: str = "work", **rest: Any) -> Node:
    """A node of a benchmark's run."""
    return {"id": f"n{number}", "tool": tool, "input": {"n": number}, **rest}


@dataclass
class Redrive:
    """A worker that runs, and its server."""

    server: Server
    worker: Program
    mode: Mode
    max_parallel: int
    environment: Mapping[str, str]

    @property
    def client(self) -> Client:
        return self.server.client

    @property
    def parts(self) -> Mapping[str, int]:
        return {"server": self.server.pid, "worker": self.worker.pid}

    def cpu_seconds(self) -> Mapping[str, float]:
        """What each part has used so far."""
        return {name: usage(pid).cpu_seconds for name, pid in self.parts.items()}

    async def start(self, nodes: Sequence[Node]) -> WorkflowHandle[Any, Any]:
        """Starts a run, as any client would."""
        spec = {"nodes": nodes, "max_parallel": self.max_parallel, "node_mode": self.mode}
        return await self.client.start_workflow("Run", spec, id=unique_id(), task_queue=_QUEUE)

    async def perform(self, nodes: Sequence[Node]) -> WorkflowHandle[Any, Any]:
        """Starts a run and waits for its result."""
        run = await self.start(nodes)
        await self.worker.during(run.result())
        return run

    async def counted(self, query: str, workflows: int) -> None:
        """Waits until a query finds that many workflows."""

        async def wait() -> None:
            found = -1
            while found < workflows:
                await asyncio.sleep(1)
                found = (await self.client.count_workflows(query)).count

        await self.worker.during(wait())

    async def run(self, nodes: int) -> None:
        await self.perform([node(number) for number in range(nodes)])


@asynccontextmanager
async def redrive(
    lab: Lab,
    mode: Mode = "workflow",
    server: ServerKind = "embedded",
    max_parallel: int = 100,
    tool: Mapping[str, Any] | None = None,
    worker: Sequence[str] = _WORKER,
) -> AsyncGenerator[Redrive]:
    """A server and a worker, warm.

    Args:
        lab: Whose tool server is called.
        mode: The runs' ``node_mode``.
        server: Which Temporal server.
        max_parallel: The runs' own.
        tool: One more tool of the catalog, ``other``: what differs from ``work``.
        worker: The command that is the worker.
    """
    folder = lab.folder(f"redrive-{mode}")
    async with temporal_server(lab, server) as temporal:
        work = {"url": lab.tools.url("ok"), "idempotency": "key"}
        tools = {"work": work, "other": {**work, **(tool or {})}}
        catalog = _written(folder / "tools.toml", tools)
        environment = {
            "TEMPORAL_ADDRESS": temporal.address,
            "REDRIVE_TOOLS": str(catalog),
            "REDRIVE_LEDGER": f"sqlite:///{folder / 'ledger.db'}",
            "REDRIVE_TASK_QUEUE": _QUEUE,
        }
        async with program(*worker, log=folder / "worker.log", environment=environment) as process:
            running = Redrive(temporal, process, mode, max_parallel, environment)
            await running.run(_WARM_UP)
            await schedule_sweep(temporal.client, _QUEUE)
            yield running


def _written(path: Path, tools: Mapping[str, Any]) -> Path:
    path.write_text(tomli_w.dumps({"tools": tools}))
    return path


def redrive_engine(label: str, mode: Mode = "workflow", server: ServerKind = "embedded") -> Engine:
    """For the measurements that compare."""
    return Engine(label, lambda lab: redrive(lab, mode, server))
