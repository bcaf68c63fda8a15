"""One connection: what is well-formed goes through h11, what is not goes straight to the socket."""

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass, replace
from typing import Self

import h11

_CHUNK = 65_536


@dataclass(frozen=True)
class Answer:
    """What would be sent if all went well; `size` and `rate` are for the faults which have them."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    size: int = 0
    rate: float = 0

    def has(self, header: str) -> bool:
        """Whether it has this header."""
        return any(name.lower() == header for name, _ in self.headers)

    def with_header(self, header: str, value: str) -> Self:
        """The same with this header, instead of any of that name."""
        others = tuple((name, old) for name, old in self.headers if name.lower() != header)
        return replace(self, headers=(*others, (header, value)))


class Connection:
    """An accepted connection, and the ways to answer on it or not to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        self._method = b""

    async def next_request(self) -> h11.Request | None:
        """The next request's head, or None if there is none: the peer is gone, or an answer was left unfinished."""
        if (self._http.our_state, self._http.their_state) == (h11.DONE, h11.DONE):
            self._http.start_next_cycle()
        if self._http.our_state is not h11.IDLE:
            return None
        event = await self._next_event()
        if not isinstance(event, h11.Request):
            return None
        self._method = event.method
        return event

    async def read_body(self) -> bytes:
        """The whole body of the request.

        Raises:
            h11.RemoteProtocolError: If the peer goes away in the middle of it.
        """
        body = bytearray()
        while isinstance(event := await self._next_event(), h11.Data):
            body += event.data
        return bytes(body)

    async def read_some(self) -> None:
        """Reads until a first piece of the body, or its end, is there."""
        await self._next_event()

    async def send(self, answer: Answer) -> None:
        """The answer, as it should be."""
        if self._method == b"HEAD" or answer.status in (204, 304):
            await self.send_head(answer)
        else:
            await self.send_head(answer, len(answer.body))
            await self.send_data(answer.body)
        await self.send_end()

    async def send_head(self, answer: Answer, length: int | None = None) -> None:
        """The status line and the headers. With no length, here or in the answer's headers, the body goes in chunks."""
        if length is not None and not answer.has("content-length"):
            answer = answer.with_header("content-length", str(length))
        headers = [(name.encode(), value.encode()) for name, value in answer.headers]
        await self._write(self._http.send(h11.Response(status_code=answer.status, headers=headers)))

    async def send_data(self, data: bytes) -> None:
        """A piece of the body."""
        await self._write(self._http.send(h11.Data(data=data)))

    async def send_end(self) -> None:
        """The end of the answer."""
        await self._write(self._http.send(h11.EndOfMessage()))

    async def send_half(self, answer: Answer) -> None:
        """The head, which promises one byte more than the body has, and the first half of the body."""
        await self.send_head(answer, len(answer.body) + 1)
        await self.send_data(answer.body[: len(answer.body) // 2])

    async def send_raw(self, data: bytes) -> None:
        """Bytes which need not be HTTP. Nothing well-formed can follow."""
        await self._write(data)

    def reset(self) -> None:
        """Closes with an RST: SO_LINGER 0 has close() drop what is queued (socket(7))."""
        self._socket_option(socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def stop_reading(self) -> None:
        """Reads no more, and no longer lets the kernel take much in our stead."""
        self._socket_option(socket.SO_RCVBUF, 1)
        transport = self._writer.transport
        assert isinstance(transport, asyncio.ReadTransport)
        if transport.is_reading():
            transport.pause_reading()

    async def until_peer_leaves(self) -> None:
        """Reads and forgets, until the peer closes."""
        with contextlib.suppress(ConnectionError):  # a reset is a way of leaving, too
            while await self._reader.read(_CHUNK):
                pass

    async def next_byte(self) -> bytes:
        """What the peer sends next, thrown away by asking; empty once it has closed."""
        return await self._reader.read(1)

    async def close(self) -> None:
        """Closes with a FIN, and reads on until the peer closes too: so what it may be sending meets no RST."""
        self._writer.write_eof()
        await self.until_peer_leaves()

    def _socket_option(self, option: int, value: int | bytes) -> None:
        if not self._writer.is_closing():  # the peer may have gone while the answer was held
            self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, option, value)

    async def _next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Anything but NEED_DATA; which the types cannot say."""
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                await self._write(self._http.send(h11.InformationalResponse(status_code=100, headers=[])))
            self._http.receive_data(await self._reader.read(_CHUNK))
        return event

    async def _write(self, data: bytes | None) -> None:
        if data:
            self._writer.write(data)
            await self._writer.drain()
