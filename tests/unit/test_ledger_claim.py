"""Every answer of `claim`, on every database."""

from datetime import UTC, datetime, timedelta

import pytest

from activities.ledger.interface import LEASE, RENEW_EVERY, Ledger
from activities.ledger.records import Busy, Granted, Mismatch, OperationState, Settled, Spent, Stale, Unsettled
from contracts.base import Json
from contracts.dispatch import Change, NodeEnd
from contracts.failures import UNCOUNTED, Category, Code, Outcome, SideEffect
from contracts.identity import OperationId
from contracts.runs import Source
from tests.unit.ledger_lab import (
    CHANGED_TOOL,
    LOST_ANSWER,
    LOST_RESULT,
    NODE,
    OPERATION,
    REFUSED,
    RUN,
    SECOND,
    TOOL,
    UNUSABLE_RESULT,
    Backend,
    decision,
    failed,
    granted,
    moment,
    outcome,
    request,
    view,
)

OTHER_NODE = OperationId(run_id=RUN, node_id="ship", logical_attempt=1)
LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)
"""Before any ledger of these tests was born."""


# Granted.


async def test_a_new_operation_is_granted(ledger: Ledger) -> None:
    grant = await granted(ledger, request())
    assert (grant.epoch, grant.attempt, grant.fingerprint) == (1, 1, TOOL.fingerprint)
    assert (grant.failures, grant.last_category) == ({}, None)
    assert grant.since_first_send == timedelta(0)


async def test_the_attempt_is_on_record_before_the_grant_is_answered(backend: Backend) -> None:
    ledger, other = await backend.open(), await backend.open()
    await ledger.claim(request(worker="4711@host"))
    node = await view(other)
    (attempt,) = node.attempts
    assert (attempt.attempt, attempt.worker, attempt.ended_at, attempt.code) == (1, "4711@host", None, None)
    assert attempt.side_effect is SideEffect.POSSIBLE
    assert node.in_flight
    assert node.delivery == request().delivery


async def test_an_attempt_that_had_no_effect_is_followed_by_another(backend: Backend, ledger: Ledger) -> None:
    first = await granted(ledger, request(0))
    backend.clock.advance(5)
    assert await ledger.fail(OPERATION, first.epoch, outcome(Category.TRANSIENT))
    second = await granted(ledger, request(1))
    assert (second.epoch, second.attempt) == (first.epoch + 1, 2)
    assert (second.failures, second.last_category) == ({Category.TRANSIENT: 1}, Category.TRANSIENT)
    assert second.since_first_send == timedelta(seconds=5)
    await ledger.fail(OPERATION, second.epoch, outcome(Category.RATE_LIMITED, code="http_429"))
    third = await granted(ledger, request(2))
    assert third.failures == {Category.TRANSIENT: 1, Category.RATE_LIMITED: 1}
    assert third.last_category is Category.RATE_LIMITED


async def test_an_operation_keeps_the_tool_it_was_first_claimed_with(ledger: Ledger) -> None:
    await failed(ledger, request(0), outcome())
    assert (await granted(ledger, request(1, tool=CHANGED_TOOL))).fingerprint == TOOL.fingerprint


async def test_nodes_and_runs_do_not_disturb_each_other(ledger: Ledger) -> None:
    ids = [("a", "n"), ("a", "m"), ("b", "n"), ("a", "n.1"), ("a%", "n")]
    for run_id, node_id in ids:
        operation = OperationId(run_id=run_id, node_id=node_id, logical_attempt=1)
        assert (await granted(ledger, request(operation=operation))).attempt == 1
    for run_id, node_id in ids:
        node = await ledger.node(run_id, node_id)
        assert node is not None
        assert len(node.attempts) == 1


# Settled.


