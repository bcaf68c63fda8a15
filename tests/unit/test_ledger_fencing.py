"""Who may still commit: the epoch decides, never the lease; and what settles an uncertain effect."""

import pytest

from activities.ledger.interface import Ledger
from activities.ledger.records import Granted, Settled, Unsettled
from contracts.base import Json
from contracts.dispatch import Change, NodeEnd
from contracts.failures import Category, Code, Outcome, SideEffect
from contracts.runs import Source
from tests.unit.ledger_lab import (
    LOST_ANSWER,
    LOST_RESULT,
    NODE,
    OPERATION,
    REFUSED,
    RUN,
    SECOND,
    Backend,
    decision,
    failed,
    granted,
    moment,
    outcome,
    request,
    view,
)


async def assert_fenced(ledger: Ledger, epoch: int) -> None:
    """Whoever holds that epoch changes nothing any more."""
    before = await view(ledger)
    assert not await ledger.renew(OPERATION, epoch)
    assert not await ledger.succeed(OPERATION, epoch, "too late")
    assert not await ledger.fail(OPERATION, epoch, outcome(code="too_late"))
    after = await view(ledger)
    assert (after.end, after.side_effect, after.epoch) == (before.end, before.side_effect, before.epoch)
    assert (after.in_flight, len(after.attempts)) == (before.in_flight, len(before.attempts))


# The epoch.


async def test_a_worker_that_wakes_up_after_another_was_granted_changes_nothing(
    backend: Backend, ledger: Ledger
) -> None:
    first = await granted(ledger, request(0))
    backend.clock.expire()
    second = await granted(ledger, request(1, despite_epoch=first.epoch))
    await assert_fenced(ledger, first.epoch)
    assert await ledger.renew(OPERATION, second.epoch)
    assert await ledger.succeed(OPERATION, second.epoch, "the second's")
    answer = await ledger.claim(request(2))
    assert isinstance(answer, Settled)
    assert answer.output == "the second's"


async def test_what_a_late_worker_brings_is_kept_for_people(backend: Backend, ledger: Ledger) -> None:
    first = await granted(ledger, request(0))
    backend.clock.expire()
    await granted(ledger, request(1, despite_epoch=first.epoch))
    await ledger.succeed(OPERATION, first.epoch, "too late")
    late, running = (await view(ledger)).attempts
    assert (late.code, late.side_effect) == (Code.FENCED, SideEffect.POSSIBLE)
    assert late.ended_at is not None
    assert "succeeded" in (late.message or "")
    assert (running.ended_at, running.code) == (None, None)
    # It counts as a failure, as an attempt without an end does.
    backend.clock.expire()
    answer = await ledger.claim(request(2))
    assert isinstance(answer, Unsettled)
    assert [attempt.attempt for attempt in answer.attempts] == [1, 2]


@pytest.mark.parametrize("how", ["succeed", "fail"])
async def test_a_lease_that_ran_out_alone_does_not_fence(backend: Backend, ledger: Ledger, how: str) -> None:
    grant = await granted(ledger, request(0))
    backend.clock.expire()
    if how == "succeed":
        assert await ledger.succeed(OPERATION, grant.epoch, "slow, but first")
        assert (await view(ledger)).end is NodeEnd.SUCCEEDED
    else:
        assert await ledger.fail(OPERATION, grant.epoch, REFUSED)
        assert (await view(ledger)).side_effect is SideEffect.NONE


async def test_a_lease_that_ran_out_stays_so_for_others_may_have_relied_on_it(backend: Backend, ledger: Ledger) -> None:
    grant = await granted(ledger, request(0))
    backend.clock.expire()
    assert not await ledger.renew(OPERATION, grant.epoch)
    assert not (await view(ledger)).in_flight
    assert await ledger.succeed(OPERATION, grant.epoch, "an answer that came is taken, as long as nobody took over")


async def test_the_tools_word_on_an_operation_that_is_not_the_current_one_ends_no_node(ledger: Ledger) -> None:
    await failed(ledger, request(0), LOST_ANSWER)
    await ledger.decide(decision(Change.REDRIVE, new_operation=True, accepts_risk=True), moment(1))
    assert not await ledger.settle_committed(OPERATION, 1, "of the first operation")
    node = await view(ledger)
    assert (node.end, node.output) == (None, None)
    first = await ledger.operation(str(OPERATION))
    assert first is not None
    assert first.side_effect is SideEffect.NONE
    assert isinstance(await ledger.claim(request(2, operation=SECOND, redrives=1)), Granted)


@pytest.mark.parametrize("how", ["succeed", "fail"])
async def test_an_attempt_ends_once(ledger: Ledger, how: str) -> None:
    grant = await granted(ledger, request(0))
    if how == "succeed":
        assert await ledger.succeed(OPERATION, grant.epoch, "first")
    else:
        assert await ledger.fail(OPERATION, grant.epoch, REFUSED)
    before = await view(ledger)
    await assert_fenced(ledger, grant.epoch)
    assert (await view(ledger)).attempts == before.attempts


