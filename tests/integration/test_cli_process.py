"""`redrive` as a process: what it starts, how it stops, and that its exit code is right every time."""

import asyncio
import json
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from temporalio.api.workflowservice.v1 import PauseWorkflowExecutionRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode
from temporalio.testing import WorkflowEnvironment

from tests.integration.cli_support import Redrive
from tests.integration.temporal_cli import TemporalCli
from tests.lab import Bench
from tests.tool_server import ToolServer
from tests.waiting import eventually
from workers.client import DATA_CONVERTER
from workers.embedded import temporal_binary
from workflows.attributes import SEARCH_ATTRIBUTES

# Each command is a process that imports much: on a busy machine a test takes a while.
pytestmark = pytest.mark.timeout(600)

RUN = json.dumps({"nodes": [{"id": "a", "tool": "ok"}]})


@pytest.fixture
def redrive(bench: Bench) -> Redrive:
    return Redrive(bench)


@pytest.fixture
async def pausing_server(tmp_path: Path) -> AsyncIterator[Client]:
    """A server that can pause workflows."""
    async with await WorkflowEnvironment.start_local(
        data_converter=DATA_CONVERTER,
        search_attributes=SEARCH_ATTRIBUTES,
        dev_server_existing_path=temporal_binary(),
        dev_server_log_level="error",
        dev_server_extra_args=["--dynamic-config-value", "frontend.WorkflowPauseEnabled=true"],
    ) as environment:
        yield environment.client


