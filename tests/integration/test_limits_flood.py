"""What may be sent to runs and dead letters, however often: they go on, and the last decision counts."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from temporalio.client import WorkflowExecutionStatus, WorkflowHandle
from temporalio.service import RPCError

from contracts.dead_letters import DecisionOutcome, Entry
from tests.lab import Bench
from tests.waiting import eventually

# Thousands of signals, one after the other: on a busy machine that takes a while.
pytestmark = pytest.mark.timeout(900)

_MORE_THAN_A_HISTORY_TAKES = 5_000
"""Continue-as-new is suggested at 4,096 events; after 10,000 signals to one execution the server refuses the next."""
_WHILE_NOBODY_IS_THERE = 1_000
"""All of them are in one workflow task then."""
_AT_ONCE = 5
_BUSY = 300
"""Seconds in which any machine is done."""


async def flood(workflow: WorkflowHandle[Any, Any], signals: Sequence[tuple[str, Any]], count: int) -> list[RPCError]:
    """Sends the signals again and again; answers what was refused to the sender."""
    refused: list[RPCError] = []
    numbers = iter(range(count))

    async def send() -> None:
        for number in numbers:
            name, payload = signals[number % len(signals)]
            try:
                await workflow.signal(name, payload)
            except RPCError as error:
                refused.append(error)

    await asyncio.gather(*(send() for _ in range(_AT_ONCE)))
    return refused


async def test_a_run_that_is_flooded_with_signals_still_ends_well(bench: Bench) -> None:
    gate = bench.unique("gate")
    await bench.tool("pay", [{"gate": gate}], timeout="10m")
    nonsense = [("nobody knows", 1)]
    async with bench.worker():
        run = await bench.start({"id": "call", "tool": "pay"}, {"id": "then", "tool": "pay", "after": ["call"]})
        await bench.tools.wait_for(bench.unique("pay"), calls=1)
        assert not await flood(run, nonsense, _MORE_THAN_A_HISTORY_TAKES)
        status, now = await bench.status(run), await run.describe()
        await bench.tools.open_gate(gate)
        assert (now.status, status.nodes["call"].status) == (WorkflowExecutionStatus.RUNNING, "RUNNING")
        async with asyncio.timeout(60):
            assert (await run.result())["counts"] == {"SUCCEEDED": 2}
    assert len(await bench.tools.calls(bench.unique("pay"))) == 2


async def parked(bench: Bench) -> tuple[WorkflowHandle[Any, Any], WorkflowHandle[Any, Any], str]:
    """A run, its dead letter, and the execution that this has now; there is no worker any more."""
    await bench.tool("pay", [{"status": 403}, {}])
    async with bench.worker():
        run = await bench.start({"id": "call", "tool": "pay"})
        await bench.parked(run, "call")
    letter = bench.dead_letter(run, "call")
    return run, letter, (await letter.describe()).run_id


async def continued(bench: Bench, letter: WorkflowHandle[Any, Any], first: str) -> int:
    """Waits until an execution has continued as new; the number of its events."""

    async def length() -> int | None:
        now = await bench.client.get_workflow_handle(letter.id, run_id=first).describe()
        return now.history_length if now.status is WorkflowExecutionStatus.CONTINUED_AS_NEW else None

    return await eventually(length, "a dead letter that has continued as new", within=_BUSY)


async def with_decision(bench: Bench, run: WorkflowHandle[Any, Any], decision_id: str) -> Entry:
    async def entry() -> Entry | None:
        found = await bench.entry(run, "call")
        return found if any(one.decision_id == decision_id for one in found.decisions) else None

    return await eventually(entry, f"an answer to {decision_id}", within=_BUSY)


async def test_a_dead_letter_takes_thousands_of_signals_and_then_a_decision(bench: Bench) -> None:
    """The first of them while no worker is there, so that one workflow task has them all."""
    mixed = [
        ("redrive", {"decided_by": "x" * 300}),
        ("discard", None),
        ("no such decision", ["?"] * 20),
        ("check", {}),
        ("redrive", {"decided_by": "tester", "reason": "of another redrive", "if_redrives": 7}),
    ]
    run, letter, first = await parked(bench)
    assert not await flood(letter, mixed, _WHILE_NOBODY_IS_THERE)
    async with bench.worker():
        assert not await flood(letter, mixed, _MORE_THAN_A_HISTORY_TAKES)
        # An update has its turn after every signal before it, and its answer is waited for.
        answer = await bench.decide(run, "call", "redrive", if_redrives=7, decision_id="last")
        assert answer.outcome is DecisionOutcome.REFUSED
        assert await continued(bench, letter, first) < 10_000
        entry = await bench.entry(run, "call")
        assert entry.decisions[-1] == answer
        assert len(entry.decisions) == 200
        assert len(entry.model_dump_json()) < 512 * 1024
        assert (entry.status, entry.redrives) == ("AWAITING_DECISION", 0)
        assert (await letter.describe()).history_length < 10_000
        await letter.signal("redrive", {"decided_by": "tester", "reason": "after all that"})
        async with asyncio.timeout(_BUSY):
            assert (await run.result())["status"] == "SUCCEEDED"
    assert len(await bench.tools.calls(bench.unique("pay"))) == 2


async def test_a_decision_behind_hundreds_that_are_refused_has_its_turn(bench: Bench) -> None:
    run, letter, _ = await parked(bench)
    outdated = ("redrive", {"decided_by": "tester", "reason": "of another redrive", "if_redrives": 7})
    assert not await flood(letter, [outdated], 500)
    await letter.signal("redrive", {"decided_by": "tester", "reason": "after all that"})
    async with bench.worker(), asyncio.timeout(_BUSY):
        await run.result()
    assert len(await bench.tools.calls(bench.unique("pay"))) == 2


async def test_decisions_that_wait_for_their_turn_go_along_when_a_dead_letter_continues_as_new(bench: Bench) -> None:
    run, letter, first = await parked(bench)
    assert not await flood(letter, [("nobody knows", 1)], _MORE_THAN_A_HISTORY_TAKES)
    waiting = [f"d-{number}" for number in range(50)]
    for decision_id in waiting:
        await letter.signal("check", {"decided_by": "tester", "decision_id": decision_id})
    async with bench.worker():
        await continued(bench, letter, first)
        start = (await letter.fetch_history()).events[0].workflow_execution_started_event_attributes
        carried = json.loads(start.input.payloads[0].data)["queue"]
        assert [one["decision_id"] for one in carried] == waiting
        entry = await with_decision(bench, run, waiting[-1])
        answered = entry.decisions[-len(waiting) :]
        assert [one.decision_id for one in answered] == waiting
        assert {one.outcome for one in answered} == {DecisionOutcome.NOTED}
        assert (await bench.decide(run, "call", "redrive")).outcome == "ACCEPTED"
        await run.result()
    assert len(await bench.tools.calls(bench.unique("pay"))) == 2


async def test_who_waits_for_his_answer_behind_thousands_of_signals_gets_it_before_a_dead_letter_continues_as_new(
    bench: Bench,
) -> None:
    run, letter, first = await parked(bench)
    assert not await flood(letter, [("nobody knows", 1)], _MORE_THAN_A_HISTORY_TAKES)
    asked = asyncio.create_task(bench.decide(run, "call", "check", decision_id="asked"))
    async with bench.worker(), asyncio.timeout(_BUSY):
        assert ((await asked).decision_id, (await asked).outcome) == ("asked", DecisionOutcome.NOTED)
        await continued(bench, letter, first)
        assert (await bench.entry(run, "call")).decisions[-1].decision_id == "asked"
        assert (await bench.decide(run, "call", "redrive")).outcome == "ACCEPTED"
        await run.result()
