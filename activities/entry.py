"""The work on one delivery of an operation: claim, send, classify, commit. All that concerns HTTP and the ledger."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Final

import aiohttp
from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from activities.classify import Success, classify_answer, classify_exception, declare
from activities.context import WORKER, Context, attempt_budgets, delivery, facts, unique_owner
from activities.http import Call, NotSentError
from activities.ledger.clock import boot_seconds
from activities.ledger.errors import LedgerUnavailableError
from activities.ledger.interface import LEASE, RENEW_EVERY
from activities.ledger.records import (
    Begun,
    Busy,
    ClaimAnswer,
    ClaimRequest,
    Granted,
    Mismatch,
    Paused,
    Settled,
    Spent,
    Stale,
    Unsettled,
)
from activities.requests import body_and_url, call_headers, input_problems
from activities.schedule import MAX_WAIT, Again, Stop, next_step
from activities.threads import look_into
from contracts.canonical import content_hash, json_size
from contracts.dispatch import CallResult, Dispatch, FailureDetails, NodeEnd
from contracts.failures import (
    MAX_DELIVERIES_WITHOUT_ATTEMPT,
    POLICIES,
    UNCOUNTED,
    Category,
    Code,
    Outcome,
    SideEffect,
    clip_message,
)
from contracts.runs import Source
from contracts.tools import Approval, Effect, Idempotency, Tool

__all__ = ["Gate", "OperationEntry"]

_SLOT_WAIT_SECONDS: Final = 5.0
_LONGEST_WAIT: Final = timedelta(seconds=30)
"""After which a delivery that got no attempt comes back."""
_COMMIT_AGAIN_SECONDS: Final = 1.0
_PENDING_MESSAGE: Final = 1000
"""Bytes of a message while the call is pending. Of a failure above 4 KB, with its causes and details, the server shows
nothing at all (``limit.mutableStateActivityFailureSize.error``); the ledger has the whole of it."""
_LAST_COMMIT: Final = timedelta(seconds=5)
"""Before the activity's own timeout: the time to say that the ledger never came back."""


class Gate:
    """What this process's calls of one tool pass through: so many at once, and so far apart."""

    def __init__(self, tool: Tool) -> None:
        self.slots = asyncio.Semaphore(tool.concurrency)
        self.interval = timedelta(seconds=1 / tool.rate_per_second) if tool.rate_per_second is not None else None
        self._free_at = 0.0
        self._turns = asyncio.Lock()

    async def turn(self, wait: timedelta) -> None:
        """Lets so much time pass; and more, if this process is busy and wakes all at once whose time has come."""
        await asyncio.sleep(wait.total_seconds())
        if self.interval is None:
            return
        async with self._turns:
            now = boot_seconds()
            start = max(self._free_at, now)
            if start > now:
                await asyncio.sleep(start - now)
            # Who woke late is followed at once, but by one alone.
            self._free_at = max(start + self.interval.total_seconds(), boot_seconds())


