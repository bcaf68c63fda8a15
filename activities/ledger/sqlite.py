"""The ledger in SQLite: one machine, one writer thread, nothing answered before it is on the disk."""

import asyncio
import sqlite3
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar

import aiosql

from activities.ledger.errors import LedgerUnavailableError
from activities.ledger.interface import LEASE
from activities.ledger.records import ClaimAnswer, ClaimRequest, NodeView, OperationView
from activities.ledger.store import LeaseClock, Store
from contracts.base import Json
from contracts.dispatch import DecideAnswer, DecideRequest
from contracts.failures import Outcome
from contracts.identity import OperationId

__all__ = ["BootClock", "SqliteLedger", "boot_seconds"]

_HERE: Final = Path(__file__).parent
_VERSION: Final = 1
_BUSY_TIMEOUT_SECONDS: Final = 5.0
_P = ParamSpec("_P")
_T = TypeVar("_T")


class BootClock:
    """CLOCK_BOOTTIME: it does not jump, it counts while the machine sleeps, and all processes of a machine share it.

    A lease from before a restart of the machine is over, whatever its number says: its owner is gone.
    """

    def __init__(self) -> None:
        try:
            self._boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            # Without Linux's boot id, the moment of the boot stands for it; it is as stable as the wall clock is.
            self._boot = f"{sys.platform}-{round((time.time() - time.monotonic()) / 60)}"

    def read(self, _connection: Any, /) -> tuple[str, float]:
        """See `LeaseClock.read`."""
        return self._boot, boot_seconds()


def boot_seconds() -> float:
    """Seconds since the machine's boot, sleep included where the platform counts it."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class SqliteLedger:
    """See `Ledger`; each method says there what it promises."""

    def __init__(
        self, connection: sqlite3.Connection, thread: ThreadPoolExecutor, path: Path, clock: LeaseClock
    ) -> None:
        self._connection = connection
        self._thread = thread
        self._path = path
        queries = aiosql.from_path(_HERE / "queries.sql", "sqlite3", mandatory_parameters=False)
        self._store = Store(queries, clock, LEASE)

    @classmethod
    async def open(cls, path: Path, clock: LeaseClock | None = None) -> Self:
        """Opens the ledger at a path, and makes it where there is none.

        Args:
            path: The file; its folder is made, too.
            clock: What leases run by; the machine's, unless told otherwise.

        Raises:
            LedgerUnavailableError: it is not a ledger, not writable, or from a newer version.
        """
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="redrive-ledger")
        try:
            connection = await asyncio.get_running_loop().run_in_executor(thread, _connect, path)
        except (sqlite3.Error, OSError) as error:
            thread.shutdown()
            raise _unavailable(path, error) from error
        except LedgerUnavailableError:
            thread.shutdown()
            raise
        return cls(connection, thread, path, clock or BootClock())

    async def _transaction(self, work: Callable[Concatenate[Any, _P], _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        def run() -> _T:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                answer = work(self._connection, *args, **kwargs)
                self._connection.execute("COMMIT")
            except BaseException:
                self._connection.rollback()
                raise
            return answer

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, run)
        except sqlite3.Error as error:
            raise _unavailable(self._path, error) from error

    async def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """See `Ledger.claim`."""
        return await self._transaction(self._store.claim, request, _now())

    async def renew(self, operation: OperationId, epoch: int) -> bool:
        """See `Ledger.renew`."""
        return await self._transaction(self._store.renew, operation, epoch)

    async def succeed(self, operation: OperationId, epoch: int, output: Json) -> bool:
        """See `Ledger.succeed`."""
        return await self._transaction(self._store.succeed, operation, epoch, output, _now())

    async def fail(
        self,
        operation: OperationId,
        epoch: int,
        outcome: Outcome,
        next_eligible_at: datetime | None = None,
        not_before: datetime | None = None,
    ) -> bool:
        """See `Ledger.fail`."""
        return await self._transaction(
            self._store.fail, operation, epoch, outcome, next_eligible_at, not_before, _now()
        )

    async def settle_absent(self, operation: OperationId, epoch: int) -> None:
        """See `Ledger.settle_absent`."""
        await self._transaction(self._store.settle_absent, operation, epoch)

    async def settle_committed(self, operation: OperationId, epoch: int, output: Json) -> None:
        """See `Ledger.settle_committed`."""
        await self._transaction(self._store.settle_committed, operation, epoch, output, _now())

    async def confirm(self, operation: OperationId) -> None:
        """See `Ledger.confirm`."""
        await self._transaction(self._store.confirm, operation)

    async def node(self, run_id: str, node_id: str) -> NodeView | None:
        """See `Ledger.node`."""
        return await self._transaction(self._store.node, run_id, node_id)

    async def born_at(self) -> datetime:
        """See `Ledger.born_at`."""
        return await self._transaction(self._store.born_at)

    async def decide(self, request: DecideRequest, fence: datetime) -> DecideAnswer:
        """See `Ledger.decide`."""
        return await self._transaction(self._store.decide, request, fence, _now())

    async def cancel(self, run_id: str, node_ids: list[str], fence: datetime) -> None:
        """See `Ledger.cancel`."""
        await self._transaction(self._store.cancel, run_id, node_ids, fence, _now())

    async def operation(self, operation_id: str) -> OperationView | None:
        """See `Ledger.operation`."""
        return await self._transaction(self._store.operation, operation_id)

    async def close(self) -> None:
        """See `Ledger.close`."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown()


def _connect(path: Path) -> sqlite3.Connection:
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
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("BEGIN IMMEDIATE")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            # Not executescript: it would commit the transaction that keeps two processes from doing this at once.
            for statement in (_HERE / "schema.sqlite.sql").read_text().split(";\n"):
                connection.execute(statement)
            connection.execute("INSERT INTO ledger (id, born_at) VALUES (1, ?)", (_now().isoformat(),))
            connection.execute(f"PRAGMA user_version = {_VERSION}")
        elif version != _VERSION:
            raise LedgerUnavailableError(
                f"the ledger {path} has version {version}, this redrive knows {_VERSION}: use the redrive that wrote it"
            )
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def _unavailable(path: Path, error: Exception) -> LedgerUnavailableError:
    return LedgerUnavailableError(
        f"the ledger {path} cannot be used: {error}; nothing is sent without it (check the file, its folder's "
        "permissions and the space on its disk, or set REDRIVE_LEDGER)"
    )


def _now() -> datetime:
    return datetime.now(UTC)
