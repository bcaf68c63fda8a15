"""``node_mode: fast``: a node's first attempt is the run's own; what does not succeed at once goes on as a workflow."""

from datetime import timedelta
from typing import Any

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from contracts.identity import node_workflow_id
from contracts.runs import NodeStatus
from tests.faults.lookup import dispatched, node_result, operation
from tests.integration.temporal_cli import TemporalCli
from tests.integration.test_run_graph import GATED, failed_result, node, ref
from tests.lab import Bench
from tests.waiting import eventually
from tests.worker_process import WorkerProcess

Run = Any


async def start(bench: Bench, *nodes: dict[str, Any], **spec: Any) -> Run:
    return await bench.start(*nodes, node_mode="fast", **spec)


async def promoted(bench: Bench, run: Run, name: str) -> bool:
    """Whether the node has a workflow of its own."""
    try:
        await bench.client.get_workflow_handle(node_workflow_id(run.id, name)).describe()
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return False
        raise
    return True


async def test_nodes_that_succeed_at_once_are_calls_of_the_run_and_nothing_more(bench: Bench) -> None:
    await bench.tool("pay", [{"body": {"id": "p-1"}}])
    await bench.tool("mail", [{"body": {"sent": True}}])
    async with bench.worker():
        run = await start(bench, node("a", "pay"), node("b", "mail", {"of": ref("a", "/id")}))
        assert (await run.result())["outputs"] == {"b": {"sent": True}}
        state = await bench.status(run)
    assert {name: (str(one.status), one.attempt_count) for name, one in state.nodes.items()} == {
        "a": ("SUCCEEDED", 1),
        "b": ("SUCCEEDED", 1),
    }
    (call,) = await bench.tools.calls(bench.unique("mail"))
    assert call.body == {"of": "p-1"}
    assert (await operation(bench, run, "a")).node_end == "SUCCEEDED"
    for name in ("a", "b"):
        assert not await promoted(bench, run, name)


async def test_a_first_attempt_that_fails_goes_on_as_a_workflow_with_the_same_operation_in_its_time(
    bench: Bench,
) -> None:
    await bench.tool("pay", [{"status": 429, "headers": {"retry-after": "1"}}, {"body": {"id": "p-1"}}])
    async with bench.worker():
        run = await start(bench, node("a", "pay"))
        assert (await run.result())["outputs"] == {"a": {"id": "p-1"}}
        assert (await bench.status(run)).nodes["a"].attempt_count == 2
        assert await promoted(bench, run, "a")
    first, second = await bench.tools.calls(bench.unique("pay"))
    assert first.key == second.key
    assert second.at - first.at >= timedelta(seconds=1)
    view = await operation(bench, run, "a")
    assert [(attempt.attempt, attempt.code) for attempt in view.attempts] == [(1, "http_429"), (2, None)]


async def test_a_refused_first_attempt_is_called_once_and_waits_for_a_person(bench: Bench) -> None:
    await bench.tool("pay", [{"status": 403}, {"body": {"id": "p-1"}}])
    async with bench.worker():
        run = await start(bench, node("a", "pay"))
        entry = await bench.parked(run, "a")
        assert (entry.error.category, entry.error.code, entry.side_effect) == ("PERMISSION", "http_403", "NONE")
        assert [attempt.attempt for attempt in entry.attempts] == [1]
        assert len(await bench.tools.calls(bench.unique("pay"))) == 1
        assert (await bench.decide(run, "a", "redrive")).outcome == "ACCEPTED"
        assert (await run.result())["outputs"] == {"a": {"id": "p-1"}}
    first, second = await bench.tools.calls(bench.unique("pay"))
    assert first.key == second.key


async def test_a_first_attempt_that_leaves_no_time_for_another_is_the_only_one(bench: Bench) -> None:
    hour = {"TRANSIENT": {"initial": "1h", "maximum": "1h"}}
    await bench.tool("pay", [{"status": 408}, {"body": {"id": "p-1"}}], retry=hour)
    async with bench.worker():
        run = await start(bench, node("a", "pay", deadline_seconds=600))
        entry = await bench.parked(run, "a")
        assert (entry.error.category, entry.error.code, entry.side_effect) == ("TRANSIENT", "deadline_exceeded", "NONE")
        assert len(await bench.tools.calls(bench.unique("pay"))) == 1
        assert (await bench.decide(run, "a", "redrive")).outcome == "ACCEPTED"
        assert (await run.result())["outputs"] == {"a": {"id": "p-1"}}


