"""The crash-point matrix: a worker that dies by SIGKILL at any point, in any kind of call.

A process that dies takes all of its operations with it. So one worker carries many cells, each held at the point at
which it is to be killed, and dies when the last has come to its own; another then sees all of them to their end. Most
of the time is Temporal's, until it notices that a worker is lost: so several benches run at once.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.faults.crash_bench import crashed
from tests.faults.crash_cells import Cell, Pair, Way, pairs, sweeps
from tests.faults.crash_checks import problems
from tests.faults.crash_points import Place
from tests.faults.crash_sweeps import sweep_problems
from tests.lab import Bench
from tests.postgres import PostgresServer
from tests.tool_server import ToolServer
from workers.embedded import EmbeddedServer

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1800)]  # on a busy machine; on a quiet one a few minutes

_AT_ONCE = 5
_LARGEST = 64
"""Cells of one bench: so many come to their points before the first one's patience is over."""


def _slow(pair: Pair[Cell]) -> bool:
    """Lost inside of `reconcile`, which is noticed by its whole timeout alone."""
    return pair.point.what in ("reconcile", "settle_absent", "settle_committed", "confirm")


def _benches(chosen: Sequence[Pair[Cell]]) -> list[list[Pair[Cell]]]:
    """Who dies together; the slowest first."""
    benches: list[list[Pair[Cell]]] = []
    groups = {(_slow(pair), pair.point.place is Place.TASK): None for pair in chosen}
    for slow, task in sorted(groups, reverse=True):
        group = [pair for pair in chosen if (_slow(pair), pair.point.place is Place.TASK) == (slow, task)]
        count = -(-len(group) // _LARGEST)
        benches += [group[number::count] for number in range(count)]
    return benches


@pytest.fixture
def bench_of(temporal: EmbeddedServer, tool_server: ToolServer, tmp_path: Path) -> Callable[[str, str | None], Bench]:
    """Makes the bench of one worker that is to die."""

    def make(name: str, ledger: str | None) -> Bench:
        folder = tmp_path / name
        folder.mkdir()
        return Bench(temporal.client, tool_server, folder, name, ledger=ledger)

    return make


async def _problems(
    chosen: Sequence[Pair[Cell]],
    name: str,
    bench_of: Callable[[str, str | None], Bench],
    ledger: Callable[[], Awaitable[str]] | None,
) -> list[str]:
    slots = asyncio.Semaphore(_AT_ONCE)

    async def run(number: int, group: list[Pair[Cell]]) -> list[str]:
        async with slots:
            bench = bench_of(f"{name}{number}", await ledger() if ledger is not None else None)
            return await problems(await crashed(bench, group))

    async with asyncio.TaskGroup() as benches:
        found = [benches.create_task(run(number, group)) for number, group in enumerate(_benches(chosen))]
    return [problem for several in found for problem in several.result()]


async def _sweep_problems(
    chosen: Sequence[Pair[Way]],
    name: str,
    bench_of: Callable[[str, str | None], Bench],
    ledger: Callable[[], Awaitable[str]] | None,
) -> list[str]:
    slots = asyncio.Semaphore(_AT_ONCE)

    async def run(number: int, pair: Pair[Way]) -> list[str]:
        async with slots:
            return await sweep_problems(
                bench_of(f"{name}{number}", await ledger() if ledger is not None else None), pair
            )

    async with asyncio.TaskGroup() as benches:
        found = [benches.create_task(run(number, pair)) for number, pair in enumerate(chosen)]
    return [problem for several in found for problem in several.result()]


def _asked_for(pair: Pair[Way], request: pytest.FixtureRequest) -> bool:
    return fnmatch(str(pair), f"*{request.config.getoption('--crash')}*")


@pytest.fixture
def chosen(request: pytest.FixtureRequest) -> list[Pair[Cell]]:
    """The whole matrix of what is called, or what of it was asked for."""
    return [pair for pair in pairs() if _asked_for(pair, request)]


@pytest.fixture
def chosen_sweeps(request: pytest.FixtureRequest) -> list[Pair[Way]]:
    """Every point of a sweep, or what of them was asked for."""
    return [pair for pair in sweeps() if _asked_for(pair, request)]


async def test_a_worker_that_dies_at_any_point_repeats_no_effect_and_loses_nothing(
    chosen: list[Pair[Cell]], bench_of: Callable[[str, str | None], Bench]
) -> None:
    found = await _problems(chosen, "crash", bench_of, None)
    assert not found, "\n".join(found)


async def test_a_worker_that_dies_around_a_transaction_in_postgresql_repeats_no_effect_and_loses_nothing(
    chosen: list[Pair[Cell]],
    chosen_sweeps: list[Pair[Way]],
    bench_of: Callable[[str, str | None], Bench],
    postgres: PostgresServer,
) -> None:
    async def ledger() -> str:
        return postgres.url(await postgres.database())

    around = [pair for pair in chosen if pair.point.place is Place.LEDGER]
    found = await _problems(around, "crash-pg", bench_of, ledger)
    around_sweeps = [pair for pair in chosen_sweeps if pair.point.place is Place.LEDGER]
    found += await _sweep_problems(around_sweeps, "sweep-pg", bench_of, ledger)
    assert not found, "\n".join(found)


async def test_a_sweep_that_dies_at_any_point_is_finished_by_the_next_and_tells_nobody_twice(
    chosen_sweeps: list[Pair[Way]], bench_of: Callable[[str, str | None], Bench]
) -> None:
    found = await _sweep_problems(chosen_sweeps, "sweep", bench_of, None)
    assert not found, "\n".join(found)
