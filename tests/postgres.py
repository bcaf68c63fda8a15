"""A PostgreSQL server of the tests' own, from the system's packages: started, killed, frozen and restarted at will."""

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Self

import psycopg

from tests.tool_server import ports
from tests.waiting import eventually

_ACCOUNT: Final = "postgres"
"""PostgreSQL does not run as root: then it runs as the account that its package made."""


def programs() -> Path:
    """Where PostgreSQL's server programs are.

    Raises:
        RuntimeError: They are not installed.
    """
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    beside = shutil.which("initdb")
    if not found and beside is None:
        raise RuntimeError("the tests need a PostgreSQL server: `make system` installs it on Debian and Ubuntu")
    return found[-1].parent if found else Path(str(beside)).parent


class PostgresServer:
    """A server on a port of its own, which it keeps over `kill` and `start`.

    Attributes:
        port: Where it listens on 127.0.0.1; the superuser `redrive` needs no password.
    """

    def __init__(self, folder: Path, options: dict[str, str]) -> None:
        reserved = ports.bound(0)
        self.port = ports.port_of(reserved)
        reserved.close()
        self._folder = folder
        self._options = {
            "port": str(self.port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "max_connections": "200",
        } | options
        self._account: dict[str, Any] = (
            {"user": _ACCOUNT, "group": _ACCOUNT, "extra_groups": []} if os.geteuid() == 0 else {}
        )
        self._process: subprocess.Popen[Any] | None = None

    @classmethod
    @asynccontextmanager
    async def running(cls, **options: str) -> AsyncGenerator[Self, None]:
        """A new, empty server, gone at the end. The options are those of ``postgresql.conf``."""
        # Not in pytest's folder, which only its owner may enter.
        folder = Path(tempfile.mkdtemp(prefix="redrive-postgres-"))
        server = cls(folder, options)
        try:
            await asyncio.to_thread(server._initialize)
            await server.start()
            yield server
        finally:
            await server.kill()
            shutil.rmtree(folder)

    def _initialize(self) -> None:
        if self._account:
            account = pwd.getpwnam(_ACCOUNT)
            os.chown(self._folder, account.pw_uid, account.pw_gid)
        made = subprocess.run(
            [
                *(programs() / "initdb", "--pgdata=data", "--username=redrive", "--auth=trust"),
                *("--no-sync", "--encoding=UTF8", "--locale=C"),
            ],
            cwd=self._folder,
            capture_output=True,
            text=True,
            check=False,
            **self._account,
        )
        if made.returncode:
            raise RuntimeError(f"initdb failed:\n{made.stdout}{made.stderr}")

    async def start(self) -> None:
        """Starts it, and returns when it answers."""
        settings = [argument for name, value in self._options.items() for argument in ("-c", f"{name}={value}")]
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [programs() / "postgres", "-D", "data", *settings],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=False,
                **self._account,
            )
        await eventually(self._answers, "PostgreSQL to answer")

    async def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"PostgreSQL did not start:\n{self.log_file.read_text()}")
        try:
            connection = await psycopg.AsyncConnection.connect(self.url("postgres"), connect_timeout=2)
        except psycopg.OperationalError:
            return False
        await connection.close()
        return True

    def url(self, database: str, port: int | None = None) -> str:
        """Where a database of this server is, straight or by a proxy's port."""
        return f"postgresql://redrive@127.0.0.1:{port or self.port}/{database}"

    async def database(self) -> str:
        """The name of a new, empty database."""
        name = f"ledger_{uuid.uuid4().hex}"
        async with await psycopg.AsyncConnection.connect(self.url("postgres"), autocommit=True) as connection:
            await connection.execute(f"CREATE DATABASE {name}".encode())
        return name

    @property
    def log_file(self) -> Path:
        """What it says."""
        return self._folder / "log"

    async def kill(self) -> None:
        """SIGKILL to all of its processes, as a machine that loses its power would."""
        if self._process is None:
            return
        # Before it can see to its children; they end by themselves when they find it gone, but not at once.
        for pid in [self._process.pid, *self._children()]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        await asyncio.to_thread(self._process.wait)
        self._process = None
        # What is left of them would keep the next one from starting.
        await eventually(lambda: not self._children(), "its processes to be gone")

    def freeze(self) -> None:
        """SIGSTOP to all of its processes: connections stay open, and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        # First the one that makes them: none is made meanwhile.
        os.kill(self._process.pid, number)
        for pid in self._children():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, number)

    def _children(self) -> list[int]:
        """Every process whose command line or parent is this server's."""
        parents = {self._process.pid} if self._process is not None else set[int]()
        found: list[int] = []
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = status.read_text().rpartition(")")[2].split()
                folder = (status.parent / "cwd").readlink()
            except (OSError, ValueError):
                continue
            state, parent = fields[0], int(fields[1])
            mine = parent in parents or folder == self._folder / "data"
            if mine and state != "Z" and int(status.parent.name) not in parents:
                found.append(int(status.parent.name))
        return found
