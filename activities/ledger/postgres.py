"""The ledger in PostgreSQL: as many workers as wanted, on as many machines.

Each transaction first locks the nodes that it is about (``pg_advisory_xact_lock``), so that the rules of the `Store`
never meet another transaction of the same node; from then on ``READ COMMITTED`` shows what the last one has left.
"""

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar

import alembic.command
import psycopg
import sqlalchemy
from alembic.config import Config
from alembic.util import CommandError
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import DictRow, dict_row
from psycopg_pool import ConnectionPool
from sqlalchemy.exc import SQLAlchemyError

from activities.ledger import migrations
from activities.ledger.clock import LedgerClock, Moment
from activities.ledger.errors import LedgerUnavailableError
from activities.ledger.rows import to_text
from activities.ledger.transactions import DatabaseLedger

__all__ = ["DatabaseClock", "PostgresLedger"]

_CONNECTIONS: Final = 10
_CONNECT_SECONDS: Final = 5
_RECONNECT_SECONDS: Final = 3
"""Short, since the pool waits ever longer between its tries; whoever needs a connection then begins anew."""
_CONNECTION: Final[dict[str, str | int | None]] = {
    "connect_timeout": _CONNECT_SECONDS,
    "target_session_attrs": "read-write",
    "application_name": "redrive",
}
"""Unless the URL says otherwise."""
_ANSWER_SECONDS: Final = 10.0
"""How long a transaction may take in all; then its connection is given up."""
_SERVER_LIMITS: Final = {"statement_timeout": "8s", "idle_in_transaction_session_timeout": "10s"}
"""What the server gives up by itself: a worker that froze in a transaction must not keep its node's lock."""
_LOCK_SPACE: Final = 0x5EDB1E
"""Keeps our advisory locks apart from those of whoever else uses the database."""
_MIGRATING: Final = threading.Lock()
_P = ParamSpec("_P")
_T = TypeVar("_T")
_Connection = psycopg.Connection[DictRow]


class DatabaseClock:
    """The database's own clock: one for all workers, whatever theirs say."""

    def read(self, connection: Any, /) -> Moment:
        """See `LedgerClock.read`."""
        now = connection.execute("SELECT clock_timestamp() AS now").fetchone()["now"]
        return Moment(now=now.astimezone(UTC), boot="database", seconds=now.timestamp())


class _Job(Generic[_T]):
    """One transaction on its way through a thread.

    Attributes:
        begun: It has a connection.
        lost: Its connection broke: it may have been committed.
    """

    def __init__(self, clock: LedgerClock, nodes: Sequence[str], work: Callable[[_Connection, Moment], _T]) -> None:
        self._clock = clock
        self._nodes = list(nodes)
        self._work = work
        self._given_up = threading.Event()
        self._connection: _Connection | None = None
        self.begun = False
        self.lost = False

    def run(self, pool: ConnectionPool[_Connection]) -> _T:
        """Performs it; a second time, if the server was started anew since its connection was made."""
        try:
            return self._perform(pool)
        except psycopg.Error:
            if not self.lost or self._given_up.is_set():
                raise
            # The others in the pool are as broken as this one was.
            pool.check()
            return self._perform(pool)

    def _perform(self, pool: ConnectionPool[_Connection]) -> _T:
        with pool.connection() as connection:
            self._connection = connection
            self._go_on()
            self.begun = True
            try:
                with connection.transaction():
                    if self._nodes:
                        connection.execute(
                            "SELECT pg_advisory_xact_lock(hashtextextended(node, %s)) FROM unnest(%s::text[]) AS node",
                            (_LOCK_SPACE, self._nodes),
                        )
                    answer = self._work(connection, self._clock.read(connection))
                    self._go_on()
            except psycopg.Error:
                self.lost = connection.broken
                raise
            finally:
                self._connection = None
        return answer

    def _go_on(self) -> None:
        if self._given_up.is_set():
            raise psycopg.OperationalError("given up before it was committed")

    def give_up(self) -> None:
        """Nobody waits any more: it is not begun, not committed, and does not keep its thread."""
        self._given_up.set()
        if (connection := self._connection) is not None:
            # The driver waits for a server that does not answer; this ends the wait.
            with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as line:
                line.shutdown(socket.SHUT_RDWR)


