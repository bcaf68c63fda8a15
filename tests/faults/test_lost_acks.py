"""What the ledger has committed counts, although nobody was told, and although the node was cancelled since."""

import pytest
from temporalio.client import WorkflowFailureError

from activities.ledger.records import OperationState
from contracts.identity import node_workflow_id
from tests.faults.lookup import node_result, operation
from tests.integration.temporal_cli import TemporalCli
from tests.lab import Bench
from tests.waiting import eventually
from tests.worker_process import WorkerProcess

pytestmark = pytest.mark.timeout(180)


async def test_a_success_whose_ack_was_lost_is_no_cancelled_node(bench: Bench) -> None:
    await bench.tool("pay", [{}])
    async with WorkerProcess.start(bench, hold_acks=True) as worker:
        run = await bench.start({"id": "call", "tool": "pay"})
        await bench.tools.wait_for(bench.unique("pay"), effects=1)

        async def committed() -> bool:
            return (await operation(bench, run, "call")).state is OperationState.SUCCEEDED

        await eventually(committed, "the ledger to have the result")
        await run.cancel()
        await worker.kill()
    async with bench.worker():
        with pytest.raises(WorkflowFailureError):
            await run.result()
        node = await node_result(bench, run, "call")
        assert (node["source"], node["output"]["id"]) == ("REPLAYED", f"{bench.unique('pay')}-1")
        assert (await bench.status(run)).nodes["call"].status == "SUCCEEDED"
    assert len(await bench.tools.calls(bench.unique("pay"))) == 1


@pytest.mark.workflow_mode("a fast node's first attempt is not repeated by a reset of its workflow")
async def test_who_decides_is_shown_what_was_tried_since_the_dead_letter_was_opened(bench: Bench) -> None:
    """The node is reset while its dead letter waits: it goes on, has an effect that nobody has seen yet, and fails."""
    slow = {"TRANSIENT": {"initial": "1h", "maximum": "1h"}}
    await bench.tool("pay", [{"status": 408}, {"status": 500, "commit": True}], retry=slow)
    async with bench.worker():
        run = await bench.start({"id": "call", "tool": "pay", "deadline_seconds": 5})
        first = await bench.parked(run, "call")
        assert (first.error.code, first.side_effect, len(first.attempts)) == ("deadline_exceeded", "NONE", 1)
        await TemporalCli(bench.client.service_client.config.target_host).done(
            *("workflow", "reset", "-w", node_workflow_id(run.id, "call"), "-t", "FirstWorkflowTask"),
            *("--reason", "to see"),
        )
        await bench.tools.wait_for(bench.unique("pay"), effects=1)

        async def failed() -> bool:
            return len([a for a in (await operation(bench, run, "call")).attempts if a.ended_at]) == 2

        await eventually(failed, "the second attempt to have failed")
        refused = await bench.decide(run, "call", "discard")
        assert (refused.outcome, refused.refusals) == ("REFUSED", ["EVIDENCE_CHANGED"])

        async def refreshed() -> bool:
            entry = await bench.entry(run, "call")
            return (len(entry.attempts), entry.side_effect) == (2, "POSSIBLE")

        await eventually(refreshed, "the entry to show both attempts")
        assert (await bench.decide(run, "call", "discard")).outcome == "ACCEPTED"
        with pytest.raises(WorkflowFailureError):
            await run.result()
    assert len(await bench.tools.calls(bench.unique("pay"))) == 2
