"""A TCP proxy that can cut what goes through it, refuse what wants to, and hold everything back for a while."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final, Self

HOST: Final = "127.0.0.1"
_CHUNK: Final = 65_536


class Proxy:
    """Listens on a port of its own and passes everything on to another.

    Attributes:
        port: Where it listens.
        cuts: Connections that it has reset.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._connections: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter | None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._refusing = False
        self.port = 0
        self.cuts = 0

    @classmethod
    @asynccontextmanager
    async def before(cls, target: int) -> AsyncGenerator[Self]:
        """A proxy before a port of this machine, until the end."""
        proxy = cls(target)
        server = await asyncio.start_server(proxy._accept, HOST, 0, backlog=1_024)
        proxy.port = server.sockets[0].getsockname()[1]
        try:
            yield proxy
        finally:
            server.close()
            proxy.cut()
            for task in [*proxy._tasks]:
                task.cancel()
            await asyncio.gather(*proxy._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Resets every connection, on both sides."""
        for pair in [*self._connections]:
            self.cuts += 1
            for writer in pair:
                if writer is not None:
                    _reset(writer)

    def refuse(self) -> None:
        """Resets every new connection at once; those that are there stay."""
        self._refusing = True

    def accept(self) -> None:
        """The opposite of `refuse`."""
        self._refusing = False

    def stall(self) -> None:
        """Passes nothing on, until `flow`; what comes meanwhile is passed on then."""
        self._flowing.clear()

    def flow(self) -> None:
        """The opposite of `stall`."""
        self._flowing.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            _reset(writer)
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(HOST, self._target)
        except OSError:
            _reset(writer)
            return
        pair = (writer, back)
        self._connections.add(pair)
        try:
            await asyncio.gather(self._pass_on(reader, back), self._pass_on(there, writer))
        except (ConnectionError, TimeoutError):
            pass  # one side is gone: so is the other
        finally:
            self._connections.discard(pair)
            _reset(writer)
            _reset(back)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK):
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
        await self._flowing.wait()
        with contextlib.suppress(OSError, RuntimeError):  # it is closed already
            writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closes with an RST, unless both ends have said that they are done."""
    if writer.transport.is_closing():
        return
    connection = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
