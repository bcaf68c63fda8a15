"""`redrive ledger list` and `prune`: the real command against a real server and a real ledger."""

import asyncio
from typing import Any

import pytest
from temporalio.client import WorkflowHandle

from tests.integration.cli_support import Redrive
from tests.integration.temporal_cli import TemporalCli
from tests.lab import Bench
from tests.waiting import eventually

# Each command is a process that imports much: on a busy machine a test takes a while.
pytestmark = pytest.mark.timeout(600)

Run = WorkflowHandle[Any, Any]


@pytest.fixture
def redrive(bench: Bench) -> Redrive:
    return Redrive(bench)


async def run_of(bench: Bench, tool: str) -> Run:
    return await bench.start({"id": "n", "tool": tool, "input": {"amount": 1}})


async def test_operations_are_listed_by_their_state(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("ok")
    await bench.tool("lost", [{"status": 500}])
    await bench.tool("no", [{"status": 403}])
    async with bench.worker():
        runs = {tool: await run_of(bench, tool) for tool in ("ok", "lost", "no")}
        await runs["ok"].result()
        for tool in ("lost", "no"):
            await bench.parked(runs[tool], "n")
    # The ledger is asked, and nobody else.
    alone = {"TEMPORAL_ADDRESS": "127.0.0.1:1"}

    async def listed(*arguments: str) -> list[str]:
        ran = await redrive("ledger", "list", "--json", *arguments, environment=alone)
        return [row["operation_id"] for row in ran.ended(0).json]

    uncertain, failed, done, other, table, few = await asyncio.gather(
        listed(),
        listed("--state", "FAILED"),
        listed("--state", "succeeded", "--run", runs["ok"].id),
        listed("--state", "SUCCEEDED", "--run", runs["no"].id),
        redrive("ledger", "list", "--state", "UNSETTLED", environment=alone),
        redrive("ledger", "list", "--state", "FAILED", "--limit", "1", environment=alone),
    )
    assert uncertain == [f"{runs['lost'].id}/n/1"]
    assert failed == [f"{runs['no'].id}/n/1"]
    assert done == [f"{runs['ok'].id}/n/1"]
    assert other == []
    assert table.ended(0).out.splitlines()[1].split()[:5] == [uncertain[0], "lost", "UNSETTLED", "POSSIBLE", "1"]
    assert "--limit" not in few.ended(0).err


async def test_only_what_temporal_has_forgotten_is_pruned(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("ok")
    await bench.tool("lost", [{"status": 500}])
    async with bench.worker():
        kept, gone, uncertain = [await run_of(bench, tool) for tool in ("ok", "ok", "lost")]
        await asyncio.gather(kept.result(), gone.result())
        await bench.parked(uncertain, "n")

        async def pruned(*arguments: str) -> dict[str, Any]:
            report: dict[str, Any] = (await redrive("ledger", "prune", "--json", *arguments)).ended(0).json
            return {name: report[name] for name in ("runs", "operations", "attempts", "kept")}

        nothing = {"runs": 0, "operations": 0, "attempts": 0, "kept": 0}
        assert await pruned("--older-than", "1h") == nothing
        # Both have ended; each could still be reset.
        assert await pruned("--older-than", "1ms") == nothing | {"kept": 2}
        cli = TemporalCli(bench.client.service_client.config.target_host)
        own = (gone.id, f"{gone.id}/n", uncertain.id, f"{uncertain.id}/n", f"{uncertain.id}/n/dead-letter")
        for workflow_id in own:
            await cli.done("workflow", "delete", "--yes", "--workflow-id", workflow_id)

        async def forgotten() -> bool:
            report = await pruned("--older-than", "1ms", "--dry-run")
            return bool(report["runs"] == 1)

        await eventually(forgotten, "Temporal to have forgotten the run")
        assert (await redrive("ledger", "show", f"{gone.id}/n/1")).code == 0, "a dry run drops nothing"
        ran = (await redrive("ledger", "prune", "--older-than", "1ms")).ended(0)
        assert ran.out == "forgot 1 runs with 1 operations and 1 attempts\n"
        assert "1 more are kept" in ran.err
        shown = await asyncio.gather(*(redrive("ledger", "show", f"{run.id}/n/1") for run in (kept, gone, uncertain)))
        # What is uncertain is never forgotten, whoever else has.
        assert [ran.code for ran in shown] == [0, 1, 0]
        # What was pruned is new; what was not is not.
        for run, calls in ((kept, 2), (gone, 3)):
            again = await bench.start({"id": "n", "tool": "ok", "input": {"amount": 1}}, run_id=run.id)
            await again.result()
            assert len(await bench.tools.calls(bench.unique("ok"))) == calls


async def test_a_run_that_has_been_started_again_is_not_pruned(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("ok")
    async with bench.worker():
        run = await run_of(bench, "ok")
        await run.result()
        cli = TemporalCli(bench.client.service_client.config.target_host)
        for workflow_id in (f"{run.id}/n", run.id):
            await cli.done("workflow", "delete", "--yes", "--workflow-id", workflow_id)
    # Nobody is at work: the second run under this id has not begun.
    again = await bench.start({"id": "n", "tool": "ok", "input": {"amount": 1}}, run_id=run.id)
    ran = (await redrive("ledger", "prune", "--older-than", "1ms", "--json")).ended(0)
    assert (ran.json["runs"], ran.json["kept"]) == (0, 1)
    async with bench.worker():
        assert (await again.result())["counts"] == {"SUCCEEDED": 1}
    assert len(await bench.tools.calls(bench.unique("ok"))) == 1
