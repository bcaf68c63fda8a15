"""Faults around dead letters that users of comparable systems have met: what must hold here.

`docs/reported-faults.md` lists them.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from temporalio.client import WorkflowExecutionStatus, WorkflowHandle
from temporalio.service import RPCError, RPCStatusCode

from contracts.dead_letters import Entry
from contracts.identity import OperationId, node_workflow_id
from tests.integration.outcome_table import opened_ledger
from tests.integration.temporal_cli import TemporalCli
from tests.lab import Bench
from tests.waiting import eventually
from workers.embedded import EmbeddedServer

Run = WorkflowHandle[Any, Any]

REFUSED = {"status": 403}
CONTINUES_AFTER = 8
"""Signals of a megabyte: the server suggests to continue as new at 4 MiB of history."""


@pytest.fixture
def cli(temporal: EmbeddedServer) -> TemporalCli:
    return TemporalCli(temporal.address)


def node(name: str, tool: str, **fields: Any) -> dict[str, Any]:
    return {"id": name, "tool": tool, "input": {"amount": 1}, **fields}


def key_of(run: Run, name: str, logical_attempt: int = 1) -> str:
    return OperationId(run_id=run.id, node_id=name, logical_attempt=logical_attempt).idempotency_key


async def execution_of(handle: Run) -> str | None:
    """The execution that is open under the id, if one is."""
    description = await handle.describe()
    return description.run_id if description.status is WorkflowExecutionStatus.RUNNING else None


async def replaced(handle: Run, execution: str | None) -> None:
    """Waits until another execution is open under the id."""

    async def so() -> bool:
        return await execution_of(handle) not in (None, execution)

    await eventually(so, f"another execution of {handle.id}")


async def send_too_much(entry: Run, prefix: str) -> None:
    """Signals that make a dead letter continue as new; each is malformed, and kept as such."""
    for number in range(CONTINUES_AFTER):
        await entry.signal(
            "discard", {"decided_by": "b", "decision_id": f"{prefix}-{number}", "reason": "x" * 1_000_000}
        )


async def test_different_failures_in_a_row_are_all_listed_in_their_order_with_their_times(bench: Bench) -> None:
    await bench.tool("pay", [{"status": 429}, {"status": 423}, REFUSED])
    async with bench.worker():
        run = await bench.start(node("pay", "pay"))
        entry = await bench.parked(run, "pay")
    assert [(attempt.attempt, attempt.code, attempt.http_status) for attempt in entry.attempts] == [
        (1, "http_429", 429),
        (2, "http_423", 423),
        (3, "http_403", 403),
    ]
    assert entry.error.code == "http_403"
    times = [moment for attempt in entry.attempts for moment in (attempt.started_at, attempt.ended_at) if moment]
    assert len(times) == 6
    assert times == sorted(times)
    assert (entry.first_failed_at, entry.last_failed_at) == (times[1], times[-1])
    # They are the tool's own: each call falls within its attempt.
    calls = await bench.tools.calls(bench.unique("pay"))
    assert all(begin <= call.at <= end for call, begin, end in zip(calls, times[::2], times[1::2], strict=True))


async def test_a_redrive_in_the_middle_of_a_chain_calls_nothing_before_it_again(bench: Bench) -> None:
    names = ["one", "two", "three", "four", "five"]
    for name in names:
        await bench.tool(name, [REFUSED, {}] if name == "three" else [{}])
    chain = [
        node(name, name, after=[before] if before else []) for before, name in zip(["", *names], names, strict=False)
    ]
    async with bench.worker():
        run = await bench.start(*chain)
        await bench.parked(run, "three")
        assert (await bench.decide(run, "three", "redrive")).outcome == "ACCEPTED"
        assert (await run.result())["counts"] == {"SUCCEEDED": 5}
    calls = {name: [call.key for call in await bench.tools.calls(bench.unique(name))] for name in names}
    assert calls == {name: [key_of(run, name)] * (2 if name == "three" else 1) for name in names}


# What may become of the workflows of a node that waits for a decision. Each returns when it has been done.


async def dead_letter_continues(bench: Bench, cli: TemporalCli, run: Run) -> None:
    entry = bench.dead_letter(run, "pay")
    before = await execution_of(entry)
    await send_too_much(entry, "too-much")
    await replaced(entry, before)


async def dead_letter_is_reset(bench: Bench, cli: TemporalCli, run: Run) -> None:
    await _reset(cli, bench.dead_letter(run, "pay"))


async def dead_letter_is_terminated(bench: Bench, cli: TemporalCli, run: Run) -> None:
    entry = bench.dead_letter(run, "pay")
    before = await execution_of(entry)
    await entry.terminate("by mistake")
    await replaced(entry, before)


async def node_is_reset(bench: Bench, cli: TemporalCli, run: Run) -> None:
    await _reset(cli, bench.client.get_workflow_handle(node_workflow_id(run.id, "pay")))


async def node_is_terminated(bench: Bench, cli: TemporalCli, run: Run) -> None:
    workflow = bench.client.get_workflow_handle(node_workflow_id(run.id, "pay"))
    before = await execution_of(workflow)
    await workflow.terminate("by mistake")
    await replaced(workflow, before)


async def run_is_reset(bench: Bench, cli: TemporalCli, run: Run) -> None:
    await _reset(cli, run)


async def run_is_started_again(bench: Bench, cli: TemporalCli, run: Run) -> None:
    await run.terminate("by mistake")
    await bench.start(node("pay", "pay"), run_id=run.id)


async def _reset(cli: TemporalCli, handle: Run) -> None:
    before = await execution_of(handle)
    await cli.done("workflow", "reset", "-w", handle.id, "-t", "FirstWorkflowTask", "--reason", "to see")
    await replaced(handle, before)


Becoming = Callable[[Bench, TemporalCli, Run], Awaitable[None]]
BECOMES: list[Becoming] = [
    dead_letter_continues,
    dead_letter_is_reset,
    dead_letter_is_terminated,
    node_is_reset,
    node_is_terminated,
    run_is_reset,
    run_is_started_again,
]


@pytest.mark.parametrize("becomes", BECOMES, ids=lambda becomes: becomes.__name__)
async def test_key_redrives_and_decisions_survive_whatever_becomes_of_the_workflows(
    bench: Bench, cli: TemporalCli, becomes: Becoming
) -> None:
    await bench.tool("pay", [REFUSED, REFUSED, REFUSED, {}])
    async with bench.worker():
        run = await bench.start(node("pay", "pay"))
        await bench.parked(run, "pay")
        assert (await bench.decide(run, "pay", "redrive", decision_id="first")).outcome == "ACCEPTED"
        await bench.parked(run, "pay", redrives=1)
        assert (await bench.decide(run, "pay", "redrive", decision_id="anew", new_operation=True)).outcome == "ACCEPTED"
        before = await bench.parked(run, "pay", redrives=2)
        await becomes(bench, cli, run)
        after = await bench.parked(run, "pay", redrives=2)
        assert accepted(after) == ["first", "anew"]
        for name in ("operation_id", "idempotency_key", "attempts", "first_failed_at", "input", "error", "trace_id"):
            assert getattr(after, name) == getattr(before, name), name
        assert (await bench.decide(run, "pay", "redrive", decision_id="last")).outcome == "ACCEPTED"
        result = await bench.client.get_workflow_handle(run.id).result()
        assert result["counts"] == {"SUCCEEDED": 1}
        async with opened_ledger(bench) as ledger:
            view = await ledger.node(run.id, "pay")
        assert view is not None
        assert (view.redrives, [record.decision_id for record in view.decisions]) == (3, ["first", "anew", "last"])
    # The key is the tool's own log's: it changed where a person asked for a new operation, and nowhere else.
    calls = [call.key for call in await bench.tools.calls(bench.unique("pay"))]
    assert calls == [key_of(run, "pay")] * 2 + [key_of(run, "pay", 2)] * 2
    assert len(await bench.tools.effects(bench.unique("pay"))) == 1


def accepted(entry: Entry) -> list[str]:
    return [record.decision_id for record in entry.decisions if record.outcome == "ACCEPTED"]


async def test_a_signal_that_arrives_while_a_dead_letter_continues_as_new_counts_once(bench: Bench) -> None:
    await bench.tool("pay", [REFUSED, {}, {}])
    async with bench.worker():
        run = await bench.start(node("pay", "pay"))
        await bench.parked(run, "pay")
        entry = bench.dead_letter(run, "pay")
        before = await execution_of(entry)
        sent: list[str] = []

        async def keep_sending() -> None:
            # Malformed, so that each is kept and none decides: they arrive before, within and after the change.
            while len(sent) < 20 or (await execution_of(entry) == before and len(sent) < 150):
                sent.append(f"small-{len(sent)}")
                await entry.signal("redrive", {"decided_by": "b", "decision_id": sent[-1]})

        await asyncio.gather(send_too_much(entry, "large"), keep_sending())
        await replaced(entry, before)

        async def all_kept() -> list[str] | None:
            kept = [record.decision_id for record in (await bench.entry(run, "pay")).decisions]
            return kept if len(kept) >= len(sent) + CONTINUES_AFTER else None

        kept = await eventually(all_kept, "every signal to be kept")
        assert sorted(kept) == sorted([*sent, *(f"large-{number}" for number in range(CONTINUES_AFTER))])
        # And a decision in the middle of the next such rush.
        decision = {"decided_by": "b", "reason": "now", "decision_id": "good"}
        await asyncio.gather(send_too_much(entry, "more"), entry.signal("redrive", decision), return_exceptions=True)
        assert (await run.result())["status"] == "SUCCEEDED"
        closed = await bench.entry(run, "pay")
        assert [record.outcome for record in closed.decisions if record.decision_id == "good"] == ["ACCEPTED"]
        assert accepted(closed) == ["good"]
    assert len(await bench.tools.calls(bench.unique("pay"))) == 2


async def test_a_redrive_of_what_has_succeeded_meanwhile_is_answered_with_the_stored_result(
    bench: Bench, cli: TemporalCli
) -> None:
    gate = bench.unique("gate")
    await bench.tool("pay", [{"gate": gate, "body": {"id": "p-1"}}, {"body": {"id": "twice"}}], timeout="100s")
    async with bench.worker():
        run = await bench.start(node("pay", "pay"))
        await bench.tools.wait_for(bench.unique("pay"), calls=1, effects=1)
        # Given up by hand while it is in flight: its answer comes when a person has been asked already.
        await cli.done("activity", "fail", "-w", f"{run.id}/pay", "-a", "call_tool", "--reason", "by hand")
        entry = await bench.parked(run, "pay")
        assert entry.side_effect == "POSSIBLE"
        await bench.tools.open_gate(gate)

        async def answered() -> bool:
            try:
                record = await bench.decide(run, "pay", "redrive")
            except RPCError as error:
                # The check that follows a refusal was faster: it found the answer, and the entry is closed.
                return error.status is RPCStatusCode.NOT_FOUND
            if record.refusals == ["SIDE_EFFECT_UNRESOLVED"]:
                return False
            assert (record.outcome, record.refusals) == ("REFUSED", ["NODE_CLOSED"])
            return True

        await eventually(answered, "the answer to be known")
        result = await bench.client.get_workflow_handle(node_workflow_id(run.id, "pay")).result()
        assert (result["source"], result["output"], result["attempt_count"]) == ("EXECUTED", {"id": "p-1"}, 1)
        assert (await run.result())["outputs"] == {"pay": {"id": "p-1"}}
        assert (await bench.entry(run, "pay")).status == "RESOLVED"
    assert len(await bench.tools.calls(bench.unique("pay"))) == 1


async def test_an_alert_that_was_taken_is_not_sent_again_by_the_next_worker(bench: Bench) -> None:
    webhook = bench.unique("webhook")
    bench.webhook = bench.tools.tool_url(webhook)
    await bench.tool("pay", [REFUSED, {}])
    async with bench.worker():
        run = await bench.start(node("pay", "pay"))
        await bench.parked(run, "pay")
        await bench.tools.wait_for(webhook, calls=1)
    # It has been told, and has finished what it began.
    async with bench.worker():
        assert (await bench.decide(run, "pay", "check")).outcome == "NOTED"
        assert (await bench.decide(run, "pay", "redrive")).outcome == "ACCEPTED"
        assert (await run.result())["status"] == "SUCCEEDED"
        await bench.dead_letter(run, "pay").result()
    assert len(await bench.tools.calls(webhook)) == 1


async def test_a_batch_redrive_and_one_by_hand_send_once_and_answer_both(bench: Bench, cli: TemporalCli) -> None:
    await bench.tool("pay", [*[REFUSED] * 4, {}])
    async with bench.worker():
        runs = [await bench.start(node("pay", "pay")) for _ in range(4)]
        for run in runs:
            await bench.parked(run, "pay")
    entries = [bench.dead_letter(run, "pay") for run in runs]
    query = f"WorkflowType = 'DeadLetter' AND RedriveRunId STARTS_WITH '{bench.name}' AND ExecutionStatus = 'Running'"

    async def listed() -> bool:
        return len(await cli.json("workflow", "list", "--query", query)) == len(entries)

    await eventually(listed, "the dead letters to be listed")
    # Nobody works on them, so that both arrive before either has been answered.
    await entries[0].signal("redrive", {"decided_by": "ann", "reason": "looked at it", "decision_id": "by-hand"})
    batch = json.dumps({"decided_by": "bob", "reason": "the limit is raised", "decision_id": "batch"})
    await cli.done(
        *("workflow", "signal", "--query", query, "--name", "redrive", "--input", batch, "--reason", "all", "--yes")
    )

    async def signalled(entry: Run, count: int) -> bool:
        events = (await entry.fetch_history()).events
        signals = [event for event in events if event.HasField("workflow_execution_signaled_event_attributes")]
        return len(signals) == count

    for number, entry in enumerate(entries):
        await eventually(lambda entry=entry, count=1 + (number == 0): signalled(entry, count), "the batch to be sent")  # type: ignore[misc]
    async with bench.worker():
        for run in runs:
            assert (await run.result())["status"] == "SUCCEEDED"
        records = [
            [
                (record.decision_id, record.outcome, record.refusals)
                for record in (await bench.entry(run, "pay")).decisions
            ]
            for run in runs
        ]
    assert records[0] == [("by-hand", "ACCEPTED", []), ("batch", "REFUSED", ["ALREADY_DECIDED"])]
    assert records[1:] == [[("batch", "ACCEPTED", [])]] * 3
    calls = [call.key for call in await bench.tools.calls(bench.unique("pay"))]
    assert sorted(calls, key=str) == sorted([key_of(run, "pay") for run in runs] * 2)
    assert len(await bench.tools.effects(bench.unique("pay"))) == 4
