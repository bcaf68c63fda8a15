"""The embedded Temporal server: the real one with its UI, tuned, its state kept between starts."""

import asyncio
import os
import random
import shutil
import socket
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from workers.client import converter_with
from workflows.attributes import SEARCH_ATTRIBUTES

if sys.platform != "win32":
    import fcntl

__all__ = ["EmbeddedServer", "EmbeddedServerError", "embedded_server", "free_port", "temporal_binary"]

_HOST: Final = "127.0.0.1"
_BELOW_OUTGOING: Final = (10_000, 32_000)

_TUNING: Final = (
    # The stock dev server paces its own queues for a shared machine; a one-node run then takes five times as long.
    *("--dynamic-config-value", "history.transferProcessorMaxPollRPS=10000"),
    *("--dynamic-config-value", "history.timerProcessorMaxPollRPS=10000"),
    *("--dynamic-config-value", "history.visibilityProcessorMaxPollRPS=10000"),
    # A run of ten thousand nodes must not hold up a run of one.
    *("--dynamic-config-value", "matching.enableFairness=true"),
    *("--sqlite-pragma", "journal_mode=wal"),
    # Durable against a lost machine too, not only against a lost process.
    *("--sqlite-pragma", "synchronous=full"),
    # Standard output is the command's own.
    *("--output", "none"),
)


class EmbeddedServerError(Exception):
    """The embedded server cannot be started; the message names the cure."""


@dataclass(frozen=True, slots=True)
class EmbeddedServer:
    """A running embedded server."""

    client: Client
    address: str
    ui_url: str


@asynccontextmanager
async def embedded_server(
    data: Path, port: int = 7233, ui_port: int = 8233, log_level: str = "error", storage: str | None = None
) -> AsyncGenerator[EmbeddedServer]:
    """Runs the Temporal server of the ``temporal`` command, with its database under a folder, ready for a worker.

    Args:
        data: The folder, made if it is not there.
        port: Where Temporal listens; 0 takes a free one.
        ui_port: Where its UI listens; 0 takes a free one.
        log_level: What the server itself logs on standard error, from ``debug`` to ``never``.
        storage: Where its client keeps large payloads, as ``REDRIVE_STORAGE`` has it.

    Raises:
        EmbeddedServerError: the folder is in use, or cannot be written; a port is taken; or the server does not start.
    """
    with _held(data):
        async with _running(data, port or free_port(), ui_port or free_port(), log_level, storage) as server:
            yield server


@contextmanager
def _held(data: Path) -> Generator[None]:
    """Keeps other servers from the folder: two with one database fight for it, and nothing goes on."""
    try:
        data.mkdir(parents=True, exist_ok=True)
        lock = (data / "temporal.lock").open("a")
    except OSError as error:
        raise EmbeddedServerError(f"the folder {data} cannot be used: {error}; choose one by REDRIVE_DATA") from error
    with lock:
        if sys.platform != "win32":
            # The server inherits it, so that one that a killed process has left behind holds the folder as well.
            os.set_inheritable(lock.fileno(), True)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                database = data / "temporal.db"
                raise EmbeddedServerError(
                    f"another Temporal server uses the folder {data}: stop that `redrive dev`, or what it has left "
                    f"behind if it was killed (pkill -f {database}), or choose another folder by REDRIVE_DATA"
                ) from None
        yield


@asynccontextmanager
async def _running(
    data: Path, port: int, ui_port: int, log_level: str, storage: str | None
) -> AsyncGenerator[EmbeddedServer]:
    for what, number, option in (("Temporal", port, "--port"), ("its UI", ui_port, "--ui-port")):
        if not _is_free(number):
            raise EmbeddedServerError(
                f"port {number}, where {what} would listen, is taken (by another `redrive dev`?); choose one with "
                f"{option}"
            )
    try:
        environment = await WorkflowEnvironment.start_local(
            ip=_HOST,
            port=port,
            ui=True,
            ui_port=ui_port,
            data_converter=converter_with(storage),
            search_attributes=SEARCH_ATTRIBUTES,
            dev_server_existing_path=temporal_binary(),
            dev_server_database_filename=str(data / "temporal.db"),
            dev_server_log_level=log_level,
            dev_server_extra_args=_TUNING,
        )
    except (RuntimeError, OSError) as error:
        raise EmbeddedServerError(
            f"the embedded Temporal server did not start: {error} (what it said itself stands above; its data is in "
            f"{data}, which may be moved away to begin anew)"
        ) from error
    try:
        yield EmbeddedServer(client=environment.client, address=f"{_HOST}:{port}", ui_url=f"http://{_HOST}:{ui_port}")
    finally:
        await asyncio.shield(environment.shutdown())


def temporal_binary() -> str | None:
    """The ``temporal`` command: beside this Python, else on the path; None: the SDK downloads its own."""
    beside = Path(sys.executable).parent / "temporal"
    return str(beside) if beside.is_file() else shutil.which("temporal")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
        return True


def free_port() -> int:
    """A port that nothing listens on.

    The kernel's own choice (port 0) is from the range of outgoing connections (RFC 6056): until the server listens, one
    of those can take it.
    """
    return next(port for port in iter(lambda: random.randrange(*_BELOW_OUTGOING), None) if _is_free(port))
