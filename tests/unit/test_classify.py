"""The table of outcomes, row by row, for each kind of tool: what kind of failure, and can the effect have happened."""

from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from activities.classify import Answer, BodyProblem, Success, classify_answer, classify_exception, declare
from activities.wire import PoolTimeoutError, WriteTimeoutError
from contracts.base import Json
from contracts.failures import MAX_MESSAGE_BYTES, Category, Code, Outcome, SideEffect
from contracts.tools import Effect, Idempotency, Rule, Tool

NOW = datetime.now(UTC)
NOTHING = timedelta(0)
LONG_AGO = timedelta(days=400)

Meaning = tuple[Category, SideEffect]

INVALID: Meaning = (Category.INVALID_INPUT, SideEffect.NONE)
PERMISSION: Meaning = (Category.PERMISSION, SideEffect.NONE)
TRANSIENT: Meaning = (Category.TRANSIENT, SideEffect.NONE)
IN_PROGRESS: Meaning = (Category.TRANSIENT, SideEffect.POSSIBLE)
RATE_LIMITED: Meaning = (Category.RATE_LIMITED, SideEffect.NONE)
DOWN: Meaning = (Category.DEPENDENCY_DOWN, SideEffect.NONE)
PERHAPS_DOWN: Meaning = (Category.DEPENDENCY_DOWN, SideEffect.POSSIBLE)
UNKNOWN: Meaning = (Category.UNKNOWN_SIDE_EFFECT, SideEffect.POSSIBLE)
CONFIRMED: Meaning = (Category.UNKNOWN_SIDE_EFFECT, SideEffect.CONFIRMED)
CONFIRMED_AGAIN: Meaning = (Category.TRANSIENT, SideEffect.CONFIRMED)
UNUSABLE_READ: Meaning = (Category.UNKNOWN_SIDE_EFFECT, SideEffect.NONE)


def tool(**settings: Any) -> Tool:
    return Tool(name="t", url="https://tool.example/", **settings)


WRITE = tool()
KEY = tool(idempotency=Idempotency.KEY)
KEY_WITH_WINDOW = tool(idempotency=Idempotency.KEY, dedupe_window="24h")
READ = tool(effect=Effect.READ)
READ_WITH_KEY = tool(effect=Effect.READ, idempotency=Idempotency.KEY)


def answer(
    status: int,
    body: Json = None,
    headers: dict[str, str] | None = None,
    problem: BodyProblem | None = None,
    excerpt: str = "",
) -> Answer:
    return Answer(status, headers or {}, NOW, body=body, problem=problem, excerpt=excerpt)


def understood(kind: Tool, given: Answer, since_first_send: timedelta = NOTHING) -> Success | Outcome:
    """As the entry understands an answer."""
    holds = kind.harmless_to_repeat(since_first_send)
    found = classify_answer(kind, given, dedupes_by_key=holds and kind.idempotency is Idempotency.KEY)
    return declare(found, kind, holds) if isinstance(found, Outcome) else found


def meaning(kind: Tool, given: Answer, since_first_send: timedelta = NOTHING) -> Meaning:
    outcome = understood(kind, given, since_first_send)
    assert isinstance(outcome, Outcome), outcome
    return outcome.category, outcome.side_effect


# A row: the statuses; then what they mean of a tool that writes, of one that dedupes by key, of one that only reads.
STATUSES: list[tuple[list[int], Meaning, Meaning, Meaning]] = [
    (
        [400, 404, 405, 406, 410, 411, 412, 413, 414, 415, 416, 417, 422, 426, 428, 431, 501, 505, 307, 308],
        INVALID,
        INVALID,
        INVALID,
    ),
    ([418, 424, 430, 444, 499], INVALID, INVALID, INVALID),
    ([401, 402, 403, 407, 451], PERMISSION, PERMISSION, PERMISSION),
    ([408, 421, 423, 425], TRANSIENT, TRANSIENT, TRANSIENT),
    ([409], INVALID, IN_PROGRESS, INVALID),
    ([429], RATE_LIMITED, RATE_LIMITED, RATE_LIMITED),
    ([500, 507], UNKNOWN, IN_PROGRESS, TRANSIENT),
    ([502, 503, 504], UNKNOWN, PERHAPS_DOWN, DOWN),
    ([506, 508, 510, 511, 520, 599], UNKNOWN, IN_PROGRESS, TRANSIENT),
    ([300, 301, 302, 303, 304, 305, 306, 399], UNKNOWN, IN_PROGRESS, TRANSIENT),
    ([100, 101, 199, 600, 999], UNKNOWN, IN_PROGRESS, TRANSIENT),
]


