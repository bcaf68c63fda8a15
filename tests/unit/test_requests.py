"""From a tool and an input to a request, or to the field that cannot be sent."""

import json
import re
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.requests import UnsendableError, body_and_url, call_headers, fill, input_problems
from contracts.base import Json
from contracts.tools import Tool

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
KEY = "0b5b1f0a-5f3e-5c0e-9d5c-3f6f5b1f7a11"


def tool(**settings: Any) -> Tool:
    values: dict[str, Any] = {"name": "t", "url": "https://tool.example/v1"}
    return Tool(**(values | settings))


# Placeholders.


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ("A-1", "A-1"),
        ("a b/c?d#e&f%g", "a%20b%2Fc%3Fd%23e%26f%25g"),
        ("ü☃", "%C3%BC%E2%98%83"),
        ("../../admin", "..%2F..%2Fadmin"),
        ("%2e%2e", "%252e%252e"),
        ("a\r\nb", "a%0D%0Ab"),
        ("...", "..."),
        (5, "5"),
        (-1.5, "-1.5"),
        (True, "true"),
        (False, "false"),
        (0, "0"),
        (10**20, "100000000000000000000"),
    ],
)
def test_a_placeholder_is_filled_percent_encoded(item: Json, text: str) -> None:
    assert fill("https://tool.example/{sku}/x", {"sku": item}) == (f"https://tool.example/{text}/x", {"sku"})


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_whatever_fills_a_placeholder_stays_in_its_place(text: str) -> None:
    try:
        url, _ = fill("https://tool.example/a/{field}/b?c=d", {"field": text})
    except UnsendableError:
        assert text in (".", "..")
        return
    for parts in (urlsplit(url), urlsplit(str(httpx.URL(url)))):
        assert (parts.scheme, parts.netloc, parts.query, parts.fragment) == ("https", "tool.example", "c=d", "")
        assert [unquote(part) for part in parts.path.split("/")] == ["", "a", text, "b"]


def test_several_placeholders_and_the_same_one_twice() -> None:
    url, used = fill("https://tool.example/{a}/{b}?again={a}", {"a": 1, "b": "x", "c": "left"})
    assert (url, used) == ("https://tool.example/1/x?again=1", {"a", "b"})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "input.sku: is missing"),
        ({"sku": None}, "input.sku: is missing"),
        ({"sku": {}}, "input.sku: is an object, not a scalar"),
        ({"sku": ["x"]}, "input.sku: is an array, not a scalar"),
        ({"sku": ""}, "input.sku: '' cannot be part"),
        ({"sku": "."}, "input.sku: '.' cannot be part"),
        ({"sku": ".."}, "input.sku: '..' cannot be part"),
        ({"SKU": "x"}, "input.sku: is missing"),
    ],
)
def test_a_placeholder_that_cannot_be_filled_is_named(fields: dict[str, Json], problem: str) -> None:
    with pytest.raises(UnsendableError, match=re.escape(problem)):
        fill("https://tool.example/{sku}", fields)
    assert any(problem in found for found in input_problems(tool(url="https://tool.example/{sku}"), fields))


@pytest.mark.parametrize("value", [None, [], "x", 5])
def test_an_input_that_is_no_object_fills_no_placeholder(value: Json) -> None:
    assert input_problems(tool(url="https://tool.example/{sku}"), value) == [
        "input.sku: is missing, and the tool's URL needs it"
    ]


# Bodies.


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
def test_what_fills_no_placeholder_is_the_body(method: str) -> None:
    kind = tool(url="https://tool.example/{sku}", method=method)
    url, body = body_and_url(kind, {"sku": "A", "quantity": 2, "note": "ü", "deep": {"sku": "B"}})
    assert url == "https://tool.example/A"
    assert body is not None
    assert json.loads(body) == {"quantity": 2, "note": "ü", "deep": {"sku": "B"}}


@pytest.mark.parametrize("value", [{}, None, [], [1, "x"], "text", 0, 1.5, False, {"a": None}])
def test_a_body_may_be_any_json(value: Json) -> None:
    _, body = body_and_url(tool(), value)
    assert body is not None
    assert json.loads(body) == value


# Queries.


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_what_fills_no_placeholder_is_the_query(method: str) -> None:
    kind = tool(url="https://tool.example/{sku}", method=method)
    url, body = body_and_url(kind, {"sku": "A", "q": "a b&c=d", "n": 5, "f": 1.5, "on": True, "tag": ["x", 2, False]})
    assert body is None
    parts = urlsplit(url)
    assert parts.path == "/A"
    assert parse_qsl(parts.query, keep_blank_values=True) == [
        ("q", "a b&c=d"),
        ("n", "5"),
        ("f", "1.5"),
        ("on", "true"),
        ("tag", "x"),
        ("tag", "2"),
        ("tag", "false"),
    ]


