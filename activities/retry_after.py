"""When a tool asks to be called again: ``Retry-After`` (RFC 9110 section 10.2.3) and the ``RateLimit`` drafts."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Final

__all__ = ["rate_limit_reset", "retry_after"]

_SECONDS: Final = re.compile(r"[0-9]{1,10}")
_RATE_LIMIT: Final = re.compile(r"(?:^|[;,\s])(?:t|reset)=([0-9]{1,10})(?:$|[;,\s])")
_LONGEST_RESET: Final = timedelta(days=30)
"""A ``RateLimit-Reset`` beyond this is a moment (seconds since 1970, as some send it), not a wait."""


def retry_after(headers: Mapping[str, str], now: datetime) -> timedelta | None:
    """How long the tool asks to be left alone by ``Retry-After``, or None where it does not say so readably.

    A moment is compared with the ``Date`` of the same answer, where it has one: both are by the tool's clock.

    Args:
        headers: The answer's, names in lower case.
        now: The present, aware; by our own clock.
    """
    text = headers.get("retry-after", "").strip()
    # Not str.isdigit: it takes Arabic-Indic digits and superscripts for digits too.
    if _SECONDS.fullmatch(text):
        return timedelta(seconds=int(text))
    if (moment := _date(text)) is None:
        return None
    return max(moment - (_date(headers.get("date", "").strip()) or now), timedelta(0))


def _date(text: str) -> datetime | None:
    """One of HTTP's three forms of a date (RFC 9110 section 5.6.7)."""
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        # asctime's form has no zone; HTTP's dates are all UTC.
        return moment.replace(tzinfo=UTC)
    return moment if text.endswith("GMT") else None


def rate_limit_reset(headers: Mapping[str, str]) -> timedelta | None:
    """When the tool's rate limit begins anew by ``RateLimit-Reset`` or ``RateLimit``, or None.

    Args:
        headers: The answer's, names in lower case.
    """
    if _SECONDS.fullmatch(reset := headers.get("ratelimit-reset", "").strip()):
        return _as_delta(reset)
    if match := _RATE_LIMIT.search(headers.get("ratelimit", "")):
        return _as_delta(match[1])
    return None


def _as_delta(text: str) -> timedelta | None:
    delta = timedelta(seconds=int(text))
    return delta if delta <= _LONGEST_RESET else None
