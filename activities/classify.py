"""What an outcome means: the classification table of the semantics, pure.

What aiohttp raises stands in the second table; it counts as an effect only if bytes may have gone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Final

import aiohttp

from activities.retry_after import rate_limit_reset, retry_after
from activities.wire import PoolTimeoutError, WriteTimeoutError
from contracts.base import Json
from contracts.canonical import json_size, same_json
from contracts.failures import Category, Code, Outcome, SideEffect, clip_message
from contracts.limits import INLINE
from contracts.pointers import at_pointer
from contracts.schemas import schema_problems
from contracts.tools import Effect, Idempotency, Meaning, Rule, Tool

__all__ = ["Answer", "BodyProblem", "Success", "classify_answer", "classify_exception", "declare"]

_INVALID: Final = (Category.INVALID_INPUT, SideEffect.NONE)
_PERMISSION: Final = (Category.PERMISSION, SideEffect.NONE)
_TRANSIENT: Final = (Category.TRANSIENT, SideEffect.NONE)
_UNKNOWN: Final = (Category.UNKNOWN_SIDE_EFFECT, SideEffect.POSSIBLE)

_STATUSES: Final[Mapping[int, tuple[Category, SideEffect]]] = {
    401: _PERMISSION,
    402: _PERMISSION,
    403: _PERMISSION,
    407: _PERMISSION,
    451: _PERMISSION,
    408: _TRANSIENT,
    421: _TRANSIENT,
    423: _TRANSIENT,
    425: _TRANSIENT,
    429: (Category.RATE_LIMITED, SideEffect.NONE),
    # The method or the version is not implemented: nothing was done.
    501: _INVALID,
    505: _INVALID,
    307: _INVALID,
    308: _INVALID,
}
"""The statuses that differ from their class."""

_CLASSES: Final[Mapping[int, tuple[Category, SideEffect]]] = {
    1: _UNKNOWN,
    3: _UNKNOWN,
    4: _INVALID,
    5: _UNKNOWN,
}

_GATEWAY_STATUSES: Final = (502, 503, 504)

_NOT_SENT: Final = (Category.DEPENDENCY_DOWN, SideEffect.NONE)

_EXCEPTIONS: Final[tuple[tuple[type[aiohttp.ClientError], tuple[Category, SideEffect], Code], ...]] = (
    (PoolTimeoutError, _TRANSIENT, Code.POOL_EXHAUSTED),
    (aiohttp.ConnectionTimeoutError, _NOT_SENT, Code.CONNECT_TIMEOUT),
    (aiohttp.ClientConnectorError, _NOT_SENT, Code.CONNECT_FAILED),
    (aiohttp.SocketTimeoutError, _UNKNOWN, Code.READ_TIMEOUT),
    (WriteTimeoutError, _UNKNOWN, Code.WRITE_TIMEOUT),
    (aiohttp.ServerDisconnectedError, _UNKNOWN, Code.PROTOCOL_ERROR),
    (aiohttp.ClientConnectionError, _UNKNOWN, Code.CONNECTION_LOST),
)
"""First match wins; a subclass stands before its base. Whatever else there is says that HTTP was broken."""


@dataclass(frozen=True, slots=True)
class BodyProblem:
    """Why an answer's body is not the JSON value it should be."""

    code: Code
    message: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A tool's answer: its head, and what could be read of its body.

    Attributes:
        status: The status, which counts whatever became of the body.
        headers: Names in lower case.
        received_at: When the head came, aware.
        body: The JSON value; None for an empty body.
        problem: Why there is no value.
        excerpt: The beginning of the body as text, for people.
    """

    status: int
    headers: Mapping[str, str]
    received_at: datetime
    body: Json = None
    problem: BodyProblem | None = None
    excerpt: str = ""

    @property
    def retry_after(self) -> timedelta | None:
        """How long the tool asks to be left alone."""
        return retry_after(self.headers, self.received_at)

    @property
    def rate_limit_reset(self) -> timedelta | None:
        """When the tool's rate limit begins anew."""
        return rate_limit_reset(self.headers)


@dataclass(frozen=True, slots=True)
class Success:
    """The effect has happened, and this is its result."""

    output: Json


def classify_answer(
    tool: Tool, answer: Answer, dedupes_by_key: bool, largest: int = INLINE.output
) -> Success | Outcome:
    """What an answer means.

    Args:
        tool: The tool.
        answer: Its answer.
        dedupes_by_key: Whether the tool dedupes by key, inside its window.
        largest: How many bytes a result may have.
    """
    for rule in tool.rules:
        if _matches(rule, answer):
            if rule.category is Meaning.SUCCESS:
                return _success(tool, answer, largest)
            by_table = _by_table(answer, dedupes_by_key)[1]
            return _outcome(answer, Category(rule.category), rule.side_effect or by_table)
    if HTTPStatus.OK <= answer.status < HTTPStatus.MULTIPLE_CHOICES:
        return _success(tool, answer, largest)
    return _outcome(answer, *_by_table(answer, dedupes_by_key))


