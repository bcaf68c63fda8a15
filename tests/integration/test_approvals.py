"""Approvals: nothing is sent without one that holds, and what was sent under one counts."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from temporalio.client import WorkflowHandle

from contracts.dead_letters import Entry
from tests.lab import Bench
from tests.waiting import eventually

Run = WorkflowHandle[Any, Any]

PATIENT: list[dict[str, Any]] = [{"status": 503, "headers": {"retry-after": "3600"}}]


def approval(approval_id: str = "apr-7", **expires: float) -> dict[str, Any]:
    """One that holds for a day, unless it is said for how long."""
    expires_at = datetime.now(UTC) + timedelta(**(expires or {"days": 1}))
    return {"id": approval_id, "granted_by": "alice", "expires_at": expires_at.isoformat()}


async def revoke(run: Run, approval_id: str = "apr-7") -> None:
    await run.signal("revoke_approval", {"approval_id": approval_id, "revoked_by": "carol", "reason": "too dear"})


async def expired(approval_: Mapping[str, Any]) -> None:
    at = datetime.fromisoformat(approval_["expires_at"])
    await eventually(lambda: datetime.now(UTC) > at, "the approval to expire")


def pay(tool: str, **more: Any) -> dict[str, Any]:
    return {"id": "pay", "tool": tool, "input": {"amount": 1}} | more


async def attempts_of(bench: Bench, tool: str) -> int:
    return len(await bench.tools.calls(bench.unique(tool)))


def assert_refused(entry: Entry, code: str, refusal: str) -> None:
    assert (entry.error.category, entry.error.code) == ("PERMISSION", code)
    assert entry.error.http_status is None
    assert entry.side_effect == "NONE"
    assert entry.eligibility.refusals == [refusal]


async def test_a_tool_that_requires_an_approval_is_not_called_without_one_that_holds(bench: Bench) -> None:
    for name in ("without", "expired", "valid", "endless"):
        await bench.tool(name, [{}], approval="required")
    await bench.tool("optional", [{}])
    async with bench.worker():
        good = [
            await bench.start(pay("valid", approval=approval())),
            await bench.start(pay("endless", approval={"id": "apr-8", "granted_by": "alice"})),
            await bench.start(pay("optional")),
        ]
        without = await bench.start(pay("without"))
        late = await bench.start(pay("expired", approval=approval(hours=-1)))
        assert_refused(await bench.parked(without, "pay"), "approval_required", "APPROVAL_VOID")
        entry = await bench.parked(late, "pay")
        assert_refused(entry, "approval_expired", "APPROVAL_EXPIRED")
        assert "apr-7" in entry.error.message
        for run in good:
            assert (await run.result())["status"] == "SUCCEEDED"
        assert await attempts_of(bench, "without") == await attempts_of(bench, "expired") == 0

        for run in (without, late):
            assert (await bench.decide(run, "pay", "redrive", approval=approval("apr-9"))).outcome == "ACCEPTED"
            assert (await run.result())["status"] == "SUCCEEDED"
        for name in bench.catalog:
            assert await attempts_of(bench, name) == 1


async def test_an_approval_that_ends_between_attempts_ends_them(bench: Bench) -> None:
    waits = [{"status": 503, "headers": {"retry-after": "2"}}, {}]
    await bench.tool("expires", waits)
    await bench.tool("revoked", PATIENT)
    async with bench.worker():
        short = approval("short", seconds=1.5)
        expires = await bench.start(pay("expires", approval=short))
        revoked = await bench.start(pay("revoked", approval=approval()))
        await bench.tools.wait_for(bench.unique("revoked"), calls=1)

        async def waits_for_its_turn() -> bool:
            pending = (await bench.client.get_workflow_handle(f"{revoked.id}/pay").describe()).raw_description
            return any(activity.HasField("next_attempt_schedule_time") for activity in pending.pending_activities)

        await eventually(waits_for_its_turn, "the next attempt to be scheduled")
        await revoke(revoked)
        # At once, not when its time has come.
        entry = await bench.parked(revoked, "pay")
        assert_refused(entry, "approval_revoked", "APPROVAL_REVOKED")
        assert "carol" in entry.error.message
        assert [attempt.code for attempt in entry.attempts] == ["http_503"]
        assert await attempts_of(bench, "revoked") == 1

        entry = await bench.parked(expires, "pay")
        if await attempts_of(bench, "expires"):
            assert [attempt.code for attempt in entry.attempts] == ["http_503", "approval_expired"]
        assert_refused(entry, "approval_expired", "APPROVAL_EXPIRED")
        assert await attempts_of(bench, "expires") <= 1


async def test_an_approval_revoked_before_its_node_starts_sends_nothing(bench: Bench) -> None:
    gate = f"{bench.name}-gate"
    await bench.tool("first", [{"gate": gate}], timeout="60s")
    await bench.tool("pay", [{}])
    async with bench.worker():
        run = await bench.start(
            {"id": "first", "tool": "first"}, pay("pay", after=["first"], approval=approval()),
        )  # fmt: skip
        await bench.tools.wait_for(bench.unique("first"), calls=1)
        await revoke(run, "another")
        await revoke(run)
        await bench.tools.open_gate(gate)
        entry = await bench.parked(run, "pay")
        assert_refused(entry, "approval_revoked", "APPROVAL_REVOKED")
        assert await attempts_of(bench, "pay") == 0
        # The same one again is no new one.
        again = await bench.decide(run, "pay", "redrive", approval=approval())
        assert (again.outcome, again.refusals) == ("REFUSED", ["APPROVAL_REVOKED"])
        assert (await bench.decide(run, "pay", "redrive", approval=approval("apr-8"))).outcome == "ACCEPTED"
        assert (await run.result())["status"] == "SUCCEEDED"
        assert await attempts_of(bench, "pay") == 1


async def test_what_is_in_flight_when_its_approval_is_revoked_counts(bench: Bench) -> None:
    gate = f"{bench.name}-gate"
    await bench.tool("works", [{"gate": gate}], timeout="60s")
    await bench.tool("fails", [{"status": 429, "gate": gate}, {}], timeout="60s")
    async with bench.worker():
        works = await bench.start(pay("works", approval=approval()))
        fails = await bench.start(pay("fails", approval=approval()))
        for run, name in ((works, "works"), (fails, "fails")):
            await bench.tools.wait_for(bench.unique(name), calls=1)
            await revoke(run)

            async def cancel_requested(node: str = f"{run.id}/pay") -> bool:
                pending = (await bench.client.get_workflow_handle(node).describe()).raw_description.pending_activities
                return any(activity.state == 3 for activity in pending)  # PENDING_ACTIVITY_STATE_CANCEL_REQUESTED

            await eventually(cancel_requested, "the revocation to reach the call")
        await bench.tools.open_gate(gate)
        assert (await works.result())["status"] == "SUCCEEDED"
        entry = await bench.parked(fails, "pay")
        assert_refused(entry, "approval_revoked", "APPROVAL_REVOKED")
        assert [attempt.code for attempt in entry.attempts] == ["http_429"]
        for name in ("works", "fails"):
            assert await attempts_of(bench, name) == 1


async def test_an_approval_that_ends_while_a_person_is_waited_for_is_shown_and_stands_in_the_way(bench: Bench) -> None:
    await bench.tool("expires", [{"status": 403}])
    await bench.tool("revoked", [{"status": 403}, {}])
    async with bench.worker():
        short = approval("short", seconds=3)
        cases = {
            "APPROVAL_EXPIRED": await bench.start(pay("expires", approval=short)),
            "APPROVAL_REVOKED": await bench.start(pay("revoked", approval=approval())),
        }
        for run in cases.values():
            await bench.parked(run, "pay")
        # However late the first call was: the next one works.
        await bench.tools.script(bench.unique("expires"), [{}])
        await revoke(cases["APPROVAL_REVOKED"])

        async def shown() -> bool:
            return bool((await bench.entry(cases["APPROVAL_REVOKED"], "pay")).eligibility.refusals)

        await eventually(shown, "the revocation to be shown without being asked for")
        await expired(short)
        for refusal, run in cases.items():
            record = await bench.decide(run, "pay", "redrive")
            assert (record.outcome, record.refusals) == ("REFUSED", [refusal])
            accepted = await bench.decide(run, "pay", "redrive", approval=approval("fresh"))
            assert accepted.outcome == "ACCEPTED"
            assert (await run.result())["status"] == "SUCCEEDED"


async def test_an_approval_covers_one_content_whatever_the_order_of_its_keys(bench: Bench) -> None:
    refused = {"status": 403}
    await bench.tool("pay", [refused, refused, {}], approval="required")
    given = {"amount": 1, "to": {"name": "x", "iban": "y"}, "lines": [1, 2]}
    reordered = {"lines": [1, 2], "to": {"iban": "y", "name": "x"}, "amount": 1}
    others = [{**given, "amount": 2}, {**given, "lines": [2, 1]}, {**given, "more": None}]
    async with bench.worker():
        run = await bench.start({"id": "pay", "tool": "pay", "input": given, "approval": approval()})
        await bench.parked(run, "pay")
        for other in others:
            record = await bench.decide(run, "pay", "redrive", input=other)
            assert (record.outcome, record.refusals) == ("REFUSED", ["APPROVAL_VOID"])
        assert (await bench.decide(run, "pay", "redrive", input=reordered)).outcome == "ACCEPTED"
        await bench.parked(run, "pay", redrives=1)

        # A new one is bound to the input that is sent with it.
        record = await bench.decide(run, "pay", "redrive", input=others[0], approval=approval("apr-8"))
        assert record.outcome == "ACCEPTED"
        assert (await run.result())["status"] == "SUCCEEDED"
    calls = await bench.tools.calls(bench.unique("pay"))
    assert [call.body for call in calls] == [given, given, others[0]]
    assert len({call.key for call in calls}) == 3


async def test_an_approval_that_a_redrive_brought_can_be_revoked_like_any_other(bench: Bench) -> None:
    await bench.tool("parked", [{"status": 403}], approval="required")
    await bench.tool("waiting", PATIENT, approval="required")
    async with bench.worker():
        runs = {name: await bench.start(pay(name)) for name in ("parked", "waiting")}
        for run in runs.values():
            await bench.parked(run, "pay")
            record = await bench.decide(run, "pay", "redrive", approval=approval("brought"))
            assert record.outcome == "ACCEPTED"
        entry = await bench.parked(runs["parked"], "pay", redrives=1)
        assert entry.eligibility.redrivable
        await bench.tools.wait_for(bench.unique("waiting"), calls=1)
        await asyncio.gather(*(revoke(run, "brought") for run in runs.values()))
        assert_refused(await bench.parked(runs["waiting"], "pay", redrives=1), "approval_revoked", "APPROVAL_REVOKED")

        async def shown() -> bool:
            return (await bench.entry(runs["parked"], "pay")).eligibility.refusals == ["APPROVAL_REVOKED"]

        await eventually(shown, "the revocation to be shown")
        record = await bench.decide(runs["parked"], "pay", "redrive")
        assert (record.outcome, record.refusals) == ("REFUSED", ["APPROVAL_REVOKED"])
        assert await attempts_of(bench, "parked") == await attempts_of(bench, "waiting") == 1
