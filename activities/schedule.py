"""What to do after a failed attempt: a decision as a value. Pure."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from contracts.failures import Outcome, Policy, budget_left

__all__ = ["MAX_WAIT", "Again", "Stop", "next_step"]

MAX_WAIT: Final = timedelta(days=1)
"""A tool that asks for more is not waited for: a person is told at once."""


@dataclass(frozen=True, slots=True)
class Again:
    """Try again at that time; the tool forbids it before ``not_before``."""

    at: datetime
    not_before: datetime | None


@dataclass(frozen=True, slots=True)
class Stop:
    """Do not try again by itself; ``why`` explains it, if the category does not, and ``late`` that time has run out."""

    why: str = ""
    late: bool = False


def next_step(
    outcome: Outcome, policy: Policy | None, failures: int, now: datetime, deadline: datetime, jitter: float
) -> Again | Stop:
    """Decides what follows a failed attempt.

    Args:
        outcome: How it failed.
        policy: Its category's policy; None where it is never retried.
        failures: Failures of the category since the last accepted redrive, this one included.
        now: The present.
        deadline: The node's.
        jitter: 0 to 1; it only ever adds to the wait.
    """
    if policy is None:
        return Stop()
    if not budget_left(policy, failures):
        return Stop(f"after {failures} attempts" if failures > 1 else "")
    wait = policy.wait_after(failures, jitter)
    not_before = None
    if outcome.retry_after is not None:
        floor = outcome.retry_after
        if floor > MAX_WAIT:
            return Stop(f"the tool asks to be left alone for {floor.total_seconds():.0f} s, which is more than a day")
        if now + floor > deadline:
            return Stop(f"the tool asks to be left alone for {floor.total_seconds():.0f} s, past the node's deadline")
        not_before = now + floor
        # The floor takes the place of the first wait; jitter is on top of it, never below.
        wait = floor + timedelta(seconds=jitter * max(policy.initial.total_seconds(), 0.1) / 4)
    if now + wait > deadline:
        return Stop("the next attempt would come after the node's deadline", late=True)
    return Again(at=now + wait, not_before=not_before)
