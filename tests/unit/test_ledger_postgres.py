"""What only PostgreSQL can do to a ledger: refuse it, lose its connections, stop answering; and its schema's steps."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from activities.ledger import LedgerUnavailableError, open_ledger
from activities.ledger.clock import Moment
from activities.ledger.interface import Ledger
from activities.ledger.postgres import DatabaseClock, PostgresLedger
from activities.ledger.records import Busy, Granted
from tests.postgres import PostgresServer
from tests.unit.ledger_lab import OPERATION, granted, outcome, request, view
from tests.waiting import eventually


async def run(url: str, *statements: str) -> None:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        for statement in statements:
            await connection.execute(statement.encode())


@pytest.fixture
async def url(postgres: PostgresServer) -> AsyncIterator[str]:
    name = await postgres.database()
    yield postgres.url(name)
    await run(postgres.url("postgres"), f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def ledger(url: str) -> AsyncIterator[Ledger]:
    ledger = await open_ledger(url)
    yield ledger
    await ledger.close()


# Opening it.


async def test_many_workers_may_make_the_ledger_at_once_and_its_steps_are_taken_once(url: str) -> None:
    ledgers = await asyncio.gather(*(open_ledger(url) for _ in range(8)))
    ages = [await ledger.age() for ledger in ledgers]
    assert ages == sorted(ages)
    answers = await asyncio.gather(*(ledger.claim(request()) for ledger in ledgers))
    assert sum(isinstance(answer, Granted) for answer in answers) == 1
    await asyncio.gather(*(ledger.close() for ledger in ledgers))


async def test_a_ledger_of_the_first_version_is_brought_up_to_date_with_what_it_holds(url: str) -> None:
    ledger = await open_ledger(url)
    grant = await granted(ledger, request())
    await ledger.fail(OPERATION, grant.epoch, outcome())
    await ledger.close()
    await run(
        url,
        "DROP TABLE tool_pause",
        "DROP TABLE tool_turn",
        "DROP INDEX attempt_unsettled",
        "ALTER TABLE attempt DROP COLUMN started_boot, DROP COLUMN started_clock",
        "UPDATE redrive_version SET version_num = '0001'",
    )
    ledger = await open_ledger(url)
    node = await view(ledger)
    assert len(node.attempts) == 1
    assert node.since_first_send is not None
    assert isinstance(await ledger.claim(request(1)), Granted)
    await ledger.close()


async def test_a_ledger_of_a_newer_version_is_refused(url: str) -> None:
    await (await open_ledger(url)).close()
    await run(url, "UPDATE redrive_version SET version_num = '9999'")
    with pytest.raises(LedgerUnavailableError, match="9999"):
        await open_ledger(url)


async def test_another_programs_database_is_refused_and_left_as_it_was(url: str) -> None:
    await run(url, "CREATE TABLE node (id INTEGER)")
    with pytest.raises(LedgerUnavailableError, match='"node" already exists'):
        await open_ledger(url)
    async with await psycopg.AsyncConnection.connect(url) as connection:
        tables = await connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        assert await tables.fetchall() == [("node",)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("/ledger_", "/no_such_"), "does not exist"),
        (("redrive@", "nobody:hunter2@"), "nobody"),
        (("redrive@127.0.0.1:", "redrive:hunter2@127.0.0.1:1"), "invalid port"),
        (("redrive@", "redrive:hun%ter2@"), "percent-encoded"),
    ],
    ids=["no database", "no user", "no port", "no password"],
)
async def test_what_cannot_be_opened_says_why_and_keeps_the_password_to_itself(
    url: str, change: tuple[str, str], said: str
) -> None:
    with pytest.raises(LedgerUnavailableError, match=said) as caught:
        await open_ledger(url.replace(*change))
    assert "hunter2" not in str(caught.value)
    assert "hun%ter2" not in str(caught.value)
    assert "REDRIVE_LEDGER" in str(caught.value)


async def test_a_server_that_is_not_there_is_told_from_one_that_refuses(postgres: PostgresServer, url: str) -> None:
    with pytest.raises(LedgerUnavailableError, match="refused"):
        await open_ledger(url.replace(f":{postgres.port}/", ":1/"))


# What the database is set to cannot weaken the promises.


@pytest.mark.parametrize(
    "setting",
    ["default_transaction_isolation = 'serializable'", "synchronous_commit = off"],
)
async def test_the_databases_own_defaults_do_not_weaken_it(url: str, setting: str) -> None:
    await (await open_ledger(url)).close()
    await run(url, f"ALTER DATABASE {url.rpartition('/')[2]} SET {setting}")
    ledgers = [await open_ledger(url), await open_ledger(url)]
    answers = await asyncio.gather(*(ledgers[n % 2].claim(request()) for n in range(20)))
    assert sorted(type(answer).__name__ for answer in answers) == ["Busy"] * 19 + ["Granted"]
    await asyncio.gather(*(ledger.close() for ledger in ledgers))


async def test_a_message_with_a_character_that_it_cannot_keep_is_kept_without_it(ledger: Ledger) -> None:
    grant = await granted(ledger, request())
    how = outcome().model_copy(update={"message": "a\0b"})
    assert await ledger.fail(OPERATION, grant.epoch, how)
    assert await ledger.fail(OPERATION, grant.epoch, how)
    assert (await view(ledger)).attempts[0].message == "a␀b"


async def test_an_output_may_hold_any_character_that_json_has(ledger: Ledger) -> None:
    grant = await granted(ledger, request())
    assert await ledger.succeed(OPERATION, grant.epoch, {"\0": "\u0000 % :name \\ ' \U0001f600"})
    assert (await view(ledger)).output == {"\0": "\u0000 % :name \\ ' \U0001f600"}


# Connections that break.


async def test_connections_that_the_server_has_closed_are_not_noticed(url: str, ledger: Ledger) -> None:
    await asyncio.gather(*(ledger.age() for _ in range(20)))
    theirs = "datname = current_database() AND pid <> pg_backend_pid()"
    await run(url, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {theirs}")
    assert isinstance(await ledger.claim(request()), Granted)
    await asyncio.gather(*(ledger.age() for _ in range(20)))


async def test_a_worker_that_freezes_in_a_transaction_does_not_keep_its_node(url: str) -> None:
    """The server ends such a transaction by itself: so it was told by each of our connections."""
    said: dict[str, str] = {}

    class Listening(DatabaseClock):
        def read(self, connection: Any, /) -> Moment:
            for name in ("idle_in_transaction_session_timeout", "statement_timeout"):
                said[name] = connection.execute(f"SHOW {name}").fetchone()[name]
            return super().read(connection)

    ledger = await PostgresLedger.open(url, Listening())
    await ledger.age()
    await ledger.close()
    assert said == {"idle_in_transaction_session_timeout": "10s", "statement_timeout": "8s"}


async def test_whoever_was_locked_out_goes_on_when_the_lock_is_gone(url: str, ledger: Ledger) -> None:
    await ledger.claim(request())
    frozen = await psycopg.AsyncConnection.connect(url)
    await frozen.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, %s))", ("order-1042/charge", 0x5EDB1E))
    claim = asyncio.create_task(ledger.claim(request(1)))

    async def waits() -> bool:
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            waiting = await connection.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
            return await waiting.fetchone() == (1,)

    await eventually(waits, "the claim to wait for the lock")
    await frozen.close()
    assert isinstance(await claim, Busy)
