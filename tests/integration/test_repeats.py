"""The same run id, twice: one run while it is open, and the same results without a call once it has ended."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from temporalio.client import WorkflowFailureError, WorkflowHandle
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.exceptions import ApplicationError, WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from contracts.runs import NodeStatus
from tests.integration.temporal_cli import TemporalCli
from tests.lab import Bench
from tests.waiting import eventually
from workers.embedded import EmbeddedServer

Run = WorkflowHandle[Any, Any]

GATED = "100s"
"""A tool's timeout where the test decides when it answers."""
HOUR = {"RATE_LIMITED": {"initial": "1h", "maximum": "1h"}}


def node(name: str, tool: str, value: Any = None, **fields: Any) -> dict[str, Any]:
    return {"id": name, "tool": tool, "input": {"amount": 1} if value is None else value, **fields}


async def all_calls(bench: Bench) -> dict[str, int]:
    """How often each tool has been called, its reconcile route included."""
    counted = {}
    for tool in bench.catalog:
        counted[tool] = len(await bench.tools.calls(bench.unique(tool)))
        counted[f"{tool} asked"] = len(await bench.tools.reconcile_calls(bench.unique(tool)))
    return counted


async def run_of(bench: Bench, workflow_id: str) -> str:
    """Which execution stands under the id."""
    try:
        return (await bench.client.get_workflow_handle(workflow_id).describe()).run_id or ""
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return ""
        raise


async def ending(run: Run) -> tuple[str, Any]:
    """How a run ends: its result, or the details of its failure."""
    try:
        return "", await run.result()
    except WorkflowFailureError as error:
        if isinstance(error.cause, ApplicationError):
            return error.cause.type or "", error.cause.details[0]
        raise


async def test_the_same_id_started_while_it_runs_is_one_run(bench: Bench) -> None:
    await bench.tool("pay", [{"gate": f"{bench.name}-gate"}], timeout=GATED)
    run_id = f"{bench.name}-twice"
    spec = {"nodes": [node("a", "pay"), node("b", "pay")]}

    async def start(policy: WorkflowIDConflictPolicy) -> Run:
        return await bench.client.start_workflow(
            "Run", spec, id=run_id, task_queue=bench.queue, id_conflict_policy=policy
        )

    async with bench.worker():
        # At once, and again when it is at work.
        handles = await asyncio.gather(*(start(WorkflowIDConflictPolicy.USE_EXISTING) for _ in range(10)))
        await bench.tools.wait_for(bench.unique("pay"), calls=2)
        handles.append(await start(WorkflowIDConflictPolicy.USE_EXISTING))
        assert len({handle.first_execution_run_id for handle in handles}) == 1
        with pytest.raises(WorkflowAlreadyStartedError):
            await start(WorkflowIDConflictPolicy.FAIL)
        await bench.tools.open_gate(f"{bench.name}-gate")
        results = await asyncio.gather(*(handle.result() for handle in handles))
    assert all(result == results[0] for result in results)
    assert len(await bench.tools.calls(bench.unique("pay"))) == 2
    assert len({effect.key for effect in await bench.tools.effects(bench.unique("pay"))}) == 2


async def every_ending(bench: Bench) -> Sequence[dict[str, Any]]:
    """The nodes of a run, and their tools, that can end in every way there is."""
    await bench.tool("plain", [{"body": {"id": "p-1"}}])
    await bench.tool("empty", [{"raw_body": ""}])
    await bench.tool("retried", [{"status": 429}, {"body": {"id": "r-2"}}])
    await bench.tool("told", [{"fault": "fin_after_read", "body": {"id": "t-1"}}], reconcile=True)
    for name in ("again", "anew", "edited"):
        await bench.tool(name, [{"status": 403}, {"body": {"id": name}}, {"body": {"id": "too often"}}])
    await bench.tool("no", [{"status": 403}])
    await bench.tool("late", [{"body": {"id": "l-1"}}, {"body": {"id": "too often"}}])
    return (
        *(node(name, name) for name in ("plain", "empty", "retried", "told", "again", "anew", "edited")),
        node("resolved", "no"),
        node("discarded", "no", on_discard="continue"),
        node("late", "late", {"x": {"$output": "edited"}, "y": {"$output": "discarded"}}),
    )


