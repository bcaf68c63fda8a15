"""A PostgreSQL that is killed, restarted and frozen under a worker: nothing is sent without a record, nothing twice."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from activities.ledger import LedgerUnavailableError, open_ledger
from activities.ledger.records import Granted, Settled
from contracts.dispatch import FailureDetails
from contracts.failures import Code
from tests.faults.lookup import last_failure, operation, pending_call
from tests.lab import Bench
from tests.postgres import PostgresServer
from tests.unit.ledger_lab import OPERATION, granted, request
from tests.waiting import eventually
from workers.embedded import EmbeddedServer


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[PostgresServer]:
    """A server of the test's own, since it will be killed."""
    async with PostgresServer.running() as server:
        yield server


@pytest.fixture
async def on_postgres(bench: Bench, server: PostgresServer) -> Bench:
    """A bench whose ledger is in PostgreSQL."""
    bench.ledger = server.url(await server.database())
    return bench


async def test_what_was_committed_survives_a_killed_server(server: PostgresServer) -> None:
    ledger = await open_ledger(server.url(await server.database()))
    grant = await granted(ledger, request())
    assert await ledger.succeed(OPERATION, grant.epoch, "done")
    await server.kill()
    await server.start()
    answer = await ledger.claim(request(1))
    assert isinstance(answer, Settled)
    assert answer.output == "done"
    await ledger.close()


async def test_a_killed_server_is_told_of_and_used_again_as_soon_as_it_is_back(server: PostgresServer) -> None:
    ledger = await open_ledger(server.url(await server.database()))
    await server.kill()
    with pytest.raises(LedgerUnavailableError, match="nothing is sent without it"):
        await ledger.claim(request())
    await server.start()
    assert isinstance(await ledger.claim(request()), Granted)
    await ledger.close()


async def test_a_frozen_server_holds_up_neither_the_worker_nor_its_end(server: PostgresServer) -> None:
    ledger = await open_ledger(server.url(await server.database()))
    await ledger.age()
    server.freeze()
    try:
        answers = await asyncio.gather(*(ledger.claim(request()) for _ in range(15)), return_exceptions=True)
        assert {type(answer) for answer in answers} == {LedgerUnavailableError}
    finally:
        server.resume()
    claim = request()
    assert isinstance(await ledger.claim(claim), Granted), "a claim that was given up has been committed all the same"
    await ledger.close()


async def test_nothing_is_sent_while_the_ledger_is_away_and_the_run_goes_on_when_it_is_back(
    on_postgres: Bench, server: PostgresServer
) -> None:
    bench = on_postgres
    await bench.tool("pay", [{}])
    async with bench.worker():
        await server.kill()
        run = await bench.start({"id": "call", "tool": "pay"})

        async def turned_away() -> FailureDetails | None:
            call = await pending_call(bench, run, "call")
            return await last_failure(call) if call is not None else None

        failure = await eventually(turned_away, "a delivery that came back")
        assert (failure.code, failure.side_effect) == (Code.LEDGER_UNAVAILABLE, "NONE")
        assert not await bench.tools.calls(bench.unique("pay"))
        await server.start()
        await run.result()
    assert len(await bench.tools.effects(bench.unique("pay"))) == 1


async def test_an_answer_that_came_while_the_ledger_was_away_is_kept_until_it_is_back(
    on_postgres: Bench, server: PostgresServer
) -> None:
    bench = on_postgres
    gate = bench.unique("gate")
    await bench.tool("pay", [{"gate": gate}])
    async with bench.worker():
        run = await bench.start({"id": "call", "tool": "pay"})
        await bench.tools.wait_for(bench.unique("pay"), effects=1)
        await server.kill()
        await bench.tools.open_gate(gate)
        await server.start()
        await run.result()
        view = await operation(bench, run, "call")
    assert len(await bench.tools.calls(bench.unique("pay"))) == 1
    assert [attempt.code for attempt in view.attempts] == [None]


async def test_workers_with_connections_of_their_own_share_one_ledger(
    on_postgres: Bench, temporal: EmbeddedServer
) -> None:
    bench = on_postgres
    await bench.tool("pay", [{}], dedupe=False)
    async with bench.worker():
        runs = [await bench.start({"id": "call", "tool": "pay"}) for _ in range(10)]
        for run in runs:
            await run.result()
    assert len(await bench.tools.effects(bench.unique("pay"))) == 10