@pytest.mark.parametrize(
    ("status", "write", "key", "read"),
    [(status, *meanings) for statuses, *meanings in STATUSES for status in statuses],
)
def test_a_status_means_what_the_table_says(status: int, write: Meaning, key: Meaning, read: Meaning) -> None:
    given = answer(status)
    assert meaning(WRITE, given) == write
    assert meaning(KEY, given, LONG_AGO) == key
    assert meaning(KEY_WITH_WINDOW, given) == key
    # Outside its window it is a tool like any other.
    assert meaning(KEY_WITH_WINDOW, given, LONG_AGO) == write
    assert meaning(READ, given, LONG_AGO) == read


def test_every_status_means_something_and_no_4xx_but_409_has_had_an_effect() -> None:
    for status in range(100, 1000):
        for kind in (WRITE, KEY, READ, READ_WITH_KEY):
            outcome = understood(kind, answer(status))
            assert isinstance(outcome, Success) == (200 <= status < 300)
            if isinstance(outcome, Outcome):
                assert outcome.http_status == status
                assert outcome.code == f"http_{status}"
                if kind.effect is Effect.READ or (400 <= status < 500 and status != 409):
                    assert outcome.side_effect is SideEffect.NONE


@pytest.mark.parametrize("since_first_send", [NOTHING, LONG_AGO])
def test_a_read_with_a_key_is_a_read(since_first_send: timedelta) -> None:
    assert meaning(READ_WITH_KEY, answer(500), since_first_send) == TRANSIENT
    assert meaning(READ_WITH_KEY, answer(409), since_first_send) == TRANSIENT


@pytest.mark.parametrize(
    ("kind", "since_first_send", "harmless"),
    [
        (WRITE, NOTHING, False),
        (KEY, LONG_AGO, True),
        (KEY_WITH_WINDOW, NOTHING, True),
        (KEY_WITH_WINDOW, timedelta(hours=23), True),
        (KEY_WITH_WINDOW, timedelta(hours=24), False),
        (READ, LONG_AGO, True),
    ],
)
def test_repeating_is_harmless_for_a_read_and_inside_the_window_of_a_key(
    kind: Tool, since_first_send: timedelta, harmless: bool
) -> None:
    assert kind.harmless_to_repeat(since_first_send) == harmless


# 503 and whoever says when to come back.


@pytest.mark.parametrize("wait", ["30", "0", "Fri, 31 Dec 2100 23:59:59 GMT"])
@pytest.mark.parametrize("kind", [WRITE, KEY, READ])
def test_a_503_that_says_when_to_come_back_has_turned_the_request_away(kind: Tool, wait: str) -> None:
    assert meaning(kind, answer(503, headers={"retry-after": wait})) == DOWN


@pytest.mark.parametrize(
    "headers",
    [{"retry-after": "soon"}, {"retry-after": "-1"}, {"ratelimit-reset": "30"}, {"ratelimit": '"default";r=0;t=30'}],
)
def test_a_503_that_does_not_say_so_readably_may_have_acted(headers: dict[str, str]) -> None:
    assert meaning(WRITE, answer(503, headers=headers)) == UNKNOWN


@pytest.mark.parametrize("status", [500, 502, 504])
def test_no_other_status_is_harmless_because_of_retry_after(status: int) -> None:
    assert meaning(WRITE, answer(status, headers={"retry-after": "30"})) == UNKNOWN


