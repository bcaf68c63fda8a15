"""What is asked of the SQLite ledger at once is committed at once, and each of it answered as if it were alone."""

import asyncio
import os
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from activities.ledger import LedgerUnavailableError, open_ledger
from activities.ledger.clock import BootClock, LedgerClock, Moment
from activities.ledger.records import Granted
from activities.ledger.writer import Writer
from tests.unit.ledger_claims import operation
from tests.unit.ledger_lab import request

ROOT = Path(__file__).parents[2]

Work = Callable[[sqlite3.Connection, Moment], Any]


class Disk:
    """A writer on a file, the check that it asks before its commits, and what another process sees of the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE done (number INTEGER PRIMARY KEY)")
        self.commits = 0
        self.refusals: list[Exception] = []
        self.writer = Writer(connection, ThreadPoolExecutor(1), BootClock(), self._check)

    def _check(self) -> None:
        self.commits += 1
        if self.refusals:
            raise self.refusals.pop(0)

    def seen(self) -> set[int]:
        with closing(sqlite3.connect(self._path)) as connection:
            return {number for (number,) in connection.execute("SELECT number FROM done")}

    async def all_at_once(self, *work: Work) -> list[Any]:
        return await asyncio.gather(*(self.writer.perform(job) for job in work), return_exceptions=True)


@pytest.fixture
async def disk(tmp_path: Path) -> AsyncIterator[Disk]:
    disk = Disk(tmp_path / "file.db")
    yield disk
    await disk.writer.close()


def doing(number: int) -> Work:
    def work(connection: sqlite3.Connection, _moment: Moment) -> int:
        connection.execute("INSERT INTO done VALUES (?)", (number,))
        return number

    return work


def failing(error: Exception, after: int) -> Work:
    """It has changed something before it fails."""

    def work(connection: sqlite3.Connection, moment: Moment) -> None:
        doing(after)(connection, moment)
        raise error

    return work


def code(number: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = number
    return error


async def test_what_is_asked_for_at_once_is_one_commit_in_its_order(disk: Disk) -> None:
    assert await disk.all_at_once(*map(doing, range(50))) == list(range(50))
    assert disk.commits == 1
    assert disk.seen() == set(range(50))


async def test_each_is_on_the_disk_when_it_is_answered(disk: Disk) -> None:
    async def ask(number: int) -> None:
        for again in range(number, 1000, 100):
            await disk.writer.perform(doing(again))
            assert again in disk.seen()

    await asyncio.gather(*map(ask, range(20)))


@pytest.mark.parametrize(
    "error", [sqlite3.IntegrityError("no"), ValueError("no"), KeyError("no"), AssertionError("no")]
)
async def test_one_that_fails_leaves_nothing_and_harms_nobody(disk: Disk, error: Exception) -> None:
    answers = await disk.all_at_once(doing(1), failing(error, after=2), doing(3))
    assert answers == [1, error, 3]
    assert disk.commits == 1
    assert disk.seen() == {1, 3}


async def test_one_that_ends_the_transaction_fails_alone(disk: Disk) -> None:
    """As SQLite itself does where it has no room for a change."""

    def hopeless(connection: sqlite3.Connection, moment: Moment) -> None:
        doing(2)(connection, moment)
        connection.execute("ROLLBACK")
        raise code(sqlite3.SQLITE_FULL)

    answers = await disk.all_at_once(doing(1), hopeless, doing(3))
    assert (answers[0], answers[2]) == (1, 3)
    assert isinstance(answers[1], sqlite3.OperationalError)
    assert disk.seen() == {1, 3}


async def test_a_commit_that_fails_is_tried_for_each_alone(disk: Disk) -> None:
    disk.refusals = [code(sqlite3.SQLITE_FULL), code(sqlite3.SQLITE_FULL)]
    answers = await disk.all_at_once(doing(1), doing(2), doing(3))
    assert isinstance(answers[0], sqlite3.OperationalError)
    assert answers[1:] == [2, 3]
    assert disk.seen() == {2, 3}


async def test_after_a_commit_of_unknown_end_nobody_is_told_that_it_was_taken_and_nothing_is_done_again(
    disk: Disk,
) -> None:
    disk.refusals = [code(sqlite3.SQLITE_IOERR_FSYNC)]
    answers = await disk.all_at_once(doing(1), doing(2))
    assert [type(answer) for answer in answers] == [sqlite3.OperationalError] * 2
    assert disk.commits == 1
    assert await disk.all_at_once(doing(3)) == [3]
    assert disk.seen() == {3}


@pytest.mark.parametrize(
    ("why", "uncertain"), [(sqlite3.SQLITE_IOERR_FSYNC, True), (sqlite3.SQLITE_IOERR_WRITE, False)]
)
async def test_a_ledgers_callers_learn_whether_a_commits_end_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: int, uncertain: bool
) -> None:
    def check() -> None:
        raise code(why)

    def writer(
        connection: sqlite3.Connection, thread: ThreadPoolExecutor, clock: LedgerClock, _check: object
    ) -> Writer:
        return Writer(connection, thread, clock, check)

    monkeypatch.setattr("activities.ledger.sqlite.Writer", writer)
    ledger = await open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    claims = [ledger.claim(request(operation=operation(number))) for number in range(3)]
    answers = await asyncio.gather(*claims, return_exceptions=True)
    assert [isinstance(answer, LedgerUnavailableError) and answer.uncertain for answer in answers] == [uncertain] * 3
    await ledger.close()


async def test_those_who_wait_for_a_locked_file_wait_together(tmp_path: Path) -> None:
    """One after the other, a hundred of them would keep a worker from its heartbeats for minutes."""
    path = tmp_path / "ledger.db"
    ledger = await open_ledger(f"sqlite:///{path}")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        claims = [ledger.claim(request(operation=operation(number))) for number in range(100)]
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*claims, return_exceptions=True)
        assert {type(answer) for answer in answers} == {LedgerUnavailableError}
        other.execute("ROLLBACK")
    assert isinstance(await ledger.claim(request(operation=operation(0))), Granted)
    await ledger.close()


async def test_what_was_asked_for_before_the_end_is_done_and_what_comes_later_is_refused(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "file.db")
    asked = [asyncio.create_task(disk.writer.perform(doing(number))) for number in range(300)]
    await asyncio.sleep(0)
    await disk.writer.close()
    assert await asyncio.gather(*asked) == list(range(300))
    assert disk.seen() == set(range(300))
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        await disk.writer.perform(doing(300))


ONE_TOO_LARGE = """
import asyncio, resource, sys
from pathlib import Path
from activities.ledger import LedgerUnavailableError, open_ledger
from tests.unit.ledger_claims import operation
from tests.unit.ledger_lab import granted, request

async def main(path):
    ledger = await open_ledger(f"sqlite:///{path}")
    grants = [await granted(ledger, request(operation=operation(number))) for number in range(5)]
    room = Path(f"{path}-wal").stat().st_size + 200_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    outputs = ["x" * 500_000 if number == 2 else number for number in range(5)]
    ends = [ledger.succeed(operation(n), grants[n].epoch, output) for n, output in enumerate(outputs)]
    answers = await asyncio.gather(*ends, return_exceptions=True)
    assert isinstance(answers.pop(2), LedgerUnavailableError), answers
    assert answers == [True] * 4, answers
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert await ledger.succeed(operation(2), grants[2].epoch, outputs[2])
    await ledger.close()

asyncio.run(main(sys.argv[1]))
"""


def test_one_that_is_too_large_for_the_disk_does_not_keep_the_others_from_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ONE_TOO_LARGE, str(tmp_path / "ledger.db")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