async def decide_all(bench: Bench, run: Run) -> None:
    decisions: dict[str, tuple[str, dict[str, Any]]] = {
        "again": ("redrive", {}),
        "anew": ("redrive", {"new_operation": True}),
        "edited": ("redrive", {"input": {"amount": 2}}),
        "resolved": ("resolve", {"output": {"id": "by hand"}}),
        "discarded": ("discard", {}),
    }
    for name, (action, payload) in decisions.items():
        await bench.parked(run, name)
        assert (await bench.decide(run, name, action, **payload)).outcome == "ACCEPTED"


async def node_results(bench: Bench, run: Run) -> dict[str, Any]:
    """The result of every node that has one."""
    names = [name for name, state in (await bench.status(run)).nodes.items() if state.status == "SUCCEEDED"]
    return {name: await bench.client.get_workflow_handle(f"{run.id}/{name}").result() for name in names}


async def test_a_run_started_again_after_it_ended_has_the_same_results_and_calls_nothing(
    bench: Bench, temporal: EmbeddedServer
) -> None:
    run_id = f"{bench.name}-again"
    nodes = await every_ending(bench)
    async with bench.worker():
        first = await bench.start(*nodes, run_id=run_id)
        await decide_all(bench, first)
        result = await first.result()
        each = await node_results(bench, first)
        state = await bench.status(first)
    called = await all_calls(bench)
    letters = {name: await run_of(bench, f"{run_id}/{name}/dead-letter") for name in state.nodes}
    assert result["counts"] == {"SUCCEEDED": 9, "DISCARDED": 1}
    assert {name: each[name]["operation_id"].rsplit("/", 1)[1] for name in ("again", "anew", "edited")} == {
        "again": "1",
        "anew": "2",
        "edited": "2",
    }
    # Another worker, which has the ledger and nothing else.
    async with bench.worker():
        second = await bench.start(*nodes, run_id=run_id)
        assert second.first_execution_run_id != first.first_execution_run_id
        assert await second.result() == result
        repeated = await node_results(bench, second)
        # And from its first task, as an operator would have it.
        cli = TemporalCli(temporal.address)
        await cli.done("workflow", "reset", "-w", run_id, "-t", "FirstWorkflowTask", "--reason", "to see")
        third = bench.client.get_workflow_handle(run_id)
        assert await third.result() == result
        again = await bench.status(third)
    assert await all_calls(bench) == called
    for name, outcome in repeated.items():
        wanted = each[name] | ({"source": "REPLAYED"} if each[name]["source"] == "EXECUTED" else {})
        assert outcome == wanted, name
    assert {name: outcome["source"] for name, outcome in repeated.items() if outcome["source"] != "REPLAYED"} == {
        "told": "RECONCILED",
        "resolved": "RESOLVED",
    }
    assert again.counts == state.counts
    assert {name: node.operation_id for name, node in again.nodes.items() if node.status == NodeStatus.SUCCEEDED} == {
        name: outcome["operation_id"] for name, outcome in each.items()
    }
    # Nobody was told again of what had been decided.
    assert {name: await run_of(bench, f"{run_id}/{name}/dead-letter") for name in state.nodes} == letters


