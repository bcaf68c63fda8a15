"""The ledger locked by somebody else: before a call nothing is sent, after it nothing is lost."""

import asyncio
import logging
from datetime import timedelta

import pytest
from temporalio.api.workflow.v1 import PendingActivityInfo

from activities.ledger.records import OperationState
from contracts.identity import OperationId
from tests.faults.lock import locked
from tests.faults.lookup import last_failure, node_result, operation, pending_call
from tests.lab import Bench
from tests.waiting import eventually

_LONGER_THAN_A_HEARTBEAT_TIMEOUT = 19.0
_IN_FLIGHT = 4
"""So many that their renewals, one after the other, take longer than a heartbeat may."""


async def test_a_locked_ledger_sends_nothing_new_and_loses_nothing_that_was_answered(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    gate = bench.unique("gate")
    await bench.tool("answered", [{"gate": gate}], timeout="30s")
    await bench.tool("unsent", [{}])
    async with bench.worker():
        answered = [await bench.start({"id": "call", "tool": "answered", "input": {}}) for _ in range(_IN_FLIGHT)]
        await bench.tools.wait_for(bench.unique("answered"), calls=_IN_FLIGHT)
        async with locked(bench.folder / "ledger.db"):
            begin = asyncio.get_running_loop().time()
            unsent = await bench.start({"id": "call", "tool": "unsent", "input": {}})
            await bench.tools.open_gate(gate)

            async def turned_away() -> PendingActivityInfo | None:
                call = await pending_call(bench, unsent, "call")
                return call if call is not None and call.HasField("last_failure") else None

            call = await eventually(turned_away, "a delivery that came back")
            failure = await last_failure(call)
            assert failure is not None
            assert (failure.category, failure.code) == ("DEPENDENCY_DOWN", "ledger_unavailable")
            assert (failure.side_effect, failure.attempt) == ("NONE", 0)
            # What is waited for is time: past the heartbeat timeout, within the activity's own.
            await asyncio.sleep(begin + _LONGER_THAN_A_HEARTBEAT_TIMEOUT - asyncio.get_running_loop().time())
            assert not await bench.tools.calls(bench.unique("unsent"))
            for run in answered:
                assert await pending_call(bench, run, "call") is not None
        for run in [*answered, unsent]:
            async with asyncio.timeout(60):
                await run.result()
            node = await node_result(bench, run, "call")
            assert (node["source"], node["attempt_count"]) == ("EXECUTED", 1)
            view = await operation(bench, run, "call")
            assert (view.state, view.epoch, len(view.attempts)) == (OperationState.SUCCEEDED, 1, 1)
        assert len(await bench.tools.calls(bench.unique("answered"))) == _IN_FLIGHT
        assert len(await bench.tools.calls(bench.unique("unsent"))) == 1
    kept = [record.getMessage() for record in caplog.records if "kept" in record.getMessage()]
    for run in answered:
        assert any(str(OperationId(run_id=run.id, node_id="call", logical_attempt=1)) in message for message in kept)


async def test_a_dead_letter_opened_while_the_ledger_is_locked_is_whole_once_it_is_back(bench: Bench) -> None:
    """A decision is not lost either: it is taken when the ledger is back."""
    await bench.tool("charge", [{"status": 403}, {}])
    async with bench.worker():
        run = await bench.start({"id": "call", "tool": "charge", "input": {"amount": 1}})
        await bench.parked(run, "call")
        async with locked(bench.folder / "ledger.db"):
            await bench.dead_letter(run, "call").signal("redrive", {"decided_by": "tester", "reason": "now"})
            deciding = asyncio.create_task(bench.decide(run, "call", "redrive", decision_id="second"))
            done, _ = await asyncio.wait([deciding], timeout=timedelta(seconds=7).total_seconds())
            assert not done
            assert len(await bench.tools.calls(bench.unique("charge"))) == 1
        record = await deciding
        assert (record.outcome, record.refusals) == ("REFUSED", ["ALREADY_DECIDED"])
        assert (await run.result())["status"] == "SUCCEEDED"
        view = await operation(bench, run, "call")
        assert [decision.outcome for decision in view.decisions] == ["ACCEPTED"]
        assert len(await bench.tools.calls(bench.unique("charge"))) == 2
