"""What is found in the whole ledger, and what may be dropped from it."""

from datetime import timedelta
from typing import Any

from activities.ledger.interface import Ledger
from activities.ledger.records import EndedRun, Granted, OperationState, Pruned, Stale
from contracts.dead_letters import DecisionOutcome
from contracts.dispatch import Change, NodeEnd
from contracts.failures import Outcome, SideEffect
from contracts.identity import OperationId
from contracts.runs import Source
from tests.unit.ledger_lab import (
    LOST_ANSWER,
    NODE,
    OPERATION,
    REFUSED,
    RUN,
    SECOND,
    UNUSABLE_RESULT,
    Backend,
    decision,
    failed,
    granted,
    moment,
    request,
    view,
)


def operation(run_id: str, node_id: str = NODE, logical_attempt: int = 1) -> OperationId:
    return OperationId(run_id=run_id, node_id=node_id, logical_attempt=logical_attempt)


async def ends(ledger: Ledger, run_id: str, how: Outcome | None, node_id: str = NODE) -> None:
    """An operation that has had one attempt: a success, or this failure."""
    grant = await granted(ledger, request(operation=operation(run_id, node_id)))
    if how is None:
        assert await ledger.succeed(operation(run_id, node_id), grant.epoch, "done")
    else:
        assert await ledger.fail(operation(run_id, node_id), grant.epoch, how)


async def decides(ledger: Ledger, run_id: str, change: Change, **changes: Any) -> None:
    answer = await ledger.decide(decision(change, run_id=run_id, **changes), moment(10))
    assert answer.record.outcome is DecisionOutcome.ACCEPTED


async def unsettled(ledger: Ledger) -> list[str]:
    return [found.operation_id for found in await ledger.unsettled("", 100)]


async def in_state(ledger: Ledger, state: OperationState, run_id: str | None = None) -> list[str]:
    return [found.operation_id for found in await ledger.operations(state, run_id, "", 100)]


async def prunable(backend: Backend, ledger: Ledger, after: timedelta = timedelta(seconds=1)) -> list[str]:
    before = backend.clock.read(None).now + after
    return [run.run_id for run in await ledger.ended_runs(before, "", 100)]


# What is uncertain.


async def test_only_what_is_uncertain_and_that_nobody_has_ended_is_unsettled(ledger: Ledger) -> None:
    await ends(ledger, "a-success", None)
    await ends(ledger, "b-refused", REFUSED)
    await ends(ledger, "c-lost", LOST_ANSWER)
    await ends(ledger, "d-unusable", UNUSABLE_RESULT)
    await granted(ledger, request(operation=operation("e-in-flight")))
    await ends(ledger, "f-absent", LOST_ANSWER)
    await ledger.settle_absent(operation("f-absent"), 1)
    await ends(ledger, "g-discarded", LOST_ANSWER)
    await decides(ledger, "g-discarded", Change.DISCARD)
    await ends(ledger, "h-resolved", LOST_ANSWER)
    await decides(ledger, "h-resolved", Change.RESOLVE, output="seen")
    await ends(ledger, "i-cancelled", LOST_ANSWER)
    await ledger.cancel("i-cancelled", [NODE], moment(10))
    await granted(ledger, request(operation=operation("j-read"), risk=SideEffect.NONE))
    assert await unsettled(ledger) == [
        str(operation(run_id)) for run_id in ("c-lost", "d-unusable", "e-in-flight", "i-cancelled")
    ]


async def test_an_operation_that_a_redrive_has_left_behind_is_not_what_its_node_waits_for(ledger: Ledger) -> None:
    await failed(ledger, request(0), LOST_ANSWER)
    await ledger.decide(decision(Change.REDRIVE, new_operation=True), moment(1))
    assert await unsettled(ledger) == []
    await failed(ledger, request(2, operation=SECOND, redrives=1), LOST_ANSWER)
    assert await unsettled(ledger) == [str(SECOND)]


async def test_a_redrive_at_risk_settles_nothing(ledger: Ledger) -> None:
    await failed(ledger, request(0), LOST_ANSWER)
    await ledger.decide(decision(Change.REDRIVE), moment(1))
    assert await unsettled(ledger) == [str(OPERATION)]


async def test_what_is_unsettled_comes_in_pages_and_each_operation_once(ledger: Ledger) -> None:
    for number in range(5):
        await ends(ledger, f"run-{number}", LOST_ANSWER)
    await granted(ledger, request(5, operation=operation("run-0"), despite_epoch=1))
    seen: list[str] = []
    while page := await ledger.unsettled(seen[-1] if seen else "", 2):
        assert len(page) <= 2
        seen += [found.operation_id for found in page]
    assert seen == [str(operation(f"run-{number}")) for number in range(5)]


# Lists.


async def test_operations_are_listed_by_their_state(backend: Backend, ledger: Ledger) -> None:
    await ends(ledger, "a", None)
    await ends(ledger, "b", REFUSED)
    await ends(ledger, "c", LOST_ANSWER)
    await ends(ledger, "d", UNUSABLE_RESULT)
    await granted(ledger, request(operation=operation("e")))
    expected = {
        OperationState.SUCCEEDED: ["a"],
        OperationState.FAILED: ["b"],
        OperationState.UNSETTLED: ["c", "d"],
        OperationState.IN_FLIGHT: ["e"],
    }
    for state, runs in expected.items():
        assert await in_state(ledger, state) == [str(operation(run_id)) for run_id in runs]
        for found in await ledger.operations(state, None, "", 100):
            shown = await ledger.operation(found.operation_id)
            assert shown is not None
            assert (found.state, found.side_effect, found.attempts) == (
                shown.state,
                shown.side_effect,
                len(shown.attempts),
            )
            assert found.first_sent_at == shown.attempts[0].started_at
    assert await in_state(ledger, OperationState.UNSETTLED, "d") == [str(operation("d"))]
    assert await in_state(ledger, OperationState.UNSETTLED, "a") == []
    backend.clock.expire()
    assert await in_state(ledger, OperationState.IN_FLIGHT) == []
    assert await in_state(ledger, OperationState.UNSETTLED) == [str(operation(run_id)) for run_id in "cde"]


