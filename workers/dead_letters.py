"""Dead letters, from outside: finding those that wait, reading their evidence, deciding."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Self

from temporalio.client import (
    Client,
    WorkflowUpdateFailedError,
    WorkflowUpdateHandle,
    WorkflowUpdateRPCTimeoutOrCancelledError,
    WorkflowUpdateStage,
)
from temporalio.common import SearchAttributeKey
from temporalio.exceptions import ApplicationError, FailureError
from temporalio.service import RPCError, RPCStatusCode

from activities.executions import NEWEST, OPEN, Execution, describe, executions, matches, quote_value
from activities.ledger import Ledger, LedgerUnavailableError, open_ledger
from contracts.base import Json, Model, UtcTime
from contracts.dead_letters import (
    Action,
    DecisionOutcome,
    DecisionRecord,
    Entry,
    EntryStatus,
    MalformedDecisionError,
    RefusalCode,
    parse_decision,
)
from contracts.identity import dead_letter_workflow_id, problem_with_node_id, problem_with_run_id
from workers.executions import ANSWER_WITHIN, NoAnswerError, no_answer, query, read_answer
from workers.settings import Settings
from workflows.attributes import CATEGORY, FINGERPRINT, RUN_ID, STATUS, TOOL

__all__ = [
    "DeadLetterGroup",
    "DeadLetterNotFoundError",
    "DeadLetterRow",
    "EntryId",
    "Filter",
    "check_entry",
    "decide",
    "existing_ledger",
    "group_dead_letters",
    "list_dead_letters",
    "list_filters",
    "read_entry",
]

_DECIDED_WITHIN: Final = timedelta(minutes=5)
"""How long a decision may take once it was taken up: the tool may be asked what happened, the ledger may be busy."""
_SQLITE: Final = "sqlite:///"


class DeadLetterNotFoundError(Exception):
    """There is no such dead letter."""


@dataclass(frozen=True, slots=True)
class EntryId:
    """Names a dead letter as people do: ``order-1042/charge``."""

    run_id: str
    node_id: str

    def __str__(self) -> str:
        return f"{self.run_id}/{self.node_id}"

    @property
    def workflow_id(self) -> str:
        """Its workflow."""
        return dead_letter_workflow_id(self.run_id, self.node_id)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads one; the whole workflow id, with ``/dead-letter`` at its end, is understood too.

        Raises:
            ValueError: what is wrong with it.
        """
        parts = text.split("/")
        if len(parts) == 3 and parts[2] == "dead-letter":
            parts.pop()
        if len(parts) != 2:
            raise ValueError(f"a dead letter is RUN_ID/NODE_ID, such as order-1042/charge, not {text!r}")
        problem = problem_with_run_id(parts[0]) or problem_with_node_id(parts[1])
        if problem:
            raise ValueError(problem)
        return cls(*parts)


@dataclass(frozen=True, slots=True)
class Filter:
    """Which dead letters are wanted.

    Attributes:
        since: Opened no longer ago than this.
        closed: Those that have been decided, too.
    """

    tool: str | None = None
    category: str | None = None
    run_id: str | None = None
    fingerprint: str | None = None
    since: timedelta | None = None
    closed: bool = False

    @property
    def attributes(self) -> Mapping[SearchAttributeKey[str], str]:
        """The search attributes that are asked for."""
        wanted = {
            TOOL: self.tool,
            CATEGORY: self.category,
            RUN_ID: self.run_id,
            FINGERPRINT: self.fingerprint,
            STATUS: None if self.closed else EntryStatus.AWAITING_DECISION.value,
        }
        return {key: value for key, value in wanted.items() if value is not None}


class DeadLetterRow(Model):
    """One line of a list."""

    id: str
    run_id: str
    node_id: str
    tool: str
    category: str
    status: str
    failure_fingerprint: str
    opened_at: UtcTime
    closed_at: UtcTime | None


class DeadLetterGroup(Model):
    """Failures of one kind.

    Attributes:
        code: The example's, and so is the message; None where no worker answers.
        example: The newest of them.
    """

    failure_fingerprint: str
    count: int
    tool: str
    category: str
    code: str | None
    message: str | None
    first_opened_at: UtcTime
    last_opened_at: UtcTime
    example: str


def list_filters(wanted: Filter, now: datetime) -> list[str]:
    """The list filters for the server; it may find more than is wanted, never less (see `quote_value`)."""
    filters = ["WorkflowType = 'DeadLetter'", NEWEST if wanted.closed else OPEN]
    for key, value in wanted.attributes.items():
        if (quoted := quote_value(value)) is not None:
            filters.append(f"{key.name} = {quoted}")
    if wanted.since is not None:
        filters.append(f"StartTime >= '{(now - wanted.since).isoformat()}'")
    return filters


