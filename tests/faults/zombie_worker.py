"""A worker whose calls wait at a point before their first byte, until it has been frozen and wakes up.

`python -m tests.faults.zombie_worker PLAN RELEASE`, on the environment of a bench. PLAN is a JSON object: the name of a
tool to one of `POINTS`. A call that has come to its point says so in the log and stays there until RELEASE is there.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from temporalio.client import Client
from temporalio.plugin import SimplePlugin
from temporalio.worker import WorkerConfig

from activities.classify import Answer
from activities.http import Call, HttpClients
from activities.secrets import Secrets
from activities.wire import Moment
from contracts.tools import Tool
from tests.faults.calls import WatchedCall
from workers.client import connect
from workers.settings import load_settings
from workers.worker import Wiring, running_worker

BEFORE_CONNECT: Final = "before connect"
"""Claimed, and no connection yet."""
BEFORE_CHECK: Final = "before check"
"""Connected; next is the last look at the lease."""
AFTER_CHECK: Final = "after check"
"""The lease was good; next is the first byte. Nothing can be fenced from here on; only the tool's own key can."""
_FIRST_BYTE: Final = "send_request_headers.started"
POINTS: Final = (BEFORE_CONNECT, BEFORE_CHECK, AFTER_CHECK)


class _Gate:
    """Where calls wait."""

    def __init__(self, plan: Mapping[str, str], release: Path) -> None:
        self._plan = plan
        self._release = release

    async def reached(self, tool: Tool, point: str) -> None:
        """Returns at once, or, at the tool's point, when the release is there."""
        if self._plan.get(tool.name) != point or self._release.exists():
            return
        print(f"held {tool.name}", flush=True)  # noqa: T201 - its log is what the test reads
        while not self._release.exists():  # noqa: ASYNC110 - only a file reaches a process that is asleep
            await asyncio.sleep(0.05)


class _HeldCall(WatchedCall):
    """A call that waits on its way, before and after the product's own check."""

    def __init__(self, call: Call, tool: Tool, gate: _Gate) -> None:
        super().__init__(call)
        self._tool = tool
        self._gate = gate

    async def before(self, moment: Moment) -> None:
        if moment is Moment.BEFORE_SEND:
            await self._gate.reached(self._tool, BEFORE_CHECK)

    async def after(self, moment: Moment) -> None:
        if moment is Moment.BEFORE_SEND:
            await self._gate.reached(self._tool, AFTER_CHECK)


class _HoldingClients(HttpClients):
    def __init__(self, secrets: Secrets, gate: _Gate) -> None:
        super().__init__(secrets)
        self._gate = gate

    async def send(
        self, tool: Tool, method: str, url: str, headers: Mapping[str, str], body: bytes | None, call: Call
    ) -> Answer:
        await self._gate.reached(tool, BEFORE_CONNECT)
        return await super().send(tool, method, url, headers, body, _HeldCall(call, tool, self._gate))


class _Slots(SimplePlugin):
    """Once all are held it asks for no more work, and what is frozen then takes nothing."""

    def __init__(self, slots: int) -> None:
        super().__init__("slots")
        self._slots = slots

    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        """See the base class."""
        config = super().configure_worker(config)
        config["max_concurrent_activities"] = self._slots
        return config


async def _run(plan: Mapping[str, str], release: Path, slots: int) -> None:
    def end() -> None:
        os._exit(1)

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), end)
    gate = _Gate(plan, release)
    config = (await connect()).config()
    config["plugins"] = [_Slots(slots)]
    wiring = Wiring(http_clients=lambda secrets: _HoldingClients(secrets, gate))
    async with running_worker(Client(**config), load_settings(), wiring):
        await asyncio.Event().wait()


def main() -> None:
    """Reads the command line and runs."""
    parser = argparse.ArgumentParser(prog="tests.faults.zombie_worker", description=__doc__)
    parser.add_argument("plan", help="tool to point, in JSON")
    parser.add_argument("release", type=Path, help="the file that lets the calls go on")
    parser.add_argument("--slots", type=int, default=100, help="how many activities to perform at once")
    arguments = parser.parse_args()
    asyncio.run(_run(json.loads(arguments.plan), arguments.release, arguments.slots))


if __name__ == "__main__":
    main()
