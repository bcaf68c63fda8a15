"""All that there is to do with runs and decisions, with nothing but Temporal's own command, or any SDK's plain JSON."""

import asyncio
import json
import uuid
from datetime import timedelta
from typing import Any

import pytest
from temporalio.api.common.v1 import Payload, Payloads, WorkflowExecution, WorkflowType
from temporalio.api.enums.v1 import UpdateWorkflowExecutionLifecycleStage
from temporalio.api.query.v1 import WorkflowQuery
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.update.v1 import Input, Meta, Request, WaitPolicy
from temporalio.api.workflowservice.v1 import (
    DescribeWorkflowExecutionRequest,
    QueryWorkflowRequest,
    SignalWorkflowExecutionRequest,
    StartWorkflowExecutionRequest,
    UpdateWorkflowExecutionRequest,
)

from tests.integration.temporal_cli import TemporalCli
from tests.lab import Bench
from tests.waiting import eventually
from workers.embedded import EmbeddedServer

GATED = "100s"
"""A tool's timeout where the test decides when it answers."""


@pytest.fixture
def cli(temporal: EmbeddedServer) -> TemporalCli:
    return TemporalCli(temporal.address)


def node(name: str, tool: str, **fields: Any) -> dict[str, Any]:
    return {"id": name, "tool": tool, "input": {"amount": 1}, **fields}


def decision(**fields: Any) -> str:
    return json.dumps({"decided_by": "bob", "reason": "looked into it"} | fields)


async def begin(cli: TemporalCli, bench: Bench, name: str, *nodes: dict[str, Any], **fields: Any) -> str:
    """Starts a run from a file."""
    run_id = f"{bench.name}-{name}"
    path = bench.folder / f"{name}.json"
    path.write_text(json.dumps({"nodes": nodes, **fields}))
    ran = await cli.start(bench.queue, run_id, more=("--input-file", str(path)))
    assert ran.code == 0, ran
    return run_id


async def parked(cli: TemporalCli, bench: Bench, run_id: str, name: str, redrives: int = 0) -> Any:
    """The entry of a node that waits for a decision, as the command prints it."""
    await bench.parked(bench.client.get_workflow_handle(run_id), name, redrives)
    return await cli.query(f"{run_id}/{name}/dead-letter", "entry")


def as_printed(value: Any) -> Any:
    """The command prints the empty lists of a query's answer as null."""
    if isinstance(value, dict):
        return {key: as_printed(item) for key, item in value.items()}
    return ([as_printed(item) for item in value] or None) if isinstance(value, list) else value


async def listed(cli: TemporalCli, query: str, count: int) -> set[str]:
    """The ids of what the filter finds, once it is so many."""

    async def found() -> set[str] | None:
        rows = await cli.json("workflow", "list", "--query", query)
        ids = {row["execution"]["workflowId"] for row in rows}
        return ids if len(ids) >= count else None

    return await eventually(found, f"{count} of {query}")


