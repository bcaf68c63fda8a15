"""Calls per second of the HTTP layer by itself, beside plain aiohttp and plain httpx: same requests, same server.

    python -m benchmarks.http_layer --json http_layer.json

Each does the same work: a POST of JSON with the headers of a call, within a time limit, and the answer's body parsed.
Redrive's besides asks its check before the first byte, bounds the body, looks for secrets, and keeps an excerpt. The
server is a process of its own that answers every request with the same bytes. Rounds are interleaved, and the order
turns: what counts is the median of the rounds' ratios.
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import aiohttp
import httpx

from activities.http import Call, HttpClients
from activities.ledger.clock import boot_seconds
from activities.secrets import Secrets
from contracts.tools import Tool

_BODY: Final = b'{"amount":1999,"reservation":"r-1"}'
_ANSWER: Final = b'{"id":"c-1","ok":true,"amount":1999}'
_HEADERS: Final = {
    "accept": "application/json",
    "accept-encoding": "gzip",
    "content-type": "application/json",
    "idempotency-key": "6f1c2a34-6d0e-5f0b-9f57-0e3c5a7d9b11",
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "user-agent": "redrive/0",
}
_SECONDS: Final = 30.0

Once = Callable[[], Awaitable[object]]


class _Answering(asyncio.Protocol):
    """Answers each request with the same bytes; looks at nothing but where it ends."""

    _whole = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        len(_ANSWER),
        _ANSWER,
    )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._unread = b""

    def data_received(self, data: bytes) -> None:
        self._unread += data
        while (end := self._unread.find(b"\r\n\r\n")) >= 0:
            _, _, field = self._unread[:end].lower().partition(b"\r\ncontent-length:")
            size = int(field.partition(b"\r\n")[0] or 0)
            if len(self._unread) < end + 4 + size:
                return
            self._unread = self._unread[end + 4 + size :]
            self._transport.write(self._whole)


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(_Answering, "127.0.0.1", 0, backlog=1000)
    print(server.sockets[0].getsockname()[1], flush=True)
    # It ends with whoever started it.
    await asyncio.to_thread(sys.stdin.read)
    server.close()


@asynccontextmanager
async def _server() -> AsyncGenerator[str]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.http_layer", "--serve", stdin=pipe, stdout=pipe
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}/v1/charges"
    finally:
        process.stdin.close()
        await process.wait()


@asynccontextmanager
async def _redrive(url: str, in_flight: int) -> AsyncGenerator[Once]:
    tool = Tool(name="charge", url=url, concurrency=in_flight)
    clients = HttpClients(Secrets({}))

    async def once() -> object:
        call = Call(lambda: None, boot_seconds() + _SECONDS)
        return (await clients.send(tool, "POST", url, _HEADERS, _BODY, call)).body

    yield once
    await clients.close()


@asynccontextmanager
async def _aiohttp(url: str, in_flight: int) -> AsyncGenerator[Once]:
    connector = aiohttp.TCPConnector(limit=in_flight)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=_SECONDS)) as session:

        async def once() -> object:
            async with session.post(url, data=_BODY, headers=_HEADERS) as answer:
                return json.loads(await answer.read())

        yield once


@asynccontextmanager
async def _httpx(url: str, in_flight: int) -> AsyncGenerator[Once]:
    limits = httpx.Limits(max_connections=in_flight, max_keepalive_connections=in_flight)
    async with httpx.AsyncClient(limits=limits, timeout=_SECONDS) as client:

        async def once() -> object:
            return (await client.post(url, content=_BODY, headers=_HEADERS)).json()

        yield once


_CLIENTS: Final[Mapping[str, Callable[[str, int], Any]]] = {"redrive": _redrive, "aiohttp": _aiohttp, "httpx": _httpx}


async def _rate(once: Once, calls: int, in_flight: int) -> dict[str, float]:
    left = itertools.repeat(None, calls)
    expected = json.loads(_ANSWER)

    async def caller() -> None:
        for _ in left:
            assert await once() == expected

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(caller() for _ in range(in_flight)))
    seconds = time.perf_counter() - began
    return {"calls_per_second": calls / seconds, "cpu_us_per_call": (time.process_time() - cpu) / calls * 1e6}


async def _measure(rounds: int, calls: int, in_flight: int) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in _CLIENTS}
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(_server())
        clients: dict[str, Once] = {
            name: await stack.enter_async_context(make(url, in_flight)) for name, make in _CLIENTS.items()
        }
        # The first round opens the connections, and is not counted.
        for number in range(rounds + 1):
            names = [*_CLIENTS]
            for name in names[number % 3 :] + names[: number % 3]:
                # A fifth of the calls is enough for the slow one.
                rate = await _rate(clients[name], calls // 5 if name == "httpx" else calls, in_flight)
                if number:
                    found[name].append(rate)
    return found


def _summary(found: Mapping[str, list[dict[str, float]]]) -> dict[str, Any]:
    def median(name: str, what: str) -> float:
        return statistics.median(row[what] for row in found[name])

    ratios = {
        other: [
            mine["calls_per_second"] / its["calls_per_second"]
            for mine, its in zip(found["redrive"], found[other], strict=True)
        ]
        for other in ("aiohttp", "httpx")
    }
    return {
        "clients": {name: {what: round(median(name, what), 1) for what in found[name][0]} for name in found},
        "redrive_to": {
            other: {
                "median": round(statistics.median(each), 3),
                "lowest": round(min(each), 3),
                "highest": round(max(each), 3),
            }
            for other, each in ratios.items()
        },
    }


def main() -> None:
    """Reads the command line, measures, and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.http_layer", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=3000, help="of each round")
    parser.add_argument("--in-flight", type=int, default=50)
    parser.add_argument("--json", type=Path, help="where to write what was found")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(_serve())
        return
    found = asyncio.run(_measure(arguments.rounds, arguments.calls, arguments.in_flight))
    result = {
        "versions": {name: version(name) for name in ("redrive", "aiohttp", "httpx")}
        | {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"},
        "cores": os.cpu_count(),
        "rounds": arguments.rounds,
        "calls": arguments.calls,
        "in_flight": arguments.in_flight,
        **_summary(found),
        "each_round": found,
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "each_round"}, indent=2))


if __name__ == "__main__":
    main()
