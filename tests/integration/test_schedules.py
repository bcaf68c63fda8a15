"""The schedule of Sweep: made once, brought up to date, and it does sweep."""

from dataclasses import replace
from datetime import timedelta

from temporalio.client import (
    ScheduleActionExecutionStartWorkflow,
    ScheduleIntervalSpec,
    ScheduleOverlapPolicy,
    ScheduleUpdate,
)

from contracts.sweep import SweepResult
from tests.integration.temporal_cli import TemporalCli
from tests.lab import Bench
from tests.waiting import eventually
from workers.schedules import schedule_sweep, sweep_schedule_id


async def test_the_schedule_sweeps_its_task_queue(bench: Bench) -> None:
    await bench.tool("parked", [{"status": 403}])
    async with bench.worker():
        run = await bench.start({"id": "n", "tool": "parked", "input": {}})
        await bench.parked(run, "n")
        schedule_id = await schedule_sweep(bench.client, bench.queue)
        assert schedule_id == sweep_schedule_id(bench.queue)
        handle = bench.client.get_schedule_handle(schedule_id)
        found = (await handle.describe()).schedule
        assert found.spec.intervals == [ScheduleIntervalSpec(every=timedelta(minutes=1))]
        assert found.policy.overlap is ScheduleOverlapPolicy.SKIP
        assert found.policy.catchup_window == timedelta(seconds=10)
        await handle.trigger()

        async def started() -> str | None:
            recent = (await handle.describe()).info.recent_actions
            action = recent[-1].action if recent else None
            return action.workflow_id if isinstance(action, ScheduleActionExecutionStartWorkflow) else None

        workflow_id = await eventually(started, "a sweep")
        result = SweepResult.model_validate(await bench.client.get_workflow_handle(workflow_id).result())
        assert (result.open_runs, result.open_nodes, result.open_dead_letters) == (1, 1, 1)
        # Seen in the UI by its queue; it never looks like a node of somebody's run.
        assert workflow_id.startswith(f"redrive-sweep-{bench.queue}-")
        assert "/" not in workflow_id
        await handle.delete()


async def test_making_it_again_mends_what_has_changed_and_leaves_a_pause_alone(bench: Bench) -> None:
    schedule_id = await schedule_sweep(bench.client, bench.queue)
    handle = bench.client.get_schedule_handle(schedule_id)
    before = await handle.describe()
    await schedule_sweep(bench.client, bench.queue)
    assert (await handle.describe()).info.last_updated_at == before.info.last_updated_at
    cli = TemporalCli(bench.client.service_client.config.target_host)
    await cli.done("schedule", "toggle", "--schedule-id", schedule_id, "--pause", "--reason", "to see")
    await handle.update(
        lambda present: ScheduleUpdate(
            schedule=replace(
                present.description.schedule,
                spec=replace(
                    present.description.schedule.spec, intervals=[ScheduleIntervalSpec(every=timedelta(hours=1))]
                ),
            )
        )
    )
    await schedule_sweep(bench.client, bench.queue)
    after = await handle.describe()
    assert after.schedule.spec.intervals == before.schedule.spec.intervals
    assert (after.schedule.state.paused, after.schedule.state.note) == (True, "to see")
    await handle.delete()