@pytest.mark.parametrize(
    ("status", "headers", "wait"),
    [
        (429, {"retry-after": "30"}, 30),
        (429, {"retry-after": "0"}, 0),
        (503, {"retry-after": "30"}, 30),
        (408, {"retry-after": "30"}, 30),
        (429, {"ratelimit-reset": "30"}, 30),
        (429, {"retry-after": "5", "ratelimit-reset": "30"}, 5),
        (429, {"retry-after": "0", "ratelimit-reset": "30"}, 0),
        (429, {}, None),
        (429, {"retry-after": "soon"}, None),
        # A gateway may stamp these on every answer.
        (500, {"ratelimit-reset": "90000"}, None),
        (403, {"ratelimit-reset": "90000"}, None),
    ],
)
def test_what_the_tool_asks_for_goes_along(status: int, headers: dict[str, str], wait: int | None) -> None:
    outcome = understood(KEY, answer(status, headers=headers))
    assert isinstance(outcome, Outcome)
    assert outcome.retry_after == (None if wait is None else timedelta(seconds=wait))


# 2xx.


@pytest.mark.parametrize("status", [200, 201, 202, 204, 206, 299])
@pytest.mark.parametrize("body", [{"id": 1}, [], None, "text", 0, False])
def test_a_2xx_with_a_readable_body_is_a_success(status: int, body: Json) -> None:
    for kind in (WRITE, KEY, READ):
        assert understood(kind, answer(status, body)) == Success(output=body)


LOST = BodyProblem(Code.RESULT_LOST, "HTTP 200, but its body was lost")
TOO_LARGE = BodyProblem(Code.RESULT_UNUSABLE, "HTTP 200, but its body is larger than max_response_bytes")


def test_a_2xx_whose_body_was_lost_has_happened() -> None:
    given = answer(200, problem=LOST)
    assert meaning(WRITE, given) == CONFIRMED
    assert meaning(KEY, given) == CONFIRMED_AGAIN
    assert meaning(KEY_WITH_WINDOW, given, LONG_AGO) == CONFIRMED
    assert meaning(READ, given) == TRANSIENT
    outcome = understood(WRITE, given)
    assert isinstance(outcome, Outcome)
    assert (outcome.code, outcome.http_status) == (Code.RESULT_LOST, 200)


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ({}, answer(200, problem=TOO_LARGE)),
        ({}, answer(200, "x" * (1024 * 1024 + 1))),
        ({"output_schema": {"type": "object", "required": ["id"]}}, answer(200, {"ID": 1})),
        ({"output_schema": {"type": "object"}}, answer(204)),
        ({"output_schema": False}, answer(201, {})),
    ],
    ids=["larger than the tool allows", "larger than any output", "breaks the schema", "empty", "never"],
)
def test_a_2xx_with_an_unusable_result_is_never_repeated_by_itself_whatever_the_tool(
    settings: dict[str, Any], given: Answer
) -> None:
    for kind, expected in (
        ({}, CONFIRMED),
        ({"idempotency": "key"}, CONFIRMED),
        ({"effect": "read"}, UNUSABLE_READ),
    ):
        outcome = understood(tool(**settings, **kind), given)
        assert isinstance(outcome, Outcome)
        assert (outcome.category, outcome.side_effect, outcome.code) == (*expected, Code.RESULT_UNUSABLE)
        assert len(outcome.message.encode()) <= MAX_MESSAGE_BYTES


# What aiohttp raises.

REQUEST = aiohttp.RequestInfo(URL("http://tool/x?input=private"), "POST", CIMultiDictProxy(CIMultiDict[str]()))
KEY_OF_CONNECTION = ConnectionKey("tool", 80, False, True, None, None, None, None)
CANNOT_CONNECT = aiohttp.ClientConnectorError(KEY_OF_CONNECTION, OSError(111, "refused"))

SENT: list[tuple[aiohttp.ClientError, Code]] = [
    (aiohttp.SocketTimeoutError("x"), Code.READ_TIMEOUT),
    (WriteTimeoutError("x"), Code.WRITE_TIMEOUT),
    (aiohttp.ClientOSError(104, "reset"), Code.CONNECTION_LOST),
    (aiohttp.ClientConnectionResetError("x"), Code.CONNECTION_LOST),
    (aiohttp.ClientConnectionError("x"), Code.CONNECTION_LOST),
    (aiohttp.ServerDisconnectedError(), Code.PROTOCOL_ERROR),
    (aiohttp.ClientResponseError(REQUEST, (), status=400, message="Expected HTTP/"), Code.PROTOCOL_ERROR),
    (aiohttp.ClientPayloadError("x"), Code.PROTOCOL_ERROR),
    (aiohttp.ClientHttpProxyError(REQUEST, (), status=403), Code.PROTOCOL_ERROR),
]


