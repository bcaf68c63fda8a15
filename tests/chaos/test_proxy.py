"""The proxy passes on, cuts, refuses and holds back."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.chaos.proxy import HOST, Proxy
from tests.waiting import eventually

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Echo:
    """Answers what it hears; counts its connections."""

    def __init__(self) -> None:
        self.heard = b""
        self.lost = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(100):
                self.heard += data
                writer.write(data)
        except ConnectionResetError:
            self.lost += 1
        finally:
            writer.close()


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
async def proxy(echo: Echo) -> AsyncIterator[Proxy]:
    server = await asyncio.start_server(echo.serve, HOST, 0)
    async with Proxy.before(server.sockets[0].getsockname()[1]) as proxy:
        yield proxy
    server.close()


async def _connect(proxy: Proxy) -> Streams:
    return await asyncio.open_connection(HOST, proxy.port)


async def _says(streams: Streams, what: bytes) -> bytes:
    reader, writer = streams
    writer.write(what)
    return await reader.readexactly(len(what))


async def test_what_is_said_goes_there_and_back(proxy: Proxy) -> None:
    streams = await _connect(proxy)
    assert await _says(streams, b"hello") == b"hello"
    streams[1].close()


async def test_an_end_goes_through_too(proxy: Proxy) -> None:
    reader, writer = await _connect(proxy)
    writer.write(b"bye")
    writer.write_eof()
    assert await reader.read() == b"bye"
    writer.close()


async def test_a_cut_resets_both_sides_and_new_connections_go_through(proxy: Proxy, echo: Echo) -> None:
    streams = await _connect(proxy)
    await _says(streams, b"hello")
    proxy.cut()
    with pytest.raises(ConnectionResetError):
        await streams[0].read()
    await eventually(lambda: echo.lost == 1, "the server to lose its connection")
    assert proxy.cuts == 1
    streams[1].close()
    again = await _connect(proxy)
    assert await _says(again, b"again") == b"again"
    again[1].close()


async def test_what_is_refused_is_reset_until_it_is_accepted(proxy: Proxy) -> None:
    kept = await _connect(proxy)
    await _says(kept, b"kept")
    proxy.refuse()
    refused = await _connect(proxy)
    with pytest.raises(ConnectionResetError):
        await refused[0].read()
    assert await _says(kept, b"kept") == b"kept"
    proxy.accept()
    accepted = await _connect(proxy)
    assert await _says(accepted, b"hello") == b"hello"
    for _, writer in (kept, refused, accepted):
        writer.close()


async def test_what_is_held_back_arrives_when_it_flows_again(proxy: Proxy, echo: Echo) -> None:
    streams = await _connect(proxy)
    await _says(streams, b"before")
    proxy.stall()
    answer = asyncio.create_task(_says(streams, b"during"))
    # Only time could show that it does not arrive; that it arrives at all is what a fault would break.
    done, _ = await asyncio.wait([answer], timeout=0.2)
    assert not done
    assert echo.heard == b"before"
    proxy.flow()
    assert await answer == b"during"
    streams[1].close()


async def test_a_server_that_is_away_is_a_reset_and_no_wait(proxy: Proxy) -> None:
    async with Proxy.before(1) as nowhere:
        reader, writer = await _connect(nowhere)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
