"""What follows a failed attempt: again, and when; or a person."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.schedule import MAX_WAIT, Again, Stop, next_step
from contracts.failures import POLICIES, Category, Outcome, Policy, SideEffect

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FAR = NOW + timedelta(days=7)
RATE_LIMITED = POLICIES[Category.RATE_LIMITED]
TRANSIENT = POLICIES[Category.TRANSIENT]


def outcome(retry_after: timedelta | None = None) -> Outcome:
    return Outcome(
        category=Category.RATE_LIMITED,
        code="http_429",
        message="slow down",
        side_effect=SideEffect.NONE,
        retry_after=retry_after,
    )


def after(
    failures: int = 1,
    *,
    asked: timedelta | None = None,
    policy: Policy | None = RATE_LIMITED,
    deadline: datetime = FAR,
    jitter: float = 0,
) -> Again | Stop:
    return next_step(outcome(asked), policy, failures, NOW, deadline, jitter)


def test_without_a_policy_a_person_is_told_at_once() -> None:
    assert after(policy=None) == Stop()
    assert after(policy=None, asked=timedelta(seconds=1)) == Stop()


def test_a_failure_is_tried_again_after_its_policys_wait() -> None:
    assert after(1) == Again(at=NOW + timedelta(seconds=5), not_before=None)
    assert after(3) == Again(at=NOW + timedelta(seconds=20), not_before=None)
    assert after(3, jitter=1) == Again(at=NOW + timedelta(seconds=25), not_before=None)


@pytest.mark.parametrize("category", POLICIES)
def test_the_last_attempt_of_the_budget_is_the_last(category: Category) -> None:
    policy = POLICIES[category]
    assert isinstance(after(policy.attempts - 1, policy=policy), Again)
    stop = after(policy.attempts, policy=policy)
    assert stop == Stop(f"after {policy.attempts} attempts")
    # Also where the tool says when to come back.
    assert after(policy.attempts, policy=policy, asked=timedelta(seconds=1)) == stop
    assert after(policy.attempts + 1, policy=policy) == Stop(f"after {policy.attempts + 1} attempts")


def test_what_the_tool_asks_for_takes_the_place_of_the_policys_wait() -> None:
    asked = timedelta(seconds=120)
    assert after(5, asked=asked) == Again(at=NOW + asked, not_before=NOW + asked)


def test_nothing_is_earlier_than_the_tool_allows_and_jitter_is_on_top() -> None:
    step = after(asked=timedelta(seconds=120), jitter=1)
    assert isinstance(step, Again)
    assert step.not_before == NOW + timedelta(seconds=120)
    assert NOW + timedelta(seconds=120) < step.at <= NOW + timedelta(seconds=125)


@pytest.mark.parametrize("asked", [timedelta(0), MAX_WAIT])
def test_up_to_a_day_is_waited_for(asked: timedelta) -> None:
    assert after(asked=asked) == Again(at=NOW + asked, not_before=NOW + asked)


@pytest.mark.parametrize("asked", [MAX_WAIT + timedelta(seconds=1), timedelta(seconds=9_999_999_999)])
def test_a_tool_that_asks_for_more_than_a_day_is_not_waited_for(asked: timedelta) -> None:
    step = after(asked=asked)
    assert isinstance(step, Stop)
    assert "more than a day" in step.why
    assert not step.late


def test_a_tool_that_asks_for_more_than_the_deadline_leaves_is_not_waited_for() -> None:
    step = after(asked=timedelta(seconds=61), deadline=NOW + timedelta(seconds=60))
    assert isinstance(step, Stop)
    assert "past the node's deadline" in step.why


def test_an_attempt_that_would_come_after_the_deadline_is_not_waited_for() -> None:
    step = after(3, deadline=NOW + timedelta(seconds=19))
    assert isinstance(step, Stop)
    assert step.late
    assert isinstance(after(3, deadline=NOW + timedelta(seconds=20)), Again)
    assert isinstance(after(deadline=NOW - timedelta(seconds=1)), Stop)


@given(
    failures=st.integers(0, 20),
    jitter=st.floats(0, 1),
    asked=st.none() | st.timedeltas(timedelta(0), timedelta(days=400_000)),
    left=st.timedeltas(timedelta(days=-1), timedelta(days=30)),
    policy=st.sampled_from(list(POLICIES.values())),
)
def test_whatever_comes_the_next_attempt_is_after_the_floor_and_before_the_deadline(
    failures: int, jitter: float, asked: timedelta | None, left: timedelta, policy: Policy
) -> None:
    step = after(failures, asked=asked, policy=policy, deadline=NOW + left, jitter=jitter)
    if isinstance(step, Again):
        assert failures < policy.attempts
        assert NOW <= step.at <= NOW + left
        assert step.not_before == (None if asked is None else NOW + asked)
        assert asked is None or NOW + asked <= step.at <= NOW + asked + policy.initial
