"""Sweep finds what no workflow waits for, asks whoever does not know, and leaves everybody else alone."""

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from contracts.runs import NodeStatus
from contracts.sweep import SweepResult
from tests.faults.lock import locked
from tests.integration.temporal_cli import TemporalCli
from tests.lab import Bench
from tests.waiting import eventually

Handle = WorkflowHandle[Any, Any]

GATED = "100s"
"""A tool's timeout where the test decides when it answers."""
HOUR = {"RATE_LIMITED": {"initial": "1h", "maximum": "1h"}}
LOST = [{"status": 500, "commit": True}]

_numbers = itertools.count(1)


def node(name: str, **fields: Any) -> dict[str, Any]:
    return {"id": name, "tool": name, "input": {"amount": 1}, **fields}


async def sweep(bench: Bench) -> SweepResult:
    """One sweep, started by hand."""
    answer = await bench.client.execute_workflow(
        "Sweep", id=f"{bench.name}-sweep-{next(_numbers)}", task_queue=bench.queue
    )
    return SweepResult.model_validate(answer)


async def swept(bench: Bench, wanted: Callable[[SweepResult], bool]) -> SweepResult:
    """Sweeps until one has found this: lists are a little behind."""

    async def found() -> SweepResult | None:
        result = await sweep(bench)
        return result if wanted(result) else None

    return await eventually(found, "a sweep that finds it")


def nobody_was_asked(result: SweepResult) -> bool:
    found = (result.nodes_stopped, result.dead_letters_checked, result.dead_letters_missing, result.nodes_missing)
    return not any(part.count for part in (*found, result.dead_letters_opened))


async def quiet(bench: Bench) -> SweepResult:
    """Sweeps until there is nothing left to do, and once more: what was asked is not asked again."""
    await swept(bench, nobody_was_asked)
    again = await sweep(bench)
    assert nobody_was_asked(again), again
    return again


def node_of(bench: Bench, run: Handle, name: str) -> Handle:
    return bench.client.get_workflow_handle(f"{run.id}/{name}")


async def status_of(handle: Handle) -> WorkflowExecutionStatus | None:
    try:
        return (await handle.describe()).status
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return None
        raise


async def closed(handle: Handle) -> WorkflowExecutionStatus:
    async def ended() -> WorkflowExecutionStatus | None:
        status = await status_of(handle)
        return status if status is not WorkflowExecutionStatus.RUNNING else None

    return await eventually(ended, f"the end of {handle.id}")


async def attached_to(handle: Handle) -> None:
    """Waits until somebody who did not start it has asked how it ends."""

    async def asked() -> bool:
        history = await handle.fetch_history()
        return any(
            event.workflow_execution_signaled_event_attributes.signal_name == "report_to" for event in history.events
        )

    await eventually(asked, f"{handle.id} to be asked")


async def execution_of(handle: Handle) -> str:
    return (await handle.describe()).run_id or ""


async def entry_is(bench: Bench, run: Handle, name: str, status: str) -> None:
    async def so() -> bool:
        return (await bench.entry(run, name)).status == status

    await eventually(so, f"the dead letter of {name} to be {status}")


async def calls(bench: Bench, *names: str) -> dict[str, int]:
    return {name: len(await bench.tools.calls(bench.unique(name))) for name in names}


async def effects(bench: Bench, *names: str) -> dict[str, int]:
    return {name: len(await bench.tools.effects(bench.unique(name))) for name in names}


async def blocked(bench: Bench, run: Handle, *names: str) -> None:
    async def so() -> bool:
        return (await bench.status(run)).blocked == list(names)

    await eventually(so, f"the run to wait for {names}")


