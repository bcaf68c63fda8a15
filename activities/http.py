"""The HTTP layer: pooled clients, one whole attempt, and the moment from which bytes may have gone."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Any, Final

import httpx

from activities.classify import Answer, BodyProblem
from activities.secrets import Secrets
from contracts.base import Json
from contracts.canonical import json_problem
from contracts.failures import Code
from contracts.tools import Tool

__all__ = ["Call", "HttpClients", "NotSentError", "parse_json"]

_CONNECT_SECONDS: Final = 10.0
_POOL_SECONDS: Final = 5.0
_EXCERPT: Final = 500
_USER_AGENT: Final = f"redrive/{version('redrive')}"


class NotSentError(Exception):
    """The call was called off before its first byte."""

    def __init__(self, code: Code, message: str) -> None:
        self.code = code
        super().__init__(message)


class Call:
    """One call on the wire: how far it has come, and above all whether bytes may have gone."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._overdue: type[httpx.TimeoutException] = httpx.PoolTimeout
        self.sent = False

    def timed_out(self, limit: timedelta) -> httpx.TimeoutException:
        """What it means that the whole attempt has taken too long just now."""
        return self._overdue(f"the attempt was not over within {limit.total_seconds():g} s")

    async def trace(self, event: str, _info: Mapping[str, Any]) -> None:
        """Is httpcore's trace hook: the last thing before the first byte is to ask whether it may go.

        After pool and connect waits, which is why it cannot be asked earlier
        (https://www.encode.io/httpcore/extensions/#trace).
        """
        if event.endswith("send_request_headers.started"):
            if not self.sent:
                self._check()
            self.sent = True
            self._overdue = httpx.WriteTimeout
        elif event.endswith("send_request_body.complete"):
            self._overdue = httpx.ReadTimeout
        elif not self.sent:
            self._overdue = httpx.ConnectTimeout


class HttpClients:
    """A pooled client for each tool, so that one slow tool does not take another's connections."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._clients: dict[str, httpx.AsyncClient] = {}

    async def send(
        self, tool: Tool, method: str, url: str, headers: Mapping[str, str], body: bytes | None, call: Call
    ) -> Answer:
        """Sends one request and reads its answer, all within the tool's ``timeout``.

        The status counts from the moment its head is there, whatever becomes of the body.

        Raises:
            httpx.HTTPError: as httpx says; ``call`` tells whether bytes may have gone.
            NotSentError: the call's check forbade it.
        """
        client = self._client(tool)
        request = client.build_request(
            method,
            url,
            headers={**headers, **self._secrets.headers(tool)},
            content=body,
            extensions={"trace": call.trace},
        )
        if body is not None:
            request.headers["content-type"] = "application/json"
        answer: Answer | None = None
        try:
            async with asyncio.timeout(tool.timeout.total_seconds()):
                response = await client.send(request, stream=True)
                head = Answer(
                    status=response.status_code,
                    headers={name.lower(): value for name, value in response.headers.items()},
                    received_at=datetime.now(UTC),
                )
                answer = head
                try:
                    answer = await self._read(tool, head, response)
                finally:
                    await response.aclose()
        except (httpx.HTTPError, httpx.StreamError, TimeoutError) as error:
            if answer is None and isinstance(error, TimeoutError):
                raise call.timed_out(tool.timeout) from error
            if answer is None:
                raise
            problem = BodyProblem(
                Code.RESULT_LOST, f"HTTP {answer.status}, but its body was lost: {self._secrets.redact(_reason(error))}"
            )
            return _with_problem(answer, problem)
        return answer

    async def _read(self, tool: Tool, head: Answer, response: httpx.Response) -> Answer:
        content = bytearray()
        async for chunk in response.aiter_bytes():
            content += chunk
            if len(content) > tool.max_response_bytes:
                problem = BodyProblem(
                    Code.RESULT_UNUSABLE,
                    f"HTTP {head.status}, but its body is larger than max_response_bytes ({tool.max_response_bytes})",
                )
                return _with_problem(head, problem, self._excerpt(content, cut=True))
        excerpt = self._excerpt(content)
        if not content:
            return _with_body(head, None, "")
        try:
            return _with_body(head, self._secrets.redact_json(parse_json(bytes(content))), excerpt)
        except ValueError as error:
            problem = BodyProblem(Code.RESULT_LOST, f"HTTP {head.status}, but its body is not JSON: {error}")
            return _with_problem(head, problem, excerpt)

    def _excerpt(self, content: bytes | bytearray, cut: bool = False) -> str:
        # Redacted before it is shortened; what was cut before may end in the first half of a secret, in any spelling.
        text = self._secrets.redact(bytes(content[: 64 * _EXCERPT]).decode("utf-8", "replace"))
        if cut or len(content) > 64 * _EXCERPT:
            text = text[: -6 * self._secrets.longest or None]
        return " ".join(text.split())[:_EXCERPT]

    def _client(self, tool: Tool) -> httpx.AsyncClient:
        if tool.name not in self._clients:
            seconds = tool.timeout.total_seconds()
            self._clients[tool.name] = httpx.AsyncClient(
                follow_redirects=False,
                headers={"user-agent": _USER_AGENT, "accept": "application/json"},
                limits=httpx.Limits(max_connections=tool.concurrency, max_keepalive_connections=tool.concurrency),
                timeout=httpx.Timeout(seconds, connect=min(_CONNECT_SECONDS, seconds), pool=_POOL_SECONDS),
            )
        return self._clients[tool.name]

    async def close(self) -> None:
        """Closes every connection."""
        closing: list[Awaitable[None]] = [client.aclose() for client in self._clients.values()]
        await asyncio.gather(*closing)


def parse_json(content: bytes) -> Json:
    """A JSON text (RFC 8259), strictly: UTF-8, no NaN, not nested beyond reason.

    Raises:
        ValueError: what is wrong with it.
    """
    try:
        value: Json = json.loads(content.decode("utf-8"), parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if problem := json_problem(value):
        raise ValueError(problem)
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _with_body(head: Answer, body: Json, excerpt: str) -> Answer:
    return Answer(head.status, head.headers, head.received_at, body=body, excerpt=excerpt)


def _with_problem(head: Answer, problem: BodyProblem, excerpt: str = "") -> Answer:
    return Answer(head.status, head.headers, head.received_at, problem=problem, excerpt=excerpt)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
