"""The taxonomy's tables, as the semantics have them, and the rules over them."""

import itertools
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.failures import (
    MAX_DELIVERIES_WITHOUT_ATTEMPT,
    MAX_MESSAGE_BYTES,
    MAX_RESENDS_AFTER_ABSENT,
    POLICIES,
    TERMINAL_CATEGORIES,
    UNCOUNTED,
    Category,
    Code,
    Policy,
    SideEffect,
    budget_left,
    clip_message,
    operation_side_effect,
)

WAITS = {
    Category.TRANSIENT: [1, 2, 4, 8, 16],
    Category.RATE_LIMITED: [5, 10, 20, 40, 80, 160, 300, 300, 300],
    Category.DEPENDENCY_DOWN: [5, 10, 20, 40, 80, 160, 320, 600, 600, 600, 600],
}
"""The seconds between the attempts of a category, until it runs out."""


def test_there_are_six_categories_and_three_side_effects() -> None:
    assert list(Category) == [
        "TRANSIENT",
        "RATE_LIMITED",
        "DEPENDENCY_DOWN",
        "INVALID_INPUT",
        "PERMISSION",
        "UNKNOWN_SIDE_EFFECT",
    ]
    assert list(SideEffect) == ["NONE", "POSSIBLE", "CONFIRMED"]


@pytest.mark.parametrize("category", list(Category))
def test_each_category_waits_as_its_policy_says_and_then_no_longer(category: Category) -> None:
    policy = POLICIES.get(category)
    waits = []
    for failures in itertools.count(1):
        if policy is None or not budget_left(policy, failures):
            break
        waits.append(policy.wait_after(failures, jitter=0).total_seconds())
    assert waits == WAITS.get(category, [])


def test_what_has_no_policy_is_what_temporal_must_not_retry() -> None:
    assert set(TERMINAL_CATEGORIES) == set(Category) - POLICIES.keys()
    assert set(TERMINAL_CATEGORIES) == {
        Category.INVALID_INPUT,
        Category.PERMISSION,
        Category.UNKNOWN_SIDE_EFFECT,
    }
    assert not budget_left(None, 0)


def test_the_other_limits_are_those_of_the_semantics() -> None:
    assert (MAX_RESENDS_AFTER_ABSENT, MAX_DELIVERIES_WITHOUT_ATTEMPT, MAX_MESSAGE_BYTES) == (3, 20, 2048)


def test_only_our_own_faults_cost_nothing() -> None:
    assert {Code.POOL_EXHAUSTED, Code.CANCELLED, Code.LEASE_LOST} == UNCOUNTED
    assert Code.WORKER_LOST not in UNCOUNTED


@given(
    failures=st.integers(1, 10**6),
    jitter=st.floats(0, 1),
    backoff=st.floats(1, 100),
    initial=st.floats(0.001, 10**6),
    maximum=st.floats(0.001, 10**6),
)
def test_jitter_only_ever_adds_a_quarter_at_most(
    failures: int, jitter: float, backoff: float, initial: float, maximum: float
) -> None:
    policy = Policy(initial=timedelta(seconds=initial), backoff=backoff, maximum=timedelta(seconds=maximum), attempts=1)
    bare = policy.wait_after(failures, 0)
    assert min(policy.initial, policy.maximum) <= bare <= policy.maximum
    assert bare <= policy.wait_after(failures, jitter) <= bare * 1.25 + timedelta(microseconds=1)
    assert bare <= policy.wait_after(failures + 1, 0)


@pytest.mark.parametrize(
    ("unsettled", "worst"),
    [
        ([], SideEffect.NONE),
        ([SideEffect.NONE, SideEffect.NONE], SideEffect.NONE),
        # A 403 after a read timeout is still POSSIBLE.
        ([SideEffect.POSSIBLE, SideEffect.NONE], SideEffect.POSSIBLE),
        ([SideEffect.NONE, SideEffect.POSSIBLE], SideEffect.POSSIBLE),
        ([SideEffect.CONFIRMED, SideEffect.POSSIBLE, SideEffect.NONE], SideEffect.CONFIRMED),
        ([SideEffect.POSSIBLE, SideEffect.CONFIRMED], SideEffect.CONFIRMED),
    ],
)
def test_an_operations_side_effect_is_the_worst_of_what_nothing_has_settled(
    unsettled: list[SideEffect], worst: SideEffect
) -> None:
    assert operation_side_effect(unsettled) is worst


@pytest.mark.parametrize("message", ["", "short", "x" * MAX_MESSAGE_BYTES, "é" * (MAX_MESSAGE_BYTES // 2)])
def test_a_message_within_the_limit_stays_as_it_is(message: str) -> None:
    assert clip_message(message) == message


@given(st.text(min_size=1, max_size=30), st.integers(1, 3000))
def test_a_longer_message_is_cut_at_a_characters_boundary(text: str, times: int) -> None:
    message = text * times
    clipped = clip_message(message)
    encoded = clipped.encode()
    assert len(encoded) <= MAX_MESSAGE_BYTES
    if len(message.encode("utf-8", "replace")) > MAX_MESSAGE_BYTES:
        assert clipped.endswith("…")
        assert message.encode("utf-8", "replace").decode().startswith(clipped[:-1])
