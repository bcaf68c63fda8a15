"""What a person decides about a dead letter, and what comes of it: by signal and by update alike."""

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from temporalio.client import (
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowUpdateFailedError,
    WorkflowUpdateStage,
)
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from contracts.dead_letters import DecisionRecord
from contracts.identity import OperationId, node_workflow_id
from tests.lab import Bench
from tests.waiting import eventually

Run = WorkflowHandle[Any, Any]

HOW = pytest.mark.parametrize("how", ["signal", "update"])
REFUSED: list[dict[str, Any]] = [{"status": 403}]
REFUSED_ONCE: list[dict[str, Any]] = [{"status": 403}, {}]
ASK_ONCE: dict[str, Any] = {"retry": {"DEPENDENCY_DOWN": {"attempts": 1}}}

_numbers = itertools.count(1)


async def decide(bench: Bench, run: Run, node: str, how: str, action: str, **payload: Any) -> DecisionRecord:
    """Sends a decision either way, and returns what became of it."""
    if how == "update":
        return await bench.decide(run, node, action, **payload)
    decision_id = payload.setdefault("decision_id", f"signal-{next(_numbers)}")
    await bench.dead_letter(run, node).signal(action, {"decided_by": "tester", "reason": "because"} | payload)

    async def record() -> DecisionRecord | None:
        found = (await bench.entry(run, node)).decisions
        return next((record for record in found if record.decision_id == decision_id), None)

    return await eventually(record, f"what became of the {action} on {run.id}/{node}")


async def result_of(bench: Bench, run: Run, node: str) -> dict[str, Any]:
    """A node's result, as its own workflow has it."""
    result: dict[str, Any] = await bench.client.get_workflow_handle(node_workflow_id(run.id, node)).result()
    return result


async def failure_of(run: Run) -> dict[str, Any]:
    """The details of a failed run."""
    with pytest.raises(WorkflowFailureError) as failed:
        await run.result()
    assert isinstance(failed.value.cause, ApplicationError)
    assert failed.value.cause.type == "RunFailed"
    details: dict[str, Any] = failed.value.cause.details[0]
    return details


@HOW
async def test_a_redrive_repeats_the_operation_unless_a_new_one_is_asked_for(bench: Bench, how: str) -> None:
    async def same() -> None:
        run = await bench.start({"id": "pay", "tool": "same", "input": {"amount": 1}})
        await bench.parked(run, "pay")
        record = await decide(bench, run, "pay", how, "redrive", decided_by="bob", reason="limit raised")
        assert (record.action, record.decided_by, record.reason, record.outcome, record.refusals) == (
            *("redrive", "bob", "limit raised", "ACCEPTED"),
            [],
        )
        assert (await run.result())["status"] == "SUCCEEDED"
        first, second = await bench.tools.calls(bench.unique("same"))
        operation = OperationId(run_id=run.id, node_id="pay", logical_attempt=1)
        assert first.key == second.key == operation.idempotency_key
        assert first.headers["traceparent"][:36] == second.headers["traceparent"][:36]
        result = await result_of(bench, run, "pay")
        assert result | {"output": None} == {
            "node_id": "pay",
            "operation_id": f"{run.id}/pay/1",
            "idempotency_key": first.key,
            "output": None,
            "attempt_count": 2,
            "source": "EXECUTED",
        }
        assert (await bench.status(run)).nodes["pay"].dead_letter is None
        assert (await bench.entry(run, "pay")).status == "REDRIVEN"

    async def anew(tool: str, sent: Any, **payload: Any) -> None:
        run = await bench.start({"id": "pay", "tool": tool, "input": {"amount": 1}})
        await bench.parked(run, "pay")
        assert (await decide(bench, run, "pay", how, "redrive", **payload)).outcome == "ACCEPTED"
        entry = await bench.parked(run, "pay", redrives=1)
        assert (entry.logical_attempt, entry.operation_id) == (2, f"{run.id}/pay/2")
        assert entry.input == sent
        # Again the same operation, which now is the new one.
        assert (await decide(bench, run, "pay", how, "redrive")).outcome == "ACCEPTED"
        assert (await run.result())["status"] == "SUCCEEDED"
        first, second, third = await bench.tools.calls(bench.unique(tool))
        new = OperationId(run_id=run.id, node_id="pay", logical_attempt=2)
        assert first.key != second.key == third.key == new.idempotency_key == entry.idempotency_key
        assert [call.body for call in (first, second, third)] == [{"amount": 1}, sent, sent]
        result = await result_of(bench, run, "pay")
        assert (result["operation_id"], result["idempotency_key"], result["attempt_count"]) == (str(new), third.key, 3)
        assert (await bench.status(run)).nodes["pay"].operation_id == str(new)

    await bench.tool("same", REFUSED_ONCE)
    await bench.tool("new", [*REFUSED, *REFUSED_ONCE])
    await bench.tool("edited", [*REFUSED, *REFUSED_ONCE])
    async with bench.worker(), asyncio.TaskGroup() as group:
        group.create_task(same())
        group.create_task(anew("new", {"amount": 1}, new_operation=True))
        group.create_task(anew("edited", {"amount": 2}, input={"amount": 2}))


