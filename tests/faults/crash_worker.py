"""A worker that kills itself, with SIGKILL, in the middle of many operations at once, each at a point of its own.

`python -m tests.faults.crash_worker PLAN LOG`, on the environment of a bench. PLAN is a JSON object: run id to point.
Each run that comes to its point stays there; when the last one has, the process dies. LOG gets a line for each of them,
and for every point that is passed. Everything is put around the product from outside: its ledger, its HTTP clients, its
activities, its client, the SDK's own worker.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Generator, Mapping
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from temporalio import activity
from temporalio.bridge.proto.workflow_activation import WorkflowActivation
from temporalio.bridge.proto.workflow_completion import WorkflowActivationCompletion
from temporalio.bridge.worker import Worker as BridgeWorker
from temporalio.client import Client, OutboundInterceptor, SignalWorkflowInput
from temporalio.client import Interceptor as ClientInterceptor
from temporalio.plugin import SimplePlugin
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput, Interceptor, WorkerConfig

from activities.classify import Answer
from activities.http import Call, HttpClients
from activities.ledger import open_ledger
from activities.ledger.interface import Ledger
from activities.secrets import Secrets
from activities.wire import Moment
from contracts.tools import Tool
from tests.faults.calls import WatchedCall
from tests.faults.crash_points import DEEPEST, EXCLUDED, POINTS, Place, Point
from workers.client import connect
from workers.settings import load_settings
from workers.worker import Wiring, running_worker

_SLOTS = 1000
"""What is held must not keep others from coming to their points."""
_ENDS = {"complete_workflow_execution", "fail_workflow_execution", "cancel_workflow_execution"}
"""The commands that end a workflow."""


class Reaper:
    """Holds each run at its point, and kills the process when all are there."""

    def __init__(self, plan: Mapping[str, str], log: Path) -> None:
        self._plan = plan
        self._log = log.open("a", buffering=1)
        self._held: set[str] = set()
        self._unknown: set[str] = set()
        self._never = asyncio.Event()

    async def reached(self, point: Point, run_id: str) -> None:
        """A run has come to a point. Does not return if it is the one at which it is to die."""
        if str(point) not in POINTS and point.subject not in EXCLUDED and str(point) not in self._unknown:
            self._unknown.add(str(point))
            self._log.write(f"unknown {point}\n")
        self._log.write(f"passed {run_id} {point}\n")
        # What is held at its point goes no further anywhere: a request is written by a task of its own.
        if self._plan.get(run_id) != str(point) and run_id not in self._held:
            return
        if run_id not in self._held:
            self._held.add(run_id)
            self._log.write(f"held {run_id}\n")
        if len(self._held) == len(self._plan):
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            # Neither a timeout nor a cancel gets anyone out of here.
            with contextlib.suppress(asyncio.CancelledError):
                await self._never.wait()


async def _reached_by_activity(reaper: Reaper, place: Place, what: str, when: str) -> None:
    run_id, _, _ = (activity.info().workflow_id or "").partition("/")
    await reaper.reached(Point(place, what, when), run_id)


class _WatchedLedger:
    """A ledger around every one of whose methods there are two points."""

    def __init__(self, ledger: Ledger, reaper: Reaper) -> None:
        self._ledger = ledger
        self._reaper = reaper

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method: Callable[..., Awaitable[Any]] = getattr(self._ledger, name)
        if not activity.in_activity():
            return method

        async def watched(*args: Any, **kwargs: Any) -> Any:
            await _reached_by_activity(self._reaper, Place.LEDGER, name, "before")
            answer = await method(*args, **kwargs)
            await _reached_by_activity(self._reaper, Place.LEDGER, name, "after")
            return answer

        return watched


class _ReportingCall(WatchedCall):
    """A call that tells of its way; the product's own check comes before each point."""

    def __init__(self, call: Call, reaper: Reaper) -> None:
        super().__init__(call)
        self._reaper = reaper

    async def after(self, moment: Moment) -> None:
        await _reached_by_activity(self._reaper, Place.WIRE, activity.info().activity_type, moment)


class _WatchedClients(HttpClients):
    def __init__(self, secrets: Secrets, reaper: Reaper) -> None:
        super().__init__(secrets)
        self._reaper = reaper

    async def send(
        self, tool: Tool, method: str, url: str, headers: Mapping[str, str], body: bytes | None, call: Call
    ) -> Answer:
        return await super().send(tool, method, url, headers, body, _ReportingCall(call, self._reaper))


class _WatchActivities(Interceptor):
    def __init__(self, reaper: Reaper) -> None:
        self._reaper = reaper

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:  # noqa: A002 - the SDK's name
        """Puts itself around every activity."""
        return _WatchActivity(super().intercept_activity(next), self._reaper)


