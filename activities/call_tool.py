"""``call_tool``: claim, send, classify, commit, answer. It decides all that concerns HTTP and the ledger."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Final

import httpx
from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from activities.classify import Success, classify_answer, classify_exception, declare
from activities.context import WORKER, Context, attempt_budgets, delivery, facts, unique_owner
from activities.http import Call, NotSentError
from activities.ledger.errors import LedgerUnavailableError
from activities.ledger.interface import LEASE, RENEW_EVERY
from activities.ledger.records import (
    Busy,
    ClaimAnswer,
    ClaimRequest,
    Granted,
    Mismatch,
    Settled,
    Spent,
    Stale,
    Unsettled,
)
from activities.ledger.sqlite import boot_seconds
from activities.requests import body_and_url, call_headers, input_problems
from activities.schedule import Again, Stop, next_step
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
from contracts.runs import MAX_INPUT_BYTES, Source
from contracts.tools import Approval, Effect, Idempotency, Tool

__all__ = ["CallTool", "dedupes"]

_SLOT_WAIT_SECONDS: Final = 5.0
_LONGEST_WAIT: Final = timedelta(seconds=30)
"""After which a delivery that got no attempt comes back."""
_COMMIT_AGAIN_SECONDS: Final = 1.0
_LAST_COMMIT: Final = timedelta(seconds=5)
"""Before the activity's own timeout: the time to say that the ledger never came back."""


