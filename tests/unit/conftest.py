"""What the unit tests share: hypothesis without time limits, and a ledger of each kind of database."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from activities.ledger.interface import Ledger
from tests.postgres import PostgresServer
from tests.unit.ledger_lab import BACKENDS, SERVER, Backend

# Derandomized: a run is green or red for its code only. Without limits of time: a busy machine is no error.
settings.register_profile(
    "redrive",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("redrive")


@pytest.fixture(scope="session")
async def ledger_server(postgres: PostgresServer) -> AsyncIterator[None]:
    """Tells this process and its children where the PostgreSQL server is."""
    os.environ[SERVER] = postgres.url("postgres")
    yield
    del os.environ[SERVER]


@pytest.fixture(params=list(BACKENDS))
async def backend(request: pytest.FixtureRequest, tmp_path: Path, ledger_server: None) -> AsyncIterator[Backend]:
    """A database of one kind, empty, with a lease clock that moves only when it is told to."""
    async with BACKENDS[request.param](tmp_path) as backend:
        yield backend


@pytest.fixture
async def ledger(backend: Backend) -> Ledger:
    """A ledger on that database."""
    return await backend.open()
