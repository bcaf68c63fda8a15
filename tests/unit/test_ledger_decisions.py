"""What a person decided is committed once, before anything acts on it, and answered from the record ever after."""

import asyncio

import pytest

from activities.ledger.interface import Ledger
from activities.ledger.records import Granted, Settled, Stale, Unsettled
from contracts.dead_letters import DecisionOutcome, RefusalCode
from contracts.dispatch import Approved, Change, DecideAnswer, NodeEnd, Redriven
from contracts.failures import SideEffect
from contracts.identity import OperationId
from contracts.runs import ApprovalGrant, Source
from tests.unit.ledger_lab import (
    CHANGED_TOOL,
    INPUT,
    LOST_ANSWER,
    NODE,
    OPERATION,
    REFUSED,
    RUN,
    SECOND,
    START,
    TOOL,
    UNUSABLE_RESULT,
    Backend,
    decision,
    failed,
    granted,
    moment,
    request,
    view,
)
from tests.unit.test_ledger_claim import LONG_AGO


def refusals(answer: DecideAnswer) -> list[RefusalCode]:
    assert answer.record.outcome is DecisionOutcome.REFUSED
    assert answer.redriven is None
    return answer.record.refusals


# Redrive.


async def test_a_redrive_repeats_the_same_operation(ledger: Ledger) -> None:
    await failed(ledger, request(0), REFUSED)
    answer = await ledger.decide(decision(Change.REDRIVE), moment(1))
    assert answer.record.outcome is DecisionOutcome.ACCEPTED
    assert answer.redriven == Redriven(logical_attempt=1, input=INPUT, fingerprint=TOOL.fingerprint, redrives=1)
    grant = await granted(ledger, request(2, redrives=1))
    assert grant.attempt == 2
    node = await view(ledger)
    assert (node.redrives, node.operation_id) == (1, str(OPERATION))
    assert [record.decision_id for record in node.decisions] == ["d-1"]


async def test_a_redrive_as_a_new_operation_has_a_new_key_and_keeps_the_evidence(ledger: Ledger) -> None:
    await failed(ledger, request(0), REFUSED)
    answer = await ledger.decide(
        decision(Change.REDRIVE, new_operation=True, input={"amount": 1}, tool=CHANGED_TOOL), moment(1)
    )
    assert answer.redriven == Redriven(
        logical_attempt=2, input={"amount": 1}, fingerprint=CHANGED_TOOL.fingerprint, redrives=1
    )
    grant = await granted(ledger, request(2, operation=SECOND, redrives=1, input={"amount": 1}, tool=CHANGED_TOOL))
    assert (grant.epoch, grant.attempt, grant.fingerprint) == (1, 2, CHANGED_TOOL.fingerprint)
    node = await view(ledger)
    assert (node.logical_attempt, node.operation_id, len(node.attempts)) == (2, str(SECOND), 2)
    first, second = await ledger.operation(str(OPERATION)), await ledger.operation(str(SECOND))
    assert first is not None
    assert second is not None
    assert first.idempotency_key != second.idempotency_key
    assert (len(first.attempts), len(second.attempts)) == (1, 1)


async def test_a_redriven_operation_adopts_the_tool_as_it_is_now(ledger: Ledger) -> None:
    await failed(ledger, request(0), REFUSED)
    await ledger.decide(decision(Change.REDRIVE, tool=CHANGED_TOOL), moment(1))
    assert (await granted(ledger, request(2, redrives=1, tool=CHANGED_TOOL))).fingerprint == CHANGED_TOOL.fingerprint
    assert (await view(ledger)).fingerprint == CHANGED_TOOL.fingerprint


async def test_a_redrive_takes_no_risk_that_the_person_has_not_accepted(ledger: Ledger) -> None:
    await failed(ledger, request(0), LOST_ANSWER)
    await ledger.decide(decision(Change.REDRIVE), moment(1))
    answer = await ledger.claim(request(2, redrives=1))
    assert isinstance(answer, Unsettled)
    assert answer.resendable


async def test_a_redrive_allows_what_is_not_repeated_by_itself(ledger: Ledger) -> None:
    await failed(ledger, request(0), UNUSABLE_RESULT)
    unsettled = await ledger.claim(request(1))
    assert isinstance(unsettled, Unsettled)
    assert not unsettled.resendable
    await ledger.decide(decision(Change.REDRIVE), moment(2))
    unsettled = await ledger.claim(request(3, redrives=1))
    assert isinstance(unsettled, Unsettled)
    assert (unsettled.resendable, unsettled.side_effect) == (True, SideEffect.CONFIRMED)