class CallTool:
    """The activity that performs a node's operation."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._slots = {tool.name: asyncio.Semaphore(tool.concurrency) for tool in context.catalog.tools.values()}

    @activity.defn(name="call_tool")
    async def call_tool(self, dispatch: Dispatch) -> CallResult:
        """Performs the operation that a dispatch names, unless the ledger knows better.

        Nothing is cancelled in mid-effect: once bytes may have gone, the call runs to its end whatever happens to the
        activity, because aborting unsends nothing and only loses the answer.

        Raises:
            ApplicationError: of the failure's category, with `FailureDetails`; retryable with the delay that the policy
                says, or, once the budget is spent, not.
        """
        entry = _Entry(self._context, self._slots, dispatch)
        work = asyncio.create_task(entry.perform())
        alive = [asyncio.create_task(entry.beat()), asyncio.create_task(entry.keep_lease())]
        try:
            while True:
                try:
                    return await asyncio.shield(work)
                except asyncio.CancelledError:
                    if work.done():
                        raise
                    entry.called_off = True
        finally:
            for task in alive:
                task.cancel()


class _Entry:
    """One delivery."""

    def __init__(self, context: Context, slots: dict[str, asyncio.Semaphore], dispatch: Dispatch) -> None:
        self._context = context
        self._slots = slots
        self._dispatch = dispatch
        self._operation = dispatch.operation
        self._delivery = delivery()
        details = activity.info().heartbeat_details
        self._attempted = details[0] if details and isinstance(details[0], int) else 0
        self._lease_until = 0.0
        self._granted: Granted | None = None
        self.called_off = False

    async def beat(self) -> None:
        """Heartbeats, never behind the ledger: one that is away must not look like a lost worker."""
        while True:
            await asyncio.sleep(RENEW_EVERY.total_seconds())
            activity.heartbeat(self._attempted)

    async def keep_lease(self) -> None:
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

    async def perform(self) -> CallResult:
        """The whole delivery; see `CallTool.call_tool`."""
        tool = self._context.catalog.get(self._dispatch.tool)
        slot = self._slots.get(self._dispatch.tool, contextlib.nullcontext())
        try:
            # A slot comes before the claim: waiting for one costs no attempt.
            async with asyncio.timeout(_SLOT_WAIT_SECONDS):
                await slot.__aenter__()
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
            raise self._no_attempt(*_away(error)) from error
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
            case Stale():
                return self._moved(answer, tool)
            case Busy(floor=True):
                raise self._error(_LEFT_ALONE, 0, final=False, delay=answer.remaining)
            case Busy():
                raise self._no_attempt(
                    Category.TRANSIENT,
                    Code.BUSY,
                    "another delivery is at work on this operation",
                    answer.remaining,
                )
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
            input_hash=content_hash(self._dispatch.input),
            scheduled_at=activity.info().current_attempt_scheduled_time,
            node_started_at=self._dispatch.node_started_at,
            delivery=self._delivery,
            owner=unique_owner(),
            worker=WORKER,
            budgets=attempt_budgets(tool),
            risk=SideEffect.NONE if tool is not None and tool.effect is Effect.READ else SideEffect.POSSIBLE,
        )
        self._lease_from(boot_seconds())
        answer = await self._context.ledger.claim(request)
        if (
            isinstance(answer, Unsettled)
            and tool is not None
            and answer.resendable
            and dedupes(tool, answer.first_sent_at)
        ):
            self._lease_from(boot_seconds())
            answer = await self._context.ledger.claim(request.model_copy(update={"despite_epoch": answer.epoch}))
        if isinstance(answer, Granted):
            self._granted = answer
            # Tells the next delivery that this one got as far as an attempt.
            self._attempted = self._delivery.attempt
            activity.heartbeat(self._attempted)
        return answer

    async def _attempt(self, tool: Tool | None, granted: Granted) -> CallResult:
        refused = self._refusal(tool, granted)
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
        now = datetime.now(UTC)
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
        if problems := input_problems(tool, dispatch.input):
            large = json_size(dispatch.input) > MAX_INPUT_BYTES
            code = Code.INPUT_TOO_LARGE if large else Code.INPUT_INVALID
            return _not_sent(Category.INVALID_INPUT, code, "; ".join(problems))
        return None

    async def _send(self, tool: Tool, granted: Granted) -> Success | Outcome:
        url, body = body_and_url(tool, self._dispatch.input)
        call = Call(self._check)
        holds = dedupes(tool, granted.first_sent_at)
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
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            outcome = classify_exception(error, call.sent)
            outcome = outcome.model_copy(update={"message": self._context.secrets.redact(outcome.message)})
            return declare(outcome, tool, holds)
        meaning = classify_answer(tool, answer, dedupes_by_key=holds and tool.idempotency is Idempotency.KEY)
        return declare(meaning, tool, holds) if isinstance(meaning, Outcome) else meaning

    def _check(self) -> None:
        """Asked as the last thing before the first byte.

        Between this and the write nothing can be fenced from here; only the remote's key can.
        """
        if self.called_off:
            raise NotSentError(Code.CANCELLED, "called off before the tool was called")
        if boot_seconds() >= self._lease_until:
            raise NotSentError(Code.LEASE_LOST, "the lease ran out before the tool could be called")

    async def _failed(self, tool: Tool | None, granted: Granted, outcome: Outcome) -> ApplicationError:
        """Commits the failure and what follows from it; answers the error to raise."""
        now = datetime.now(UTC)
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
                next_eligible_at=again.at if again else None,
                not_before=again.not_before if again else None,
            )
        )
        if not committed:
            raise self._no_attempt(Category.TRANSIENT, Code.FENCED, _FENCED, timedelta(seconds=1))
        if outcome.code == Code.CANCELLED:
            raise asyncio.CancelledError(outcome.message)
        if again is not None:
            return self._error(outcome, granted.attempt, final=False, next_eligible_at=again.at, delay=again.at - now)
        if isinstance(step, Stop) and step.why:
            update = {"message": clip_message(f"{outcome.message} ({step.why})")}
            outcome = outcome.model_copy(update=update | ({"code": Code.DEADLINE_EXCEEDED} if step.late else {}))
        return self._error(outcome, granted.attempt, final=True)

    async def _commit(self, work: Callable[[], Awaitable[bool]]) -> bool:
        """Commits what came of a call; the answer is kept until the ledger is back, or the activity's time is up."""
        info = activity.info()
        until = info.started_time + (info.start_to_close_timeout or timedelta(0)) - _LAST_COMMIT
        while True:
            try:
                return await work()
            except LedgerUnavailableError as error:
                if datetime.now(UTC) >= until:
                    raise self._no_attempt(*_away(error)) from error
                activity.logger.warning("the ledger is away; the answer of %s is kept: %s", self._operation, error)
                await asyncio.sleep(_COMMIT_AGAIN_SECONDS)

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
            tool=facts(tool, self._context.task_queue) if tool is not None else None,
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
        return self._error(outcome, 0, final=False, next_eligible_at=datetime.now(UTC) + delay, delay=delay)

    def _error(
        self,
        outcome: Outcome,
        attempt: int,
        final: bool,
        next_eligible_at: datetime | None = None,
        delay: timedelta | None = None,
    ) -> ApplicationError:
        return ApplicationError(
            outcome.message,
            FailureDetails(
                operation_id=str(self._operation),
                attempt=attempt,
                category=outcome.category,
                code=outcome.code,
                message=outcome.message,
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

    def _lease_from(self, moment: float) -> None:
        # Counted from before the claim, so that it never looks longer here than it is in the ledger.
        self._lease_until = moment + LEASE.total_seconds()


_FENCED: Final = "this delivery had been given up when it came back; what it brought changes nothing"

_LEFT_ALONE: Final = Outcome(
    category=Category.RATE_LIMITED,
    code=Code.BUSY,
    message="the tool asked to be left alone until then",
    side_effect=SideEffect.NONE,
)

_MISMATCH: Final = Outcome(
    category=Category.INVALID_INPUT,
    code=Code.INPUT_MISMATCH,
    message="this operation was first performed with another input, and one key never carries two payloads; redrive "
    "it as a new operation",
    side_effect=SideEffect.NONE,
)


def dedupes(tool: Tool, first_sent_at: datetime) -> bool:
    """Whether repeating the operation is harmless: the tool only reads, or still dedupes by its key."""
    if tool.effect is Effect.READ:
        return True
    if tool.idempotency is not Idempotency.KEY:
        return False
    return tool.dedupe_window is None or datetime.now(UTC) < first_sent_at + tool.dedupe_window


def _away(error: LedgerUnavailableError) -> tuple[Category, Code, str, timedelta]:
    return Category.DEPENDENCY_DOWN, Code.LEDGER_UNAVAILABLE, str(error), timedelta(seconds=5)


def _not_sent(category: Category, code: Code, message: str) -> Outcome:
    return Outcome(category=category, code=code, message=clip_message(message), side_effect=SideEffect.NONE)


def _tool_missing(name: str) -> Outcome:
    return _not_sent(Category.TRANSIENT, Code.TOOL_MISSING, f"this worker's catalog has no tool {name!r}")


def _unsettled(answer: Unsettled) -> Outcome:
    last = answer.attempts[-1]
    return Outcome(
        category=Category.UNKNOWN_SIDE_EFFECT,
        code=last.code or Code.UNSETTLED,
        message=clip_message(f"an earlier attempt may have had its effect: {last.message or 'its end is not known'}"),
        side_effect=answer.side_effect,
        http_status=last.http_status,
    )
