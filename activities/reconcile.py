"""``reconcile``: asks a tool what became of an operation. Read-only at the tool; the ledger records what it said."""

import asyncio
import random
from datetime import UTC, datetime, timedelta
from typing import Final

import aiohttp
from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from activities.classify import Answer, classify_exception
from activities.context import Context, attempt_budgets, delivery
from activities.http import Call
from activities.ledger.clock import boot_seconds
from activities.ledger.errors import LedgerUnavailableError
from activities.ledger.interface import RENEW_EVERY
from activities.ledger.records import NodeView
from activities.requests import UnsendableError, call_headers, fill
from activities.threads import look_into
from contracts.base import Json
from contracts.canonical import json_size
from contracts.dispatch import NodeEnd, ReconcileAnswer, ReconcileRequest, Verdict
from contracts.failures import MAX_RESENDS_AFTER_ABSENT, Category, SideEffect, clip_message
from contracts.pointers import at_pointer
from contracts.schemas import schema_problems
from contracts.tools import Reconcile, Tool

__all__ = ["ReconcileOperation"]

_LEDGER_AGAIN: Final = timedelta(seconds=5)


class ReconcileOperation:
    """The activity that settles an uncertain effect, if its tool can be asked."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @activity.defn(name="reconcile")
    async def reconcile(self, request: ReconcileRequest) -> ReconcileAnswer:
        """Asks, and records the answer.

        "Absent" is not believed before the horizon (the newest attempt's start + ``timeout`` + ``absent_after``): until
        then its request may still take effect somewhere. It is asked again after it.

        Raises:
            ApplicationError: ``DEPENDENCY_DOWN`` while there is no answer yet, with the time of the next question.
        """
        beating = asyncio.create_task(_beat())
        try:
            return await self._reconcile(request)
        finally:
            beating.cancel()

    async def _reconcile(self, request: ReconcileRequest) -> ReconcileAnswer:
        tool = self._context.catalog.get(request.tool)
        node: NodeView | None = None
        try:
            node = await self._context.ledger.node(request.run_id, request.node_id)
            if tool is None or tool.reconcile is None or node is None:
                return self._no_answer(
                    node, "the tool has no reconcile URL" if tool else "the catalog has no such tool"
                )
            if node.end is NodeEnd.SUCCEEDED:
                return _happened(node, node.output)
            if node.operation_id != str(request.operation) or node.side_effect is SideEffect.NONE:
                return self._settled(Verdict.ABSENT, node)
            return await self._ask(tool, tool.reconcile, request, node)
        except LedgerUnavailableError as error:
            if activity.info().attempt >= attempt_budgets(tool)[Category.DEPENDENCY_DOWN]:
                return self._no_answer(node, str(error))
            raise _later(str(error), _LEDGER_AGAIN) from None

    async def _ask(self, tool: Tool, how: Reconcile, request: ReconcileRequest, node: NodeView) -> ReconcileAnswer:
        try:
            answer = await self._get(tool, how, request)
        except UnsendableError as error:
            return self._no_answer(node, str(error))
        except aiohttp.ClientError as error:
            message = self._context.secrets.redact(classify_exception(error, sent=True).message)
            return self._again_or_give_up(tool, request, node, message)
        if answer.status in how.absent and node.side_effect is SideEffect.CONFIRMED:
            # It has answered 2xx before: whatever this URL looks at, it is not what happened.
            return self._no_answer(node, "the tool says absent, but it has answered with a success before")
        if answer.status in how.absent:
            left = tool.timeout + tool.absent_after - (node.since_last_send or timedelta(0))
            if node.in_flight or left > timedelta(0):
                if request.once:
                    horizon = datetime.now(UTC) + left
                    return self._no_answer(
                        node, f"absent, but an attempt may still take effect until {horizon:%H:%M:%SZ}"
                    )
                wait = max(left, timedelta(seconds=1)) + timedelta(seconds=0.1)
                raise _later("absent so far; asked again when no attempt can take effect any more", wait)
            await self._context.ledger.settle_absent(request.operation, node.epoch)
            return self._settled(Verdict.ABSENT, node)
        if answer.status in how.committed:
            return await self._committed(tool, how, request, node, answer)
        return self._again_or_give_up(tool, request, node, f"HTTP {answer.status} is no answer: {answer.excerpt}")

    async def _get(self, tool: Tool, how: Reconcile, request: ReconcileRequest) -> Answer:
        fields: dict[str, Json] = dict(request.input) if isinstance(request.input, dict) else {}
        fields |= {
            "idempotency_key": request.operation.idempotency_key,
            "operation_id": str(request.operation),
        }
        url, _ = fill(how.url, fields)
        headers = call_headers(tool, request.operation.idempotency_key, request.trace_id, request.correlation_id)
        call = Call(lambda: None, boot_seconds() + tool.timeout.total_seconds())
        return await self._context.http.send(tool, "GET", url, headers, None, call)

    async def _committed(
        self, tool: Tool, how: Reconcile, request: ReconcileRequest, node: NodeView, answer: Answer
    ) -> ReconcileAnswer:
        output, problem = await look_into(answer.body, _result_in, tool, how, answer, self._context.limits.output)
        if problem is not None:
            await self._context.ledger.confirm(request.operation)
            return ReconcileAnswer(
                verdict=Verdict.COMMITTED,
                message=clip_message(f"it happened, but {problem}"),
                attempt_count=len(node.attempts),
            )
        taken = request.once or await self._context.ledger.settle_committed(request.operation, node.epoch, output)
        return _happened(node, output) if taken else self._no_answer(node, "it happened, but somebody has decided")

    def _again_or_give_up(self, tool: Tool, request: ReconcileRequest, node: NodeView, message: str) -> ReconcileAnswer:
        policy = tool.policy(Category.DEPENDENCY_DOWN)
        asked = activity.info().attempt
        if request.once or policy is None or asked >= policy.attempts:
            return self._no_answer(node, message)
        raise _later(message, policy.wait_after(asked, random.random()))

    def _no_answer(self, node: NodeView | None, message: str) -> ReconcileAnswer:
        return ReconcileAnswer(
            verdict=Verdict.NO_ANSWER,
            message=clip_message(message),
            attempt_count=len(node.attempts) if node is not None else 0,
        )

    def _settled(self, verdict: Verdict, node: NodeView) -> ReconcileAnswer:
        return ReconcileAnswer(
            verdict=verdict,
            may_resend=node.unknown_failures <= MAX_RESENDS_AFTER_ABSENT and not node.cancelled,
            attempt_count=len(node.attempts),
        )


def _result_in(tool: Tool, how: Reconcile, answer: Answer, largest: int) -> tuple[Json, str | None]:
    """The result in a committed answer, and why it is none."""
    if answer.problem is not None:
        return None, answer.problem.message
    try:
        output = at_pointer(answer.body, how.output)
    except LookupError:
        return None, f"the committed answer has nothing at {how.output!r}"
    if (size := json_size(output)) > largest:
        return None, f"the result has {size} bytes; {largest} are allowed"
    if broken := schema_problems(tool.output_schema, output, "output"):
        return None, "the result breaks output_schema: " + "; ".join(broken)
    return output, None


def _happened(node: NodeView, output: Json) -> ReconcileAnswer:
    return ReconcileAnswer(
        verdict=Verdict.COMMITTED,
        usable=True,
        output=output,
        attempt_count=len(node.attempts),
    )


async def _beat() -> None:
    """Tells Temporal that this worker is there: one that is lost is noticed as soon as in the middle of a call."""
    while True:
        activity.heartbeat()
        await asyncio.sleep(RENEW_EVERY.total_seconds())


def _later(message: str, wait: timedelta) -> ApplicationError:
    return ApplicationError(
        clip_message(message),
        delivery(),
        type=Category.DEPENDENCY_DOWN,
        next_retry_delay=wait,
        category=ApplicationErrorCategory.BENIGN,
    )
