"""Decisions: any JSON whatever is read or refused; refusals, and the fingerprint of a failure."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from contracts.base import Json
from contracts.canonical import MAX_DEPTH, content_hash
from contracts.dead_letters import (
    DECISIONS,
    MAX_DECISIONS_SHOWN,
    REFUSALS,
    Action,
    Decision,
    DecisionOutcome,
    DecisionRecord,
    Entry,
    ErrorInfo,
    MalformedDecisionError,
    RedriveDecision,
    RefusalCode,
    ResolveDecision,
    failure_fingerprint,
    merged,
    parse_decision,
)
from contracts.failures import Category
from contracts.limits import INLINE
from tests.unit.json_values import any_json, nested

FIELDS = (
    *("decided_by", "reason", "decision_id", "if_redrives", "input", "new_operation", "approval", "override"),
    *("output", "id", "granted_by", "expires_at", "TOOL_CHANGED", "RUN_CLOSED", "bob"),
)
OVERRIDABLE = ["TOOL_CHANGED", "SIDE_EFFECT_UNRESOLVED", "DEDUPE_WINDOW_EXPIRED", "REDRIVE_LIMIT"]


def decided(action: str, **fields: Any) -> Decision:
    base: dict[str, Any] = {"decided_by": "bob", "reason": "because"}
    if action == "resolve":
        base["output"] = None
    return parse_decision(Action(action), [{name: v for name, v in (base | fields).items() if v is not ...}])


def problem(action: str, **fields: Any) -> str:
    with pytest.raises(MalformedDecisionError) as caught:
        decided(action, **fields)
    return str(caught.value)


# What is read.


def test_the_contracts_example_is_read() -> None:
    found = parse_decision(Action.REDRIVE, [{"decided_by": "bob", "reason": "card limit raised"}])
    assert found == RedriveDecision(decided_by="bob", reason="card limit raised")
    assert (found.decision_id, found.if_redrives) == (None, None)


@pytest.mark.parametrize(
    ("fields", "edits", "new"),
    [
        ({}, False, False),
        ({"new_operation": True}, False, True),
        # An edited input is always a new operation; null is one.
        ({"input": {"amount": 1}}, True, True),
        ({"input": None}, True, True),
        ({"input": {}, "new_operation": False}, True, True),
    ],
)
def test_an_edited_input_is_always_a_new_operation(fields: dict[str, Any], edits: bool, new: bool) -> None:
    found = decided("redrive", **fields)
    assert isinstance(found, RedriveDecision)
    assert (found.edits_input, found.is_new_operation) == (edits, new)


def test_a_redrive_may_bring_an_approval_and_override_what_can_be() -> None:
    found = decided(
        "redrive",
        approval={"id": "apr-8", "granted_by": "alice", "expires_at": "2027-01-01T01:00:00+01:00"},
        override=OVERRIDABLE,
        decision_id="d-1",
        if_redrives=2,
    )
    assert isinstance(found, RedriveDecision)
    assert found.approval is not None
    assert found.approval.expires_at == datetime(2027, 1, 1, tzinfo=UTC)
    assert (found.override, found.decision_id, found.if_redrives) == (OVERRIDABLE, "d-1", 2)


@pytest.mark.parametrize("output", [None, {"id": 1}, [], "x", 0, False])
def test_a_resolution_may_be_any_json(output: Json) -> None:
    found = decided("resolve", output=output)
    assert isinstance(found, ResolveDecision)
    assert found.output == output


@pytest.mark.parametrize("sent", [[], [{}], [{"decided_by": "bob"}]])
def test_a_check_needs_nothing(sent: list[Json]) -> None:
    assert parse_decision(Action.CHECK, sent).decided_by in ("", "bob")


def test_a_reconcile_needs_no_reason() -> None:
    assert decided("reconcile", reason=...).reason == ""


# What is not.


@pytest.mark.parametrize("action", ["redrive", "discard", "resolve", "reconcile"])
@pytest.mark.parametrize("sent", [[], [{"decided_by": "bob", "reason": "r", "output": 1}] * 2])
def test_a_decision_takes_one_argument(action: str, sent: list[Json]) -> None:
    with pytest.raises(MalformedDecisionError, match=f"{action} takes one argument, a JSON object; {len(sent)} were"):
        parse_decision(Action(action), sent)


@pytest.mark.parametrize("action", list(Action))
@pytest.mark.parametrize(
    ("value", "what"), [(None, "null"), ([], "an array"), ("bob", "a string"), (1, "a number"), (True, "a boolean")]
)
def test_a_decision_is_an_object(action: Action, value: Json, what: str) -> None:
    with pytest.raises(MalformedDecisionError, match=f"{action} takes a JSON object, not {what}"):
        parse_decision(action, [value])


@pytest.mark.parametrize(
    ("action", "fields", "expected"),
    [
        *(
            (action, {"decided_by": ...}, "decided_by: required")
            for action in ("redrive", "discard", "resolve", "reconcile")
        ),
        *((action, {"reason": ...}, "reason: required, but missing") for action in ("redrive", "discard", "resolve")),
        *((action, {"reason": ""}, "reason: ") for action in ("redrive", "discard", "resolve")),
        *((action, {"colour": "blue"}, "colour: unknown field") for action in Action),
        *((action, {"decided_by": "x" * 201}, "decided_by: ") for action in Action),
        *((action, {"decided_by": 5}, "decided_by: ") for action in Action),
        *((action, {"decision_id": ""}, "decision_id: ") for action in Action),
        *((action, {"if_redrives": -1}, "if_redrives: ") for action in Action),
        ("discard", {"reason": "x" * 1001}, "reason: "),
        ("resolve", {"output": ...}, "output: required, but missing"),
        ("discard", {"output": 1}, "output: unknown field"),
        ("redrive", {"output": 1}, "output: unknown field"),
        ("redrive", {"if_redrives": "1"}, "if_redrives: "),
        ("redrive", {"if_redrives": True}, "if_redrives: "),
        ("redrive", {"if_redrives": 1.5}, "if_redrives: "),
        ("redrive", {"new_operation": "yes"}, "new_operation: "),
        ("redrive", {"new_operation": 1}, "new_operation: "),
        ("redrive", {"approval": {}}, "approval.id: required, but missing; approval.granted_by: required, but missing"),
        ("redrive", {"approval": "alice"}, "approval: "),
        ("redrive", {"override": "TOOL_CHANGED"}, "override: "),
        ("redrive", {"override": ["EVERYTHING"]}, "override[0]: "),
        ("redrive", {"override": ["TOOL_CHANGED", 5]}, "override[1]: "),
        ("redrive", {"input": "x" * (INLINE.input - 1)}, f"input: has {INLINE.input + 1} bytes as JSON"),
        ("resolve", {"output": "x" * (INLINE.output - 1)}, f"output: has {INLINE.output + 1} bytes as JSON"),
    ],
)
def test_every_mistake_is_named_with_its_place(action: str, fields: dict[str, Any], expected: str) -> None:
    assert problem(action, **fields).startswith(expected)


def test_the_largest_input_and_output_are_taken() -> None:
    assert isinstance(decided("redrive", input="x" * (INLINE.input - 2)), RedriveDecision)
    assert isinstance(decided("resolve", output="x" * (INLINE.output - 2)), ResolveDecision)


def test_several_mistakes_are_named_at_once() -> None:
    found = problem("redrive", decided_by=..., reason=5, colour=1, if_redrives=-1).split("; ")
    assert sorted(one.split(":")[0] for one in found) == ["colour", "decided_by", "if_redrives", "reason"]


@pytest.mark.parametrize("code", [code for code in RefusalCode if code not in OVERRIDABLE])
def test_what_cannot_be_overridden_is_refused_with_the_cure(code: RefusalCode) -> None:
    found = problem("redrive", override=["TOOL_CHANGED", code])
    assert found.startswith(f"override: {code} cannot be overridden ({REFUSALS[code].cure})")
    assert all(name in found for name in OVERRIDABLE)


@given(action=st.sampled_from(list(Action)), value=any_json(*FIELDS))
@example(action=Action.RESOLVE, value={"decided_by": "b", "reason": "r", "output": float("inf")})
@example(action=Action.RESOLVE, value={"decided_by": "b", "reason": "r", "output": "\ud800"})
@example(action=Action.RESOLVE, value={"decided_by": "b", "reason": "r", "output": nested(MAX_DEPTH - 1)})
@example(action=Action.REDRIVE, value={"decided_by": "b", "reason": "r", "input": nested(MAX_DEPTH)})
@example(action=Action.REDRIVE, value={"decided_by": "b", "reason": "r", "input": 10**5000})
@example(action=Action.DISCARD, value={"decided_by": "\ud800", "reason": "r"})
@example(action=Action.DISCARD, value={"\ud800": 1})
def test_any_json_is_read_or_refused_and_what_is_read_can_travel(action: Action, value: Json) -> None:
    found = read(action, value)
    if isinstance(found, str):
        assert found
        assert found.encode()
        return
    assert type(found).model_validate_json(found.model_dump_json(exclude_unset=True)) == found
    if isinstance(found, ResolveDecision):
        assert content_hash(found.output)
    if isinstance(found, RedriveDecision):
        assert content_hash(found.input)


def read(action: Action, value: Json) -> Decision | str:
    try:
        return parse_decision(action, [value])
    except MalformedDecisionError as error:
        return str(error)


@given(
    st.fixed_dictionaries(
        {"decided_by": st.text(max_size=5), "reason": st.text(max_size=5)},
        optional={name: any_json(*FIELDS, max_leaves=4) for name in FIELDS[2:9]},
    )
)
def test_almost_a_decision_is_read_or_refused(value: dict[str, Json]) -> None:
    for action in Action:
        found = read(action, value)
        assert found if isinstance(found, str) else found.decided_by == value["decided_by"]


@pytest.mark.parametrize(
    "value", [nested(100_000), {"decided_by": "b", "reason": "r", "output": nested(100_000)}], ids=["all", "output"]
)
def test_bottomless_nesting_is_refused(value: Json) -> None:
    with pytest.raises(MalformedDecisionError, match="nested deeper than 100 levels"):
        parse_decision(Action.RESOLVE, [value])


def test_every_action_has_a_shape() -> None:
    assert set(DECISIONS) == set(Action) == {"redrive", "discard", "resolve", "reconcile", "check"}


# Refusals.


def test_every_refusal_of_the_contract_has_its_reason_and_its_cure() -> None:
    assert list(REFUSALS) == list(RefusalCode)
    assert [code.value for code in RefusalCode] == [
        *("RUN_CLOSED", "RUN_CANCELLING", "NODE_CLOSED", "TOOL_MISSING", "TOOL_CHANGED", "INPUT_INVALID"),
        *("APPROVAL_EXPIRED", "APPROVAL_REVOKED", "APPROVAL_VOID", "SIDE_EFFECT_UNRESOLVED", "EFFECT_CONFIRMED"),
        *("DEDUPE_WINDOW_EXPIRED", "REDRIVE_LIMIT", "EVIDENCE_CHANGED", "ALREADY_DECIDED"),
    ]
    assert [code for code, rule in REFUSALS.items() if rule.overridable] == OVERRIDABLE
    assert all(rule.when and rule.cure for rule in REFUSALS.values())


# The fingerprint of a failure.


def fingerprint(message: str, tool: str = "t", category: Category = Category.PERMISSION, code: str = "http_403") -> str:
    return failure_fingerprint(tool, ErrorInfo(category=category, code=code, message=message))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("order 1042 not found", "order 7 not found"),
        ("order A-1042 is closed", "order B-7 is closed"),
        (
            "no operation 0b5b1f0a-5f3e-5c0e-9d5c-3f6f5b1f7a11",
            "no operation 6f1c0a5e-2f0b-5d0e-9d5c-3f6f5b1f7a11",
        ),
        ("since 2026-01-01T00:00:00Z", "since 2027-12-31T23:59:59.999+02:00"),
        ("took 1.5s", "took 30s"),
        ("at 10.0.0.1:8080", "at 192.168.1.2:443"),
        ("amount -5 of 10", "amount 7 of 1000"),
    ],
)
def test_ids_numbers_and_times_do_not_tell_failures_apart(one: str, other: str) -> None:
    assert fingerprint(one) == fingerprint(other)


def test_tool_category_code_and_words_tell_failures_apart() -> None:
    found = [
        fingerprint("card refused"),
        fingerprint("card expired"),
        fingerprint("card refused", tool="u"),
        fingerprint("card refused", category=Category.TRANSIENT),
        fingerprint("card refused", code="http_401"),
        fingerprint(""),
        # No two fields can be shifted into each other.
        failure_fingerprint("t\nPERMISSION", ErrorInfo(category=Category.PERMISSION, code="", message="")),
    ]
    assert len(set(found)) == len(found)


def test_a_fingerprint_never_changes() -> None:
    # People group and search by it.
    assert fingerprint("HTTP 403 Forbidden: order 1042") == "sha256:9cdebfff5df6ffdc40401dea3ff96744"


@given(st.text(st.characters(codec=None)))
def test_every_message_has_a_fingerprint_that_fits_a_search_attribute(message: str) -> None:
    found = failure_fingerprint("t", ErrorInfo.model_construct(category=Category.TRANSIENT, code="c", message=message))
    assert found.startswith("sha256:")
    assert len(found) < 100


def test_the_worst_message_has_a_fingerprint_at_once() -> None:
    for message in ("a" * 2048, "a" * 2047 + "1", "1" * 2048, ":" * 2048, "a-" * 1024):
        assert fingerprint(message)


# Records.


def record(number: int, at: int, **changes: Any) -> DecisionRecord:
    values: dict[str, Any] = {
        "decision_id": f"d-{number}",
        "action": "redrive",
        "decided_by": "bob",
        "reason": "because",
        "at": datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=at),
        "outcome": DecisionOutcome.ACCEPTED,
    }
    return DecisionRecord(**(values | changes))


def test_decisions_from_two_places_are_shown_once_each_in_order() -> None:
    one, two, three = record(1, 1), record(2, 2), record(3, 3)
    assert merged([three, one], [two, one]) == [one, two, three]
    assert merged([], []) == []


def test_only_the_newest_decisions_are_shown() -> None:
    many = [record(number, number) for number in range(MAX_DECISIONS_SHOWN + 10)]
    assert merged(many[:100], many[100:]) == many[10:]


def test_an_entry_can_be_described_as_the_contract_shows_it() -> None:
    # The document of the contract, with its placeholders filled.
    document = json.loads(EXAMPLE)
    entry = Entry.model_validate(document)
    shown = json.loads(entry.model_dump_json())
    assert shown.keys() == document.keys()
    for name in ("tool", "error", "delivery", "runtime", "eligibility"):
        assert shown[name].keys() >= document[name].keys()
    assert shown["attempts"][0].keys() == document["attempts"][0].keys()
    assert shown["decisions"][0].keys() == document["decisions"][0].keys()


EXAMPLE = """
{
  "run_id": "r", "node_id": "n", "operation_id": "r/n/1", "idempotency_key": "k", "logical_attempt": 1,
  "status": "AWAITING_DECISION",
  "tool": {"name": "payments.charge", "version": "1", "fingerprint": "sha256:x"},
  "input": {"amount": 1999},
  "error": {"category": "PERMISSION", "code": "http_403", "message": "m", "http_status": 403},
  "side_effect": "NONE",
  "attempts": [
    {"attempt": 1, "started_at": "2026-01-01T00:00:00Z", "ended_at": "2026-01-01T00:00:01Z", "worker": "w",
     "category": "RATE_LIMITED", "code": "http_429", "message": "m", "http_status": 429, "side_effect": "NONE",
     "next_eligible_at": "2026-01-01T00:00:05Z"}
  ],
  "first_failed_at": "2026-01-01T00:00:00Z", "last_failed_at": "2026-01-01T00:00:00Z",
  "delivery": {"workflow_id": "r/n", "workflow_run_id": "x", "activity_id": "call_tool", "task_queue": "q",
               "attempt": 3},
  "runtime": {"redrive": "0.1.0", "temporalio": "1.35.0", "build_id": "b"},
  "correlation_id": "req-77", "trace_id": "t",
  "failure_fingerprint": "f",
  "redrives": 0,
  "attempts_omitted": 0,
  "decisions": [{"decision_id": "d", "action": "redrive", "decided_by": "bob", "reason": "r",
                 "at": "2026-01-01T00:00:00Z", "outcome": "ACCEPTED", "refusals": []}],
  "eligibility": {"redrivable": true, "refusals": [], "checked_at": "2026-01-01T00:00:00Z"}
}
"""
