"""A tool that asks to be left alone, or is down, is left alone by all; one probe finds out when that is over."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from activities.ledger.interface import LEASE, Ledger
from activities.ledger.records import Busy, ClaimAnswer, Granted, Paused, Settled, Unsettled
from contracts.dead_letters import ToolRef
from contracts.dispatch import Change, NodeEnd
from contracts.failures import Category, Code, Outcome, SideEffect
from contracts.identity import OperationId
from tests.unit.ledger_lab import LOST_ANSWER, REFUSED, Backend, decision, failed, granted, moment, outcome, request

LIMITED = outcome(Category.RATE_LIMITED, code="http_429", http_status=429)
DOWN = outcome(Category.DEPENDENCY_DOWN, code=Code.CONNECT_FAILED)
UNREADY = outcome(Category.DEPENDENCY_DOWN, code="http_503", http_status=503)
POOL = outcome(Category.TRANSIENT, code=Code.POOL_EXHAUSTED)
SECONDS = timedelta(seconds=1)
ELSEWHERE = ToolRef(name="mail.send", version="1", fingerprint="sha256:mail")


def of(number: int) -> OperationId:
    return OperationId(run_id="crowd", node_id=f"n{number}", logical_attempt=1)


async def claimed(ledger: Ledger, number: int, at: float = 0, **changes: Any) -> ClaimAnswer:
    return await ledger.claim(request(at, operation=of(number), **changes))


async def sent(ledger: Ledger, number: int, at: float = 0) -> int:
    """The epoch of an attempt that is on its way."""
    return (await granted(ledger, request(at, operation=of(number)))).epoch


async def fails(
    ledger: Ledger, number: int, how: Outcome, wait: float | None = 60, floor: float | None = None, at: float = 0
) -> None:
    """An attempt that was granted and failed, with a next one planned."""
    await ends(ledger, number, await sent(ledger, number, at), how, wait, floor)


async def ends(
    ledger: Ledger, number: int, epoch: int, how: Outcome, wait: float | None = 60, floor: float | None = None
) -> None:
    planned = None if wait is None else wait * SECONDS
    assert await ledger.fail(of(number), epoch, how, planned, None if floor is None else floor * SECONDS)


def is_paused(answer: ClaimAnswer, *, probing: bool = False) -> bool:
    return isinstance(answer, Paused) and answer.probing is probing


# It begins.


async def test_one_429_holds_back_every_other_operation_of_the_tool_until_its_time(
    backend: Backend, ledger: Ledger
) -> None:
    await fails(ledger, 0, LIMITED, wait=62, floor=60)
    for number in range(1, 10):
        answer = await claimed(ledger, number)
        assert isinstance(answer, Paused)
        assert answer.category is Category.RATE_LIMITED
        assert timedelta(seconds=59) < answer.remaining <= timedelta(seconds=60)
        node = await ledger.node("crowd", f"n{number}")
        assert node is not None
        assert node.attempts == []
    backend.clock.advance(59)
    assert is_paused(await claimed(ledger, 1, 1))
    assert isinstance(await claimed(ledger, 99, tool=ELSEWHERE), Granted)
    backend.clock.advance(1.1)
    assert isinstance(await claimed(ledger, 1, 2), Granted)


async def test_without_a_floor_it_lasts_until_the_attempts_own_next_time(backend: Backend, ledger: Ledger) -> None:
    await fails(ledger, 0, LIMITED, wait=5)
    assert is_paused(await claimed(ledger, 1))
    backend.clock.advance(5.1)
    # The one whose failure it was is not held back beyond its own time.
    assert isinstance(await claimed(ledger, 0, 1), Granted)


async def test_the_one_whose_failure_it_was_may_be_called_sooner_and_is_the_probe_then(
    backend: Backend, ledger: Ledger
) -> None:
    """An operator has reset its call, or its run was started again: only what the tool itself asked for holds it."""
    await fails(ledger, 0, LIMITED, wait=3600)
    assert is_paused(await claimed(ledger, 1))
    epoch = await sent(ledger, 0, at=1)
    assert is_paused(await claimed(ledger, 1, 1))
    await ends(ledger, 0, epoch, LIMITED, wait=7200)
    answer = await claimed(ledger, 1, 2)
    assert isinstance(answer, Paused)
    assert timedelta(minutes=119) < answer.remaining <= timedelta(minutes=120)
    assert await ledger.succeed(of(0), await sent(ledger, 0, at=3), "done")
    assert isinstance(await claimed(ledger, 1, 4), Granted)
    backend.clock.advance(1)
    await fails(ledger, 5, LIMITED, wait=3601, floor=3600)
    answer = await claimed(ledger, 5, 6)
    assert isinstance(answer, Busy)
    assert answer.floor


async def test_a_429_after_which_a_person_is_asked_holds_back_nobody(ledger: Ledger) -> None:
    await fails(ledger, 0, LIMITED, wait=None)
    assert isinstance(await claimed(ledger, 1), Granted)


async def test_what_the_tool_asks_for_holds_for_the_others_though_a_person_is_asked_about_this_one(
    backend: Backend, ledger: Ledger
) -> None:
    await fails(ledger, 0, LIMITED, wait=None, floor=3600)
    assert is_paused(await claimed(ledger, 1), probing=False)
    backend.clock.advance(3601)
    assert isinstance(await claimed(ledger, 1), Granted)


@pytest.mark.parametrize("how", [DOWN, UNREADY])
async def test_a_tool_is_down_after_three_failures_in_a_row_of_whatever_operations(
    ledger: Ledger, how: Outcome
) -> None:
    await fails(ledger, 0, how, wait=0)
    await fails(ledger, 0, how, wait=0, at=1)
    assert isinstance(await claimed(ledger, 1), Granted)
    await fails(ledger, 2, how, wait=7)
    answer = await claimed(ledger, 3)
    assert isinstance(answer, Paused)
    assert (answer.category, answer.probing) == (Category.DEPENDENCY_DOWN, False)
    assert timedelta(seconds=6) < answer.remaining <= timedelta(seconds=7)


@pytest.mark.parametrize(
    "between", [None, REFUSED, outcome(Category.UNKNOWN_SIDE_EFFECT, code="http_500", http_status=500)]
)
async def test_any_answer_between_them_shows_that_it_is_not_down(ledger: Ledger, between: Outcome | None) -> None:
    for number in range(0, 9, 3):
        await fails(ledger, number, DOWN)
        await fails(ledger, number + 1, DOWN)
        epoch = await sent(ledger, number + 2)
        if between is None:
            assert await ledger.succeed(of(number + 2), epoch, "done")
        else:
            await ends(ledger, number + 2, epoch, between)
    assert isinstance(await claimed(ledger, 99), Granted)


@pytest.mark.parametrize("how", [POOL, LOST_ANSWER, outcome(Category.DEPENDENCY_DOWN, code=Code.DEADLINE_EXCEEDED)])
async def test_what_was_no_answer_neither_counts_nor_interrupts_the_count(ledger: Ledger, how: Outcome) -> None:
    for number in range(5):
        await fails(ledger, number, how)
    await fails(ledger, 10, DOWN)
    await fails(ledger, 11, DOWN)
    await fails(ledger, 12, how)
    assert isinstance(await claimed(ledger, 98), Granted)
    await fails(ledger, 13, DOWN)
    assert is_paused(await claimed(ledger, 99))


# What was on its way when it began.


async def test_who_was_on_his_way_when_it_began_does_not_lift_it(ledger: Ledger) -> None:
    one, other = await sent(ledger, 1), await sent(ledger, 2)
    await fails(ledger, 0, LIMITED)
    assert await ledger.succeed(of(1), one, "done")
    await ends(ledger, 2, other, REFUSED)
    assert is_paused(await claimed(ledger, 3))


async def test_a_pause_grows_only_if_the_tool_itself_asks_for_more(backend: Backend, ledger: Ledger) -> None:
    epochs = [await sent(ledger, number) for number in range(4)]
    await ends(ledger, 0, epochs[0], LIMITED, wait=11, floor=10)
    await ends(ledger, 1, epochs[1], DOWN, wait=1000)
    await ends(ledger, 2, epochs[2], LIMITED, wait=6, floor=5)
    answer = await claimed(ledger, 9)
    assert isinstance(answer, Paused)
    assert timedelta(seconds=9) < answer.remaining <= timedelta(seconds=10)
    await ends(ledger, 3, epochs[3], LIMITED, wait=31, floor=30)
    answer = await claimed(ledger, 9, 1)
    assert isinstance(answer, Paused)
    assert timedelta(seconds=29) < answer.remaining <= timedelta(seconds=30)


# It ends.


async def probing(backend: Backend, how: Outcome = LIMITED) -> tuple[list[Ledger], int, int]:
    """Two workers, and which operation, under which epoch, is the probe of a pause that has just passed."""
    ledgers = [await backend.open(), await backend.open()]
    await fails(ledgers[0], 0, how, wait=0)
    if how is not LIMITED:
        await fails(ledgers[1], 0, how, wait=0, at=1)
        await fails(ledgers[0], 0, how, wait=0, at=2)
    backend.clock.advance(0.5)
    answers = await asyncio.gather(*(claimed(ledgers[number % 2], number, 3) for number in range(1, 51)))
    probes = {number: answer for number, answer in enumerate(answers, 1) if isinstance(answer, Granted)}
    assert len(probes) == 1
    assert all(is_paused(answer, probing=True) for answer in answers if not isinstance(answer, Granted))
    for answer in answers:
        assert isinstance(answer, Granted) or (isinstance(answer, Paused) and answer.remaining <= LEASE)
    return ledgers, *next((number, grant.epoch) for number, grant in probes.items())


@pytest.mark.parametrize("how", [LIMITED, DOWN])
async def test_of_fifty_who_come_back_one_is_the_probe_and_its_success_lets_the_others_go(
    backend: Backend, how: Outcome
) -> None:
    ledgers, probe, epoch = await probing(backend, how)
    assert await ledgers[0].succeed(of(probe), epoch, "done")
    for number in range(60, 70):
        assert isinstance(await claimed(ledgers[number % 2], number, 3), Granted)
    await fails(ledgers[0], 70, DOWN)
    assert isinstance(await claimed(ledgers[1], 71, 3), Granted)


async def test_any_answer_to_the_probe_ends_it(backend: Backend) -> None:
    ledgers, probe, epoch = await probing(backend)
    await ends(ledgers[0], probe, epoch, REFUSED, wait=None)
    assert isinstance(await claimed(ledgers[1], 60), Granted)
    assert isinstance(await claimed(ledgers[0], 61), Granted)


@pytest.mark.parametrize("opened", [LIMITED, DOWN])
@pytest.mark.parametrize("how", [LIMITED, DOWN, UNREADY])
async def test_a_probe_that_fails_renews_it(backend: Backend, opened: Outcome, how: Outcome) -> None:
    ledgers, probe, epoch = await probing(backend, opened)
    await ends(ledgers[0], probe, epoch, how, wait=30)
    answer = await claimed(ledgers[1], 60)
    assert isinstance(answer, Paused)
    assert (answer.category, answer.probing) == (how.category, False)
    assert timedelta(seconds=29) < answer.remaining <= timedelta(seconds=30)
    backend.clock.advance(31)
    assert isinstance(await claimed(ledgers[1], 61), Granted)
    assert is_paused(await claimed(ledgers[0], 62), probing=True)


@pytest.mark.parametrize("how", [POOL, LOST_ANSWER, outcome(Category.RATE_LIMITED, code=Code.DEADLINE_EXCEEDED)])
async def test_a_probe_that_was_not_answered_makes_way_for_one_other(backend: Backend, how: Outcome) -> None:
    ledgers, probe, epoch = await probing(backend)
    await ends(ledgers[0], probe, epoch, how)
    assert isinstance(await claimed(ledgers[1], 60), Granted)
    assert is_paused(await claimed(ledgers[0], 61), probing=True)


async def test_a_probe_after_which_a_person_is_asked_makes_way_for_one_other(backend: Backend) -> None:
    ledgers, probe, epoch = await probing(backend)
    await ends(ledgers[0], probe, epoch, LIMITED, wait=None)
    assert isinstance(await claimed(ledgers[1], 60), Granted)
    assert is_paused(await claimed(ledgers[0], 61), probing=True)


async def test_a_lost_probe_makes_way_for_one_other_when_its_lease_is_over(backend: Backend) -> None:
    ledgers, probe, epoch = await probing(backend)
    backend.clock.advance(8)
    assert await ledgers[0].renew(of(probe), epoch)
    backend.clock.advance(8)
    assert is_paused(await claimed(ledgers[1], 60), probing=True)
    backend.clock.expire()
    answers = await asyncio.gather(*(claimed(ledgers[number % 2], number) for number in range(60, 80)))
    assert sum(isinstance(answer, Granted) for answer in answers) == 1
    # Nobody waits for it any more, and what it brings in the end decides nothing.
    assert await ledgers[0].succeed(of(probe), epoch, "late")
    assert is_paused(await claimed(ledgers[0], 90), probing=True)


async def test_a_probe_that_a_person_has_ended_makes_way_for_one_other(backend: Backend) -> None:
    ledgers, probe, _ = await probing(backend)
    ended = await ledgers[0].decide(decision(Change.DISCARD, run_id="crowd", node_id=f"n{probe}"), moment(10))
    assert ended.record.outcome == "ACCEPTED"
    assert isinstance(await claimed(ledgers[1], 60), Granted)
    assert is_paused(await claimed(ledgers[0], 61), probing=True)


async def test_a_probe_whose_grant_was_lost_on_its_way_is_given_it_again(backend: Backend) -> None:
    ledger = await backend.open()
    await fails(ledger, 0, LIMITED, wait=0)
    backend.clock.advance(0.5)
    claim = request(3, operation=of(1))
    assert await granted(ledger, claim) == await granted(ledger, claim)


async def test_who_was_granted_before_it_began_is_given_the_same_grant_again(ledger: Ledger) -> None:
    claim = request(operation=of(1))
    before = await granted(ledger, claim)
    await fails(ledger, 0, LIMITED)
    assert await granted(ledger, claim) == before


# What it does not touch.


async def test_it_delays_no_answer_that_needs_no_call(backend: Backend, ledger: Ledger) -> None:
    done = await sent(ledger, 1)
    assert await ledger.succeed(of(1), done, "done")
    await failed(ledger, request(operation=of(2)), LOST_ANSWER)
    running = await sent(ledger, 3)
    await fails(ledger, 0, LIMITED, wait=60, floor=59)
    await ledger.cancel("crowd", ["n4"], moment(5))
    settled = await claimed(ledger, 1, 9)
    assert isinstance(settled, Settled)
    assert settled.output == "done"
    unsettled = await claimed(ledger, 2, 9)
    assert isinstance(unsettled, Unsettled)
    assert isinstance(await claimed(ledger, 3, 9), Busy)
    cancelled = await claimed(ledger, 4, 9)
    assert isinstance(cancelled, Settled)
    assert cancelled.end is NodeEnd.CANCELLED
    assert await ledger.renew(of(3), running)
    # What the tool would have to repeat waits like all other calls.
    assert is_paused(await claimed(ledger, 2, 9, despite_epoch=unsettled.epoch))


async def test_it_holds_up_no_decision_and_a_redrive_does_not_override_the_tools_wish(
    backend: Backend, ledger: Ledger
) -> None:
    await fails(ledger, 1, REFUSED, wait=None)
    await fails(ledger, 0, LIMITED)
    answer = await ledger.decide(decision(Change.REDRIVE, run_id="crowd", node_id="n1"), moment(5))
    assert answer.record.outcome == "ACCEPTED"
    assert is_paused(await claimed(ledger, 1, 6, redrives=1))
    backend.clock.advance(61)
    assert isinstance(await claimed(ledger, 1, 7, redrives=1), Granted)


@pytest.mark.parametrize("jump", [timedelta(hours=1), timedelta(hours=-1)])
async def test_it_is_as_long_as_it_was_though_the_wall_clock_jumps(
    backend: Backend, ledger: Ledger, jump: timedelta
) -> None:
    await fails(ledger, 0, LIMITED)
    # It is older than the jump: this is about the pause alone.
    assert is_paused(await claimed(ledger, 1))
    backend.clock.jump(jump)
    backend.clock.advance(59)
    answer = await claimed(ledger, 1, 1)
    assert isinstance(answer, Paused)
    assert answer.remaining == SECONDS
    backend.clock.advance(1)
    assert isinstance(await claimed(ledger, 1, 2), Granted)


async def test_it_outlasts_a_restart_of_the_machine_and_its_probe_does_not(backend: Backend, ledger: Ledger) -> None:
    await fails(ledger, 0, LIMITED)
    backend.clock.restart()
    assert is_paused(await claimed(ledger, 1))
    backend.clock.jump(timedelta(seconds=61))
    assert isinstance(await claimed(ledger, 1, 1), Granted)
    assert is_paused(await claimed(ledger, 2), probing=True)
    backend.clock.boot = "third boot"
    assert isinstance(await claimed(ledger, 2, 1), Granted)


async def test_a_read_is_held_back_like_a_write(ledger: Ledger) -> None:
    await fails(ledger, 0, LIMITED)
    assert is_paused(await claimed(ledger, 1, risk=SideEffect.NONE))


# The rate of a tool.

TENTH = timedelta(seconds=0.1)


async def waits(ledger: Ledger, number: int, interval: timedelta = TENTH, **changes: Any) -> float | None:
    """How long this call has to wait for its turn, in seconds; None: too long to be waited for here."""
    answer = await claimed(ledger, number, interval=interval, **changes)
    if isinstance(answer, Granted):
        return answer.wait.total_seconds()
    assert isinstance(answer, Paused)
    assert answer.paced
    assert answer.remaining > timedelta(0)
    return None


async def test_calls_of_a_tool_with_a_rate_are_an_interval_apart_whichever_worker_makes_them(backend: Backend) -> None:
    ledgers = [await backend.open(), await backend.open()]
    turns = await asyncio.gather(*(waits(ledgers[number % 2], number) for number in range(20)))
    assert sorted(turn for turn in turns if turn is not None) == pytest.approx([number / 10 for number in range(20)])
    # Other tools have turns of their own, or need none.
    assert await waits(ledgers[0], 20, tool=ELSEWHERE) == 0
    assert (await granted(ledgers[0], request(operation=of(21)))).wait == timedelta(0)


async def test_a_turn_that_nobody_takes_is_not_saved_up(backend: Backend, ledger: Ledger) -> None:
    assert await waits(ledger, 0) == 0
    backend.clock.advance(60)
    assert [await waits(ledger, number) for number in (1, 2)] == pytest.approx([0, 0.1])


async def test_who_would_wait_too_long_for_its_turn_comes_back_and_takes_none(backend: Backend, ledger: Ledger) -> None:
    slow = timedelta(seconds=3)
    assert [await waits(ledger, number, slow) for number in range(4)] == [0, 3, None, None]
    backend.clock.advance(1.1)
    assert await waits(ledger, 2, slow) == pytest.approx(4.9)
    node = await ledger.node("crowd", "n3")
    assert node is not None
    assert node.attempts == []


async def test_turns_of_before_a_restart_of_the_machine_are_over(backend: Backend, ledger: Ledger) -> None:
    assert [await waits(ledger, number) for number in range(3)] == pytest.approx([0, 0.1, 0.2])
    backend.clock.restart()
    assert await waits(ledger, 3) == 0


async def test_a_clock_that_was_set_back_keeps_no_tool_waiting(backend: Backend, ledger: Ledger) -> None:
    assert [await waits(ledger, number) for number in range(3)] == pytest.approx([0, 0.1, 0.2])
    backend.clock.advance(-3600)
    assert await waits(ledger, 3) == 0


async def test_whose_grant_was_lost_on_its_way_keeps_its_turn(backend: Backend, ledger: Ledger) -> None:
    assert await waits(ledger, 0) == 0
    claim = request(operation=of(1), interval=timedelta(seconds=3))
    assert (await granted(ledger, claim)).wait == pytest.approx(timedelta(seconds=0.1), abs=timedelta(milliseconds=1))
    assert (await granted(ledger, claim)).wait == pytest.approx(timedelta(seconds=0.1), abs=timedelta(milliseconds=1))
    backend.clock.advance(1)
    assert (await granted(ledger, claim)).wait == timedelta(0)


async def test_a_call_that_waits_for_its_turn_was_not_made_before_it(backend: Backend, ledger: Ledger) -> None:
    """Whether "absent" can be believed counts from when the tool may have been called."""
    assert [await waits(ledger, number, timedelta(seconds=4)) for number in range(2)] == [0, 4]
    backend.clock.advance(10)
    nodes = [await ledger.node("crowd", f"n{number}") for number in range(2)]
    assert [node.since_last_send for node in nodes if node is not None] == [timedelta(seconds=10), timedelta(seconds=6)]
