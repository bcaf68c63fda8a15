"""The ledger's tests are written against its interface: which databases there are, and what a claim is made of.

Nothing here or in the tests that use it touches SQL: whatever is asked is asked through `Ledger`.
"""

import contextlib
import hashlib
import itertools
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Protocol

import psycopg

from activities.ledger.clock import Moment
from activities.ledger.interface import LEASE, Ledger
from activities.ledger.postgres import PostgresLedger
from activities.ledger.records import ClaimRequest, Granted, NodeView
from activities.ledger.sqlite import SqliteLedger
from contracts.base import Json
from contracts.canonical import content_hash
from contracts.dead_letters import DecisionOutcome, DecisionRecord, Delivery, ToolRef
from contracts.dispatch import Change, DecideRequest
from contracts.failures import Category, Code, Outcome, SideEffect
from contracts.identity import OperationId

SERVER: Final = "REDRIVE_TEST_POSTGRES"
"""The variable that holds the URL of the tests' own server."""

RUN: Final = "order-1042"
NODE: Final = "charge"
OPERATION: Final = OperationId(run_id=RUN, node_id=NODE, logical_attempt=1)
SECOND: Final = OperationId(run_id=RUN, node_id=NODE, logical_attempt=2)
INPUT: Final[Json] = {"amount": 1999}
TOOL: Final = ToolRef(name="payments.charge", version="1", fingerprint="sha256:one")
CHANGED_TOOL: Final = ToolRef(name="payments.charge", version="2", fingerprint="sha256:two")

START: Final = datetime(2100, 1, 1, tzinfo=UTC)
"""Temporal's clock begins here; its moments compare with each other, and with no other clock's."""

_owners = itertools.count()

BUDGETS: Final[Mapping[Category, int]] = dict.fromkeys(Category, 100)
"""So many that no test runs into them by accident."""


def moment(seconds: float) -> datetime:
    """So many seconds later by Temporal's clock."""
    return START + timedelta(seconds=seconds)


class ManualClock:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.boot = "first boot"
        self.seconds = 1000.0
        self._jumped = timedelta(0)

    def read(self, connection: Any, /) -> Moment:
        """See `LedgerClock.read`."""
        return Moment(now=datetime.now(UTC) + self._jumped, boot=self.boot, seconds=self.seconds)

    def advance(self, seconds: float) -> None:
        self.seconds += seconds

    def expire(self) -> None:
        """Every lease that now runs is over."""
        self.advance(LEASE.total_seconds() + 0.001)

    def jump(self, by: timedelta) -> None:
        """Somebody has set the wall clock."""
        self._jumped += by

    def restart(self) -> None:
        """The machine has been started anew: the clock begins again, and says so."""
        self.boot = "second boot"
        self.seconds = 1.0


class Backend(Protocol):
    """One empty database, and any number of ledgers on it."""

    clock: ManualClock

    async def open(self) -> Ledger:
        """One more ledger on the same database, as another worker would have it."""
        ...


class Sqlite:
    """A file."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self._path = folder / "ledger.db"
        self._opened: list[Ledger] = []

    async def open(self) -> Ledger:
        """See `Backend.open`."""
        ledger = await SqliteLedger.open(self._path, clock=self.clock)
        self._opened.append(ledger)
        return ledger

    async def close(self) -> None:
        for ledger in self._opened:
            await ledger.close()


class Postgres:
    """A database of the server that `SERVER` names; one folder, one database."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self._server = os.environ[SERVER]
        self._name = "ledger_" + hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        self._opened: list[Ledger] = []
        self.made = False

    async def make(self) -> None:
        """Makes it, unless another process has."""
        with contextlib.suppress(psycopg.errors.DuplicateDatabase, psycopg.errors.UniqueViolation):
            await self._command(f"CREATE DATABASE {self._name}")
            self.made = True

    @property
    def url(self) -> str:
        return self._server.replace("/postgres", f"/{self._name}")

    async def open(self) -> Ledger:
        """See `Backend.open`."""
        ledger = await PostgresLedger.open(self.url, clock=self.clock)
        self._opened.append(ledger)
        return ledger

    async def close(self) -> None:
        for ledger in self._opened:
            await ledger.close()
        if self.made:
            await self._command(f"DROP DATABASE {self._name} WITH (FORCE)")

    async def _command(self, text: str) -> None:
        async with await psycopg.AsyncConnection.connect(self._server, autocommit=True) as connection:
            await connection.execute(text.encode())