def test_a_query_is_added_to_the_urls_own() -> None:
    url, _ = body_and_url(tool(url="https://tool.example/v1?version=2", method="GET"), {"a": ""})
    assert url == "https://tool.example/v1?version=2&a="


@pytest.mark.parametrize("value", [{}, None, {"a": None}, {"a": []}])
def test_without_anything_to_say_there_is_no_query(value: Json) -> None:
    assert body_and_url(tool(method="GET"), value) == ("https://tool.example/v1", None)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([], "input: GET sends an object as the query, not an array"),
        ("x", "input: GET sends an object as the query, not a string"),
        (5, "input: GET sends an object as the query, not a number"),
        (False, "input: GET sends an object as the query, not a boolean"),
        ({"a": {}}, "input.a: a query's value is a scalar or a list of scalars"),
        ({"a": [{}]}, "input.a: a query's value is a scalar or a list of scalars"),
        ({"a": [[1]]}, "input.a: a query's value is a scalar or a list of scalars"),
    ],
)
def test_what_no_query_can_say_is_refused(value: Json, problem: str) -> None:
    assert input_problems(tool(method="GET"), value) == [problem]


@given(
    st.dictionaries(st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.text(max_size=20), max_size=5)
)
def test_a_query_says_what_the_input_said(value: dict[str, Json]) -> None:
    url, _ = body_and_url(tool(method="GET"), value)
    expected = [
        (key, item if isinstance(item, str) else json.dumps(item)) for key, item in value.items() if item is not None
    ]
    assert parse_qsl(urlsplit(url).query, keep_blank_values=True) == expected
    assert str(httpx.URL(url))


# Limits and schemas.


def test_an_input_of_the_largest_size_can_be_sent_and_one_byte_more_cannot() -> None:
    largest = "x" * (512 * 1024 - 2)
    assert input_problems(tool(), largest) == []
    assert input_problems(tool(), largest + "x") == ["the input has 524289 bytes; 524288 are allowed"]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (tool(method="GET"), {"q": "x" * 70_000}),
        (tool(method="GET"), {"q": ["ü"] * 20_000}),
        (tool(url="https://tool.example/{a}"), {"a": "ü" * 20_000}),
    ],
)
def test_a_url_longer_than_can_be_sent_is_refused(kind: Tool, value: Json) -> None:
    (problem,) = input_problems(kind, value)
    assert "the URL would have" in problem


def test_a_url_of_the_longest_length_can_be_sent() -> None:
    url, _ = body_and_url(tool(method="GET"), {"q": "x" * 64_900})
    assert httpx.Request("GET", url).url.query


def test_every_way_in_which_an_input_breaks_the_schema_is_named() -> None:
    schema = {
        "type": "object",
        "required": ["amount"],
        "properties": {"lines": {"items": {"type": "object", "required": ["sku"]}}},
    }
    assert input_problems(tool(input_schema=schema), {"amount": 1, "lines": []}) == []
    assert input_problems(tool(input_schema=schema), {"lines": [{"sku": 1}, {}]}) == [
        "input: 'amount' is a required property",
        "input.lines[1]: 'sku' is a required property",
    ]


# Headers.


def test_a_call_carries_its_key_its_trace_and_who_asked() -> None:
    headers = call_headers(tool(headers={"X-Api-Version": "2026-01"}), KEY, TRACE, "req-77")
    assert headers.pop("traceparent").startswith(f"00-{TRACE}-")
    assert headers == {"x-api-version": "2026-01", "idempotency-key": KEY, "x-correlation-id": "req-77"}


def test_every_call_is_a_span_of_its_own() -> None:
    spans = {call_headers(tool(), KEY, TRACE, None)["traceparent"] for _ in range(20)}
    assert len(spans) == 20
    assert all(re.fullmatch(rf"00-{TRACE}-[0-9a-f]{{16}}-01", span) for span in spans)


def test_the_key_goes_by_the_tools_own_header_and_quoted_where_it_wants_it_so() -> None:
    headers = call_headers(tool(key_header="X-Request-Id", key_quoted=True), KEY, TRACE, None)
    assert headers["x-request-id"] == f'"{KEY}"'
    assert "idempotency-key" not in headers
    assert "x-correlation-id" not in headers