@HOW
async def test_a_discard_skips_what_depends_on_the_node_or_lets_it_go_on_without(bench: Bench, how: str) -> None:
    await bench.tool("bad", REFUSED)
    await bench.tool("good", [{"body": {"id": 1}}])
    good = {"tool": "good", "input": {}}
    nodes = (
        {"id": "data", **good, "input": {"from": {"$output": "bad", "pointer": "/id"}}},
        {"id": "order", **good, "after": ["bad"]},
        {"id": "further", **good, "after": ["data"]},
        {"id": "other", **good},
    )

    async def fails() -> None:
        run = await bench.start({"id": "bad", "tool": "bad", "input": {"run": "fails"}}, *nodes)
        await bench.parked(run, "bad")
        assert (await decide(bench, run, "bad", how, "discard")).outcome == "ACCEPTED"
        failure = await failure_of(run)
        counts = {"DISCARDED": 1, "SKIPPED": 3, "SUCCEEDED": 1}
        assert (failure["status"], failure["counts"]) == ("FAILED", counts)
        assert failure["outputs"] == {"other": {"id": 1}}
        state = await bench.status(run)
        assert (state.status, state.counts, state.blocked) == ("FAILED", counts, [])
        assert state.nodes["further"].status == "SKIPPED"
        assert (await bench.entry(run, "bad")).status == "DISCARDED"

    async def continues() -> None:
        run = await bench.start(
            {"id": "bad", "tool": "bad", "input": {"run": "continues"}, "on_discard": "continue"}, *nodes
        )
        await bench.parked(run, "bad")
        assert (await decide(bench, run, "bad", how, "discard")).outcome == "ACCEPTED"
        result = await run.result()
        assert result["counts"] == {"DISCARDED": 1, "SUCCEEDED": 4}
        assert set(result["outputs"]) == {"order", "further", "other"}

    async with bench.worker(), asyncio.TaskGroup() as group:
        group.create_task(fails())
        group.create_task(continues())
    bodies = [call.body for call in await bench.tools.calls(bench.unique("good"))]
    assert {"from": None} in bodies
    assert len(bodies) == 5
    assert len(await bench.tools.calls(bench.unique("bad"))) == 2


@HOW
async def test_a_resolution_must_fit_the_tool_and_is_then_the_nodes_result(bench: Bench, how: str) -> None:
    await bench.tool("pay", [{"status": 500}], output_schema={"type": "object", "required": ["id"]})
    await bench.tool("next", [{"body": "done"}])
    async with bench.worker():
        run = await bench.start(
            {"id": "pay", "tool": "pay", "input": {}},
            {"id": "next", "tool": "next", "input": {"of": {"$output": "pay", "pointer": "/id"}}},
        )
        await bench.parked(run, "pay")
        for output in ({"no": "id"}, None, "id"):
            record = await decide(bench, run, "pay", how, "resolve", output=output)
            assert record.outcome == "REJECTED"
            assert "output" in record.reason
        assert (await bench.entry(run, "pay")).status == "AWAITING_DECISION"
        assert (await decide(bench, run, "pay", how, "resolve", output={"id": "by hand"})).outcome == "ACCEPTED"
        assert (await run.result())["outputs"] == {"next": "done"}
        result = await result_of(bench, run, "pay")
        assert (result["output"], result["source"], result["attempt_count"]) == ({"id": "by hand"}, "RESOLVED", 1)
        assert (await bench.entry(run, "pay")).status == "RESOLVED"
    (call,) = await bench.tools.calls(bench.unique("next"))
    assert call.body == {"of": "by hand"}
    assert len(await bench.tools.calls(bench.unique("pay"))) == 1


