"""Cancelling a run: nothing new is sent, what is in flight is settled, and no uncertain effect is hidden."""

import asyncio
from typing import Any

import pytest
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ApplicationError, CancelledError
from temporalio.service import RPCError, RPCStatusCode

from contracts.dead_letters import Entry
from tests.faults.lookup import last_failure, pending_call
from tests.integration.temporal_cli import TemporalCli
from tests.lab import Bench
from tests.waiting import eventually

Run = WorkflowHandle[Any, Any]

GATED = "100s"
"""A tool's timeout where the test decides when it answers."""
HOUR = {category: {"initial": "1h", "maximum": "1h"} for category in ("TRANSIENT", "RATE_LIMITED", "DEPENDENCY_DOWN")}


def node(name: str, tool: str, **fields: Any) -> dict[str, Any]:
    return {"id": name, "tool": tool, "input": {"amount": 1}, **fields}


async def cancelled(run: Run) -> None:
    """The run ends as a cancelled workflow."""
    with pytest.raises(WorkflowFailureError) as failed:
        await run.result()
    assert isinstance(failed.value.cause, CancelledError), failed.value.cause


async def nodes(bench: Bench, run: Run) -> dict[str, str]:
    """What a run that is over says of its nodes."""
    state = await bench.status(run)
    assert (state.status, state.run_id) == ("CANCELLED", run.id)
    return {name: str(node.status) for name, node in state.nodes.items()}


async def calls(bench: Bench, tool: str) -> int:
    return len(await bench.tools.calls(bench.unique(tool)))


async def has_dead_letter(bench: Bench, run: Run, name: str) -> bool:
    try:
        await bench.entry(run, name)
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return False
        raise
    return True


async def settled_entry(bench: Bench, run: Run, name: str, status: str) -> Entry:
    """The entry, once it knows that its run is gone."""

    async def known() -> Entry | None:
        entry = await bench.entry(run, name)
        return entry if entry.status == status and "RUN_CLOSED" in entry.eligibility.refusals else None

    async def check_and_look() -> Entry | None:
        await bench.decide(run, name, "check", decided_by="")
        return await known()

    return await eventually(check_and_look, f"the entry of {name} to be {status}")


async def cancel_in_flight(bench: Bench, tool: str, run: Run) -> None:
    """Cancels while the call waits at the tool's gate, and opens the gate once its node has heard of it."""
    await bench.tools.wait_for(bench.unique(tool), calls=1)
    await run.cancel()
    handle = bench.client.get_workflow_handle(f"{run.id}/a")

    async def told() -> bool:
        return (await handle.describe()).raw_description.workflow_extended_info.cancel_requested

    await eventually(told, "the node to be cancelled")
    await bench.tools.open_gate(f"{bench.name}-{tool}")


async def in_flight(bench: Bench, name: str, run_id: str | None = None) -> Run:
    """A run of four nodes whose first is in flight, and is then cancelled."""
    run = await bench.start(
        node("a", name), node("b", "never", after=["a"]), node("c", "never", after=["b"]), run_id=run_id
    )
    await cancel_in_flight(bench, name, run)
    await cancelled(run)
    return run