@pytest.mark.parametrize("change", list(Change))
async def test_a_decision_in_view_of_fewer_attempts_than_there_are_is_refused(ledger: Ledger, change: Change) -> None:
    await failed(ledger, request(0), REFUSED)
    await failed(ledger, request(1), LOST_ANSWER)
    answer = await ledger.decide(decision(change, attempts_seen=1), moment(2))
    assert answer.record.refusals == [RefusalCode.EVIDENCE_CHANGED]
    assert isinstance(await ledger.claim(request(3)), Unsettled)
    answer = await ledger.decide(decision(change, "d-2", attempts_seen=2), moment(4))
    assert answer.record.outcome is DecisionOutcome.ACCEPTED


async def test_an_accepted_risk_hides_nothing(ledger: Ledger) -> None:
    await failed(ledger, request(0), LOST_ANSWER)
    await ledger.decide(decision(Change.REDRIVE, accepts_risk=True), moment(1))
    assert (await view(ledger)).side_effect is SideEffect.POSSIBLE
    grant = await granted(ledger, request(2, redrives=1))
    await ledger.fail(OPERATION, grant.epoch, REFUSED)
    # The refused repetition says nothing of the first attempt.
    assert (await view(ledger)).side_effect is SideEffect.POSSIBLE
    # The accepted risk is the first attempt's; a new one is a new question.
    grant = await granted(ledger, request(3, redrives=1))
    await ledger.fail(OPERATION, grant.epoch, LOST_ANSWER)
    answer = await ledger.claim(request(4, redrives=1))
    assert isinstance(answer, Unsettled)
    assert [attempt.attempt for attempt in answer.attempts] == [3]


async def test_a_redrives_approval_is_the_nodes_from_then_on(ledger: Ledger) -> None:
    await failed(ledger, request(0), REFUSED)
    approval = Approved(
        grant=ApprovalGrant(id="apr-8", granted_by="alice", expires_at=START),
        fingerprint=TOOL.fingerprint,
        input_hash="sha256:x",
    )
    answer = await ledger.decide(decision(Change.REDRIVE, approval=approval), moment(1))
    assert answer.redriven is not None
    assert answer.redriven.approval == approval
    stale = await ledger.claim(request(2, redrives=0))
    assert isinstance(stale, Stale)
    assert stale.current == answer.redriven


# Resolve and discard.


async def test_a_resolved_node_has_ended_and_its_effect_is_settled(ledger: Ledger) -> None:
    await failed(ledger, request(0), UNUSABLE_RESULT)
    answer = await ledger.decide(decision(Change.RESOLVE, output={"id": "by hand"}), moment(1))
    assert (answer.record.outcome, answer.redriven) == (DecisionOutcome.ACCEPTED, None)
    node = await view(ledger)
    assert (node.end, node.side_effect) == (NodeEnd.RESOLVED, SideEffect.NONE)


async def test_a_reconciled_result_may_come_by_a_decision(ledger: Ledger) -> None:
    await failed(ledger, request(0), LOST_ANSWER)
    await ledger.decide(decision(Change.RESOLVE, output="the tool's", source=Source.RECONCILED), moment(1))
    answer = await ledger.claim(request(2))
    assert isinstance(answer, Settled)
    assert (answer.end, answer.source, answer.output) == (NodeEnd.RESOLVED, Source.RECONCILED, "the tool's")


async def test_a_discarded_nodes_uncertain_effect_stays_on_record(ledger: Ledger) -> None:
    await failed(ledger, request(0), LOST_ANSWER)
    await ledger.decide(decision(Change.DISCARD), moment(1))
    node = await view(ledger)
    assert (node.end, node.side_effect) == (NodeEnd.DISCARDED, SideEffect.POSSIBLE)


# Once.


@pytest.mark.parametrize("change", list(Change))
async def test_the_same_decision_again_gets_the_first_ones_record_and_changes_nothing(
    ledger: Ledger, change: Change
) -> None:
    await failed(ledger, request(0), REFUSED)
    first = await ledger.decide(decision(change, output="one"), moment(1))
    before = await view(ledger)
    again = decision(Change.DISCARD, output="two", redrives=before.redrives)
    for late in (decision(change, output="one"), again):
        answer = await ledger.decide(late, moment(100))
        assert answer.record == first.record
        assert answer.redriven == first.redriven
    assert await view(ledger) == before


