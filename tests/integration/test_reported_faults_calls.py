"""Faults of calls that users of comparable systems have met: what must hold here.

`docs/reported-faults.md` lists them.
"""

import asyncio
import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.client import WorkflowHandle

from activities.ledger.interface import LEASE
from activities.ledger.records import ClaimRequest, Granted
from contracts.canonical import content_hash
from contracts.dead_letters import Delivery
from contracts.failures import SideEffect
from contracts.identity import OperationId, node_workflow_id
from contracts.runs import NodeStatus
from contracts.tools import load_catalog
from tests.faults.deliveries import Consumer, details, dispatch
from tests.faults.lookup import pending_call
from tests.integration.outcome_table import opened_ledger, settled
from tests.lab import Bench
from tests.worker_process import WorkerProcess

Run = WorkflowHandle[Any, Any]

TURNED_AWAY = {"status": 503, "headers": {"retry-after": "2"}}


def node(name: str, tool: str, **fields: Any) -> dict[str, Any]:
    return {"id": name, "tool": tool, "input": {"amount": 1}, **fields}


def key_of(run: Run, name: str) -> str:
    """The key of a node's first operation."""
    return OperationId(run_id=run.id, node_id=name, logical_attempt=1).idempotency_key


async def result_of(bench: Bench, run: Run, name: str) -> dict[str, Any]:
    result: dict[str, Any] = await bench.client.get_workflow_handle(node_workflow_id(run.id, name)).result()
    return result


async def test_fifty_nodes_that_were_told_to_wait_an_hour_hold_no_slot(bench: Bench) -> None:
    names = [f"n{number}" for number in range(50)]
    # Each of them about itself: after a 429 the others would not even ask.
    await bench.tool("limited", [{"status": 423, "headers": {"retry-after": "3600"}}])
    await bench.tool("free")
    async with WorkerProcess.start(bench, slots=2):
        waiting = await bench.start(*(node(name, "limited") for name in names))
        await bench.tools.wait_for(bench.unique("limited"), calls=50, timeout=90)
        others = await bench.start(*(node(name, "free") for name in names[:10]))
        async with asyncio.timeout(60):
            assert (await others.result())["counts"] == {"SUCCEEDED": 10}
        in_half_an_hour = datetime.now(UTC) + timedelta(minutes=30)
        for call in await asyncio.gather(*(pending_call(bench, waiting, name) for name in names)):
            assert call is not None
            assert call.state == PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED
            assert call.next_attempt_schedule_time.ToDatetime(UTC) > in_half_an_hour
        assert {state.status for state in (await bench.status(waiting)).nodes.values()} == {NodeStatus.RUNNING}
        await waiting.terminate("seen")
    assert len(await bench.tools.calls(bench.unique("limited"))) == 50


async def test_a_crowd_that_was_turned_away_comes_back_after_the_floor_and_not_together(bench: Bench) -> None:
    names = [f"n{number}" for number in range(20)]
    floor = timedelta(seconds=2)
    # The default policy: jitter is a quarter of its first wait, and comes on top of what the tool asks for.
    await bench.tool("recovering", [*[TURNED_AWAY] * 20, {}], retry={})
    async with bench.worker(), opened_ledger(bench) as ledger:
        run = await bench.start(*(node(name, "recovering") for name in names))
        assert (await run.result())["counts"] == {"SUCCEEDED": 20}
        views = [await ledger.node(run.id, name) for name in names]
    calls: dict[str | None, list[datetime]] = {}
    for call in await bench.tools.calls(bench.unique("recovering")):
        calls.setdefault(call.key, []).append(call.at)
    assert set(calls) == {key_of(run, name) for name in names}
    for times in calls.values():
        assert all(later - earlier >= floor for earlier, later in itertools.pairwise(times))
    # On a slow machine one may come for the first time when another is back already; then it is turned away later.
    waits = [
        attempt.next_eligible_at - attempt.ended_at
        for view in views
        if view is not None
        for attempt in view.attempts
        if attempt.next_eligible_at is not None and attempt.ended_at is not None
    ]
    assert len(waits) == 20
    assert max(waits) <= floor + timedelta(seconds=5) / 4
    assert max(waits) - min(waits) > timedelta(milliseconds=200)
    assert len(set(waits)) > len(waits) / 2


