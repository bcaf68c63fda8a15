"""One request on the wire: the last look before its first byte, and how far it has come.

Three things that aiohttp does may not happen here: it sends an idempotent request again when its connection is lost; it
takes a connection from its pool on which the other side has spoken or hung up in the meantime; and it forgets the head
of an answer if what came along with it is broken.
"""

import asyncio
import io
import os
import select
import ssl
from collections.abc import Callable, Mapping
from datetime import timedelta
from enum import StrEnum
from functools import lru_cache
from typing import Final
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import certifi
from aiohttp.abc import AbstractStreamWriter
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.payload import TOO_LARGE_BYTES_BODY
from yarl import URL

from activities.ledger.clock import boot_seconds
from contracts.failures import Code

__all__ = [
    "Call",
    "Moment",
    "NotSentError",
    "PoolTimeoutError",
    "Sending",
    "WriteTimeoutError",
    "open_session",
    "proxy_for",
    "tls_context",
    "wire_url",
]

_MOST_HEAD_LINE: Final = 65_536
_MOST_HEADERS: Final = 256
_IDLE_SECONDS: Final = 5.0
"""After which an idle connection is not used again; most servers keep one for longer."""
_END_OF_HEAD: Final = b"\r\n\r\n"
_STATUS_AT: Final = len(b"HTTP/1.1 ")
_AS_WRITTEN: Final = "%:/?#[]@!$&'()*+,;=~"
"""What a URL may hold besides letters, digits, ``-``, ``.`` and ``_`` (RFC 3986 section 2)."""


class NotSentError(Exception):
    """The call was called off before its first byte."""

    def __init__(self, code: Code, message: str) -> None:
        self.code = code
        super().__init__(message)


class PoolTimeoutError(aiohttp.ServerTimeoutError):
    """All connections that there may be to the tool were taken."""


class WriteTimeoutError(aiohttp.ServerTimeoutError):
    """The tool did not take the whole request in time."""


class _StaleConnectionError(Exception):
    """The pooled connection cannot be used any more; nothing was sent on it."""


class _LostError(Exception):
    """The connection was lost; as an exception for which aiohttp does not send again."""

    def __init__(self, error: aiohttp.ClientConnectionError) -> None:
        self.error = error
        super().__init__(str(error))


class Moment(StrEnum):
    """What a call comes to on its way, in order."""

    BEFORE_SEND = "before-send"
    """There is a connection, and not a byte has gone."""
    SENT = "sent"
    """All of the request has gone; an answer may be there already."""
    HEADERS = "headers"
    BODY = "body"


class Call:
    """One call on the wire: how far it has come, and above all whether bytes may have gone.

    Args:
        check: Asked just before the first byte; it raises `NotSentError` where the byte may not go.
        until: By `boot_seconds`, when the whole attempt is over, whatever of it has been spent on waiting.
    """

    def __init__(self, check: Callable[[], None], until: float) -> None:
        self._check = check
        self._until = until
        self._overdue: type[aiohttp.ServerTimeoutError] = aiohttp.ConnectionTimeoutError
        self.sent = False

    def timed_out(self, limit: timedelta) -> aiohttp.ServerTimeoutError:
        """What it means that the whole attempt has taken too long just now."""
        return self._overdue(f"the attempt was not over within {limit.total_seconds():g} s")

    @property
    def seconds_left(self) -> float:
        """What is left of the attempt's time."""
        return max(self._until - boot_seconds(), 0.0)

    async def reached(self, moment: Moment) -> None:
        """Is told of every moment, before anything follows it; forbids the first byte by raising.

        That is after the waits for a place in the pool and for a connection, which is why it cannot be asked earlier.

        Raises:
            NotSentError: the first byte may not go.
        """
        if moment is Moment.BEFORE_SEND:
            if self.sent:
                raise RuntimeError("a call is sent once")
            if self.seconds_left <= 0:
                raise NotSentError(Code.LEASE_LOST, "the attempt's time was over before the tool could be called")
            self._check()
            self.sent = True
            self._overdue = WriteTimeoutError
        elif moment is Moment.SENT:
            self._overdue = aiohttp.SocketTimeoutError