async def test_a_failed_or_cancelled_run_started_again_ends_without_a_call(bench: Bench) -> None:
    await bench.tool("no", [{"status": 403}])
    await bench.tool("yes")
    await bench.tool("held", [{"gate": f"{bench.name}-gate"}, {}], timeout=GATED)
    failing = (node("no", "no"), node("yes", "yes"), node("then", "yes", after=["no"]))
    stopping = (node("held", "held"), node("then", "yes", after=["held"]))
    async with bench.worker():
        failed = await bench.start(*failing)
        await bench.parked(failed, "no")
        await bench.decide(failed, "no", "discard")
        first = await ending(failed)
        assert first[0] == "RunFailed"
        stopped = await bench.start(*stopping)
        await bench.tools.wait_for(bench.unique("held"), calls=1)
        await stopped.cancel()

        async def told() -> bool:
            handle = bench.client.get_workflow_handle(f"{stopped.id}/held")
            return (await handle.describe()).raw_description.workflow_extended_info.cancel_requested

        await eventually(told, "the node to be cancelled")
        await bench.tools.open_gate(f"{bench.name}-gate")
        with pytest.raises(WorkflowFailureError):
            await stopped.result()
    called = await all_calls(bench)
    async with bench.worker():
        again = await bench.start(*failing, run_id=failed.id)
        assert await ending(again) == first
        # What has succeeded stays so; what was cancelled is never sent.
        restarted = await bench.start(*stopping, run_id=stopped.id)
        kind, result = await ending(restarted)
    assert (kind, result["counts"]) == ("RunFailed", {"SUCCEEDED": 1, "CANCELLED": 1})
    assert await all_calls(bench) == called


async def test_a_terminated_run_started_again_attaches_to_its_open_nodes_and_repeats_no_call(bench: Bench) -> None:
    gate = f"{bench.name}-gate"
    await bench.tool("done", [{"body": {"id": "d-1"}}])
    await bench.tool("flying", [{"gate": gate, "body": {"id": "f-1"}}], timeout=GATED)
    await bench.tool("orphan", [{"gate": gate, "body": {"id": "o-1"}}], timeout=GATED)
    await bench.tool("waiting", [{"status": 429}, {"body": {"id": "w-2"}}], retry=HOUR)
    await bench.tool("parked", [{"status": 403}, {"body": {"id": "p-2"}}])
    await bench.tool("letterless", [{"status": 403}, {"body": {"id": "l-2"}}])
    await bench.tool("last")
    names = ("done", "flying", "orphan", "waiting", "parked", "letterless")
    nodes = (*(node(name, name) for name in names), node("last", "last", after=list(names)))
    async with bench.worker():
        first = await bench.start(*nodes)
        for name in ("flying", "orphan", "waiting"):
            await bench.tools.wait_for(bench.unique(name), calls=1)
        for name in ("parked", "letterless"):
            await bench.parked(first, name)

        async def one_is_done() -> bool:
            return (await bench.status(first)).nodes["done"].status == "SUCCEEDED"

        await eventually(one_is_done, "the first node to end")
        await first.terminate("to see")
        # So are one node whose call is in flight, and one dead letter with its node.
        await bench.client.get_workflow_handle(f"{first.id}/orphan").terminate("to see")
        await bench.client.get_workflow_handle(f"{first.id}/letterless").terminate("to see")
        await bench.dead_letter(first, "letterless").terminate("to see")
        called = await all_calls(bench)

        second = await bench.start(*nodes, run_id=first.id)

        async def attached() -> bool:
            state = await bench.status(second)
            return state.nodes != {} and state.blocked == ["parked", "letterless"]

        await eventually(attached, "the new run to know who waits for a person")
        assert await all_calls(bench) == called
        assert await run_of(bench, f"{first.id}/flying") != ""
        for name in ("parked", "letterless"):
            await bench.parked(second, name)
            assert (await bench.decide(second, name, "redrive")).outcome == "ACCEPTED"
        cli = TemporalCli(bench.client.service_client.config.target_host)
        await cli.done("activity", "reset", "-w", f"{first.id}/waiting", "-a", "call_tool")
        await bench.tools.open_gate(gate)
        result = await second.result()
    assert result["counts"] == {"SUCCEEDED": 7}
    calls = {name: len(await bench.tools.calls(bench.unique(name))) for name in (*names, "last")}
    assert calls == {"done": 1, "flying": 1, "orphan": 1, "waiting": 2, "parked": 2, "letterless": 2, "last": 1}
    effects = {name: len(await bench.tools.effects(bench.unique(name))) for name in calls}
    assert effects == dict.fromkeys(calls, 1)
