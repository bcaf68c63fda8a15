"""``reconcile``: asks a tool what became of an operation. Read-only at the tool; the ledger records what it said."""

import random
from datetime import UTC, datetime, timedelta
from typing import Final

import httpx
from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from activities.classify import Answer, classify_exception
from activities.context import Context, attempt_budgets, delivery
from activities.http import Call
from activities.ledger.errors import LedgerUnavailableError
from activities.ledger.records import NodeView
from activities.requests import UnsendableError, call_headers, fill
from contracts.base import Json
from contracts.canonical import json_size
from contracts.dispatch import NodeEnd, ReconcileAnswer, ReconcileRequest, Verdict
from contracts.failures import MAX_RESENDS_AFTER_ABSENT, Category, SideEffect, clip_message
from contracts.pointers import at_pointer
from contracts.runs import MAX_OUTPUT_BYTES
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
            raise _later(str(error), _LEDGER_AGAIN) from error

    async def _ask(self, tool: Tool, how: Reconcile, request: ReconcileRequest, node: NodeView) -> ReconcileAnswer:
        asked_at = datetime.now(UTC)
        try:
            answer = await self._get(tool, how, request)
        except UnsendableError as error:
            return self._no_answer(node, str(error))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            message = self._context.secrets.redact(classify_exception(error, sent=True).message)
            return self._again_or_give_up(tool, request, node, message)
        if answer.status in how.absent and node.side_effect is SideEffect.CONFIRMED:
            # It has answered 2xx before: whatever this URL looks at, it is not what happened.
            return self._no_answer(node, "the tool says absent, but it has answered with a success before")
        if answer.status in how.absent:
            horizon = (node.last_sent_at or asked_at) + tool.timeout + tool.absent_after
            if node.in_flight or asked_at < horizon:
                if request.once:
                    return self._no_answer(
                        node, f"absent, but an attempt may still take effect until {horizon:%H:%M:%SZ}"
                    )
                wait = max(horizon - asked_at, timedelta(seconds=1)) + timedelta(seconds=0.1)
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
        return await self._context.http.send(tool, "GET", url, headers, None, Call(lambda: None))

    async def _committed(
        self, tool: Tool, how: Reconcile, request: ReconcileRequest, node: NodeView, answer: Answer
    ) -> ReconcileAnswer:
        problem = answer.problem.message if answer.problem else None
        output: Json = None
        if problem is None:
            try:
                output = at_pointer(answer.body, how.output)
            except LookupError:
                problem = f"the committed answer has nothing at {how.output!r}"
        if problem is None and (size := json_size(output)) > MAX_OUTPUT_BYTES:
            problem = f"the result has {size} bytes; {MAX_OUTPUT_BYTES} are allowed"
        if problem is None and (broken := schema_problems(tool.output_schema, output, "output")):
            problem = "the result breaks output_schema: " + "; ".join(broken)
        if problem is not None:
            await self._context.ledger.confirm(request.operation)
            return ReconcileAnswer(
                verdict=Verdict.COMMITTED,
                message=clip_message(f"it happened, but {problem}"),
                side_effect=SideEffect.CONFIRMED,
                attempt_count=len(node.attempts),
            )
        if not request.once:
            await self._context.ledger.settle_committed(request.operation, node.epoch, output)
        return _happened(node, output)

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
            side_effect=node.side_effect if node is not None else SideEffect.POSSIBLE,
            attempt_count=len(node.attempts) if node is not None else 0,
        )

    def _settled(self, verdict: Verdict, node: NodeView) -> ReconcileAnswer:
        return ReconcileAnswer(
            verdict=verdict,
            side_effect=SideEffect.NONE,
            may_resend=node.unknown_failures <= MAX_RESENDS_AFTER_ABSENT and not node.cancelled,
            attempt_count=len(node.attempts),
        )


def _happened(node: NodeView, output: Json) -> ReconcileAnswer:
    return ReconcileAnswer(
        verdict=Verdict.COMMITTED,
        usable=True,
        output=output,
        side_effect=SideEffect.CONFIRMED,
        attempt_count=len(node.attempts),
    )


def _later(message: str, wait: timedelta) -> ApplicationError:
    return ApplicationError(
        clip_message(message),
        delivery(),
        type=Category.DEPENDENCY_DOWN,
        next_retry_delay=wait,
        category=ApplicationErrorCategory.BENIGN,
    )