class Sending:
    """A call's way through aiohttp: sent once, on a connection that is good."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._transport: asyncio.BaseTransport | None = None
        self._head_first: _HeadFirst | None = None

    async def request(
        self,
        session: aiohttp.ClientSession,
        method: str,
        url: URL,
        headers: Mapping[str, str],
        body: bytes | None,
        connect_seconds: float,
    ) -> aiohttp.ClientResponse:
        """Sends the request and reads the head of its answer.

        Raises:
            aiohttp.ClientError: as aiohttp says; the call knows whether bytes may have gone.
            NotSentError: the call's check forbade it.
        """
        while True:
            try:
                response = await session.request(
                    method,
                    url,
                    headers=headers,
                    data=_streamed(body),
                    allow_redirects=False,
                    proxy=proxy_for(url),
                    timeout=aiohttp.ClientTimeout(connect=connect_seconds),
                    middlewares=(self._once,),
                )
                if self._head_first is not None:
                    self._head_first.watch(response.content)
                return response
            except _StaleConnectionError:
                # Nothing was sent. It ends with a new connection at the latest: only one from the pool can be stale.
                continue
            except _LostError as lost:
                raise lost.error from None

    def drop(self) -> None:
        """Drops what a connection that was given up still holds of the request: it must not go out later."""
        if isinstance(self._transport, asyncio.WriteTransport) and self._transport.is_closing():
            self._transport.abort()

    async def before_send(self, transport: asyncio.Transport, head_first: "_HeadFirst") -> None:
        """Is told of the connection before anything is written to it."""
        self._transport, self._head_first = transport, head_first
        await self._call.reached(Moment.BEFORE_SEND)

    async def sent(self) -> None:
        """Is told once all has been written."""
        await self._call.reached(Moment.SENT)

    async def _once(self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        assert isinstance(request, _Request)
        request.sending = self
        try:
            return await handler(request)
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
            # At these aiohttp would send an idempotent method once more.
            raise _LostError(error) from error


def _streamed(body: bytes | None) -> bytes | io.BytesIO | None:
    """A large body, which aiohttp writes part by part; a small one goes out together with the head."""
    return io.BytesIO(body) if body is not None and len(body) > TOO_LARGE_BYTES_BODY else body


class _Request(aiohttp.ClientRequest):
    """Tells its `Sending` how far it has come."""

    sending: Sending

    async def send(self, conn: Connection) -> aiohttp.ClientResponse:
        """See the base class. Before this, nothing is written; an exception closes the connection."""
        protocol, transport = conn.protocol, conn.transport
        head_first = None if transport is None else transport.get_protocol()
        if isinstance(head_first, _HeadFirst) and _is_stale(conn):
            raise _StaleConnectionError
        if protocol is None or transport is None or transport.is_closing():
            raise aiohttp.ClientConnectionResetError("the connection was closed before anything was sent")
        if not isinstance(head_first, _HeadFirst):
            head_first = _HeadFirst(protocol)
            transport.set_protocol(head_first)
        head_first.expect()
        await self.sending.before_send(transport, head_first)
        response = await super().send(conn)
        if not self.body:
            await self.sending.sent()
        return response

    async def write_bytes(
        self, writer: AbstractStreamWriter, conn: Connection, content_length: int | None = None
    ) -> None:
        """See the base class."""
        await super().write_bytes(writer, conn, content_length)
        await self.sending.sent()


class _HeadFirst(asyncio.Protocol):
    """Hands the head of an answer to aiohttp by itself, and then the rest."""

    def __init__(self, inner: ResponseHandler) -> None:
        self._inner = inner
        self._head: bytearray | None = None
        self._body: aiohttp.StreamReader | None = None

    def expect(self) -> None:
        """The next to come is the head of an answer."""
        self._head = bytearray()
        self._body = None

    def watch(self, body: aiohttp.StreamReader) -> None:
        """Has the body fail with its connection: aiohttp would let its reader wait for more."""
        self._body = body
        self._pass_on()

    def _pass_on(self) -> None:
        error, body = self._inner.exception(), self._body
        if error is not None and body is not None and not body.is_eof() and body.exception() is None:
            body.set_exception(aiohttp.ClientPayloadError(" ".join(getattr(error, "message", str(error)).split())))

    def data_received(self, data: bytes) -> None:
        """See the base class."""
        while self._head is not None:
            before = len(self._head)
            self._head += data
            end = self._head.find(_END_OF_HEAD, max(before - len(_END_OF_HEAD), 0))
            if end < 0:
                break
            size = end + len(_END_OF_HEAD) - before
            interim = self._head.startswith(b"1", _STATUS_AT)
            self._head = bytearray() if interim else None
            self._inner.data_received(data[:size])
            data = data[size:]
        if data and self._inner.exception() is None:
            self._inner.data_received(data)
        self._pass_on()

    def eof_received(self) -> None:
        """See the base class."""
        self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """See the base class."""
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """See the base class."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """See the base class."""
        self._inner.resume_writing()


def _is_stale(connection: Connection) -> bool:
    """Whether an idle connection has been closed by the other side, or spoken on: that would be taken for an answer.

    Of what has come just now only the kernel knows.
    """
    protocol, transport = connection.protocol, connection.transport
    if protocol is None or transport is None or protocol.should_close or transport.is_closing():
        return True
    socket = transport.get_extra_info("socket")
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(socket, select.POLLIN)
        return bool(poll.poll(0))
    return bool(select.select([socket], [], [], 0)[0])


def open_session(tls: ssl.SSLContext) -> aiohttp.ClientSession:
    """A session that follows, keeps, decodes and repeats nothing by itself, and has no bounds but these."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            ssl=tls,
            limit=0,
            keepalive_timeout=_IDLE_SECONDS,
            resolver=aiohttp.ThreadedResolver(),
            use_dns_cache=False,
        ),
        request_class=_Request,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("content-type",),
        max_line_size=_MOST_HEAD_LINE,
        max_field_size=_MOST_HEAD_LINE,
        max_headers=_MOST_HEADERS,
    )