class PostgresLedger(DatabaseLedger):
    """See `Ledger`. The synchronous driver in threads: as fast as the asynchronous ones, and the rules stand once."""

    def __init__(self, pool: ConnectionPool[_Connection], name: str, clock: LedgerClock) -> None:
        super().__init__("psycopg", name)
        self._pool = pool
        self._clock = clock
        self._threads = ThreadPoolExecutor(max_workers=_CONNECTIONS, thread_name_prefix="redrive-ledger")

    @classmethod
    async def open(cls, url: str, clock: LedgerClock | None = None) -> Self:
        """Opens the ledger in a database that is there, and brings its schema up to date.

        Args:
            url: As libpq has it, such as ``postgresql://user@host/database?sslmode=require``.
            clock: What its times are read from; the database's, unless told otherwise.

        Raises:
            LedgerUnavailableError: it cannot be reached, is not ours, or is from a newer version.
        """
        try:
            parts = conninfo_to_dict(url)
        except psycopg.ProgrammingError:
            # `from None`: what cannot be read may hold the password.
            raise LedgerUnavailableError(
                "REDRIVE_LEDGER cannot be read; write postgresql://USER:PASSWORD@HOST:PORT/DATABASE, every special "
                "character of the password percent-encoded"
            ) from None
        name = f"postgresql://{parts.get('host', '')}:{parts.get('port', 5432)}/{parts.get('dbname', '')}"
        conninfo = make_conninfo("", **(_CONNECTION | parts))
        try:
            await asyncio.to_thread(_migrate, conninfo)
        except (psycopg.Error, SQLAlchemyError, CommandError) as error:
            raise _unavailable(name, error) from error
        pool = ConnectionPool[_Connection](
            conninfo,
            kwargs={"autocommit": True, "row_factory": dict_row},
            configure=_configure,
            min_size=1,
            max_size=_CONNECTIONS,
            timeout=_CONNECT_SECONDS,
            reconnect_timeout=_RECONNECT_SECONDS,
            open=False,
        )
        await asyncio.to_thread(pool.open)
        return cls(pool, name, clock or DatabaseClock())

    async def _transaction(
        self,
        nodes: Sequence[str],
        work: Callable[Concatenate[Any, Moment, _P], _T],
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _T:
        def perform(connection: Any, moment: Moment) -> _T:
            return work(connection, moment, *args, **kwargs)

        return await self._within_time(_Job(self._clock, nodes, perform))

    async def _within_time(self, job: _Job[_T]) -> _T:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                return await asyncio.get_running_loop().run_in_executor(self._threads, job.run, self._pool)
        except TimeoutError as error:
            job.give_up()
            raise _unavailable(self.name, error, uncertain=job.begun) from None
        except psycopg.Error as error:
            # `from None`: it says why, and the server cuts a failure with long causes down to nothing.
            raise _unavailable(self.name, error, uncertain=job.lost) from None

    async def close(self) -> None:
        """See `Ledger.close`."""
        await asyncio.to_thread(self._threads.shutdown)
        await asyncio.to_thread(self._pool.close)


def _configure(connection: _Connection) -> None:
    """Makes each new connection keep our promises, whatever the database's own defaults are."""
    # After the node's lock a statement has to see what its last owner has committed.
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    for name, value in _SERVER_LIMITS.items():
        connection.execute("SELECT set_config(%s, %s, false)", (name, value))
    # "off" answers before anything is on the disk; whatever else it says is at least as good as "on".
    connection.execute(
        "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
    )


def _migrate(conninfo: str) -> None:
    """Brings the schema up to date, once, however many workers start together."""
    config = Config()
    config.set_main_option("script_location", str(migrations.FOLDER).replace("%", "%%"))
    engine = sqlalchemy.create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(conninfo), poolclass=sqlalchemy.NullPool
    )
    # Alembic's context is one for the whole process.
    with _MIGRATING, engine.begin() as connection:
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK_SPACE})")
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, "head")
        now = connection.exec_driver_sql("SELECT clock_timestamp()").scalar_one()
        connection.exec_driver_sql(
            "INSERT INTO ledger (id, born_at) VALUES (1, %s) ON CONFLICT (id) DO NOTHING", (to_text(now),)
        )


def _unavailable(name: str, error: Exception, *, uncertain: bool = False) -> LedgerUnavailableError:
    reason = " ".join(str(error).split()) or "no answer in time"
    return LedgerUnavailableError(
        f"the ledger {name} cannot be used: {reason}; nothing is sent without it (check the server, the database and "
        "its user's rights, or set REDRIVE_LEDGER)",
        uncertain=uncertain,
    )
