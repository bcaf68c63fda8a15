"""A worker in a process of its own, and the handle with which a test stops, freezes and kills it.

`python -m tests.worker_process` runs until SIGTERM, on the environment of a bench.
"""

import argparse
import asyncio
import gc
import itertools
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from temporalio import activity
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client
from temporalio.plugin import SimplePlugin
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import (
    ActivityInboundInterceptor,
    ExecuteActivityInput,
    Interceptor,
    Worker,
    WorkerConfig,
)

from activities.admit import Admit
from activities.context import Context
from activities.http import HttpClients
from activities.ledger import open_ledger
from activities.secrets import Secrets
from contracts.dispatch import Dispatch, MadeAtOnce
from contracts.tools import load_catalog
from tests.lab import Bench
from tests.waiting import eventually
from workers.client import connect
from workers.settings import Settings, load_settings
from workers.worker import WORKFLOWS, serve

_ROOT = Path(__file__).resolve().parents[1]
_numbers = itertools.count(1)


async def pollers(client: Client, queue: str, kind: TaskQueueType.ValueType) -> list[str]:
    """The identities of the workers that have lately asked a task queue for work."""
    try:
        answer = await client.workflow_service.describe_task_queue(
            DescribeTaskQueueRequest(namespace=client.namespace, task_queue=TaskQueue(name=queue), task_queue_type=kind)
        )
    except RPCError as error:
        if error.status is RPCStatusCode.CANCELLED:
            # A busy server's; it is asked again.
            return []
        raise
    return [poller.identity for poller in answer.pollers]


class WorkerProcess:
    """A running worker."""

    def __init__(self, bench: Bench, process: subprocess.Popen[bytes], log: Path) -> None:
        self._bench = bench
        self._process = process
        self._log = log

    @classmethod
    @asynccontextmanager
    async def start(
        cls,
        bench: Bench,
        *,
        only_workflows: bool = False,
        hold_acks: bool = False,
        slots: int = 100,
        program: Sequence[str] = (),
    ) -> AsyncGenerator[Self, None]:
        """A worker that polls; killed at the end, if it still runs.

        Args:
            bench: Whose tools, ledger and task queue it works with.
            only_workflows: It decides, but performs no activity: what is dispatched stays undelivered.
            hold_acks: What it has called and committed, it never tells Temporal.
            slots: How many activities it performs at once. Once they are in use it asks for no more, and what is frozen
                then takes nothing.
            program: Another module than this one, and its arguments.
        """
        log = bench.folder / f"worker-{next(_numbers)}.log"
        flags = ["--only-workflows"] * only_workflows + ["--hold-acks"] * hold_acks + [f"--slots={slots}"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *(program or ("tests.worker_process", *flags))],
                cwd=_ROOT,
                env=bench.environment(bench.client.service_client.config.target_host),
                stdin=subprocess.PIPE,  # it ends with us, however we end
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        worker = cls(bench, process, log)
        try:
            kinds = [TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW]
            kinds += [TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY] * (not only_workflows)

            async def polls() -> bool | None:
                return await worker._polls(kinds)

            assert await eventually(polls, "a worker to poll", within=180)
            yield worker
        finally:
            await worker.kill()

    async def _polls(self, kinds: list[TaskQueueType.ValueType]) -> bool:
        if self._process.poll() is not None:
            raise AssertionError(f"the worker ended with {self._process.returncode}:\n{self.log}")
        mine = f"{self.pid}@"
        return all(
            [
                any(
                    identity.startswith(mine) for identity in await pollers(self._bench.client, self._bench.queue, kind)
                )
                for kind in kinds
            ]
        )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def log(self) -> str:
        """What it has said so far."""
        return self._log.read_text()

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    async def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        if self._process.returncode is None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.terminate()

    def send_signal(self, number: signal.Signals) -> None:
        """Any other one."""
        self._process.send_signal(number)

    async def exit_code(self, within: float = 60) -> int:
        """How it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not.
        """
        return await asyncio.to_thread(self._process.wait, within)

    async def freeze(self) -> None:
        """SIGSTOP, between two transactions: stopped inside of one it would hold the ledger of all the others."""
        while True:
            self._process.send_signal(signal.SIGSTOP)
            _, status = await asyncio.to_thread(os.waitpid, self.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), "it ended instead"
            if _is_free(self._bench.folder / "ledger.db"):
                return
            self.resume()

    def resume(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)


def _is_free(ledger: Path) -> bool:
    connection = sqlite3.connect(ledger, timeout=0, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except sqlite3.OperationalError:
        return False
    finally:
        connection.close()
    return True


class _HoldAcks(Interceptor):
    """Keeps the results of calls from Temporal, once the ledger has them."""

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:  # noqa: A002 - the SDK's name
        """Puts itself around every activity."""
        return _HoldAck(super().intercept_activity(next))


class _HoldAck(ActivityInboundInterceptor):
    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        result = await self.next.execute_activity(input)
        if activity.info().activity_type in ("call_tool", "call_at_once"):
            await asyncio.Event().wait()
        return result


class _Slots(SimplePlugin):
    """Has a worker perform so many activities at once, and no more."""

    def __init__(self, slots: int) -> None:
        super().__init__("slots")
        self._slots = slots

    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        """See the base class."""
        config = super().configure_worker(config)
        config["max_concurrent_activities"] = self._slots
        return config


@activity.defn(name="call_at_once")
async def _leave_it(_dispatch: Dispatch) -> MadeAtOnce:
    """Has a run's first attempt made by an activity."""
    return MadeAtOnce(answer=None, seconds=0)


async def _decide_only(client: Client, settings: Settings) -> None:
    """Runs workflows, and of the activities only the local ones, which call nothing."""
    secrets = Secrets({})
    ledger = await open_ledger(settings.ledger.get_secret_value())
    context = Context(load_catalog(settings.tools), secrets, HttpClients(secrets), ledger, settings.task_queue)
    async with Worker(
        client,
        task_queue=settings.task_queue,
        workflows=WORKFLOWS,
        activities=[Admit(context).admit, _leave_it],
        no_remote_activities=True,
    ):
        await asyncio.Event().wait()


async def _run(*, only_workflows: bool, plugins: Sequence[SimplePlugin]) -> None:
    def end() -> None:
        os._exit(1)

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), end)
    config = (await connect()).config()
    config["plugins"] = plugins
    client = Client(**config)
    settings = load_settings()
    if only_workflows:
        await _decide_only(client, settings)
    else:
        await serve(client, settings)


def main() -> None:
    """Reads the command line and runs."""
    parser = argparse.ArgumentParser(prog="tests.worker_process", description=__doc__)
    parser.add_argument("--only-workflows", action="store_true", help="perform no activity")
    parser.add_argument("--hold-acks", action="store_true", help="keep the results of calls from Temporal")
    parser.add_argument("--slots", type=int, default=100, help="how many activities to perform at once")
    arguments = parser.parse_args()
    plugins: list[SimplePlugin] = [_Slots(arguments.slots)]
    plugins += [SimplePlugin("hold-acks", interceptors=[_HoldAcks()])] * arguments.hold_acks
    asyncio.run(_run(only_workflows=arguments.only_workflows, plugins=plugins))
    gc.collect()  # lets the SDK's threads go before the interpreter does


if __name__ == "__main__":
    main()
