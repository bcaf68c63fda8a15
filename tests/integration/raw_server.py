"""A server that answers with exactly the bytes it is told, however wrong: what no HTTP server can be made to send."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from tests.tool_server import ports

Answering = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class RawServer:
    """A running server.

    Attributes:
        port: Where it listens.
        answers: By path: what to do once a request has been read. The connection is closed after it.
        requests: The heads of the requests by path, in the order of their arrival.
        writers: The connections that are open.
    """

    port: int = 0
    answers: dict[str, Answering] = field(default_factory=dict)
    requests: dict[str, list[bytes]] = field(default_factory=dict)
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @classmethod
    @asynccontextmanager
    async def start(cls, answers: Mapping[str, Answering]) -> AsyncGenerator["RawServer", None]:
        """A server, stopped at the end."""
        raw = cls(answers=dict(answers))
        server = await asyncio.start_server(raw._serve, "127.0.0.1", 0)
        raw.port = server.sockets[0].getsockname()[1]
        try:
            yield raw
        finally:
            server.close()
            for writer in raw.writers:
                writer.transport.abort()

    def url(self, path: str) -> str:
        """Where it answers so."""
        return f"http://127.0.0.1:{self.port}/{path}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        # Whoever is sent too much goes away before the end.
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ", 2)[1].decode().lstrip("/").partition("?")[0]
            self.requests.setdefault(path, []).append(head)
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    await reader.readexactly(int(line.partition(b":")[2]))
            await self.answers[path](writer)
        # What has not been taken by now is wanted by nobody.
        with contextlib.suppress(ConnectionError, TimeoutError):
            await asyncio.wait_for(writer.drain(), 10)
        writer.close()
        self.writers.discard(writer)


def saying(*parts: bytes) -> Answering:
    """These bytes, and then the end."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return answer


def for_ever(begin: bytes, part: bytes, pause: float = 0) -> Answering:
    """The beginning, and then the part again and again."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(begin)
        while True:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)

    return answer


def whole(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    """An answer with its head."""
    return head(f"content-length: {len(body)}", *headers, status=status) + body


def head(*headers: str, status: str = "200 OK") -> bytes:
    """The head of an answer."""
    return "\r\n".join([f"HTTP/1.1 {status}", "content-type: application/json", *headers, "", ""]).encode()


@contextmanager
def never_reading_port() -> Generator[int]:
    """A port where connections are taken by the kernel alone, which takes next to nothing of what is sent."""
    with taking_little() as listener:
        yield ports.port_of(listener)


@contextmanager
def taking_little() -> Generator[socket.socket]:
    """A listening socket for whose connections the kernel takes next to nothing that is not read."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        # Small segments make for a small send buffer at the peer; on the loopback it would else take megabytes.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        listener.bind((ports.HOST, 0))
        listener.listen(100)
        yield listener
