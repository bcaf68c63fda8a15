"""A tool that asks to be left alone, or is down: all of its callers know it, whichever worker has them."""

import asyncio
import itertools
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

from temporalio.client import WorkflowHandle

from contracts.dispatch import FailureDetails
from tests.faults.deliveries import Consumer, details, dispatch
from tests.faults.lookup import last_failure, node_result, pending_call
from tests.lab import Bench
from tests.waiting import eventually
from tests.worker_process import WorkerProcess

Run = WorkflowHandle[Any, Any]

CROWD = 50


def nodes(tool: str, count: int = CROWD) -> list[dict[str, Any]]:
    return [{"id": f"n{number}", "tool": tool, "input": {"number": number}} for number in range(count)]


async def held_back(bench: Bench, run: Run, message: str) -> FailureDetails:
    """One of the run's nodes that has come back with this message."""

    async def found() -> FailureDetails | None:
        for number in range(CROWD):
            call = await pending_call(bench, run, f"n{number}")
            failure = await last_failure(call) if call is not None else None
            if failure is not None and message in failure.message:
                return failure
        return None

    return await eventually(found, f"a node that says {message!r}")


async def attempts(bench: Bench, run: Run, count: int = CROWD) -> int:
    """How many attempts the nodes have taken in all."""
    results = await asyncio.gather(*(node_result(bench, run, f"n{number}") for number in range(count)))
    return sum(result["attempt_count"] for result in results)


async def test_after_a_429_to_fifty_nodes_of_two_workers_one_call_comes_in_its_time_and_then_the_rest(
    bench: Bench,
) -> None:
    """Nobody else finds out by himself, and waiting costs no attempt."""
    together, probe = bench.unique("together"), bench.unique("probe")
    limited = {"status": 429, "headers": {"retry-after": "3"}, "gate": together}
    await bench.tool("busy", [limited] * CROWD + [{"gate": probe}, {}], concurrency=CROWD, timeout="60s")
    tool = bench.unique("busy")
    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(WorkerProcess.start(bench))
        run = await bench.start(*nodes("busy"))
        await bench.tools.wait_for(tool, calls=CROWD, timeout=120)
        opened = datetime.now(UTC)
        await bench.tools.open_gate(together)
        await bench.tools.wait_for(tool, calls=CROWD + 1, timeout=120)
        held = await held_back(bench, run, "the tool had asked to be left alone; one call probes it")
        assert (held.category, held.code, held.attempt) == ("RATE_LIMITED", "busy", 0)
        assert len(await bench.tools.calls(tool)) == CROWD + 1
        lifted = datetime.now(UTC)
        await bench.tools.open_gate(probe)
        async with asyncio.timeout(120):
            assert (await run.result())["status"] == "SUCCEEDED"
        calls = await bench.tools.calls(tool)
        assert len(calls) == 2 * CROWD
        assert calls[CROWD].at >= opened + timedelta(seconds=3)
        assert all(call.at >= lifted for call in calls[CROWD + 1 :])
        assert await attempts(bench, run) == 2 * CROWD


async def test_a_tool_that_is_down_gets_one_probe_at_a_time(bench: Bench) -> None:
    together = bench.unique("together")
    down = {"status": 503, "gate": together}
    slow = {"status": 503, "delay": 0.4}
    probes = 4
    await bench.tool(
        "down",
        [down] * CROWD + [slow] * probes + [{}],
        effect="read",
        concurrency=CROWD,
        timeout="60s",
        retry={"DEPENDENCY_DOWN": {"initial": "300ms", "maximum": "1s"}},
    )
    tool = bench.unique("down")
    async with bench.worker():
        run = await bench.start(*nodes("down"))
        await bench.tools.wait_for(tool, calls=CROWD, timeout=120)
        await bench.tools.open_gate(together)
        async with asyncio.timeout(120):
            assert (await run.result())["status"] == "SUCCEEDED"
        calls = await bench.tools.calls(tool)
        assert len(calls) == 2 * CROWD + probes
        # None of them came before the one before had been answered.
        for one, next_one in itertools.pairwise(calls[CROWD : CROWD + probes + 1]):
            assert next_one.at - one.at >= timedelta(seconds=0.4)
        assert await attempts(bench, run) == 2 * CROWD + probes


