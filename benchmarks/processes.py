"""Processes of what is measured: started, watched while they work, weighed, and ended with all of their children."""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil

__all__ = ["Program", "Usage", "child_with", "program", "usage"]

_T = TypeVar("_T")

_ROOT: Final = Path(__file__).resolve().parents[1]
_STOP_SECONDS: Final = 15
_LAST_WORDS: Final = 3000


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process and its children have used so far, and hold now."""

    cpu_seconds: float
    memory_mb: float


def usage(pid: int) -> Usage:
    """Weighs a process and its children; one that has ended weighs nothing."""
    cpu = memory = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                cpu += times.user + times.system
                memory += each.memory_info().rss / 1e6
    return Usage(cpu, memory)


def child_with(argument: str) -> int:
    """The process of ours that has something in its command line."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if argument in child.cmdline():
                return child.pid
    raise LookupError(f"no process with {argument} among ours")


class Program:
    """A running program."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    async def during(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Does something that needs the program.

        Raises:
            RuntimeError: the program has ended meanwhile; with its last words.
        """
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait([task], timeout=0.5))[0]:
                if self._process.poll() is not None:
                    raise RuntimeError(f"ended with {self._process.returncode}: {self._process.args!r}\n{self._said()}")
            return await task
        finally:
            task.cancel()

    def _said(self) -> str:
        return self._log.read_text(errors="replace")[-_LAST_WORDS:]

    async def done(self) -> None:
        """Waits for a program that ends by itself.

        Raises:
            RuntimeError: it did not end well; with its last words.
        """
        if await asyncio.to_thread(self._process.wait):
            raise RuntimeError(f"ended with {self._process.returncode}: {self._process.args!r}\n{self._said()}")

    async def ask(self, line: str) -> str:
        """Writes a line to a program that answers each with one."""
        return await self.during(asyncio.to_thread(self._ask, line))

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()
        return self._process.stdout.readline().decode().strip()

    def end(self) -> None:
        """SIGTERM, and SIGKILL to whatever of it is still there after a while."""
        family = psutil.Process(self.pid).children(recursive=True) if self._process.poll() is None else []
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


@asynccontextmanager
async def program(
    *command: str, log: Path, environment: Mapping[str, str] | None = None, talks: bool = False
) -> AsyncGenerator[Program]:
    """Runs a program until the end of the block.

    Args:
        command: The program and its arguments.
        log: Where what it says goes.
        environment: On top of ours.
        talks: It answers lines with lines; see `Program.ask`.
    """
    running = Program(_started(command, log, {**os.environ, **(environment or {})}, talks=talks), log)
    try:
        yield running
    finally:
        await asyncio.to_thread(running.end)


def _started(
    command: Sequence[str], log: Path, environment: Mapping[str, str], *, talks: bool
) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=_ROOT,
            env=environment,
            stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
            stdout=subprocess.PIPE if talks else output,
            stderr=output,
        )
