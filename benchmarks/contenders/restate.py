"""Restate: its server as npm has it, durable by default; an endpoint served by Hypercorn, as its documentation says.

``python -m benchmarks.contenders.restate PORT URL`` is the endpoint.
"""

import asyncio
import shutil
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import httpx
import hypercorn
import hypercorn.asyncio
import restate

from benchmarks.calls import call, http_client
from benchmarks.lab import Engine, Lab, NotInstalledError, unique_id
from benchmarks.processes import Program, program
from workers.embedded import free_port

__all__ = ["restate_engine", "restate_server"]

Shape = Literal["steps", "fan_out"]

_SERVER: Final = Path(__file__).resolve().parents[1] / "node_modules" / ".bin" / "restate-server"
_WARM_UP: Final = 20
_UNLIMITED: Final = 2**31 - 1


def restate_server() -> str | None:
    """Restate's server, if it is there; Node.js starts it."""
    return str(_SERVER) if _SERVER.exists() and shutil.which("node") else None


@dataclass
class _Restate:
    server: Program
    endpoint: Program
    ingress: httpx.AsyncClient
    shape: Shape

    @property
    def parts(self) -> Mapping[str, int]:
        return {"server": self.server.pid, "worker": self.endpoint.pid}

    async def run(self, nodes: int) -> None:
        run_id = unique_id()
        order = {"run_id": run_id, "nodes": nodes}
        # The key makes the request itself durable: asked again, it is answered by the same invocation.
        headers = {"idempotency-key": run_id}
        answer = await self.endpoint.during(self.ingress.post(f"/bench/{self.shape}", json=order, headers=headers))
        answer.raise_for_status()


@asynccontextmanager
async def _restate(lab: Lab, shape: Shape) -> AsyncGenerator[_Restate]:
    binary = restate_server()
    if binary is None:
        raise NotInstalledError("its server comes from npm: npm ci --prefix benchmarks")
    folder = lab.folder(f"restate-{shape}")
    ports = {name: free_port() for name in ("ingress", "admin", "node", "endpoint")}
    settings = {
        "RESTATE_BASE_DIR": str(folder / "data"),
        "RESTATE_LISTEN_MODE": "tcp",
        "RESTATE_BIND_IP": "127.0.0.1",
        "RESTATE_BIND_PORT": str(ports["node"]),
        "RESTATE_INGRESS__BIND_PORT": str(ports["ingress"]),
        "RESTATE_ADMIN__BIND_PORT": str(ports["admin"]),
        "RESTATE_LOG_FILTER": "warn",
        "RESTATE_DISABLE_TELEMETRY": "true",
    }
    endpoint = (sys.executable, "-m", "benchmarks.contenders.restate", str(ports["endpoint"]), lab.tools.url("ok"))
    async with (
        program(binary, "--no-logo", log=folder / "server.log", environment=settings) as server,
        program(*endpoint, log=folder / "endpoint.log") as served,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports['ingress']}", timeout=None) as ingress,
    ):
        deployment = {"uri": f"http://127.0.0.1:{ports['endpoint']}"}
        await server.during(_registered(f"http://127.0.0.1:{ports['admin']}/deployments", deployment))
        running = _Restate(server, served, ingress, shape)
        await server.during(running.run(_WARM_UP))
        yield running


async def _registered(admin: str, deployment: Mapping[str, str]) -> None:
    async with httpx.AsyncClient() as client:
        while True:
            try:
                if (await client.post(admin, json=deployment)).is_success:
                    return
            except httpx.TransportError:  # it does not listen yet
                pass
            await asyncio.sleep(0.1)


def restate_engine(label: str, shape: Shape) -> Engine:
    """For the measurements that compare."""
    return Engine(label, lambda lab: _restate(lab, shape))


def _service(http: httpx.AsyncClient, url: str) -> restate.Service:
    bench = restate.Service("bench")

    @bench.handler()
    async def node(ctx: restate.Context, key: str) -> Any:
        return await ctx.run_typed("call", call, restate.RunOptions(), http, url, key)

    @bench.handler()
    async def steps(ctx: restate.Context, order: dict[str, Any]) -> int:
        keys = [f"{order['run_id']}/{number}" for number in range(order["nodes"])]
        calls = [ctx.run_typed(key, call, restate.RunOptions(), http, url, key) for key in keys]
        return len([await done for done in await restate.gather(*calls)])

    @bench.handler()
    async def fan_out(ctx: restate.Context, order: dict[str, Any]) -> int:
        keys = [f"{order['run_id']}/{number}" for number in range(order["nodes"])]
        calls = [ctx.service_call(node, key) for key in keys]
        return len([await done for done in await restate.gather(*calls)])

    return bench


async def _serve(port: int, url: str) -> None:
    config = hypercorn.Config()
    config.bind = [f"127.0.0.1:{port}"]
    # What Restate's documentation recommends for production.
    config.h2_max_concurrent_streams = _UNLIMITED
    config.keep_alive_max_requests = _UNLIMITED
    config.keep_alive_timeout = _UNLIMITED
    async with http_client() as http:
        await hypercorn.asyncio.serve(restate.app([_service(http, url)]), config)


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), sys.argv[2]))