@HOW
async def test_asking_the_tool_again_settles_what_it_can_and_leaves_the_rest_open(bench: Bench, how: str) -> None:
    tools: Mapping[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
        # The tool's steps, and what it answers from the second question on.
        "committed": ([{"status": 500, "commit": True, "body": {"id": "c-1"}}], []),
        "absent": ([{"status": 500}, {"body": {"id": "a-2"}}], []),
        "unusable": ([{"status": 500}], [{"body": {"nothing": "useful"}}]),
        "silent": ([{"status": 500}], [{"status": 503}]),
    }
    for name, (steps, _) in tools.items():
        # "Absent" is not believed before the timeout is over.
        await bench.tool(name, steps, reconcile=True, **ASK_ONCE)
        await bench.tools.reconcile_script(bench.unique(name), [{"status": 503}])
    await bench.tool("dumb", [{"status": 500}])
    runs: dict[str, Run] = {}
    async with bench.worker():
        for name in [*tools, "dumb"]:
            runs[name] = await bench.start({"id": "pay", "tool": name, "input": {}})
        for run in runs.values():
            assert (await bench.parked(run, "pay")).side_effect == "POSSIBLE"
        for name, (_, answers) in tools.items():
            await bench.tools.reconcile_script(bench.unique(name), answers)

        async def asked(name: str) -> DecisionRecord:
            record = await decide(bench, runs[name], "pay", how, "reconcile", reason="what happened?")
            assert record.outcome == "NOTED"
            assert record.reason.startswith("what happened?")
            return record

        async def committed() -> None:
            await asked("committed")
            assert (await runs["committed"].result())["outputs"] == {"pay": {"id": "c-1"}}
            result = await result_of(bench, runs["committed"], "pay")
            assert (result["source"], result["attempt_count"]) == ("RECONCILED", 1)
            assert (await bench.entry(runs["committed"], "pay")).status == "RESOLVED"

        async def absent() -> None:
            async def settled() -> bool:
                await asked("absent")
                return (await bench.entry(runs["absent"], "pay")).side_effect == "NONE"

            await eventually(settled, "the tool to be believed that nothing happened")
            entry = await bench.entry(runs["absent"], "pay")
            assert (entry.status, entry.eligibility.redrivable) == ("AWAITING_DECISION", True)
            assert (await decide(bench, runs["absent"], "pay", how, "redrive")).outcome == "ACCEPTED"
            assert (await runs["absent"].result())["outputs"] == {"pay": {"id": "a-2"}}

        async def unusable() -> None:
            await asked("unusable")
            entry = await bench.entry(runs["unusable"], "pay")
            assert (entry.status, entry.side_effect) == ("AWAITING_DECISION", "CONFIRMED")
            assert entry.eligibility.refusals == ["EFFECT_CONFIRMED"]

        async def unknown(name: str) -> None:
            await asked(name)
            entry = await bench.entry(runs[name], "pay")
            assert (entry.status, entry.side_effect) == ("AWAITING_DECISION", "POSSIBLE")
            assert entry.eligibility.refusals == ["SIDE_EFFECT_UNRESOLVED"]

        async with asyncio.TaskGroup() as group:
            group.create_task(committed())
            group.create_task(absent())
            group.create_task(unusable())
            group.create_task(unknown("silent"))
            group.create_task(unknown("dumb"))
    for name in ("committed", "unusable", "silent", "dumb"):
        assert len(await bench.tools.calls(bench.unique(name))) == 1