@pytest.mark.parametrize("output", [None, {"id": "c-1", "ü": [1, 2.5, True]}, [], "", 0, False])
async def test_an_operation_that_succeeded_is_answered_with_its_result(ledger: Ledger, output: Json) -> None:
    grant = await granted(ledger, request())
    assert await ledger.succeed(OPERATION, grant.epoch, output)
    settled = Settled(
        end=NodeEnd.SUCCEEDED, output=output, source=Source.EXECUTED, operation_id=str(OPERATION), attempt_count=1
    )
    for at in (0, 1, 100):
        assert await ledger.claim(request(at)) == settled
    node = await view(ledger)
    assert (len(node.attempts), node.end, node.output, node.source) == (1, settled.end, output, Source.EXECUTED)


async def test_the_end_of_a_node_answers_stale_and_mismatched_claims_too(ledger: Ledger) -> None:
    grant = await granted(ledger, request(10))
    await ledger.succeed(OPERATION, grant.epoch, "done")
    for late in (request(5), request(11, input="another"), request(12, operation=SECOND), request(13, redrives=7)):
        answer = await ledger.claim(late)
        assert isinstance(answer, Settled)
        assert (answer.output, answer.operation_id) == ("done", str(OPERATION))


async def test_a_resolved_node_is_answered_with_what_the_person_vouched_for(ledger: Ledger) -> None:
    await failed(ledger, request(), UNUSABLE_RESULT)
    await ledger.decide(decision(Change.RESOLVE, output={"id": "by hand"}), moment(1))
    answer = await ledger.claim(request(2))
    assert isinstance(answer, Settled)
    assert (answer.end, answer.output, answer.source) == (NodeEnd.RESOLVED, {"id": "by hand"}, Source.RESOLVED)
    node = await view(ledger)
    assert (node.end, node.output, node.source) == (answer.end, answer.output, answer.source)


async def test_a_node_resolved_with_null_has_null_for_its_result(ledger: Ledger) -> None:
    await failed(ledger, request(), REFUSED)
    await ledger.decide(decision(Change.RESOLVE, output=None), moment(1))
    answer = await ledger.claim(request(2))
    assert isinstance(answer, Settled)
    assert (answer.end, answer.output, answer.source) == (NodeEnd.RESOLVED, None, Source.RESOLVED)


async def test_a_discarded_node_is_never_sent_for_again(ledger: Ledger) -> None:
    await failed(ledger, request(), REFUSED)
    await ledger.decide(decision(Change.DISCARD), moment(1))
    answer = await ledger.claim(request(2))
    assert isinstance(answer, Settled)
    assert (answer.end, answer.output) == (NodeEnd.DISCARDED, None)


async def test_a_cancelled_node_is_never_sent_for_again(ledger: Ledger) -> None:
    await ledger.cancel(RUN, [NODE], moment(1))
    for at in (0, 2):
        answer = await ledger.claim(request(at))
        assert isinstance(answer, Settled)
        assert (answer.end, answer.attempt_count) == (NodeEnd.CANCELLED, 0)


# Unsettled.


@pytest.mark.parametrize(
    ("how", "side_effect", "resendable"),
    [
        (LOST_ANSWER, SideEffect.POSSIBLE, True),
        (outcome(Category.TRANSIENT, SideEffect.POSSIBLE, Code.READ_TIMEOUT), SideEffect.POSSIBLE, True),
        (LOST_RESULT, SideEffect.CONFIRMED, True),
        (UNUSABLE_RESULT, SideEffect.CONFIRMED, False),
    ],
    ids=["answer lost", "retryable", "result lost", "result unusable"],
)
async def test_an_attempt_that_may_have_had_its_effect_leaves_the_operation_unsettled(
    ledger: Ledger, how: Outcome, side_effect: SideEffect, resendable: bool
) -> None:
    grant = await failed(ledger, request(0), how)
    answer = await ledger.claim(request(1))
    assert isinstance(answer, Unsettled)
    assert (answer.epoch, answer.side_effect, answer.resendable) == (grant.epoch, side_effect, resendable)
    assert answer.since_first_send == timedelta(0)
    (attempt,) = answer.attempts
    assert (attempt.category, attempt.code, attempt.message) == (how.category, how.code, how.message)