def classify_exception(error: aiohttp.ClientError, sent: bool) -> Outcome:
    """What it means that a call raised instead of answering.

    Args:
        error: What was raised.
        sent: Whether bytes of the request may have gone.
    """
    found = ((meaning, code) for kind, meaning, code in _EXCEPTIONS if isinstance(error, kind))
    (category, side_effect), code = next(found, (_UNKNOWN, Code.PROTOCOL_ERROR))
    if not sent and side_effect is not SideEffect.NONE:
        category, side_effect = _NOT_SENT
        code = Code.CONNECT_TIMEOUT if isinstance(error, aiohttp.ServerTimeoutError) else Code.CONNECT_FAILED
    return Outcome(
        category=category,
        code=code,
        message=clip_message(f"{code.replace('_', ' ')}: {_said(error)}"),
        side_effect=side_effect,
    )


def declare(outcome: Outcome, tool: Tool, window_holds: bool) -> Outcome:
    """Applies what a tool declares of itself: a read has no effect, and what is safe to repeat is retried."""
    reads = tool.effect is Effect.READ
    dedupes = tool.idempotency is Idempotency.KEY and window_holds
    category = outcome.category
    if category is Category.UNKNOWN_SIDE_EFFECT and (reads or dedupes) and outcome.code != Code.RESULT_UNUSABLE:
        gateway = outcome.http_status in _GATEWAY_STATUSES
        category = Category.DEPENDENCY_DOWN if gateway else Category.TRANSIENT
    side_effect = SideEffect.NONE if reads else outcome.side_effect
    return outcome.model_copy(update={"category": category, "side_effect": side_effect})


def _said(error: aiohttp.ClientError) -> str:
    match error:
        case aiohttp.ServerDisconnectedError():
            # Its text may be as much of an answer's head as had come.
            return "the server disconnected without an answer"
        case aiohttp.ClientResponseError():
            # Its text holds the URL, and that what an input held.
            return " ".join(error.message.split()) or type(error).__name__
        case _:
            return str(error) or type(error).__name__


def _by_table(answer: Answer, dedupes_by_key: bool) -> tuple[Category, SideEffect]:
    status = answer.status
    if status == HTTPStatus.CONFLICT and dedupes_by_key:
        # The same key is in progress, or done under another payload.
        return Category.TRANSIENT, SideEffect.POSSIBLE
    if status == HTTPStatus.SERVICE_UNAVAILABLE and answer.retry_after is not None:
        # Whoever says when to come back has turned the request away himself.
        return Category.DEPENDENCY_DOWN, SideEffect.NONE
    if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
        return Category.UNKNOWN_SIDE_EFFECT, SideEffect.CONFIRMED
    return _STATUSES.get(status) or _CLASSES.get(status // 100, _UNKNOWN)


def _success(tool: Tool, answer: Answer, largest: int) -> Success | Outcome:
    if answer.problem is not None:
        return Outcome(
            category=Category.UNKNOWN_SIDE_EFFECT,
            code=answer.problem.code,
            message=clip_message(answer.problem.message),
            side_effect=SideEffect.CONFIRMED,
            http_status=answer.status,
        )
    problem = None
    if (size := json_size(answer.body)) > largest:
        problem = f"the result has {size} bytes; {largest} are allowed"
    elif problems := schema_problems(tool.output_schema, answer.body, "output"):
        problem = "the result breaks output_schema: " + "; ".join(problems)
    if problem is None:
        return Success(output=answer.body)
    return Outcome(
        category=Category.UNKNOWN_SIDE_EFFECT,
        code=Code.RESULT_UNUSABLE,
        message=clip_message(problem),
        side_effect=SideEffect.CONFIRMED,
        http_status=answer.status,
    )


def _outcome(answer: Answer, category: Category, side_effect: SideEffect) -> Outcome:
    try:
        phrase = HTTPStatus(answer.status).phrase
    except ValueError:
        phrase = ""
    message = f"HTTP {answer.status} {phrase}".rstrip()
    if answer.excerpt:
        message += f": {answer.excerpt}"
    wait = answer.retry_after
    if wait is None and category is Category.RATE_LIMITED:
        # A gateway may stamp these fields on every answer; they are about this one only where it was limited.
        wait = answer.rate_limit_reset
    return Outcome(
        category=category,
        code=f"http_{answer.status}",
        message=clip_message(message),
        side_effect=side_effect,
        http_status=answer.status,
        retry_after=wait,
    )


def _matches(rule: Rule, answer: Answer) -> bool:
    if isinstance(rule.status, int) and rule.status != answer.status:
        return False
    if isinstance(rule.status, str) and rule.status[0] != str(answer.status)[0]:
        return False
    if rule.header is not None:
        return answer.headers.get(rule.header.lower()) == rule.equals
    if rule.pointer is not None:
        return answer.problem is None and _equals_at(answer.body, rule.pointer, rule.equals)
    return True


def _equals_at(body: Json, pointer: str, expected: Json) -> bool:
    try:
        found = at_pointer(body, pointer)
    except LookupError:
        return False
    return same_json(found, expected)