def tls_context() -> ssl.SSLContext:
    """Whom to trust: ``SSL_CERT_FILE``, else ``SSL_CERT_DIR``, else Mozilla's authorities.

    To be made once: it reads every certificate, and takes 30 ms of the loop on which leases are renewed.
    """
    file, folder = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
    if not file and folder:
        context = ssl.create_default_context(capath=folder)
    else:
        context = ssl.create_default_context(cafile=file or certifi.where())
    context.set_alpn_protocols(["http/1.1"])
    return context


def proxy_for(url: URL) -> str | None:
    """The proxy of the environment for a URL: ``HTTP_PROXY``, ``HTTPS_PROXY``, ``ALL_PROXY``, less ``NO_PROXY``.

    Raises:
        aiohttp.ClientConnectionError: there is one, but not of HTTP.
    """
    return _environment_proxy(url.scheme, url.host_subcomponent or "", url.port)


# Asked for every call, and the answer takes a walk through the environment.
@lru_cache(maxsize=1024)
def _environment_proxy(scheme: str, host: str, port: int | None) -> str | None:
    proxies = getproxies()
    proxy = proxies.get(scheme) or proxies.get("all")
    if proxy is None or proxy_bypass(f"{host}:{port}") or proxy_bypass(host.strip("[]")):
        return None
    if "://" not in proxy:
        proxy = f"http://{proxy}"
    if not proxy.startswith(("http://", "https://")):
        # Not the whole of it, which may hold a password.
        raise aiohttp.ClientConnectionError(f"the environment's proxy is not of HTTP but {proxy.partition('://')[0]}")
    return proxy


def wire_url(text: str) -> URL:
    """A URL exactly as it was written, but for what no URL may hold.

    What was percent-encoded stays so: a ``%2F`` or a ``%3B`` means something else than a ``/`` or a ``;``.

    Raises:
        aiohttp.InvalidURL: its host or its port is none.
    """
    try:
        if not text.isascii():
            parts = urlsplit(text)
            text = parts._replace(netloc=URL.build(scheme=parts.scheme, authority=parts.netloc).raw_authority).geturl()
        return URL(quote(text, safe=_AS_WRITTEN), encoded=True)
    except ValueError as error:
        raise aiohttp.InvalidURL(urlsplit(text).netloc, str(error)) from error