async def test_the_nodes_of_a_terminated_run_send_nothing_new_and_go_on_when_it_is_started_again(bench: Bench) -> None:
    gate = f"{bench.name}-gate"
    await bench.tool("waiting", [{"status": 429}, {"body": {"id": "w"}}], retry=HOUR)
    await bench.tool("flying", [{"gate": gate, "body": {"id": "f"}}], timeout=GATED)
    await bench.tool("losing", [{"gate": gate, "fault": "fin_after_read", "commit": True}], timeout=GATED)
    await bench.tool("parked", [{"status": 403}, {"body": {"id": "p"}}])
    await bench.tool("uncertain", LOST)
    names = ("waiting", "flying", "losing", "parked", "uncertain")
    nodes = [node(name) for name in names]
    async with bench.worker():
        run = await bench.start(*nodes)
        for name in names:
            await bench.tools.wait_for(bench.unique(name), calls=1)
        for name in ("parked", "uncertain"):
            await bench.parked(run, name)
        await run.terminate("to see")
        result = await swept(bench, lambda result: result.nodes_stopped.count > 0)
        # Each run is looked at once, however many nodes and dead letters it has.
        assert result.described == 1
        assert result.runs_gone.ids == [run.id]
        assert set(result.nodes_stopped.ids) == {f"{run.id}/{name}" for name in names}
        await closed(node_of(bench, run, "waiting"))

        async def heard() -> bool:
            history = await node_of(bench, run, "flying").fetch_history()
            return any(event.HasField("activity_task_cancel_requested_event_attributes") for event in history.events)

        await eventually(heard, "the node in flight to be told")
        await bench.tools.open_gate(gate)
        ends = {name: await closed(node_of(bench, run, name)) for name in names}
        # What was in flight was waited for: one has its result, one has lost it.
        assert ends.pop("flying") is WorkflowExecutionStatus.COMPLETED
        assert set(ends.values()) == {WorkflowExecutionStatus.FAILED}
        await entry_is(bench, run, "parked", "OBSOLETE")
        for name in ("losing", "uncertain"):
            entry = await bench.parked(run, name)
            assert entry.eligibility.refusals[0] == "RUN_CLOSED"
        assert await calls(bench, *names) == dict.fromkeys(names, 1)
        assert (await quiet(bench)).described == 0

        again = await bench.start(*nodes, run_id=run.id)
        await bench.tools.wait_for(bench.unique("waiting"), calls=2)
        await blocked(bench, again, "losing", "parked", "uncertain")
        await entry_is(bench, again, "parked", "AWAITING_DECISION")
        assert (await bench.decide(again, "parked", "redrive")).outcome == "ACCEPTED"
        for name in ("losing", "uncertain"):
            assert (await bench.decide(again, name, "resolve", output={"id": "seen"})).outcome == "ACCEPTED"
        assert (await again.result())["counts"] == {"SUCCEEDED": 5}
    assert await calls(bench, *names) == {"waiting": 2, "flying": 1, "losing": 1, "parked": 2, "uncertain": 1}
    assert await effects(bench, *names) == dict.fromkeys(names, 1)


async def test_a_node_that_a_newer_run_has_attached_to_does_not_stop(bench: Bench) -> None:
    await bench.tool("waiting", [{"status": 429}, {"body": {"id": "w"}}], retry=HOUR)
    async with bench.worker():
        run = await bench.start(node("waiting"))
        await bench.tools.wait_for(bench.unique("waiting"), calls=1)
        first = (await run.describe()).run_id
        await run.terminate("to see")
        again = await bench.start(node("waiting"), run_id=run.id)
        waiting = node_of(bench, run, "waiting")
        await attached_to(waiting)
        # The question of a sweep that has looked a moment too early.
        await waiting.signal("run_gone", {"execution": {"first_run_id": first, "run_id": first}})
        await quiet(bench)
        cli = TemporalCli(bench.client.service_client.config.target_host)
        await cli.done("activity", "reset", "-w", waiting.id, "-a", "call_tool")
        assert (await again.result())["counts"] == {"SUCCEEDED": 1}
    assert await calls(bench, "waiting") == {"waiting": 2}


async def test_a_node_that_its_reset_run_has_attached_to_does_not_stop(bench: Bench) -> None:
    await bench.tool("waiting", [{"status": 429}, {"body": {"id": "w"}}], retry=HOUR)
    async with bench.worker():
        run = await bench.start(node("waiting"))
        await bench.tools.wait_for(bench.unique("waiting"), calls=1)
        first = (await run.describe()).run_id
        cli = TemporalCli(bench.client.service_client.config.target_host)
        await cli.done("workflow", "reset", "-w", run.id, "-t", "FirstWorkflowTask", "--reason", "to see")
        waiting = node_of(bench, run, "waiting")
        await attached_to(waiting)
        # Both are of one chain; the node knows which came first.
        await waiting.signal("run_gone", {"execution": {"first_run_id": first, "run_id": first}})
        await quiet(bench)
        await cli.done("activity", "reset", "-w", waiting.id, "-a", "call_tool")
        assert (await bench.client.get_workflow_handle(run.id).result())["counts"] == {"SUCCEEDED": 1}
    assert await calls(bench, "waiting") == {"waiting": 2}


async def test_a_run_started_again_while_its_nodes_are_stopping_goes_on_with_them(bench: Bench) -> None:
    gate = f"{bench.name}-gate"
    await bench.tool("flying", [{"gate": gate, "body": {"id": "f"}}], timeout=GATED)
    await bench.tool("losing", [{"gate": gate, "fault": "fin_after_read", "commit": True}], timeout=GATED)
    nodes = [node("flying"), node("losing")]
    async with bench.worker():
        run = await bench.start(*nodes)
        for name in ("flying", "losing"):
            await bench.tools.wait_for(bench.unique(name), calls=1)
        await run.terminate("to see")
        await swept(bench, lambda result: result.nodes_stopped.count == 2)
        again = await bench.start(*nodes, run_id=run.id)
        for name in ("flying", "losing"):
            await attached_to(node_of(bench, run, name))
        await bench.tools.open_gate(gate)
        # One has its result after all; the other is started anew, and waits for a person.
        await blocked(bench, again, "losing")
        await bench.parked(again, "losing")
        assert (await bench.decide(again, "losing", "resolve", output={"id": "seen"})).outcome == "ACCEPTED"
        assert (await again.result())["counts"] == {"SUCCEEDED": 2}
    assert await calls(bench, "flying", "losing") == {"flying": 1, "losing": 1}