@pytest.mark.parametrize("operation", [OPERATION, SECOND], ids=["claimed", "unknown"])
@pytest.mark.parametrize("epoch", [-1, 0, 2, 10**9])
async def test_an_epoch_that_was_never_granted_commits_nothing(ledger: Ledger, operation: object, epoch: int) -> None:
    await granted(ledger, request(0))
    assert not await ledger.renew(SECOND if operation == SECOND else OPERATION, epoch)
    assert not await ledger.succeed(SECOND if operation == SECOND else OPERATION, epoch, "x")
    assert not await ledger.fail(SECOND if operation == SECOND else OPERATION, epoch, REFUSED)
    node = await view(ledger)
    assert (node.end, node.in_flight, len(node.attempts)) == (None, True, 1)


@pytest.mark.parametrize("change", list(Change))
async def test_a_decision_fences_whoever_was_at_work(ledger: Ledger, change: Change) -> None:
    grant = await granted(ledger, request(0))
    await ledger.decide(decision(change), moment(1))
    await assert_fenced(ledger, grant.epoch)


async def test_what_was_in_flight_when_the_node_was_cancelled_is_recorded(ledger: Ledger) -> None:
    grant = await granted(ledger, request(0))
    await ledger.cancel(RUN, [NODE], moment(1))
    assert await ledger.renew(OPERATION, grant.epoch)
    assert await ledger.succeed(OPERATION, grant.epoch, "it happened")
    answer = await ledger.claim(request(2))
    assert isinstance(answer, Settled)
    assert (answer.end, answer.output) == (NodeEnd.SUCCEEDED, "it happened")


async def test_an_uncertain_effect_survives_a_cancel(backend: Backend, ledger: Ledger) -> None:
    await granted(ledger, request(0))
    await ledger.cancel(RUN, [NODE], moment(1))
    backend.clock.expire()
    answer = await ledger.claim(request(2))
    assert isinstance(answer, Settled)
    assert answer.end is NodeEnd.CANCELLED
    node = await view(ledger)
    assert (node.cancelled, node.end, node.side_effect) == (True, None, SideEffect.POSSIBLE)


# What settles.


@pytest.mark.parametrize("how", [LOST_ANSWER, LOST_RESULT, None], ids=["answer lost", "result lost", "worker lost"])
async def test_what_the_tool_calls_absent_may_be_sent_again(
    backend: Backend, ledger: Ledger, how: Outcome | None
) -> None:
    grant = await granted(ledger, request(0))
    if how is not None:
        await ledger.fail(OPERATION, grant.epoch, how)
    backend.clock.expire()
    await ledger.settle_absent(OPERATION, grant.epoch)
    node = await view(ledger)
    assert (node.side_effect, node.since_last_send) == (SideEffect.NONE, None)
    again = await granted(ledger, request(1))
    assert again.epoch > grant.epoch
    assert again.attempt == 2


async def test_whoever_was_called_absent_is_fenced(backend: Backend, ledger: Ledger) -> None:
    grant = await granted(ledger, request(0))
    backend.clock.expire()
    await ledger.settle_absent(OPERATION, grant.epoch)
    await assert_fenced(ledger, grant.epoch)


async def test_absent_says_nothing_of_an_attempt_that_came_after_the_question(ledger: Ledger) -> None:
    asked_about = await failed(ledger, request(0), LOST_ANSWER)
    newer = await failed(ledger, request(1, despite_epoch=asked_about.epoch), LOST_ANSWER)
    await ledger.settle_absent(OPERATION, asked_about.epoch)
    answer = await ledger.claim(request(2))
    assert isinstance(answer, Unsettled)
    assert [attempt.attempt for attempt in answer.attempts] == [newer.attempt]


async def test_absent_does_not_take_the_answer_from_an_attempt_that_came_after_the_question(ledger: Ledger) -> None:
    asked_about = await failed(ledger, request(0), LOST_ANSWER)
    newer = await granted(ledger, request(1, despite_epoch=asked_about.epoch))
    await ledger.settle_absent(OPERATION, asked_about.epoch)
    assert await ledger.renew(OPERATION, newer.epoch)
    assert await ledger.succeed(OPERATION, newer.epoch, "done")
    assert isinstance(await ledger.claim(request(2)), Settled)


