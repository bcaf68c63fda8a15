"""The HTTP layer by itself: what each fault looks like, whether bytes may have gone, and that nothing is sent twice."""

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import aiohttp
import pytest

from activities.classify import Answer, classify_exception
from activities.http import Call, HttpClients, NotSentError
from activities.ledger.clock import boot_seconds
from activities.secrets import Secrets
from activities.wire import PoolTimeoutError, WriteTimeoutError, wire_url
from contracts.failures import Code, SideEffect
from contracts.tools import Tool
from tests.integration.raw_server import head, never_reading_port, taking_little, whole
from tests.tool_server import ToolServer, ports
from tests.waiting import eventually

SMALL = b'{"amount": 5}'
LARGE = b"x" * 1_000_000


@pytest.fixture
async def clients() -> AsyncIterator[HttpClients]:
    clients = HttpClients(Secrets({}))
    yield clients
    await clients.close()


def allowed() -> None:
    """A check that has nothing against it."""


def refused() -> None:
    raise NotSentError(Code.LEASE_LOST, "the lease ran out")


def call_within(seconds: float = 30, check: Callable[[], None] = allowed) -> Call:
    return Call(check, boot_seconds() + seconds)


def tool(url: str, concurrency: int = 5) -> Tool:
    return Tool(name="tool", url=url, concurrency=concurrency)


async def send(
    clients: HttpClients, url: str, call: Call | None = None, body: bytes | None = SMALL, method: str = "POST"
) -> Answer:
    return await clients.send(
        tool(url), method, url, {"idempotency-key": "k"}, body, call if call is not None else call_within()
    )


@pytest.fixture(scope="module")
def never_reading() -> Iterator[int]:
    with never_reading_port() as port:
        yield port


async def scripted(tool_server: ToolServer, name: str, *steps: dict[str, Any]) -> str:
    """The URL of a tool that takes these steps."""
    await tool_server.script(f"wire-{name}", list(steps))
    return tool_server.tool_url(f"wire-{name}")


# The table of faults. With another transport, or another version of it, it is to be measured again.


@dataclass(frozen=True)
class Fault:
    name: str
    error: type[Exception]
    sent: bool
    code: Code
    seconds: float = 30
    body: bytes = SMALL


BEFORE = [
    Fault("refused", aiohttp.ClientConnectorError, False, Code.CONNECT_FAILED),
    Fault("no-tls", aiohttp.ClientConnectorError, False, Code.CONNECT_FAILED),
    Fault("unreachable", aiohttp.ConnectionTimeoutError, False, Code.CONNECT_TIMEOUT, seconds=0.5),
]
AFTER = [
    Fault("close-unread", aiohttp.ClientOSError, True, Code.CONNECTION_LOST),
    Fault("rst_after_read", aiohttp.ClientOSError, True, Code.CONNECTION_LOST),
    Fault("fin_after_read", aiohttp.ServerDisconnectedError, True, Code.PROTOCOL_ERROR),
    Fault("garbage", aiohttp.ClientResponseError, True, Code.PROTOCOL_ERROR),
    Fault("header_bomb", aiohttp.ClientResponseError, True, Code.PROTOCOL_ERROR),
    Fault("hang", aiohttp.SocketTimeoutError, True, Code.READ_TIMEOUT, seconds=1),
    Fault("never-read", WriteTimeoutError, True, Code.WRITE_TIMEOUT, seconds=2, body=LARGE),
]


@pytest.mark.parametrize("fault", BEFORE + AFTER, ids=lambda fault: fault.name)
async def test_each_fault_is_its_error_and_says_whether_bytes_may_have_gone(
    clients: HttpClients, tool_server: ToolServer, never_reading: int, fault: Fault
) -> None:
    special = {
        "never-read": f"http://127.0.0.1:{never_reading}/",
        "refused": f"http://127.0.0.1:{tool_server.refused_port}/",
        "unreachable": f"http://127.0.0.1:{tool_server.blackhole_port}/",
        "close-unread": f"http://127.0.0.1:{tool_server.close_unread_port}/",
        "no-tls": f"https://127.0.0.1:{tool_server.port}/",
    }
    url = special.get(fault.name)
    if url is None:
        url = await scripted(tool_server, fault.name, {"fault": fault.name, "size": 1_000_000})
    call = call_within(fault.seconds)
    with pytest.raises(fault.error) as raised:
        await send(clients, url, call, fault.body)
    assert call.sent is fault.sent
    assert isinstance(raised.value, aiohttp.ClientError)
    outcome = classify_exception(raised.value, call.sent)
    assert outcome.code == fault.code
    assert outcome.side_effect is (SideEffect.POSSIBLE if fault.sent else SideEffect.NONE)
    assert url not in outcome.message


