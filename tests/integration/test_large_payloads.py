"""Payloads that Temporal itself refuses are kept in a folder; nothing is lost while the folder is away."""

import json
import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import DeleteWorkflowExecutionRequest, DescribeWorkflowExecutionRequest
from temporalio.client import Client, WorkflowHandle

from contracts.identity import node_workflow_id
from contracts.limits import BY_REFERENCE
from tests.integration.cli_support import Redrive
from tests.lab import Bench
from tests.postgres import PostgresServer
from tests.waiting import eventually
from workers.storage import StorageError, open_storage
from workers.storage.retention import prune

# Megabytes, and on a busy machine.
pytestmark = pytest.mark.timeout(600)

Run = WorkflowHandle[Any, Any]

LARGE = 3_000_000
TEXT = "x" * LARGE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "payloads"
    path.mkdir()
    return path


@pytest.fixture
async def large(bench: Bench, folder: Path) -> Bench:
    """A bench whose client and workers keep large payloads in the folder."""
    bench.keep_large_payloads(folder.as_uri())
    return bench


def move(folder: Path, elsewhere: Path) -> None:
    folder.rename(elsewhere)


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def large_tool(bench: Bench, name: str, *before: dict[str, Any], **settings: Any) -> str:
    """Answers with three megabytes, after some other steps."""
    steps = [*before, {"body": {"text": TEXT}}]
    return await bench.tool(name, steps, max_response_bytes=4 << 20, timeout="30s", **settings)


@pytest.mark.parametrize("ledger", ["sqlite", "postgresql"])
async def test_a_specification_an_output_and_an_input_of_three_megabytes(
    large: Bench, ledger: str, postgres: PostgresServer
) -> None:
    if ledger == "postgresql":
        large.ledger = postgres.url(await postgres.database())
    await large_tool(large, "make")
    await large.tool("take")
    async with large.worker():
        run = await large.start(
            {"id": "make", "tool": "make", "input": {"text": TEXT}},
            {"id": "take", "tool": "take", "input": {"made": {"$output": "make", "pointer": "/text"}}},
            {"id": "look", "tool": "make", "after": ["take"], "input": {}},
        )
        result = await run.result()
    assert result["counts"] == {"SUCCEEDED": 3}
    assert result["outputs"] == {"look": {"text": TEXT}}
    (made, _), (taken,) = [await large.tools.calls(large.unique(name)) for name in ("make", "take")]
    assert (made.body, taken.body) == ({"text": TEXT}, {"made": TEXT})


async def test_a_dead_letter_with_three_megabytes_is_redriven_edited_and_resolved(large: Bench) -> None:
    await large.tool("same", [{"status": 403}, {}])
    await large.tool("edited", [{"status": 400}, {}])
    await large.tool("resolved", [{"status": 403}])
    async with large.worker():
        run = await large.start(
            {"id": "same", "tool": "same", "input": {"text": TEXT}},
            {"id": "edited", "tool": "edited", "input": {"text": TEXT}},
            {"id": "resolved", "tool": "resolved", "input": {}},
        )
        entries = {name: await large.parked(run, name) for name in ("same", "edited", "resolved")}
        assert entries["same"].input == entries["edited"].input == {"text": TEXT}
        edited = {"text": "y" * LARGE}
        records = [
            await large.decide(run, "same", "redrive"),
            await large.decide(run, "edited", "redrive", input=edited),
            await large.decide(run, "resolved", "resolve", output={"by hand": TEXT}),
        ]
        assert [record.outcome for record in records] == ["ACCEPTED"] * 3
        result = await run.result()
    assert result["outputs"]["resolved"] == {"by hand": TEXT}
    first, second = await large.tools.calls(large.unique("same"))
    assert (first.body, first.key) == (second.body, second.key)
    assert (await large.tools.calls(large.unique("edited")))[-1].body == edited


async def test_what_is_too_large_even_so_is_an_error_and_not_a_hang(large: Bench) -> None:
    await large_tool(large, "make")
    await large.tool("small")
    beyond = "x" * (BY_REFERENCE.input + 1)
    made = {"$output": "make", "pointer": "/text"}
    async with large.worker():
        bad = await large.start({"id": "n", "tool": "small", "input": {"text": beyond}})
        with pytest.raises(Exception, match="Workflow execution failed") as failed:
            await bad.result()
        assert f"{BY_REFERENCE.spec} are allowed" in str(failed.value.__cause__)
        run = await large.start(
            {"id": "make", "tool": "make", "input": {}},
            {"id": "n", "tool": "small", "input": {"all": [made, made, made]}},
        )
        entry = await large.parked(run, "n")
        assert (entry.error.category, entry.error.code) == ("INVALID_INPUT", "input_too_large")
        refused = await large.dead_letter(run, "n").execute_update(
            "redrive", {"decided_by": "t", "reason": "r", "input": "x" * LARGE}
        )
        assert refused["outcome"] == "ACCEPTED"
        assert (await run.result())["counts"] == {"SUCCEEDED": 2}


