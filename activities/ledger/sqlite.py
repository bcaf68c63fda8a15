"""The ledger in SQLite: one machine, one writer, nothing answered before it is on the disk."""

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar

from activities.ledger import migrations
from activities.ledger.clock import BootClock, LedgerClock, Moment
from activities.ledger.errors import LedgerUnavailableError
from activities.ledger.rows import to_text
from activities.ledger.transactions import DatabaseLedger
from activities.ledger.writer import Writer, is_uncertain

__all__ = ["SqliteLedger"]

_BUSY_TIMEOUT_SECONDS: Final = 5.0

_NEW_LEDGER: Final = "a new ledger knows nothing of earlier calls, and leaves to people what is not safe to repeat"
_CHECK: Final = (
    "check the file, its folder's permissions and the space on its disk, or set REDRIVE_LEDGER; it goes on by itself "
    "once it can be written"
)
_RESTORE: Final = (
    "check the file: it is damaged, or no ledger (then set REDRIVE_LEDGER to another). Stop all workers, then repair "
    f"it, or move it away with its -wal and -shm: {_NEW_LEDGER}"
)

_P = ParamSpec("_P")
_T = TypeVar("_T")


class SqliteLedger(DatabaseLedger):
    """See `Ledger`. One writer for all nodes: no two transactions of a file ever overlap."""

    def __init__(
        self, connection: sqlite3.Connection, thread: ThreadPoolExecutor, path: Path, clock: LedgerClock
    ) -> None:
        super().__init__("sqlite3", f"sqlite:///{path}")
        self._path = path
        self._writer = Writer(connection, thread, clock, _Files(path).check)

    @classmethod
    async def open(cls, path: Path, clock: LedgerClock | None = None) -> Self:
        """Opens the ledger at a path, and makes it where there is none.

        Args:
            path: The file; its folder is made, too.
            clock: What its times are read from; the machine's, unless told otherwise.

        Raises:
            LedgerUnavailableError: it is not a ledger, not writable, or from a newer version.
        """
        clock = clock or BootClock()
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="redrive-ledger")
        try:
            connection = await asyncio.get_running_loop().run_in_executor(thread, _connect, path, clock)
        except (sqlite3.Error, OSError) as error:
            thread.shutdown()
            raise _unavailable(path, error) from error
        except LedgerUnavailableError:
            thread.shutdown()
            raise
        try:
            return cls(connection, thread, path, clock)
        except LedgerUnavailableError:
            connection.close()
            thread.shutdown()
            raise

    async def _transaction(
        self,
        nodes: Sequence[str],
        work: Callable[Concatenate[Any, Moment, _P], _T],
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _T:
        del nodes  # BEGIN IMMEDIATE has the whole file

        def perform(connection: sqlite3.Connection, moment: Moment) -> _T:
            return work(connection, moment, *args, **kwargs)

        try:
            return await self._writer.perform(perform)
        except (sqlite3.Error, ValueError) as error:
            # A ValueError is a row that SQLite can read and nobody else. `from None`: the server cuts a failure down to
            # nothing if it has long causes, and this one says why.
            raise _unavailable(self._path, error) from None

    async def close(self) -> None:
        """See `Ledger.close`."""
        await self._writer.close()


class _Files:
    """The files that a ledger was opened as, which have to stay in their places while it is.

    SQLite goes on writing to a file that has been deleted or replaced (https://www.sqlite.org/howtocorrupt.html,
    section 2.4): what it commits there is on no disk any more, and no other worker sees it.
    """

    def __init__(self, path: Path) -> None:
        self._paths = [Path(f"{path}{suffix}") for suffix in ("", "-wal", "-shm")]
        self._opened: list[tuple[int, int] | None] = [self._identity(file) for file in self._paths]
        self.check()

    def check(self) -> None:
        """Asked before every commit.

        Raises:
            LedgerUnavailableError: one is not there any more, or not the one that was opened.
        """
        for file, opened in zip(self._paths, self._opened, strict=True):
            if opened is None or self._identity(file) != opened:
                raise LedgerUnavailableError(
                    f"the ledger's file {file} was deleted or replaced while it was in use; nothing is sent without it "
                    f"(put it back, or stop all workers and start them anew: {_NEW_LEDGER})"
                )

    @staticmethod
    def _identity(file: Path) -> tuple[int, int] | None:
        try:
            found = file.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino


def _connect(path: Path, clock: LedgerClock) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    try:
        # One read transaction: another worker may be making the ledger just now.
        connection.execute("BEGIN")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        connection.execute("COMMIT")
        if version == 0 and tables:
            raise LedgerUnavailableError(
                f"{path} is another program's database: set REDRIVE_LEDGER to a file of its own"
            )
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise LedgerUnavailableError(
                f"the ledger {path} cannot be used: its file system has no shared memory for SQLite's WAL; put it on a "
                "local disk, or use a postgresql:// ledger"
            )
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("BEGIN IMMEDIATE")
        _migrate(connection, path, clock)
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def _migrate(connection: sqlite3.Connection, path: Path, clock: LedgerClock) -> None:
    """Brings the schema up to date; inside one transaction, so that two processes never do it at once."""
    steps = migrations.STEPS
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > len(steps):
        raise LedgerUnavailableError(
            f"the ledger {path} has version {version}, this redrive knows {len(steps)}: use the redrive that wrote it"
        )
    for step in steps[version:]:
        # Not executescript: it would commit the transaction.
        for statement in migrations.statements(step):
            connection.execute(statement)
    if version == 0:
        born_at = to_text(clock.read(connection).now)
        connection.execute("INSERT INTO ledger (id, born_at) VALUES (1, ?)", (born_at,))
    connection.execute(f"PRAGMA user_version = {len(steps)}")


def _unavailable(path: Path, error: Exception) -> LedgerUnavailableError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    damaged = isinstance(error, ValueError) or code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
    return LedgerUnavailableError(
        f"the ledger {path} cannot be used: {error}; nothing is sent without it ({_RESTORE if damaged else _CHECK})",
        uncertain=is_uncertain(error),
    )