async def test_a_redrive_of_what_has_happened_takes_the_result_and_calls_no_more(bench: Bench) -> None:
    """The tool answers now, or dedupes by key."""
    await bench.tool("asked", [{"status": 500, "commit": True, "body": {"id": "a-1"}}], reconcile=True, **ASK_ONCE)
    await bench.tools.reconcile_script(bench.unique("asked"), [{"status": 503}])
    lost_once: list[dict[str, Any]] = [{"fault": "rst_after_read", "body": {"id": "k-1"}}, {}]
    retry = {"TRANSIENT": {"attempts": 1}}
    await bench.tool("keyed", lost_once, dedupe=True, idempotency="key", retry=retry)
    async with bench.worker():
        asked = await bench.start({"id": "pay", "tool": "asked", "input": {}})
        keyed = await bench.start({"id": "pay", "tool": "keyed", "input": {}})
        assert (await bench.parked(asked, "pay")).eligibility.refusals == ["SIDE_EFFECT_UNRESOLVED"]
        await bench.tools.reconcile_script(bench.unique("asked"), [])
        assert (await bench.decide(asked, "pay", "redrive")).outcome == "ACCEPTED"
        assert (await asked.result())["outputs"] == {"pay": {"id": "a-1"}}
        assert (await result_of(bench, asked, "pay"))["source"] == "RECONCILED"
        assert len(await bench.tools.calls(bench.unique("asked"))) == 1

        entry = await bench.parked(keyed, "pay")
        assert (entry.side_effect, entry.eligibility.redrivable) == ("POSSIBLE", True)
        assert (await bench.decide(keyed, "pay", "redrive")).outcome == "ACCEPTED"
        assert (await keyed.result())["outputs"] == {"pay": {"id": "k-1"}}
        assert len(await bench.tools.effects(bench.unique("keyed"))) == 1


async def test_a_redriven_node_has_a_fresh_budget_and_all_its_evidence(bench: Bench) -> None:
    turned_away = {"status": 503, "headers": {"retry-after": "0"}}
    retry = {"DEPENDENCY_DOWN": {"attempts": 2, "initial": "20ms"}}
    await bench.tool("pay", [*[turned_away] * 4, {"status": 403}, {}], retry=retry)
    async with bench.worker():
        run = await bench.start({"id": "pay", "tool": "pay", "input": {}})
        first = await bench.parked(run, "pay")
        assert [attempt.attempt for attempt in first.attempts] == [1, 2]
        noted = await bench.decide(run, "pay", "check", decision_id="look", decided_by="ann")
        once = await bench.decide(run, "pay", "redrive", decision_id="once", decided_by="bob")

        second = await bench.parked(run, "pay", redrives=1)
        assert [attempt.attempt for attempt in second.attempts] == [1, 2, 3, 4]
        assert second.attempts[:2] == first.attempts
        assert second.first_failed_at == first.first_failed_at < second.last_failed_at
        assert second.operation_id == first.operation_id
        assert second.failure_fingerprint == first.failure_fingerprint
        assert second.decisions == [noted, once]
        # Seen before, in an earlier dead letter: it changes nothing, whatever it asks for now.
        assert await bench.decide(run, "pay", "redrive", decision_id="once") == once
        assert await bench.decide(run, "pay", "discard", decision_id="once") == once
        await bench.dead_letter(run, "pay").signal(
            "discard", {"decided_by": "eve", "reason": "again", "decision_id": "once"}
        )
        assert (await bench.entry(run, "pay")).status == "AWAITING_DECISION"
        assert len(await bench.tools.calls(bench.unique("pay"))) == 4

        twice = await bench.decide(run, "pay", "redrive", if_redrives=1)
        third = await bench.parked(run, "pay", redrives=2)
        assert [attempt.code for attempt in third.attempts] == ["http_503"] * 4 + ["http_403"]
        assert third.error.code == "http_403"
        assert third.failure_fingerprint != first.failure_fingerprint
        assert third.decisions == [noted, once, twice]
        assert (await bench.status(run)).nodes["pay"].attempt_count == 5
        assert (await bench.decide(run, "pay", "redrive")).outcome == "ACCEPTED"
        assert (await run.result())["status"] == "SUCCEEDED"
        assert (await result_of(bench, run, "pay"))["attempt_count"] == 6