async def test_a_redrive_whose_answer_was_lost_can_be_asked_for_again_after_the_next_attempt(ledger: Ledger) -> None:
    await failed(ledger, request(0), REFUSED)
    first = await ledger.decide(decision(Change.REDRIVE), moment(1))
    await failed(ledger, request(2, redrives=1), REFUSED)
    assert await ledger.decide(decision(Change.REDRIVE), moment(1)) == first


async def test_only_one_of_two_decisions_wins(ledger: Ledger) -> None:
    await failed(ledger, request(0), REFUSED)
    await ledger.decide(decision(Change.REDRIVE, "d-1"), moment(1))
    late = await ledger.decide(decision(Change.DISCARD, "d-2", redrives=0), moment(2))
    assert refusals(late) == [RefusalCode.ALREADY_DECIDED]
    assert (await view(ledger)).end is None
    # Whoever has seen the redrive decides on what came of it.
    seen = await ledger.decide(decision(Change.DISCARD, "d-3", redrives=1), moment(3))
    assert seen.record.outcome is DecisionOutcome.ACCEPTED
    assert [record.decision_id for record in (await view(ledger)).decisions] == ["d-1", "d-3"]


@pytest.mark.parametrize("ended", [Change.RESOLVE, Change.DISCARD])
@pytest.mark.parametrize("late", list(Change))
async def test_what_a_person_ended_is_already_decided(ledger: Ledger, ended: Change, late: Change) -> None:
    await failed(ledger, request(0), REFUSED)
    await ledger.decide(decision(ended, "d-1"), moment(1))
    before = await ledger.claim(request(2))
    assert refusals(await ledger.decide(decision(late, "d-2"), moment(2))) == [RefusalCode.ALREADY_DECIDED]
    assert await ledger.claim(request(2)) == before


@pytest.mark.parametrize("late", list(Change))
async def test_a_node_that_succeeded_takes_no_decision(ledger: Ledger, late: Change) -> None:
    grant = await granted(ledger, request(0))
    await ledger.succeed(OPERATION, grant.epoch, "done")
    assert refusals(await ledger.decide(decision(late), moment(1))) == [RefusalCode.NODE_CLOSED]
    answer = await ledger.claim(request(2))
    assert isinstance(answer, Settled)
    assert (answer.end, answer.output) == (NodeEnd.SUCCEEDED, "done")
    assert (await view(ledger)).decisions == []


async def test_of_many_decisions_at_once_exactly_one_is_accepted(backend: Backend) -> None:
    ledgers = [await backend.open(), await backend.open()]
    await failed(ledgers[0], request(0), REFUSED)
    changes = [list(Change)[number % 3] for number in range(30)]
    answers = await asyncio.gather(
        *(
            ledgers[number % 2].decide(decision(change, f"d-{number}"), moment(1))
            for number, change in enumerate(changes)
        )
    )
    accepted = [answer.record.decision_id for answer in answers if answer.record.outcome is DecisionOutcome.ACCEPTED]
    assert len(accepted) == 1
    assert {tuple(refusals(answer)) for answer in answers if answer.record.decision_id not in accepted} == {
        (RefusalCode.ALREADY_DECIDED,)
    }
    assert [record.decision_id for record in (await view(ledgers[1])).decisions] == accepted


# Cancel.


async def test_a_cancelled_node_is_not_redriven_but_can_be_settled(ledger: Ledger) -> None:
    await failed(ledger, request(0), LOST_ANSWER)
    await ledger.cancel(RUN, [NODE], moment(1))
    assert refusals(await ledger.decide(decision(Change.REDRIVE, "d-1"), moment(2))) == [RefusalCode.RUN_CANCELLING]
    await ledger.decide(decision(Change.RESOLVE, "d-2", output="by hand"), moment(3))
    answer = await ledger.claim(request(4))
    assert isinstance(answer, Settled)
    assert (answer.end, answer.output) == (NodeEnd.RESOLVED, "by hand")


async def test_a_cancel_touches_only_what_has_not_ended(ledger: Ledger) -> None:
    grant = await granted(ledger, request(0))
    await ledger.succeed(OPERATION, grant.epoch, "done")
    await ledger.cancel(RUN, [NODE, "other"], moment(1))
    answer = await ledger.claim(request(2))
    assert isinstance(answer, Settled)
    assert (answer.end, answer.output) == (NodeEnd.SUCCEEDED, "done")
    assert not (await view(ledger)).cancelled
    other = await ledger.node(RUN, "other")
    assert other is not None
    assert (other.cancelled, other.attempts) == (True, [])


