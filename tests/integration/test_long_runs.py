"""Runs that are too long for one history: they continue as new, and nobody notices.

The server suggests it after sixty events here, not after thousands.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError

from contracts.identity import node_workflow_id
from contracts.runs import MAX_NODES_SHOWN, NodeStatus, RunState
from tests.impatient import SUGGESTED_AFTER, impatient_server
from tests.integration.test_run_graph import GATED, node, ref
from tests.integration.test_sweep import attached_to
from tests.lab import Bench
from tests.waiting import eventually

MODES = pytest.mark.parametrize(("mode", "steps"), [("workflow", 25), ("fast", 150)])
"""With how many steps a run is long: a hundred of a fast run's are one workflow task."""


@pytest.fixture(scope="module")
async def impatient() -> AsyncIterator[Client]:
    """A server that suggests to continue as new early."""
    async with impatient_server() as client:
        yield client


@pytest.fixture
def long(bench: Bench, impatient: Client) -> Bench:
    """A bench on that server."""
    return replace(bench, client=impatient)


async def executions(bench: Bench, run: Any) -> int:
    """How many executions a workflow has had, as far as the list of workflows tells by now."""
    return len([found async for found in bench.client.list_workflows(f"WorkflowId = '{run.id}'")])


async def has_continued(bench: Bench, run: Any) -> None:
    async def continued() -> bool:
        return await executions(bench, run) > 1

    await eventually(continued, f"{run.id} to continue as new")


async def called_once_each(bench: Bench, tool: str, times: int) -> None:
    calls = Counter(call.key for call in await bench.tools.calls(bench.unique(tool)))
    assert set(calls.values()) == {1}
    assert len(calls) == times