async def test_an_attempt_whose_worker_was_lost_leaves_the_operation_unsettled(
    backend: Backend, ledger: Ledger
) -> None:
    await granted(ledger, request(0))
    backend.clock.expire()
    answer = await ledger.claim(request(1))
    assert isinstance(answer, Unsettled)
    (attempt,) = answer.attempts
    assert (attempt.category, attempt.code, attempt.ended_at) == (Category.TRANSIENT, Code.WORKER_LOST, None)
    assert (answer.side_effect, answer.resendable) == (SideEffect.POSSIBLE, True)


async def test_a_lost_attempt_of_a_tool_that_only_reads_is_simply_repeated(backend: Backend, ledger: Ledger) -> None:
    await granted(ledger, request(0, risk=SideEffect.NONE))
    backend.clock.expire()
    again = await granted(ledger, request(1, risk=SideEffect.NONE))
    assert again.failures == {Category.TRANSIENT: 1}


async def test_a_refusal_after_a_lost_answer_settles_nothing(ledger: Ledger) -> None:
    lost = await failed(ledger, request(0), LOST_ANSWER)
    await failed(ledger, request(1, despite_epoch=lost.epoch), REFUSED)
    answer = await ledger.claim(request(2))
    assert isinstance(answer, Unsettled)
    assert [attempt.attempt for attempt in answer.attempts] == [1]
    assert (await view(ledger)).side_effect is SideEffect.POSSIBLE


async def test_an_unsettled_operation_is_repeated_only_by_who_has_seen_all_of_it(
    backend: Backend, ledger: Ledger
) -> None:
    await failed(ledger, request(0), LOST_ANSWER)
    seen = await ledger.claim(request(1))
    assert isinstance(seen, Unsettled)
    assert isinstance(await ledger.claim(request(1, despite_epoch=seen.epoch - 1)), Unsettled)
    await granted(ledger, request(1, despite_epoch=seen.epoch))
    backend.clock.expire()
    # What was seen then does not cover what has been sent since.
    again = await ledger.claim(request(2, despite_epoch=seen.epoch))
    assert isinstance(again, Unsettled)
    assert [attempt.attempt for attempt in again.attempts] == [1, 2]
    assert (await granted(ledger, request(2, despite_epoch=again.epoch))).attempt == 3


async def test_the_dedupe_window_counts_from_the_first_sending_of_all(backend: Backend, ledger: Ledger) -> None:
    first = await failed(ledger, request(0), LOST_ANSWER)
    backend.clock.advance(5)
    second = await granted(ledger, request(1, despite_epoch=first.epoch))
    assert second.since_first_send == timedelta(seconds=5)
    await ledger.fail(OPERATION, second.epoch, LOST_ANSWER)
    backend.clock.advance(5)
    answer = await ledger.claim(request(2))
    assert isinstance(answer, Unsettled)
    assert answer.since_first_send == timedelta(seconds=10)


# A ledger that is younger than the node.


async def test_a_write_of_a_node_older_than_the_ledger_is_unsettled(ledger: Ledger) -> None:
    answer = await ledger.claim(request(node_started_at=LONG_AGO))
    assert isinstance(answer, Unsettled)
    assert (answer.side_effect, answer.resendable) == (SideEffect.POSSIBLE, True)
    (attempt,) = answer.attempts
    assert attempt.code == Code.LEDGER_LOST
    assert (await view(ledger)).side_effect is SideEffect.POSSIBLE


async def test_a_lost_ledger_is_not_a_failure_that_a_later_success_would_repeat(ledger: Ledger) -> None:
    answer = await ledger.claim(request(0, node_started_at=LONG_AGO))
    assert isinstance(answer, Unsettled)
    grant = await granted(ledger, request(1, node_started_at=LONG_AGO, despite_epoch=answer.epoch))
    assert await ledger.succeed(OPERATION, grant.epoch, "done")
    assert isinstance(await ledger.claim(request(2, node_started_at=LONG_AGO)), Settled)
    assert (await view(ledger)).side_effect is SideEffect.NONE


