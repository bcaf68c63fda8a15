"""How evidence is shown: a dead letter, its attempts and decisions, an operation of the ledger."""

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.text import Text

from cli.output import coloured, moment, pairs, pretty_json, printable, table
from contracts.dead_letters import REFUSALS, DecisionRecord, Entry, EntryStatus, RefusalCode
from contracts.failures import AttemptRecord, SideEffect

if TYPE_CHECKING:
    from activities.ledger.records import OperationView

__all__ = ["render_entry", "render_operation", "render_record", "render_standing"]

_SIDE_EFFECTS: Final = {
    SideEffect.NONE: "certainly not executed",
    SideEffect.POSSIBLE: "it may have been executed",
    SideEffect.CONFIRMED: "executed; the result is lost or unusable",
}
_UNDECIDED: Final = (EntryStatus.AWAITING_DECISION, EntryStatus.OBSOLETE)


def render_entry(entry: Entry) -> RenderableType:
    """A dead letter, whole, and the commands that decide it."""
    error = entry.error
    # Most codes say the status themselves.
    http = f", HTTP {error.http_status}" if error.http_status is not None and "http" not in error.code else ""
    runtime = entry.runtime
    parts: list[RenderableType] = [
        pairs(
            [
                ("dead letter", f"{entry.run_id}/{entry.node_id}"),
                ("status", entry.status),
                ("error", f"{error.category}, {error.code}{http}"),
                ("message", error.message),
                ("side effect", f"{entry.side_effect}: {_SIDE_EFFECTS[entry.side_effect]}"),
                ("tool", f"{entry.tool.name}, version {entry.tool.version}, {entry.tool.fingerprint}"),
                ("operation", entry.operation_id),
                ("key", entry.idempotency_key),
                ("redrives", str(entry.redrives)),
                ("first failed", moment(entry.first_failed_at)),
                ("last failed", moment(entry.last_failed_at)),
                ("fingerprint", entry.failure_fingerprint),
                ("correlation", entry.correlation_id),
                ("trace", entry.trace_id),
                ("delivery", _delivery(entry)),
                ("runtime", f"redrive {runtime.redrive}, temporalio {runtime.temporalio}, build {runtime.build_id}"),
            ]
        ),
        *_section(_attempts_title(entry)),
        _attempts(entry.attempts),
        *_section("input"),
        Text(printable(pretty_json(entry.input))),
    ]
    if entry.decisions:
        parts += [*_section("decisions"), _decisions(entry.decisions)]
    if entry.status in _UNDECIDED:
        parts += [*_section("would a redrive be accepted?"), *_eligibility(entry)]
        parts += [*_section("decide"), *(Text(f"  {line}") for line in _commands(entry))]
    return Group(*parts)


def render_record(record: DecisionRecord) -> RenderableType:
    """The record of one decision."""
    return pairs(
        [
            ("decision", record.decision_id),
            ("by", record.decided_by or None),
            ("reason", record.reason or None),
            ("at", moment(record.at)),
            ("outcome", record.outcome),
            ("refusals", ", ".join(record.refusals) or None),
        ]
    )


def render_standing(entry: Entry) -> RenderableType:
    """Where an entry stands now."""
    effect = ("side effect", f"{entry.side_effect}: {_SIDE_EFFECTS[entry.side_effect]}")
    standing = pairs([("status", entry.status), effect])
    if entry.status not in _UNDECIDED:
        return standing
    return Group(standing, *_section("would a redrive be accepted?"), *_eligibility(entry))


def render_operation(operation: "OperationView") -> RenderableType:
    """All that the ledger knows of an operation."""
    node = operation.node_end or ("cancelled" if operation.node_cancelled else "open")
    parts: list[RenderableType] = [
        pairs(
            [
                ("operation", operation.operation_id),
                ("key", operation.idempotency_key),
                ("state", operation.state),
                ("side effect", _effect(operation)),
                ("tool", f"{operation.tool}, {operation.fingerprint}"),
                ("epoch", str(operation.epoch)),
                ("node", f"{operation.run_id}/{operation.node_id}, {node}"),
                ("redrives", str(operation.redrives)),
            ]
        ),
        *_section("attempts"),
        _attempts(operation.attempts),
    ]
    if operation.decisions:
        parts += [*_section("decisions of the node"), _decisions(operation.decisions)]
    return Group(*parts)