@pytest.mark.parametrize(("error", "code"), SENT, ids=lambda value: type(value).__name__)
def test_what_breaks_after_bytes_may_have_gone_may_have_had_its_effect(error: aiohttp.ClientError, code: Code) -> None:
    bare = classify_exception(error, sent=True)
    assert (bare.category, bare.side_effect, bare.code) == (*UNKNOWN, code)
    for kind, holds, expected in (
        (WRITE, False, UNKNOWN),
        (KEY, True, IN_PROGRESS),
        (KEY, False, UNKNOWN),
        (READ, True, TRANSIENT),
    ):
        outcome = declare(bare, kind, holds)
        assert (outcome.category, outcome.side_effect) == expected


@pytest.mark.parametrize("error", [error for error, _ in SENT], ids=lambda value: type(value).__name__)
def test_what_breaks_before_the_first_byte_has_had_no_effect(error: aiohttp.ClientError) -> None:
    outcome = classify_exception(error, sent=False)
    assert (outcome.category, outcome.side_effect) == DOWN


@pytest.mark.parametrize(
    ("error", "expected", "code"),
    [
        (CANNOT_CONNECT, DOWN, Code.CONNECT_FAILED),
        (aiohttp.ConnectionTimeoutError("x"), DOWN, Code.CONNECT_TIMEOUT),
        (PoolTimeoutError("x"), TRANSIENT, Code.POOL_EXHAUSTED),
    ],
)
@pytest.mark.parametrize("kind", [WRITE, KEY, READ])
def test_what_never_left_has_had_no_effect(
    kind: Tool, error: aiohttp.ClientError, expected: Meaning, code: Code
) -> None:
    outcome = declare(classify_exception(error, sent=False), kind, True)
    assert (outcome.category, outcome.side_effect, outcome.code) == (*expected, code)


@pytest.mark.parametrize("error", [aiohttp.SocketTimeoutError(""), aiohttp.ClientError("é" * 5000)])
def test_every_failure_says_something_and_not_too_much(error: aiohttp.ClientError) -> None:
    message = classify_exception(error, sent=True).message
    assert len(message) > 10
    assert len(message.encode()) <= MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    "error", [error for error, _ in SENT] + [CANNOT_CONNECT], ids=lambda value: type(value).__name__
)
def test_no_failure_quotes_the_url_which_holds_what_the_input_held(error: aiohttp.ClientError) -> None:
    assert "private" not in classify_exception(error, sent=True).message


def test_a_failure_quotes_the_beginning_of_the_answer() -> None:
    outcome = understood(WRITE, answer(403, excerpt="card limit reached"))
    assert isinstance(outcome, Outcome)
    assert outcome.message == "HTTP 403 Forbidden: card limit reached"
    unheard_of = understood(WRITE, answer(499))
    assert isinstance(unheard_of, Outcome)
    assert unheard_of.message == "HTTP 499"


# A tool's own rules.


def ruled(*rules: dict[str, Any], **settings: Any) -> Tool:
    return tool(rules=[Rule(**rule) for rule in rules], **settings)