class OperationEntry:
    """One delivery, and the work on it, which outlives it: called off, it ends by itself."""

    def __init__(self, context: Context, gate: Gate | None, dispatch: Dispatch) -> None:
        self._context = context
        self._gate = gate
        self._dispatch = dispatch
        self._operation = dispatch.operation
        self._delivery = delivery()
        self._since_delivered = boot_seconds()
        info = activity.info()
        self._local = info.is_local
        self._delivered_at = info.started_time
        self._scheduled_at = info.current_attempt_scheduled_time
        if dispatch.made_at is not None:
            # Its own times are by this worker's clock.
            self._scheduled_at = self._delivered_at = dispatch.made_at
        self._commit_until = self._delivered_at + (info.start_to_close_timeout or timedelta(0)) - _LAST_COMMIT
        details = info.heartbeat_details
        self._attempted = details[0] if details and isinstance(details[0], int) else 0
        self._attempted_before = self._attempted
        self._claimed_at = 0.0
        self._lease_until = 0.0
        self._granted: Granted | None = None
        self._called_off = False
        self.in_line = True
        """For its turn, so that nothing has been done for it."""
        self.work = asyncio.create_task(self._perform())

    def performs(self, dispatch: Dispatch) -> bool:
        """Whether this is the same work, though made out anew by a workflow task that was lost."""
        return (dispatch.operation, dispatch.fingerprint, dispatch.input, dispatch.approval) == (
            self._operation,
            self._dispatch.fingerprint,
            self._dispatch.input,
            self._dispatch.approval,
        )

    async def ended(self, within: float | None = None) -> bool:
        """Waits for the end of the work, at most so many seconds; a cancel meanwhile calls off what is not yet sent."""
        until = boot_seconds() + within if within is not None else None
        while not self.work.done():
            left = until - boot_seconds() if until is not None else None
            if left is not None and left <= 0:
                return False
            try:
                await asyncio.wait({self.work}, timeout=left)
            except asyncio.CancelledError:
                self._called_off = True
        return True

    async def beat(self) -> None:
        """Heartbeats, never behind the ledger: one that is away must not look like a lost worker."""
        while True:
            await asyncio.sleep(RENEW_EVERY.total_seconds())
            activity.heartbeat(self._attempted)

    async def _keep_lease(self) -> None:
        """Renews the lease under a long call; ends only by being cancelled."""
        while True:
            await asyncio.sleep(RENEW_EVERY.total_seconds())
            if self._granted is None:
                continue
            before = boot_seconds()
            try:
                if await self._context.ledger.renew(self._operation, self._granted.epoch):
                    self._lease_from(before)
            except LedgerUnavailableError:
                # The lease then runs out by itself, and nothing is sent any more; what was sent is fenced by its epoch.
                activity.logger.warning("the lease of %s could not be renewed", self._operation)

    async def _perform(self) -> CallResult:
        lease = asyncio.create_task(self._keep_lease())
        try:
            return await self._in_turn()
        finally:
            lease.cancel()

    async def _in_turn(self) -> CallResult:
        tool = self._context.catalog.get(self._dispatch.tool)
        slot = self._gate.slots if self._gate is not None else contextlib.nullcontext()
        try:
            # A slot comes before the claim: waiting for one costs no attempt.
            async with asyncio.timeout(_SLOT_WAIT_SECONDS):
                await slot.__aenter__()
            self.in_line = False
        except TimeoutError:
            message = "all that may call the tool at once are calling it"
            raise self._no_attempt(Category.TRANSIENT, Code.NO_SLOT, message, timedelta(seconds=1)) from None
        try:
            return await self._with_slot(tool)
        finally:
            await slot.__aexit__(None, None, None)

    async def _with_slot(self, tool: Tool | None) -> CallResult:
        try:
            answer = await self._claim(tool)
        except LedgerUnavailableError as error:
            raise self._no_attempt(*_away(error)) from None
        match answer:
            case Granted():
                return await self._attempt(tool, answer)
            case Settled():
                return CallResult(
                    end=answer.end,
                    output=answer.output,
                    source=Source.REPLAYED if answer.source is Source.EXECUTED else answer.source,
                    operation_id=answer.operation_id,
                    attempt_count=answer.attempt_count,
                )
            case Begun():
                raise self._begun_before()
            case Stale() if answer.current is not None and self._dispatch.first_attempt:
                raise self._begun_before()
            case Stale():
                return self._moved(answer, tool)
            case Busy(floor=True):
                raise self._error(_LEFT_ALONE, 0, final=False, delay=answer.remaining)
            case Busy() if self._dispatch.first_attempt:
                # The run's own call goes on in another process; its lease runs as long as it takes.
                self._attempted = self._delivery.attempt - 1
                raise self._no_attempt(Category.TRANSIENT, Code.BUSY, _AT_WORK, timedelta(seconds=1))
            case Busy():
                raise self._no_attempt(
                    Category.TRANSIENT,
                    Code.BUSY,
                    _AT_WORK,
                    answer.remaining,
                )
            case Paused():
                raise self._paused(answer)
            case Unsettled():
                raise self._error(_unsettled(answer), answer.attempts[-1].attempt, final=True)
            case Spent():
                raise self._error(answer.outcome, answer.attempt, final=True)
            case Mismatch():
                raise self._error(_MISMATCH, 0, final=True)

    async def _claim(self, tool: Tool | None) -> ClaimAnswer:
        """Claims; and once more, where earlier attempts are unsettled and the tool may be called again all the same."""
        request = ClaimRequest(
            operation=self._operation,
            redrives=self._dispatch.redrives,
            tool=self._dispatch.tool,
            fingerprint=self._dispatch.fingerprint,
            input=self._dispatch.input,
            input_hash=await look_into(self._dispatch.input, content_hash, self._dispatch.input),
            scheduled_at=self._scheduled_at,
            node_started_at=self._dispatch.node_started_at,
            now=self._now(),
            delivery=self._delivery,
            owner=unique_owner(),
            worker=WORKER,
            budgets=attempt_budgets(tool),
            risk=SideEffect.NONE if tool is not None and tool.effect is Effect.READ else SideEffect.POSSIBLE,
            interval=self._gate.interval if self._gate is not None else None,
            first_only=self._dispatch.first_attempt,
        )
        answer = await self._ask(request)
        if (
            isinstance(answer, Unsettled)
            and tool is not None
            and answer.resendable
            and tool.harmless_to_repeat(answer.since_first_send)
        ):
            answer = await self._ask(request.model_copy(update={"despite_epoch": answer.epoch}))
        if isinstance(answer, Granted):
            self._granted = answer
            self._attempted_before, self._attempted = self._attempted, self._delivery.attempt
        return answer

    async def _ask(self, request: ClaimRequest) -> ClaimAnswer:
        """Claims; and asks again, for as long as a lease, if nobody knows whether the claim was taken."""
        self._claimed_at = boot_seconds()
        while True:
            self._lease_from(boot_seconds())
            try:
                return await self._context.ledger.claim(request)
            except LedgerUnavailableError as error:
                if not error.uncertain or boot_seconds() >= self._claimed_at + LEASE.total_seconds():
                    raise
                await asyncio.sleep(_COMMIT_AGAIN_SECONDS)

    async def _attempt(self, tool: Tool | None, granted: Granted) -> CallResult:
        if self._gate is not None:
            await self._gate.turn(granted.wait)
        refused = await look_into(self._dispatch.input, self._refusal, tool, granted)
        if tool is None or refused is not None:
            raise await self._failed(tool, granted, refused or _tool_missing(self._dispatch.tool))
        result = await self._send(tool, granted)
        if isinstance(result, Outcome):
            raise await self._failed(tool, granted, result)
        if not await self._commit(lambda: self._context.ledger.succeed(self._operation, granted.epoch, result.output)):
            raise self._no_attempt(Category.TRANSIENT, Code.FENCED, _FENCED, timedelta(seconds=1))
        return CallResult(
            end=NodeEnd.SUCCEEDED,
            output=result.output,
            source=Source.EXECUTED,
            operation_id=str(self._operation),
            attempt_count=granted.attempt,
        )

    def _refusal(self, tool: Tool | None, granted: Granted) -> Outcome | None:
        """Why nothing is sent, found without a call; None if it may be."""
        now = self._now()
        dispatch = self._dispatch
        if now >= dispatch.deadline:
            last = granted.last_category or Category.TRANSIENT
            return _not_sent(last, Code.DEADLINE_EXCEEDED, "the node's deadline passed before the tool could be called")
        if tool is None:
            return _tool_missing(dispatch.tool)
        if granted.fingerprint != tool.fingerprint:
            return _not_sent(
                Category.TRANSIENT,
                Code.TOOL_CHANGED,
                "this worker's catalog has another version of the tool than the operation began with",
            )
        if dispatch.refusal is not None:
            return _not_sent(dispatch.refusal.category, dispatch.refusal.code, dispatch.refusal.message)
        if dispatch.approval is None and tool.approval is Approval.REQUIRED:
            return _not_sent(
                Category.PERMISSION, Code.APPROVAL_REQUIRED, "the tool requires an approval; the node has none"
            )
        if dispatch.approval is not None and dispatch.approval.expired(now):
            return _not_sent(
                Category.PERMISSION,
                Code.APPROVAL_EXPIRED,
                f"the approval {dispatch.approval.id!r} expired at {dispatch.approval.expires_at:%Y-%m-%dT%H:%M:%SZ}",
            )
        largest = self._context.limits.input
        if problems := input_problems(tool, dispatch.input, largest):
            large = json_size(dispatch.input) > largest
            code = Code.INPUT_TOO_LARGE if large else Code.INPUT_INVALID
            return _not_sent(Category.INVALID_INPUT, code, "; ".join(problems))
        return None

    async def _send(self, tool: Tool, granted: Granted) -> Success | Outcome:
        url, body = body_and_url(tool, self._dispatch.input)
        call = Call(self._check, self._claimed_at + (granted.wait + tool.timeout).total_seconds())
        holds = tool.harmless_to_repeat(granted.since_first_send)
        try:
            answer = await self._context.http.send(
                tool,
                tool.method,
                url,
                call_headers(
                    tool, self._operation.idempotency_key, self._dispatch.trace_id, self._dispatch.correlation_id
                ),
                body,
                call,
            )
        except NotSentError as error:
            return _not_sent(Category.TRANSIENT, error.code, str(error))
        except aiohttp.ClientError as error:
            outcome = classify_exception(error, call.sent)
            outcome = outcome.model_copy(update={"message": self._context.secrets.redact(outcome.message)})
            return declare(outcome, tool, holds)
        by_key = holds and tool.idempotency is Idempotency.KEY
        meaning = await look_into(
            answer.body, classify_answer, tool, answer, dedupes_by_key=by_key, largest=self._context.limits.output
        )
        return declare(meaning, tool, holds) if isinstance(meaning, Outcome) else meaning

    def _check(self) -> None:
        """Asked as the last thing before the first byte.

        Between this and the write nothing can be fenced from here; only the remote's key can.
        """
        if self._called_off:
            raise NotSentError(Code.CANCELLED, "called off before the tool was called")
        if boot_seconds() >= self._lease_until:
            raise NotSentError(Code.LEASE_LOST, "the lease ran out before the tool could be called")

    async def _failed(self, tool: Tool | None, granted: Granted, outcome: Outcome) -> ApplicationError:
        """Commits the failure and what follows from it; answers the error to raise."""
        now = self._now()
        counts = 0 if outcome.code in UNCOUNTED else 1
        step = next_step(
            outcome,
            policy=POLICIES.get(outcome.category) if tool is None else tool.policy(outcome.category),
            failures=granted.failures.get(outcome.category, 0) + counts,
            now=now,
            deadline=self._dispatch.deadline,
            jitter=random.random(),
        )
        if outcome.code == Code.DEADLINE_EXCEEDED:
            step = Stop()
        again = step if isinstance(step, Again) else None
        committed = await self._commit(
            lambda: self._context.ledger.fail(
                self._operation,
                granted.epoch,
                outcome,
                wait=again.at - now if again else None,
                floor=min(outcome.retry_after, MAX_WAIT) if outcome.retry_after is not None else None,
            )
        )
        if not committed:
            raise self._no_attempt(Category.TRANSIENT, Code.FENCED, _FENCED, timedelta(seconds=1))
        if outcome.code == Code.CANCELLED:
            raise asyncio.CancelledError(outcome.message)
        if again is not None and outcome.code in UNCOUNTED:
            # It is listed, but costs nothing, like a delivery that got no attempt: it must not go on for ever either.
            self._attempted = self._attempted_before
            return self._no_attempt(outcome.category, Code(outcome.code), outcome.message, again.at - now)
        if again is not None:
            # From now, not from before the commit: whoever waits must not come back before the ledger's own time.
            wait = again.at - now
            return self._error(outcome, granted.attempt, final=False, next_eligible_at=self._now() + wait, delay=wait)
        if isinstance(step, Stop) and step.why:
            update = {"message": clip_message(f"{outcome.message} ({step.why})")}
            outcome = outcome.model_copy(update=update | ({"code": Code.DEADLINE_EXCEEDED} if step.late else {}))
        return self._error(outcome, granted.attempt, final=True)

    async def _commit(self, work: Callable[[], Awaitable[bool]]) -> bool:
        """Commits what came of a call; the answer is kept until the ledger is back, or the activity's time is up."""
        while True:
            try:
                return await work()
            except LedgerUnavailableError as error:
                if self._now() >= self._commit_until:
                    raise self._no_attempt(*_away(error)) from None
                activity.logger.warning("the ledger is away; the answer of %s is kept: %s", self._operation, error)
                await asyncio.sleep(_COMMIT_AGAIN_SECONDS)

    def _begun_before(self) -> ApplicationError:
        # Final for the run alone: with a time, so its node's workflow goes on, at once.
        return self._error(_BEGUN, 0, final=True, next_eligible_at=self._now())

    def _moved(self, stale: Stale, tool: Tool | None) -> CallResult:
        if stale.current is None:
            raise ApplicationError(
                "a newer delivery, a decision or a cancel has overtaken this one",
                type="Stale",
                # Nobody listens to a delivery that really is stale. One that only looks so, because two of the server's
                # clocks differ by a little, is scheduled anew by this, and then is not.
                next_retry_delay=timedelta(seconds=1),
                category=ApplicationErrorCategory.BENIGN,
            )
        return CallResult(
            operation_id=str(self._operation),
            attempt_count=stale.attempt_count,
            redriven=stale.current,
            tool=facts(tool, self._context) if tool is not None else None,
        )

    def _no_attempt(self, category: Category, code: Code, message: str, wait: timedelta) -> ApplicationError:
        """Comes back later without having cost an attempt; after twenty times in a row a person is told."""
        attempted = self._attempted if self._attempted <= self._delivery.attempt else 0
        in_a_row = self._delivery.attempt - attempted
        outcome = _not_sent(category, code, message)
        if in_a_row >= MAX_DELIVERIES_WITHOUT_ATTEMPT:
            message = clip_message(f"{message} ({in_a_row} deliveries in a row)")
            return self._error(outcome.model_copy(update={"message": message}), 0, final=True)
        # Not sooner than asked, but longer each time; jitter keeps a crowd from coming back together.
        patience = timedelta(seconds=0.5 * 2 ** min(in_a_row, 6) * (1 + random.random()))
        delay = min(max(wait, patience), _LONGEST_WAIT)
        return self._error(outcome, 0, final=False, next_eligible_at=self._now() + delay, delay=delay)

    def _paused(self, answer: Paused) -> ApplicationError:
        """Comes back after the tool's pause. That is nobody's failure, and none of the deliveries that are counted."""
        self._attempted = 1 + (self._attempted if self._attempted < self._delivery.attempt else 0)
        until = self._now() + answer.remaining
        message = _pause(answer, until)
        if until >= self._dispatch.deadline:
            late = f"{message}, past the node's deadline"
            return self._error(_not_sent(answer.category, Code.DEADLINE_EXCEEDED, late), 0, final=True)
        # The crowd comes back over a time that grows as long as it is kept waiting.
        spread = min(timedelta(seconds=0.5 * 2 ** min(self._delivery.attempt, 6)), _LONGEST_WAIT)
        delay = answer.remaining + spread * random.random()
        outcome = _not_sent(answer.category, Code.BUSY, message)
        return self._error(outcome, 0, final=False, next_eligible_at=self._now() + delay, delay=delay)

    def _error(
        self,
        outcome: Outcome,
        attempt: int,
        final: bool,
        next_eligible_at: datetime | None = None,
        delay: timedelta | None = None,
    ) -> ApplicationError:
        """To be raised ``from None``: see `_PENDING_MESSAGE`."""
        # The node's own workflow goes on from where the run's first attempt has come to.
        final = final or (self._dispatch.first_attempt and attempt > 0)
        if not final and not self._local:
            # Tells the next delivery whether this one got as far as an attempt. Sooner, it would cost every call.
            activity.heartbeat(self._attempted)
        message = outcome.message if final else clip_message(outcome.message, _PENDING_MESSAGE)
        return ApplicationError(
            message,
            FailureDetails(
                operation_id=str(self._operation),
                attempt=attempt,
                category=outcome.category,
                code=outcome.code,
                message=message,
                http_status=outcome.http_status,
                side_effect=outcome.side_effect,
                next_eligible_at=next_eligible_at,
                delivery=self._delivery,
            ),
            type=outcome.category,
            # Expected: a person is told by the dead letter, not by a traceback in the worker's log.
            category=ApplicationErrorCategory.BENIGN,
            non_retryable=final,
            next_retry_delay=delay,
        )

    def _now(self) -> datetime:
        """The present by Temporal's clock, which the deadline is from: this machine's own may say anything."""
        return self._delivered_at + timedelta(seconds=boot_seconds() - self._since_delivered)

    def _lease_from(self, moment: float) -> None:
        # Counted from before the claim, so that it never looks longer here than it is in the ledger.
        self._lease_until = moment + LEASE.total_seconds()


