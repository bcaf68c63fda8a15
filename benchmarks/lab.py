"""What every measurement shares: the tool server, a place for files, sizes; and what a contender is."""

import tempfile
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.tool_server import ToolServer

__all__ = ["Contender", "Engine", "Lab", "NotInstalledError", "Sizes", "WrongResultError", "unique_id"]


class NotInstalledError(Exception):
    """An engine is not on this machine; the message says how it would get there. It is left out."""


class WrongResultError(Exception):
    """An engine did not do exactly what it was asked for: its figures mean nothing."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured, and how often."""

    rounds: int = 3
    nodes: int = 1_000
    stock_nodes: int = 300
    latencies: int = 30
    long_nodes: int = 10_000
    chain_nodes: int = 2_000
    graph_nodes: int = 5_000
    graph_edges: int = 50_000
    parked: int = 4_000
    waiting_nodes: int = 5_000
    down_seconds: float = 60
    rate: float = 50

    @classmethod
    def quick(cls) -> "Sizes":
        """Only to see that it works."""
        return cls(
            rounds=1,
            nodes=100,
            stock_nodes=40,
            latencies=5,
            long_nodes=200,
            chain_nodes=50,
            graph_nodes=200,
            graph_edges=1_000,
            parked=50,
            waiting_nodes=200,
            down_seconds=5,
            rate=20,
        )


@dataclass
class Lab:
    """The tool server, a folder for whatever is written, and the sizes."""

    tools: ToolServer
    root: Path
    sizes: Sizes
    only: str = ""
    """What the label of an engine must hold to be measured."""

    def wants(self, engine: "Engine") -> bool:
        """Whether an engine is to be measured."""
        return self.only.lower() in engine.label.lower()

    def folder(self, name: str) -> Path:
        """A new folder."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.root))

    @asynccontextmanager
    async def exactly(self, effects: int) -> AsyncGenerator[None]:
        """In the block, that many effects happen, each once.

        Raises:
            WrongResultError: they did not.
        """
        await self.tools.reset()
        yield
        report = await self.tools.report()
        if (report.effects, report.keys) != (effects, effects):
            raise WrongResultError(f"{report.effects} effects of {report.keys} keys instead of {effects}")


class Contender(Protocol):
    """An engine that is up and warm."""

    @property
    def parts(self) -> Mapping[str, int]:
        """Its processes by what they are called in the table."""
        ...

    async def run(self, nodes: int) -> None:
        """Performs that many independent nodes, one call each, and returns when the engine knows that all are done."""
        ...


@dataclass(frozen=True, slots=True)
class Engine:
    """A contender before it runs."""

    label: str
    open: Callable[[Lab], AbstractAsyncContextManager[Contender]]


def unique_id() -> str:
    """For a run: no server keeps anything of it, but one contender makes many."""
    return f"run-{uuid.uuid4().hex[:12]}"