async def test_a_run_that_has_taken_in_too_much_to_be_replayed_continues_as_new(large: Bench) -> None:
    size = 7_000_000
    enough = BY_REFERENCE.taken // size + 1
    await large.tool("make", [{"body": "x" * size}], max_response_bytes=8 << 20, timeout="60s")
    async with large.worker():
        chain = [
            {"id": f"n{number}", "tool": "make", "input": {}, "after": [f"n{number - 1}"] if number else []}
            for number in range(enough + 2)
        ]
        run = await large.start(*chain)
        assert (await run.result())["counts"] == {"SUCCEEDED": enough + 2}
        assert (await run.describe()).run_id != run.first_execution_run_id
    assert len(await large.tools.calls(large.unique("make"))) == enough + 2


async def test_of_large_outputs_of_earlier_executions_only_what_is_referred_to_is_read(large: Bench) -> None:
    made = {"label": "made", "text": "x" * 7_000_000}
    count = 4 * BY_REFERENCE.taken // len(made["text"])
    await large.tool("make", [{"body": made}], max_response_bytes=8 << 20, timeout="60s")
    await large.tool("take")
    makers = [f"n{number}" for number in range(count)]
    async with large.worker():
        run = await large.start(
            *({"id": name, "tool": "make", "input": {}} for name in makers),
            {"id": "all", "tool": "take", "after": makers, "input": {}},
            {
                "id": "labels",
                "tool": "take",
                "after": ["all"],
                "input": {"of": [{"$output": name, "pointer": "/label"} for name in makers]},
            },
            {"id": "texts", "tool": "take", "after": ["all"], "input": {"of": [{"$output": name} for name in makers]}},
        )
        entry = await large.parked(run, "texts")
        assert (entry.error.category, entry.error.code) == ("INVALID_INPUT", "input_too_large")
        await large.decide(run, "texts", "resolve", output=None)
        assert (await run.result())["counts"] == {"SUCCEEDED": count + 3}
    labels = next(call.body for call in await large.tools.calls(large.unique("take")) if call.body)
    assert labels == {"of": ["made"] * count}
    answers = await read_back(large.client, run)
    read = {name for answer in answers for name, places in answer.items() if places == {"/label": "made"}}
    # One of them may have been at hand.
    assert len(read) >= count - 1


async def test_a_large_output_that_many_refer_to_is_read_once(large: Bench) -> None:
    count = 12
    item = "x" * 20_000
    made = {"items": [item] * count, "rest": "x" * 6_700_000}
    await large.tool("make", [{"body": made}], max_response_bytes=8 << 20, timeout="60s")
    await large.tool("take")
    async with large.worker():
        run = await large.start(
            {"id": "list", "tool": "make", "input": {}},
            {"id": "more", "tool": "make", "input": {}},
            *(
                {
                    "id": f"n{number}",
                    "tool": "take",
                    "after": ["more"],
                    "input": {"item": {"$output": "list", "pointer": f"/items/{number}"}},
                }
                for number in range(count)
            ),
        )
        assert (await run.result())["counts"] == {"SUCCEEDED": count + 2}
        assert (await run.describe()).run_id != run.first_execution_run_id
    taken = await large.tools.calls(large.unique("take"))
    assert [call.body for call in taken] == [{"item": item}] * count
    assert len(await read_back(large.client, run)) == 1


async def read_back(client: Client, run: Run) -> list[dict[str, Any]]:
    """What `read_outputs` has answered to each execution of a run; of what is kept elsewhere, its reference."""
    answers: list[dict[str, Any]] = []
    execution = run.first_execution_run_id
    while execution:
        history = await client.get_workflow_handle(run.id, run_id=execution).fetch_history()
        answers += [
            json.loads(event.activity_task_completed_event_attributes.result.payloads[0].data)
            for event in history.events
            if event.HasField("activity_task_completed_event_attributes")
        ]
        execution = history.events[-1].workflow_execution_continued_as_new_event_attributes.new_execution_run_id
    return answers


