"""The ledger's protocol against a model: workers that claim, crash, wake up late and commit, and a person who decides.

Whatever the order, no claim is granted while an earlier attempt of the operation may have had its effect, unless that
was settled, accepted by a person, or is repeated by one who has seen it; and at most one epoch is alive.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from activities.ledger.interface import LEASE, Ledger
from activities.ledger.records import Busy, ClaimRequest, Granted, Settled, Stale, Unsettled
from contracts.dead_letters import DecisionOutcome
from contracts.dispatch import Change, DecideRequest, NodeEnd
from contracts.failures import SideEffect
from contracts.identity import OperationId
from tests.unit.ledger_lab import (
    LOST_ANSWER,
    LOST_RESULT,
    REFUSED,
    UNUSABLE_RESULT,
    Backend,
    ManualClock,
    decision,
    moment,
    request,
)

Step = Callable[[], Coroutine[Any, Any, None]]

WALKS = 80
STEPS = 40


@dataclass
class Attempt:
    """What is really known of one attempt."""

    epoch: int
    effect: SideEffect = SideEffect.POSSIBLE
    settled: bool = False
    accepted: bool = False
    unusable: bool = False

    @property
    def at_risk(self) -> bool:
        return self.effect is not SideEffect.NONE and not self.settled and not self.accepted


@dataclass
class Operation:
    """One logical attempt: its attempts, the epoch that may commit, and who holds it until when."""

    attempts: list[Attempt] = field(default_factory=list)
    epoch: int = 0
    held: bool = False
    until: float = 0

    def fence(self) -> None:
        """Whoever holds it does not any more."""
        self.epoch += 1 if self.attempts else 0
        self.held = False


@dataclass(frozen=True)
class Grant:
    """What a worker was granted, and may still act on, however late."""

    logical_attempt: int
    epoch: int


def worst(effects: list[SideEffect]) -> SideEffect:
    return max(effects, key=list(SideEffect).index, default=SideEffect.NONE)


class Walk:
    """One node, the ledger's and the model's, and a random way through what can happen to it."""

    def __init__(self, seed: int, ledgers: list[Ledger], clock: ManualClock) -> None:
        self.happened: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._run = f"walk-{seed}"
        self._ledgers = ledgers
        self._clock = clock
        self._operations = {1: Operation()}
        self._logical_attempt = 1
        self._redrives = 0
        self._cancelled = False
        self._end: tuple[NodeEnd, Any] | None = None
        self._grants: list[Grant] = []
        self._attempts = 0
        self._now = 0
        self._seen = 0
        self._fence = 0
        self._numbers = itertools.count(1)

    async def step(self) -> None:
        """Something happens, and what must always hold is looked at."""
        steps: list[Step] = [*[self._claim] * 4, *[self._time_passes] * 2]
        if self._grants:
            steps += [self._fail] * 4 + [self._renew, self._the_tool_says_absent, self._redrive]
            steps += [self._claim_by_an_old_delivery, self._claim_an_older_logical_attempt]
        if self._attempts > 2:
            steps += [self._the_tool_says_committed_but_unusable]
        if self._attempts > 3 and self._random.random() < 0.3:
            steps = [self._succeed, self._the_tool_says_committed, *[self._end_by_a_person] * 3, self._cancel]
        await self._random.choice(steps)()
        await self._nothing_is_forgotten()

    @property
    def over(self) -> bool:
        return self._end is not None

    async def afterwards(self) -> None:
        """What has ended stays as it is, whoever comes."""
        for change in Change:
            await self._decide(change)
        await self._ledger.cancel(self._run, ["n"], moment(self._now))
        for again in (self._claim, self._succeed, self._fail, self._renew, self._claim):
            await again()
            await self._nothing_is_forgotten()

    @property
    def _ledger(self) -> Ledger:
        """One of the two workers'."""
        return self._random.choice(self._ledgers)

    @property
    def _current(self) -> Operation:
        return self._operations[self._logical_attempt]

    def _id(self, logical_attempt: int) -> OperationId:
        return OperationId(run_id=self._run, node_id="n", logical_attempt=logical_attempt)

    # Workers.

    async def _claim(self) -> None:
        """A delivery, or the last one once more, by a worker who repeats what is unsettled, or does not."""
        self._now += self._random.randint(0, 1)
        operation = self._current
        answer = await self._ledger.claim(self._request())
        risky = [attempt for attempt in operation.attempts if attempt.at_risk]
        if isinstance(answer, Unsettled) and answer.resendable and self._random.random() < 0.5:
            assert answer.attempts
            assert not any(attempt.unusable for attempt in risky)
            answer = await self._ledger.claim(self._request(answer.epoch))
            risky = []
            self.happened["repeated on purpose"] += isinstance(answer, Granted)
        self.happened[type(answer).__name__] += 1
        if self._end is not None:
            assert isinstance(answer, Settled)
            assert (answer.end, answer.output) == self._end
        elif self._cancelled:
            assert isinstance(answer, Settled)
            assert answer.end is NodeEnd.CANCELLED
        else:
            await self._expect(answer, operation, risky)

    def _request(self, despite_epoch: int | None = None) -> ClaimRequest:
        return request(
            self._now,
            operation=self._id(self._logical_attempt),
            redrives=self._redrives,
            owner=f"owner-{next(self._numbers)}",
            despite_epoch=despite_epoch,
        )

    async def _expect(self, answer: object, operation: Operation, risky: list[Attempt]) -> None:
        self._seen = self._now
        if operation.held and self._clock.seconds < operation.until:
            assert isinstance(answer, Busy)
        elif risky:
            assert isinstance(answer, Unsettled)
            assert answer.side_effect is worst([attempt.effect for attempt in risky])
            assert len(answer.attempts) == len(risky)
        else:
            assert isinstance(answer, Granted)
            assert answer.epoch > operation.epoch
            for old in self._grants:
                assert not await self._ledger.renew(self._id(old.logical_attempt), old.epoch)
            self._attempts += 1
            assert answer.attempt == self._attempts
            operation.epoch, operation.held = answer.epoch, True
            operation.until = self._clock.seconds + LEASE.total_seconds()
            operation.attempts.append(Attempt(answer.epoch))
            self._grants.append(Grant(self._logical_attempt, answer.epoch))

    async def _claim_by_an_old_delivery(self) -> None:
        scheduled = self._now - self._random.randint(1, 5)
        if scheduled < max(self._fence, self._seen):
            claim = self._request().model_copy(update={"scheduled_at": moment(scheduled)})
            assert isinstance(await self._ledger.claim(claim), Stale | Settled)

    async def _claim_an_older_logical_attempt(self) -> None:
        if self._logical_attempt > 1:
            claim = self._request().model_copy(update={"operation": self._id(self._logical_attempt - 1)})
            assert isinstance(await self._ledger.claim(claim), Stale | Settled)

    def _pick(self) -> tuple[OperationId, Operation, Attempt, bool]:
        """One of the last grants, be it current or long overtaken, and whether a commit under it is to be taken."""
        grant = self._random.choice([*self._grants[-2:], *self._grants[-1:] * 4])
        operation = self._operations[grant.logical_attempt]
        attempt = next(attempt for attempt in operation.attempts if attempt.epoch == grant.epoch)
        alive = operation.held and operation.epoch == grant.epoch
        self.happened["committed in time" if alive else "came too late"] += 1
        return self._id(grant.logical_attempt), operation, attempt, alive

    async def _succeed(self) -> None:
        name, operation, attempt, alive = self._pick()
        output = next(self._numbers)
        assert await self._ledger.succeed(name, attempt.epoch, output) == alive
        if alive:
            operation.held = False
            for earlier in operation.attempts:
                earlier.settled = True
            self._end = (NodeEnd.SUCCEEDED, output)

    async def _fail(self) -> None:
        name, operation, attempt, alive = self._pick()
        how = self._random.choice([REFUSED, REFUSED, LOST_ANSWER, LOST_ANSWER, LOST_RESULT, UNUSABLE_RESULT])
        said = how.model_copy(update={"message": f"failure {next(self._numbers)}"})
        assert await self._ledger.fail(name, attempt.epoch, said) == alive
        if alive:
            operation.held = False
            attempt.effect = how.side_effect
            if how == UNUSABLE_RESULT:
                self._confirmed(operation)

    async def _renew(self) -> None:
        name, operation, attempt, alive = self._pick()
        running = alive and operation.until > self._clock.seconds
        assert await self._ledger.renew(name, attempt.epoch) == running
        if running:
            operation.until = self._clock.seconds + LEASE.total_seconds()

    async def _time_passes(self) -> None:
        """Also how a crash looks from outside: nobody renews."""
        self._clock.advance(self._random.choice([1.0, 4.0, 11.0]))

    # The tool is asked.

    async def _the_tool_says_absent(self) -> None:
        """About everything so far, or about what there was when the question was asked."""
        if self._end is not None:
            return
        operation = self._current
        epoch = operation.epoch - self._random.randint(0, 2)
        await self._ledger.settle_absent(self._id(self._logical_attempt), epoch)
        for attempt in operation.attempts:
            attempt.settled = attempt.settled or attempt.epoch <= epoch
        if epoch == operation.epoch:
            operation.fence()

    async def _the_tool_says_committed(self) -> None:
        if self._end is not None or not self._current.attempts:
            return
        operation = self._current
        output = next(self._numbers)
        await self._ledger.settle_committed(self._id(self._logical_attempt), operation.epoch, output)
        for attempt in operation.attempts:
            attempt.settled = True
        operation.fence()
        self._end = (NodeEnd.SUCCEEDED, output)

    async def _the_tool_says_committed_but_unusable(self) -> None:
        await self._ledger.confirm(self._id(self._logical_attempt))
        self._confirmed(self._current)

    def _confirmed(self, operation: Operation) -> None:
        for attempt in operation.attempts:
            if attempt.effect is not SideEffect.NONE and not attempt.settled:
                attempt.effect, attempt.unusable = SideEffect.CONFIRMED, True

    # A person decides.

    async def _redrive(self) -> None:
        if self._random.random() < 0.4:
            await self._decide(Change.REDRIVE)

    async def _end_by_a_person(self) -> None:
        await self._decide(self._random.choice([Change.RESOLVE, Change.DISCARD]))

    async def _decide(self, change: Change) -> None:
        """By somebody who has looked at the entry just now, or before its last redrive; sent twice."""
        self._now += 1
        looked_at = max(0, self._redrives - (self._random.random() < 0.3))
        output = next(self._numbers)
        wanted = decision(
            change,
            f"d-{next(self._numbers)}",
            run_id=self._run,
            node_id="n",
            redrives=looked_at,
            logical_attempt=self._logical_attempt,
            new_operation=change is Change.REDRIVE and self._random.random() < 0.3,
            accepts_risk=self._random.random() < 0.5,
            output=output,
        )
        answer = await self._ledger.decide(wanted, moment(self._now))
        accepted = (
            self._end is None and looked_at == self._redrives and not (self._cancelled and change is Change.REDRIVE)
        )
        assert (answer.record.outcome is DecisionOutcome.ACCEPTED) == accepted
        again = await self._ledger.decide(wanted, moment(self._now))
        assert again.record == answer.record
        self.happened[f"{change} {answer.record.outcome}"] += 1
        if accepted:
            self._accepted(change, wanted, output)

    def _accepted(self, change: Change, wanted: DecideRequest, output: int) -> None:
        operation = self._current
        operation.fence()
        self._fence = self._now
        match change:
            case Change.REDRIVE:
                for attempt in operation.attempts:
                    attempt.accepted = attempt.accepted or wanted.accepts_risk
                    attempt.unusable = attempt.unusable and attempt.settled
                self._redrives += 1
                if wanted.new_operation:
                    self._logical_attempt += 1
                    self._operations[self._logical_attempt] = Operation()
                    self._seen = 0
            case Change.RESOLVE:
                for attempt in operation.attempts:
                    attempt.settled = True
                self._end = (NodeEnd.RESOLVED, output)
            case Change.DISCARD:
                self._end = (NodeEnd.DISCARDED, None)

    async def _cancel(self) -> None:
        self._now += 1
        await self._ledger.cancel(self._run, ["n"], moment(self._now))
        if self._end is None:
            self._cancelled = True
            self.happened["cancelled"] += 1

    # What holds at any time.

    async def _nothing_is_forgotten(self) -> None:
        node = await self._ledger.node(self._run, "n")
        if not self._attempts:
            return
        assert node is not None
        assert len(node.attempts) == self._attempts
        assert node.side_effect is worst([attempt.effect for attempt in self._current.attempts if not attempt.settled])
        assert node.end == (self._end[0] if self._end else None)
        assert (node.logical_attempt, node.redrives, node.cancelled) == (
            self._logical_attempt,
            self._redrives,
            self._cancelled,
        )
        assert node.in_flight == (self._current.held and self._clock.seconds < self._current.until)


async def test_whatever_the_order_an_operation_is_repeated_only_on_purpose(backend: Backend) -> None:
    ledgers = [await backend.open(), await backend.open()]
    happened: Counter[str] = Counter()
    for seed in range(WALKS):
        walk = Walk(seed, ledgers, backend.clock)
        for step in range(STEPS):
            try:
                await walk.step()
            except AssertionError as error:
                raise AssertionError(f"walk {seed}, step {step}: {error}") from error
            if walk.over:
                await walk.afterwards()
                break
        happened += walk.happened
    # A walk that never came anywhere would prove nothing.
    for what in EVERYTHING:
        assert happened[what] >= 5, (what, happened)


EVERYTHING = [
    "Granted",
    "Settled",
    "Unsettled",
    "Busy",
    "repeated on purpose",
    "committed in time",
    "came too late",
    "cancelled",
    *(f"{change} {outcome}" for change in Change for outcome in (DecisionOutcome.ACCEPTED, DecisionOutcome.REFUSED)),
]