@pytest.mark.parametrize("options", [("fail", "--reason", "by hand"), ("complete", "--result", "7")])
async def test_a_first_attempt_that_is_ended_by_hand_is_told_to_a_person_and_not_repeated(
    bench: Bench, options: tuple[str, ...]
) -> None:
    gate = bench.unique("gate")
    await bench.tool("pay", [{"gate": gate, "body": {"id": "p-1"}}], timeout=GATED)
    cli = TemporalCli(bench.client.service_client.config.target_host)
    async with bench.worker():
        run = await start(bench, node("a", "pay"))
        await dispatched(bench, run, "a")
        command, *more = options
        await cli.done("activity", command, "--workflow-id", run.id, "--activity-id", "a", *more)
        entry = await bench.parked(run, "a")
        assert (entry.error.code, entry.side_effect) == ("by_hand", "POSSIBLE")
        assert (await bench.decide(run, "a", "redrive")).refusals == ["SIDE_EFFECT_UNRESOLVED"]
        await bench.tools.open_gate(gate)

        async def known() -> bool:
            await cli.update(f"{run.id}/a/dead-letter", "check", "{}")
            return (await bench.status(run)).status == "SUCCEEDED"

        await eventually(known, "the late answer to count")
        assert (await run.result())["outputs"] == {"a": {"id": "p-1"}}
    assert len(await bench.tools.calls(bench.unique("pay"))) == 1


async def test_a_lost_answer_to_a_first_attempt_is_reconciled_and_not_called_again(bench: Bench) -> None:
    await bench.tool("pay", [{"commit": True, "fault": "rst_after_read"}], reconcile=True)
    async with bench.worker():
        run = await start(bench, node("a", "pay"))
        await run.result()
        child = await bench.client.get_workflow_handle(node_workflow_id(run.id, "a")).result()
    assert child["source"] == "RECONCILED"
    assert len(await bench.tools.calls(bench.unique("pay"))) == 1


async def test_cancelling_settles_what_is_in_flight_and_starts_no_workflow_for_what_was_never_sent(
    bench: Bench,
) -> None:
    gate = bench.unique("gate")
    await bench.tool("held", [{"gate": gate}], timeout=GATED, concurrency=1)
    await bench.tool("next")
    async with bench.worker():
        run = await start(bench, node("sent", "held"), node("queued", "held"), node("later", "next", after=["sent"]))
        await bench.tools.wait_for(bench.unique("held"), calls=1)
        await run.cancel()

        async def refused() -> bool:
            return (await operation(bench, run, "sent")).node_cancelled

        await eventually(refused, "the cancel to be committed")
        await bench.tools.open_gate(gate)
        with pytest.raises(WorkflowFailureError):
            await run.result()
        assert (await run.describe()).status is WorkflowExecutionStatus.CANCELED
        statuses = {name: str(one.status) for name, one in (await bench.status(run)).nodes.items()}
        (call,) = await bench.tools.calls(bench.unique("held"))
        sent, queued = "sent", "queued"
        if call.key != (await operation(bench, run, "sent")).idempotency_key:
            sent, queued = queued, sent
        assert (statuses[sent], statuses[queued], statuses["later"]) == ("SUCCEEDED", "CANCELLED", "CANCELLED")
        assert not await promoted(bench, run, queued)
    assert await bench.tools.calls(bench.unique("next")) == []