async def test_a_run_is_started_watched_listed_decided_and_read_by_the_command_alone(
    bench: Bench, cli: TemporalCli
) -> None:
    await bench.tool("reserve", [{"body": {"id": "r-1"}}])
    await bench.tool("charge", [{"status": 403}, {"body": {"id": "c-1"}}])
    await bench.tool("mail")
    async with bench.worker():
        run_id = await begin(
            cli,
            bench,
            "order",
            node("reserve", "reserve"),
            node("charge", "charge", input={"for": {"$output": "reserve", "pointer": "/id"}}),
            node("mail", "mail", after=["charge"]),
            correlation_id="req-77",
        )
        order = bench.client.get_workflow_handle(run_id)
        entry = await parked(cli, bench, run_id, "charge")
        assert entry == as_printed((await bench.entry(order, "charge")).model_dump(mode="json"))
        assert (entry["input"], entry["correlation_id"]) == ({"for": "r-1"}, "req-77")
        assert entry["eligibility"]["redrivable"] is True
        status = await cli.query(run_id, "status")
        assert (status["status"], status["blocked"]) == ("BLOCKED", ["charge"])
        assert status["counts"] == {"PENDING": 1, "DEAD_LETTERED": 1, "SUCCEEDED": 1}
        letter = f"{run_id}/charge/dead-letter"
        assert status["nodes"]["charge"]["dead_letter"] == letter

        everything = {run_id, f"{run_id}/reserve", f"{run_id}/charge", letter}
        assert await listed(cli, f"RedriveRunId = '{run_id}'", 4) == everything
        for narrower, wanted in {
            "WorkflowType = 'Run' AND RedriveStatus = 'BLOCKED'": {run_id},
            "WorkflowType = 'Node' AND RedriveTool = 'charge'": {f"{run_id}/charge"},
            "RedriveCategory = 'PERMISSION' AND RedriveStatus = 'AWAITING_DECISION'": {letter},
            f"RedriveFingerprint = '{entry['failure_fingerprint']}' AND ExecutionStatus = 'Running'": {letter},
        }.items():
            assert await listed(cli, f"RedriveRunId = '{run_id}' AND {narrower}", 1) == wanted

        checked = (await cli.update(letter, "check", '{"decided_by": "bob"}')).json()["result"]
        assert (checked["outcome"], checked["refusals"]) == ("NOTED", [])
        late = (await cli.update(letter, "redrive", decision(if_redrives=5))).json()["result"]
        assert (late["outcome"], late["refusals"]) == ("REFUSED", ["EVIDENCE_CHANGED"])
        record = (await cli.update(letter, "redrive", decision(if_redrives=0, decision_id="d-1"))).json()["result"]
        assert {key: record[key] for key in ("decision_id", "action", "decided_by", "reason", "outcome")} == {
            "decision_id": "d-1",
            "action": "redrive",
            "decided_by": "bob",
            "reason": "looked into it",
            "outcome": "ACCEPTED",
        }
        ended = await cli.json("workflow", "result", "--workflow-id", run_id)
        assert ended["status"] == "COMPLETED"
        result = ended["result"]
        assert (result["run_id"], result["status"], result["counts"]) == (run_id, "SUCCEEDED", {"SUCCEEDED": 3})
        assert set(result["outputs"]) == {"mail"}
        assert (await cli.query(run_id, "status"))["status"] == "SUCCEEDED"
        assert (await cli.query(letter, "entry"))["status"] == "REDRIVEN"
        ended = await cli.json("workflow", "result", "--workflow-id", f"{run_id}/charge")
    assert ended["result"] == {
        "attempt_count": 2,
        "idempotency_key": entry["idempotency_key"],
        "node_id": "charge",
        "operation_id": f"{run_id}/charge/1",
        "output": {"id": "c-1"},
        "source": "EXECUTED",
    }


async def test_every_decision_is_sent_as_a_plain_signal(bench: Bench, cli: TemporalCli) -> None:
    await bench.tool("again", [{"status": 403}, {}])
    await bench.tool("edited", [{"status": 403}, {}])
    await bench.tool("never", [{"status": 403}])
    await bench.tool("lost", [{"fault": "fin_after_read"}], reconcile=True, retry={"DEPENDENCY_DOWN": {"attempts": 1}})
    await bench.tools.reconcile_script(bench.unique("lost"), [{"status": 500}, {}])
    await bench.tool("held", [{"gate": f"{bench.name}-gate"}], timeout=GATED)
    async with bench.worker():
        run_id = await begin(
            cli,
            bench,
            "many",
            *(node(name, name) for name in ("again", "edited", "lost")),
            node("resolved", "never"),
            node("discarded", "never", on_discard="continue"),
        )
        failing = await begin(cli, bench, "failing", node("no", "never"), node("then", "again", after=["no"]))
        revoked = await begin(
            cli,
            bench,
            "revoked",
            node("first", "held"),
            node("a", "again", after=["first"], approval={"id": "apr-7", "granted_by": "alice"}),
        )

        async def decide(run: str, name: str, action: str, payload: str) -> None:
            await parked(cli, bench, run, name)
            await cli.signal(f"{run}/{name}/dead-letter", action, payload)

        revocation = {"approval_id": "apr-7", "revoked_by": "carol", "reason": "too dear"}
        await cli.signal(revoked, "revoke_approval", json.dumps(revocation))
        await bench.tools.open_gate(f"{bench.name}-gate")
        await asyncio.gather(
            decide(run_id, "again", "redrive", decision(new_operation=True)),
            decide(run_id, "edited", "redrive", decision(input={"amount": 2})),
            decide(run_id, "lost", "reconcile", '{"decided_by": "bob"}'),
            decide(run_id, "resolved", "resolve", decision(output={"id": "by hand"})),
            decide(run_id, "discarded", "discard", decision()),
            decide(failing, "no", "discard", decision()),
        )
        many, failed = await asyncio.gather(
            cli.json("workflow", "result", "--workflow-id", run_id),
            cli.run("workflow", "result", "--workflow-id", failing, "--output", "json"),
        )
        entry = await parked(cli, bench, revoked, "a")
    outputs = many["result"]["outputs"]
    assert many["result"]["counts"] == {"SUCCEEDED": 4, "DISCARDED": 1}
    assert outputs["resolved"] == {"id": "by hand"}
    assert set(outputs) == {"again", "edited", "lost", "resolved"}
    assert [call.body for call in await bench.tools.calls(bench.unique("edited"))] == [{"amount": 1}, {"amount": 2}]
    for name, calls in {"again": 2, "edited": 2, "lost": 1, "never": 3}.items():
        seen = await bench.tools.calls(bench.unique(name))
        assert len(seen) == calls, name
    first, second = await bench.tools.calls(bench.unique("again"))
    assert first.key != second.key
    assert failed.code == 1
    failure = json.loads(failed.output)["closeEvent"]["workflowExecutionFailedEventAttributes"]["failure"]
    assert failure["applicationFailureInfo"]["type"] == "RunFailed"
    (details,) = failure["applicationFailureInfo"]["details"]
    assert (details["status"], details["counts"]) == ("FAILED", {"DISCARDED": 1, "SKIPPED": 1})
    assert (entry["error"]["category"], entry["error"]["code"]) == ("PERMISSION", "approval_revoked")
    assert "carol" in entry["error"]["message"]
    assert entry["eligibility"]["refusals"] == ["APPROVAL_REVOKED"]


