"""The same message more than once: at once, again after its end, too late, and without ever getting anywhere."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError

from contracts.dispatch import CallResult, FailureDetails
from tests.faults.deliveries import Consumer, details, dispatch
from tests.faults.lock import locked
from tests.lab import Bench

pytestmark = pytest.mark.workflow_mode("they start no runs")

_KINDS: Mapping[str, dict[str, Any]] = {
    "key": {"dedupe": True, "idempotency": "key"},
    "blind": {},
    "asked": {"reconcile": True},
    "read": {"effect": "read"},
}
"""Every kind of tool: none of them may be called twice because a message came twice."""


async def test_of_three_deliveries_at_once_one_owner_sends_and_the_others_are_turned_away(bench: Bench) -> None:
    for kind, settings in _KINDS.items():
        await bench.tool(kind, [{"gate": bench.unique("gate")}], **settings)
    now = datetime.now(UTC)
    async with AsyncExitStack() as stack:
        consumers = [await stack.enter_async_context(Consumer.of(bench)) for _ in range(3)]

        async def three_at_once(kind: str) -> None:
            work = dispatch(bench, kind)
            deliveries = [asyncio.create_task(consumer.deliver(work, scheduled=now)) for consumer in consumers]
            pending = set(deliveries)
            turned_away: list[ApplicationError] = []
            while len(pending) > 1:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED, timeout=30)
                assert done, f"{len(pending)} deliveries of {kind} went on"
                for task in done:
                    error = task.exception()
                    assert isinstance(error, ApplicationError), error or task.result()
                    turned_away.append(error)
            for error in turned_away:
                assert (error.type, details(error).code, error.non_retryable) == ("TRANSIENT", "busy", False)
                assert error.next_retry_delay is not None
                assert timedelta(0) < error.next_retry_delay <= timedelta(seconds=30)
            await bench.tools.open_gate(bench.unique("gate"))
            owner = await pending.pop()
            assert (owner.source, owner.attempt_count) == ("EXECUTED", 1)
            again = [await consumer.deliver(work, scheduled=now, attempt=2) for consumer in consumers]
            assert [(answer.source, answer.output, answer.attempt_count) for answer in again] == [
                ("REPLAYED", owner.output, 1)
            ] * 3
            assert len(await bench.tools.calls(bench.unique(kind))) == 1
            assert len(await bench.tools.effects(bench.unique(kind))) == 1

        async with asyncio.TaskGroup() as group:
            for kind in _KINDS:
                group.create_task(three_at_once(kind))


async def test_a_first_attempt_made_by_two_workers_at_once_is_made_once_and_taken_up_where_it_goes_on(
    bench: Bench,
) -> None:
    """As where a worker freezes within a workflow task: another has the task then, and makes the same attempt."""
    await bench.tool("slow", [{"gate": bench.unique("gate")}])
    async with Consumer.of(bench) as one, Consumer.of(bench) as other:
        work = dispatch(bench, "slow").model_copy(update={"first_attempt": True})
        assert await one.deliver_at_once(work) is None
        assert await other.deliver_at_once(work) is None
        now = datetime.now(UTC)
        turned_away = await other.refused(work, scheduled=now)
        assert (details(turned_away).code, turned_away.non_retryable) == ("busy", False)
        await bench.tools.open_gate(bench.unique("gate"))
        answer = await one.deliver(work, scheduled=now)
        assert (answer.source, answer.attempt_count) == ("EXECUTED", 1)
        again = await other.deliver(work, scheduled=now, attempt=2)
        assert (again.source, again.output) == ("REPLAYED", answer.output)
    assert len(await bench.tools.calls(bench.unique("slow"))) == 1


async def test_a_first_attempt_that_waits_for_a_free_slot_is_left_to_the_server_and_not_made_behind_its_back(
    bench: Bench,
) -> None:
    await bench.tool("slow", [{"gate": bench.unique("gate")}, {}], concurrency=1)
    async with Consumer.of(bench) as consumer:
        first, second = (dispatch(bench, "slow", f"{bench.name}-{number}") for number in (1, 2))
        assert await consumer.deliver_at_once(first) is None
        assert await consumer.deliver_at_once(second) is None
        await bench.tools.open_gate(bench.unique("gate"))
        assert (
            await consumer.deliver(first.model_copy(update={"first_attempt": True}), scheduled=datetime.now(UTC))
        ).end
        assert await consumer.ledger.operation(str(second.operation)) is None
    assert len(await bench.tools.calls(bench.unique("slow"))) == 1


async def test_a_first_attempt_at_what_has_been_redriven_since_is_left_to_the_node(bench: Bench) -> None:
    await bench.tool("look", [{"status": 403}], effect="read")
    async with Consumer.of(bench) as consumer:
        work = dispatch(bench, "look")
        await consumer.refused(work.model_copy(update={"redrives": 1}), scheduled=datetime.now(UTC))
        answer = await consumer.deliver_at_once(work)
    assert isinstance(answer, FailureDetails)
    assert (answer.code, answer.side_effect, answer.attempt) == ("busy", "NONE", 0)
    assert answer.next_eligible_at is not None
    assert len(await bench.tools.calls(bench.unique("look"))) == 1


async def test_an_operation_that_succeeded_is_answered_and_not_called_however_often_it_comes(bench: Bench) -> None:
    for kind, settings in _KINDS.items():
        await bench.tool(kind, [{}], **settings)
    begin = datetime.now(UTC)
    first: dict[str, CallResult] = {}
    async with Consumer.of(bench) as consumer:
        works = {kind: dispatch(bench, kind) for kind in _KINDS}
        for kind, work in works.items():
            first[kind] = await consumer.deliver(work, scheduled=begin)
            assert first[kind].source == "EXECUTED"
    async with Consumer.of(bench) as consumer:  # a worker that knows nothing but the ledger
        for kind, work in works.items():
            # Redelivered once more, at the same time and later; as a new activity, or with attempts from the start.
            later = [timedelta(0), timedelta(seconds=1), timedelta(hours=1)]
            again = await asyncio.gather(
                *[
                    consumer.deliver(work, scheduled=begin + wait, attempt=number)
                    for number, wait in enumerate(later, 1)
                ]
            )
            for answer in again:
                assert answer == first[kind].model_copy(update={"source": "REPLAYED"})
            assert len(await bench.tools.calls(bench.unique(kind))) == 1


async def test_a_delivery_older_than_one_already_seen_sends_nothing_and_is_nobodys(bench: Bench) -> None:
    await bench.tool("charge", [{"status": 503, "headers": {"retry-after": "0"}}, {}])
    now = datetime.now(UTC)
    async with Consumer.of(bench) as consumer:
        work = dispatch(bench, "charge")
        failed = await consumer.refused(work, scheduled=now)
        assert (failed.type, failed.non_retryable) == ("DEPENDENCY_DOWN", False)
        # Attempt numbers start again after a reset: an old delivery may well carry a higher one.
        late = await consumer.refused(work, scheduled=now - timedelta(milliseconds=1), attempt=9)
        assert (late.type, late.non_retryable) == ("Stale", False)
        assert len(await bench.tools.calls(bench.unique("charge"))) == 1
        answer = await consumer.deliver(work, scheduled=now + timedelta(seconds=1), attempt=2)
        assert (answer.source, answer.attempt_count) == ("EXECUTED", 2)


async def test_one_key_never_carries_two_inputs(bench: Bench) -> None:
    await bench.tool("charge", [{"status": 503, "headers": {"retry-after": "0"}}, {}])
    now = datetime.now(UTC)
    async with Consumer.of(bench) as consumer:
        work = dispatch(bench, "charge")
        await consumer.refused(work, scheduled=now)
        other = await consumer.refused(work.model_copy(update={"input": {"amount": 2}}), scheduled=now)
    assert (other.type, details(other).code, other.non_retryable) == ("INVALID_INPUT", "input_mismatch", True)
    assert [call.body for call in await bench.tools.calls(bench.unique("charge"))] == [{"amount": 1}]


async def test_twenty_deliveries_in_a_row_that_never_got_an_attempt_are_told_to_a_person(bench: Bench) -> None:
    await bench.tool("charge", [{}])
    now = datetime.now(UTC)
    cases = [  # Temporal's number, that of the last delivery that got an attempt, and whether a person is told
        (1, None, False),
        (19, None, False),
        (20, None, True),
        (24, 5, False),
        (25, 5, True),
        (400, 399, False),
        # Numbers start again after a reset; the heartbeat is from before it.
        (3, 50, False),
    ]

    async def deliver(consumer: Consumer, attempt: int, attempted: int | None) -> ApplicationError:
        work = dispatch(bench, "charge", f"{bench.name}-{attempt}")
        return await consumer.refused(work, scheduled=now, attempt=attempt, attempted=attempted)

    async with AsyncExitStack() as stack:
        consumers = [await stack.enter_async_context(Consumer.of(bench)) for _ in cases]
        async with locked(bench.folder / "ledger.db"):
            errors = await asyncio.gather(
                *[deliver(consumer, *case[:2]) for consumer, case in zip(consumers, cases, strict=True)]
            )
        for error, (attempt, _, told) in zip(errors, cases, strict=True):
            envelope = details(error)
            assert (error.type, envelope.code) == ("DEPENDENCY_DOWN", "ledger_unavailable"), attempt
            assert (envelope.side_effect, envelope.attempt) == ("NONE", 0), attempt
            assert error.non_retryable is told, attempt
            if told:
                assert envelope.next_eligible_at is None
            else:
                assert error.next_retry_delay is not None
                assert timedelta(0) < error.next_retry_delay <= timedelta(seconds=30)
        assert not await bench.tools.calls(bench.unique("charge"))
        # Nothing of it counts once the ledger is back.
        answer = await consumers[0].deliver(
            dispatch(bench, "charge", f"{bench.name}-1"), scheduled=now + timedelta(seconds=1), attempt=2
        )
        assert (answer.source, answer.attempt_count) == ("EXECUTED", 1)
