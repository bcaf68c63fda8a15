"""``look_around`` and ``gather_orphan``: what ``Sweep`` finds in Temporal and in the ledger, and whom it asks."""

import random
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Any, Final
from urllib.parse import quote

from temporalio import activity
from temporalio.api.common.v1 import Payload
from temporalio.client import Client
from temporalio.common import SearchAttributeKey
from temporalio.service import RPCError, RPCStatusCode

from activities.context import Context
from activities.executions import OPEN, Execution, describe, executions, quote_value
from activities.ledger.errors import LedgerUnavailableError
from activities.ledger.records import NodeView, OperationView, UnsettledOperation
from contracts.base import Model
from contracts.dead_letters import (
    MAX_ATTEMPTS_SHOWN,
    Action,
    Delivery,
    Eligibility,
    Entry,
    EntryStatus,
    ErrorInfo,
    Runtime,
    ToolRef,
    failure_fingerprint,
)
from contracts.dispatch import DeadLetterInput
from contracts.failures import Category, Code, SideEffect, clip_message
from contracts.identity import OperationId, dead_letter_workflow_id, node_workflow_id, trace_id_of
from contracts.runs import NodeStatus
from contracts.sweep import GONE, Found, Look, NodeGone, NodeRef, RunExecution, RunGone, SweepResult

__all__ = ["Sweeping"]

_MAX_LISTED: Final = 50_000
_MAX_DESCRIBED: Final = 2_000
_MAX_ASKED: Final = 1_000
_MAX_ORPHANS: Final = 50
_MAX_YOUNG: Final = 500
"""What one sweep does at most of each; the next one goes on."""
_PAGE: Final = 1_000
_STATUS: Final = SearchAttributeKey.for_keyword("RedriveStatus")
_LOOKED_BACK: Final = timedelta(hours=1)
"""For how long a run is told of a node that an operator has ended; it finds out by itself later."""
_BEGUN_WITHIN: Final = timedelta(seconds=30)
_NOTICED_WITHIN: Final = timedelta(minutes=30)
"""When a workflow is looked at that may never have begun: after so long, and for so long."""
_UNKNOWN_HORIZON: Final = timedelta(days=1)
"""When an effect of a tool that the catalog has no more is beyond happening."""
_ENDED_BY_AN_OPERATOR: Final = frozenset({"TERMINATED", "TIMED_OUT"})
_REMARK: Final = "the node that performed this has ended, and nobody was told what became of it"