def _effect(operation: "OperationView") -> str:
    if operation.state == "SUCCEEDED":
        return "it has happened, and its result is kept"
    return f"{operation.side_effect}: {_SIDE_EFFECTS[operation.side_effect]}"


def _section(title: str) -> list[Text]:
    return [Text(), Text(title, style="bold")]


def _delivery(entry: Entry) -> str:
    delivery = entry.delivery
    return (
        f"{delivery.workflow_id}, activity {delivery.activity_id}, attempt {delivery.attempt}, task queue "
        f"{delivery.task_queue}, Temporal run {delivery.workflow_run_id}"
    )


def _attempts_title(entry: Entry) -> str:
    omitted = entry.attempts_omitted
    return f"attempts (and {omitted} earlier ones, which the ledger has)" if omitted else "attempts"


def _attempts(attempts: Sequence[AttemptRecord]) -> RenderableType:
    if not attempts:
        return Text("none: nothing was sent")
    columns = ["#", "STARTED", "ENDED", "CATEGORY", "CODE", "HTTP", "SIDE EFFECT", "NEXT", "WORKER", "MESSAGE"]
    return table(
        columns,
        (
            [
                attempt.attempt,
                moment(attempt.started_at),
                moment(attempt.ended_at) or "no end known",
                attempt.category,
                attempt.code,
                attempt.http_status,
                attempt.side_effect,
                moment(attempt.next_eligible_at),
                attempt.worker,
                attempt.message,
            ]
            for attempt in attempts
        ),
    )


def _decisions(decisions: Sequence[DecisionRecord]) -> RenderableType:
    columns = ["AT", "ACTION", "OUTCOME", "BY", "REASON", "REFUSALS", "DECISION"]
    return table(
        columns,
        (
            [
                moment(record.at),
                record.action,
                record.outcome,
                record.decided_by,
                record.reason,
                ", ".join(record.refusals),
                record.decision_id,
            ]
            for record in decisions
        ),
    )


def _eligibility(entry: Entry) -> list[RenderableType]:
    checked = f"as of {moment(entry.eligibility.checked_at)}"
    if entry.eligibility.redrivable:
        return [Text.assemble(("yes", "green"), f", {checked}")]
    return [
        Text.assemble(("no", "red"), f", {checked}"),
        *(pairs([(f"  {code}", _reason(code))]) for code in entry.eligibility.refusals),
    ]


def _reason(code: RefusalCode) -> Text:
    rule = REFUSALS[code]
    return Text.assemble(coloured(rule.when), "; ", (rule.cure, "italic"))


def _commands(entry: Entry) -> list[str]:
    """The commands that decide the entry as it is shown here: had it been redriven since, they would be refused."""
    name = shlex.quote(f"{entry.run_id}/{entry.node_id}")
    common = f"--if-redrives {entry.redrives}"
    refusals = entry.eligibility.refusals
    options = [_MENDED_BY.get(code, f"--override {code}" if REFUSALS[code].overridable else None) for code in refusals]
    commands = [
        f"redrive dlq resolve {name} {common} --reason '…' --output RESULT.json",
        f"redrive dlq discard {name} {common} --reason '…'",
    ]
    if None not in options:
        redrive = ["redrive dlq redrive", name, common, "--reason '…'", *dict.fromkeys(filter(None, options))]
        commands.insert(0, " ".join(redrive))
    if entry.side_effect is SideEffect.POSSIBLE:
        commands.append(f"redrive dlq reconcile {name} {common}")
    return [printable(command) for command in commands]


_MENDED_BY: Final[Mapping[RefusalCode, str]] = {
    RefusalCode.INPUT_INVALID: "--input INPUT.json",
    RefusalCode.APPROVAL_EXPIRED: "--approval APPROVAL.json",
    RefusalCode.APPROVAL_REVOKED: "--approval APPROVAL.json",
    RefusalCode.APPROVAL_VOID: "--approval APPROVAL.json",
}
"""What a redrive brings along where it would be refused without; other refusals are overridden, or stand."""
