"""The plain `temporal` command, as a person types it who has nothing of ours."""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_AT_ONCE = 4
"""Commands at once: each is a process of its own."""
_SECONDS = 60


@dataclass(frozen=True)
class Ran:
    """What a command printed, and how it ended."""

    arguments: tuple[str, ...]
    code: int
    output: str
    errors: str

    @property
    def said(self) -> str:
        """All of it."""
        return f"{self.output}\n{self.errors}"

    def json(self) -> Any:
        """What it printed, as JSON."""
        assert self.code == 0, self
        return json.loads(self.output)


class TemporalCli:
    """Runs `temporal` against one server; whatever the environment says."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._command = Path(sys.executable).parent / "temporal"
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("TEMPORAL_")}
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def run(self, *arguments: str) -> Ran:
        """Runs one command to its end."""
        async with self._turns, asyncio.timeout(_SECONDS):
            process = await asyncio.create_subprocess_exec(
                self._command,
                *arguments,
                *("--address", self._address, "--disable-config-file", "--color", "never"),
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            output, errors = await process.communicate()
        assert process.returncode is not None
        return Ran(arguments, process.returncode, output.decode(), errors.decode())

    async def done(self, *arguments: str) -> Ran:
        """Runs one that must succeed."""
        ran = await self.run(*arguments)
        assert ran.code == 0, ran
        return ran

    async def json(self, *arguments: str) -> Any:
        """Runs one that must succeed and print JSON."""
        return (await self.run(*arguments, "--output", "json")).json()

    async def start(self, queue: str, run_id: str, *inputs: str, kind: str = "Run", more: Sequence[str] = ()) -> Ran:
        """`temporal workflow start` with these inputs, as they are."""
        given = [part for value in inputs for part in ("--input", value)]
        return await self.run(
            *("workflow", "start", "--type", kind, "--task-queue", queue, "--workflow-id", run_id), *given, *more
        )

    async def query(self, workflow_id: str, name: str) -> Any:
        """`temporal workflow query`: the answer."""
        answer = await self.json("workflow", "query", "--workflow-id", workflow_id, "--type", name)
        return answer["queryResult"][0]

    async def signal(self, workflow_id: str, name: str, *inputs: str, more: Sequence[str] = ()) -> Ran:
        """`temporal workflow signal`, which must be taken."""
        given = [part for value in inputs for part in ("--input", value)]
        return await self.done("workflow", "signal", "--workflow-id", workflow_id, "--name", name, *given, *more)

    async def update(self, workflow_id: str, name: str, *inputs: str, more: Sequence[str] = ()) -> Ran:
        """`temporal workflow update execute`, whatever comes of it."""
        given = [part for value in inputs for part in ("--input", value)]
        return await self.run(
            *("workflow", "update", "execute", "--workflow-id", workflow_id, "--name", name, "--output", "json"),
            *given,
            *more,
        )
