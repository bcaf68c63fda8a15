"""Many at once: tasks, connections, processes, and one that is killed."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from activities.ledger.interface import Ledger
from activities.ledger.records import Busy, Granted, Mismatch, Settled, Unsettled
from contracts.dispatch import NodeEnd
from contracts.failures import Code
from contracts.identity import OperationId
from tests.unit.ledger_claims import operation
from tests.unit.ledger_lab import BACKENDS, OPERATION, Backend, granted, request, view

ROOT = Path(__file__).parents[2]


def kinds(answers: list[object]) -> Counter[type]:
    return Counter(type(answer) for answer in answers)


async def test_of_fifty_claims_at_once_exactly_one_is_granted(ledger: Ledger) -> None:
    answers: list[object] = list(await asyncio.gather(*(ledger.claim(request(owner=f"{n}")) for n in range(50))))
    assert kinds(answers) == {Granted: 1, Busy: 49}
    assert len((await view(ledger)).attempts) == 1


async def test_of_fifty_claims_through_two_workers_exactly_one_is_granted(backend: Backend) -> None:
    ledgers = [await backend.open(), await backend.open()]
    answers: list[object] = list(
        await asyncio.gather(*(ledgers[n % 2].claim(request(owner=f"{n}")) for n in range(50)))
    )
    assert kinds(answers) == {Granted: 1, Busy: 49}


async def test_of_many_payloads_at_once_one_is_granted_and_the_others_do_not_share_its_key(ledger: Ledger) -> None:
    answers: list[object] = list(await asyncio.gather(*(ledger.claim(request(input=n)) for n in range(20))))
    assert kinds(answers) == {Granted: 1, Mismatch: 19}


async def test_of_many_ends_of_one_attempt_exactly_one_counts(backend: Backend) -> None:
    ledgers = [await backend.open(), await backend.open()]
    grant = await granted(ledgers[0], request())
    taken = await asyncio.gather(*(ledgers[n % 2].succeed(OPERATION, grant.epoch, n) for n in range(20)))
    assert taken.count(True) == 1
    answer = await ledgers[1].claim(request(1))
    assert isinstance(answer, Settled)
    assert (answer.end, answer.output) == (NodeEnd.SUCCEEDED, taken.index(True))


async def test_many_nodes_go_through_their_whole_life_at_once(backend: Backend) -> None:
    ledgers = [await backend.open(), await backend.open()]

    async def live(number: int) -> object:
        mine = OperationId(run_id=f"run-{number % 5}", node_id=f"n{number}", logical_attempt=1)
        ledger = ledgers[number % 2]
        grant = await granted(ledger, request(operation=mine))
        assert await ledger.renew(mine, grant.epoch)
        assert await ledger.succeed(mine, grant.epoch, number)
        answer = await ledgers[1 - number % 2].claim(request(1, operation=mine))
        assert isinstance(answer, Settled)
        return answer.output

    assert await asyncio.gather(*(live(number) for number in range(100))) == list(range(100))


async def test_a_callers_cancellation_harms_neither_its_transaction_nor_the_next(ledger: Ledger) -> None:
    tasks = [asyncio.create_task(ledger.claim(request(operation=operation(n)))) for n in range(20)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(answer, Granted | asyncio.CancelledError) for answer in done)
    answers: list[object] = [await ledger.claim(request(1, operation=operation(n))) for n in range(20)]
    assert set(kinds(answers)) <= {Granted, Busy}
    assert [type(answer) for answer in answers[1::2]] == [Busy] * 10


@asynccontextmanager
async def another_worker(kind: str, folder: Path) -> AsyncGenerator[Process]:
    """A worker of `ledger_claims` in a process of its own, with the ledger open."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.unit.ledger_claims", kind, str(folder), "20"),
        stdin=PIPE,
        stdout=PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert await line_of(process) == "ready"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def line_of(process: Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def go(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.write(b"go\n")
    await process.stdin.drain()


@pytest.mark.parametrize("kind", BACKENDS)
async def test_of_many_claims_from_two_processes_exactly_one_is_granted_for_each_operation(
    kind: str, tmp_path: Path, ledger_server: None
) -> None:
    async with another_worker(kind, tmp_path) as one, another_worker(kind, tmp_path) as two:
        await asyncio.gather(go(one), go(two))
        won = [Counter[str](json.loads(line)) for line in await asyncio.gather(line_of(one), line_of(two))]
    assert won[0] + won[1] == {str(operation(number)): 1 for number in range(20)}


@pytest.mark.parametrize("kind", BACKENDS)
async def test_what_a_killed_worker_was_granted_is_not_forgotten(
    kind: str, tmp_path: Path, ledger_server: None
) -> None:
    async with another_worker(kind, tmp_path) as doomed:
        await go(doomed)
        assert sum(json.loads(await line_of(doomed)).values()) == 20
        doomed.kill()
        await doomed.wait()
        async with BACKENDS[kind](tmp_path) as backend:
            ledger = await backend.open()
            assert isinstance(await ledger.claim(request(1, operation=operation(0))), Busy)
            backend.clock.expire()
            answers = [await ledger.claim(request(2, operation=operation(number))) for number in range(20)]
    for answer in answers:
        assert isinstance(answer, Unsettled)
        assert [attempt.code for attempt in answer.attempts] == [Code.WORKER_LOST]
