"""Fixtures: one Temporal server and one tool server for each test process, a bench for each test."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

# Before any worker runs: pytest's own late import of it can meet another thread's parser.
import hypothesis  # noqa: F401  # pyright: ignore[reportUnusedImport]
import pytest

from tests.lab import Bench
from tests.postgres import PostgresServer
from tests.tool_server import ToolServer
from workers.embedded import EmbeddedServer, embedded_server


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--crash", default="", metavar="CELL at POINT", help="only these of the crash-point matrix (a glob)"
    )


@pytest.fixture(scope="session")
async def temporal(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedServer]:
    """A real Temporal server, as `redrive dev` runs it."""
    async with embedded_server(tmp_path_factory.mktemp("temporal"), port=0, ui_port=0) as server:
        yield server


@pytest.fixture(scope="session")
async def tool_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ToolServer]:
    """A tool server that misbehaves as it is told."""
    async with ToolServer.start(tmp_path_factory.mktemp("tools")) as server:
        yield server


@pytest.fixture(scope="session")
async def postgres() -> AsyncIterator[PostgresServer]:
    """A real PostgreSQL server. Nothing of it outlives the tests, so that it need not wait for the disk."""
    async with PostgresServer.running(fsync="off") as server:
        yield server


@pytest.fixture
def bench(temporal: EmbeddedServer, tool_server: ToolServer, tmp_path: Path, request: pytest.FixtureRequest) -> Bench:
    """Tools, catalog, ledger and task queue of one test."""
    name = "t" + hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:12]
    return Bench(client=temporal.client, tools=tool_server, folder=tmp_path, name=name)