async def test_a_cancel_names_what_is_uncertain_before_what_has_ended(ledger: Ledger) -> None:
    done, under_way = (OperationId(run_id=RUN, node_id=name, logical_attempt=1) for name in ("a", "z"))
    grant = await granted(ledger, request(0, operation=done))
    await ledger.succeed(done, grant.epoch, "done")
    await granted(ledger, request(0, operation=under_way))
    assert await ledger.cancel(RUN, ["a", "m", "z"], moment(1)) == ["z", "a"]


async def test_a_cancel_can_be_repeated(ledger: Ledger) -> None:
    await failed(ledger, request(0), REFUSED)
    for at in (1, 1, 2):
        await ledger.cancel(RUN, [NODE], moment(at))
    assert (await view(ledger)).cancelled
    await ledger.cancel(RUN, [], moment(3))


async def test_a_redrive_that_was_committed_before_the_cancel_is_never_sent(ledger: Ledger) -> None:
    await failed(ledger, request(0), REFUSED)
    await ledger.decide(decision(Change.REDRIVE), moment(1))
    await ledger.cancel(RUN, [NODE], moment(2))
    answer = await ledger.claim(request(3, redrives=1))
    assert isinstance(answer, Settled)
    assert answer.end is NodeEnd.CANCELLED


# A ledger that was lost while dead letters waited.


@pytest.mark.parametrize("redrives", [0, 2])
@pytest.mark.parametrize("change", list(Change))
async def test_a_dead_letter_can_be_decided_though_the_ledger_was_lost(
    ledger: Ledger, change: Change, redrives: int
) -> None:
    answer = await ledger.decide(decision(change, redrives=redrives, logical_attempt=2, output="x"), moment(1))
    assert answer.record.outcome is DecisionOutcome.ACCEPTED
    if change is Change.REDRIVE:
        assert answer.redriven is not None
        assert (answer.redriven.redrives, answer.redriven.logical_attempt) == (redrives + 1, 2)
    else:
        assert isinstance(await ledger.claim(request(2, operation=SECOND, redrives=redrives)), Settled)


async def test_a_new_operation_decided_in_this_ledger_was_not_sent_in_an_earlier_one(ledger: Ledger) -> None:
    assert isinstance(await ledger.claim(request(0, node_started_at=LONG_AGO)), Unsettled)
    await ledger.decide(decision(Change.REDRIVE, new_operation=True), moment(1))
    claim = request(2, operation=SECOND, redrives=1, node_started_at=LONG_AGO)
    assert (await granted(ledger, claim)).failures == {}


async def test_a_redriven_node_can_be_decided_though_the_ledger_was_lost_since(ledger: Ledger) -> None:
    claim = request(0, redrives=2, node_started_at=LONG_AGO)
    assert isinstance(await ledger.claim(claim), Unsettled)
    assert (await view(ledger)).redrives == 2
    answer = await ledger.decide(decision(Change.REDRIVE, redrives=2, accepts_risk=True), moment(1))
    assert answer.redriven is not None
    assert answer.redriven.redrives == 3
    assert isinstance(await ledger.claim(request(2, redrives=3, node_started_at=LONG_AGO)), Granted)


@pytest.mark.parametrize("change", [Change.RESOLVE, Change.DISCARD])
async def test_a_cancelled_nodes_dead_letter_can_be_decided_though_the_ledger_was_lost(
    ledger: Ledger, change: Change
) -> None:
    await ledger.cancel(RUN, [NODE], moment(0))
    answer = await ledger.decide(decision(change, redrives=2, logical_attempt=3, output="x"), moment(1))
    assert answer.record.outcome is DecisionOutcome.ACCEPTED


async def test_a_cancel_does_not_hide_that_the_ledger_was_lost(ledger: Ledger) -> None:
    await ledger.cancel(RUN, [NODE], moment(0))
    answer = await ledger.claim(request(1, node_started_at=LONG_AGO))
    assert isinstance(answer, Settled)
    assert answer.end is NodeEnd.CANCELLED
    # What was sent before is as possible as it was.
    assert (await view(ledger)).side_effect is SideEffect.POSSIBLE
