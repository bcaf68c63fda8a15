"""What people may do very often, or with very much: the evidence is carried along, or it is refused with its size."""

import asyncio

import pytest
from temporalio.service import RPCError

from contracts.identity import node_workflow_id
from tests.integration.cli_support import Redrive
from tests.lab import Bench

# Each redrive takes several workflow tasks: on a busy machine that takes a while.
pytestmark = pytest.mark.timeout(900)


async def test_fifty_redrives_of_one_node_carry_all_the_evidence_along(bench: Bench) -> None:
    await bench.tool("pay", [{"status": 403}] * 51 + [{}], max_redrives=51)
    async with bench.worker():
        run = await bench.start({"id": "call", "tool": "pay"})
        entry = await bench.parked(run, "call")
        for redrives in range(51):
            entry = await bench.parked(run, "call", redrives=redrives)
            assert len(entry.attempts) == redrives + 1
            assert (await bench.decide(run, "call", "redrive", decision_id=f"d-{redrives}")).outcome == "ACCEPTED"
        assert [record.decision_id for record in entry.decisions] == [f"d-{number}" for number in range(50)]
        assert (entry.attempts_omitted, entry.logical_attempt) == (0, 1)
        async with asyncio.timeout(60):
            assert (await run.result())["status"] == "SUCCEEDED"
        node = bench.client.get_workflow_handle(node_workflow_id(run.id, "call"))
        assert (await node.result())["attempt_count"] == 52
        for workflow in (node, run):
            assert (await workflow.describe()).history_length < 4096
    calls = await bench.tools.calls(bench.unique("pay"))
    assert len(calls) == 52
    assert {call.key for call in calls} == {entry.idempotency_key}


async def test_a_specification_of_three_megabytes_is_refused_with_its_size(bench: Bench) -> None:
    await bench.tool("pay", [{}])
    path = bench.folder / "run.json"
    path.write_text('{"nodes": [{"id": "call", "tool": "pay", "input": {"x": "' + "y" * 3_000_000 + '"}}]}')
    run_id = f"{bench.name}-large"
    ran = (await Redrive(bench)("run", "start", str(path), "--id", run_id)).ended(2)
    assert "1048576" in ran.err, ran
    with pytest.raises(RPCError):
        await bench.client.get_workflow_handle(run_id).describe()
    assert await bench.tools.calls(bench.unique("pay")) == []