async def test_what_is_in_flight_at_a_cancel_is_settled_and_nothing_new_is_sent(bench: Bench) -> None:
    await bench.tool("never")
    lost: dict[str, Any] = {"fault": "fin_after_read"}
    timeouts = {"absent": "3s"}
    for name, step, reconcile in (
        ("known", {}, False),
        ("refused", {"status": 403}, False),
        ("committed", lost, True),
        ("absent", lost | {"commit": False}, True),
        ("unknown", lost, False),
        ("silent", lost, True),
        ("server-error", {"status": 500}, False),
    ):
        await bench.tool(
            name,
            [{"gate": f"{bench.name}-{name}", **step}],
            reconcile=reconcile,
            timeout=timeouts.get(name, GATED),
            retry={"DEPENDENCY_DOWN": {"initial": "20ms", "attempts": 2}},
        )
    # It dedupes by key, so that after the 500 it would be sent again at once, were it not for the cancel.
    bench.catalog["server-error"]["idempotency"] = "key"
    await bench.tools.reconcile_script(bench.unique("silent"), [{"status": 500}])
    names = [name for name in bench.catalog if name != "never"]
    async with bench.worker():
        runs = dict(zip(names, await asyncio.gather(*(in_flight(bench, name) for name in names)), strict=True))
        first = {name: (await nodes(bench, run)).pop("a") for name, run in runs.items()}
        for run in runs.values():
            assert (await nodes(bench, run) | {"a": ""}) == {"a": "", "b": "CANCELLED", "c": "CANCELLED"}
        # Counted where the effect is known; left to a person where it is not; else just cancelled.
        uncertain = {"unknown", "silent", "server-error"}
        assert first == {name: "SUCCEEDED" if name in ("known", "committed") else "CANCELLED" for name in names}
        assert {name for name, run in runs.items() if await has_dead_letter(bench, run, "a")} == uncertain
        for name in uncertain:
            assert (await bench.status(runs[name])).nodes["a"].dead_letter == f"{runs[name].id}/a/dead-letter"
            entry = await settled_entry(bench, runs[name], "a", "AWAITING_DECISION")
            assert entry.side_effect == "POSSIBLE"
            assert entry.error.category == ("TRANSIENT" if name == "server-error" else "UNKNOWN_SIDE_EFFECT"), name
            record = await bench.decide(runs[name], "a", "redrive", override=["SIDE_EFFECT_UNRESOLVED"])
            assert (record.outcome, record.refusals) == ("REFUSED", ["RUN_CLOSED"])
        # The entry outlives its run until somebody says what became of it.
        assert (await bench.decide(runs["unknown"], "a", "resolve", output={"id": "seen"})).outcome == "ACCEPTED"
        assert (await bench.decide(runs["server-error"], "a", "discard")).outcome == "ACCEPTED"
        await bench.tools.reconcile_script(bench.unique("silent"), [{}])
        assert (await bench.decide(runs["silent"], "a", "reconcile")).outcome == "NOTED"
        for name, status in (("unknown", "RESOLVED"), ("server-error", "DISCARDED"), ("silent", "RESOLVED")):
            assert (await bench.entry(runs[name], "a")).status == status, name
    assert {name: await calls(bench, name) for name in bench.catalog} == {"never": 0} | dict.fromkeys(names, 1)


async def test_a_call_in_flight_that_belongs_to_an_earlier_execution_is_waited_for_at_a_cancel(bench: Bench) -> None:
    await bench.tool("held", [{"gate": bench.unique("gate")}], timeout=GATED)
    cli = TemporalCli(bench.client.service_client.config.target_host)
    async with bench.worker():
        run = await bench.start(node("a", "held"))
        await bench.tools.wait_for(bench.unique("held"), calls=1)
        await cli.done("workflow", "reset", "-w", f"{run.id}/a", "-t", "FirstWorkflowTask", "--reason", "to see")

        async def turned_away() -> bool:
            call = await pending_call(bench, run, "a")
            failure = await last_failure(call) if call is not None else None
            return failure is not None and failure.code == "busy"

        await eventually(turned_away, "the new execution to be told that the call is under way")
        await run.cancel()

        async def waits() -> bool:
            handle = bench.client.get_workflow_handle(f"{run.id}/a")
            timers = [event.timer_started_event_attributes async for event in handle.fetch_history_events()]
            return any(timer.timer_id for timer in timers)

        await eventually(waits, "the node to wait for the call")
        await bench.tools.open_gate(bench.unique("gate"))
        await cancelled(run)
        assert await nodes(bench, run) == {"a": "SUCCEEDED"}
        assert not await has_dead_letter(bench, run, "a")
    assert await calls(bench, "held") == 1


async def test_a_cancel_in_backoff_ends_the_node_without_another_call(bench: Bench) -> None:
    await bench.tool("none", [{"status": 429}], retry=HOUR)
    await bench.tool("possible", [{"status": 500}], idempotency="key", retry=HOUR)
    await bench.tool("askable", [{"status": 500, "commit": True}], idempotency="key", retry=HOUR, reconcile=True)
    async with bench.worker():
        runs = {name: await bench.start(node("a", name), node("b", name, after=["a"])) for name in bench.catalog}

        async def cancel(name: str) -> None:
            await bench.tools.wait_for(bench.unique(name), calls=1)
            handle = bench.client.get_workflow_handle(f"{runs[name].id}/a")

            async def waits() -> bool:
                pending = (await handle.describe()).raw_description.pending_activities
                return any(activity.HasField("last_failure") for activity in pending)

            await eventually(waits, f"{name} to wait")
            await runs[name].cancel()
            await cancelled(runs[name])

        await asyncio.gather(*(cancel(name) for name in runs))
        assert {name: await nodes(bench, run) for name, run in runs.items()} == {
            "none": {"a": "CANCELLED", "b": "CANCELLED"},
            "possible": {"a": "CANCELLED", "b": "CANCELLED"},
            "askable": {"a": "SUCCEEDED", "b": "CANCELLED"},
        }
        assert [name for name, run in runs.items() if await has_dead_letter(bench, run, "a")] == ["possible"]
        entry = await settled_entry(bench, runs["possible"], "a", "AWAITING_DECISION")
        assert (entry.side_effect, entry.attempts[-1].http_status) == ("POSSIBLE", 500)
    assert [await calls(bench, name) for name in runs] == [1, 1, 1]