async def list_dead_letters(client: Client, wanted: Filter, limit: int) -> tuple[list[DeadLetterRow], bool]:
    """The newest dead letters that are wanted, and whether there are more."""
    rows: list[DeadLetterRow] = []
    filters = list_filters(wanted, datetime.now(UTC))
    async for execution in executions(client, filters, lambda found: matches(found, wanted.attributes)):
        if len(rows) == limit:
            return rows, True
        rows.append(_row(execution))
    return rows, False


async def group_dead_letters(client: Client, wanted: Filter, limit: int) -> tuple[list[DeadLetterGroup], bool]:
    """The dead letters that are wanted by how they have failed, the most frequent first, and whether there are more.

    Counted here: the server's lists have no groups. Only one of each kind is asked what exactly its failure was.
    """
    groups: dict[str, list[DeadLetterRow]] = {}
    filters = list_filters(wanted, datetime.now(UTC))
    async for execution in executions(client, filters, lambda found: matches(found, wanted.attributes)):
        row = _row(execution)
        rows = groups.setdefault(row.failure_fingerprint, [])
        rows.append(row)
    ordered = sorted(groups.values(), key=len, reverse=True)
    return [await _group(client, rows) for rows in ordered[:limit]], len(ordered) > limit


async def _group(client: Client, rows: Sequence[DeadLetterRow]) -> DeadLetterGroup:
    # As the server orders them.
    newest, oldest = rows[0], rows[-1]
    try:
        error = (await read_entry(client, EntryId(newest.run_id, newest.node_id))).error
    except (DeadLetterNotFoundError, NoAnswerError):
        # Its worker is away; what is counted is right all the same.
        error = None
    return DeadLetterGroup(
        failure_fingerprint=newest.failure_fingerprint,
        count=len(rows),
        tool=newest.tool,
        category=newest.category,
        code=error.code if error is not None else None,
        message=error.message if error is not None else None,
        first_opened_at=oldest.opened_at,
        last_opened_at=newest.opened_at,
        example=newest.id,
    )


def _row(execution: Execution) -> DeadLetterRow:
    run_id, _, node_id = execution.workflow_id.removesuffix("/dead-letter").rpartition("/")
    attributes = execution.attributes
    ended = execution.ended_at is not None and execution.status != "COMPLETED"
    return DeadLetterRow(
        id=f"{run_id}/{node_id}",
        run_id=run_id,
        node_id=node_id,
        tool=attributes.get(TOOL) or "",
        category=attributes.get(CATEGORY) or "",
        # What an operator has ended keeps the attributes of one that waits.
        status=execution.status if ended or execution.status == "PAUSED" else attributes.get(STATUS) or "",
        failure_fingerprint=attributes.get(FINGERPRINT) or "",
        opened_at=execution.started_at,
        closed_at=execution.ended_at,
    )


async def _find(client: Client, entry_id: EntryId) -> Execution | None:
    execution = await describe(client, entry_id.workflow_id)
    return execution if execution is not None and execution.workflow_type == "DeadLetter" else None


def _not_found(client: Client, entry_id: EntryId) -> DeadLetterNotFoundError:
    return DeadLetterNotFoundError(
        f"there is no dead letter {str(entry_id)!r} in namespace {client.namespace!r} (`redrive dlq list` names all)"
    )


async def read_entry(client: Client, entry_id: EntryId) -> Entry:
    """The whole evidence, as it is now; of a closed one too.

    Raises:
        DeadLetterNotFoundError: there is none.
        NoAnswerError: no worker answers.
    """
    execution = await _find(client, entry_id)
    if execution is None:
        raise _not_found(client, entry_id)
    return await _entry(client, execution)


async def _entry(client: Client, execution: Execution) -> Entry:
    return read_answer(Entry, await query(client, execution, "entry"), execution)


async def check_entry(client: Client, entry_id: EntryId) -> Entry:
    """Refreshes the eligibility of an open entry, remembering nobody, and reads it; a closed one is only read.

    Raises:
        DeadLetterNotFoundError: there is none.
        NoAnswerError: no worker answers.
    """
    execution = await _find(client, entry_id)
    if execution is None:
        raise _not_found(client, entry_id)
    if execution.ended_at is None:
        await _update(client, execution, Action.CHECK, {})
    return await _entry(client, execution)