@MODES
async def test_a_run_goes_on_over_many_histories_and_each_node_is_called_once(
    long: Bench, mode: str, steps: int
) -> None:
    await long.tool("step")
    length = max(12, steps // 5)
    chains = [
        [node(f"c{chain}-0", "step")]
        + [node(f"c{chain}-{n}", "step", {"of": ref(f"c{chain}-{n - 1}", "/id")}) for n in range(1, length)]
        for chain in range(5)
    ]
    async with long.worker():
        run = await long.start(*(one for chain in chains for one in chain), node_mode=mode, max_parallel=4)
        result = await run.result()
        assert result["counts"] == {"SUCCEEDED": 5 * length}
        assert set(result["outputs"]) == {f"c{chain}-{length - 1}" for chain in range(5)}
        state = await long.status(run)
        await has_continued(long, run)
    assert {(str(one.status), one.attempt_count) for one in state.nodes.values()} == {("SUCCEEDED", 1)}
    await called_once_each(long, "step", 5 * length)
    calls = {call.key: call for call in await long.tools.calls(long.unique("step"))}
    ids = {effect.key: effect.body["id"] for effect in await long.tools.effects(long.unique("step"))}
    assert {call.body.get("of") for call in calls.values()} - {None} <= set(ids.values())


@MODES
async def test_a_node_that_waits_for_a_person_is_not_forgotten_by_the_executions_that_follow(
    long: Bench, mode: str, steps: int
) -> None:
    await long.tool("refused", [{"status": 403}, {"status": 403}, {"body": {"id": "late"}}])
    await long.tool("step")
    async with long.worker():
        run = await long.start(
            node("again", "refused"),
            node("given-up", "refused", on_discard="continue"),
            node("next", "step", {"of": ref("again", "/id")}),
            *(node(f"n{n}", "step", after=[f"n{n - 1}"] if n else []) for n in range(steps)),
            node_mode=mode,
            max_parallel=2,
        )
        for name in ("again", "given-up"):
            await long.parked(run, name)

        async def blocked() -> RunState | None:
            state = await long.status(run)
            return state if state.status == "BLOCKED" else None

        state = await eventually(blocked, "all the others to end")
        await has_continued(long, run)
        assert state.blocked == ["again", "given-up"]
        assert state.nodes["again"].dead_letter == f"{run.id}/again/dead-letter"
        await long.decide(run, "given-up", "discard")
        await long.decide(run, "again", "redrive")
        result = await run.result()
    assert result["counts"] == {"SUCCEEDED": steps + 2, "DISCARDED": 1}
    (body,) = [call.body for call in await long.tools.calls(long.unique("step")) if call.body]
    assert body == {"of": "late"}
    await called_once_each(long, "step", steps + 1)


@MODES
async def test_outputs_that_are_too_many_to_be_carried_are_read_back(long: Bench, mode: str, steps: int) -> None:
    await long.tool("large", [{"body": {"id": "x" * 100_000}}])
    await long.tool("step")
    async with long.worker():
        run = await long.start(
            *(node(f"large{n}", "large") for n in range(6)),
            *(node(f"n{n}", "step", after=[f"n{n - 1}" if n else "large5"]) for n in range(steps)),
            *(node(f"use{n}", "step", {"of": ref(f"large{n}", "/id")}, after=[f"n{steps - 1}"]) for n in range(5)),
            node_mode=mode,
            max_parallel=10,
        )
        result = await run.result()
        await has_continued(long, run)
    assert result["counts"] == {"SUCCEEDED": steps + 11}
    used = [call.body["of"] for call in await long.tools.calls(long.unique("step")) if call.body]
    assert used == ["x" * 100_000] * 5
    await called_once_each(long, "large", 6)


@MODES
async def test_cancelling_reaches_the_nodes_that_an_earlier_execution_has_started(
    long: Bench, mode: str, steps: int
) -> None:
    gate = long.unique("gate")
    await long.tool("refused", [{"status": 403}])
    await long.tool("held", [{"gate": gate}], timeout=GATED)
    await long.tool("step")
    async with long.worker():
        run = await long.start(
            node("parked", "refused"),
            *(node(f"n{n}", "step", after=[f"n{n - 1}"] if n else []) for n in range(steps)),
            node("last", "held", after=[f"n{steps - 1}"]),
            node("never", "step", after=["last"]),
            node_mode=mode,
        )
        await long.parked(run, "parked")
        await long.tools.wait_for(long.unique("held"), calls=1, timeout=90)
        await has_continued(long, run)
        await run.cancel()

        async def letter_knows() -> bool:
            refusals = (await long.entry(run, "parked")).eligibility.refusals
            return bool({"RUN_CANCELLING", "RUN_CLOSED", "NODE_CLOSED"} & set(refusals))

        await eventually(letter_knows, "the dead letter to know of the cancel")
        await long.tools.open_gate(gate)
        with pytest.raises(WorkflowFailureError):
            await run.result()
        assert (await run.describe()).status is WorkflowExecutionStatus.CANCELED
        counts = (await long.status(run)).counts
    assert counts == {NodeStatus.SUCCEEDED: steps + 1, NodeStatus.CANCELLED: 2}


async def test_a_node_that_an_operator_ends_is_started_again_by_an_execution_that_did_not_start_it(
    long: Bench,
) -> None:
    await long.tool("refused", [{"status": 403}])
    await long.tool("step")
    async with long.worker():
        run = await long.start(
            node("parked", "refused"), *(node(f"n{n}", "step", after=[f"n{n - 1}"] if n else []) for n in range(20))
        )
        await long.parked(run, "parked")
        await has_continued(long, run)
        child = long.client.get_workflow_handle(node_workflow_id(run.id, "parked"))
        first = (await child.describe()).run_id
        await child.terminate()

        async def again() -> bool:
            await long.client.execute_workflow("Sweep", id=f"{long.name}-sweep", task_queue=long.queue)
            return (await child.describe()).run_id != first

        await eventually(again, "the node to be started again")
        await long.decide(run, "parked", "discard")
        with pytest.raises(WorkflowFailureError):
            await run.result()
    assert len(await long.tools.calls(long.unique("refused"))) == 1


async def test_a_dead_letter_that_has_continued_as_new_tells_the_node_that_only_asked_to_hear(long: Bench) -> None:
    await long.tool("pay", [{"status": 403}, {}])
    async with long.worker():
        run = await long.start(node("a", "pay"))
        await long.parked(run, "a")
        letter = long.dead_letter(run, "a")
        await long.client.get_workflow_handle(node_workflow_id(run.id, "a")).terminate("an operator")
        await attached_to(letter)
        for _ in range(SUGGESTED_AFTER):
            await letter.signal("nobody knows")
        await has_continued(long, letter)
        assert (await long.decide(run, "a", "redrive")).outcome == "ACCEPTED"
        assert (await run.result())["status"] == "SUCCEEDED"
    assert len(await long.tools.calls(long.unique("pay"))) == 2


async def test_the_status_of_a_large_run_is_told_page_by_page(bench: Bench) -> None:
    gate = bench.unique("gate")
    await bench.tool("held", [{"gate": gate}], timeout=GATED)
    names = [f"n{n}" for n in range(MAX_NODES_SHOWN + 200)]
    async with bench.worker():
        run = await bench.start(*(node(name, "held") for name in names), max_parallel=1)
        await bench.tools.wait_for(bench.unique("held"), calls=1)
        first = RunState.model_validate(await run.query("status"))
        second = RunState.model_validate(await run.query("status", {"after": first.next}))
        await asyncio.gather(run.cancel(), bench.tools.open_gate(gate))
        with pytest.raises(WorkflowFailureError):
            await run.result()
    assert [*first.nodes, *second.nodes] == names
    assert (len(first.nodes), first.next, second.next) == (MAX_NODES_SHOWN, names[MAX_NODES_SHOWN - 1], None)
    assert first.counts == second.counts == {NodeStatus.RUNNING: 1, NodeStatus.PENDING: len(names) - 1}
