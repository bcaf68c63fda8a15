"""``Retry-After`` and the RateLimit fields, as they should be, and as they are seen."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from activities.retry_after import rate_limit_reset, retry_after

NOW = datetime(1994, 11, 6, 8, 49, 37, tzinfo=UTC)
"""The moment of RFC 9110's own examples."""


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0),
        ("120", 120),
        (" 120 ", 120),
        ("007", 7),
        ("86401", 86401),
        # The three forms of RFC 9110 section 5.6.7; the last one has no zone, and is UTC all the same.
        ("Sun, 06 Nov 1994 08:51:37 GMT", 120),
        ("Sunday, 06-Nov-94 08:51:37 GMT", 120),
        ("Sun Nov  6 08:51:37 1994", 120),
        # What is over is no wait.
        ("Sun, 06 Nov 1994 08:49:36 GMT", 0),
        ("Sun, 06 Nov 1983 08:49:37 GMT", 0),
        ("Sun Nov  6 08:49:37 1994", 0),
    ],
)
def test_what_is_readable_is_how_long_to_wait(value: str, seconds: int) -> None:
    assert retry_after({"retry-after": value}, NOW) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("date", "seconds"),
    [
        ("Sun, 06 Nov 1994 08:51:07 GMT", 30),
        ("Sun Nov  6 08:51:07 1994", 30),
        ("Sun, 06 Nov 1994 09:51:37 GMT", 0),
        # Unreadable: our own clock has to do.
        ("", 120),
        ("yesterday", 120),
        ("Sun, 06 Nov 1994 08:51:07 +0100", 120),
    ],
)
def test_a_moment_is_told_by_the_tools_own_clock(date: str, seconds: int) -> None:
    headers = {"retry-after": "Sun, 06 Nov 1994 08:51:37 GMT", "date": date}
    assert retry_after(headers, NOW) == timedelta(seconds=seconds)


@pytest.fixture
def far_from_greenwich(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_a_date_is_utc_wherever_this_runs(far_from_greenwich: None) -> None:
    assert datetime.now(UTC).astimezone().utcoffset() == timedelta(hours=14)
    assert retry_after({"retry-after": "Sun Nov  6 08:51:37 1994"}, NOW) == timedelta(seconds=120)
    assert retry_after({"retry-after": "Sun, 06 Nov 1994 08:51:37 GMT"}, NOW) == timedelta(seconds=120)


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "-1",
        "-120",
        "+120",
        "1.5",
        "1e3",
        "0x10",
        "120s",
        "120 seconds",
        # str.isdigit is true of these.
        "\u0661\u0662",
        "²",
        "\uff11\uff12",
        # A repeated header arrives joined.
        "120, 60",
        "120,120",
        # Milliseconds since 1970.
        "784111897000",
        "tomorrow",
        "in an hour",
        "1994-11-06T08:51:37Z",
        "1994-11-06 08:51:37",
        "Nov 6 1994",
        "Sun, 06 Nov 1994 08:51:37 +0100",
        "Sun, 06 Nov 1994 08:51:37 PST",
        "Sun, 32 Nov 1994 08:51:37 GMT",
        "Sun, 06 Nov 1994 25:51:37 GMT",
        "Sun, 06 Nov 99999 08:51:37 GMT",
        "null",
        "NaN",
        "inf",
    ],
)
def test_what_is_not_readable_is_ignored(value: str) -> None:
    assert retry_after({"retry-after": value}, NOW) is None


def test_a_moment_in_seconds_since_1970_is_far_more_than_anybody_waits() -> None:
    wait = retry_after({"retry-after": "784111897"}, NOW)
    assert wait is not None
    assert wait > timedelta(days=365)


def test_without_the_header_nothing_is_asked_for() -> None:
    assert retry_after({}, NOW) is None
    assert retry_after({"x-retry-after": "5", "retry": "5"}, NOW) is None


@given(
    st.text()
    | st.from_regex(r"[A-Z][a-z]{2,8},? [0-9]{1,3}[ -][A-Z][a-z]{2}[ -][0-9]{1,6} [0-9:]{4,10} ?(GMT|UT|[+-][0-9]{4})?")
)
@example("Mon, 01 Jan 0001 00:00:00 GMT")
@example("Fri, 31 Dec 9999 23:59:59 GMT")
@example("Fri, 31 Dec 9999 23:59:60 GMT")
@example("Mon Jan  1 00:00:00 1")
@example("1" * 10_000)
def test_no_header_is_an_error(value: str) -> None:
    wait = retry_after({"retry-after": value}, NOW)
    assert wait is None or timedelta(0) <= wait < timedelta.max
    reset = rate_limit_reset({"ratelimit-reset": value, "ratelimit": value})
    assert reset is None or timedelta(0) <= reset <= timedelta(days=30)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"ratelimit-reset": "30"}, 30),
        ({"ratelimit-reset": " 30 "}, 30),
        # The forms of draft-ietf-httpapi-ratelimit-headers, newest first.
        ({"ratelimit": '"default";r=0;t=30'}, 30),
        ({"ratelimit": "default;t=30;r=0"}, 30),
        ({"ratelimit": "limit=100, remaining=0, reset=30"}, 30),
        ({"ratelimit-reset": "30", "ratelimit": '"default";r=0;t=60'}, 30),
    ],
)
def test_a_rate_limit_says_in_how_many_seconds_it_begins_anew(headers: dict[str, str], seconds: int) -> None:
    assert rate_limit_reset(headers) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"ratelimit-reset": ""},
        {"ratelimit-reset": "-30"},
        {"ratelimit-reset": "1.5"},
        {"ratelimit-reset": "\u0663\u0660"},
        {"ratelimit-reset": "30, 60"},
        # A moment, not a wait.
        {"ratelimit-reset": "1767225600"},
        {"ratelimit-reset": "1767225600000"},
        {"ratelimit-reset": "Sun, 06 Nov 1994 08:51:37 GMT"},
        {"ratelimit": '"default";r=0'},
        {"ratelimit": '"default";r=0;t='},
        {"ratelimit": '"default";r=0;t=1767225600'},
        {"ratelimit": "part=30"},
        {"x-ratelimit-reset": "30"},
    ],
)
def test_a_rate_limit_that_does_not_say_so_readably_is_ignored(headers: dict[str, str]) -> None:
    assert rate_limit_reset(headers) is None