@asynccontextmanager
async def postgres(folder: Path) -> AsyncGenerator[Backend]:
    backend = Postgres(folder)
    await backend.make()
    try:
        yield backend
    finally:
        await backend.close()


@asynccontextmanager
async def sqlite(folder: Path) -> AsyncGenerator[Backend]:
    backend = Sqlite(folder)
    try:
        yield backend
    finally:
        await backend.close()


BACKENDS: Final[Mapping[str, Callable[[Path], AbstractAsyncContextManager[Backend]]]] = {
    "sqlite": sqlite,
    "postgres": postgres,
}
"""Every database that a ledger can stand on; every test of the ledger runs on each."""


def request(
    at: float = 0,
    *,
    operation: OperationId = OPERATION,
    input: Json = INPUT,
    tool: ToolRef = TOOL,
    budgets: Mapping[Category, int] | None = None,
    **changes: Any,
) -> ClaimRequest:
    """A claim by a delivery that Temporal scheduled so many seconds after the start."""
    values: dict[str, Any] = {
        "operation": operation,
        "redrives": 0,
        "tool": tool.name,
        "fingerprint": tool.fingerprint,
        "input": input,
        "input_hash": content_hash(input),
        "scheduled_at": moment(at),
        "node_started_at": moment(at),
        "now": moment(at),
        "delivery": delivery(),
        "owner": f"{os.getpid()}/{next(_owners)}",
        "worker": "worker",
        "budgets": {**BUDGETS, **(budgets or {})},
        "risk": SideEffect.POSSIBLE,
    }
    return ClaimRequest(**(values | changes))


def delivery(attempt: int = 1) -> Delivery:
    return Delivery(
        workflow_id=f"{RUN}/{NODE}",
        workflow_run_id="a-run-of-temporal",
        activity_id="call_tool",
        task_queue="redrive",
        attempt=attempt,
    )


def outcome(
    category: Category = Category.TRANSIENT,
    side_effect: SideEffect = SideEffect.NONE,
    code: str = "http_408",
    **changes: Any,
) -> Outcome:
    return Outcome(category=category, code=code, message=f"because of {code}", side_effect=side_effect, **changes)


REFUSED: Final = outcome(Category.PERMISSION, SideEffect.NONE, "http_403", http_status=403)
LOST_ANSWER: Final = outcome(Category.UNKNOWN_SIDE_EFFECT, SideEffect.POSSIBLE, Code.READ_TIMEOUT)
LOST_RESULT: Final = outcome(Category.UNKNOWN_SIDE_EFFECT, SideEffect.CONFIRMED, Code.RESULT_LOST, http_status=200)
UNUSABLE_RESULT: Final = outcome(
    Category.UNKNOWN_SIDE_EFFECT, SideEffect.CONFIRMED, Code.RESULT_UNUSABLE, http_status=200
)


def decision(
    change: Change,
    decision_id: str = "d-1",
    *,
    redrives: int = 0,
    logical_attempt: int = 1,
    new_operation: bool = False,
    input: Json = INPUT,
    tool: ToolRef = TOOL,
    **changes: Any,
) -> DecideRequest:
    """An accepted decision, as a dead letter commits it."""
    values: dict[str, Any] = {
        "run_id": RUN,
        "node_id": NODE,
        "redrives": redrives,
        "logical_attempt": logical_attempt,
        "record": DecisionRecord(
            decision_id=decision_id,
            action=change.lower(),
            decided_by="bob",
            reason="because",
            at=START,
            outcome=DecisionOutcome.ACCEPTED,
        ),
        "change": change,
        "new_operation": new_operation,
        "input": input,
        "tool": tool,
    }
    return DecideRequest(**(values | changes))


async def granted(ledger: Ledger, claim: ClaimRequest) -> Granted:
    """Claims, and is granted."""
    answer = await ledger.claim(claim)
    assert isinstance(answer, Granted), answer
    return answer


async def failed(ledger: Ledger, claim: ClaimRequest, how: Outcome) -> Granted:
    """An attempt that was granted and has failed."""
    grant = await granted(ledger, claim)
    assert await ledger.fail(claim.operation, grant.epoch, how)
    return grant


async def view(ledger: Ledger) -> NodeView:
    """What the ledger knows of the node."""
    found = await ledger.node(RUN, NODE)
    assert found is not None
    return found
