"""The HTTP layer: pooled connections, and one whole attempt from the first wait to the last byte of the answer."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Final

import aiohttp

from activities.bodies import ACCEPT_ENCODING, TooLargeError, receive
from activities.classify import Answer, BodyProblem
from activities.secrets import Secrets
from activities.wire import Call, Moment, NotSentError, PoolTimeoutError, Sending, open_session, tls_context, wire_url
from contracts.base import Json
from contracts.canonical import json_problem
from contracts.failures import Code
from contracts.tools import Tool

__all__ = ["Call", "HttpClients", "NotSentError", "parse_json"]

_CONNECT_SECONDS: Final = 10.0
_POOL_SECONDS: Final = 5.0
_EXCERPT: Final = 500
_SMALL: Final = 16_384
"""Bytes of a body that is read in less time than a thread is found for it."""
_HEADERS: Final = {
    "user-agent": f"redrive/{version('redrive')}",
    "accept": "application/json",
    "accept-encoding": ACCEPT_ENCODING,
}


class HttpClients:
    """Calls the tools; to be made in a running event loop.

    Each may have as many connections as its ``concurrency`` says, so that one slow tool does not take another's.
    """

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._tls = tls_context()
        # One for each tool: what becomes of one's connections is no other's concern, even at the same host.
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self._places: dict[str, asyncio.Semaphore] = {}

    async def send(
        self, tool: Tool, method: str, url: str, headers: Mapping[str, str], body: bytes | None, call: Call
    ) -> Answer:
        """Sends one request and reads its answer, all within the tool's ``timeout``.

        The status counts from the moment its head is there, whatever becomes of the body.

        Raises:
            aiohttp.ClientError: as aiohttp says; ``call`` tells whether bytes may have gone.
            NotSentError: the call's check forbade it.
        """
        fields = {**_HEADERS, **headers, **self._secrets.headers(tool)}
        if body is not None:
            fields["content-type"] = "application/json"
        connect_seconds = min(_CONNECT_SECONDS, tool.timeout.total_seconds())
        place = await self._place(tool, call)
        sending = Sending(call)
        answer: Answer | None = None
        try:
            async with asyncio.timeout(call.seconds_left):
                response = await sending.request(
                    self._session(tool), method, wire_url(url), fields, body, connect_seconds
                )
                answer = Answer(
                    status=response.status, headers=_joined(response.headers.items()), received_at=datetime.now(UTC)
                )
                try:
                    await call.reached(Moment.HEADERS)
                    content = await receive(response, tool.max_response_bytes)
                    await call.reached(Moment.BODY)
                finally:
                    response.close()
        except (aiohttp.ClientError, TimeoutError) as error:
            if answer is None and not isinstance(error, aiohttp.ClientError):
                raise call.timed_out(tool.timeout) from error
            if answer is None:
                raise
            reason = self._secrets.redact(_reason(error, tool))
            problem = BodyProblem(Code.RESULT_LOST, f"HTTP {answer.status}, but its body was lost: {reason}")
            return _with_problem(answer, problem)
        except TooLargeError as error:
            assert answer is not None
            problem = BodyProblem(
                Code.RESULT_UNUSABLE,
                f"HTTP {answer.status}, but its body is larger than max_response_bytes ({tool.max_response_bytes})",
            )
            return _with_problem(answer, problem, self._excerpt(error.beginning, cut=True))
        finally:
            sending.drop()
            place.release()
        if len(content) <= _SMALL:
            return self._read(answer, content)
        # In a thread: a large body takes seconds, and heartbeats and leases must not wait for it.
        return await asyncio.to_thread(self._read, answer, content)

    def _session(self, tool: Tool) -> aiohttp.ClientSession:
        if tool.name not in self._sessions:
            self._sessions[tool.name] = open_session(self._tls)
        return self._sessions[tool.name]

    async def _place(self, tool: Tool, call: Call) -> asyncio.Semaphore:
        """Takes one of the tool's places, which is to be released."""
        places = self._places.setdefault(tool.name, asyncio.Semaphore(tool.concurrency))
        if not places.locked():
            await places.acquire()
            return places
        try:
            async with asyncio.timeout(min(_POOL_SECONDS, call.seconds_left)):
                await places.acquire()
        except TimeoutError as error:
            raise PoolTimeoutError("all connections that there may be to the tool were taken") from error
        return places

    def _read(self, head: Answer, content: bytes) -> Answer:
        if not content:
            return _with_body(head, None, "")
        excerpt = self._excerpt(content)
        try:
            return _with_body(head, self._secrets.redact_json(parse_json(content)), excerpt)
        except ValueError as error:
            problem = BodyProblem(Code.RESULT_LOST, f"HTTP {head.status}, but its body is not JSON: {error}")
            return _with_problem(head, problem, excerpt)

    def _excerpt(self, content: bytes, cut: bool = False) -> str:
        # Redacted before it is shortened; what was cut before may end in the first half of a secret, in any spelling.
        text = self._secrets.redact(content[: 64 * _EXCERPT].decode("utf-8", "replace"))
        if cut or len(content) > 64 * _EXCERPT:
            text = text[: -6 * self._secrets.longest or None]
        return " ".join(text.split())[:_EXCERPT]

    async def close(self) -> None:
        """Closes every connection."""
        await asyncio.gather(*(session.close() for session in self._sessions.values()))


def parse_json(content: bytes) -> Json:
    """A JSON text (RFC 8259), strictly: UTF-8, no NaN, not nested beyond reason.

    Raises:
        ValueError: what is wrong with it.
    """
    try:
        value: Json = _STRICT.decode(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if problem := json_problem(value):
        raise ValueError(problem)
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_STRICT: Final = json.JSONDecoder(parse_constant=_no_constant)


def _joined(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Names in lower case; a repeated header as one (RFC 9110 section 5.3)."""
    joined: dict[str, str] = {}
    for name, value in headers:
        field = name.lower()
        joined[field] = f"{joined[field]}, {value}" if field in joined else value
    return joined


def _with_body(head: Answer, body: Json, excerpt: str) -> Answer:
    return Answer(head.status, head.headers, head.received_at, body=body, excerpt=excerpt)


def _with_problem(head: Answer, problem: BodyProblem, excerpt: str = "") -> Answer:
    return Answer(head.status, head.headers, head.received_at, problem=problem, excerpt=excerpt)


def _reason(error: Exception, tool: Tool) -> str:
    if isinstance(error, TimeoutError):
        return f"it was not whole within {tool.timeout.total_seconds():g} s"
    return str(error) or type(error).__name__