@pytest.mark.parametrize("fault", ["truncated", "rst_in_body", "hang_in_body", "bad_gzip", "not_json"])
async def test_the_status_is_known_whatever_becomes_of_the_body(
    clients: HttpClients, tool_server: ToolServer, fault: str
) -> None:
    url = await scripted(tool_server, fault, {"fault": fault, "body": {"text": "x" * 1000}})
    call = call_within(1 if fault == "hang_in_body" else 30)
    answer = await send(clients, url, call)
    assert (answer.status, answer.problem and answer.problem.code, call.sent) == (200, Code.RESULT_LOST, True)


CHUNKED = head("transfer-encoding: chunked")


@pytest.mark.parametrize(
    "answer",
    [
        CHUNKED + b"zz\r\n",
        CHUNKED + b"1\r\n1\r\n0\r\n" + b"x: y\r\n" * 5000,
        CHUNKED + b"1\r\n1x\r\n",
        b"HTTP/1.1 103 Early Hints\r\n\r\n" * 2 + CHUNKED + b"zz\r\n",
        head("content-length: 2") + b"1",
    ],
    ids=["size", "trailers", "end", "interim", "length"],
)
@pytest.mark.parametrize("cut", [None, -1, -3], ids=["at-once", "cut-in-the-blank-line", "cut-before-it"])
async def test_the_status_is_known_even_if_what_came_along_is_broken(
    clients: HttpClients, answer: bytes, cut: int | None
) -> None:
    async def broken(seen: Counting, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(seen, reader)
        at = 0 if cut is None else answer.rindex(b"\r\n\r\n") + 4 + cut
        writer.write(answer[:at])
        # Two segments, which the other side of the loop reads one by one.
        await asyncio.sleep(0.05 if at else 0)
        writer.write(answer[at:])

    async with counting(broken) as server:
        async with asyncio.timeout(10):
            found = await send(clients, server.url())
    assert (found.status, found.problem and found.problem.code) == (200, Code.RESULT_LOST)


async def test_a_name_that_nobody_knows_is_not_sent(clients: HttpClients) -> None:
    call = call_within(5)
    # Without a resolver at all it is the timeout.
    with pytest.raises((aiohttp.ClientConnectorDNSError, aiohttp.ConnectionTimeoutError)):
        await send(clients, "http://no-such-host.invalid/", call)
    assert not call.sent


async def test_a_full_pool_is_told_from_all_else(clients: HttpClients, tool_server: ToolServer) -> None:
    url = await scripted(tool_server, "pool", {"fault": "hang"})
    one = tool(url, concurrency=1)
    holding = asyncio.create_task(clients.send(one, "POST", url, {}, SMALL, call_within(2)))
    await tool_server.wait_for("wire-pool", calls=1)
    call = call_within(0.2)
    with pytest.raises(PoolTimeoutError) as raised:
        await clients.send(one, "POST", url, {}, SMALL, call)
    assert not call.sent
    assert classify_exception(raised.value, call.sent).code == Code.POOL_EXHAUSTED
    with pytest.raises(aiohttp.SocketTimeoutError):
        await holding


# Servers that count.


@dataclass
class Counting:
    """A server that keeps its connections, and what it has seen on them."""

    port: int = 0
    connections: int = 0
    received: list[bytes] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return sum(piece.count(b" HTTP/1.1\r\n") for piece in self.received)

    def url(self, path: str = "") -> str:
        return f"http://127.0.0.1:{self.port}/{path}"


Serving = Callable[[Counting, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def counting(serve: Serving, listener: socket.socket | None = None) -> AsyncGenerator[Counting]:
    seen = Counting()
    writers = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.connections += 1
        writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await serve(seen, reader, writer)
        writer.close()

    server = await (
        asyncio.start_server(accept, "127.0.0.1", 0)
        if listener is None
        else asyncio.start_server(accept, sock=listener)
    )
    seen.port = server.sockets[0].getsockname()[1]
    try:
        yield seen
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()


async def read_request(seen: Counting, reader: asyncio.StreamReader) -> None:
    """Reads a request whose body is `SMALL`, or has none."""
    start = await reader.readuntil(b"\r\n\r\n")
    seen.received.append(start)
    if b"content-length: 13" in start.lower():
        seen.received.append(await reader.readexactly(len(SMALL)))


async def test_what_the_check_forbids_never_leaves_though_the_connection_is_there(clients: HttpClients) -> None:
    async def read_all(seen: Counting, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.received.append(await reader.read())

    connected: list[int] = []

    async with counting(read_all) as server:

        def late() -> None:
            connected.append(server.connections)
            refused()

        for method, body in (("POST", SMALL), ("GET", None)):
            call = call_within(check=late)
            with pytest.raises(NotSentError):
                await send(clients, server.url(), call, body, method)
            assert not call.sent
        await eventually(lambda: server.received == [b"", b""], "both connections to be closed")
    # The server may be told of its connection later than we of ours.
    assert len(connected) == 2


async def test_what_is_overdue_never_leaves(clients: HttpClients, tool_server: ToolServer) -> None:
    url = await scripted(tool_server, "overdue")
    call = call_within(0)
    with pytest.raises((NotSentError, aiohttp.ServerTimeoutError)):
        await send(clients, url, call)
    assert not call.sent
    assert await tool_server.calls("wire-overdue") == []


@pytest.mark.parametrize("ending", ["fin", "rst"])
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "GET"])
async def test_no_request_is_ever_repeated_when_a_kept_connection_is_lost(
    clients: HttpClients, method: str, ending: str
) -> None:
    async def once_then_lost(seen: Counting, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(seen, reader)
        writer.write(whole(b"1"))
        await read_request(seen, reader)
        if ending == "rst":
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    body = SMALL if method in ("POST", "PUT", "PATCH") else None
    async with counting(once_then_lost) as server:
        assert (await send(clients, server.url(), body=body, method=method)).body == 1
        call = call_within()
        with pytest.raises(aiohttp.ServerDisconnectedError if ending == "fin" else aiohttp.ClientOSError):
            await send(clients, server.url(), call, body, method)
        assert call.sent
        assert (server.requests, server.connections) == (2, 1)


async def test_a_connection_that_was_closed_while_idle_costs_nothing(
    clients: HttpClients, tool_server: ToolServer
) -> None:
    url = await scripted(tool_server, "idle", {"fault": "close_idle"})
    for _ in range(3):
        assert (await send(clients, url)).status == 200
        # Not a turn of the loop: only the kernel knows that the connection is closed.
        time.sleep(0.1)  # noqa: ASYNC251
    assert len(await tool_server.calls("wire-idle")) == 3


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "in-the-kernel"])
async def test_what_a_tool_says_unasked_is_nobodys_answer(clients: HttpClients, noticed: bool) -> None:
    async def chatty(seen: Counting, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(seen, reader)
        writer.write(whole(b"%d" % seen.connections))
        await writer.drain()
        await spoken.wait()
        writer.write(whole(b'"unasked"', status="408 Request Timeout"))
        told.set()
        await read_request(seen, reader)

    spoken, told = asyncio.Event(), asyncio.Event()
    async with counting(chatty) as server:
        assert (await send(clients, server.url())).body == 1
        spoken.set()
        await told.wait()
        if noticed:
            # One more round trip through the same loop: what was written before it has been read.
            assert (await send(clients, server.url("other"), method="GET", body=None)).body == 2
        assert (await send(clients, server.url())).body == server.connections
        assert server.requests == server.connections


async def test_an_answer_that_does_not_wait_for_the_request_counts(clients: HttpClients) -> None:
    async def hasty(seen: Counting, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.received.append(await reader.read(1000))
        writer.write(whole(b"{}", status="413 Content Too Large"))
        await asyncio.Event().wait()

    with taking_little() as listener:
        async with counting(hasty, listener) as server:
            for connections in (1, 2):
                assert (await send(clients, server.url(), body=LARGE)).status == 413
                # Half a request is behind it: nothing follows on that connection.
                assert server.connections == connections


async def test_what_was_given_up_does_not_go_out_later(clients: HttpClients) -> None:
    with taking_little() as listener:
        listener.setblocking(False)
        call = call_within(2)
        with pytest.raises(WriteTimeoutError):
            await send(clients, f"http://127.0.0.1:{ports.port_of(listener)}/", call, LARGE)
        peer, _ = await asyncio.get_running_loop().sock_accept(listener)
        received = 0
        with peer, contextlib.suppress(ConnectionResetError):
            while piece := await asyncio.get_running_loop().sock_recv(peer, 65_536):
                received += len(piece)
    assert received < len(LARGE)


async def test_nothing_is_followed_kept_or_added(clients: HttpClients) -> None:
    async def moved(seen: Counting, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(seen, reader)
            writer.write(whole(b"", "location: /else", "set-cookie: a=b", "set-cookie: c=d", status="307 Moved"))

    async with counting(moved) as server:
        answer = await send(clients, server.url("a%2Fb%3B1?q=a+b%20c%3A"))
        assert (answer.status, answer.headers["set-cookie"]) == (307, "a=b, c=d")
        await send(clients, server.url(), body=None, method="DELETE")
        post, _, delete = [sorted(piece.decode().lower().split("\r\n")) for piece in server.received]
    assert post == sorted(
        [
            "",
            "",
            "post /a%2fb%3b1?q=a+b%20c%3a http/1.1",
            f"host: 127.0.0.1:{server.port}",
            "accept: application/json",
            "accept-encoding: gzip",
            f"user-agent: redrive/{version('redrive')}",
            "idempotency-key: k",
            "content-length: 13",
            "content-type: application/json",
        ]
    )
    assert [line for line in delete if line.startswith(("content-type", "cookie"))] == []


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("http://h/a%2Fb%3B;c:d@e?x=%3A:+%20", "http://h/a%2Fb%3B;c:d@e?x=%3A:+%20"),
        ("http://h/ä|b?ü", "http://h/%C3%A4%7Cb?%C3%BC"),
        ("http://bücher.example/ä", "http://xn--bcher-kva.example/%C3%A4"),
        ("http://[::1]:8080/x", "http://[::1]:8080/x"),
    ],
)
def test_a_url_is_sent_as_it_was_written(text: str, sent: str) -> None:
    assert str(wire_url(text)) == sent


# Proxies of the environment.


async def answering(seen: Counting, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(seen, reader)
    refusing = seen.received[-1].startswith(b"CONNECT")
    writer.write(whole(b"1", status="403 Forbidden" if refusing else "200 OK"))


async def test_calls_go_by_the_proxy_of_the_environment(clients: HttpClients, monkeypatch: pytest.MonkeyPatch) -> None:
    async with counting(answering) as proxy, counting(answering) as direct:
        monkeypatch.setenv("ALL_PROXY", f"http://user:word@127.0.0.1:{proxy.port}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        assert (await send(clients, "http://behind.invalid/x")).body == 1
        assert (await send(clients, direct.url())).body == 1
        assert (proxy.connections, direct.connections) == (1, 1)
        asked = proxy.received[0].decode()
        assert asked.startswith("POST http://behind.invalid/x HTTP/1.1\r\n")
        assert "proxy-authorization: Basic dXNlcjp3b3Jk" in asked.replace("Proxy-Authorization", "proxy-authorization")
        # What asks a proxy for a connection is not yet a request to the tool.
        call = call_within()
        with pytest.raises(aiohttp.ClientHttpProxyError) as raised:
            await send(clients, "https://behind.invalid/x", call)
        assert not call.sent
        assert classify_exception(raised.value, call.sent).side_effect is SideEffect.NONE
        monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
        with pytest.raises(aiohttp.ClientConnectionError, match="socks5"):
            await send(clients, "http://elsewhere.invalid/", call)
        assert not call.sent