@pytest.mark.parametrize(
    ("rule", "matching", "other"),
    [
        ({"status": 409}, answer(409), answer(410)),
        ({"status": "4xx"}, answer(499), answer(500)),
        ({"status": "2xx"}, answer(202), answer(302)),
        (
            {"header": "X-Error", "equals": "quota"},
            answer(200, headers={"x-error": "quota"}),
            answer(200, headers={"x-error": "other"}),
        ),
        ({"header": "x-error", "equals": ""}, answer(400, headers={"x-error": ""}), answer(400)),
        ({"pointer": "/ok", "equals": False}, answer(200, {"ok": False}), answer(200, {"ok": True})),
        ({"pointer": "/ok", "equals": False}, answer(200, {"ok": False}), answer(200, {"ok": 0})),
        ({"pointer": "/ok", "equals": 1}, answer(200, {"ok": 1}), answer(200, {"ok": True})),
        ({"pointer": "/ok", "equals": 1}, answer(200, {"ok": 1.0}), answer(200, {"ok": "1"})),
        ({"pointer": "/ok", "equals": [0]}, answer(200, {"ok": [0]}), answer(200, {"ok": [False]})),
        ({"pointer": "/ok", "equals": None}, answer(200, {"ok": None}), answer(200, {})),
        ({"pointer": "/errors/0/code", "equals": "x"}, answer(200, {"errors": [{"code": "x"}]}), answer(200, [])),
        ({"pointer": "", "equals": "ERROR"}, answer(200, "ERROR"), answer(200, ["ERROR"])),
        ({"pointer": "/-", "equals": None}, answer(200, {"-": None}), answer(200, [])),
        ({"pointer": "/a", "equals": 1}, answer(200, {"a": 1}), answer(200, problem=LOST)),
        (
            {"status": 200, "pointer": "/ok", "equals": False},
            answer(200, {"ok": False}),
            answer(201, {"ok": False}),
        ),
    ],
)
def test_a_rule_matches_what_it_says_and_nothing_else(rule: dict[str, Any], matching: Answer, other: Answer) -> None:
    kind = ruled(rule | {"category": "PERMISSION", "side_effect": "NONE"})
    outcome = understood(kind, matching)
    assert isinstance(outcome, Outcome)
    assert (outcome.category, outcome.side_effect) == PERMISSION
    outcome = understood(kind, other)
    assert isinstance(outcome, Success) or outcome.category is not Category.PERMISSION


def test_the_first_rule_that_matches_wins() -> None:
    kind = ruled(
        {"status": 409, "header": "x-why", "equals": "limit", "category": "RATE_LIMITED"},
        {"status": 409, "category": "TRANSIENT", "side_effect": "NONE"},
        {"status": "4xx", "category": "PERMISSION"},
    )
    assert meaning(kind, answer(409, headers={"x-why": "limit"}))[0] is Category.RATE_LIMITED
    assert meaning(kind, answer(409)) == TRANSIENT
    assert meaning(kind, answer(404)) == PERMISSION
    assert meaning(kind, answer(500)) == UNKNOWN


@pytest.mark.parametrize(
    ("status", "side_effect"),
    [(200, SideEffect.CONFIRMED), (404, SideEffect.NONE), (500, SideEffect.POSSIBLE), (302, SideEffect.POSSIBLE)],
)
def test_a_rule_without_a_side_effect_leaves_it_to_the_table(status: int, side_effect: SideEffect) -> None:
    kind = ruled({"status": status, "category": "INVALID_INPUT"})
    assert meaning(kind, answer(status)) == (Category.INVALID_INPUT, side_effect)


def test_a_success_by_rule_takes_the_body_for_its_result() -> None:
    kind = ruled({"status": 409, "category": "SUCCESS"}, output_schema={"required": ["id"]})
    assert understood(kind, answer(409, {"id": 1})) == Success(output={"id": 1})
    assert meaning(kind, answer(409, {})) == CONFIRMED
    assert meaning(kind, answer(409, problem=LOST)) == CONFIRMED


def test_what_a_tool_declares_holds_for_its_rules_too() -> None:
    rule = {"status": 200, "pointer": "/ok", "equals": False, "category": "UNKNOWN_SIDE_EFFECT"}
    given = answer(200, {"ok": False})
    assert meaning(ruled(rule), given) == CONFIRMED
    assert meaning(ruled(rule, idempotency="key"), given) == CONFIRMED_AGAIN
    assert meaning(ruled(rule, effect="read"), given) == TRANSIENT


def test_a_rate_limit_by_rule_waits_for_what_the_tool_asks() -> None:
    kind = ruled({"status": 403, "category": "RATE_LIMITED", "side_effect": "NONE"})
    outcome = understood(kind, answer(403, headers={"ratelimit-reset": "7"}))
    assert isinstance(outcome, Outcome)
    assert outcome.retry_after == timedelta(seconds=7)