async def test_a_read_of_a_node_older_than_the_ledger_is_granted(ledger: Ledger) -> None:
    grant = await granted(ledger, request(node_started_at=LONG_AGO, risk=SideEffect.NONE))
    assert grant.attempt == 1


@pytest.mark.parametrize("skew", [timedelta(0), timedelta(hours=-3), timedelta(hours=3)])
async def test_a_node_and_the_ledger_are_as_old_as_their_own_clocks_say(
    backend: Backend, ledger: Ledger, skew: timedelta
) -> None:
    backend.clock.jump(timedelta(hours=1))  # so much time has passed since the ledger began
    now = datetime.now(UTC) + skew
    younger = request(0, now=now, node_started_at=now - timedelta(minutes=59))
    assert isinstance(await ledger.claim(younger), Granted)
    older = request(0, operation=OTHER_NODE, now=now, node_started_at=now - timedelta(minutes=61))
    assert isinstance(await ledger.claim(older), Unsettled)


# Busy.


async def test_the_same_delivery_three_times_is_sent_once(ledger: Ledger) -> None:
    await granted(ledger, request(0))
    for owner in ("second", "third"):
        answer = await ledger.claim(request(0, owner=owner))
        assert isinstance(answer, Busy)
        assert (answer.remaining, answer.floor) == (LEASE, False)


async def test_a_lease_runs_out_unless_it_is_renewed(backend: Backend, ledger: Ledger) -> None:
    grant = await granted(ledger, request(0))
    for _ in range(5):
        backend.clock.advance(RENEW_EVERY.total_seconds())
        assert await ledger.renew(OPERATION, grant.epoch)
    backend.clock.advance(LEASE.total_seconds() - 1)
    answer = await ledger.claim(request(1))
    assert isinstance(answer, Busy)
    assert answer.remaining == timedelta(seconds=1)
    assert (await view(ledger)).in_flight
    backend.clock.advance(1.001)
    assert isinstance(await ledger.claim(request(1)), Unsettled)
    assert not (await view(ledger)).in_flight


async def test_no_lease_survives_a_restart_of_the_machine(backend: Backend, ledger: Ledger) -> None:
    await granted(ledger, request(0))
    backend.clock.restart()
    assert isinstance(await ledger.claim(request(1)), Unsettled)


async def test_no_claim_is_granted_before_the_tool_allows_it(ledger: Ledger) -> None:
    grant = await granted(ledger, request(0))
    planned, left_alone = timedelta(minutes=6), timedelta(minutes=5)
    await ledger.fail(OPERATION, grant.epoch, outcome(Category.RATE_LIMITED), planned, left_alone)
    answer = await ledger.claim(request(1))
    assert isinstance(answer, Busy)
    assert answer.floor
    assert timedelta(minutes=4) < answer.remaining <= timedelta(minutes=5)
    node = await view(ledger)
    assert not node.in_flight
    ended, next_eligible = node.attempts[-1].ended_at, node.attempts[-1].next_eligible_at
    assert ended is not None
    assert next_eligible == ended + planned


async def test_a_floor_that_is_over_holds_nobody_up(backend: Backend, ledger: Ledger) -> None:
    grant = await granted(ledger, request(0))
    await ledger.fail(OPERATION, grant.epoch, outcome(), wait=timedelta(minutes=1), floor=timedelta(minutes=1))
    backend.clock.advance(61)
    assert isinstance(await ledger.claim(request(1)), Granted)


@pytest.mark.parametrize("jump", [timedelta(hours=1), timedelta(hours=-1)])
async def test_a_floor_is_as_long_as_it_was_though_the_wall_clock_jumps(
    backend: Backend, ledger: Ledger, jump: timedelta
) -> None:
    grant = await granted(ledger, request(0))
    backend.clock.jump(jump)
    await ledger.fail(OPERATION, grant.epoch, outcome(), wait=timedelta(minutes=1), floor=timedelta(minutes=1))
    backend.clock.jump(jump)
    backend.clock.advance(59)
    answer = await ledger.claim(request(1))
    assert isinstance(answer, Busy)
    assert answer.floor
    assert answer.remaining == timedelta(seconds=1)
    backend.clock.advance(2)
    assert isinstance(await ledger.claim(request(2)), Granted)