class _WatchActivity(ActivityInboundInterceptor):
    def __init__(self, next: ActivityInboundInterceptor, reaper: Reaper) -> None:  # noqa: A002 - the SDK's name
        super().__init__(next)
        self._reaper = reaper

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        name = activity.info().activity_type
        await _reached_by_activity(self._reaper, Place.ACTIVITY, name, "begin")
        try:
            return await self.next.execute_activity(input)
        finally:
            await _reached_by_activity(self._reaper, Place.ACTIVITY, name, "ack")


class _WatchQuestions(ClientInterceptor):
    def __init__(self, reaper: Reaper) -> None:
        self._reaper = reaper

    def intercept_client(self, next: OutboundInterceptor) -> OutboundInterceptor:  # noqa: A002 - the SDK's name
        """Puts itself around every signal that an activity sends."""
        return _WatchQuestion(super().intercept_client(next), self._reaper)


class _WatchQuestion(OutboundInterceptor):
    def __init__(self, next: OutboundInterceptor, reaper: Reaper) -> None:  # noqa: A002 - the SDK's name
        super().__init__(next)
        self._reaper = reaper

    async def signal_workflow(self, input: SignalWorkflowInput) -> None:
        await _reached_by_activity(self._reaper, Place.QUESTION, input.signal, "before")
        await super().signal_workflow(input)
        await _reached_by_activity(self._reaper, Place.QUESTION, input.signal, "after")


class _Tasks:
    """Between the decisions of an activation and Temporal's hearing of them.

    The SDK has no hook there that may wait: a workflow's own code must not, and an interceptor runs inside of it. So it
    is the SDK's connection to its core that is wrapped.
    """

    def __init__(self, reaper: Reaper) -> None:
        self._reaper = reaper
        self._workflows: dict[str, tuple[str, str]] = {}
        self._numbers: dict[str, int] = {}
        self._decides: set[str] = set()

    def activated(self, activation: WorkflowActivation) -> None:
        for job in activation.jobs:
            if job.HasField("initialize_workflow"):
                start = job.initialize_workflow
                self._workflows[activation.run_id] = (start.workflow_type, start.workflow_id.partition("/")[0])
                self._numbers[activation.run_id] = 0
        if any(not job.HasField("remove_from_cache") and not job.HasField("query_workflow") for job in activation.jobs):
            self._numbers[activation.run_id] += 1
            self._decides.add(activation.run_id)

    async def completes(self, completion: WorkflowActivationCompletion) -> None:
        if completion.run_id not in self._decides:
            return
        self._decides.discard(completion.run_id)
        workflow, run_id = self._workflows[completion.run_id]
        if (number := self._numbers[completion.run_id]) <= DEEPEST.get(workflow, number):
            await self._reaper.reached(Point(Place.TASK, workflow, str(number)), run_id)
        if any(command.WhichOneof("variant") in _ENDS for command in completion.successful.commands):
            await self._reaper.reached(Point(Place.TASK, workflow, "end"), run_id)


@contextlib.contextmanager
def _watched_tasks(reaper: Reaper) -> Generator[None]:
    tasks = _Tasks(reaper)
    poll, complete = BridgeWorker.poll_workflow_activation, BridgeWorker.complete_workflow_activation

    async def polled(self: BridgeWorker) -> WorkflowActivation:
        activation = await poll(self)
        tasks.activated(activation)
        return activation

    async def completed(self: BridgeWorker, completion: WorkflowActivationCompletion) -> None:
        await tasks.completes(completion)
        await complete(self, completion)

    with (
        patch.object(BridgeWorker, "poll_workflow_activation", polled),
        patch.object(BridgeWorker, "complete_workflow_activation", completed),
    ):
        yield


class _ManySlots(SimplePlugin):
    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        """See the base class."""
        config = super().configure_worker(config)
        config["max_concurrent_activities"] = _SLOTS
        config["max_concurrent_local_activities"] = _SLOTS
        config["max_concurrent_workflow_tasks"] = _SLOTS
        return config


async def _run(plan: Mapping[str, str], log: Path) -> None:
    def end() -> None:
        os._exit(1)

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), end)
    reaper = Reaper(plan, log)

    async def watched_ledger(url: str) -> Ledger:
        return cast("Ledger", _WatchedLedger(await open_ledger(url), reaper))

    config = (await connect()).config()
    config["plugins"] = [_ManySlots("crash", interceptors=[_WatchActivities(reaper), _WatchQuestions(reaper)])]
    wiring = Wiring(open_ledger=watched_ledger, http_clients=lambda secrets: _WatchedClients(secrets, reaper))
    with _watched_tasks(reaper):
        async with running_worker(Client(**config), load_settings(), wiring):
            await asyncio.Event().wait()


def main() -> None:
    """Reads the command line and runs."""
    parser = argparse.ArgumentParser(prog="tests.faults.crash_worker", description=__doc__)
    parser.add_argument("plan", type=Path, help="run id to point, in JSON")
    parser.add_argument("log", type=Path, help="where it says who has come to which point")
    arguments = parser.parse_args()
    asyncio.run(_run(json.loads(arguments.plan.read_text()), arguments.log))


if __name__ == "__main__":
    main()