def claim(bench: Bench, run_id: str, name: str) -> ClaimRequest:
    """What a worker asks the ledger for before it calls the tool of the node."""
    now = datetime.now(UTC)
    operation = OperationId(run_id=run_id, node_id=name, logical_attempt=1)
    return ClaimRequest(
        operation=operation,
        redrives=0,
        tool=name,
        fingerprint=load_catalog(bench.write()).tools[name].fingerprint,
        input={"amount": 1},
        input_hash=content_hash({"amount": 1}),
        scheduled_at=now,
        node_started_at=now,
        now=now,
        delivery=Delivery(
            workflow_id=node_workflow_id(run_id, name),
            workflow_run_id="-",
            activity_id="call_tool",
            task_queue=bench.queue,
            attempt=1,
        ),
        owner="gone",
        worker="gone",
        budgets={},
        risk=SideEffect.POSSIBLE,
    )


async def test_a_claim_whose_owner_is_gone_blocks_nobody_and_lets_nothing_through_unasked(bench: Bench) -> None:
    run_id = f"{bench.name}-stuck"
    await bench.tool("asked", [{}], reconcile=True)
    await bench.tool("blind", [{}])
    await bench.tool("keyed", [{}], dedupe=True, idempotency="key")
    await bench.tool("next")
    kinds = ("asked", "blind", "keyed")
    async with opened_ledger(bench) as ledger, httpx.AsyncClient(trust_env=False) as http:
        # Its owner has claimed and called, and is heard of no more.
        for kind in kinds:
            request = claim(bench, run_id, kind)
            assert isinstance(await ledger.claim(request), Granted)
            key = request.operation.idempotency_key
            await http.post(bench.tools.tool_url(bench.unique(kind)), headers={"idempotency-key": key}, json={})
        async with bench.worker():
            run = await bench.start(*(node(kind, kind) for kind in kinds), run_id=run_id)
            # Another operation of the same tools does not wait for it.
            free = await bench.start(*(node(kind, kind) for kind in kinds))
            assert (await free.result())["counts"] == {"SUCCEEDED": 3}
            entry = await bench.parked(run, "blind")
            await settled(bench, run)
            asked, keyed = [await result_of(bench, run, kind) for kind in ("asked", "keyed")]
            again = await ledger.node(run.id, "keyed")
    assert (entry.error.category, entry.error.code) == ("UNKNOWN_SIDE_EFFECT", "worker_lost")
    assert (entry.side_effect, entry.eligibility.refusals) == ("POSSIBLE", ["SIDE_EFFECT_UNRESOLVED"])
    assert (asked["source"], keyed["source"]) == ("RECONCILED", "EXECUTED")
    for kind, calls in (("asked", 1), ("blind", 1), ("keyed", 2)):
        made = [call.key for call in await bench.tools.calls(bench.unique(kind))]
        assert made.count(key_of(run, kind)) == calls, kind
        effects = [effect.key for effect in await bench.tools.effects(bench.unique(kind))]
        assert effects.count(key_of(run, kind)) == 1, kind
    assert again is not None
    lost, sent = again.attempts
    assert (lost.worker, lost.code) == ("gone", "worker_lost")
    assert sent.started_at - lost.started_at >= LEASE


async def test_a_call_that_outlasts_its_lease_by_far_is_never_sent_beside_itself(bench: Bench) -> None:
    await bench.tool("slow", [{"gate": bench.unique("gate")}], timeout="60s")
    time = asyncio.get_running_loop().time
    async with Consumer.of(bench) as owner, Consumer.of(bench) as other:
        work, now = dispatch(bench, "slow"), datetime.now(UTC)
        call = asyncio.create_task(owner.deliver(work, scheduled=now))
        await bench.tools.wait_for(bench.unique("slow"), calls=1)
        # What is waited for is time: a lease, and what a claim that was not renewed would have had left of it.
        until = time() + LEASE.total_seconds() + 1
        while time() < until:
            error = await other.refused(work, scheduled=now)
            assert (error.type, details(error).code) == ("TRANSIENT", "busy")
            await asyncio.sleep(0.5)
        await bench.tools.open_gate(bench.unique("gate"))
        answer = await call
    assert (answer.source, answer.attempt_count) == ("EXECUTED", 1)
    assert len(await bench.tools.calls(bench.unique("slow"))) == 1