async def test_a_set_of_dead_letters_is_decided_by_one_batch_signal(bench: Bench, cli: TemporalCli) -> None:
    await bench.tool("pay", [{"status": 403}, {"status": 403}, {"status": 403}, {}])
    await bench.tool("other", [{"status": 403}])
    mine = f"WorkflowType = 'DeadLetter' AND RedriveRunId STARTS_WITH '{bench.name}' AND ExecutionStatus = 'Running'"
    async with bench.worker():
        runs = [await bench.start(node("a", "pay")) for _ in range(3)]
        spared = await bench.start(node("a", "other"))
        for run in (*runs, spared):
            await bench.parked(run, "a")
        query = f"{mine} AND RedriveTool = 'pay' AND RedriveStatus = 'AWAITING_DECISION'"
        assert await listed(cli, query, 3) == {f"{run.id}/a/dead-letter" for run in runs}
        await cli.done(
            *("workflow", "signal", "--query", query, "--name", "redrive", "--input", decision()),
            *("--reason", "the limit is raised", "--yes"),
        )
        for run in runs:
            assert (await run.result())["status"] == "SUCCEEDED"
        assert (await bench.entry(spared, "a")).decisions == []
        assert await listed(cli, mine, 1) == {f"{spared.id}/a/dead-letter"}


async def test_the_command_cancels_a_run_and_starts_none_twice(bench: Bench, cli: TemporalCli) -> None:
    await bench.tool("slow", [{"gate": f"{bench.name}-gate"}], timeout=GATED)
    async with bench.worker():
        run_id = await begin(cli, bench, "slow", node("a", "slow"), node("b", "slow", after=["a"]))
        await bench.tools.wait_for(bench.unique("slow"), calls=1)
        spec = json.dumps({"nodes": [node("a", "slow"), node("b", "slow", after=["a"])]})
        refused = await cli.start(bench.queue, run_id, spec, more=("--fail-existing",))
        assert refused.code == 1
        attached = await cli.start(bench.queue, run_id, spec, more=("--id-conflict-policy", "UseExisting"))
        description = await cli.json("workflow", "describe", "--workflow-id", run_id)
        assert description["workflowExecutionInfo"]["execution"]["runId"] in attached.output
        await cli.done("workflow", "cancel", "--workflow-id", run_id)

        async def cancelling() -> bool:
            found = await cli.json("workflow", "describe", "--workflow-id", f"{run_id}/a")
            return bool(found["workflowExtendedInfo"].get("cancelRequested"))

        await eventually(cancelling, "the cancel to reach the node")
        await bench.tools.open_gate(f"{bench.name}-gate")
        ended = await cli.run("workflow", "result", "--workflow-id", run_id, "--output", "json")
        assert (ended.code, json.loads(ended.output)["status"]) == (1, "CANCELED")
        status = await cli.query(run_id, "status")
        nodes = {name: state["status"] for name, state in status["nodes"].items()}
    assert (status["status"], nodes) == ("CANCELLED", {"a": "SUCCEEDED", "b": "CANCELLED"})
    assert len(await bench.tools.calls(bench.unique("slow"))) == 1


