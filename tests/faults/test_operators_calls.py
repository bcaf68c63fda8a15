"""What an operator may do to a pending call with `temporal activity`: no second effect, in mid-call and in backoff."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from temporalio.client import WorkflowHandle

from contracts.dead_letters import DecisionOutcome
from contracts.identity import OperationId
from tests.faults.lookup import dispatched
from tests.integration.temporal_cli import TemporalCli
from tests.lab import Bench
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(600)

Run = WorkflowHandle[Any, Any]

HOUR = {"RATE_LIMITED": {"initial": "1h", "maximum": "1h"}}
OK = {"body": {"id": "ok"}}
PATIENCE = 240


class Call:
    """A node's pending call, and what an operator does to it."""

    def __init__(self, bench: Bench, tool: str) -> None:
        self.bench = bench
        self.tool = tool
        self.cli = TemporalCli(bench.client.service_client.config.target_host)
        self.run: Run = bench.client.get_workflow_handle(f"{bench.name}-{tool}")

    async def begin(self) -> None:
        self.run = await self.bench.start({"id": "n", "tool": self.tool, "input": {}}, run_id=self.run.id)
        await self.bench.tools.wait_for(self.bench.unique(self.tool), calls=1)

    @property
    def _pending(self) -> tuple[str, ...]:
        """Where it is pending: a fast node's first attempt is its run's."""
        fast = self.bench.node_mode == "fast"
        workflow_id, activity_id = (self.run.id, "n") if fast else (f"{self.run.id}/n", "call_tool")
        return ("--workflow-id", workflow_id, "--activity-id", activity_id)

    async def activity(self, command: str, *options: str) -> None:
        await dispatched(self.bench, self.run, "n")
        await self.cli.done("activity", command, *self._pending, *options)

    async def unpause_if_pending(self) -> None:
        await self.cli.run("activity", "unpause", *self._pending)

    async def open_gate(self) -> None:
        await self.bench.tools.open_gate(f"{self.bench.name}-{self.tool}")

    async def waits_again(self) -> None:
        """The first attempt has come back, and the next one is an hour away."""

        async def so() -> bool:
            node = self.bench.client.get_workflow_handle(f"{self.run.id}/n")
            pending = (await node.describe()).raw_description.pending_activities
            return any(activity.HasField("last_failure") for activity in pending)

        await eventually(so, "the first attempt to come back", PATIENCE)

    async def is_done(self, calls: int) -> None:
        async with asyncio.timeout(PATIENCE):
            assert (await self.run.result())["counts"] == {"SUCCEEDED": 1}, self.tool
        key = OperationId(run_id=self.run.id, node_id="n", logical_attempt=1).idempotency_key
        seen = await self.bench.tools.calls(self.bench.unique(self.tool))
        assert [call.key for call in seen] == [key] * calls, self.tool
        assert len(await self.bench.tools.effects(self.bench.unique(self.tool))) == 1, self.tool


# In backoff: the first attempt was told to wait, and so has had no effect.


async def reset_in_backoff(call: Call) -> None:
    await call.waits_again()
    await call.activity("reset")
    await call.is_done(calls=2)


async def paused_in_backoff(call: Call) -> None:
    await call.waits_again()
    await call.activity("pause")
    await call.activity("unpause")
    await call.activity("reset")
    await call.is_done(calls=2)


async def unpaused_by_a_reset(call: Call) -> None:
    await call.waits_again()
    await call.activity("pause")
    await call.activity("reset", "--keep-paused")
    assert len(await call.bench.tools.calls(call.bench.unique(call.tool))) == 1
    await call.activity("unpause")
    await call.is_done(calls=2)


async def given_up_in_backoff(call: Call) -> None:
    await call.waits_again()
    await call.activity("update-options", "--schedule-to-close-timeout", "1s")
    entry = await asyncio.wait_for(call.bench.parked(call.run, "n"), PATIENCE)
    assert (entry.error.code, entry.side_effect) == ("deadline_exceeded", "NONE")
    assert (await call.bench.decide(call.run, "n", "redrive")).outcome is DecisionOutcome.ACCEPTED
    await call.is_done(calls=2)


# In mid-call: the one attempt runs to its end, whatever is said about it.


async def reset_in_mid_call(call: Call) -> None:
    await call.activity("reset")
    await call.open_gate()
    await call.is_done(calls=1)


async def paused_in_mid_call(call: Call) -> None:
    await call.activity("pause")
    await call.activity("unpause")
    await call.open_gate()
    await call.is_done(calls=1)


async def paused_until_it_has_ended(call: Call) -> None:
    await call.activity("pause")
    await call.open_gate()
    await eventually(lambda: _has_effect(call), "the effect", PATIENCE)
    # It may have ended by its own answer already; then there is nothing to unpause.
    await call.unpause_if_pending()
    await call.is_done(calls=1)


async def _has_effect(call: Call) -> bool:
    return bool(await call.bench.tools.effects(call.bench.unique(call.tool)))


async def given_up_in_mid_call(call: Call) -> None:
    await call.activity("update-options", "--schedule-to-close-timeout", "1s")
    entry = await asyncio.wait_for(call.bench.parked(call.run, "n"), PATIENCE)
    assert entry.side_effect == "POSSIBLE"
    refused = await call.bench.decide(call.run, "n", "redrive")
    assert "SIDE_EFFECT_UNRESOLVED" in refused.refusals
    await call.open_gate()
    await eventually(lambda: _has_effect(call), "the effect", PATIENCE)

    async def told() -> bool:
        # Its answer comes late, but it comes; whoever looks is told.
        await call.cli.update(f"{call.run.id}/n/dead-letter", "check", "{}")
        return (await call.bench.entry(call.run, "n")).status == "RESOLVED"

    await eventually(told, "the dead letter to know the answer", PATIENCE)
    await call.is_done(calls=1)


IN_BACKOFF: list[Callable[[Call], Awaitable[None]]] = [
    reset_in_backoff,
    paused_in_backoff,
    unpaused_by_a_reset,
    given_up_in_backoff,
]
IN_MID_CALL: list[Callable[[Call], Awaitable[None]]] = [
    reset_in_mid_call,
    paused_in_mid_call,
    paused_until_it_has_ended,
    given_up_in_mid_call,
]


async def run_all(bench: Bench, cases: list[Callable[[Call], Awaitable[None]]]) -> None:
    """Every case at once, on one worker."""
    calls = {case: Call(bench, case.__name__.replace("_", "-")) for case in cases}
    for case, call in calls.items():
        gate = {"gate": f"{bench.name}-{call.tool}", **OK}
        await bench.tool(call.tool, [{"status": 429}, OK] if case in IN_BACKOFF else [gate], timeout="200s", retry=HOUR)

    async def through(case: Callable[[Call], Awaitable[None]]) -> None:
        await calls[case].begin()
        await case(calls[case])

    async with bench.worker():
        try:
            outcomes = await asyncio.gather(*(through(case) for case in cases), return_exceptions=True)
        finally:
            for call in calls.values():
                await call.open_gate()
    failed = [error for error in outcomes if error is not None]
    if failed:
        raise BaseExceptionGroup("cases that do not hold", failed)


@pytest.mark.workflow_mode("between two attempts a fast node waits by a timer")
async def test_a_call_in_backoff(bench: Bench) -> None:
    await run_all(bench, IN_BACKOFF)


async def test_a_call_in_flight(bench: Bench) -> None:
    # A fast node's workflow goes on where its first attempt was given up: it waits for what is in flight.
    await run_all(
        bench, [case for case in IN_MID_CALL if bench.node_mode != "fast" or case is not given_up_in_mid_call]
    )
