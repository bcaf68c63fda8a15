"""The schedule that starts ``Sweep`` every minute, one for each task queue."""

from dataclasses import replace
from datetime import timedelta
from typing import Final

from temporalio.client import (
    Client,
    Schedule,
    ScheduleActionStartWorkflow,
    ScheduleAlreadyRunningError,
    ScheduleIntervalSpec,
    ScheduleOverlapPolicy,
    SchedulePolicy,
    ScheduleSpec,
    ScheduleState,
    ScheduleUpdate,
    ScheduleUpdateInput,
)
from temporalio.service import RPCError

from workers.client import TemporalUnavailableError

__all__ = ["schedule_sweep", "sweep_schedule_id"]

_EVERY: Final = timedelta(minutes=1)
_CATCH_UP: Final = timedelta(seconds=10)
"""A sweep that was missed is not made up for: the next one sees the same. It is the shortest that Temporal allows."""


def sweep_schedule_id(task_queue: str) -> str:
    """Under which id the schedule is found, and its workflows begin."""
    return f"redrive-sweep-{task_queue}"


async def schedule_sweep(client: Client, task_queue: str) -> str:
    """Makes the schedule, or brings it up to date; one that was paused stays so. Safe to repeat.

    Returns:
        Its id.

    Raises:
        TemporalUnavailableError: it may not be made from here.
    """
    schedule_id = sweep_schedule_id(task_queue)
    wanted = _schedule(schedule_id, task_queue)

    def update(present: ScheduleUpdateInput) -> ScheduleUpdate | None:
        found = present.description.schedule
        if _essence(found) == _essence(wanted):
            return None
        return ScheduleUpdate(schedule=replace(wanted, state=found.state))

    try:
        try:
            await client.create_schedule(schedule_id, wanted)
        except ScheduleAlreadyRunningError:
            await client.get_schedule_handle(schedule_id).update(update)
    except RPCError as error:
        raise TemporalUnavailableError(
            f"cannot make the schedule {schedule_id!r} in namespace {client.namespace!r}: {error.message}\n"
            "Have somebody who may run `redrive setup`."
        ) from error
    return schedule_id


def _schedule(schedule_id: str, task_queue: str) -> Schedule:
    return Schedule(
        action=ScheduleActionStartWorkflow(
            "Sweep",
            id=schedule_id,
            task_queue=task_queue,
            static_summary=f"finds what no workflow waits for on task queue {task_queue}",
        ),
        spec=ScheduleSpec(intervals=[ScheduleIntervalSpec(every=_EVERY)]),
        policy=SchedulePolicy(overlap=ScheduleOverlapPolicy.SKIP, catchup_window=_CATCH_UP),
        state=ScheduleState(note="made by redrive setup: pause it to stop sweeping"),
    )


def _essence(schedule: Schedule) -> object:
    """What `redrive setup` decides; what an operator has decided, such as a pause, is not in it."""
    action = schedule.action
    assert isinstance(action, ScheduleActionStartWorkflow)
    return action.workflow, action.id, action.task_queue, schedule.spec.intervals, schedule.policy
