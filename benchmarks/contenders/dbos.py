"""DBOS: steps of one workflow, and a queue of workflows, with its state in SQLite or PostgreSQL.

``python -m benchmarks.contenders.dbos SHAPE DATABASE URL`` is the application: a line
``RUN NODES`` in, a line out when it is done.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

from dbos import DBOS

from benchmarks.calls import call, http_client
from benchmarks.lab import Engine, Lab, NotInstalledError, unique_id
from benchmarks.processes import Program, child_with, program
from tests.postgres import PostgresServer, programs

__all__ = ["dbos_engine"]

Shape = Literal["steps", "queue"]
Database = Literal["sqlite", "postgresql"]

_WARM_UP: Final = 20
_QUEUE: Final = "bench"


@dataclass
class _Dbos:
    application: Program
    server: int | None

    @property
    def parts(self) -> Mapping[str, int]:
        server = {"server": self.server} if self.server is not None else {}
        return {**server, "worker": self.application.pid}

    async def run(self, nodes: int) -> None:
        answer = await self.application.ask(f"{unique_id()} {nodes}")
        assert answer == str(nodes), answer


@asynccontextmanager
async def _dbos(lab: Lab, shape: Shape, database: Database) -> AsyncGenerator[_Dbos]:
    folder = lab.folder(f"dbos-{shape}-{database}")
    async with AsyncExitStack() as stack:
        url = f"sqlite:///{folder / 'dbos.sqlite'}"
        server = None
        if database == "postgresql":
            try:
                programs()
            except RuntimeError as error:
                raise NotInstalledError("PostgreSQL is not installed: make system") from error
            postgres = await stack.enter_async_context(PostgresServer.running())
            url = postgres.url(await postgres.database())
            server = child_with(f"port={postgres.port}")
        command = (sys.executable, "-m", "benchmarks.contenders.dbos", shape, url, lab.tools.url("ok"))
        application = await stack.enter_async_context(program(*command, log=folder / "log", talks=True))
        running = _Dbos(application, server)
        await running.run(_WARM_UP)
        yield running


def dbos_engine(label: str, shape: Shape, database: Database) -> Engine:
    """For the measurements that compare."""
    return Engine(label, lambda lab: _dbos(lab, shape, database))


async def _serve(shape: Shape, database: str, url: str) -> None:
    async with http_client() as http:
        DBOS(config={"name": "bench", "system_database_url": database, "log_level": "ERROR"})

        @DBOS.step()
        async def step(key: str) -> Any:
            return await call(http, url, key)

        @DBOS.workflow()
        async def node(key: str) -> Any:
            return await step(key)

        @DBOS.workflow()
        async def steps(run_id: str, nodes: int) -> int:
            return len(await asyncio.gather(*(step(f"{run_id}/{number}") for number in range(nodes))))

        @DBOS.workflow()
        async def queue(run_id: str, nodes: int) -> int:
            keys = [f"{run_id}/{number}" for number in range(nodes)]
            handles = [await DBOS.enqueue_workflow_async(_QUEUE, node, key) for key in keys]
            return len([await handle.get_result() for handle in handles])

        DBOS.launch()
        await DBOS.register_queue_async(_QUEUE)
        shapes = {"steps": steps, "queue": queue}
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            run_id, nodes = line.split()
            handle = await DBOS.start_workflow_async(shapes[shape], run_id, int(nodes))
            print(await handle.get_result(), flush=True)
        DBOS.destroy()


if __name__ == "__main__":
    match sys.argv[1]:
        case "steps" | "queue" as wanted:
            asyncio.run(_serve(wanted, sys.argv[2], sys.argv[3]))
        case other:
            sys.exit(f"no such shape: {other}")