async def test_two_dead_letters_of_a_run_are_decided_in_either_order(bench: Bench) -> None:
    async def decided(first: str, second: str) -> None:
        run = await bench.start(
            {"id": "left", "tool": f"left-{first}", "input": {}},
            {"id": "right", "tool": f"right-{first}", "input": {}},
            {"id": "both", "tool": "both", "input": {}, "after": ["left", "right"]},
        )
        await bench.parked(run, first)
        await bench.parked(run, second)

        async def blocked(count: int) -> bool:
            state = await bench.status(run)
            return len(state.blocked) == count and state.status == "BLOCKED"

        await eventually(lambda: blocked(2), "two nodes to block the run")
        assert (await bench.decide(run, first, "redrive")).outcome == "ACCEPTED"
        await eventually(lambda: blocked(1), "one node to block the run")
        assert (await bench.status(run)).blocked == [second]
        assert (await bench.decide(run, second, "redrive")).outcome == "ACCEPTED"
        assert (await run.result())["counts"] == {"SUCCEEDED": 3}

    for side in ("left", "right"):
        for first in ("left", "right"):
            await bench.tool(f"{side}-{first}", REFUSED_ONCE)
    await bench.tool("both", [{}])
    async with bench.worker(), asyncio.TaskGroup() as group:
        group.create_task(decided("left", "right"))
        group.create_task(decided("right", "left"))


MALFORMED: list[tuple[str, list[Any], str]] = [
    ("redrive", [], "one argument"),
    ("redrive", [{"decided_by": "b", "reason": "r"}, {}], "one argument"),
    ("redrive", ["please"], "object"),
    ("redrive", [[{"decided_by": "b", "reason": "r"}]], "object"),
    ("redrive", [None], "object"),
    ("redrive", [{"reason": "r"}], "decided_by"),
    ("redrive", [{"decided_by": "b"}], "reason"),
    ("redrive", [{"decided_by": 7, "reason": "r"}], "decided_by"),
    ("redrive", [{"decided_by": "", "reason": "r"}], "decided_by"),
    ("redrive", [{"decided_by": "b", "reason": "r", "force": True}], "force"),
    ("redrive", [{"decided_by": "b", "reason": "r", "new_operation": "perhaps"}], "new_operation"),
    ("redrive", [{"decided_by": "b", "reason": "r", "if_redrives": -1}], "if_redrives"),
    ("redrive", [{"decided_by": "b", "reason": "r", "override": "TOOL_CHANGED"}], "override"),
    ("redrive", [{"decided_by": "b", "reason": "r", "approval": {"id": "x"}}], "approval.granted_by"),
    ("redrive", [{"decided_by": "b", "reason": "r", "approval": {"id": "x", "granted_by": "y", "expires_at": "soon"}}],
     "approval.expires_at"),
    ("redrive", [{"decided_by": "b", "reason": "r", "input": "x" * 600_000}], "input"),
    ("discard", [{"decided_by": "b", "reason": "r", "input": {}}], "input"),
    ("discard", [{"decided_by": "b", "reason": "r", "decision_id": 7}], "decision_id"),
    ("resolve", [{"decided_by": "b", "reason": "r"}], "output"),
    ("resolve", [{"decided_by": "b", "reason": "r", "output": "x" * 1_100_000}], "output"),
    ("reconcile", [{}], "decided_by"),
    ("check", [{"decided_by": []}], "decided_by"),
]  # fmt: skip


async def test_a_malformed_decision_is_refused_or_kept_as_rejected_and_the_next_good_one_counts(bench: Bench) -> None:
    await bench.tool("pay", REFUSED_ONCE)
    async with bench.worker():
        run = await bench.start({"id": "pay", "tool": "pay", "input": {}})
        await bench.parked(run, "pay")
        entry = bench.dead_letter(run, "pay")
        for action, arguments, problem in MALFORMED:
            with pytest.raises(WorkflowUpdateFailedError) as refused:
                await entry.execute_update(action, args=arguments)
            assert problem in str(refused.value.cause), (action, arguments)
        with pytest.raises((WorkflowUpdateFailedError, RPCError)):
            await entry.execute_update("retry", {"decided_by": "b", "reason": "r"})
        assert (await bench.entry(run, "pay")).decisions == []

        for action, arguments, _ in MALFORMED:
            await entry.signal(action, args=arguments)
        await entry.signal("retry", {"decided_by": "b", "reason": "r"})

        async def all_kept() -> list[DecisionRecord] | None:
            decisions = (await bench.entry(run, "pay")).decisions
            return decisions if len(decisions) == len(MALFORMED) + 1 else None

        kept = await eventually(all_kept, "every malformed signal to be kept")
        assert {record.outcome for record in kept} == {"REJECTED"}
        assert [record.action for record in kept] == [*(action for action, _, _ in MALFORMED), "retry"]
        for (action, arguments, problem), record in zip(MALFORMED, kept, strict=False):
            assert problem in record.reason, (action, arguments)
        assert kept[6].decided_by == "b"
        assert len({record.decision_id for record in kept}) == len(kept)
        assert await bench.tools.calls(bench.unique("pay")) != []

        await entry.signal("redrive", {"decided_by": "b", "reason": "r", "decision_id": "good"})
        assert (await run.result())["status"] == "SUCCEEDED"
        closed = await bench.entry(run, "pay")
        assert [record.outcome for record in closed.decisions if record.decision_id == "good"] == ["ACCEPTED"]
        assert len(await bench.tools.calls(bench.unique("pay"))) == 2


