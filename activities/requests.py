"""From a tool and an input to a request: placeholders, query, body and headers. Pure."""

import json
import re
import secrets
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, urlencode

from contracts.base import Json, tell
from contracts.canonical import json_size
from contracts.limits import INLINE
from contracts.schemas import schema_problems
from contracts.tools import PLACEHOLDER, Tool

__all__ = ["UnsendableError", "body_and_url", "call_headers", "fill", "input_problems"]

_MAX_URL: Final = 65_000
"""Far more than any server takes."""
_WITH_BODY: Final = ("POST", "PUT", "PATCH")


class UnsendableError(Exception):
    """The input cannot be made into a request; the message names the field."""


def input_problems(tool: Tool, value: Json, largest: int = INLINE.input) -> list[str]:
    """Why an input cannot be sent to a tool: its size, its schema, its placeholders; an empty list if it can."""
    size = json_size(value)
    if size > largest:
        return [f"the input has {size} bytes; {largest} are allowed"]
    problems = schema_problems(tool.input_schema, value, "input")
    if not problems:
        try:
            body_and_url(tool, value)
        except UnsendableError as error:
            problems.append(str(error))
    return problems


def body_and_url(tool: Tool, value: Json) -> tuple[str, bytes | None]:
    """The URL with everything filled in, and the body, for an input.

    Raises:
        UnsendableError: a placeholder has no scalar to be filled from, or the query would hold more than scalars.
    """
    url, used = fill(tool.url, value if isinstance(value, dict) else {})
    rest: Json = {key: item for key, item in value.items() if key not in used} if isinstance(value, dict) else value
    if tool.method in _WITH_BODY:
        return _checked(url), json.dumps(rest, ensure_ascii=False, separators=(",", ":")).encode(
            "utf-8", "surrogatepass"
        )
    if rest is None or rest == {}:
        return _checked(url), None
    if not isinstance(rest, dict):
        raise UnsendableError(f"input: {tool.method} sends an object as the query, not {tell(rest)}")
    pairs = [(key, text) for key, item in rest.items() for text in _query_values(key, item)]
    if pairs:
        url += ("&" if "?" in url else "?") + urlencode(pairs, errors="replace")
    return _checked(url), None


def fill(url: str, fields: Mapping[str, Json]) -> tuple[str, set[str]]:
    """Fills the placeholders of a URL, percent-encoded (RFC 3986 section 2.1); also says which fields that took.

    Raises:
        UnsendableError: a field is missing, or not a scalar, or would climb out of its path segment.
    """
    used: set[str] = set()

    def value_of(match: re.Match[str]) -> str:
        name = match[1]
        item = fields.get(name)
        if item is None or isinstance(item, dict | list):
            problem = "is missing" if item is None else f"is {tell(item)}, not a scalar"
            raise UnsendableError(f"input.{name}: {problem}, and the tool's URL needs it")
        text = _scalar(item)
        if text in ("", ".", ".."):
            raise UnsendableError(f"input.{name}: {text!r} cannot be part of a URL's path")
        used.add(name)
        return quote(text, safe="", errors="replace")

    return PLACEHOLDER.sub(value_of, url), used


def call_headers(tool: Tool, key: str, trace_id: str, correlation_id: str | None) -> dict[str, str]:
    """The headers of a call, without the tool's secret: its own, the key, the trace and the correlation id."""
    headers = {name.lower(): value for name, value in tool.headers.items()}
    headers["traceparent"] = f"00-{trace_id}-{secrets.token_hex(8)}-01"
    # A key is a UUID, so that quoting it is all that a Structured Field string (RFC 9651 section 3.3.3) asks for.
    headers[tool.key_header.lower()] = f'"{key}"' if tool.key_quoted else key
    if correlation_id is not None:
        headers["x-correlation-id"] = correlation_id
    return headers


def _query_values(key: str, item: Json) -> list[str]:
    items = item if isinstance(item, list) else [item]
    if any(isinstance(part, dict | list) for part in items):
        raise UnsendableError(f"input.{key}: a query's value is a scalar or a list of scalars")
    return [_scalar(part) for part in items if part is not None]


def _scalar(item: Json) -> str:
    return item if isinstance(item, str) else json.dumps(item)


def _checked(url: str) -> str:
    if len(url) > _MAX_URL:
        raise UnsendableError(f"input: the URL would have {len(url)} characters; {_MAX_URL} are allowed")
    return url