async def test_a_key_inside_the_input_is_data_and_never_the_key(bench: Bench) -> None:
    invented = {"idempotency_key": "made-up", "Idempotency-Key": "made-up", "operation_id": "made-up", "amount": 1}
    lost = {"commit": True, "fault": "fin_after_read"}
    await bench.tool("pay", [{"status": 429}, {"status": 429}, {}])
    await bench.tool("asked", [lost], reconcile=True)
    await bench.tool("search", method="GET", effect="read")
    await bench.tool("placed", url=f"{bench.tools.tool_url(bench.unique('placed'))}?of={{idempotency_key}}")
    async with bench.worker():
        run = await bench.start(
            # Two different payments for which the same key was invented.
            *(node(name, "pay", input=invented) for name in ("one", "two")),
            *(node(name, name, input=invented) for name in ("asked", "search", "placed")),
        )
        assert (await run.result())["counts"] == {"SUCCEEDED": 5}
        assert (await result_of(bench, run, "asked"))["source"] == "RECONCILED"
    paid = await bench.tools.calls(bench.unique("pay"))
    assert {call.key for call in paid} == {key_of(run, "one"), key_of(run, "two")}
    assert [call.body for call in paid] == [invented] * 4
    assert {effect.key for effect in await bench.tools.effects(bench.unique("pay"))} == {call.key for call in paid}
    (question,) = await bench.tools.reconcile_calls(bench.unique("asked"))
    assert question.key == key_of(run, "asked")
    (search,) = await bench.tools.calls(bench.unique("search"))
    assert (search.key, search.query["idempotency_key"]) == (key_of(run, "search"), "made-up")
    (placed,) = await bench.tools.calls(bench.unique("placed"))
    assert (placed.key, placed.query) == (key_of(run, "placed"), {"of": "made-up"})
    assert placed.body == {name: value for name, value in invented.items() if name != "idempotency_key"}


async def test_a_call_lost_on_a_stale_connection_is_repeated_only_where_that_is_harmless(bench: Bench) -> None:
    """The server closes the kept connection just as the next request arrives, which it never reads."""
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "key": {"idempotency": "key"},
        "read": {"effect": "read"},
    }
    for kind, settings in kinds.items():
        await bench.tool(kind, [{"fault": "close_keepalive", "commit": kind != "read"}], **settings)
    runs: dict[str, list[Run]] = {kind: [] for kind in kinds}
    last: dict[str, Any] = {}

    async def until_one_meets_it(kind: str) -> None:
        # On a very slow machine the connection may be given up before it is used again.
        while len(runs[kind]) < 10:
            runs[kind].append(await bench.start(node("call", kind)))
            state = (await settled(bench, runs[kind][-1]))["call"]
            if state.status is NodeStatus.DEAD_LETTERED:
                last[kind] = await bench.parked(runs[kind][-1], "call")
                return
            if state.attempt_count > 1:
                last[kind] = state
                return

    async with bench.worker():
        await asyncio.gather(*map(until_one_meets_it, kinds))
    assert set(last) == set(kinds)
    for kind in ("key", "read"):
        assert (last[kind].status, last[kind].attempt_count) == ("SUCCEEDED", 2)
        # What was lost was never read: each run is one call that the tool knows of.
        keys = [call.key for call in await bench.tools.calls(bench.unique(kind))]
        assert keys == [key_of(run, "call") for run in runs[kind]]
    entry = last["plain"]
    assert (entry.error.category, entry.side_effect, len(entry.attempts)) == ("UNKNOWN_SIDE_EFFECT", "POSSIBLE", 1)
    assert entry.eligibility.refusals == ["SIDE_EFFECT_UNRESOLVED"]
    for found in (await bench.tools.calls(bench.unique("plain")), await bench.tools.effects(bench.unique("plain"))):
        assert [one.key for one in found] == [key_of(run, "call") for run in runs["plain"][:-1]]


async def test_a_connection_that_was_closed_while_it_was_idle_costs_no_attempt(bench: Bench) -> None:
    await bench.tool("pay", [{"fault": "close_idle", "commit": True}])
    async with bench.worker():
        for number in range(1, 4):
            run = await bench.start(node("call", "pay"))
            assert (await run.result())["counts"] == {"SUCCEEDED": 1}
            assert (await result_of(bench, run, "call"))["attempt_count"] == 1
            # Answered by the same server after it had closed the connection: now that is known here, too.
            assert len(await bench.tools.effects(bench.unique("pay"))) == number
