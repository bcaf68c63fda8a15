"""The processes: Temporal, the tools, the workers, and what keeps them running."""

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import tomli_w

from tests.chaos.graphs import catalog
from tests.chaos.proxy import HOST, Proxy
from tests.chaos.schedule import DATABASE, WORKERS
from tests.postgres import PostgresServer
from tests.waiting import eventually
from workers.embedded import free_port

QUEUE: Final = "redrive"
_ROOT: Final = Path(__file__).resolve().parents[2]
_BESIDE_PYTHON: Final = Path(sys.executable).parent
_SEARCH_ATTRIBUTES: Final = ("RedriveRunId", "RedriveTool", "RedriveCategory", "RedriveStatus", "RedriveFingerprint")
_POLL_RATES: Final = tuple(f"history.{what}ProcessorMaxPollRPS=10000" for what in ("transfer", "timer", "visibility"))


class Target(Protocol):
    """Something that can be killed and frozen."""

    async def kill(self) -> None: ...
    async def restart(self) -> None: ...
    async def freeze(self) -> None: ...
    async def resume(self) -> None: ...


class Process:
    """A process that can be killed, frozen and started again, and is started again when it ends by itself.

    Attributes:
        ends: How often it has ended by itself.
    """

    def __init__(
        self,
        command: list[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        ready: Callable[[], Awaitable[bool]] | None = None,
        may_freeze: Callable[[], bool] | None = None,
    ) -> None:
        self._command = [*_tied_to_us(), *command]
        self._log = log
        self._environment = dict(environment) if environment is not None else None
        self._ready = ready
        self._may_freeze = may_freeze
        self._process: subprocess.Popen[bytes] | None = None
        self._wanted = False
        self.ends = 0

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Runs it, until the end."""
        keeper: asyncio.Task[None] | None = None
        try:
            await self.restart()
            keeper = asyncio.create_task(self._keep())
            yield
        finally:
            if keeper is not None:
                keeper.cancel()
            await self.kill()

    async def restart(self) -> None:
        """Starts it; returns when it serves."""
        self._wanted = True
        self._start()
        if self._ready is not None:
            await eventually(self._ready, f"{self._command} to serve (see {self._log})")

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=_ROOT, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    async def _keep(self) -> None:
        """What a service manager does."""
        while True:
            await asyncio.sleep(0.5)
            if self._wanted and self._process is not None and self._process.poll() is not None:
                self.ends += 1
                self._start()

    async def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self._wanted = False
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    async def freeze(self) -> None:
        """SIGSTOP, at a moment at which nobody else waits for what it holds."""
        while self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.02)
            if self._may_freeze is None or await asyncio.to_thread(self._may_freeze):
                return
            self._process.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.01)

    async def resume(self) -> None:
        """SIGCONT."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)


class Postgres:
    """A `Target` of its own making: its processes are many."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server

    async def kill(self) -> None:
        """See `Target`."""
        await self._server.kill()

    async def restart(self) -> None:
        """See `Target`; returns when it has recovered."""
        await self._server.start()

    async def freeze(self) -> None:
        """See `Target`."""
        self._server.freeze()

    async def resume(self) -> None:
        """See `Target`."""
        self._server.resume()


@dataclass
class Cluster:
    """Everything that runs.

    Attributes:
        folder: Where all of it keeps its data and logs.
        address: Temporal's own, not the proxy's.
        tools_log: What the tools have done.
        targets: What can be killed and frozen, by name.
        proxies: By the name of the server that each stands before.
        processes: Those of the targets that are kept running here.
    """

    folder: Path
    address: str
    tools_log: Path
    targets: dict[str, Target] = field(default_factory=dict)
    proxies: dict[str, Proxy] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)


@asynccontextmanager
async def running_cluster(folder: Path, seed: int, *, database: bool) -> AsyncGenerator[Cluster]:
    """Starts everything, each server behind its proxy; ends everything.

    Args:
        folder: For data and logs.
        seed: Of the tools' faults.
        database: The ledger is in PostgreSQL; otherwise in SQLite.
    """
    temporal_port, tools_port = free_port(), free_port()
    cluster = Cluster(folder, f"{HOST}:{temporal_port}", folder / "tools.jsonl")
    async with AsyncExitStack() as stack:
        ledger = f"sqlite:///{folder / 'ledger.db'}"
        if database:
            server = await stack.enter_async_context(PostgresServer.running())
            proxy = await stack.enter_async_context(Proxy.before(server.port))
            cluster.targets[DATABASE], cluster.proxies[DATABASE] = Postgres(server), proxy
            ledger = server.url(await server.database(), proxy.port)
        servers = {
            "temporal": (temporal_port, _temporal(folder, temporal_port)),
            "tools": (tools_port, _tools(folder, tools_port, cluster.tools_log, seed)),
        }
        for name, (port, process) in servers.items():
            cluster.targets[name] = cluster.processes[name] = process
            cluster.proxies[name] = await stack.enter_async_context(Proxy.before(port))
            await stack.enter_async_context(process.running())
        document = catalog(f"http://{HOST}:{cluster.proxies['tools'].port}")
        (folder / "tools.toml").write_text(tomli_w.dumps(document))
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("REDRIVE_", "TEMPORAL_"))},
            "TEMPORAL_ADDRESS": f"{HOST}:{cluster.proxies['temporal'].port}",
            "REDRIVE_TOOLS": str(folder / "tools.toml"),
            "REDRIVE_LEDGER": ledger,
            "REDRIVE_TASK_QUEUE": QUEUE,
        }

        def ledger_is_free() -> bool:
            return sqlite_is_free(folder / "ledger.db")

        for name in WORKERS:
            worker = Process(
                [str(_BESIDE_PYTHON / "redrive"), "worker"],
                folder / f"{name}.log",
                environment=environment,
                may_freeze=None if database else ledger_is_free,
            )
            cluster.targets[name] = cluster.processes[name] = worker
            await stack.enter_async_context(worker.running())
        await _set_up(folder / "setup.log", environment)
        yield cluster


async def _set_up(log: Path, environment: Mapping[str, str]) -> None:
    """`redrive setup`, as often as it takes: it makes the schedule of the sweeps."""

    async def done() -> bool:
        with log.open("ab") as output:
            command = [str(_BESIDE_PYTHON / "redrive"), "setup"]
            ended = await asyncio.to_thread(subprocess.run, command, env=environment, stdout=output, stderr=output)
        return ended.returncode == 0

    await eventually(done, f"`redrive setup` to succeed (see {log})", within=300)


def _temporal(folder: Path, port: int) -> Process:
    command = [str(_BESIDE_PYTHON / "temporal"), "server", "start-dev", "--headless", "--log-level", "error"]
    command += ["--ip", HOST, "--port", str(port), "--db-filename", str(folder / "temporal.db")]
    command += ["--sqlite-pragma", "journal_mode=wal", "--sqlite-pragma", "synchronous=full"]
    for rate in _POLL_RATES:
        command += ["--dynamic-config-value", rate]
    for name in _SEARCH_ATTRIBUTES:
        command += ["--search-attribute", f"{name}=Keyword"]
    return Process(command, folder / "temporal.log", ready=lambda: accepts(port))


def _tools(folder: Path, port: int, log: Path, seed: int) -> Process:
    command = [sys.executable, "-m", "tests.chaos.tool", "--port", str(port), "--log", str(log), "--seed", str(seed)]
    return Process(command, folder / "tools.log", ready=lambda: accepts(port))


def _tied_to_us() -> list[str]:
    """Has a process end with us, however we end, where there is a command for that."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []


async def accepts(port: int) -> bool:
    """Whether something listens on the port."""
    try:
        _, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return False
    writer.close()
    return True


def sqlite_is_free(ledger: Path) -> bool:
    """Whether nobody is inside of a transaction: frozen there, it would hold the ledger of all others."""
    if not ledger.exists():
        return True
    connection = sqlite3.connect(ledger, timeout=0, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except sqlite3.OperationalError:
        return False
    finally:
        connection.close()
    return True