class Sweeping:
    """The activities of ``Sweep``."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @activity.defn(name="look_around")
    async def look_around(self) -> Look:
        """Looks once at all that is open on this task queue, and asks whoever does not know what has happened.

        Whom it asks it has looked at by ``describe`` before, each run once; a list may be behind. Asking twice changes
        nothing.
        """
        look = _Looking(activity.client(), self._context)
        await look.list_all()
        await look.ask_after_gone_runs()
        await look.ask_after_ended_dead_letters()
        await look.tell_of_ended_nodes()
        await look.wake_what_never_began()
        try:
            orphans = await look.orphans()
        except LedgerUnavailableError as error:
            return Look(result=look.result().model_copy(update={"problem": clip_message(str(error))}), orphans=[])
        return Look(result=look.result(), orphans=orphans)

    @activity.defn(name="gather_orphan")
    async def gather_orphan(self, orphan: NodeRef) -> DeadLetterInput | None:
        """The evidence of an uncertain effect that nobody waits for, as far as the ledger has it.

        None: it has been settled in the meantime.
        """
        node = await self._context.ledger.node(orphan.run_id, orphan.node_id)
        if node is None or node.end is not None or node.side_effect is SideEffect.NONE:
            return None
        operation = await self._context.ledger.operation(node.operation_id)
        if operation is None:
            return None
        return DeadLetterInput(
            entry=self._entry(node, operation), approval=None, limits=self._context.limits, node_gone=True
        )

    def _entry(self, node: NodeView, operation: OperationView) -> Entry:
        last = operation.attempts[-1]
        error = ErrorInfo(
            category=last.category or Category.UNKNOWN_SIDE_EFFECT,
            code=last.code or Code.UNSETTLED,
            message=clip_message(f"{last.message or 'the effect is uncertain'} ({_REMARK})"),
            http_status=last.http_status,
        )
        tool = self._context.catalog.get(node.tool)
        times = [attempt.ended_at or attempt.started_at for attempt in node.attempts]
        operation_id = OperationId.parse(node.operation_id)
        now = datetime.now(UTC)
        info = activity.info()
        return Entry(
            run_id=operation.run_id,
            node_id=operation.node_id,
            operation_id=node.operation_id,
            idempotency_key=operation_id.idempotency_key,
            logical_attempt=node.logical_attempt,
            status=EntryStatus.AWAITING_DECISION,
            tool=ToolRef(name=node.tool, version=tool.version if tool else "", fingerprint=operation.fingerprint),
            input=node.input,
            error=error,
            side_effect=node.side_effect,
            attempts=node.attempts[-MAX_ATTEMPTS_SHOWN:],
            first_failed_at=times[0],
            last_failed_at=times[-1],
            delivery=node.delivery
            or Delivery(
                workflow_id=node_workflow_id(operation.run_id, operation.node_id),
                workflow_run_id="",
                activity_id="call_tool",
                task_queue=info.task_queue,
                attempt=1,
            ),
            runtime=Runtime(redrive=version("redrive"), temporalio=version("temporalio"), build_id=""),
            # What only the run's specification could say is as it is where it says nothing.
            correlation_id=quote(operation.run_id, safe="!#$&'()*+,-./:;=?@[]_~"),
            trace_id=trace_id_of(operation.run_id),
            failure_fingerprint=failure_fingerprint(node.tool, error),
            redrives=node.redrives,
            attempts_omitted=max(0, len(node.attempts) - MAX_ATTEMPTS_SHOWN),
            decisions=node.decisions,
            eligibility=Eligibility(redrivable=False, refusals=[], checked_at=now),
        )


@dataclass(frozen=True, slots=True)
class _Seen:
    """An open workflow, as far as a list tells."""

    run_id: str
    node_id: str
    askable: bool
    """It does not know yet, and it is not paused: what is sent to a paused one only piles up."""
    dead_lettered: bool
    started_at: datetime


@dataclass(slots=True)
class _Looking:
    """One look."""

    client: Client
    context: Context
    runs: set[str] = field(default_factory=set[str])
    nodes: dict[str, _Seen] = field(default_factory=dict[str, _Seen])
    letters: dict[str, _Seen] = field(default_factory=dict[str, _Seen])
    gone: dict[str, RunGone | None] = field(default_factory=dict[str, RunGone | None])
    """Runs that were looked at, and the last execution of those that are gone."""
    found: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    described: int = 0
    asked: int = 0
    complete: bool = True

    def result(self) -> SweepResult:
        """What was found and done so far."""
        result = SweepResult(
            open_runs=len(self.runs),
            open_nodes=len(self.nodes),
            open_dead_letters=len(self.letters),
            described=self.described,
            complete=self.complete,
        )
        return result.model_copy(update={name: Found.of(ids) for name, ids in self.found.items()})

    async def list_all(self) -> None:
        """Everything that is open. Runs last: one that has started a node is then in their list, too."""
        async for execution in self._list("Node", OPEN):
            run_id, _, node_id = execution.workflow_id.rpartition("/")
            self.nodes[execution.workflow_id] = await self._seen(execution, run_id, node_id)
        async for execution in self._list("DeadLetter", OPEN):
            run_id, _, node_id = execution.workflow_id.removesuffix("/dead-letter").rpartition("/")
            self.letters[execution.workflow_id] = await self._seen(execution, run_id, node_id)
        self.runs = {execution.workflow_id async for execution in self._list("Run", OPEN)}

    async def _list(self, kind: str, *filters: str) -> AsyncGenerator[Execution]:
        queue = self.context.task_queue
        quoted = quote_value(queue)
        terms = [f"WorkflowType = '{kind}'", *filters, *([f"TaskQueue = {quoted}"] if quoted is not None else [])]
        listed = 0
        async for execution in executions(self.client, terms, lambda found: found.task_queue == queue, _PAGE):
            if listed == _MAX_LISTED:
                self.complete = False
                return
            listed += 1
            activity.heartbeat()
            yield execution

    async def _seen(self, execution: Execution, run_id: str, node_id: str) -> _Seen:
        knows = GONE in execution.memo.fields and await self._decoded(execution.memo.fields[GONE])
        status = execution.attributes.get(_STATUS)
        return _Seen(
            run_id=run_id,
            node_id=node_id,
            askable=not knows and execution.status != "PAUSED" and status != EntryStatus.OBSOLETE,
            dead_lettered=status == NodeStatus.DEAD_LETTERED,
            started_at=execution.started_at,
        )

    async def _decoded(self, payload: Payload) -> bool:
        return bool((await self.client.data_converter.decode([payload]))[0])

    async def ask_after_gone_runs(self) -> None:
        """Nodes whose run is gone are to stop; dead letters of which the node is gone as well are to look again."""
        for workflow_id, node in self.nodes.items():
            if node.askable and (gone := await self._gone(node.run_id)) is not None:
                await self._ask("nodes_stopped", workflow_id, "run_gone", gone)
        for workflow_id, letter in self.letters.items():
            told_by_its_node = node_workflow_id(letter.run_id, letter.node_id) in self.nodes
            if letter.askable and not told_by_its_node and await self._gone(letter.run_id) is not None:
                await self._ask("dead_letters_checked", workflow_id, Action.CHECK)

    async def _gone(self, run_id: str) -> RunGone | None:
        """The last execution of a run that is closed; None: it is not, or it was not looked at any more."""
        if run_id in self.runs:
            return None
        if run_id not in self.gone:
            if not self._may_describe():
                return None
            run = await self._describe(run_id)
            self.gone[run_id] = _last_execution(run)
            if self.gone[run_id] is not None:
                self.found.setdefault("runs_gone", []).append(run_id)
        return self.gone[run_id]

    async def ask_after_ended_dead_letters(self) -> None:
        """Nodes that wait for a dead letter which was ended by an operator are to open it again."""
        for workflow_id, node in self.nodes.items():
            letter_id = dead_letter_workflow_id(node.run_id, node.node_id)
            if not (node.dead_lettered and node.askable) or letter_id in self.letters or not self._may_describe():
                continue
            letter = await self._describe(letter_id)
            if letter is None or letter.status in _ENDED_BY_AN_OPERATOR:
                await self._ask("dead_letters_missing", workflow_id, "dead_letter_gone")

    async def tell_of_ended_nodes(self) -> None:
        """Runs are told of nodes that an operator has ended: one that did not start them would not hear of it."""
        since = f"CloseTime >= '{(datetime.now(UTC) - _LOOKED_BACK).isoformat()}'"
        ended = {
            execution.workflow_id
            async for execution in self._list("Node", "ExecutionStatus IN ('Terminated', 'TimedOut')", since)
        }
        for workflow_id in sorted(ended - self.nodes.keys()):
            run_id, _, node_id = workflow_id.rpartition("/")
            if run_id not in self.runs or not self._may_describe():
                continue
            node = await self._describe(workflow_id)
            if node is not None and node.status in _ENDED_BY_AN_OPERATOR:
                await self._ask("nodes_missing", run_id, "node_gone", NodeGone(node_id=node_id), named=workflow_id)

    async def wake_what_never_began(self) -> None:
        """A signal gives a workflow its first task where the server has not.

        It forgets to, where whoever starts a child is reset in that very moment; nobody else would ever notice.
        """
        now = datetime.now(UTC)
        young = [
            workflow_id
            for workflow_id, seen in [*self.nodes.items(), *self.letters.items()]
            if _BEGUN_WITHIN <= now - seen.started_at <= _NOTICED_WITHIN
        ]
        # Of many, some: each has many sweeps to be one of them, and the other questions need their share.
        for workflow_id in random.sample(young, min(len(young), _MAX_YOUNG)):
            activity.heartbeat()
            found = await describe(self.client, workflow_id)
            if found is not None and found.ended_at is None and found.events == 1:
                # A look for the dead letter; what a node makes of it changes nothing either.
                letter = workflow_id in self.letters
                await self._ask("woken", workflow_id, Action.CHECK if letter else "dead_letter_gone")

    async def orphans(self) -> list[NodeRef]:
        """Nodes that are closed with an uncertain effect past its horizon, and without a dead letter."""
        found: list[NodeRef] = []
        after = ""
        while page := await self.context.ledger.unsettled(after, _PAGE):
            after = page[-1].operation_id
            for operation in page:
                if not self._watched(operation) and self._may_describe() and await self._is_orphan(operation):
                    found.append(NodeRef(run_id=operation.run_id, node_id=operation.node_id))
                    if len(found) == _MAX_ORPHANS:
                        self.complete = False
                        return found
        return found

    def _watched(self, operation: UnsettledOperation) -> bool:
        return (
            node_workflow_id(operation.run_id, operation.node_id) in self.nodes
            or dead_letter_workflow_id(operation.run_id, operation.node_id) in self.letters
        )

    async def _is_orphan(self, operation: UnsettledOperation) -> bool:
        known = await self.context.ledger.node(operation.run_id, operation.node_id)
        tool = self.context.catalog.get(operation.tool)
        horizon = tool.timeout + tool.absent_after if tool is not None else _UNKNOWN_HORIZON
        if known is None or known.in_flight or (known.since_last_send or timedelta(0)) < horizon:
            return False
        letter = await self._describe(dead_letter_workflow_id(operation.run_id, operation.node_id))
        if letter is not None and letter.ended_at is None:
            return False
        node = await self._describe(node_workflow_id(operation.run_id, operation.node_id))
        if node is not None and node.ended_at is None:
            return False
        # The run, if it is open, starts a node again that did not end by itself.
        ended_by_itself = node is not None and node.status not in _ENDED_BY_AN_OPERATOR
        return ended_by_itself or await self._gone(operation.run_id) is not None

    def _may_describe(self) -> bool:
        if self.described >= _MAX_DESCRIBED:
            self.complete = False
        return self.described < _MAX_DESCRIBED

    async def _describe(self, workflow_id: str) -> Execution | None:
        self.described += 1
        activity.heartbeat()
        return await describe(self.client, workflow_id)

    async def _ask(self, what: str, workflow_id: str, name: str, *payload: Model, named: str | None = None) -> None:
        if self.asked >= _MAX_ASKED:
            self.complete = False
            return
        self.asked += 1
        arguments: Sequence[Any] = payload
        if name == Action.CHECK:
            # A decision like any other; without a name it is only a look.
            arguments = [{}]
        try:
            await self.client.get_workflow_handle(workflow_id).signal(name, args=arguments)
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
            # It has closed in the meantime.
            return
        self.found.setdefault(what, []).append(named or workflow_id)


def _last_execution(run: Execution | None) -> RunGone | None:
    """What is known of a run that is gone; None: it is not."""
    if run is None:
        return RunGone(execution=None)
    if run.ended_at is None:
        return None
    return RunGone(execution=RunExecution(first_run_id=run.first_run_id, run_id=run.workflow_run_id))