async def test_a_probe_that_is_lost_with_its_worker_makes_way_for_another(bench: Bench) -> None:
    never = bench.unique("never")
    await bench.tool(
        "limited",
        [{"status": 429, "headers": {"retry-after": "1"}}, {"gate": never}, {}],
        effect="read",
        concurrency=1,
        timeout="120s",
    )
    tool = bench.unique("limited")
    async with WorkerProcess.start(bench) as doomed:
        run = await bench.start(*nodes("limited", 2))
        await bench.tools.wait_for(tool, calls=2)
        await doomed.kill()
    lost = datetime.now(UTC)
    async with WorkerProcess.start(bench):
        async with asyncio.timeout(120):
            assert (await run.result())["status"] == "SUCCEEDED"
    calls = await bench.tools.calls(tool)
    # The limited one, the lost one, and one success for each node.
    assert len(calls) == 4
    assert calls[2].at > lost
    assert await attempts(bench, run, 2) == 4


async def test_a_paused_delivery_is_none_of_the_twenty_that_got_nowhere(bench: Bench) -> None:
    await bench.tool("limited", [{"status": 429, "headers": {"retry-after": "600"}}])
    now = datetime.now(UTC)
    async with Consumer.of(bench) as consumer:
        await consumer.refused(dispatch(bench, "limited", "first"), scheduled=now)
        attempted = None
        for attempt in range(1, 31):
            work = dispatch(bench, "limited", "second")
            error = await consumer.refused(work, scheduled=now, attempt=attempt, attempted=attempted)
            envelope = details(error)
            assert (error.type, envelope.code, error.non_retryable) == ("RATE_LIMITED", "busy", False)
            assert (envelope.side_effect, envelope.attempt) == ("NONE", 0)
            assert "the tool asked to be left alone until 2" in envelope.message
            assert error.next_retry_delay is not None
            assert timedelta(seconds=500) < error.next_retry_delay <= timedelta(seconds=630)
            attempted = consumer.heartbeat
            # Whatever else may come then has its twenty deliveries before it.
            assert attempted == attempt
    assert len(await bench.tools.calls(bench.unique("limited"))) == 1


async def test_a_pause_past_a_nodes_deadline_is_told_to_a_person_at_once(bench: Bench) -> None:
    await bench.tool("limited", [{"status": 429, "headers": {"retry-after": "600"}}])
    now = datetime.now(UTC)
    async with Consumer.of(bench) as consumer:
        await consumer.refused(dispatch(bench, "limited", "first"), scheduled=now)
        work = dispatch(bench, "limited", "second").model_copy(update={"deadline": now + timedelta(seconds=60)})
        error = await consumer.refused(work, scheduled=now)
    assert (error.type, details(error).code, error.non_retryable) == ("RATE_LIMITED", "deadline_exceeded", True)
    assert len(await bench.tools.calls(bench.unique("limited"))) == 1


async def test_what_has_gathered_before_a_tool_with_a_rate_does_not_come_at_once(bench: Bench) -> None:
    """The server's limit lets a second's worth through at once; the ledger gives each call its turn."""
    rate = 10
    await bench.tool("paced", [{}], rate_per_second=rate, concurrency=rate)
    async with bench.worker():
        run = await bench.start(*nodes("paced", rate))
        async with asyncio.timeout(120):
            assert (await run.result())["status"] == "SUCCEEDED"
    calls = sorted(call.at for call in await bench.tools.calls(bench.unique("paced")))
    assert len(calls) == rate
    # The turns are 0.9 s apart in all; a busy machine may begin late with the first.
    assert calls[-1] - calls[0] >= timedelta(seconds=0.45)
