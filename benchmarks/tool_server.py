"""The tool that everyone calls: a process of its own that serves far more than anyone asks, and counts effects by key.

Raw HTTP/1.1 on asyncio, since a framework would take the processor away from what is measured.

``python -m benchmarks.tool_server PORT`` serves ``POST /ok`` (an effect), ``/forbidden`` (403) and ``/fragile`` (an
effect, or 503 while it is down); ``/reset``, ``/down`` and ``/up`` control it, ``GET /report`` tells what it has seen.
"""

import asyncio
import itertools
import json
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Self

import httpx
from pydantic import BaseModel

from benchmarks.processes import program
from workers.embedded import free_port

__all__ = ["Report", "ToolServer"]

_HOST: Final = "127.0.0.1"
_END: Final = b"\r\n\r\n"
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_KEY: Final = re.compile(rb"\r\nidempotency-key:[ \t]*([^\r]+)", re.IGNORECASE)


class Report(BaseModel):
    """What the server has seen since the last reset.

    Attributes:
        calls: Requests to tools, whatever was answered.
        effects: Calls that were answered with 200.
        keys: Different idempotency keys among those.
        arrivals: When each call came, in seconds of the machine's monotonic clock.
        done: When each effect happened, by the same clock.
    """

    calls: int
    effects: int
    keys: int
    arrivals: list[float]
    done: list[float]


class _Effects:
    def __init__(self) -> None:
        self.down = False
        self.reset()

    def reset(self) -> None:
        self.by_key: Counter[bytes] = Counter()
        self.arrivals: list[float] = []
        self.done: list[float] = []

    def report(self) -> Report:
        return Report(
            calls=len(self.arrivals),
            effects=self.by_key.total(),
            keys=len(self.by_key),
            arrivals=self.arrivals,
            done=self.done,
        )

    def answer(self, path: bytes, head: bytes) -> bytes:
        match path:
            case b"/ok":
                return self._effect(head)
            case b"/fragile":
                if self.down:
                    self.arrivals.append(time.monotonic())
                    return _response(b"503 Service Unavailable", b"{}", b"retry-after: 1\r\n")
                return self._effect(head)
            case b"/forbidden":
                self.arrivals.append(time.monotonic())
                return _response(b"403 Forbidden", b'{"error": "not allowed"}')
            case b"/report":
                return _response(b"200 OK", self.report().model_dump_json().encode())
            case b"/reset":
                self.reset()
            case b"/down" | b"/up":
                self.down = path == b"/down"
            case _:
                return _response(b"404 Not Found", b"{}")
        return _response(b"200 OK", b"{}")

    def _effect(self, head: bytes) -> bytes:
        now = time.monotonic()
        self.arrivals.append(now)
        self.done.append(now)
        found = _KEY.search(head)
        self.by_key[found[1] if found else b"none-%d" % len(self.arrivals)] += 1
        return _response(b"200 OK", b'{"id": %d}' % len(self.arrivals))


def _response(status: bytes, body: bytes, headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-type: application/json\r\n%scontent-length: %d\r\n\r\n%s" % (
        status,
        headers,
        len(body),
        body,
    )


class _Connection(asyncio.Protocol):
    def __init__(self, effects: _Effects) -> None:
        self._effects = effects
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        answers: list[bytes] = []
        while (end := self._buffer.find(_END)) >= 0:
            head = self._buffer[: end + len(_END)]
            length = _LENGTH.search(head)
            whole = len(head) + (int(length[1]) if length else 0)
            if len(self._buffer) < whole:
                break
            self._buffer = self._buffer[whole:]
            path = head.split(b" ", 2)[1].partition(b"?")[0]
            answers.append(self._effects.answer(path, head))
        if answers and self._transport is not None:
            self._transport.write(b"".join(answers))


class ToolServer:
    """The handle on a running server."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._control = httpx.AsyncClient(base_url=f"http://{_HOST}:{port}", timeout=60)

    @classmethod
    @asynccontextmanager
    async def running(cls, folder: Path) -> AsyncGenerator[Self]:
        """A server, gone at the end."""
        server = cls(free_port())
        command = (sys.executable, "-m", "benchmarks.tool_server", str(server.port))
        async with program(*command, log=folder / "tool-server.log") as process, server._control:
            await process.during(server._answers())
            yield server

    async def _answers(self) -> None:
        while True:
            try:
                await self.reset()
            except httpx.ConnectError:
                await asyncio.sleep(0.02)
            else:
                return

    def url(self, path: str) -> str:
        """Where one of its tools is."""
        return f"http://{_HOST}:{self.port}/{path}"

    async def reset(self) -> None:
        """Forgets what it has seen."""
        await self._order("reset")

    async def stop_serving(self) -> None:
        """Has ``/fragile`` answer 503 until `serve_again`."""
        await self._order("down")

    async def serve_again(self) -> None:
        """See `stop_serving`."""
        await self._order("up")

    async def _order(self, name: str) -> None:
        (await self._control.post(f"/{name}")).raise_for_status()

    async def report(self) -> Report:
        """What it has seen."""
        return Report.model_validate_json((await self._control.get("/report")).content)

    async def ceiling(self, seconds: float, connections: int = 50, pipelined: int = 20) -> float:
        """How many calls a second it serves, however fast anyone could ask: requests are sent without waiting."""
        body = json.dumps({"n": 1}).encode()
        request = b"POST /ok HTTP/1.1\r\nhost: tool\r\nidempotency-key: %d\r\ncontent-length: %d\r\n\r\n%s"
        numbers = itertools.count()
        end = time.monotonic() + seconds

        async def ask() -> None:
            reader, writer = await asyncio.open_connection(_HOST, self.port)
            while time.monotonic() < end:
                writer.write(b"".join(request % (next(numbers), len(body), body) for _ in range(pipelined)))
                for _ in range(pipelined):
                    head = await reader.readuntil(_END)
                    length = _LENGTH.search(head)
                    await reader.readexactly(int(length[1]) if length else 0)
            writer.close()
            await writer.wait_closed()

        await asyncio.gather(*(ask() for _ in range(connections)))
        done = (await self.report()).done
        return (len(done) - 1) / (done[-1] - done[0])


async def _serve(port: int) -> None:
    effects = _Effects()
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(effects), _HOST, port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