async def test_a_floor_outlasts_a_restart_of_the_machine(backend: Backend, ledger: Ledger) -> None:
    grant = await granted(ledger, request(0))
    await ledger.fail(OPERATION, grant.epoch, outcome(), wait=timedelta(minutes=5), floor=timedelta(minutes=5))
    backend.clock.restart()
    answer = await ledger.claim(request(1))
    assert isinstance(answer, Busy)
    assert answer.floor
    backend.clock.jump(timedelta(minutes=5))
    assert isinstance(await ledger.claim(request(2)), Granted)


async def test_a_persons_redrive_does_not_wait_for_the_floor(ledger: Ledger) -> None:
    grant = await granted(ledger, request(0))
    await ledger.fail(OPERATION, grant.epoch, outcome(Category.RATE_LIMITED), floor=timedelta(days=2))
    await ledger.decide(decision(Change.REDRIVE), moment(1))
    assert isinstance(await ledger.claim(request(2, redrives=1)), Granted)


# Stale.


async def test_a_delivery_older_than_one_already_seen_does_not_send(ledger: Ledger) -> None:
    await failed(ledger, request(10), outcome())
    assert await ledger.claim(request(9.999)) == Stale(current=None, attempt_count=1)
    await failed(ledger, request(20), outcome())
    assert isinstance(await ledger.claim(request(10)), Stale)
    assert isinstance(await ledger.claim(request(20)), Granted)


async def test_a_delivery_is_seen_even_where_it_was_not_granted(backend: Backend, ledger: Ledger) -> None:
    await granted(ledger, request(0, risk=SideEffect.NONE))
    assert isinstance(await ledger.claim(request(10)), Busy)
    backend.clock.expire()
    assert isinstance(await ledger.claim(request(5)), Stale)


async def test_a_delivery_of_an_older_logical_attempt_learns_where_the_node_stands(ledger: Ledger) -> None:
    await failed(ledger, request(0), REFUSED)
    edited = decision(Change.REDRIVE, new_operation=True, input={"amount": 1}, tool=CHANGED_TOOL)
    await ledger.decide(edited, moment(10))
    answer = await ledger.claim(request(20))
    assert isinstance(answer, Stale)
    assert answer.current is not None
    assert (answer.current.logical_attempt, answer.current.redrives) == (2, 1)
    assert (answer.current.input, answer.current.fingerprint) == ({"amount": 1}, CHANGED_TOOL.fingerprint)


async def test_a_delivery_from_before_a_redrive_learns_where_the_node_stands(ledger: Ledger) -> None:
    await failed(ledger, request(0), REFUSED)
    await ledger.decide(decision(Change.REDRIVE), moment(10))
    answer = await ledger.claim(request(20, redrives=0))
    assert isinstance(answer, Stale)
    assert answer.current is not None
    assert (answer.current.logical_attempt, answer.current.redrives) == (1, 1)


async def test_a_delivery_scheduled_before_the_last_decision_does_not_send(ledger: Ledger) -> None:
    await failed(ledger, request(0), REFUSED)
    await ledger.decide(decision(Change.REDRIVE), moment(10))
    assert await ledger.claim(request(9, redrives=1)) == Stale(current=None, attempt_count=1)
    assert isinstance(await ledger.claim(request(10, redrives=1)), Granted)


# Mismatch.


async def test_one_key_never_carries_two_payloads(backend: Backend, ledger: Ledger) -> None:
    await granted(ledger, request(0))
    assert await ledger.claim(request(1, input={"amount": 2})) == Mismatch()
    backend.clock.expire()
    assert await ledger.claim(request(2, input={"amount": 2}, despite_epoch=1)) == Mismatch()