async def test_an_entry_that_has_been_sent_too_much_continues_as_new_with_all_it_has(bench: Bench) -> None:
    webhook = bench.unique("webhook")
    bench.webhook = bench.tools.tool_url(webhook)
    await bench.tool("pay", REFUSED_ONCE)
    async with bench.worker():
        run = await bench.start({"id": "pay", "tool": "pay", "input": {}})
        before = await bench.parked(run, "pay")
        await bench.tools.wait_for(webhook, calls=1)
        entry = bench.dead_letter(run, "pay")
        execution = (await entry.describe()).run_id
        for number in range(8):  # a suggestion comes with 4 MiB of history
            payload = {"decided_by": "b", "decision_id": f"long-{number}", "reason": "x" * 1_000_000}
            await entry.signal("discard", payload)

        async def continued() -> bool:
            kept = len((await bench.entry(run, "pay")).decisions)
            return (await entry.describe()).run_id != execution and kept == 8

        await eventually(continued, "the entry to continue as new")
        after = await bench.entry(run, "pay")
        assert [(record.decision_id, record.outcome) for record in after.decisions] == [
            (f"long-{number}", "REJECTED") for number in range(8)
        ]
        # It checks anew when it begins anew; all else is as it was.
        assert after.model_copy(update={"decisions": [], "eligibility": before.eligibility}) == before
        assert (await bench.decide(run, "pay", "redrive")).outcome == "ACCEPTED"
        assert (await run.result())["status"] == "SUCCEEDED"
        assert len(await bench.tools.calls(webhook)) == 1


async def test_signals_that_arrive_together_are_taken_in_their_order_and_late_ones_find_it_closed(bench: Bench) -> None:
    await bench.tool("pay", REFUSED_ONCE)
    async with bench.worker():
        run = await bench.start({"id": "pay", "tool": "pay", "input": {}})
        await bench.parked(run, "pay")
        assert (await bench.decide(run, "pay", "redrive", decision_id="no", if_redrives=3)).outcome == "REFUSED"
        # The same again, as it should have been: the first answer stands.
        assert (await bench.decide(run, "pay", "redrive", decision_id="no")).refusals == ["EVIDENCE_CHANGED"]
    entry = bench.dead_letter(run, "pay")
    for decision_id, action in (("first", "redrive"), ("first", "redrive"), ("second", "discard")):
        await entry.signal(action, {"decided_by": "b", "reason": "r", "decision_id": decision_id})
    async with bench.worker():
        assert (await run.result())["status"] == "SUCCEEDED"
        closed = await bench.entry(run, "pay")
        assert closed.status == "REDRIVEN"
        assert [record.outcome for record in closed.decisions if record.decision_id == "first"] == ["ACCEPTED"]
        with pytest.raises(RPCError) as late:
            await bench.decide(run, "pay", "discard")
        assert late.value.status is RPCStatusCode.NOT_FOUND
    assert len(await bench.tools.calls(bench.unique("pay"))) == 2


