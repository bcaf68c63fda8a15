"""Measuring: rounds in which every contender has its turn on a new, warm instance, and what came of them."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

from pydantic import BaseModel, Field

from benchmarks.lab import Contender, Engine, Lab, NotInstalledError
from benchmarks.processes import usage

__all__ = ["Ratio", "Row", "Series", "Target", "compare", "latency", "ratio", "throughput"]

_PATIENCE_SECONDS = 1200


class Series(BaseModel):
    """One figure of one contender, once a round.

    Attributes:
        cpu_ms: Per node, by part of the contender; the median.
    """

    label: str
    unit: str
    values: list[float]
    cpu_ms: dict[str, float] = {}

    @property
    def median(self) -> float:
        return statistics.median(self.values)


class Target(BaseModel):
    """What a figure should be at least, or at most."""

    least: float | None = None
    most: float | None = None

    def met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def __str__(self) -> str:
        return f"≥ {self.least:g}" if self.least is not None else f"≤ {self.most:g}"


class Ratio(BaseModel):
    """How two contenders compare, in pairs of one round each; or a figure that has a target of its own."""

    label: str
    values: list[float]
    target: Target | None = None
    unit: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.target.met(self.median)


class Row(BaseModel):
    """What one measurement found."""

    title: str
    series: list[Series] = []
    ratios: list[Ratio] = []
    notes: list[str] = []
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    rounds: int = 1
    seconds: float = 0


def ratio(label: str, over: Series, under: Series, target: Target | None = None) -> Ratio:
    """Pairs within a round: what slows a round slows both."""
    return Ratio(label=label, values=[a / b for a, b in zip(over.values, under.values, strict=True)], target=target)


Measure = Callable[[Lab, Contender], Awaitable[Series]]


async def compare(lab: Lab, engines: Sequence[Engine], measure: Measure) -> tuple[dict[str, Series], list[str]]:
    """Measures each engine once a round, each time on a new instance of it, alone on the machine.

    Returns:
        The series by label, and a line about each engine that was left out.
    """
    found: dict[str, list[Series]] = {}
    notes: dict[str, str] = {}
    for turn in range(lab.sizes.rounds):
        # Whoever is first in one round is last in the next.
        for engine in engines if turn % 2 == 0 else reversed(engines):
            if engine.label in notes:
                continue
            try:
                async with engine.open(lab) as contender, asyncio.timeout(_PATIENCE_SECONDS):
                    found.setdefault(engine.label, []).append(await measure(lab, contender))
            except NotInstalledError as reason:
                notes[engine.label] = f"{engine.label} is left out: {reason}"
    series = {label: _joined(label, found[label]) for label in (e.label for e in engines) if label in found}
    return series, list(notes.values())


def _joined(label: str, parts: Sequence[Series]) -> Series:
    return Series(
        label=label,
        unit=parts[0].unit,
        values=[value for part in parts for value in part.values],
        cpu_ms={name: statistics.median(part.cpu_ms[name] for part in parts) for name in parts[0].cpu_ms},
    )


def throughput(nodes: int) -> Measure:
    """Nodes per second, from the start of the run until the engine has its result; every effect exactly once."""

    async def measure(lab: Lab, contender: Contender) -> Series:
        before = {name: usage(pid).cpu_seconds for name, pid in contender.parts.items()}
        async with lab.exactly(nodes):
            began = time.monotonic()
            await contender.run(nodes)
            took = time.monotonic() - began
        cpu = {name: (usage(pid).cpu_seconds - before[name]) / nodes * 1000 for name, pid in contender.parts.items()}
        return Series(label="", unit="nodes/s", values=[nodes / took], cpu_ms=cpu)

    return measure


def latency(times: int) -> Measure:
    """Milliseconds from the start of a run of one node to its result; the median of many."""

    async def measure(lab: Lab, contender: Contender) -> Series:
        taken: list[float] = []
        async with lab.exactly(times):
            for _ in range(times):
                began = time.monotonic()
                await contender.run(1)
                taken.append((time.monotonic() - began) * 1000)
        return Series(label="", unit="ms", values=[statistics.median(taken)])

    return measure
