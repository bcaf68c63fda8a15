"""What a tool may answer: JSON by RFC 8259, less what nothing after it could carry."""

import contextlib
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from activities.http import parse_json
from contracts.base import Json
from contracts.canonical import MAX_DEPTH, content_hash, json_problem
from contracts.dispatch import CallResult, DeadLetterResult, NodeInput, NodeReport, ToolFacts
from contracts.failures import Category, Code
from contracts.runs import NodeResult, NodeStatus, RunResult, RunStatus, Source
from contracts.sweep import RunExecution
from tests.unit.json_values import any_json, nested
from workers.client import DATA_CONVERTER


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b"null", None),
        (b' {"a": [1, 2.5, -0.0, true, "x", {}]} \r\n\t', {"a": [1, 2.5, -0.0, True, "x", {}]}),
        (b'"\\ud83d\\ude00"', "😀"),
        ('"ü☃"'.encode(), "ü☃"),
        (b"1E5", 100000.0),
        (b"123456789012345678901234567890", 123456789012345678901234567890),
        (b'"\\u0000"', "\x00"),
        # RFC 8259 section 4 leaves it open; the last one counts, as almost everywhere.
        (b'{"a": 1, "a": 2}', {"a": 2}),
    ],
)
def test_json_is_read(content: bytes, value: Json) -> None:
    found = parse_json(content)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b" ",
        b"{",
        b"{}{}",
        b"{'a': 1}",
        b"[1,]",
        b"// comment\n1",
        b"True",
        b"undefined",
        b"01",
        b"+1",
        b".5",
        b'"tab\there"',
        b'"\xff"',
        b"\xff\xfe{\x00}\x00",
        b'"\xed\xa0\x80"',
        b"<html></html>",
        b"NaN",
        b"[Infinity]",
        b'{"a": -Infinity}',
        # JSON, but beyond a double, and then infinite.
        b"1e400",
        b"[-1e400]",
        # JSON, but no text: half of a surrogate pair.
        b'"\\ud83d"',
        b'{"\\ude00": 1}',
        b'"\\ude00\\ud83d"',
        b"1" * 5000,
        b"-" + b"1" * 2000,
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[" * (MAX_DEPTH + 2) + b"]" * (MAX_DEPTH + 2),
    ],
    ids=lambda content: repr(content[:20]),
)
def test_what_is_not_json_or_cannot_be_carried_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(content)


@given(st.binary())
def test_no_bytes_are_another_error(content: bytes) -> None:
    with contextlib.suppress(ValueError):
        parse_json(content)


@given(any_json())
@example(nested(MAX_DEPTH))
@example({"a": nested(MAX_DEPTH - 1)})
@example(nested(MAX_DEPTH + 1))
@example(float("inf"))
@example(["\ud800"])
@example({"\udfff": 1})
@example(10**999)
@example(10**1001)
def test_a_value_travels_on_exactly_if_nothing_is_wrong_with_it(value: Json) -> None:
    if json_problem(value) is not None:
        with pytest.raises(ValueError, match=r"."):
            parse_json(json.dumps(value).encode())
        return
    assert parse_json(json.dumps(value).encode()) == value
    assert content_hash(value)
    for carried, at in carriers(value):
        (payload,) = DATA_CONVERTER.payload_converter.to_payloads([carried])
        (read,) = DATA_CONVERTER.payload_converter.from_payloads([payload], [type(carried)])
        assert at(read) == value
        (plain,) = DATA_CONVERTER.payload_converter.from_payloads([payload], None)
        assert isinstance(plain, dict)


def carriers(value: Json) -> list[tuple[Any, Any]]:
    """What an output travels in, and where."""
    ids: dict[str, Any] = {"node_id": "n", "operation_id": "r/n/1", "idempotency_key": "k", "attempt_count": 1}
    result = NodeResult(**ids, output=value, source=Source.EXECUTED)
    facts = ToolFacts(
        name="t",
        version="1",
        fingerprint="f",
        timeout=60,  # type: ignore[arg-type]  # seconds will do
        absent_after=60,  # type: ignore[arg-type]
        task_queue="q",
        rated=False,
        askable=False,
    )
    node = NodeInput(
        run_id="r",
        node_id="n",
        started_by=RunExecution(first_run_id="f", run_id="r"),
        begun_at=datetime.now(UTC),
        tool=facts,
        input=value,
        deadline=60,  # type: ignore[arg-type]
        correlation_id=None,
        trace_id="t",
    )
    run = RunResult(run_id="r", status=RunStatus.SUCCEEDED, counts={NodeStatus.SUCCEEDED: 1}, outputs={"n": value})
    return [
        (CallResult(output=value, operation_id="r/n/1", attempt_count=1), lambda read: read.output),
        (result, lambda read: read.output),
        (NodeReport(node_id="n", status=NodeStatus.SUCCEEDED, result=result), lambda read: read.result.output),
        (node, lambda read: read.input),
        (run, lambda read: read.outputs["n"]),
        (DeadLetterResult(status="RESOLVED", output=value), lambda read: read.output),  # type: ignore[arg-type]
    ]


def test_the_names_that_the_classification_gives_are_stable() -> None:
    assert (Category.UNKNOWN_SIDE_EFFECT, Code.RESULT_LOST, Code.RESULT_UNUSABLE) == (
        "UNKNOWN_SIDE_EFFECT",
        "result_lost",
        "result_unusable",
    )
