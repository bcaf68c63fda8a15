"""Group commit: what is asked for while SQLite waits for the disk is done together, in the next transaction.

Most of what a small transaction costs is that wait, and the way to a thread and back. Nobody is answered before it is
over, so that nothing is promised that is not on the disk.
"""

import asyncio
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from activities.ledger.clock import LedgerClock, Moment

__all__ = ["Writer", "is_uncertain"]

_BATCH: Final = 200
_BATCH_SECONDS: Final = 0.05
"""After which nobody else is taken along: other processes wait for the file meanwhile."""

_T = TypeVar("_T")


class _Job:
    """One caller's work on its way through the writer's thread and back.

    Attributes:
        error: Why it could not be done; what its caller raises.
    """

    __slots__ = ("_answer", "_caller", "_work", "error")

    def __init__(self, work: Callable[[sqlite3.Connection, Moment], Any], caller: asyncio.Future[Any]) -> None:
        self._work = work
        self._caller = caller
        self._answer: Any = None
        self.error: Exception | None = None

    def perform(self, connection: sqlite3.Connection, clock: LedgerClock) -> None:
        """Does it in a transaction that others share: if it fails, nothing of it stays, and nothing of theirs is lost.

        Raises:
            sqlite3.Error: that has ended the whole transaction.
        """
        self.error = None
        connection.execute("SAVEPOINT job")
        try:
            self._answer = self._work(connection, clock.read(connection))
        except Exception as error:
            # Whatever it is, it is raised where the caller waits.
            if not connection.in_transaction:
                raise
            connection.execute("ROLLBACK TO job")
            self.error = error
        connection.execute("RELEASE job")

    def answer(self) -> None:
        """Tells the caller, unless that one has gone away."""
        if self._caller.done():
            return
        if self.error is None:
            self._caller.set_result(self._answer)
        else:
            self._caller.set_exception(self.error)


class Writer:
    """The one thread that uses a connection, and the jobs that wait for it. To be used within one event loop."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        thread: ThreadPoolExecutor,
        clock: LedgerClock,
        check: Callable[[], None],
    ) -> None:
        """The writer of a connection; ``check`` is asked before every commit, and may refuse it by raising."""
        self._connection = connection
        self._thread = thread
        self._clock = clock
        self._check = check
        self._waiting: deque[_Job] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    async def perform(self, work: Callable[[sqlite3.Connection, Moment], _T]) -> _T:
        """Does some work within a transaction; returns when that is on the disk.

        Raises:
            sqlite3.Error: it was not done, unless `is_uncertain` says otherwise.
        """
        if self._closed:
            raise sqlite3.ProgrammingError("it has been closed")
        loop = asyncio.get_running_loop()
        caller: asyncio.Future[_T] = loop.create_future()
        self._waiting.append(_Job(work, caller))
        if self._idle.is_set():
            self._idle.clear()
            # Not at once: whoever else asks in this turn of the loop is taken along.
            loop.call_soon(self._begin, loop)
        return await caller

    async def close(self) -> None:
        """Finishes what waits, and closes the connection."""
        self._closed = True
        await self._idle.wait()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown()

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.run_in_executor(self._thread, self._write).add_done_callback(self._answer)

    def _answer(self, written: asyncio.Future[list[_Job]]) -> None:
        for job in written.result():
            job.answer()
        if self._waiting:
            self._begin(written.get_loop())
        else:
            self._idle.set()

    # In the thread.

    def _write(self) -> list[_Job]:
        """Does what waits; whatever happens, each of these jobs has an answer or an error then."""
        ours = len(self._waiting)
        batch: list[_Job] = []
        try:
            self._commit(self._take(batch))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised where the callers wait
            if not batch:
                # It could not begin. Those who have come since then have a wait of their own.
                batch = [self._waiting.popleft() for _ in range(ours)]
            elif len(batch) > 1 and isinstance(error, sqlite3.Error) and not is_uncertain(error):
                # One that is too much for the disk, say, must not keep the others from it.
                for job in batch:
                    self._write_alone(job)
                return batch
            for job in batch:
                job.error = error
        return batch

    def _write_alone(self, job: _Job) -> None:
        try:
            self._commit([job])
        except Exception as error:  # noqa: BLE001 - as above
            job.error = error

    def _take(self, batch: list[_Job]) -> Iterator[_Job]:
        """What waits, and who comes meanwhile, until there are many, or it has taken long."""
        until = time.monotonic() + _BATCH_SECONDS
        while self._waiting and len(batch) < _BATCH and time.monotonic() < until:
            batch.append(self._waiting.popleft())
            yield batch[-1]

    def _commit(self, jobs: Iterable[_Job]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for job in jobs:
                job.perform(self._connection, self._clock)
            self._check()
            self._connection.execute("COMMIT")
        except BaseException:
            self._connection.rollback()
            raise


def is_uncertain(error: Exception) -> bool:
    """Whether a commit that failed may come to light all the same after a crash: it was written, and perhaps kept."""
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_IOERR_FSYNC