async def test_a_dead_letter_with_a_large_input_begins_a_new_history_before_it_is_slow_to_replay(large: Bench) -> None:
    await large.tool("no", [{"status": 403}, {}])
    async with large.worker():
        run = await large.start({"id": "no", "tool": "no", "input": {"text": TEXT}})
        before = await large.parked(run, "no")
        first = (await large.dead_letter(run, "no").describe()).run_id
        for number in range(15):
            assert (await large.decide(run, "no", "check", decision_id=f"c{number}")).outcome == "NOTED"
        assert (await large.dead_letter(run, "no").describe()).run_id != first
        after = await large.entry(run, "no")
        assert (after.input, after.attempts) == (before.input, before.attempts)
        assert [record.decision_id for record in after.decisions] == [f"c{number}" for number in range(15)]
        assert (await large.decide(run, "no", "redrive")).outcome == "ACCEPTED"
        assert (await run.result())["counts"] == {"SUCCEEDED": 1}


async def test_only_a_few_large_outputs_are_under_way_at_once_and_parked_nodes_do_not_count(large: Bench) -> None:
    await large.tool("parked", [{"status": 403}], max_response_bytes=16 << 20)
    await large.tool("gated", [{"gate": "open"}], max_response_bytes=16 << 20, timeout="120s")
    at_once = BY_REFERENCE.at_once // BY_REFERENCE.output
    async with large.worker():
        run = await large.start(
            *({"id": f"parked{number}", "tool": "parked", "input": {}} for number in range(at_once)),
            *({"id": f"gated{number}", "tool": "gated", "input": {}} for number in range(at_once + 2)),
        )

        async def under_way() -> bool:
            return len(await large.tools.calls(large.unique("gated"))) == at_once

        await eventually(under_way, "as many calls as may be")
        for number in range(at_once):
            await large.parked(run, f"parked{number}")
        state = await large.status(run)
        assert state.counts == {"PENDING": 2, "RUNNING": at_once, "DEAD_LETTERED": at_once}
        await large.tools.open_gate("open")
        for number in range(at_once):
            await large.decide(run, f"parked{number}", "resolve", output=None)
        assert (await run.result())["counts"] == {"SUCCEEDED": 2 * at_once + 2}


async def test_an_output_that_cannot_be_stored_is_not_lost_and_its_tool_not_called_again(
    large: Bench, folder: Path
) -> None:
    away = folder.with_name("away")
    await large_tool(large, "make")
    await large.tools.script(large.unique("make"), [{"body": {"text": TEXT}, "gate": "folder"}])
    async with large.worker():
        run = await large.start({"id": "make", "tool": "make", "input": {}})

        async def called() -> bool:
            return bool(await large.tools.calls(large.unique("make")))

        await eventually(called, "the call")
        move(folder, away)
        await large.tools.open_gate("folder")
        message = await pending_failure(large.client, node_workflow_id(run.id, "make"))
        assert f"the folder {folder} is gone: mount it again" in message
        move(away, folder)
        assert (await run.result())["outputs"] == {"make": {"text": TEXT}}
    node = await large.client.get_workflow_handle(node_workflow_id(run.id, "make")).result()
    assert node["source"] == "REPLAYED"
    assert len(await large.tools.calls(large.unique("make"))) == 1


async def pending_failure(client: Client, workflow_id: str) -> str:
    """Why the last attempt of an activity has failed."""

    async def failure() -> str | None:
        answer = await client.workflow_service.describe_workflow_execution(
            DescribeWorkflowExecutionRequest(
                namespace=client.namespace, execution=WorkflowExecution(workflow_id=workflow_id)
            )
        )
        return next((one.last_failure.message for one in answer.pending_activities if one.attempt > 1), None)

    message = await eventually(failure, "a failed attempt")
    assert message is not None
    return message


async def test_a_worker_without_the_storage_leaves_the_work_to_one_that_has_it(large: Bench, folder: Path) -> None:
    await large.tool("take")
    storage = large.storage
    run = await large.start({"id": "take", "tool": "take", "input": {"text": TEXT}})
    large.keep_large_payloads(None)

    async def has_failed() -> bool:
        answer = await large.client.workflow_service.describe_workflow_execution(
            DescribeWorkflowExecutionRequest(
                namespace=large.client.namespace, execution=WorkflowExecution(workflow_id=run.id)
            )
        )
        return answer.pending_workflow_task.attempt > 1

    async with large.worker():
        await eventually(has_failed, "a failed workflow task")
    assert files_in(folder)
    large.keep_large_payloads(storage)
    async with large.worker():
        assert (await run.result())["counts"] == {"SUCCEEDED": 1}
    assert len(await large.tools.calls(large.unique("take"))) == 1