async def test_a_first_attempt_in_flight_with_an_unknown_effect_outlives_the_cancelled_run_as_a_dead_letter(
    bench: Bench,
) -> None:
    gate = bench.unique("gate")
    await bench.tool("held", [{"gate": gate, "commit": True, "fault": "rst_after_read"}], timeout=GATED)
    async with bench.worker():
        run = await start(bench, node("a", "held"))
        await bench.tools.wait_for(bench.unique("held"), calls=1)
        await run.cancel()

        async def refused() -> bool:
            return (await operation(bench, run, "a")).node_cancelled

        await eventually(refused, "the cancel to be committed")
        await bench.tools.open_gate(gate)
        with pytest.raises(WorkflowFailureError):
            await run.result()
        entry = await bench.parked(run, "a")
        assert (entry.error.category, entry.side_effect) == ("UNKNOWN_SIDE_EFFECT", "POSSIBLE")
        assert {"RUN_CANCELLING", "RUN_CLOSED"} & set(entry.eligibility.refusals)


async def test_a_failed_fast_run_names_its_nodes(bench: Bench) -> None:
    await bench.tool("pay", [{"status": 400}])
    await bench.tool("next")
    async with bench.worker():
        run = await start(bench, node("a", "pay"), node("b", "next", after=["a"]), node("c", "next"))
        await bench.parked(run, "a")
        await bench.decide(run, "a", "discard")
        details = await failed_result(run)
    assert details["counts"] == {"SUCCEEDED": 1, "DISCARDED": 1, "SKIPPED": 1}


async def events(run: Run, kind: EventType.ValueType) -> int:
    """How many events of a kind a run has."""
    return sum([event.event_type == kind async for event in run.fetch_history_events()])


async def test_a_call_that_is_answered_at_once_costs_the_server_no_task_of_its_own(bench: Bench) -> None:
    await bench.tool("pay", [{}])
    async with bench.worker():
        run = await start(bench, *(node(f"n{number}", "pay") for number in range(20)))
        assert (await run.result())["counts"] == {"SUCCEEDED": 20}
    assert await events(run, EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED) == 0


async def test_the_history_of_a_fast_run_names_the_node_and_the_tool_of_each_call(bench: Bench) -> None:
    gate = bench.unique("gate")
    quick, slow = await bench.tool("quick", [{}]), await bench.tool("slow", [{"gate": gate}], timeout=GATED)
    async with bench.worker():
        run = await start(bench, node("a", "quick"), node("b", "slow"))
        await dispatched(bench, run, "b")
        await bench.tools.open_gate(gate)
        await run.result()
    said = [event.user_metadata.summary.data.decode() async for event in run.fetch_history_events()]
    assert said.count(f'"a: {quick}"') >= 1
    # Within the workflow task, and then as an activity.
    assert said.count(f'"b: {slow}"') == 2


async def test_a_call_that_takes_longer_goes_on_as_an_activity_and_is_not_repeated(bench: Bench) -> None:
    gate = bench.unique("gate")
    await bench.tool("slow", [{"gate": gate, "body": {"id": "s-1"}}], timeout=GATED)
    async with bench.worker():
        run = await start(bench, node("a", "slow"))
        await dispatched(bench, run, "a")
        assert str((await bench.status(run)).nodes["a"].status) == "RUNNING"
        await bench.tools.open_gate(gate)
        assert (await run.result())["outputs"] == {"a": {"id": "s-1"}}
        assert not await promoted(bench, run, "a")
        assert (await node_result(bench, run, "a"))["source"] == "EXECUTED"
    assert len(await bench.tools.calls(bench.unique("slow"))) == 1


async def test_an_output_too_large_for_a_workflow_task_is_brought_by_an_activity(bench: Bench) -> None:
    body = {"text": "x" * 100_000}
    await bench.tool("read", [{"body": body}])
    async with bench.worker():
        run = await start(bench, node("a", "read"))
        assert (await run.result())["outputs"] == {"a": body}
        assert (await node_result(bench, run, "a"))["source"] == "EXECUTED"
    assert len(await bench.tools.calls(bench.unique("read"))) == 1
    assert await events(run, EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED) == 1


