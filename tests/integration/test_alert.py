"""The alert: one POST for each failure, repeated only as long as nobody took it, and never in anybody's way."""

import gc
import uuid
from typing import Any

import pytest
import structlog.testing
from temporalio.client import WorkflowHandle

from tests.lab import Bench
from tests.tool_server import Call
from tests.waiting import eventually

REFUSED: list[dict[str, Any]] = [{"status": 403}]


def announce(bench: Bench) -> str:
    """Gives the bench a webhook; returns its name at the tool server."""
    bench.webhook = bench.tools.tool_url(bench.unique("webhook"))
    return bench.unique("webhook")


async def announced(bench: Bench, run: WorkflowHandle[Any, Any], node: str) -> bool:
    """Whether the entry's alert has been taken: the activity that sends it has ended."""
    description = (await bench.dead_letter(run, node).describe()).raw_description
    return not any(activity.activity_type.name == "alert" for activity in description.pending_activities)


def keys(calls: list[Call]) -> set[str | None]:
    return {call.headers.get("idempotency-key") for call in calls}


async def test_every_failure_is_announced_once_with_what_a_person_needs(bench: Bench) -> None:
    webhook = announce(bench)
    await bench.tool("pay", [*REFUSED, {"status": 402, "body": {"secret": "x"}}, {}])
    async with bench.worker():
        run = await bench.start({"id": "pay", "tool": "pay", "input": {"card": "4242-4242"}}, correlation_id="req-77")
        await bench.parked(run, "pay")
        await bench.tools.wait_for(webhook, calls=1)
        await bench.decide(run, "pay", "check")
        assert (await bench.decide(run, "pay", "redrive", if_redrives=5)).outcome == "REFUSED"
        await eventually(lambda: announced(bench, run, "pay"), "the alert to be taken")
        assert (await bench.decide(run, "pay", "redrive")).outcome == "ACCEPTED"
        entry = await bench.parked(run, "pay", redrives=1)
        await bench.tools.wait_for(webhook, calls=2)
        await eventually(lambda: announced(bench, run, "pay"), "the alert to be taken")
        assert (await bench.decide(run, "pay", "redrive")).outcome == "ACCEPTED"
        assert (await run.result())["status"] == "SUCCEEDED"

    first, second = await bench.tools.calls(webhook)
    assert first.method == "POST"
    assert first.headers["content-type"].startswith("application/json")
    assert len(keys([first, second])) == 2
    for call in (first, second):
        assert str(uuid.UUID(call.headers["idempotency-key"])) == call.headers["idempotency-key"]
        assert call.body["run_id"] == run.id
        assert call.body["node_id"] == "pay"
        assert call.body["correlation_id"] == "req-77"
        assert call.body["side_effect"] == "NONE"
        assert "4242-4242" not in str(call.body)
    assert [call.body["error"]["code"] for call in (first, second)] == ["http_403", "http_402"]
    assert [call.body["redrives"] for call in (first, second)] == [0, 1]
    assert second.body["failure_fingerprint"] == entry.failure_fingerprint


async def test_an_alert_that_was_not_taken_is_repeated_under_its_key_also_by_another_worker(bench: Bench) -> None:
    webhook = announce(bench)
    await bench.tools.script(webhook, [{"status": 500}, {"fault": "rst_after_read"}, {}])
    await bench.tool("pay", REFUSED)
    async with bench.worker():
        run = await bench.start({"id": "pay", "tool": "pay", "input": {}})
        await bench.parked(run, "pay")
        await bench.tools.wait_for(webhook, calls=1)
    async with bench.worker():
        await bench.tools.wait_for(webhook, calls=3)
        await eventually(lambda: announced(bench, run, "pay"), "the alert to be taken")
        assert (await bench.entry(run, "pay")).status == "AWAITING_DECISION"
        assert (await bench.decide(run, "pay", "discard")).outcome == "ACCEPTED"
        await bench.dead_letter(run, "pay").result()
    calls = await bench.tools.calls(webhook)
    assert len(calls) == 3
    assert len(keys(calls)) == 1
    assert all(call.body == calls[0].body for call in calls)


async def test_a_webhook_that_does_not_answer_holds_nobody_up(bench: Bench) -> None:
    webhook = announce(bench)
    gate = f"{bench.name}-webhook"
    await bench.tools.script(webhook, [{"gate": gate}])
    await bench.tool("pay", [*REFUSED, {}])
    async with bench.worker():
        run = await bench.start({"id": "pay", "tool": "pay", "input": {}})
        await bench.parked(run, "pay")
        await bench.tools.wait_for(webhook, calls=1)
        assert (await bench.decide(run, "pay", "check")).outcome == "NOTED"
        assert (await bench.decide(run, "pay", "redrive")).outcome == "ACCEPTED"
        assert (await run.result())["status"] == "SUCCEEDED"
        assert (await bench.dead_letter(run, "pay").result())["status"] == "REDRIVEN"
        await bench.tools.open_gate(gate)


async def test_a_decision_that_comes_before_its_alert_is_taken_is_no_error(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    webhook = announce(bench)
    await bench.tools.script(webhook, [{"gate": bench.unique("never")}])
    await bench.tool("pay", [*REFUSED, {}])
    async with bench.worker():
        run = await bench.start({"id": "pay", "tool": "pay"})
        await bench.parked(run, "pay")
        await bench.tools.wait_for(webhook, calls=1)
        assert (await bench.decide(run, "pay", "redrive")).outcome == "ACCEPTED"
        assert (await run.result())["status"] == "SUCCEEDED"
        await bench.tools.open_gate(bench.unique("never"))
    gc.collect()
    errors = [record.getMessage() for record in caplog.records if "never retrieved" in record.getMessage()]
    assert not [error for error in errors if run.id in error]


async def test_without_a_webhook_a_dead_letter_is_an_error_in_the_log(bench: Bench) -> None:
    await bench.tool("pay", REFUSED)
    with structlog.testing.capture_logs() as lines:
        async with bench.worker():
            run = await bench.start({"id": "pay", "tool": "pay", "input": {"card": "4242-4242"}})
            entry = await bench.parked(run, "pay")
            await eventually(lambda: announced(bench, run, "pay"), "the alert to be logged")
    (line,) = [line for line in lines if line["log_level"] == "error"]
    assert line["dead_letter"] == f"{run.id}/pay/dead-letter"
    assert (line["tool"], line["category"], line["code"]) == ("pay", "PERMISSION", "http_403")
    assert line["failure_fingerprint"] == entry.failure_fingerprint
    assert "4242-4242" not in str(line)