async def test_a_dead_letter_whose_run_and_node_were_ended_becomes_obsolete_if_nothing_can_have_happened(
    bench: Bench,
) -> None:
    await bench.tool("parked", [{"status": 403}])
    await bench.tool("uncertain", LOST)
    async with bench.worker():
        run = await bench.start(node("parked"), node("uncertain"))
        for name in ("parked", "uncertain"):
            await bench.parked(run, name)
        await run.terminate("to see")
        for name in ("parked", "uncertain"):
            await node_of(bench, run, name).terminate("to see")
        result = await swept(bench, lambda result: result.dead_letters_checked.count == 2)
        assert result.nodes_stopped.count == 0
        assert result.described == 1
        await entry_is(bench, run, "parked", "OBSOLETE")
        # It stays until somebody has decided, and is not asked about every minute.
        assert (await quiet(bench)).described == 0
        entry = await bench.parked(run, "uncertain")
        assert (entry.side_effect, entry.eligibility.refusals[0]) == ("POSSIBLE", "RUN_CLOSED")


async def test_an_uncertain_effect_that_nobody_waits_for_gets_its_dead_letter_again(bench: Bench) -> None:
    await bench.tool("uncertain", LOST, timeout="1s")
    async with bench.worker():
        run = await bench.start(node("uncertain"))
        before = await bench.parked(run, "uncertain")
        first = await execution_of(bench.dead_letter(run, "uncertain"))
        await run.terminate("to see")
        await node_of(bench, run, "uncertain").terminate("to see")
        await bench.dead_letter(run, "uncertain").terminate("to see")
        result = await swept(bench, lambda result: result.dead_letters_opened.count > 0)
        assert result.dead_letters_opened.ids == [f"{run.id}/uncertain"]
        entry = await bench.parked(run, "uncertain")
        assert await execution_of(bench.dead_letter(run, "uncertain")) != first
        same = ("operation_id", "idempotency_key", "tool", "input", "side_effect", "attempts", "redrives", "trace_id")
        assert {name: getattr(entry, name) for name in same} == {name: getattr(before, name) for name in same}
        assert entry.error.category == before.error.category
        assert entry.eligibility.refusals[0] == "RUN_CLOSED"
        await quiet(bench)
        assert (await bench.decide(run, "uncertain", "resolve", output={"id": "seen"})).outcome == "ACCEPTED"
        await closed(bench.dead_letter(run, "uncertain"))
        # Decided is decided, although its attempt never had an answer.
        await quiet(bench)
        again = await bench.start(node("uncertain"), run_id=run.id)
        assert (await again.result())["outputs"] == {"uncertain": {"id": "seen"}}
    assert await calls(bench, "uncertain") == {"uncertain": 1}


async def test_an_effect_that_may_still_happen_is_left_alone_until_its_horizon(bench: Bench) -> None:
    await bench.tool("uncertain", LOST, timeout="1h")
    async with bench.worker():
        run = await bench.start(node("uncertain"))
        await bench.parked(run, "uncertain")
        await run.terminate("to see")
        await node_of(bench, run, "uncertain").terminate("to see")
        await bench.dead_letter(run, "uncertain").terminate("to see")
        await swept(bench, lambda result: result.open_nodes == result.open_dead_letters == 0)
        await quiet(bench)
        assert await status_of(bench.dead_letter(run, "uncertain")) is WorkflowExecutionStatus.TERMINATED