async def test_epochs_only_grow(backend: Backend, ledger: Ledger) -> None:
    seen = [(await failed(ledger, request(0), LOST_ANSWER)).epoch]
    await ledger.settle_absent(OPERATION, seen[-1])
    seen.append((await granted(ledger, request(1))).epoch)
    await ledger.decide(decision(Change.REDRIVE), moment(2))
    seen.append((await granted(ledger, request(3, redrives=1, despite_epoch=seen[-1]))).epoch)
    backend.clock.restart()
    seen.append((await granted(ledger, request(4, redrives=1, despite_epoch=seen[-1]))).epoch)
    assert seen == sorted(set(seen))


@pytest.mark.parametrize("output", [{"id": "c-1"}, None])
async def test_what_the_tool_calls_committed_ends_the_node(ledger: Ledger, output: Json) -> None:
    grant = await failed(ledger, request(0), LOST_ANSWER)
    assert await ledger.settle_committed(OPERATION, grant.epoch, output)
    answer = await ledger.claim(request(1))
    assert isinstance(answer, Settled)
    assert (answer.end, answer.source, answer.output) == (NodeEnd.SUCCEEDED, Source.RECONCILED, output)
    node = await view(ledger)
    assert (node.end, node.side_effect) == (NodeEnd.SUCCEEDED, SideEffect.NONE)


async def test_whoever_was_called_committed_is_fenced(backend: Backend, ledger: Ledger) -> None:
    grant = await granted(ledger, request(0))
    backend.clock.expire()
    await ledger.settle_committed(OPERATION, grant.epoch, "the tool's")
    await assert_fenced(ledger, grant.epoch)
    answer = await ledger.claim(request(1))
    assert isinstance(answer, Settled)
    assert answer.output == "the tool's"


@pytest.mark.parametrize("end", [Change.RESOLVE, Change.DISCARD])
async def test_what_a_person_ended_no_late_reconcile_changes(ledger: Ledger, end: Change) -> None:
    grant = await failed(ledger, request(0), LOST_ANSWER)
    await ledger.decide(decision(end, output="by hand"), moment(1))
    before = await ledger.claim(request(2))
    assert not await ledger.settle_committed(OPERATION, grant.epoch, "the tool's")
    await ledger.settle_absent(OPERATION, grant.epoch)
    assert await ledger.claim(request(2)) == before


async def test_a_result_that_was_committed_is_not_replaced_by_a_second_reconcile(ledger: Ledger) -> None:
    grant = await failed(ledger, request(0), LOST_ANSWER)
    await ledger.settle_committed(OPERATION, grant.epoch, "first")
    await ledger.settle_committed(OPERATION, grant.epoch, "second")
    answer = await ledger.claim(request(1))
    assert isinstance(answer, Settled)
    assert answer.output == "first"


async def test_an_effect_without_a_usable_result_is_confirmed_and_the_node_goes_on_waiting(ledger: Ledger) -> None:
    await failed(ledger, request(0), LOST_ANSWER)
    await ledger.confirm(OPERATION)
    node = await view(ledger)
    assert (node.side_effect, node.end) == (SideEffect.CONFIRMED, None)
    answer = await ledger.claim(request(1))
    assert isinstance(answer, Unsettled)
    assert (answer.side_effect, answer.resendable) == (SideEffect.CONFIRMED, False)


async def test_only_what_may_have_happened_is_confirmed(ledger: Ledger) -> None:
    await failed(ledger, request(0), REFUSED)
    await ledger.confirm(OPERATION)
    assert (await view(ledger)).side_effect is SideEffect.NONE
    assert isinstance(await ledger.claim(request(1)), Granted)


async def test_nothing_that_is_unknown_is_settled_or_confirmed(ledger: Ledger) -> None:
    await ledger.settle_absent(OPERATION, 5)
    await ledger.settle_committed(OPERATION, 5, "x")
    await ledger.confirm(OPERATION)
    assert await ledger.node(RUN, NODE) is None
    assert await ledger.operation(str(OPERATION)) is None


async def test_a_success_settles_every_earlier_attempt(ledger: Ledger) -> None:
    lost = await failed(ledger, request(0), LOST_ANSWER)
    grant = await granted(ledger, request(1, despite_epoch=lost.epoch))
    await ledger.succeed(OPERATION, grant.epoch, "done")
    assert (await view(ledger)).side_effect is SideEffect.NONE


async def test_a_node_counts_what_it_had_to_reconcile_since_the_last_redrive(backend: Backend, ledger: Ledger) -> None:
    for at in range(2):
        grant = await failed(ledger, request(at), LOST_ANSWER)
        await ledger.settle_absent(OPERATION, grant.epoch)
    grant = await granted(ledger, request(2))
    backend.clock.expire()
    await ledger.settle_absent(OPERATION, grant.epoch)
    await failed(ledger, request(3), outcome(Category.TRANSIENT))
    assert (await view(ledger)).unknown_failures == 3
    await ledger.decide(decision(Change.REDRIVE), moment(4))
    assert (await view(ledger)).unknown_failures == 0