def payload(value: Any) -> Payloads:
    """As every SDK's default converter writes it."""
    return Payloads(payloads=[Payload(metadata={"encoding": b"json/plain"}, data=json.dumps(value).encode())])


def read(payloads: Payloads) -> Any:
    (only,) = payloads.payloads
    assert only.metadata["encoding"] == b"json/plain"
    return json.loads(only.data)


class OtherSdk:
    """A client in another language: bytes of JSON over Temporal's own gRPC, and nothing of ours."""

    def __init__(self, bench: Bench) -> None:
        self._service = bench.client.workflow_service
        self._namespace = bench.client.namespace
        self._queue = bench.queue

    async def start(self, run_id: str, spec: Any) -> None:
        await self._service.start_workflow_execution(
            StartWorkflowExecutionRequest(
                namespace=self._namespace,
                workflow_id=run_id,
                workflow_type=WorkflowType(name="Run"),
                task_queue=TaskQueue(name=self._queue),
                input=payload(spec),
                request_id=str(uuid.uuid4()),
            )
        )

    async def query(self, workflow_id: str, name: str) -> Any:
        answer = await self._service.query_workflow(
            QueryWorkflowRequest(
                namespace=self._namespace,
                execution=WorkflowExecution(workflow_id=workflow_id),
                query=WorkflowQuery(query_type=name),
            )
        )
        return read(answer.query_result)

    async def signal(self, workflow_id: str, name: str, value: Any) -> None:
        await self._service.signal_workflow_execution(
            SignalWorkflowExecutionRequest(
                namespace=self._namespace,
                workflow_execution=WorkflowExecution(workflow_id=workflow_id),
                signal_name=name,
                input=payload(value),
                request_id=str(uuid.uuid4()),
            )
        )

    async def update(self, workflow_id: str, name: str, value: Any) -> Any:
        stage = UpdateWorkflowExecutionLifecycleStage.UPDATE_WORKFLOW_EXECUTION_LIFECYCLE_STAGE_COMPLETED
        answer = await self._service.update_workflow_execution(
            UpdateWorkflowExecutionRequest(
                namespace=self._namespace,
                workflow_execution=WorkflowExecution(workflow_id=workflow_id),
                wait_policy=WaitPolicy(lifecycle_stage=stage),
                request=Request(meta=Meta(update_id=str(uuid.uuid4())), input=Input(name=name, args=payload(value))),
            )
        )
        return read(answer.outcome.success)


async def test_a_client_in_another_sdk_needs_no_more_than_plain_json(bench: Bench) -> None:
    await bench.tool("pay", [{"status": 403}, {"status": 403}, {"body": {"id": "p-1", "exact": 10**30}}])
    other = OtherSdk(bench)
    run_id = f"{bench.name}-other"
    run = bench.client.get_workflow_handle(run_id)
    exact = {"amount": 12345678901234567890123, "note": "naïve ☃ \U0001f4b8", "nothing": None}
    async with bench.worker():
        await other.start(run_id, {"nodes": [{"id": "a", "tool": "pay", "input": exact}]})
        await bench.parked(run, "a")
        letter = f"{run_id}/a/dead-letter"
        assert (await other.query(letter, "entry"))["input"] == exact
        assert (await other.query(run_id, "status"))["status"] == "BLOCKED"
        record = await other.update(letter, "redrive", {"decided_by": "bob", "reason": "try"})
        assert record["outcome"] == "ACCEPTED"
        await bench.parked(run, "a", redrives=1)
        await other.signal(letter, "redrive", {"decided_by": "bob", "reason": "once more", "if_redrives": 1})
        result = await run.result()
    assert result["outputs"] == {"a": {"id": "p-1", "exact": 10**30}}
    assert [call.body for call in await bench.tools.calls(bench.unique("pay"))] == [exact] * 3


