"""The real `redrive` command, as a process of its own."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

from tests.lab import Bench

_AT_ONCE = 4
"""Commands at once: each is a process that imports much."""
_SECONDS = 120
"""Only bounds a failing test."""


@dataclass(frozen=True)
class Ran:
    """What a command printed, and how it ended."""

    arguments: tuple[str, ...]
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed, which must be JSON and nothing else."""
        return json.loads(self.out)

    def ended(self, code: int) -> Self:
        """The same, if it ended so: without a traceback, and with a reason where it failed."""
        assert self.code == code, self
        assert "Traceback" not in self.err, self
        assert code == 0 or self.err, self
        return self


class Redrive:
    """Runs `redrive` in the surroundings of a bench."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._turns = asyncio.Semaphore(_AT_ONCE)

    def environment(self, changes: Mapping[str, str] | None = None) -> dict[str, str]:
        """What a command finds."""
        address = self._bench.client.service_client.config.target_host
        return self._bench.environment(address) | {"COLUMNS": "40", **(changes or {})}

    async def __call__(self, *arguments: str, stdin: str = "", environment: Mapping[str, str] | None = None) -> Ran:
        """Runs one command to its end."""
        async with self._turns, asyncio.timeout(_SECONDS):
            process = await self._start(arguments, environment)
            out, err = await process.communicate(stdin.encode())
        assert process.returncode is not None
        return Ran(arguments, process.returncode, out.decode(), err.decode())

    @asynccontextmanager
    async def running(self, *arguments: str) -> AsyncGenerator["Running"]:
        """A command that goes on; killed at the end, if it still does."""
        process = await self._start(arguments, None)
        try:
            yield Running(process)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _start(
        self, arguments: tuple[str, ...], environment: Mapping[str, str] | None
    ) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cli.main", *arguments),
            cwd=self._bench.folder,
            env=self.environment(environment),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )


class Running:
    """A command that runs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def says(self, text: str, *, on_stderr: bool = False) -> str:
        """Waits for a line with this text."""
        stream = self._process.stderr if on_stderr else self._process.stdout
        assert stream is not None
        seen = []
        async with asyncio.timeout(_SECONDS):
            while line := (await stream.readline()).decode():
                if text in line:
                    return line
                seen.append(line)
        raise AssertionError(f"it never said {text!r}, but {seen}")

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        """Ctrl-C, or another signal."""
        os.kill(self._process.pid, number)

    async def ended(self) -> Ran:
        """Waits for its end."""
        async with asyncio.timeout(_SECONDS):
            out, err = await self._process.communicate()
        assert self._process.returncode is not None
        return Ran((), self._process.returncode, out.decode(), err.decode())
