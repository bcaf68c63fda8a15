"""Celery on Redis, made to survive a crash: tasks acknowledged late, and a Redis that syncs its log at every write.

It keeps no history of a run: a group of tasks and their results, no more.
``celery -A benchmarks.contenders.celery_tasks worker`` is its worker.
"""

import asyncio
import shutil
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import celery  # type: ignore[import-untyped]  # it has no types
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as NotListeningError

from benchmarks.lab import Engine, Lab, NotInstalledError, unique_id
from benchmarks.processes import Program, program
from workers.embedded import free_port

__all__ = ["celery_engine"]

_WARM_UP: Final = 20
_PROCESSES: Final = 4


@dataclass
class _Celery:
    server: Program
    worker: Program
    producer: Any

    @property
    def parts(self) -> Mapping[str, int]:
        return {"server": self.server.pid, "worker": self.worker.pid}

    async def run(self, nodes: int) -> None:
        await self.worker.during(asyncio.to_thread(self._run, nodes))

    def _run(self, nodes: int) -> None:
        run_id = unique_id()
        task = self.producer.signature("benchmarks.call")
        group = celery.group([task.clone([f"{run_id}/{number}"]) for number in range(nodes)], app=self.producer)
        group.apply_async().join()


@asynccontextmanager
async def _celery(lab: Lab) -> AsyncGenerator[_Celery]:
    binary = shutil.which("redis-server")
    if binary is None:
        raise NotInstalledError("redis-server is not installed: make system")
    folder = lab.folder("celery")
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    durable = ("--appendonly", "yes", "--appendfsync", "always", "--save", "")
    place = ("--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder))
    worker = (sys.executable, "-m", "celery", "--app", "benchmarks.contenders.celery_tasks", "worker")
    pool = ("--pool", "prefork", "--concurrency", str(_PROCESSES), "--loglevel", "error")
    async with program(binary, *place, *durable, log=folder / "redis.log") as server:
        await server.during(_answering(url))
        environment = {"BENCH_REDIS": url, "BENCH_URL": lab.tools.url("ok")}
        async with program(*worker, *pool, log=folder / "worker.log", environment=environment) as process:
            producer = celery.Celery("benchmarks", broker=url, backend=url)
            running = _Celery(server, process, producer)
            await running.run(_WARM_UP)
            yield running
            producer.close()


async def _answering(url: str) -> None:
    client = Redis.from_url(url)
    while True:
        try:
            await client.ping()
        except NotListeningError:  # it does not listen yet
            await asyncio.sleep(0.05)
        else:
            await client.aclose()
            return


def celery_engine(label: str) -> Engine:
    """For the measurements that compare."""
    return Engine(label, _celery)