async def test_the_order_of_an_inputs_keys_is_no_other_payload(ledger: Ledger) -> None:
    await failed(ledger, request(0, input={"a": 1, "b": {"c": 2, "d": 3}}), outcome())
    assert isinstance(await ledger.claim(request(1, input={"b": {"d": 3, "c": 2}, "a": 1})), Granted)


# Spent.


async def test_the_failure_stands_once_its_category_is_spent(ledger: Ledger) -> None:
    budgets = {Category.TRANSIENT: 3}
    for at in range(3):
        await failed(ledger, request(at, budgets=budgets), outcome(http_status=408))
    answer = await ledger.claim(request(3, budgets=budgets))
    assert answer == Spent(outcome=outcome(http_status=408), attempt=3)
    assert len((await view(ledger)).attempts) == 3


async def test_each_category_has_its_own_budget(ledger: Ledger) -> None:
    budgets = {Category.TRANSIENT: 2, Category.RATE_LIMITED: 2}
    for at, category in enumerate([Category.TRANSIENT, Category.RATE_LIMITED, Category.TRANSIENT]):
        await failed(ledger, request(at, budgets=budgets), outcome(category))
    answer = await ledger.claim(request(3, budgets=budgets))
    assert isinstance(answer, Spent)
    assert (answer.outcome.category, answer.attempt) == (Category.TRANSIENT, 3)


async def test_a_final_failure_stands_when_its_own_answer_was_lost(ledger: Ledger) -> None:
    await failed(ledger, request(0), REFUSED)
    answer = await ledger.claim(request(1, budgets={Category.PERMISSION: 1}))
    assert answer == Spent(outcome=REFUSED, attempt=1)


async def test_a_tool_that_kills_its_worker_every_time_is_spent_as_transient(backend: Backend, ledger: Ledger) -> None:
    budgets = {Category.TRANSIENT: 3}
    epoch = 0
    for at in range(3):
        epoch = (await granted(ledger, request(at, budgets=budgets, despite_epoch=epoch))).epoch
        backend.clock.expire()
    answer = await ledger.claim(request(3, budgets=budgets, despite_epoch=epoch))
    assert isinstance(answer, Spent)
    assert (answer.outcome.category, answer.outcome.code) == (Category.TRANSIENT, Code.WORKER_LOST)
    assert (answer.outcome.side_effect, answer.attempt) == (SideEffect.POSSIBLE, 3)


@pytest.mark.parametrize("code", sorted(UNCOUNTED))
async def test_our_own_faults_cost_nothing_of_the_budget(ledger: Ledger, code: Code) -> None:
    budgets = {Category.TRANSIENT: 2}
    for at in range(5):
        await failed(ledger, request(at, budgets=budgets), outcome(Category.TRANSIENT, code=code))
    assert (await granted(ledger, request(9, budgets=budgets))).failures == {}


async def test_a_redrive_brings_a_fresh_budget_and_keeps_the_evidence(ledger: Ledger) -> None:
    budgets = {Category.TRANSIENT: 2}
    for at in range(2):
        await failed(ledger, request(at, budgets=budgets), outcome())
    assert isinstance(await ledger.claim(request(2, budgets=budgets)), Spent)
    await ledger.decide(decision(Change.REDRIVE), moment(3))
    grant = await granted(ledger, request(4, redrives=1, budgets=budgets))
    assert (grant.attempt, grant.failures) == (3, {})
    await ledger.fail(OPERATION, grant.epoch, outcome())
    assert (await granted(ledger, request(5, redrives=1, budgets=budgets))).failures == {Category.TRANSIENT: 1}
    assert [attempt.attempt for attempt in (await view(ledger)).attempts] == [1, 2, 3, 4]


# What the ledger shows of an operation.


