"""What takes hours or months, on the real server with its clocks skipped."""

from collections.abc import AsyncGenerator
from datetime import timedelta
from pathlib import Path

import pytest
from temporalio.client import WorkflowFailureError
from temporalio.testing import WorkflowEnvironment

from contracts.dead_letters import Entry
from tests.lab import Bench
from tests.tool_server import ToolServer
from tests.waiting import eventually
from workers.client import DATA_CONVERTER
from workers.embedded import temporal_binary


@pytest.fixture
async def skipping() -> AsyncGenerator[WorkflowEnvironment]:
    """A server on which each workflow has a clock of its own that can be put forward."""
    async with await WorkflowEnvironment.start_time_skipping_v2(
        data_converter=DATA_CONVERTER,
        dev_server_existing_path=temporal_binary(),
        dev_server_extra_args=["--dynamic-config-value", "frontend.WorkflowTimeSkippingEnabled=true"],
    ) as environment:
        yield environment


@pytest.fixture
def bench(skipping: WorkflowEnvironment, tool_server: ToolServer, tmp_path: Path) -> Bench:
    return Bench(client=skipping.client, tools=tool_server, folder=tmp_path, name="long-waits")


async def test_only_what_nobody_needs_to_decide_ever_closes_by_age(bench: Bench, skipping: WorkflowEnvironment) -> None:
    await bench.tool("refuses", [{"status": 403}])
    await bench.tool("loses", [{"commit": True, "fault": "fin_after_read"}])
    async with bench.worker():
        with skipping.with_time_skipping_disabled():
            run = await bench.start({"id": "settled", "tool": "refuses"}, {"id": "uncertain", "tool": "loses"})
            await bench.parked(run, "settled")
            await bench.parked(run, "uncertain")
            await run.cancel()
            with pytest.raises(WorkflowFailureError):
                await run.result()
            settled, uncertain = bench.dead_letter(run, "settled"), bench.dead_letter(run, "uncertain")

        async def obsolete() -> bool:
            return (await bench.entry(run, "settled")).status == "OBSOLETE"

        await eventually(obsolete, "the entry that nobody needs to decide any more")
        await skipping.fast_forward(settled, timedelta(hours=25))
        assert (await settled.result())["status"] == "OBSOLETE"

        entry = Entry.model_validate(await uncertain.query("entry"))
        assert (entry.status, entry.side_effect) == ("AWAITING_DECISION", "POSSIBLE")
        # Nothing is there that could ever end it: no timer runs, and it has no timeout.
        history = await uncertain.fetch_history()
        assert not [event for event in history.events if event.HasField("timer_started_event_attributes")]
        started = history.events[0].workflow_execution_started_event_attributes
        assert not started.workflow_execution_timeout.seconds
        assert not started.workflow_run_timeout.seconds


async def test_a_dead_letter_that_nobody_decides_waits_for_a_year_and_more(
    bench: Bench, skipping: WorkflowEnvironment
) -> None:
    await bench.tool("refuses", [{"status": 403}])
    async with bench.worker():
        with skipping.with_time_skipping_disabled():
            run = await bench.start({"id": "call", "tool": "refuses", "deadline_seconds": 60})
            before = await bench.parked(run, "call")
        letter = bench.dead_letter(run, "call")
        await skipping.fast_forward(letter, timedelta(days=400))
        after = Entry.model_validate(await letter.query("entry"))
        assert after.status == "AWAITING_DECISION"
        assert after.attempts == before.attempts


async def test_a_dependency_that_stays_down_is_given_the_whole_default_policy(bench: Bench) -> None:
    await bench.tool("down", url=f"http://127.0.0.1:{bench.tools.refused_port}/", retry={})
    async with bench.worker():
        run = await bench.start({"id": "call", "tool": "down"})
        entry = await bench.parked(run, "call")
    assert (entry.error.category, entry.error.code) == ("DEPENDENCY_DOWN", "connect_failed")
    assert len(entry.attempts) == 12
    waits = [
        (attempt.next_eligible_at - attempt.ended_at).total_seconds()
        for attempt in entry.attempts
        if attempt.next_eligible_at is not None and attempt.ended_at is not None
    ]
    # 5 s, doubled each time up to 10 minutes; jitter adds a quarter at most.
    expected = [min(5 * 2**number, 600) for number in range(11)]
    assert all(floor - 1 <= wait <= floor * 1.25 + 1 for wait, floor in zip(waits, expected, strict=True))