async def test_an_entry_whose_run_is_cancelled_is_obsolete_unless_an_effect_is_possible(bench: Bench) -> None:
    await bench.tool("no", [{"status": 403}])
    await bench.tool("lost", [{"fault": "fin_after_read"}])
    async with bench.worker():
        run = await bench.start(node("no", "no"), node("lost", "lost"), node("then", "no", after=["no"]))
        for name in ("no", "lost"):
            await bench.parked(run, name)
        await run.cancel()
        await cancelled(run)
        assert await nodes(bench, run) == {"no": "CANCELLED", "lost": "CANCELLED", "then": "CANCELLED"}
        await settled_entry(bench, run, "no", "OBSOLETE")
        await settled_entry(bench, run, "lost", "AWAITING_DECISION")
        for name in ("no", "lost"):
            # Still open to be looked at, and to refuse.
            record = await bench.decide(run, name, "redrive", override=["SIDE_EFFECT_UNRESOLVED"])
            assert (record.outcome, "RUN_CLOSED" in record.refusals) == ("REFUSED", True)
            description = await bench.dead_letter(run, name).describe()
            assert description.status == WorkflowExecutionStatus.RUNNING
        assert (await bench.entry(run, "no")).status == "OBSOLETE"
        assert (await bench.decide(run, "lost", "discard")).outcome == "ACCEPTED"
    assert (await calls(bench, "no"), await calls(bench, "lost")) == (1, 1)


async def test_a_run_cancelled_as_soon_as_it_is_started_sends_nothing_and_still_answers(bench: Bench) -> None:
    """Before its first task, while it waits for room, and twice."""
    await bench.tool("pay")
    await bench.tool("held", [{"gate": f"{bench.name}-gate"}], timeout=GATED)
    early = await bench.start(node("a", "pay"))
    await early.cancel()
    async with bench.worker():
        await cancelled(early)
        assert (await bench.status(early)).status == "CANCELLED"
        narrow = await bench.start(
            node("a", "held"), *(node(f"n{number}", "pay") for number in range(5)), max_parallel=1
        )
        await bench.tools.wait_for(bench.unique("held"), calls=1)
        await narrow.cancel()
        await narrow.cancel()
        await bench.tools.open_gate(f"{bench.name}-gate")
        await cancelled(narrow)
        assert await nodes(bench, narrow) == {"a": "SUCCEEDED"} | {f"n{number}": "CANCELLED" for number in range(5)}
    assert await calls(bench, "pay") == 0


async def test_cancelling_one_node_by_hand_fails_its_run_and_a_dead_letter_is_not_cancelled(bench: Bench) -> None:
    await bench.tool("waiting", [{"status": 429}], retry=HOUR)
    await bench.tool("no", [{"status": 403}, {}])
    await bench.tool("yes")
    async with bench.worker():
        run = await bench.start(
            node("waiting", "waiting"), node("after", "yes", after=["waiting"]), node("parked", "no")
        )
        await bench.tools.wait_for(bench.unique("waiting"), calls=1)
        await bench.parked(run, "parked")
        await bench.dead_letter(run, "parked").cancel()
        await bench.client.get_workflow_handle(f"{run.id}/waiting").cancel()

        async def one_is_over() -> bool:
            return (await bench.status(run)).nodes["waiting"].status == "CANCELLED"

        await eventually(one_is_over, "the node to be cancelled")
        assert (await bench.decide(run, "parked", "redrive")).outcome == "ACCEPTED"
        with pytest.raises(WorkflowFailureError) as failed:
            await run.result()
    cause = failed.value.cause
    assert isinstance(cause, ApplicationError)
    assert (cause.type, cause.details[0]["counts"]) == ("RunFailed", {"CANCELLED": 1, "SKIPPED": 1, "SUCCEEDED": 1})
    assert await calls(bench, "yes") == 0
    assert await calls(bench, "waiting") == 1
