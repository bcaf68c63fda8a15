"""Ids, keys and traces: what may never change, and what may never be taken for an id."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.identity import (
    KEY_NAMESPACE,
    OperationId,
    dead_letter_workflow_id,
    node_workflow_id,
    problem_with_node_id,
    problem_with_run_id,
    problem_with_tool_name,
    trace_id_of,
)

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

KEYS = {
    # Literal on purpose: these keys are on the wire and in other people's databases.
    "order-1042/charge/1": "66bab86b-edbc-52b3-ba1a-feff012f29ea",
    "order-1042/charge/2": "3f54755c-44b9-5dc0-b0a6-3836a6e26de5",
    "r/n/1": "620eabd1-f8d2-5687-8792-fd0841a77570",
    "bestellung ä/x.y-z_0/12": "e537eb2c-02ca-53f0-b9df-f958ee2f226a",
}


@pytest.mark.parametrize(("operation", "key"), KEYS.items())
def test_the_idempotency_key_of_an_operation_never_changes(operation: str, key: str) -> None:
    assert OperationId.parse(operation).idempotency_key == key


def test_the_namespace_of_keys_never_changes() -> None:
    assert str(KEY_NAMESPACE) == "6f1c0a5e-2f0b-5d0e-9d5c-3f6f5b1f7a11"


def test_workflow_ids_are_what_the_contract_says() -> None:
    assert str(OperationId(run_id="order-1042", node_id="charge", logical_attempt=3)) == "order-1042/charge/3"
    assert node_workflow_id("order-1042", "charge") == "order-1042/charge"
    assert dead_letter_workflow_id("order-1042", "charge") == "order-1042/charge/dead-letter"


@given(
    run_id=st.text(min_size=1, max_size=200).filter(lambda text: problem_with_run_id(text) is None),
    node_id=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
    logical_attempt=st.integers(1, 10**9),
)
def test_an_operation_id_reads_back_as_what_it_was_made_of(run_id: str, node_id: str, logical_attempt: int) -> None:
    operation = OperationId(run_id=run_id, node_id=node_id, logical_attempt=logical_attempt)
    assert OperationId.parse(str(operation)) == operation


@pytest.mark.parametrize(
    "text",
    [
        "",
        "order-1042",
        "order-1042/charge",
        "order-1042/charge/",
        "order-1042/charge/0",
        "order-1042/charge/-1",
        "order-1042/charge/+1",
        "order-1042/charge/1.0",
        "order-1042/charge/ 1",
        "order-1042/charge/\u0661",
        "order-1042/charge/²",
        # Two spellings of one operation would be two keys.
        "order-1042/charge/01",
        "order-1042/charge/1/",
        "order-1042/charge/1\n",
        "/charge/1",
        "order-1042//1",
        "order-1042/-charge/1",
        "order-1042/charge/dead-letter",
        "order\x00/charge/1",
    ],
)
def test_what_is_no_operation_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"an operation id is|a run id|a node id"):
        OperationId.parse(text)


def test_a_number_longer_than_python_reads_is_no_operation_id() -> None:
    with pytest.raises(ValueError, match=r"."):
        OperationId.parse("order-1042/charge/" + "1" * 5000)


@pytest.mark.parametrize("run_id", ["a", "x" * 200, "order 1042", "bestellung-ä", "订单", "a.b:c@d", "🙂" * 200, "-"])
def test_run_ids_are_almost_anything_short(run_id: str) -> None:
    assert problem_with_run_id(run_id) is None


@pytest.mark.parametrize(
    ("run_id", "problem"),
    [
        ("", "1 to 200 characters"),
        ("x" * 201, "1 to 200 characters, this one has 201"),
        ("a/b", "'/'"),
        ("a\nb", "control"),
        ("a\x7fb", "control"),
        ("a\x85b", "control"),
        ("\x00", "control"),
        ("\ud800", "control"),
    ],
)
def test_a_bad_run_id_is_told_why(run_id: str, problem: str) -> None:
    assert problem in (problem_with_run_id(run_id) or "")


@pytest.mark.parametrize("name", ["a", "A", "0", "payments.charge", "a_b-c.D", "x" * 64, "0-"])
def test_node_ids_and_tool_names_share_an_alphabet(name: str) -> None:
    assert problem_with_node_id(name) is None
    assert problem_with_tool_name(name) is None


@pytest.mark.parametrize("name", ["", ".a", "-a", "_a", "x" * 65, "a b", "a/b", "ä", "a\n", "a\x00", "\u0661"])
def test_other_names_are_refused_by_what_they_are(name: str) -> None:
    assert (problem_with_node_id(name) or "").startswith("a node id is")
    assert (problem_with_tool_name(name) or "").startswith("a tool name is")


def test_a_run_without_a_traceparent_always_has_the_same_trace() -> None:
    assert trace_id_of("order-1042") == "bff83cdfb94d8087b6fd49cb20c427dc"
    assert trace_id_of("order-1043") != trace_id_of("order-1042")


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_a_derived_trace_id_is_one_of_w3c(run_id: str) -> None:
    assert re.fullmatch(r"[0-9a-f]{32}", trace_id_of(run_id))


def test_a_given_traceparent_decides_the_trace() -> None:
    assert trace_id_of("order-1042", TRACEPARENT) == "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "x",
        TRACEPARENT.upper(),
        TRACEPARENT + "\n",
        " " + TRACEPARENT,
        TRACEPARENT + "-x",
        TRACEPARENT[:-1],
        TRACEPARENT.replace("00-4", "ff-4"),
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01",
    ],
)
def test_a_bad_traceparent_is_refused(traceparent: str) -> None:
    with pytest.raises(ValueError, match="not a W3C traceparent"):
        trace_id_of("order-1042", traceparent)
