"""An answer's body, received and decompressed in bounded memory."""

import zlib
from typing import Final

import aiohttp

__all__ = ["ACCEPT_ENCODING", "TooLargeError", "receive"]

ACCEPT_ENCODING: Final = "gzip"
"""What a tool is told; it may also leave its answer as it is (RFC 9110 section 12.5.3)."""

_INFLATED: Final = frozenset(("gzip", "x-gzip", "deflate"))
_GZIP_OR_ZLIB: Final = 32 + zlib.MAX_WBITS


class TooLargeError(Exception):
    """The body is larger than it may be; ``beginning`` is what was read of it."""

    def __init__(self, beginning: bytes) -> None:
        self.beginning = beginning
        super().__init__("the body is larger than it may be")


async def receive(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Reads the body of a response, and never holds more than ``most`` bytes of it and one piece from the network.

    Not by aiohttp's own decoders: they know no bound for the whole, and take brotli where it happens to be installed. A
    piece of 64 kB can be 64 MB of gzip, and every further layer multiplies that by a thousand.

    Raises:
        TooLargeError: there is more, compressed or not.
        aiohttp.ClientPayloadError: it is encoded in another way than was asked for, or damaged.
        aiohttp.ClientError: it did not arrive whole.
    """
    inflater = _Inflater() if _is_deflated(response) else None
    content = bytearray()
    received = 0
    async for raw in response.content.iter_any():
        received += len(raw)
        content += raw if inflater is None else inflater.inflate(raw, most + 1 - len(content))
        if max(received, len(content)) > most:
            raise TooLargeError(bytes(content[:most]))
    if inflater is not None and received and not inflater.complete:
        raise aiohttp.ClientPayloadError("its compressed data ends too early")
    return bytes(content)


class _Inflater:
    """Decompresses gzip and zlib, no more than is asked for."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(_GZIP_OR_ZLIB)

    @property
    def complete(self) -> bool:
        """Whether nothing is missing at the end."""
        return self._stream.eof

    def inflate(self, raw: bytes, most: int) -> bytes:
        """At most so many bytes; whoever gets them all has to give up, for the rest is dropped."""
        content = bytearray()
        while raw and len(content) < most:
            if self._stream.eof:
                # One gzip file may follow another (RFC 1952 section 2.2).
                self._stream = zlib.decompressobj(_GZIP_OR_ZLIB)
            try:
                content += self._stream.decompress(raw, most - len(content))
            except zlib.error as error:
                raise aiohttp.ClientPayloadError(str(error)) from error
            raw = self._stream.unused_data
        return bytes(content)


def _is_deflated(response: aiohttp.ClientResponse) -> bool:
    field = ",".join(response.headers.getall("content-encoding", ()))
    codings = [coding for item in field.lower().split(",") if (coding := item.strip()) not in ("", "identity")]
    if not codings:
        return False
    if len(codings) > 1 or codings[0] not in _INFLATED:
        raise aiohttp.ClientPayloadError(f"its content-encoding is {field!r}, where {ACCEPT_ENCODING} was asked for")
    return True