_FENCED: Final = "this delivery had been given up when it came back; what it brought changes nothing"

_AT_WORK: Final = "another delivery is at work on this operation"

_LEFT_ALONE: Final = Outcome(
    category=Category.RATE_LIMITED,
    code=Code.BUSY,
    message="the tool asked to be left alone until then",
    side_effect=SideEffect.NONE,
)

_BEGUN: Final = Outcome(
    category=Category.TRANSIENT,
    code=Code.BUSY,
    message="the operation has been attempted before; its node goes on with it",
    side_effect=SideEffect.NONE,
)

_MISMATCH: Final = Outcome(
    category=Category.INVALID_INPUT,
    code=Code.INPUT_MISMATCH,
    message="this operation was first performed with another input, and one key never carries two payloads; redrive "
    "it as a new operation",
    side_effect=SideEffect.NONE,
)


def _away(error: LedgerUnavailableError) -> tuple[Category, Code, str, timedelta]:
    return Category.DEPENDENCY_DOWN, Code.LEDGER_UNAVAILABLE, str(error), timedelta(seconds=5)


def _not_sent(category: Category, code: Code, message: str) -> Outcome:
    return Outcome(category=category, code=code, message=clip_message(message), side_effect=SideEffect.NONE)


def _tool_missing(name: str) -> Outcome:
    return _not_sent(Category.TRANSIENT, Code.TOOL_MISSING, f"this worker's catalog has no tool {name!r}")


def _pause(answer: Paused, until: datetime) -> str:
    if answer.paced:
        return "the tool is called as often as its rate_per_second allows"
    down = answer.category is Category.DEPENDENCY_DOWN
    if answer.probing:
        return f"the tool {'is down' if down else 'had asked to be left alone'}; one call probes it"
    why = "is down, and is" if down else "asked to be"
    return f"the tool {why} left alone until {until:%Y-%m-%dT%H:%M:%SZ}"


def _unsettled(answer: Unsettled) -> Outcome:
    last = answer.attempts[-1]
    return Outcome(
        category=Category.UNKNOWN_SIDE_EFFECT,
        code=last.code or Code.UNSETTLED,
        message=clip_message(f"an earlier attempt may have had its effect: {last.message or 'its end is not known'}"),
        side_effect=answer.side_effect,
        http_status=last.http_status,
    )