async def test_a_pending_call_obeys_activity_reset_pause_and_unpause(bench: Bench, cli: TemporalCli) -> None:
    hour = {"RATE_LIMITED": {"initial": "1h", "maximum": "1h"}}
    for name in ("reset", "paused"):
        await bench.tool(name, [{"status": 429}, {}], retry=hour)
    await bench.tool("floor", [{"status": 429, "headers": {"Retry-After": "5"}}, {}])
    async with bench.worker():
        runs = {name: await bench.start(node("a", name)) for name in ("reset", "paused", "floor")}

        async def activity(name: str, verb: str) -> None:
            await cli.done("activity", verb, "--workflow-id", f"{runs[name].id}/a", "--activity-id", "call_tool")

        async def pending(name: str) -> Any:
            described = await bench.client.workflow_service.describe_workflow_execution(
                DescribeWorkflowExecutionRequest(
                    namespace=bench.client.namespace,
                    execution=WorkflowExecution(workflow_id=f"{runs[name].id}/a"),
                )
            )
            return next(iter(described.pending_activities), None)

        async def waits(name: str, code: str) -> bool:
            found = await pending(name)
            details = found.last_failure.application_failure_info.details.payloads if found else []
            return bool(details) and json.loads(details[0].data)["code"] == code

        for name in runs:
            await bench.tools.wait_for(bench.unique(name), calls=1)
            await eventually(lambda name=name: waits(name, "http_429"), f"{name} to wait in backoff")  # type: ignore[misc]

        await asyncio.gather(activity("reset", "reset"), activity("paused", "pause"), activity("floor", "reset"))
        # What the tool has asked for holds, whoever presses the button.
        await eventually(lambda: waits("floor", "busy"), "the delivery after the reset to be told to wait")
        assert (await pending("paused")).paused
        assert len(await bench.tools.calls(bench.unique("paused"))) == 1
        await activity("paused", "unpause")
        await activity("paused", "reset")
        for run in runs.values():
            assert (await run.result())["status"] == "SUCCEEDED"
        keys = {}
        for name in runs:
            first, second = await bench.tools.calls(bench.unique(name))
            keys[name] = first.key == second.key
            if name == "floor":
                assert second.at - first.at >= timedelta(seconds=5)
    assert keys == dict.fromkeys(runs, True)


async def test_a_call_completed_by_hand_never_leaves_its_node_hanging(bench: Bench, cli: TemporalCli) -> None:
    """`temporal activity complete`: what is no result of a call needs a person, as any other failure does."""
    hour = {"TRANSIENT": {"initial": "1h", "maximum": "1h"}}
    await bench.tool("pay", [{"status": 423}], retry=hour)
    results = ["null", "7", '{"id": "by hand"}', '{"operation_id": "x", "attempt_count": 1, "end": "SUCCEEDED"}']
    async with bench.worker():
        runs = {result: await bench.start(node("a", "pay")) for result in results}

        async def complete(result: str) -> None:
            async def taken() -> bool:
                where = ("--workflow-id", f"{runs[result].id}/a", "--activity-id", "call_tool")
                return (await cli.run("activity", "complete", *where, "--result", result)).code == 0

            # Not before the call has failed for the first time, and waits.
            await bench.tools.wait_for(bench.unique("pay"), calls=len(runs))
            await eventually(taken, "the command to be obeyed")
            entry = await bench.parked(runs[result], "a")
            assert entry.error.message
            assert (await bench.decide(runs[result], "a", "resolve", output={"id": "known"})).outcome == "ACCEPTED"
            assert (await runs[result].result())["outputs"] == {"a": {"id": "known"}}

        await asyncio.gather(*(complete(result) for result in results))
    assert len(await bench.tools.calls(bench.unique("pay"))) == len(runs)


async def test_a_call_failed_by_hand_in_flight_is_neither_lost_nor_repeated(bench: Bench, cli: TemporalCli) -> None:
    await bench.tool("pay", [{"gate": f"{bench.name}-gate"}], timeout=GATED)
    async with bench.worker():
        run = await bench.start(node("a", "pay"))
        await bench.tools.wait_for(bench.unique("pay"), calls=1, effects=1)
        await cli.done(
            *("activity", "fail", "--workflow-id", f"{run.id}/a", "--activity-id", "call_tool"),
            *("--reason", "by hand", "--detail", '{"code": 7}'),
        )
        # Nothing is sent while nobody knows what the call in flight does.
        entry = await bench.parked(run, "a")
        assert (entry.side_effect, entry.eligibility.refusals) == ("POSSIBLE", ["SIDE_EFFECT_UNRESOLVED"])
        assert (await bench.decide(run, "a", "redrive")).outcome == "REFUSED"
        await bench.tools.open_gate(f"{bench.name}-gate")

        async def known() -> bool:
            # Its answer comes late, but it comes; whoever looks next finds it.
            await cli.update(f"{run.id}/a/dead-letter", "check", "{}")
            return (await bench.status(run)).status == "SUCCEEDED"

        await eventually(known, "the late answer to count")
        assert set((await run.result())["outputs"]["a"]) == {"id", "key"}
    assert len(await bench.tools.calls(bench.unique("pay"))) == 1