async def test_what_a_second_run_has_attached_to_is_started_again_when_an_operator_ends_it(bench: Bench) -> None:
    await bench.tool("waiting", [{"status": 429}, {"body": {"id": "w"}}], retry=HOUR)
    await bench.tool("parked", [{"status": 403}, {"body": {"id": "p"}}])
    nodes = [node("waiting"), node("parked")]
    async with bench.worker():
        run = await bench.start(*nodes)
        await bench.tools.wait_for(bench.unique("waiting"), calls=1)
        await bench.parked(run, "parked")
        await run.terminate("to see")
        again = await bench.start(*nodes, run_id=run.id)
        await blocked(bench, again, "parked")
        # The node comes back, and finds its dead letter open; then nobody would hear of the end of either.
        await node_of(bench, run, "parked").terminate("to see")
        await swept(bench, lambda result: f"{run.id}/parked" in result.nodes_missing.ids)

        async def back() -> bool:
            return await status_of(node_of(bench, run, "parked")) is WorkflowExecutionStatus.RUNNING

        await eventually(back, "the node to be started again")
        await blocked(bench, again, "parked")
        letter = bench.dead_letter(run, "parked")
        first = await execution_of(letter)
        await attached_to(letter)
        await letter.terminate("to see")
        await swept(bench, lambda result: f"{run.id}/parked" in result.dead_letters_missing.ids)

        async def reopened() -> bool:
            return await execution_of(letter) != first

        await eventually(reopened, "the dead letter to be opened again")
        await node_of(bench, run, "waiting").terminate("to see")
        await swept(bench, lambda result: f"{run.id}/waiting" in result.nodes_missing.ids)
        await bench.tools.wait_for(bench.unique("waiting"), calls=2)
        await bench.parked(again, "parked")
        assert (await bench.decide(again, "parked", "redrive")).outcome == "ACCEPTED"
        assert (await again.result())["counts"] == {"SUCCEEDED": 2}
        await quiet(bench)
    assert await calls(bench, "waiting", "parked") == {"waiting": 2, "parked": 2}


async def test_a_node_that_the_server_has_never_begun_is_woken(bench: Bench) -> None:
    gate = bench.unique("gate")
    await bench.tool("held", [{"gate": gate}], timeout=GATED)
    async with bench.worker():
        run = await bench.start(node("held"))
        # A reset of its run can leave the like behind, in the moment in which it starts its nodes: no task is planned.
        # That one a signal gives its first task; this one, which only looks like it, just has the signal.
        never = await bench.client.start_workflow(
            "Node", "nothing", id=f"{run.id}/never", task_queue=bench.queue, start_delay=timedelta(hours=1)
        )

        async def woken() -> bool:
            return never.id in (await sweep(bench)).woken.ids

        await eventually(woken, "a sweep to find it", within=120)
        events = (await never.fetch_history()).events
        assert [event.HasField("workflow_execution_signaled_event_attributes") for event in events] == [False, True]
        assert never.id not in (await sweep(bench)).woken.ids
        await never.terminate()
        await bench.tools.open_gate(gate)
        await run.result()


async def test_a_quiet_system_is_left_alone(bench: Bench) -> None:
    gate = f"{bench.name}-gate"
    await bench.tool("flying", [{"gate": gate}], timeout=GATED)
    await bench.tool("parked", [{"status": 403}])
    await bench.tool("uncertain", LOST, timeout="1s")
    async with bench.worker():
        run = await bench.start(node("flying"), node("parked"), node("uncertain"))
        for name in ("parked", "uncertain"):
            await bench.parked(run, name)
        result = await swept(bench, lambda result: result.open_dead_letters == 2)
        assert (result.open_runs, result.open_nodes, result.complete, result.problem) == (1, 3, True, None)
        assert nobody_was_asked(result)
        # No run is looked at that a list says is open.
        assert (await quiet(bench)).described == 0
        state = await bench.status(run)
        assert {name: node.status for name, node in state.nodes.items()} == {
            "flying": NodeStatus.RUNNING,
            "parked": NodeStatus.DEAD_LETTERED,
            "uncertain": NodeStatus.DEAD_LETTERED,
        }
        await bench.tools.open_gate(gate)


async def test_a_cancelled_run_leaves_nothing_to_sweep(bench: Bench) -> None:
    await bench.tool("uncertain", LOST, timeout="1s")
    async with bench.worker():
        run = await bench.start(node("uncertain"))
        await bench.parked(run, "uncertain")
        await run.cancel()
        await closed(run)
        result = await swept(bench, lambda result: result.open_runs == 0 and result.open_dead_letters == 1)
        assert nobody_was_asked(result)
        assert (await quiet(bench)).described == 0


async def test_a_sweep_that_cannot_ask_the_ledger_does_the_rest_and_says_so(bench: Bench) -> None:
    await bench.tool("waiting", [{"status": 429}], retry=HOUR)
    async with bench.worker():
        run = await bench.start(node("waiting"))
        await bench.tools.wait_for(bench.unique("waiting"), calls=1)
        await run.terminate("to see")
        async with locked(bench.folder / "ledger.db"):

            async def failed() -> SweepResult | None:
                with pytest.raises(WorkflowFailureError) as raised:
                    await sweep(bench)
                cause = raised.value.cause
                assert isinstance(cause, ApplicationError)
                assert cause.type == "SweepIncomplete"
                result = SweepResult.model_validate(cause.details[0])
                return result if result.nodes_stopped.count else None

            result = await eventually(failed, "a sweep that finds the node")
            assert result.problem is not None
            assert "ledger" in result.problem
        assert await closed(node_of(bench, run, "waiting")) is WorkflowExecutionStatus.FAILED
        await quiet(bench)
