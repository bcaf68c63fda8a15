"""A ledger that cannot be used says so, names the cure, and shows neither a traceback's words nor a password."""

import asyncio
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from activities.ledger import LedgerUnavailableError, open_ledger
from activities.ledger.records import Busy, Granted
from tests.unit.ledger_lab import OPERATION, REFUSED, failed, request, view

ROOT = Path(__file__).parents[2]


def url(path: Path) -> str:
    return f"sqlite:///{path}"


def directory(path: Path) -> None:
    path.mkdir()


def text(path: Path) -> None:
    path.write_text("this is not a database, however long it may be\n" * 100)


def another_programs(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER)")


def newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA user_version = 99")


@pytest.mark.parametrize(
    ("make", "cure"),
    [
        (directory, "check the file"),
        (text, "check the file"),
        (another_programs, "set REDRIVE_LEDGER to a file of its own"),
        (newer, "use the redrive that wrote it"),
    ],
)
async def test_what_is_no_ledger_is_refused_and_left_as_it_was(
    tmp_path: Path, make: Callable[[Path], None], cure: str
) -> None:
    path = tmp_path / "ledger.db"
    make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(LedgerUnavailableError) as caught:
        await open_ledger(url(path))
    message = str(caught.value)
    assert str(path) in message
    assert cure in message
    assert "Traceback" not in message
    assert "\n" not in message
    assert (path.read_bytes() if path.is_file() else None) == before


async def test_a_damaged_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = await open_ledger(url(path))
    for number in range(20):
        await ledger.claim(request(number, input="x" * 1000, input_hash="same", despite_epoch=number))
    await ledger.close()
    content = bytearray(path.read_bytes())
    content[100:4096] = os.urandom(3996)
    path.write_bytes(content)
    with pytest.raises(LedgerUnavailableError, match="check the file"):
        await open_ledger(url(path))


async def test_a_ledger_damaged_under_way_is_unavailable_not_wrong(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    first = await open_ledger(url(path))
    await first.claim(request())
    await first.close()
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(LedgerUnavailableError, match="nothing is sent without it"):
        await claimed_at(path)


async def claimed_at(path: Path) -> None:
    ledger = await open_ledger(url(path))
    try:
        await ledger.claim(request(1))
    finally:
        await ledger.close()


async def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerUnavailableError, match="check the file"):
        await open_ledger(url(tmp_path / "file" / "ledger.db"))


async def test_folders_that_are_missing_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b c" / "ledger.db"
    ledger = await open_ledger(url(path))
    await ledger.close()
    assert path.is_file()


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "ledger.db",
        "sqlite://",
        "sqlite:///",
        "sqlite://ledger.db",
        "mysql://root:hunter2@db/redrive",
        "://root:hunter2@db",
        "root:hunter2@db",
    ],
)
async def test_another_kind_of_url_is_refused_without_being_repeated(bad: str) -> None:
    with pytest.raises(LedgerUnavailableError, match="REDRIVE_LEDGER") as caught:
        await open_ledger(bad)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(caught.value)


async def test_what_was_committed_is_there_when_the_ledger_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = await open_ledger(url(path))
    before = await ledger.claim(request())
    await ledger.close()
    ledger = await open_ledger(url(path))
    assert isinstance(before, Granted)
    assert isinstance(await ledger.claim(request(1)), Busy)
    assert await ledger.succeed(OPERATION, before.epoch, "done")
    await ledger.close()


async def test_a_ledger_of_the_first_version_is_brought_up_to_date_with_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = await open_ledger(url(path))
    await failed(ledger, request(), REFUSED)
    await ledger.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            "DROP TABLE tool_pause; DROP TABLE tool_turn; DROP INDEX attempt_unsettled; "
            "ALTER TABLE attempt DROP COLUMN started_boot; ALTER TABLE attempt DROP COLUMN started_clock; "
            "PRAGMA user_version = 1"
        )
    ledger = await open_ledger(url(path))
    assert len((await view(ledger)).attempts) == 1
    assert isinstance(await ledger.claim(request(1)), Granted)
    await ledger.close()


async def test_many_workers_may_make_the_ledger_at_once(tmp_path: Path) -> None:
    ledgers = await asyncio.gather(*(open_ledger(url(tmp_path / "ledger.db")) for _ in range(8)))
    answers = await asyncio.gather(*(ledger.claim(request()) for ledger in ledgers))
    assert sum(isinstance(answer, Granted) for answer in answers) == 1
    for ledger in ledgers:
        await ledger.close()


FULL_DISK = """
import asyncio, resource, sys
from pathlib import Path
from activities.ledger import LedgerUnavailableError, open_ledger
from activities.ledger.records import Granted
from contracts.identity import OperationId
from tests.unit.ledger_lab import granted, request

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def of(number):
    return request(operation=OperationId(run_id="r", node_id=f"n{number}", logical_attempt=1))

async def main(path):
    ledger = await open_ledger(f"sqlite:///{path}")
    grant = await granted(ledger, of(0))
    limit(Path(f"{path}-wal").stat().st_size)
    for number in range(3):
        for what in (ledger.claim(of(number)), ledger.succeed(of(0).operation, grant.epoch, "x" * 9999)):
            try:
                answer = await what
            except LedgerUnavailableError as error:
                assert "space on its disk" in str(error), error
            else:
                assert number == 0 and not answer == True, answer
    limit(resource.RLIM_INFINITY)
    assert await ledger.node("r", "n1") is None
    assert isinstance(await ledger.claim(of(1)), Granted)
    assert await ledger.succeed(of(0).operation, grant.epoch, "done")
    await ledger.close()

asyncio.run(main(sys.argv[1]))
"""


def test_a_full_disk_commits_nothing_and_the_ledger_goes_on_when_there_is_room_again(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "ledger.db")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