async def decide(
    client: Client, settings: Settings, entry_id: EntryId, action: Action, payload: Mapping[str, Json]
) -> DecisionRecord:
    """Takes a decision, and answers with its record: accepted, refused or noted.

    Unless it says itself which ``redrives`` it is about, it is about those that the entry has now. One that the entry
    does not take any more, because it is closed, is answered from the ledger: an earlier decision of the same id by its
    record, another one refused as ``NODE_CLOSED``.

    Raises:
        MalformedDecisionError: the payload is not usable; nothing was sent.
        DeadLetterNotFoundError: there is none.
        NoAnswerError: no worker answers; the message says how to find out later.
        LedgerUnavailableError: the entry is closed, and only the ledger could say what became of this decision.
    """
    parse_decision(action, [dict(payload)], settings.limits)
    sent = dict(payload)
    named = "decision_id" in sent
    decision_id = str(sent.get("decision_id") or uuid.uuid4())
    if sent != {}:
        # An anonymous check stays anonymous: nobody needs to find it again.
        sent["decision_id"] = decision_id
    execution = await _find(client, entry_id)
    if execution is not None and execution.ended_at is None:
        if action is not Action.CHECK and "if_redrives" not in sent:
            sent["if_redrives"] = (await _entry(client, execution)).redrives
        record = await _update(client, execution, action, sent)
        if record is not None:
            return record
        named = True
    earlier = await _earlier(settings.ledger.get_secret_value(), entry_id, decision_id, required=named)
    if earlier is not None:
        return earlier
    if execution is None:
        raise _not_found(client, entry_id)
    return DecisionRecord(
        decision_id=decision_id,
        action=action,
        decided_by=str(sent.get("decided_by", "")),
        reason=str(sent.get("reason", "")),
        at=datetime.now(UTC),
        outcome=DecisionOutcome.REFUSED,
        refusals=[RefusalCode.NODE_CLOSED],
    )


async def _update(
    client: Client, execution: Execution, action: Action, payload: dict[str, Json]
) -> DecisionRecord | None:
    """Sends a decision; None: the entry is closed.

    Raises:
        MalformedDecisionError: the entry rejects it.
        NoAnswerError: no worker answers.
    """
    handle = client.get_workflow_handle(execution.workflow_id)
    taken_up = False
    try:
        # The SDK's own time limit is per call, and it calls again; this one is for all of them.
        async with asyncio.timeout(ANSWER_WITHIN.total_seconds()):
            update: WorkflowUpdateHandle[Any] = await handle.start_update(
                str(action), payload, wait_for_stage=WorkflowUpdateStage.ACCEPTED, rpc_timeout=ANSWER_WITHIN
            )
        taken_up = True
        async with asyncio.timeout(_DECIDED_WITHIN.total_seconds()):
            answer = await update.result()
    except (TimeoutError, WorkflowUpdateRPCTimeoutOrCancelledError) as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # The SDK has taken somebody's Ctrl-C for its own time limit.
            raise asyncio.CancelledError from error
        raise _undecided(execution, payload, taken_up) from error
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return None
        raise
    except WorkflowUpdateFailedError as error:
        if isinstance(error.cause, ApplicationError) and error.cause.type == "AcceptedUpdateCompletedWorkflow":
            return None
        cause = error.cause.message if isinstance(error.cause, FailureError) else str(error.cause)
        raise MalformedDecisionError(cause) from error
    return read_answer(DecisionRecord, answer, execution)


def _undecided(execution: Execution, payload: Mapping[str, Json], taken_up: bool) -> NoAnswerError:
    decision_id = payload.get("decision_id")
    if decision_id is None:
        return no_answer(execution)
    again = f"to find out, repeat it with --decision-id {decision_id}, which never decides twice"
    if taken_up:
        return NoAnswerError(
            f"the decision was taken up, but not answered in {_DECIDED_WITHIN.total_seconds():.0f} s; {again}"
        )
    return NoAnswerError(f"{no_answer(execution)}\nThe decision may still be taken up later: {again}")


async def _earlier(ledger_url: str, entry_id: EntryId, decision_id: str, required: bool) -> DecisionRecord | None:
    """The record of a decision that was taken before, from the ledger."""
    try:
        async with existing_ledger(ledger_url) as ledger:
            node = await ledger.node(entry_id.run_id, entry_id.node_id)
    except LedgerUnavailableError:
        if required:
            raise
        # It is new: its id was made for it, and it was never sent.
        return None
    decisions = node.decisions if node is not None else []
    return next((record for record in decisions if record.decision_id == decision_id), None)


@asynccontextmanager
async def existing_ledger(url: str) -> AsyncGenerator[Ledger]:
    """Opens a ledger to look into it; none is made where there is none.

    Raises:
        LedgerUnavailableError: there is none, or it cannot be used.
    """
    _require_file(url)
    ledger = await open_ledger(url)
    try:
        yield ledger
    finally:
        await ledger.close()


def _require_file(url: str) -> None:
    path = Path(url.removeprefix(_SQLITE))
    if url.startswith(_SQLITE) and not path.is_file():
        raise LedgerUnavailableError(
            f"there is no ledger at {path}: set REDRIVE_LEDGER to the one that the worker uses, or look where it runs"
        )