async def test_a_list_is_as_long_as_asked_however_rare_the_state(ledger: Ledger) -> None:
    for number in range(10):
        await ends(ledger, f"run-{number}", LOST_ANSWER if number % 3 == 0 else REFUSED)
    found = await ledger.operations(OperationState.UNSETTLED, None, "", 3)
    assert [row.run_id for row in found] == ["run-0", "run-3", "run-6"]
    rest = await ledger.operations(OperationState.UNSETTLED, None, found[-1].operation_id, 3)
    assert [row.run_id for row in rest] == ["run-9"]


# Dropping.


async def test_only_runs_that_have_ended_altogether_and_are_settled_may_go(backend: Backend, ledger: Ledger) -> None:
    await ends(ledger, "a-success", None)
    await ends(ledger, "b-half", None, "one")
    await ends(ledger, "b-half", REFUSED, "two")
    await ends(ledger, "c-discarded", REFUSED)
    await decides(ledger, "c-discarded", Change.DISCARD)
    await ends(ledger, "d-discarded-at-risk", LOST_ANSWER)
    await decides(ledger, "d-discarded-at-risk", Change.DISCARD)
    await ends(ledger, "e-resolved", LOST_ANSWER)
    await decides(ledger, "e-resolved", Change.RESOLVE, output="seen", source=Source.RESOLVED)
    await ledger.cancel("f-cancelled", [NODE], moment(10))
    await ends(ledger, "g-cancelled-at-risk", LOST_ANSWER)
    await ledger.cancel("g-cancelled-at-risk", [NODE], moment(10))
    await ledger.cancel("h-stopped", [NODE], moment(10), for_good=False)
    await granted(ledger, request(operation=operation("i-in-flight")))
    assert await prunable(backend, ledger) == ["a-success", "c-discarded", "e-resolved", "f-cancelled"]


async def test_a_run_has_ended_when_the_last_of_its_nodes_has(backend: Backend, ledger: Ledger) -> None:
    await ends(ledger, RUN, None, "one")
    backend.clock.jump(timedelta(hours=2))
    await ends(ledger, RUN, None, "two")
    assert await prunable(backend, ledger, timedelta(hours=-1)) == []
    backend.clock.jump(timedelta(hours=2))
    assert await prunable(backend, ledger, timedelta(hours=-1)) == [RUN]


async def test_a_run_is_forgotten_as_a_whole_and_is_new_afterwards(backend: Backend, ledger: Ledger) -> None:
    await ends(ledger, "a", None, "one")
    await failed(ledger, request(operation=operation("a", "two")), REFUSED)
    again = await granted(ledger, request(1, operation=operation("a", "two")))
    await ledger.succeed(operation("a", "two"), again.epoch, "done")
    await ends(ledger, "b", None)
    before = backend.clock.read(None).now + timedelta(seconds=1)
    run = EndedRun(run_id="a", node_ids=["one", "two"])
    assert await ledger.ended_runs(before, "", 1) == [run]
    gone = Pruned(nodes=2, operations=2, attempts=3)
    assert await ledger.prune(run, before, dry_run=True) == gone
    assert await ledger.operation(str(operation("a", "one"))) is not None
    assert await ledger.prune(run, before) == gone
    assert await ledger.prune(run, before) == Pruned()
    assert await ledger.operation(str(operation("a", "one"))) is None
    assert await ledger.node("a", "two") is None
    assert await in_state(ledger, OperationState.SUCCEEDED) == [str(operation("b"))]
    assert isinstance(await ledger.claim(request(5, operation=operation("a", "one"))), Granted)


async def test_a_run_that_has_changed_since_it_was_looked_at_stays(backend: Backend, ledger: Ledger) -> None:
    await ends(ledger, "a", None, "one")
    before = backend.clock.read(None).now + timedelta(seconds=1)
    [run] = await ledger.ended_runs(before, "", 9)
    await granted(ledger, request(operation=operation("a", "two")))
    assert await ledger.prune(run, before) == Pruned()
    node = await ledger.node("a", "one")
    assert node is not None
    assert node.end is NodeEnd.SUCCEEDED


# Stopped, not cancelled.


async def test_a_stopped_node_sends_nothing_that_was_under_way_and_goes_on_with_what_comes_later(
    ledger: Ledger,
) -> None:
    await failed(ledger, request(0), REFUSED)
    await ledger.cancel(RUN, [NODE], moment(5), for_good=False)
    assert isinstance(await ledger.claim(request(4)), Stale)
    assert not (await view(ledger)).cancelled
    assert (await granted(ledger, request(6))).attempt == 2


async def test_a_node_that_was_stopped_before_it_began_is_as_new(ledger: Ledger) -> None:
    await ledger.cancel(RUN, [NODE], moment(5), for_good=False)
    assert isinstance(await ledger.claim(request(4)), Stale)
    grant = await granted(ledger, request(6))
    assert (grant.epoch, grant.attempt) == (1, 1)


async def test_what_was_cancelled_stays_so_when_it_is_stopped(ledger: Ledger) -> None:
    await ledger.cancel(RUN, [NODE], moment(5))
    await ledger.cancel(RUN, [NODE], moment(6), for_good=False)
    assert (await view(ledger)).cancelled
