"""What stands in the way of a redrive: shown beforehand, given on the decision, nothing sent; and what cures it."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from temporalio.client import WorkflowFailureError, WorkflowHandle, WorkflowUpdateFailedError, WorkflowUpdateStage
from temporalio.exceptions import ApplicationError

from contracts.dead_letters import DecisionRecord, Entry
from contracts.identity import node_workflow_id
from tests.lab import Bench
from tests.waiting import eventually

Run = WorkflowHandle[Any, Any]

OVERRIDABLE = ["TOOL_CHANGED", "SIDE_EFFECT_UNRESOLVED", "DEDUPE_WINDOW_EXPIRED", "REDRIVE_LIMIT"]
NOT_OVERRIDABLE = [
    "RUN_CLOSED",
    "RUN_CANCELLING",
    "NODE_CLOSED",
    "TOOL_MISSING",
    "INPUT_INVALID",
    "APPROVAL_EXPIRED",
    "APPROVAL_REVOKED",
    "APPROVAL_VOID",
    "EFFECT_CONFIRMED",
    "EVIDENCE_CHANGED",
    "ALREADY_DECIDED",
]

ONCE: dict[str, Any] = {"retry": {"TRANSIENT": {"attempts": 1}, "DEPENDENCY_DOWN": {"attempts": 1}}}
REFUSED: list[dict[str, Any]] = [{"status": 403}]
UNKNOWN: list[dict[str, Any]] = [{"status": 500}]
REFUSED_ONCE: Sequence[Mapping[str, Any]] = [*REFUSED, {}]
UNKNOWN_ONCE: Sequence[Mapping[str, Any]] = [*UNKNOWN, {}]
NEEDS_ID = {"type": "object", "required": ["id"]}


def approval(approval_id: str, *, days: float = 1) -> dict[str, Any]:
    expires = datetime.now(UTC) + timedelta(days=days)
    return {"id": approval_id, "granted_by": "alice", "expires_at": expires.isoformat()}


@dataclass(frozen=True)
class Case:
    """A dead letter that cannot simply be redriven.

    Attributes:
        refusals: What must be shown, and given.
        steps: What the tool does.
        tool: Its settings at first.
        changes: What is changed of them before the decision; None takes it out of the catalog.
        node: What the node has besides its tool and its input.
        cure: The redrive that is accepted all the same; None if only a changed catalog can help.
        settled: Whether nothing can help: the person resolves.
    """

    name: str
    refusals: set[str]
    steps: Sequence[Mapping[str, Any]] = field(default_factory=lambda: REFUSED_ONCE)
    tool: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] | None = field(default_factory=dict)
    node: Mapping[str, Any] = field(default_factory=dict)
    cure: Mapping[str, Any] | None = None
    settled: bool = False


CASES = [
    Case("changed", {"TOOL_CHANGED"}, changes={"version": "2"}, cure={"override": ["TOOL_CHANGED"]}),
    Case("missing", {"TOOL_MISSING"}, changes=None),
    Case(
        "changed-schema",
        {"TOOL_CHANGED", "INPUT_INVALID"},
        changes={"input_schema": {"type": "object", "required": ["currency"]}},
        cure={"override": ["TOOL_CHANGED"], "input": {"amount": 1, "currency": "EUR"}},
    ),
    Case(
        "invalid",
        {"INPUT_INVALID"},
        steps=[{}],
        tool={"input_schema": {"type": "object", "properties": {"amount": {"type": "integer"}}}},
        node={"input": {"amount": {"$output": "source"}}},
        cure={"input": {"amount": 7}},
    ),
    Case(
        "expired",
        {"APPROVAL_EXPIRED"},
        steps=[{}],
        node={"approval": approval("old", days=-1)},
        cure={"approval": approval("new")},
    ),
    Case("revoked", {"APPROVAL_REVOKED"}, node={"approval": approval("taken")}, cure={"approval": approval("new")}),
    Case("required", {"APPROVAL_VOID"}, steps=[{}], tool={"approval": "required"}, cure={"approval": approval("new")}),
    Case(
        "void",
        {"TOOL_CHANGED", "APPROVAL_VOID"},
        changes={"version": "2"},
        node={"approval": approval("for-version-1")},
        cure={"override": ["TOOL_CHANGED"], "approval": approval("for-version-2")},
    ),
    Case(
        "unknown",
        {"SIDE_EFFECT_UNRESOLVED"},
        steps=UNKNOWN_ONCE,
        cure={"override": ["SIDE_EFFECT_UNRESOLVED"]},
    ),
    Case(
        "unanswered",
        {"SIDE_EFFECT_UNRESOLVED"},
        steps=UNKNOWN_ONCE,
        tool={"reconcile": True, **ONCE},
        cure={"override": ["SIDE_EFFECT_UNRESOLVED"]},
    ),
    Case("confirmed", {"EFFECT_CONFIRMED"}, steps=[{"body": {}}], tool={"output_schema": NEEDS_ID}, settled=True),
    Case(
        "confirmed-late",
        {"EFFECT_CONFIRMED"},
        steps=[{"body": {}}],
        tool={"output_schema": NEEDS_ID, "idempotency": "key", "dedupe_window": "1s"},
        settled=True,
    ),
    Case(
        "late",
        {"DEDUPE_WINDOW_EXPIRED"},
        steps=UNKNOWN_ONCE,
        tool={"idempotency": "key", "dedupe_window": "1s", **ONCE},
        cure={"override": ["DEDUPE_WINDOW_EXPIRED"]},
    ),
    Case("limited", {"REDRIVE_LIMIT"}, tool={"max_redrives": 0}, cure={"override": ["REDRIVE_LIMIT"]}),
    Case(
        "all-at-once",
        {"TOOL_CHANGED", "SIDE_EFFECT_UNRESOLVED", "REDRIVE_LIMIT"},
        steps=UNKNOWN_ONCE,
        tool={"max_redrives": 0},
        changes={"version": "2"},
        cure={"override": OVERRIDABLE},
    ),
]


async def test_a_refusal_is_shown_beforehand_given_on_the_decision_and_cured_as_it_says(bench: Bench) -> None:
    await bench.tool("source", [{"body": "no number"}])
    for case in CASES:
        await bench.tool(case.name, [dict(step) for step in case.steps], **case.tool)
    await bench.tools.reconcile_script(bench.unique("unanswered"), [{"status": 500}])
    runs: dict[str, Run] = {}
    async with bench.worker():
        for case in CASES:
            node = {"id": "pay", "tool": case.name, "input": {"amount": 1}, **case.node}
            source = [{"id": "source", "tool": "source"}] if case.name == "invalid" else []
            runs[case.name] = await bench.start(*source, node)
        for run in runs.values():  # one after the other: what is asked all at once keeps the worker busy
            await bench.parked(run, "pay")
        await runs["revoked"].signal("revoke_approval", {"approval_id": "taken", "revoked_by": "carol"})
        await _checked(bench, runs["revoked"], {"APPROVAL_REVOKED"})

    before = dict(bench.catalog)
    for case in CASES:
        if case.changes is None:
            del bench.catalog[case.name]
        else:
            bench.catalog[case.name] = bench.catalog[case.name] | case.changes
    async with bench.worker(), asyncio.TaskGroup() as group:
        for case in CASES:
            group.create_task(_is_refused_then_cured(bench, case, runs[case.name]), name=case.name)

    bench.catalog["missing"] = before["missing"]
    async with bench.worker():
        assert (await bench.decide(runs["missing"], "pay", "check")).outcome == "NOTED"
        assert (await bench.entry(runs["missing"], "pay")).eligibility.redrivable
        assert (await bench.decide(runs["missing"], "pay", "redrive")).outcome == "ACCEPTED"
        assert (await runs["missing"].result())["status"] == "SUCCEEDED"


async def _is_refused_then_cured(bench: Bench, case: Case, run: Run) -> None:
    calls = len(await bench.tools.calls(bench.unique(case.name)))
    entry = await _checked(bench, run, case.refusals)
    assert not entry.eligibility.redrivable
    assert entry.eligibility.checked_at > entry.last_failed_at

    plain = await bench.decide(run, "pay", "redrive")
    assert (plain.outcome, set(plain.refusals)) == ("REFUSED", case.refusals), case.name
    if standing := case.refusals - set(OVERRIDABLE):
        forced = await bench.decide(run, "pay", "redrive", override=OVERRIDABLE)
        assert (forced.outcome, set(forced.refusals)) == ("REFUSED", standing), case.name
    assert len(await bench.tools.calls(bench.unique(case.name))) == calls, case.name
    entry = await bench.entry(run, "pay")
    assert (entry.status, entry.redrives) == ("AWAITING_DECISION", 0)
    assert plain in entry.decisions

    if case.settled:
        record = await bench.decide(run, "pay", "resolve", output={"id": "known"})
        assert record.outcome == "ACCEPTED"
        assert (await run.result())["outputs"]["pay"] == {"id": "known"}
        assert len(await bench.tools.calls(bench.unique(case.name))) == calls
    elif case.cure is not None:
        record = await bench.decide(run, "pay", "redrive", **case.cure)
        assert (record.outcome, record.refusals) == ("ACCEPTED", []), case.name
        assert (await run.result())["status"] == "SUCCEEDED"
        assert len(await bench.tools.calls(bench.unique(case.name))) == calls + 1, case.name


async def _checked(bench: Bench, run: Run, refusals: set[str], node: str = "pay") -> Entry:
    """Checks until that is what stands in the way; time or a signal may have to pass first."""

    async def entry() -> Entry | None:
        assert (await bench.decide(run, node, "check")).outcome == "NOTED"
        found = await bench.entry(run, node)
        return found if set(found.eligibility.refusals) == refusals else None

    return await eventually(entry, f"{refusals} to be shown on {run.id}/{node}")


async def _is_refused(bench: Bench, run: Run, refusals: set[str]) -> Entry:
    """Shown beforehand, given on the decision whatever is overridden."""
    await _checked(bench, run, refusals)
    for payload in ({}, {"override": OVERRIDABLE}, {"new_operation": True, "override": OVERRIDABLE}):
        record = await bench.decide(run, "pay", "redrive", **payload)
        assert (record.outcome, set(record.refusals)) == ("REFUSED", refusals)
    return await bench.entry(run, "pay")


async def test_nothing_is_redriven_for_a_run_that_ends_or_a_node_that_no_longer_waits(bench: Bench) -> None:
    # The effect stays possible, so that nobody may forget these entries.
    for name in ("cancelled", "terminated", "alone"):
        await bench.tool(name, UNKNOWN, idempotency="key", **ONCE)
    await bench.tool("slow", [{"gate": f"{bench.name}-slow"}], timeout="60s")

    async def parked(tool: str) -> Run:
        run = await bench.start(
            {"id": "pay", "tool": tool, "input": {}}, {"id": "slow", "tool": "slow", "input": {"for": tool}}
        )
        entry = await bench.parked(run, "pay")
        assert (entry.side_effect, entry.eligibility.redrivable) == ("POSSIBLE", True)
        return run

    async with bench.worker():
        cancelled, terminated, alone = await asyncio.gather(parked("cancelled"), parked("terminated"), parked("alone"))
        await bench.tools.wait_for(bench.unique("slow"), calls=3)
        await cancelled.cancel()
        await terminated.terminate("an operator's decision")
        await bench.client.get_workflow_handle(node_workflow_id(alone.id, "pay")).cancel()

        await asyncio.gather(
            _is_refused(bench, cancelled, {"RUN_CANCELLING"}),
            _is_refused(bench, terminated, {"RUN_CLOSED"}),
            _is_refused(bench, alone, {"NODE_CLOSED"}),
        )
        await bench.tools.open_gate(f"{bench.name}-slow")
        for run in (cancelled, alone):
            with pytest.raises(WorkflowFailureError):
                await run.result()
        entries = await asyncio.gather(
            *(_is_refused(bench, run, {"RUN_CLOSED"}) for run in (cancelled, terminated, alone))
        )
        assert {entry.status for entry in entries} == {"AWAITING_DECISION"}
        assert {entry.side_effect for entry in entries} == {"POSSIBLE"}
        for name in ("cancelled", "terminated", "alone"):
            assert len(await bench.tools.calls(bench.unique(name))) == 1

        # Only the record is left to be settled.
        assert (await bench.decide(cancelled, "pay", "discard")).outcome == "ACCEPTED"
        assert (await bench.decide(alone, "pay", "resolve", output=None)).outcome == "ACCEPTED"
        assert (await bench.entry(cancelled, "pay")).status == "DISCARDED"
        assert (await bench.entry(alone, "pay")).status == "RESOLVED"


async def test_a_redrive_of_a_closed_run_is_refused_even_if_its_tool_could_say_that_it_happened(bench: Bench) -> None:
    await bench.tool("pay", [{"status": 500, "commit": True}], reconcile=True, **ONCE)
    await bench.tools.reconcile_script(bench.unique("pay"), [{"status": 500}])
    async with bench.worker():
        run = await bench.start({"id": "pay", "tool": "pay", "input": {}})
        await bench.parked(run, "pay")
        await run.cancel()
        with pytest.raises(WorkflowFailureError):
            await run.result()
        await bench.tools.reconcile_script(bench.unique("pay"), [])
        record = await bench.decide(run, "pay", "redrive")
        assert record.outcome == "REFUSED"
        assert "RUN_CLOSED" in record.refusals
        assert len(await bench.tools.calls(bench.unique("pay"))) == 1
        assert (await bench.decide(run, "pay", "reconcile")).outcome == "NOTED"
        assert (await bench.entry(run, "pay")).status == "RESOLVED"


@dataclass(frozen=True)
class Asked:
    """A redrive that asks for more than a plain one, which would be accepted."""

    payload: Mapping[str, Any]
    refusals: set[str]


async def test_what_a_redrive_brings_along_is_judged_by_itself(bench: Bench) -> None:
    await bench.tool("strict", REFUSED, input_schema={"type": "object", "properties": {"amount": {"type": "integer"}}})
    await bench.tool("approved", REFUSED)
    await bench.tool("possible", [*UNKNOWN, {}], idempotency="key", **ONCE)
    await bench.tool("confirmed", [{"body": {}}], idempotency="key", output_schema=NEEDS_ID)
    nodes = {name: {"id": "pay", "tool": name, "input": {"amount": 1}} for name in ("strict", "possible", "confirmed")}
    nodes["approved"] = {"id": "pay", "tool": "approved", "input": {"amount": 1}, "approval": approval("mine")}
    asked = {
        "strict": [Asked({"input": {"amount": "many"}}, {"INPUT_INVALID"}), Asked({"input": None}, {"INPUT_INVALID"})],
        "approved": [
            Asked({"input": {"amount": 2}}, {"APPROVAL_VOID"}),
            Asked({"approval": approval("late", days=-1)}, {"APPROVAL_EXPIRED"}),
            Asked({"approval": approval("taken")}, {"APPROVAL_REVOKED"}),
            Asked({"approval": approval("late", days=-1), "input": {"amount": 2}}, {"APPROVAL_EXPIRED"}),
        ],
        "possible": [
            Asked({"new_operation": True}, {"SIDE_EFFECT_UNRESOLVED"}),
            Asked({"input": {"amount": 2}}, {"SIDE_EFFECT_UNRESOLVED"}),
        ],
        "confirmed": [
            Asked({"new_operation": True}, {"EFFECT_CONFIRMED"}),
            Asked({"new_operation": True, "override": OVERRIDABLE}, {"EFFECT_CONFIRMED"}),
            Asked({"input": {"amount": 2}}, {"EFFECT_CONFIRMED"}),
        ],
    }
    async with bench.worker():

        async def refuses(name: str) -> None:
            run = await bench.start(nodes[name])
            entry = await bench.parked(run, "pay")
            await run.signal("revoke_approval", {"approval_id": "taken", "revoked_by": "carol"})
            calls = await bench.tools.calls(bench.unique(name))
            for ask in asked[name]:
                record = await bench.decide(run, "pay", "redrive", **ask.payload)
                assert (record.outcome, set(record.refusals)) == ("REFUSED", ask.refusals), (name, ask.payload)
            await _checked(bench, run, set())
            after = await bench.entry(run, "pay")
            assert after.eligibility.redrivable
            assert (after.input, after.operation_id, after.redrives) == (entry.input, entry.operation_id, 0)
            assert await bench.tools.calls(bench.unique(name)) == calls
            if name == "possible":
                anew = {"new_operation": True, "override": ["SIDE_EFFECT_UNRESOLVED"]}
                assert (await bench.decide(run, "pay", "redrive", **anew)).outcome == "ACCEPTED"
                assert (await run.result())["status"] == "SUCCEEDED"
                assert len({call.key for call in await bench.tools.calls(bench.unique(name))}) == 2

        async with asyncio.TaskGroup() as group:
            for name in asked:
                group.create_task(refuses(name), name=name)


async def test_a_possible_effect_stays_possible_after_it_was_overridden(bench: Bench) -> None:
    await bench.tool("pay", [{"status": 500}, {"status": 403}, {}])
    async with bench.worker():
        run = await bench.start({"id": "pay", "tool": "pay", "input": {}})
        await bench.parked(run, "pay")
        assert (await bench.decide(run, "pay", "redrive", override=["SIDE_EFFECT_UNRESOLVED"])).outcome == "ACCEPTED"
        entry = await bench.parked(run, "pay", redrives=1)
        assert (entry.error.code, entry.side_effect) == ("http_403", "POSSIBLE")
        assert entry.eligibility.refusals == ["SIDE_EFFECT_UNRESOLVED"]
        assert (await bench.decide(run, "pay", "redrive")).refusals == ["SIDE_EFFECT_UNRESOLVED"]
        assert (await bench.decide(run, "pay", "redrive", override=["SIDE_EFFECT_UNRESOLVED"])).outcome == "ACCEPTED"
        assert (await run.result())["status"] == "SUCCEEDED"


async def test_the_limit_counts_accepted_redrives(bench: Bench) -> None:
    await bench.tool("pay", [{"status": 403}, {"status": 403}, {}], max_redrives=1)
    async with bench.worker():
        run = await bench.start({"id": "pay", "tool": "pay", "input": {}})
        await bench.parked(run, "pay")
        assert (await bench.decide(run, "pay", "redrive", if_redrives=7)).outcome == "REFUSED"
        assert (await bench.decide(run, "pay", "redrive")).outcome == "ACCEPTED"
        assert (await bench.parked(run, "pay", redrives=1)).eligibility.refusals == ["REDRIVE_LIMIT"]
        assert (await bench.decide(run, "pay", "redrive")).refusals == ["REDRIVE_LIMIT"]
        assert (await bench.decide(run, "pay", "redrive", override=["REDRIVE_LIMIT"])).outcome == "ACCEPTED"
        assert (await run.result())["status"] == "SUCCEEDED"


async def test_only_what_may_be_overridden_can_be_named_and_what_was_looked_at_must_still_be_there(
    bench: Bench,
) -> None:
    await bench.tool("pay", [{"status": 403}, {"status": 403}, {}])
    async with bench.worker():
        run = await bench.start({"id": "pay", "tool": "pay", "input": {}})
        await bench.parked(run, "pay")
        for code in [*NOT_OVERRIDABLE, "NO_SUCH_CODE"]:
            with pytest.raises(WorkflowUpdateFailedError) as refused:
                await bench.decide(run, "pay", "redrive", override=["TOOL_CHANGED", code])
            assert isinstance(refused.value.cause, ApplicationError)
            assert "override" in refused.value.cause.message
            payload = {"decided_by": "bob", "reason": "go", "override": [code], "decision_id": code}
            await bench.dead_letter(run, "pay").signal("redrive", payload)
        entry = await bench.entry(run, "pay")
        assert [(record.decision_id, record.outcome) for record in entry.decisions] == [
            (code, "REJECTED") for code in [*NOT_OVERRIDABLE, "NO_SUCH_CODE"]
        ]
        assert all("override" in record.reason for record in entry.decisions)

        for action, more in (("redrive", {}), ("discard", {}), ("resolve", {"output": 1}), ("reconcile", {})):
            changed = await bench.decide(run, "pay", action, if_redrives=1, **more)
            assert (changed.outcome, changed.refusals) == ("REFUSED", ["EVIDENCE_CHANGED"]), action
        assert (await bench.decide(run, "pay", "redrive", if_redrives=0, override=OVERRIDABLE)).outcome == "ACCEPTED"
        await bench.parked(run, "pay", redrives=1)
        stale = await bench.decide(run, "pay", "redrive", if_redrives=0)
        assert (stale.outcome, stale.refusals) == ("REFUSED", ["EVIDENCE_CHANGED"])
        assert (await bench.decide(run, "pay", "redrive", if_redrives=1)).outcome == "ACCEPTED"
        assert (await run.result())["status"] == "SUCCEEDED"
        assert len(await bench.tools.calls(bench.unique("pay"))) == 3


async def test_decisions_that_come_while_another_is_being_taken_lose_to_it(bench: Bench) -> None:
    """The first one asks the tool, and is held there until the others have arrived."""
    gate = f"{bench.name}-gate"
    await bench.tool("pay", [{"status": 500}, {}], reconcile=True, timeout="60s", **ONCE)
    await bench.tools.reconcile_script(bench.unique("pay"), [{"status": 500}, {"status": 500, "gate": gate}])
    async with bench.worker():
        run = await bench.start({"id": "pay", "tool": "pay", "input": {}})
        await bench.parked(run, "pay")
        entry = bench.dead_letter(run, "pay")

        async def arrives(action: str, decision_id: str, **payload: Any) -> Any:
            return await entry.start_update(
                action,
                {"decided_by": "bob", "reason": "go", "decision_id": decision_id} | payload,
                wait_for_stage=WorkflowUpdateStage.ACCEPTED,
            )

        first = await arrives("redrive", "first", override=["SIDE_EFFECT_UNRESOLVED"])
        await bench.tools.wait_for(bench.unique("pay"), reconcile_calls=2)
        await entry.signal("discard", {"decided_by": "eve", "reason": "no", "decision_id": "signalled"})
        others = [
            await arrives("discard", "second"),
            await arrives("resolve", "third", output={"id": "x"}),
            await arrives("redrive", "fourth", override=["SIDE_EFFECT_UNRESOLVED"]),
        ]
        again = await arrives("redrive", "first", override=["SIDE_EFFECT_UNRESOLVED"])
        await bench.tools.open_gate(gate)

        won = DecisionRecord.model_validate(await first.result())
        assert won.outcome == "ACCEPTED"
        for other in others:
            lost = DecisionRecord.model_validate(await other.result())
            assert (lost.outcome, lost.refusals) == ("REFUSED", ["ALREADY_DECIDED"])
        assert DecisionRecord.model_validate(await again.result()) == won
        assert (await run.result())["status"] == "SUCCEEDED"
        closed = await bench.entry(run, "pay")
        assert closed.status == "REDRIVEN"
        outcomes = {record.decision_id: (record.outcome, record.refusals) for record in closed.decisions}
        assert outcomes["first"] == ("ACCEPTED", [])
        # A signal has no other answer than this one.
        assert outcomes["signalled"] == ("REFUSED", ["ALREADY_DECIDED"])


async def test_a_reference_that_could_not_be_resolved_is_never_sent_as_it_stands(bench: Bench) -> None:
    await bench.tool("source", [{"body": {"id": 1}}])
    await bench.tool("pay", [{}])
    async with bench.worker():
        run = await bench.start(
            {"id": "source", "tool": "source"},
            {"id": "pay", "tool": "pay", "input": {"id": {"$output": "source", "pointer": "/nothing"}}},
        )
        entry = await bench.parked(run, "pay")
        assert (entry.error.category, entry.error.code) == ("INVALID_INPUT", "output_missing")
        for redrives, payload in enumerate([{}, {"new_operation": True}]):
            if (await bench.decide(run, "pay", "redrive", **payload)).outcome == "ACCEPTED":
                entry = await bench.parked(run, "pay", redrives=redrives + 1)
                assert entry.error.category == "INVALID_INPUT"
        assert await bench.tools.calls(bench.unique("pay")) == []
        assert (await bench.decide(run, "pay", "redrive", input={"id": 1})).outcome == "ACCEPTED"
        assert (await run.result())["status"] == "SUCCEEDED"
        (call,) = await bench.tools.calls(bench.unique("pay"))
        assert call.body == {"id": 1}
