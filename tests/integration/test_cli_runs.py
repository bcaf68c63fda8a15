"""`redrive run`: the real command against a real server and a real worker."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest
from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError

from tests.integration.cli_support import Ran, Redrive
from tests.lab import Bench
from tests.waiting import eventually

# Each command is a process that imports much: on a busy machine a test takes a while.
pytestmark = pytest.mark.timeout(600)

OK: Mapping[str, Any] = {"effect": "read"}


@pytest.fixture
def redrive(bench: Bench) -> Redrive:
    return Redrive(bench)


def spec(*nodes: dict[str, Any]) -> str:
    return json.dumps({"nodes": list(nodes)})


def node(node_id: str, tool: str = "ok", **more: Any) -> dict[str, Any]:
    return {"id": node_id, "tool": tool, **more}


async def test_a_run_is_started_followed_and_shown(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("ok", **OK)
    run_id = f"{bench.name} 'a' [bold]"
    (bench.folder / "run.json").write_text(spec(node("a"), node("b", after=["a"])))
    async with bench.worker():
        started = (await redrive("run", "start", "run.json", "--id", run_id, "--watch")).ended(0)
        assert f"started run {run_id}" in started.out
        assert f"{run_id}/b SUCCEEDED (operation {run_id}/b/1, 1 attempt)" in started.out
        assert started.out.splitlines()[-1] == f"{run_id} SUCCEEDED"

        shown, document, watched = await asyncio.gather(
            redrive("run", "show", run_id),
            redrive("run", "show", run_id, "--json"),
            redrive("run", "watch", run_id, "--json"),
        )

        async def listed() -> bool:
            runs = (await redrive("run", "list", "--limit", "1000", "--json")).ended(0).json
            return [run["status"] for run in runs if run["run_id"] == run_id] == ["SUCCEEDED"]

        await eventually(listed, "the run to be listed as succeeded")
    lines = [line.split() for line in shown.ended(0).out.splitlines()]
    assert ["NODE", "TOOL", "STATUS", "OPERATION", "ATTEMPTS", "DEAD", "LETTER"] in lines
    assert ["b", "ok", "SUCCEEDED", *f"{run_id}/b/1".split(), "1"] in lines
    assert document.json["status"] == "SUCCEEDED"
    assert document.json["nodes"]["b"]["attempt_count"] == 1
    assert document.json["result"]["counts"] == {"SUCCEEDED": 2}
    assert json.loads(watched.ended(0).out) == document.json


async def test_starting_is_safe_to_repeat(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("pay", [{"status": 403}, {}])
    run_id = f"{bench.name}-again"
    first = spec(node("a", "pay", input={"x": 1, "y": [1.5, "ü"]}))
    reordered = '{"nodes":[{"input":{"y":[1.5,"\\u00fc"],"x":1},"tool":"pay","id":"a"}]}'

    async def start(text: str) -> Ran:
        return await redrive("run", "start", "-", "--id", run_id, "--json", stdin=text)

    async with bench.worker():
        together = await asyncio.gather(*(start(first) for _ in range(4)))
        outcomes = [ran.ended(0).json["outcome"] for ran in together]
        assert sorted(outcomes) == ["ALREADY_RUNNING"] * 3 + ["STARTED"]
        again, other = await asyncio.gather(start(reordered), start(spec(node("a", "pay", input={"x": 2}))))
        assert again.ended(0).json["outcome"] == "ALREADY_RUNNING"
        assert "another specification" in other.ended(1).err
        assert other.out == ""

        run = bench.client.get_workflow_handle(run_id)
        await bench.parked(run, "a")
        await bench.decide(run, "a", "redrive")
        await run.result()
        again, other = await asyncio.gather(start(reordered), start(spec(node("b", "pay"))))
        assert again.ended(0).json["outcome"] == "ALREADY_SUCCEEDED"
        assert "another specification" in other.ended(1).err
    assert len(await bench.tools.effects(bench.unique("pay"))) == 1


async def test_a_run_that_was_none_leaves_its_id_to_the_corrected_one(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("ok", **OK)
    run_id = f"{bench.name}-mistaken"
    async with bench.worker():
        await redrive("run", "start", "-", "--id", run_id, stdin=spec(node("a", "okk")))
        assert "InvalidRun" in (await redrive("run", "watch", run_id)).ended(1).err
        corrected = await redrive("run", "start", "-", "--id", run_id, "--json", stdin=spec(node("a")))
        assert corrected.ended(0).json["outcome"] == "RESTARTED"
        assert (await redrive("run", "watch", run_id)).ended(0).out.splitlines()[-1] == f"{run_id} SUCCEEDED"


async def test_a_run_that_did_not_succeed_is_started_again(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("ok", **OK)
    await bench.tool("no", [{"status": 403}])
    run_id = f"{bench.name}-failed"
    text = spec(node("a"), node("b", "no", after=["a"]))
    async with bench.worker():
        await redrive("run", "start", "-", "--id", run_id, stdin=text)
        await bench.parked(bench.client.get_workflow_handle(run_id), "b")
        (await redrive("dlq", "discard", f"{run_id}/b", "--reason", "given up")).ended(0)
        failed = (await redrive("run", "watch", run_id)).ended(1)
        assert f"run {run_id} has ended FAILED: RunFailed" in failed.err

        restarted = await redrive("run", "start", "-", "--id", run_id, "--json", stdin=text)
        assert restarted.ended(0).json["outcome"] == "RESTARTED"
        (await redrive("run", "watch", run_id)).ended(1)
        other = await redrive("run", "start", "-", "--id", run_id, stdin=spec(node("a")))
        assert "another specification" in other.ended(1).err
    assert len(await bench.tools.calls(bench.unique("ok"))) == 1


async def test_a_bad_spec_starts_nothing_and_names_every_problem(bench: Bench, redrive: Redrive) -> None:
    run_id = f"{bench.name}-bad"
    ran = await redrive(
        *("run", "start", "-", "--id", run_id),
        stdin=spec(node("a b"), node("b", after=["c"]), {"id": "d", "tool": "ok", "retry": 1}),
        environment={"TEMPORAL_ADDRESS": "127.0.0.1:1"},
    )
    for problem in ("nodes[0].id: a node id", "nodes[1].after[0]: there is no node 'c'", "nodes[2].retry: unknown"):
        assert problem in ran.ended(2).err
    with pytest.raises(RPCError, match="not found"):
        await bench.client.get_workflow_handle(run_id).describe()


async def test_a_run_that_no_worker_can_execute_shows_its_problems(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("ok", **OK)
    run_id = f"{bench.name}-invalid"
    async with bench.worker():
        ran = await redrive("run", "start", "-", "--id", run_id, "--watch", stdin=spec(node("a", "nope")))
        assert "InvalidRun" in ran.ended(1).err
        shown = (await redrive("run", "show", run_id)).ended(0)
        document = (await redrive("run", "show", run_id, "--json")).json
    assert "nodes[0].tool" in shown.out
    assert (document["status"], document["failure"]["type"]) == ("FAILED", "InvalidRun")


async def test_following_a_blocked_run_names_the_command_and_goes_on_after_the_decision(
    bench: Bench, redrive: Redrive
) -> None:
    await bench.tool("pay", [{"status": 403}, {}])
    run_id = f"{bench.name}-blocked"
    async with bench.worker(), redrive.running("run", "watch", run_id) as early:
        assert (await early.ended()).code == 1
        await redrive("run", "start", "-", "--id", run_id, stdin=spec(node("a", "pay")))
        async with redrive.running("run", "watch", run_id) as watch:
            assert f"decide: redrive dlq show {run_id}/a" in await watch.says("DEAD_LETTERED")
            await watch.says(f"{run_id} BLOCKED")

            async def listed() -> bool:
                found = await redrive("run", "list", "--status", "blocked", "--json")
                return run_id in [run["run_id"] for run in found.json]

            await eventually(listed, "the run to be listed as blocked")
            (await redrive("dlq", "redrive", f"{run_id}/a", "--reason", "limit raised")).ended(0)
            await watch.says(f"{run_id} SUCCEEDED")
            assert (await watch.ended()).code == 0


async def test_what_is_tried_again_is_shown_with_its_failure_and_its_time(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("away", [{"status": 503, "headers": {"Retry-After": "3600"}}])
    async with bench.worker():
        run = await bench.start(node("a", "away"))

        async def shown() -> list[dict[str, Any]] | None:
            found: list[dict[str, Any]] | None = (
                (await redrive("run", "show", run.id, "--json")).ended(0).json.get("retrying")
            )
            return found

        [retry] = await eventually(shown, "the retry to be shown")
        assert (retry["node_id"], retry["attempt"], retry["category"]) == ("a", 2, "DEPENDENCY_DOWN")
        assert "503" in retry["message"]
        text = (await redrive("run", "show", run.id)).ended(0).out
        assert "tried again by itself:" in text
        assert f"a: attempt 2 at {retry['next_at'][:10]}" in text
        await run.cancel()


async def test_a_run_is_cancelled_once(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("pay", [{"status": 403}])
    run_id = f"{bench.name}-cancel"
    async with bench.worker():
        await redrive("run", "start", "-", "--id", run_id, stdin=spec(node("a", "pay"), node("b", "pay", after=["a"])))
        await bench.parked(bench.client.get_workflow_handle(run_id), "a")
        cancelled = await redrive("run", "cancel", run_id, "--json")
        assert cancelled.ended(0).json["cancel_requested"] is True
        assert "CANCELLED" in (await redrive("run", "watch", run_id)).ended(1).err
        again, document = await asyncio.gather(
            redrive("run", "cancel", run_id), redrive("run", "show", run_id, "--json")
        )
    assert "already CANCELLED" in again.ended(0).out
    assert document.json["status"] == "CANCELLED"
    assert document.json["nodes"]["a"]["status"] == "CANCELLED"


async def test_what_has_ended_cannot_be_cancelled(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("ok", **OK)
    async with bench.worker():
        run = await bench.start(node("a"))
        await run.result()
        assert "already ended SUCCEEDED" in (await redrive("run", "cancel", run.id)).ended(1).err


async def test_runs_are_listed_by_how_they_ended(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("ok", **OK)
    async with bench.worker():
        done = await bench.start(node("a"))
        await done.result()
    waiting = await bench.start(node("a"))
    ended = await bench.start(node("a"))
    await ended.terminate(reason="enough")
    wanted = {done.id: "SUCCEEDED", waiting.id: "RUNNING", ended.id: "TERMINATED"}

    async def listed(*arguments: str) -> dict[str, str]:
        found = (await redrive("run", "list", "--limit", "1000", "--json", *arguments)).ended(0).json
        return {run["run_id"]: run["status"] for run in found if run["run_id"] in wanted}

    async def all_of_them() -> bool:
        return await listed() == wanted

    await eventually(all_of_them, "the runs to be listed")
    statuses = list(wanted.values())
    assert await asyncio.gather(*(listed("--status", status) for status in statuses)) == [
        {run_id: status} for run_id, status in wanted.items()
    ]
    short = (await redrive("run", "list", "--limit", "2")).ended(0)
    assert len(short.out.splitlines()) == 3
    assert "more than 2" in short.err
    assert "none of RUNNING" in (await redrive("run", "list", "--status", "DONE")).ended(2).err


async def test_without_a_worker_nothing_hangs(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("ok", **OK)
    run = await bench.start(node("a"))
    shown = (await redrive("run", "show", run.id)).ended(3)
    assert f"no worker answers on task queue '{bench.queue}'" in shown.err
    async with redrive.running("run", "watch", run.id) as watch:
        await watch.says(f"{run.id} RUNNING")
        await watch.says("no worker answers", on_stderr=True)
        async with bench.worker():
            await watch.says(f"{run.id} SUCCEEDED")
            assert (await watch.ended()).code == 0


async def test_a_run_that_was_ended_without_a_worker_is_shown_all_the_same(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("ok", **OK)
    run = await bench.start(node("a"))
    async with redrive.running("run", "watch", run.id) as watch:
        await watch.says("RUNNING")
        await run.terminate(reason="enough [of it]")
        ran = await watch.ended()
    assert "TERMINATED" in ran.ended(1).err
    shown = (await redrive("run", "show", run.id)).ended(0)
    assert "TERMINATED" in shown.out
    assert "enough [of it]" in shown.out


async def test_ctrl_c_leaves_the_run_alone(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("ok", **OK)
    run = await bench.start(node("a"))
    async with redrive.running("run", "watch", run.id) as watch:
        await watch.says("RUNNING")
        watch.interrupt()
        ran = await watch.ended()
    assert (ran.code, ran.err) == (130, "")
    assert (await run.describe()).status is WorkflowExecutionStatus.RUNNING


async def test_what_is_no_run_is_told(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("ok", **OK)
    async with bench.worker():
        run = await bench.start(node("a"))
        await run.result()
    await bench.client.start_workflow("Other", id=f"{bench.name}-other", task_queue=bench.queue)
    missing, other, taken = await asyncio.gather(
        redrive("run", "show", f"{bench.name}-nope"),
        redrive("run", "watch", f"{bench.name}-other"),
        redrive("run", "start", "-", "--id", f"{bench.name}-other", stdin=spec(node("a"))),
    )
    assert "there is no run" in missing.ended(1).err
    assert "is a Other, not a Run" in other.ended(1).err
    assert "used by a workflow of type Other" in taken.ended(1).err


@pytest.mark.parametrize("arguments", [("run", "show", "x"), ("dlq", "list"), ("setup",), ("worker",)], ids=" ".join)
async def test_without_temporal_every_command_says_so(bench: Bench, redrive: Redrive, arguments: list[str]) -> None:
    await bench.tool("ok", **OK)
    ran = await redrive(*arguments, environment={"TEMPORAL_ADDRESS": "127.0.0.1:1"})
    assert "cannot reach Temporal at 127.0.0.1:1" in ran.ended(3).err
    assert "redrive dev" in ran.err


async def test_a_namespace_that_is_not_there_is_not_taken_for_a_run_that_is_not(bench: Bench, redrive: Redrive) -> None:
    ran = await redrive("run", "show", "x", environment={"TEMPORAL_NAMESPACE": "nowhere"})
    assert "nowhere" in ran.ended(3).err
    assert "TEMPORAL_NAMESPACE" in ran.err
