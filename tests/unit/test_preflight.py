"""What stands in the way of a redrive: each refusal for its own reason, all of them at once, and no more."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from activities.preflight import Lifecycle, Present, refusals
from contracts.canonical import content_hash
from contracts.dead_letters import RefusalCode, ToolRef
from contracts.dispatch import Approved, PreflightRequest
from contracts.failures import SideEffect
from contracts.runs import ApprovalGrant
from contracts.tools import Tool, read_catalog

NOW = datetime(2026, 6, 1, tzinfo=UTC)
INPUT = {"amount": 1999}


def tool(**settings: Any) -> Tool:
    entry = {"url": "https://tool.example/", "input_schema": {"required": ["amount"]}} | settings
    return read_catalog({"tools": {"t": entry}}).tools["t"]


def grant(grant_id: str, **changes: Any) -> ApprovalGrant:
    values: dict[str, Any] = {"id": grant_id, "granted_by": "alice"}
    return ApprovalGrant(**(values | changes))


def approved(kind: Tool, value: Any = INPUT, **changes: Any) -> Approved:
    return Approved(grant=grant("apr-7", **changes), fingerprint=kind.fingerprint, input_hash=content_hash(value))


def found(
    kind: Tool | None,
    *,
    failed: Tool | None = None,
    run: Lifecycle = Lifecycle.OPEN,
    node_waits: bool = True,
    side_effect: SideEffect = SideEffect.NONE,
    sent: timedelta = timedelta(hours=1),
    **request: Any,
) -> list[str]:
    """The refusals of a redrive of a tool that has failed, and is now of this kind, or is gone."""
    then = failed or kind or tool()
    values: dict[str, Any] = {
        "run_id": "r",
        "node_id": "n",
        "logical_attempt": 1,
        "tool": ToolRef(name="t", version="1", fingerprint=then.fingerprint),
        "input": INPUT,
        "redrives": 0,
    }
    present = Present(
        run=run, node_waits=node_waits, tool=kind, side_effect=side_effect, since_first_send=sent, now=NOW
    )
    return [code.value for code in refusals(PreflightRequest(**(values | request)), present)]


def test_nothing_stands_in_the_way_of_a_plain_redrive() -> None:
    assert found(tool()) == []
    assert found(tool(approval="required"), approval=approved(tool(approval="required"))) == []


@pytest.mark.parametrize(
    ("run", "node_waits", "expected"),
    [
        (Lifecycle.CLOSED, False, ["RUN_CLOSED"]),
        (Lifecycle.CLOSED, True, ["RUN_CLOSED"]),
        (Lifecycle.CANCELLING, True, ["RUN_CANCELLING"]),
        (Lifecycle.OPEN, False, ["NODE_CLOSED"]),
    ],
)
def test_run_and_node_must_still_wait(run: Lifecycle, node_waits: bool, expected: list[str]) -> None:
    assert found(tool(), run=run, node_waits=node_waits) == expected


def test_the_tool_must_be_there_and_the_same() -> None:
    assert found(None) == ["TOOL_MISSING"]
    assert found(tool(version="2"), failed=tool()) == ["TOOL_CHANGED"]
    assert found(tool(timeout="1s"), failed=tool()) == []


@pytest.mark.parametrize("value", [{}, {"amount": "x" * 600_000}])
def test_the_input_must_fit_the_tool_as_it_is_now(value: Any) -> None:
    assert found(tool(), input=value) == ["INPUT_INVALID"]


def test_an_input_that_was_never_resolved_can_never_be_sent() -> None:
    assert found(tool(), unresolved=True) == ["INPUT_INVALID"]


# Approvals.


def test_an_approval_covers_one_tool_and_one_input_whatever_the_order_of_its_keys() -> None:
    kind = tool()
    value: dict[str, Any] = {"amount": 1, "lines": [{"a": 1, "b": 2}]}
    approval = approved(kind, value)
    assert approval.covers(kind.fingerprint, {"lines": [{"b": 2, "a": 1}], "amount": 1})
    assert not approval.covers(kind.fingerprint, value | {"amount": 2})
    assert not approval.covers(tool(version="2").fingerprint, value)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"approval": approved(tool())}, []),
        ({"approval": approved(tool(), expires_at=NOW + timedelta(seconds=1))}, []),
        ({"approval": approved(tool(), expires_at=NOW)}, ["APPROVAL_EXPIRED"]),
        ({"approval": approved(tool()), "revoked": ["apr-7"]}, ["APPROVAL_REVOKED"]),
        ({"approval": approved(tool()), "revoked": ["apr-8"]}, []),
        ({"approval": approved(tool()), "input": {"amount": 5}}, ["APPROVAL_VOID"]),
        ({"approval": approved(tool(), expires_at=NOW), "revoked": ["apr-7"]}, ["APPROVAL_REVOKED"]),
    ],
)
def test_the_nodes_approval_must_still_hold(request_: dict[str, Any], expected: list[str]) -> None:
    assert found(tool(), **request_) == expected


def test_a_changed_tool_voids_the_approval_too() -> None:
    assert found(tool(version="2"), failed=tool(), approval=approved(tool())) == ["TOOL_CHANGED", "APPROVAL_VOID"]


def test_a_tool_that_requires_an_approval_must_have_one() -> None:
    assert found(tool(approval="required")) == ["APPROVAL_VOID"]


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (grant("apr-8"), []),
        (grant("apr-8", expires_at=NOW), ["APPROVAL_EXPIRED"]),
        (grant("revoked"), ["APPROVAL_REVOKED"]),
    ],
)
def test_a_new_approval_is_bound_to_the_present_tool_and_the_input_sent(
    new: ApprovalGrant, expected: list[str]
) -> None:
    refused = found(
        tool(version="2", approval="required"),
        failed=tool(),
        new_approval=new,
        approval=approved(tool()),
        revoked=["revoked", "apr-7"],
        input={"amount": 5},
    )
    assert refused == ["TOOL_CHANGED", *expected]


# Effects.

WRITE = tool()
KEY = tool(idempotency="key")
WINDOW = tool(idempotency="key", dedupe_window="24h")
READ = tool(effect="read")
INSIDE, OUTSIDE = timedelta(hours=23), timedelta(hours=24)


@pytest.mark.parametrize(
    ("kind", "sent", "new_operation", "possible", "confirmed"),
    [
        (WRITE, INSIDE, False, ["SIDE_EFFECT_UNRESOLVED"], ["EFFECT_CONFIRMED"]),
        (WRITE, INSIDE, True, ["SIDE_EFFECT_UNRESOLVED"], ["EFFECT_CONFIRMED"]),
        (KEY, OUTSIDE, False, [], []),
        (KEY, OUTSIDE, True, ["SIDE_EFFECT_UNRESOLVED"], ["EFFECT_CONFIRMED"]),
        (WINDOW, INSIDE, False, [], []),
        (WINDOW, INSIDE, True, ["SIDE_EFFECT_UNRESOLVED"], ["EFFECT_CONFIRMED"]),
        (WINDOW, OUTSIDE, False, ["DEDUPE_WINDOW_EXPIRED"], ["EFFECT_CONFIRMED"]),
        (WINDOW, OUTSIDE, True, ["SIDE_EFFECT_UNRESOLVED"], ["EFFECT_CONFIRMED"]),
        (READ, OUTSIDE, False, [], []),
    ],
)
def test_an_effect_must_not_be_repeated_blindly(
    kind: Tool, sent: timedelta, new_operation: bool, possible: list[str], confirmed: list[str]
) -> None:
    for side_effect, expected in (
        (SideEffect.NONE, []),
        (SideEffect.POSSIBLE, possible),
        (SideEffect.CONFIRMED, confirmed),
    ):
        assert found(kind, side_effect=side_effect, sent=sent, new_operation=new_operation) == expected


# Limits, and all at once.


@pytest.mark.parametrize(("redrives", "expected"), [(9, []), (10, ["REDRIVE_LIMIT"]), (11, ["REDRIVE_LIMIT"])])
def test_a_tool_is_redriven_so_often_and_no_more(redrives: int, expected: list[str]) -> None:
    assert found(tool(), redrives=redrives) == expected


def test_everything_that_stands_in_the_way_is_told_at_once() -> None:
    everything = found(
        tool(version="2", max_redrives=0),
        failed=tool(),
        run=Lifecycle.CLOSED,
        input={},
        approval=approved(tool()),
        side_effect=SideEffect.POSSIBLE,
    )
    assert everything == [
        *("RUN_CLOSED", "TOOL_CHANGED", "INPUT_INVALID", "APPROVAL_VOID", "SIDE_EFFECT_UNRESOLVED", "REDRIVE_LIMIT"),
    ]
    assert set(everything) <= set(RefusalCode)