async def test_one_paused_workflow_hides_nothing(
    pausing_server: Client, tool_server: ToolServer, tmp_path: Path
) -> None:
    bench = Bench(client=pausing_server, tools=tool_server, folder=tmp_path, name="paused")
    redrive = Redrive(bench)
    await bench.tool("pay", [{"status": 403}])
    async with bench.worker():
        runs = [await bench.start({"id": "n", "tool": "pay"}) for _ in range(2)]
        for run in runs:
            await bench.parked(run, "n")
        for workflow_id in (runs[0].id, f"{runs[0].id}/n/dead-letter"):
            await pausing_server.workflow_service.pause_workflow_execution(
                PauseWorkflowExecutionRequest(namespace="default", workflow_id=workflow_id, identity="me", reason="x")
            )

        async def listed(noun: str, *more: str) -> dict[str, str]:
            rows = (await redrive(noun, "list", "--json", *more)).ended(0).json
            return {row.get("id", row["run_id"]): row["status"] for row in rows}

        async def both() -> bool:
            entries = {f"{runs[0].id}/n": "PAUSED", f"{runs[1].id}/n": "AWAITING_DECISION"}
            return set((await listed("run")).values()) == {"PAUSED", "BLOCKED"} and await listed("dlq") == entries

        await eventually(both, "runs and dead letters to be listed, one each of them as paused")
        shown = await redrive("run", "show", runs[1].id)
        assert "BLOCKED" in shown.ended(0).out
        again = await redrive("run", "cancel", runs[0].id)
        again.ended(0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_worker_works_until_it_is_told_to_stop(bench: Bench, redrive: Redrive, number: signal.Signals) -> None:
    await bench.tool("ok", effect="read")
    async with redrive.running("worker") as worker:
        await worker.says("polling", on_stderr=True)
        (await redrive("run", "start", "-", "--id", f"{bench.name}-{number.name}", "--watch", stdin=RUN)).ended(0)
        worker.interrupt(number)
        assert (await worker.ended()).code == 0


async def test_a_bad_catalog_stops_a_worker_before_it_polls(bench: Bench, redrive: Redrive) -> None:
    bench.catalog = {"a": {"url": "ftp://example.com"}, "b": {"url": "https://example.com", "timeout": "soon"}}
    for ran in await asyncio.gather(redrive("worker"), redrive("dev", "--port", "0", "--ui-port", "0")):
        assert 'tools."a".url: ' in ran.ended(2).err
        assert 'tools."b".timeout: ' in ran.err


async def test_dev_keeps_what_it_knows(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("ok", effect="read")
    for expected in ("STARTED", "ALREADY_SUCCEEDED"):
        async with redrive.running("dev", "--port", "0", "--ui-port", "0") as dev:
            address = (await dev.says("Temporal  ")).split()[1]
            assert "http://" in await dev.says("UI  ")
            await dev.says("polling", on_stderr=True)
            there = {"TEMPORAL_ADDRESS": address}
            start = ("run", "start", "-", "--id", "order-1", "--json")
            ran = await redrive(*start, stdin=RUN, environment=there)
            assert ran.ended(0).json["outcome"] == expected
            (await redrive("run", "watch", "order-1", environment=there)).ended(0)
            schedules = await TemporalCli(address).json("schedule", "list")
            assert [schedule["scheduleId"] for schedule in schedules] == [f"redrive-sweep-{bench.queue}"]
            dev.interrupt()
            assert (await dev.ended()).code == 0


async def test_dev_says_when_a_port_is_taken(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("ok", effect="read")
    port = bench.client.service_client.config.target_host.rpartition(":")[2]
    ran = await redrive("dev", "--port", port, "--ui-port", "0")
    assert "--port" in ran.ended(3).err


async def test_setup_is_safe_to_repeat(bench: Bench, redrive: Redrive) -> None:
    for _ in range(2):
        ran = await redrive("setup", "--json")
        assert ran.ended(0).json["search_attributes"] == [key.name for key in SEARCH_ATTRIBUTES]
        assert ran.json["schedules"] == [f"redrive-sweep-{bench.queue}"]
    assert f"redrive-sweep-{bench.queue} sweeps" in (await redrive("setup")).ended(0).out


async def test_a_setting_that_is_not_usable_is_named(bench: Bench, redrive: Redrive) -> None:
    ran = await redrive("run", "start", "-", "--id", "x", stdin=RUN, environment={"REDRIVE_LEDGER": "mysql://x"})
    assert "REDRIVE_LEDGER" in ran.ended(2).err


@pytest.mark.parametrize("command", [["schema", "tools"], ["run", "list"], ["--help"]], ids=" ".join)
async def test_nobody_hears_of_a_pipe_that_is_closed(bench: Bench, redrive: Redrive, command: list[str]) -> None:
    line = f"{shlex.join([sys.executable, '-m', 'cli.main', *command])} | true"
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", line),
        cwd=bench.folder,
        env=redrive.environment(),
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    assert errors == b""


async def test_the_exit_code_is_right_every_time(bench: Bench, redrive: Redrive) -> None:
    await bench.client.start_workflow("Run", {"nodes": []}, id=f"{bench.name}-run", task_queue=bench.queue)
    commands: list[tuple[str, ...]] = [("run", "list"), ("run", "show", "nope"), ("dlq", "list", "--json")] * 10
    assert {(ran.arguments[1], ran.code) for ran in await asyncio.gather(*(redrive(*args) for args in commands))} == {
        ("list", 0),
        ("show", 1),
    }


async def test_a_server_that_goes_away_ends_a_watch(tmp_path: Path, tool_server: ToolServer) -> None:
    environment: Any = await WorkflowEnvironment.start_local(
        dev_server_existing_path=temporal_binary(), dev_server_log_level="error"
    )
    bench = Bench(client=environment.client, tools=tool_server, folder=tmp_path, name="gone")
    redrive = Redrive(bench)
    run = await bench.start({"id": "a", "tool": "ok"})
    async with redrive.running("run", "watch", run.id) as watch:
        await watch.says("RUNNING")
        await environment.shutdown()
        ran = await watch.ended()
    assert "cannot reach Temporal" in ran.ended(3).err
    with pytest.raises(RPCError) as caught:
        await run.query("status")
    assert caught.value.status is RPCStatusCode.UNAVAILABLE