async def test_an_operations_state_follows_what_happened_to_it(backend: Backend, ledger: Ledger) -> None:
    async def state() -> tuple[OperationState, SideEffect]:
        found = await ledger.operation(str(OPERATION))
        assert found is not None
        assert found.idempotency_key == OPERATION.idempotency_key
        return found.state, found.side_effect

    assert await ledger.operation(str(OPERATION)) is None
    await failed(ledger, request(0), REFUSED)
    assert await state() == (OperationState.FAILED, SideEffect.NONE)
    grant = await granted(ledger, request(1))
    assert await state() == (OperationState.IN_FLIGHT, SideEffect.POSSIBLE)
    backend.clock.expire()
    assert await state() == (OperationState.UNSETTLED, SideEffect.POSSIBLE)
    await ledger.succeed(OPERATION, grant.epoch, "done")
    assert await state() == (OperationState.SUCCEEDED, SideEffect.NONE)


async def test_a_nodes_view_says_since_when_its_effect_is_uncertain(backend: Backend, ledger: Ledger) -> None:
    assert await ledger.node(RUN, NODE) is None
    await failed(ledger, request(0), REFUSED)
    node = await view(ledger)
    assert (node.since_last_send, node.unknown_failures, node.epoch) == (None, 0, 1)
    backend.clock.advance(2)
    await failed(ledger, request(1), LOST_ANSWER)
    backend.clock.advance(3)
    node = await view(ledger)
    assert (node.since_last_send, node.unknown_failures) == (timedelta(seconds=3), 1)
    assert node.since_first_send == timedelta(seconds=5)


async def test_the_wall_clock_may_jump_under_a_lease_and_under_a_horizon(backend: Backend, ledger: Ledger) -> None:
    await granted(ledger, request(0))
    for jump in (timedelta(days=1), timedelta(days=-2)):
        backend.clock.jump(jump)
        assert isinstance(await ledger.claim(request(1)), Busy)
        backend.clock.advance(1)
    assert (await view(ledger)).since_last_send == timedelta(seconds=2)
    backend.clock.expire()
    assert isinstance(await ledger.claim(request(2)), Unsettled)


async def test_how_long_ago_is_told_by_the_wall_clock_only_where_the_machine_was_started_anew(
    backend: Backend, ledger: Ledger
) -> None:
    await failed(ledger, request(0), LOST_ANSWER)
    backend.clock.restart()
    backend.clock.jump(timedelta(minutes=3))
    since = (await view(ledger)).since_last_send
    assert since is not None
    assert timedelta(minutes=3) <= since < timedelta(minutes=4)


# The answer to a claim, or to a commit, may be lost on its way: then it is asked for again.


async def test_the_same_owner_that_claims_again_is_given_the_same_grant(ledger: Ledger) -> None:
    await failed(ledger, request(0), LOST_ANSWER)
    claim = request(1, despite_epoch=1)
    first = await granted(ledger, claim)
    assert await granted(ledger, claim) == first
    assert len((await view(ledger)).attempts) == 2
    assert isinstance(await ledger.claim(request(1, owner="another", despite_epoch=2)), Busy)


async def test_a_claim_that_comes_again_after_a_takeover_is_given_nothing(backend: Backend, ledger: Ledger) -> None:
    first = request(0, risk=SideEffect.NONE)
    await granted(ledger, first)
    backend.clock.expire()
    await granted(ledger, request(0, owner="another", risk=SideEffect.NONE))
    assert isinstance(await ledger.claim(first), Busy)


async def test_a_commit_that_comes_again_is_taken_for_the_first_one(ledger: Ledger) -> None:
    grant = await granted(ledger, request(0))
    assert await ledger.fail(OPERATION, grant.epoch, REFUSED)
    before = await view(ledger)
    assert await ledger.fail(OPERATION, grant.epoch, REFUSED)
    assert await view(ledger) == before
    grant = await granted(ledger, request(1))
    assert await ledger.succeed(OPERATION, grant.epoch, "done")
    assert await ledger.succeed(OPERATION, grant.epoch, "done")
    assert len((await view(ledger)).attempts) == 2