async def test_a_worker_does_not_start_without_its_folder(large: Bench, folder: Path) -> None:
    await large.tool("take")
    shutil.rmtree(folder)
    with pytest.raises(StorageError, match=r"there is no folder .*: mount it, or create it"):
        async with large.worker():
            raise AssertionError("it polls")


async def forget(client: Client, *workflow_ids: str) -> None:
    """Has Temporal forget workflows, as it does when their retention is over."""
    for workflow_id in workflow_ids:
        await client.workflow_service.delete_workflow_execution(
            DeleteWorkflowExecutionRequest(
                namespace=client.namespace, workflow_execution=WorkflowExecution(workflow_id=workflow_id)
            )
        )


def made_old(folder: Path, **ago: float) -> None:
    then = (datetime.now(UTC) - timedelta(**ago)).timestamp()
    for path in files_in(folder):
        os.utime(path, (then, then))


async def test_nothing_is_pruned_that_temporal_still_knows_and_a_parked_node_keeps_its_input(
    large: Bench, folder: Path
) -> None:
    assert large.storage is not None
    storage = open_storage(large.storage)
    month = timedelta(days=30)
    await large_tool(large, "make")
    await large.tool("no", [{"status": 403}, {}])
    async with large.worker():
        done = await large.start({"id": "make", "tool": "make", "input": {"text": TEXT}})
        await done.result()
        waits = await large.start({"id": "no", "tool": "no", "input": {"text": TEXT}})
        await large.parked(waits, "no")
        young = await prune(large.client, storage, month, dry_run=False)
        assert (young.payloads, young.kept) == (0, 0)
        made_old(folder, days=90)
        before = len(files_in(folder))
        known = await prune(large.client, storage, month, dry_run=False)
        assert (known.payloads, known.kept, len(files_in(folder))) == (0, 2, before)
        await forget(large.client, done.id, node_workflow_id(done.id, "make"))

        async def only_tried() -> bool:
            report = await prune(large.client, storage, month, dry_run=True)
            return (report.runs, report.kept) == (1, 1)

        await eventually(only_tried, "Temporal to forget")
        assert len(files_in(folder)) == before
        report = await prune(large.client, storage, month, dry_run=False)
        assert report.payloads == before - len(files_in(folder)) > 0
        assert report.bytes > LARGE
    # A new worker reads everything again.
    async with large.worker():
        assert (await large.decide(waits, "no", "redrive")).outcome == "ACCEPTED"
        assert (await waits.result())["counts"] == {"SUCCEEDED": 1}


async def test_the_command_starts_shows_decides_and_prunes(large: Bench, folder: Path) -> None:
    redrive = Redrive(large)
    await large.tool("no", [{"status": 403}])
    spec = large.folder / "run.json"
    spec.write_text(json.dumps({"nodes": [{"id": "no", "tool": "no", "input": {"text": TEXT}}]}))
    output = json.dumps({"by hand": TEXT[: LARGE // 2]})
    run_id = f"{large.name}-cli"
    without = {"REDRIVE_STORAGE": ""}
    async with large.worker():
        too_large = await redrive("run", "start", str(spec), "--id", run_id, environment=without)
        assert "1048576 are allowed" in too_large.ended(2).err
        (await redrive("run", "start", str(spec), "--id", run_id)).ended(0)
        run = large.client.get_workflow_handle(run_id)
        await large.parked(run, "no")
        again = await redrive("run", "start", str(spec), "--id", run_id, "--json")
        assert again.ended(0).json["outcome"] == "ALREADY_RUNNING"
        shown = await redrive("dlq", "show", f"{run_id}/no", "--json")
        assert shown.ended(0).json["input"] == {"text": TEXT}
        blind = await redrive("dlq", "show", f"{run_id}/no", environment=without)
        assert "set REDRIVE_STORAGE to what the workers have" in blind.ended(2).err
        (large.folder / "output.json").write_text(output)
        resolved = await redrive(
            "dlq", "resolve", f"{run_id}/no", "--reason", "by hand", "--output", str(large.folder / "output.json")
        )
        resolved.ended(0)
        assert (await run.result())["outputs"]["no"] == json.loads(output)
    nothing = await redrive("storage", "prune", "--older-than", "30d", "--json")
    assert nothing.ended(0).json["payloads"] == 0
    assert (
        "names no storage"
        in (await redrive("storage", "prune", "--older-than", "30d", environment=without)).ended(2).err
    )
    shutil.rmtree(folder)
    assert "there is no folder" in (await redrive("storage", "prune", "--older-than", "30d")).ended(3).err
