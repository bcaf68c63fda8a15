"""The ways to answer badly. Each is a small coroutine in the table at the end.

A fault runs after the effect is committed (or not). It may leave the answer unfinished: the server then closes the
connection, with a FIN unless the fault has reset it.
"""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace

from tests.tool_server.connection import Answer, Connection

_CHUNK = 65_536
_TICK = 0.05
"""Seconds between the pieces of a slow body."""


@dataclass(frozen=True)
class Fault:
    """What to do instead of answering, and whether the request's body is read before.

    If it is not, then nothing is committed by default.
    """

    run: Callable[[Connection, Answer], Awaitable[None]]
    reads_body: bool = True


def _json_string(size: int, chunk: int = _CHUNK) -> Iterator[bytes]:
    """A JSON string of `size` bytes with its quotes, in pieces."""
    yield b'"'
    for start in range(0, size - 2, chunk):
        yield b"a" * min(chunk, size - 2 - start)
    yield b'"'


async def _rst_after_read(connection: Connection, answer: Answer) -> None:
    connection.reset()


async def _fin_after_read(connection: Connection, answer: Answer) -> None:
    """Says nothing; the server closes."""


async def _garbage(connection: Connection, answer: Answer) -> None:
    await connection.send_raw(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")


async def _hang(connection: Connection, answer: Answer) -> None:
    await connection.until_peer_leaves()


async def _never_read(connection: Connection, answer: Answer) -> None:
    connection.stop_reading()
    await asyncio.Event().wait()  # for ever: what is not read is not known to be closed either


async def _early_413_rst(connection: Connection, answer: Answer) -> None:
    await connection.read_some()
    connection.stop_reading()
    too_large = replace(answer, status=413, body=b"{}")
    await connection.send_head(too_large, 2)
    await connection.send_data(too_large.body)
    connection.reset()


async def _truncated(connection: Connection, answer: Answer) -> None:
    await connection.send_half(answer)


async def _rst_in_body(connection: Connection, answer: Answer) -> None:
    await connection.send_half(answer)
    connection.reset()


async def _hang_in_body(connection: Connection, answer: Answer) -> None:
    await connection.send_half(answer)
    await connection.until_peer_leaves()


async def _close_keepalive(connection: Connection, answer: Answer) -> None:
    await connection.send(answer)
    if await connection.next_byte():
        await connection.close()


async def _close_idle(connection: Connection, answer: Answer) -> None:
    await connection.send(answer)
    await connection.close()


async def _bad_gzip(connection: Connection, answer: Answer) -> None:
    await connection.send(replace(answer.with_header("content-encoding", "gzip"), body=b"this is not gzip"))


async def _invalid_utf8(connection: Connection, answer: Answer) -> None:
    await connection.send(replace(answer, body=b'{"a": "\xff\xfe"}'))


async def _not_json(connection: Connection, answer: Answer) -> None:
    await connection.send(replace(answer.with_header("content-type", "text/html"), body=b"<h1>It works!</h1>"))


async def _deep_json(connection: Connection, answer: Answer) -> None:
    await connection.send(replace(answer, body=b"[" * answer.size + b"]" * answer.size))


async def _nan(connection: Connection, answer: Answer) -> None:
    await connection.send(replace(answer, body=b'{"a": NaN}'))


async def _duplicate_keys(connection: Connection, answer: Answer) -> None:
    await connection.send(replace(answer, body=b'{"a": 1, "a": 2}'))


async def _header_bomb(connection: Connection, answer: Answer) -> None:
    lines = tuple((f"x-bomb-{start}", "a" * min(1_000, answer.size - start)) for start in range(0, answer.size, 1_000))
    await connection.send(replace(answer, headers=answer.headers + lines))


async def _huge(connection: Connection, answer: Answer) -> None:
    await connection.send_head(answer)
    for piece in _json_string(answer.size):
        await connection.send_data(piece)
        await asyncio.sleep(0)  # the other connections have their turn
    await connection.send_end()


async def _gzip_bomb(connection: Connection, answer: Answer) -> None:
    await connection.send_head(answer.with_header("content-encoding", "gzip"))
    gzip = zlib.compressobj(wbits=31)  # 31: with a gzip header and trailer
    for piece in _json_string(answer.size):
        await connection.send_data(gzip.compress(piece))
        await asyncio.sleep(0)
    await connection.send_data(gzip.flush())
    await connection.send_end()


async def _slow_body(connection: Connection, answer: Answer) -> None:
    await connection.send_head(answer, answer.size)
    for piece in _json_string(answer.size, max(1, round(answer.rate * _TICK))):
        await connection.send_data(piece)
        await asyncio.sleep(len(piece) / answer.rate)
    await connection.send_end()


FAULTS = {
    # No answer. `never_read` and `early_413_rst` need a body which does not fit in the peer's send buffer: 4 MB, where
    # net.ipv4.tcp_wmem says nothing else. With a smaller one the peer waits for an answer, or reads the 413.
    "rst_after_read": Fault(_rst_after_read),
    "fin_after_read": Fault(_fin_after_read),
    "garbage": Fault(_garbage),
    "hang": Fault(_hang),
    "never_read": Fault(_never_read, reads_body=False),
    "early_413_rst": Fault(_early_413_rst, reads_body=False),
    # The head of the answer and half of its body.
    "truncated": Fault(_truncated),
    "rst_in_body": Fault(_rst_in_body),
    "hang_in_body": Fault(_hang_in_body),
    # The answer, keep-alive; then a FIN when the next request's first byte arrives (unread, unrecorded), or at once.
    "close_keepalive": Fault(_close_keepalive),
    "close_idle": Fault(_close_idle),
    # A whole answer with the wrong body.
    "bad_gzip": Fault(_bad_gzip),
    "invalid_utf8": Fault(_invalid_utf8),
    "not_json": Fault(_not_json),
    "deep_json": Fault(_deep_json),
    "nan": Fault(_nan),
    "duplicate_keys": Fault(_duplicate_keys),
    # Too much of it, or too slow. `huge` goes in chunks, unless the step's headers have a content-length.
    "header_bomb": Fault(_header_bomb),
    "huge": Fault(_huge),
    "gzip_bomb": Fault(_gzip_bomb),
    "slow_body": Fault(_slow_body),
}
