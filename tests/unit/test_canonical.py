"""One byte form for one JSON value, and what no JSON value may be."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.base import Json, Unreadable
from contracts.canonical import MAX_DEPTH, canonical_json, content_hash, is_small, json_problem, json_size, same_json
from contracts.dispatch import CallResult
from contracts.runs import Source
from tests.unit.json_values import nested, plain_json


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": 1, "a": [1.5, None, True, "ü\n"]}, '{"a":[1.5,null,true,"\\u00fc\\n"],"b":1}'),
        ({"a": {"y": 1, "x": 2}}, '{"a":{"x":2,"y":1}}'),
        ([], "[]"),
        ("😀", '"\\ud83d\\ude00"'),
    ],
)
def test_the_canonical_form_is_sorted_tight_and_ascii(value: Json, text: str) -> None:
    assert canonical_json(value) == text


def test_a_content_hash_never_changes() -> None:
    # Approvals and operations are compared by it for months.
    assert (
        content_hash({"b": 1, "a": [1.5, None, True, "ü"]})
        == "sha256:cbb4e4b56e527e8347b571305fc4dae62b2bf41e96992aaa54693399a9ea7cd2"
    )


@given(plain_json())
def test_the_canonical_form_says_the_same_and_only_once(value: Json) -> None:
    again = json.loads(canonical_json(value))
    assert same_json(again, value)
    assert canonical_json(again) == canonical_json(value)
    assert content_hash(again) == content_hash(value)


@given(st.dictionaries(st.text(max_size=5), plain_json(3), min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_the_order_of_keys_means_nothing(value: dict[str, Json], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert content_hash(dict(items)) == content_hash(value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2], [2, 1]),
        ({"a": None}, {}),
        ("1", 1),
        (True, 1),
        (False, 0),
        (None, False),
        ("", None),
        ([], {}),
        ([[]], []),
        ({"a": [1]}, {"a": [True]}),
    ],
)
def test_different_values_have_different_hashes(one: Json, other: Json) -> None:
    assert content_hash(one) != content_hash(other)
    assert not same_json(one, other)
    assert not same_json(other, one)


def test_a_number_is_the_same_number_however_it_is_written() -> None:
    assert same_json({"a": [1, 1.5]}, {"a": [1.0, 1.5]})
    assert same_json({"a": 1, "b": 2}, {"b": 2, "a": 1})


@pytest.mark.parametrize(
    ("value", "size"), [("", 2), ("ü", 4), ("😀", 6), ("\n", 4), ({"a": [1, 2]}, 11), (None, 4), ("\ud800", 5)]
)
def test_a_size_is_that_of_compact_utf_8(value: Json, size: int) -> None:
    assert json_size(value) == size


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (float("inf"), "not finite"),
        ([{"a": float("-inf")}], "not finite"),
        ({"a": [float("nan")]}, "not finite"),
        ("\ud800", "surrogate"),
        ({"\udfff": 1}, "surrogate"),
        ([["ok", "\ud83d"]], "surrogate"),
        (10**1001, "digits"),
        ([-(10**5000)], "digits"),
        (nested(MAX_DEPTH + 1), "nested deeper"),
        (nested(100_000), "nested deeper"),
        ({"a": nested(MAX_DEPTH)}, "nested deeper"),
        (Unreadable("not JSON that can be read: x"), "not JSON that can be read"),
        ([Unreadable("why")], "why"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_travel_is_told_why(value: Json, problem: str) -> None:
    assert problem in (json_problem(value) or "")


@pytest.mark.parametrize(
    "value", [None, 1e308, 10**1000, -(10**1000), "😀\x00", nested(MAX_DEPTH), {"a": nested(MAX_DEPTH - 1)}, True]
)
def test_everything_else_can_travel(value: Json) -> None:
    assert json_problem(value) is None


def test_a_wide_value_is_looked_through_at_once() -> None:
    assert json_problem([{"a": [number]} for number in range(20_000)]) is None


@pytest.mark.parametrize("value", [None, "x" * 10_000, {"a": [1, {"b": "c"}]}, list(range(400)), [[[["deep"]]]]])
def test_what_is_read_in_no_time_is_small(value: Json) -> None:
    assert is_small(value)


@pytest.mark.parametrize(
    "value",
    [
        "x" * 100_000,
        {"x" * 100_000: 1},
        list(range(1_000_000)),
        {str(number): number for number in range(1_000)},
        [["x" * 100] * 100] * 100,
    ],
)
def test_what_takes_a_while_to_read_is_not_small_and_that_is_found_out_at_once(value: Json) -> None:
    assert not is_small(value)


def test_a_message_takes_a_json_value_as_it_is_however_much_is_in_it() -> None:
    output: Json = {"rows": [{"id": number} for number in range(3)]}
    result = CallResult(operation_id="r/n/1", attempt_count=1, source=Source.EXECUTED, output=output)
    assert result.output is output
    assert CallResult.model_validate_json(result.model_dump_json()) == result
