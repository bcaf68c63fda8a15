"""The classic cases that need no lost worker: a tool that asks for patience, refused input, a redrive too late."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from temporalio.client import WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import CancelledError

from contracts.dead_letters import Entry
from contracts.identity import OperationId, node_workflow_id
from tests.faults.lookup import node_result, operation
from tests.lab import Bench
from tests.waiting import eventually


async def _dead_letters_opened(bench: Bench, run: WorkflowHandle[Any, Any], node: str) -> int:
    history = await bench.client.get_workflow_handle(node_workflow_id(run.id, node)).fetch_history()
    return sum(event.HasField("start_child_workflow_execution_initiated_event_attributes") for event in history.events)


async def test_a_rate_limited_call_is_repeated_under_the_same_key_and_not_before_its_time(bench: Bench) -> None:
    until = (datetime.now(UTC) + timedelta(seconds=4)).replace(microsecond=0)
    waits = {"seconds": "2", "date": format_datetime(until, usegmt=True)}
    for name, wait in waits.items():
        await bench.tool(name, [{"status": 429, "headers": {"retry-after": wait}}, {}])
    async with bench.worker():
        runs = {name: await bench.start({"id": "call", "tool": name, "input": {"amount": 1}}) for name in waits}
        for name, run in runs.items():
            await run.result()
            node = await node_result(bench, run, "call")
            assert (node["attempt_count"], node["source"]) == (2, "EXECUTED")
            assert node["operation_id"] == str(OperationId(run_id=run.id, node_id="call", logical_attempt=1))
            limited, again = await bench.tools.calls(bench.unique(name))
            assert limited.key == again.key == node["idempotency_key"]
            assert limited.body == again.body
            assert again.at >= (until if name == "date" else limited.at + timedelta(seconds=2))
            first, second = (await operation(bench, run, "call")).attempts
            assert (first.category, first.side_effect, first.http_status) == ("RATE_LIMITED", "NONE", 429)
            assert first.next_eligible_at is not None
            assert second.started_at >= first.next_eligible_at
            assert len(await bench.tools.effects(bench.unique(name))) == 1


async def test_input_that_is_refused_is_called_once_at_most_and_told_to_a_person_once(bench: Bench) -> None:
    await bench.tool("refused", [{"status": 422, "body": {"error": "amount"}}])
    await bench.tool("retried", [{"status": 400}], retry={"TRANSIENT": {"attempts": 50}})
    await bench.tool("broken", [{}], input_schema={"type": "object", "properties": {"amount": {"type": "integer"}}})
    await bench.tool("first", [{"body": {"amount": "much"}}])
    given: Mapping[str, Any] = {"amount": {"$output": "first", "pointer": "/amount"}}
    missing: Mapping[str, Any] = {"amount": {"$output": "first", "pointer": "/price"}}
    async with bench.worker():
        run = await bench.start(
            {"id": "first", "tool": "first", "input": {}},
            {"id": "refused", "tool": "refused", "input": {"amount": 1}},
            {"id": "retried", "tool": "retried", "input": {"amount": 1}},
            {"id": "broken", "tool": "broken", "input": given},
            {"id": "missing", "tool": "broken", "input": missing},
        )
        expected = {
            "refused": "http_422",
            "retried": "http_400",
            "broken": "input_invalid",
            "missing": "output_missing",
        }
        for node, code in expected.items():
            entry = await bench.parked(run, node)
            assert (entry.error.category, entry.error.code) == ("INVALID_INPUT", code)
            assert entry.side_effect == "NONE"
            assert [attempt.code for attempt in entry.attempts] == [code]
            assert await _dead_letters_opened(bench, run, node) == 1
        assert (await bench.status(run)).blocked == list(expected)
        assert [len(await bench.tools.calls(bench.unique(name))) for name in ("refused", "retried", "broken")] == [
            1,
            1,
            0,
        ]


async def test_a_redrive_after_the_run_was_cancelled_is_refused_and_calls_nothing(bench: Bench) -> None:
    once = {"TRANSIENT": {"attempts": 1}}
    await bench.tool("denied", [{"status": 403}])
    await bench.tool("blind", [{"status": 500}])
    await bench.tool("key", [{"status": 500}], idempotency="key", retry=once)
    nodes = list(bench.catalog)
    async with bench.worker():
        run = await bench.start(*[{"id": name, "tool": name, "input": {"amount": 1}} for name in nodes])
        for node in nodes:
            await bench.parked(run, node)
        await run.cancel()
        with pytest.raises(WorkflowFailureError) as failed:
            await run.result()
        assert isinstance(failed.value.cause, CancelledError)
        assert (await bench.status(run)).status == "CANCELLED"

        ways: list[dict[str, Any]] = [
            {},
            {"new_operation": True},
            {"input": {"amount": 2}},
            {"override": ["SIDE_EFFECT_UNRESOLVED", "TOOL_CHANGED", "DEDUPE_WINDOW_EXPIRED", "REDRIVE_LIMIT"]},
        ]
        for node in nodes:
            for way in ways:
                record = await bench.decide(run, node, "redrive", **way)
                assert record.outcome == "REFUSED"
                assert "RUN_CLOSED" in record.refusals
            await bench.dead_letter(run, node).signal(
                "redrive", {"decided_by": "tester", "reason": "by signal", "decision_id": "signalled"}
            )

            async def answered(node: str = node) -> Entry | None:
                entry = await bench.entry(run, node)
                return entry if entry.decisions[-1].decision_id == "signalled" else None

            entry = await eventually(answered, "the signal's record")
            assert entry.decisions[-1].outcome == "REFUSED"
            assert "RUN_CLOSED" in entry.decisions[-1].refusals
            assert "RUN_CLOSED" in entry.eligibility.refusals
            # Nothing can have happened: nobody needs to decide. Something can have: the entry outlives the run.
            assert entry.status == ("OBSOLETE" if node == "denied" else "AWAITING_DECISION")
            assert len(await bench.tools.calls(bench.unique(node))) == 1
        records = await asyncio.gather(
            bench.decide(run, "blind", "resolve", output={"id": "found"}), bench.decide(run, "key", "discard")
        )
        assert [record.outcome for record in records] == ["ACCEPTED", "ACCEPTED"]
        assert [len(await bench.tools.calls(bench.unique(node))) for node in nodes] == [1, 1, 1]