async def test_the_same_decision_sent_twice_at_once_has_one_effect_and_one_record(bench: Bench) -> None:
    await bench.tool("pay", [*REFUSED, *REFUSED])
    async with bench.worker():
        run = await bench.start({"id": "pay", "tool": "pay", "input": {}})
        await bench.parked(run, "pay")
    payload = {"decided_by": "b", "reason": "r", "decision_id": "same"}
    entry = bench.dead_letter(run, "pay")
    # Nobody takes them up yet: both are there when somebody does.
    sending = [
        asyncio.create_task(entry.start_update("redrive", payload, wait_for_stage=WorkflowUpdateStage.ACCEPTED))
        for _ in range(2)
    ]
    async with bench.worker():
        updates = await asyncio.gather(*sending)
        records = await asyncio.gather(*(update.result() for update in updates))
        assert records[0] == records[1]
        assert records[0]["outcome"] == "ACCEPTED"
        parked = await bench.parked(run, "pay", redrives=1)
        assert [record.decision_id for record in parked.decisions] == ["same"]
    assert len(await bench.tools.calls(bench.unique("pay"))) == 2


async def test_an_entry_is_obsolete_once_its_run_is_gone_and_no_effect_is_possible(bench: Bench) -> None:
    await bench.tool("none", REFUSED)
    await bench.tool("possible", [{"status": 500}])
    async with bench.worker():
        run = await bench.start(
            {"id": "none", "tool": "none", "input": {}}, {"id": "possible", "tool": "possible", "input": {}}
        )
        terminated = await bench.start({"id": "none", "tool": "none", "input": {"other": "run"}})
        for handle, node in ((run, "none"), (run, "possible"), (terminated, "none")):
            await bench.parked(handle, node)
        # A dead letter itself cannot be cancelled away.
        await bench.dead_letter(run, "possible").cancel()
        await run.cancel()
        with pytest.raises(WorkflowFailureError):
            await run.result()
        state = await bench.status(run)
        assert (state.status, state.counts) == ("CANCELLED", {"CANCELLED": 2})

        async def obsolete(handle: Run) -> bool:
            return (await bench.entry(handle, "none")).status == "OBSOLETE"

        await eventually(lambda: obsolete(run), "the entry to become obsolete")
        await terminated.terminate()
        await bench.decide(terminated, "none", "check")
        assert await obsolete(terminated)
        for handle in (run, terminated):
            # It stays open for a day, to be looked at, and still refuses.
            description = await bench.dead_letter(handle, "none").describe()
            assert description.status is WorkflowExecutionStatus.RUNNING
            record = await bench.decide(handle, "none", "redrive")
            assert (record.outcome, record.refusals) == ("REFUSED", ["RUN_CLOSED"])
        assert len(await bench.tools.calls(bench.unique("none"))) == 2

        entry = await bench.entry(run, "possible")
        assert (entry.status, entry.side_effect) == ("AWAITING_DECISION", "POSSIBLE")
        assert "RUN_CLOSED" in (await bench.decide(run, "possible", "redrive")).refusals
        assert len(await bench.tools.calls(bench.unique("possible"))) == 1
        assert (await bench.decide(run, "possible", "discard")).outcome == "ACCEPTED"
        assert (await bench.dead_letter(run, "possible").result())["status"] == "DISCARDED"


async def test_a_terminated_dead_letter_is_opened_again_with_what_was_decided(bench: Bench) -> None:
    await bench.tool("pay", [*REFUSED, *REFUSED_ONCE])
    async with bench.worker():
        run = await bench.start({"id": "pay", "tool": "pay", "input": {}})
        await bench.parked(run, "pay")
        accepted = await bench.decide(run, "pay", "redrive")
        first = await bench.parked(run, "pay", redrives=1)
        execution = (await bench.dead_letter(run, "pay").describe()).run_id
        await bench.dead_letter(run, "pay").terminate("by mistake")

        async def opened_again() -> bool:
            description = await bench.dead_letter(run, "pay").describe()
            return description.run_id != execution and description.status is WorkflowExecutionStatus.RUNNING

        await eventually(opened_again, "the dead letter to be opened again")
        second = await bench.parked(run, "pay", redrives=1)
        assert second.attempts == first.attempts
        assert second.decisions == [accepted]
        assert (await bench.decide(run, "pay", "redrive")).outcome == "ACCEPTED"
        assert (await run.result())["status"] == "SUCCEEDED"
    assert len(await bench.tools.calls(bench.unique("pay"))) == 3