async def test_a_busy_run_of_fast_nodes_answers_in_between(bench: Bench) -> None:
    """Signals and queries reach a run between its workflow tasks alone."""
    nodes = 350
    await bench.tool("pay", [{}])
    async with bench.worker():
        run = await start(bench, *(node(f"n{number}", "pay") for number in range(nodes)))

        async def partly() -> bool:
            counts = (await bench.status(run)).counts
            return 0 < counts.get(NodeStatus.SUCCEEDED, 0) < nodes

        await eventually(partly, "an answer while some of the nodes are done")
        assert (await run.result())["counts"] == {"SUCCEEDED": nodes}


async def test_a_slow_tool_does_not_hold_up_the_other_nodes_of_a_fast_run(bench: Bench) -> None:
    """Not even where its call is the one that ends a workflow task."""
    gate = bench.unique("gate")
    await bench.tool("slow", [{"gate": gate}], timeout=GATED)
    await bench.tool("quick", [{}])
    quick = [node(f"n{number}", "quick") for number in range(250)]
    async with bench.worker():
        run = await start(bench, *quick[:100], node("slow", "slow"), *quick[100:], max_parallel=500)

        async def others() -> bool:
            return (await bench.status(run)).counts.get(NodeStatus.SUCCEEDED, 0) == len(quick)

        await eventually(others, "the end of all other nodes")
        await bench.tools.open_gate(gate)
        assert (await run.result())["counts"] == {"SUCCEEDED": len(quick) + 1}


async def scheduled(run: Run, activity_type: str) -> int:
    """How many activities of a type a run has scheduled."""
    found = [event.activity_task_scheduled_event_attributes async for event in run.fetch_history_events()]
    return sum(attributes.activity_type.name == activity_type for attributes in found)


async def test_a_node_may_be_named_by_a_number(bench: Bench) -> None:
    """A run's own calls are pending under the names of their nodes, and Temporal numbers what has no name."""
    gate = bench.unique("gate")
    await bench.tool("slow", [{"gate": gate}], timeout=GATED, concurrency=100)
    names = [str(number) for number in range(50, 80)]
    async with bench.worker():
        run = await start(bench, *(node(name, "slow") for name in names))
        for name in names:
            await dispatched(bench, run, name)
        await run.cancel()

        async def committed() -> bool:
            return (await operation(bench, run, names[-1])).node_cancelled

        await eventually(committed, "the cancel to be committed while all are in flight")
        await bench.tools.open_gate(gate)
        with pytest.raises(WorkflowFailureError):
            await run.result()
        counts = (await bench.status(run)).counts
    assert set(counts) <= {"SUCCEEDED", "CANCELLED"}
    assert counts[NodeStatus.SUCCEEDED] == len(await bench.tools.calls(bench.unique("slow")))


async def test_however_many_calls_go_on_at_once_no_workflow_task_is_too_large(bench: Bench) -> None:
    """First as activities, then as workflows: Temporal ends a run whose task carries more than 4 MiB."""
    await bench.tool("read", [{"body": {"text": "x" * 150_000}}])
    await bench.tool("slow", [{"gate": bench.unique("never")}], timeout=GATED, concurrency=100)
    names = [f"n{number}" for number in range(40)]
    async with WorkerProcess.start(bench) as worker:
        run = await start(bench, node("a", "read"), *(node(name, "slow", {"of": ref("a")}) for name in names))
        for name in names:
            await dispatched(bench, run, name)
        await worker.kill()
    for name in names:
        call = bench.client.get_async_activity_handle(workflow_id=run.id, run_id=None, activity_id=name)
        await call.fail(ApplicationError("ended by hand"))
    async with bench.worker():

        async def all_parked() -> bool:
            return sorted((await bench.status(run)).blocked) == sorted(names)

        await eventually(all_parked, "a dead letter for each", within=100)
        await run.cancel()
        with pytest.raises(WorkflowFailureError):
            await run.result()


async def test_a_task_makes_no_more_calls_once_they_have_taken_a_second(bench: Bench) -> None:
    await bench.tool("step", [{"delay": 0.6}])
    async with bench.worker():
        chain = [node(f"n{number}", "step", after=[f"n{number - 1}"] if number else []) for number in range(4)]
        run = await start(bench, *chain)
        assert (await run.result())["counts"] == {"SUCCEEDED": 4}
    assert await scheduled(run, "call_tool") >= 1
