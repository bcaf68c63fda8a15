"""``redrive dlq``: find dead letters, read their evidence, decide."""

import getpass
from typing import TYPE_CHECKING, Annotated

import typer

from cli.documents import read_document, read_duration, read_value
from cli.errors import REFUSED, UsageError
from cli.evidence import render_entry, render_record, render_standing
from cli.output import AsJson, console, failed, moment, note, print_json, say, table
from cli.running import run_async
from contracts.base import Json
from contracts.dead_letters import REFUSALS, Action, DecisionOutcome, DecisionRecord, parse_decision

if TYPE_CHECKING:
    from workers.dead_letters import EntryId, Filter

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Find dead letters, read their evidence, and decide.")

Id = Annotated[str, typer.Argument(metavar="ID", help="RUN/NODE, such as order-1042/charge.")]
By = Annotated[str | None, typer.Option("--by", metavar="NAME", help="Who decides; by default your login name.")]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; it is kept with the decision.")]
MayReason = Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Why; it is kept with the decision.")]
DecisionId = Annotated[
    str | None,
    typer.Option(
        "--decision-id", metavar="ID", help="Names the decision: one seen before gets its first record again."
    ),
]
IfRedrives = Annotated[
    int | None,
    typer.Option(
        "--if-redrives",
        min=0,
        metavar="N",
        help="Only if the entry has been redriven so often, as `show` said; by default, as it is now.",
    ),
]


Tool = Annotated[str | None, typer.Option(metavar="NAME", help="Only of this tool.")]
Category = Annotated[str | None, typer.Option(metavar="CATEGORY", help="Only of this kind of failure.")]
RunId = Annotated[str | None, typer.Option(metavar="ID", help="Only of this run.")]
Fingerprint = Annotated[
    str | None, typer.Option(metavar="HASH", help="Only of failures alike: the failure_fingerprint of an entry.")
]
Since = Annotated[str | None, typer.Option(metavar="DURATION", help="Only opened in the last 30m, 24h, 7d …")]
Closed = Annotated[bool, typer.Option("--all", help="Those that were decided, too.")]
Limit = Annotated[int, typer.Option(min=1, help="Show no more than so many.")]


@app.command("list")
def list_(
    tool: Tool = None,
    category: Category = None,
    run: RunId = None,
    fingerprint: Fingerprint = None,
    since: Since = None,
    closed: Closed = False,
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """List the dead letters that wait for a decision, the newest first."""
    wanted = _filter(tool, category, run, fingerprint, since, closed)

    async def work() -> None:
        from workers.client import connect
        from workers.dead_letters import list_dead_letters

        found, more = await list_dead_letters(await connect(), wanted, limit)
        if as_json:
            print_json([row.model_dump(mode="json") for row in found])
        else:
            rows = [[row.id, row.tool, row.category, row.status, moment(row.opened_at)] for row in found]
            console().print(table(["ID", "TOOL", "CATEGORY", "STATUS", "OPENED"], rows))
        if more:
            note(f"there are more than {limit}; see them with --limit")

    run_async(work())


@app.command()
def groups(
    tool: Tool = None,
    category: Category = None,
    run: RunId = None,
    fingerprint: Fingerprint = None,
    since: Since = None,
    closed: Closed = False,
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """Count the dead letters that wait for a decision by how they have failed, the most frequent first."""
    wanted = _filter(tool, category, run, fingerprint, since, closed)

    async def work() -> None:
        from workers.client import connect
        from workers.dead_letters import group_dead_letters

        found, more = await group_dead_letters(await connect(), wanted, limit)
        if as_json:
            print_json([group.model_dump(mode="json") for group in found])
        else:
            columns = ["COUNT", "TOOL", "CATEGORY", "CODE", "FIRST", "LAST", "EXAMPLE", "FINGERPRINT"]
            rows = [
                [
                    group.count,
                    group.tool,
                    group.category,
                    group.code,
                    moment(group.first_opened_at),
                    moment(group.last_opened_at),
                    group.example,
                    group.failure_fingerprint,
                ]
                for group in found
            ]
            console().print(table(columns, rows))
        if more:
            note(f"there are more than {limit}; see them with --limit")

    run_async(work())


def _filter(
    tool: str | None, category: str | None, run: str | None, fingerprint: str | None, since: str | None, closed: bool
) -> "Filter":
    from contracts.failures import Category as Known
    from workers.dead_letters import Filter

    if category is not None and category.upper() not in Known.__members__:
        raise UsageError(f"--category: {category!r} is none of {', '.join(Known)}")
    duration = read_duration(since, "--since") if since is not None else None
    return Filter(
        tool=tool,
        category=category.upper() if category is not None else None,
        run_id=run,
        fingerprint=fingerprint,
        since=duration,
        closed=closed,
    )


@app.command()
def show(entry_id: Id, as_json: AsJson = False) -> None:
    """Check an entry against the present, and show all of its evidence and how to decide it."""
    found = _entry_id(entry_id)

    async def work() -> None:
        from workers.client import connect
        from workers.dead_letters import check_entry

        entry = await check_entry(await connect(), found)
        if as_json:
            print_json(entry.model_dump(mode="json"))
        else:
            console().print(render_entry(entry))

    run_async(work())


@app.command()
def check(
    entry_id: Id,
    by: Annotated[
        str | None, typer.Option("--by", metavar="NAME", help="Who checks; without it, it is only a look.")
    ] = None,
    decision_id: DecisionId = None,
    as_json: AsJson = False,
) -> None:
    """Check whether a redrive would be accepted now; decides nothing."""
    payload: dict[str, Json] = {"decided_by": by} if by is not None else {}
    _decide(entry_id, Action.CHECK, payload, decision_id=decision_id, if_redrives=None, as_json=as_json)


@app.command()
def redrive(  # noqa: PLR0913, PLR0917 - one parameter for each option
    entry_id: Id,
    reason: Reason,
    by: By = None,
    input_: Annotated[
        str | None,
        typer.Option(
            "--input", metavar="FILE", help="Send this JSON instead (- reads standard input): a new operation."
        ),
    ] = None,
    new_operation: Annotated[
        bool, typer.Option("--new-operation", help="Send under a new key, where the tool has stored the failure.")
    ] = False,
    approval: Annotated[
        str | None,
        typer.Option(metavar="FILE|JSON", help='A new approval: {"id": …, "granted_by": …, "expires_at": …}.'),
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option(metavar="CODE", help="Redrive in spite of this refusal; may be repeated.")
    ] = None,
    decision_id: DecisionId = None,
    if_redrives: IfRedrives = None,
    as_json: AsJson = False,
) -> None:
    """Send it again: the same operation, or with a new input a new one."""
    payload: dict[str, Json] = {"decided_by": _by(by), "reason": reason}
    if input_ is not None:
        payload["input"] = read_document(input_, "--input")
    if new_operation:
        payload["new_operation"] = True
    if approval is not None:
        payload["approval"] = read_value(approval, "--approval")
    if override:
        payload["override"] = [code.upper() for code in override]
    _decide(entry_id, Action.REDRIVE, payload, decision_id=decision_id, if_redrives=if_redrives, as_json=as_json)


@app.command()
def discard(
    entry_id: Id,
    reason: Reason,
    by: By = None,
    decision_id: DecisionId = None,
    if_redrives: IfRedrives = None,
    as_json: AsJson = False,
) -> None:
    """Give the node up."""
    payload: dict[str, Json] = {"decided_by": _by(by), "reason": reason}
    _decide(entry_id, Action.DISCARD, payload, decision_id=decision_id, if_redrives=if_redrives, as_json=as_json)


@app.command()
def resolve(
    entry_id: Id,
    reason: Reason,
    output: Annotated[
        str,
        typer.Option(metavar="FILE|JSON", help="The result that you vouch for: a file, - for standard input, or JSON."),
    ],
    by: By = None,
    decision_id: DecisionId = None,
    if_redrives: IfRedrives = None,
    as_json: AsJson = False,
) -> None:
    """End the node with a result that you vouch for; the tool is not called."""
    payload: dict[str, Json] = {"decided_by": _by(by), "reason": reason, "output": read_value(output, "--output")}
    _decide(entry_id, Action.RESOLVE, payload, decision_id=decision_id, if_redrives=if_redrives, as_json=as_json)


@app.command()
def reconcile(
    entry_id: Id,
    reason: MayReason = None,
    by: By = None,
    decision_id: DecisionId = None,
    if_redrives: IfRedrives = None,
    as_json: AsJson = False,
) -> None:
    """Ask the tool again what happened."""
    payload: dict[str, Json] = {"decided_by": _by(by)}
    if reason is not None:
        payload["reason"] = reason
    _decide(entry_id, Action.RECONCILE, payload, decision_id=decision_id, if_redrives=if_redrives, as_json=as_json)


def _decide(
    entry_id: str,
    action: Action,
    payload: dict[str, Json],
    *,
    decision_id: str | None,
    if_redrives: int | None,
    as_json: bool,
) -> None:
    found = _entry_id(entry_id)
    if decision_id is not None:
        payload["decision_id"] = decision_id
    if if_redrives is not None:
        payload["if_redrives"] = if_redrives

    async def work() -> None:
        from workers.client import connect
        from workers.dead_letters import decide, read_entry
        from workers.settings import load_settings

        settings = load_settings()
        # Without Temporal first: what is wrong with it is known even where nothing runs.
        parse_decision(action, [payload], settings.limits)
        client = await connect()
        record = await decide(client, settings, found, action, payload)
        if as_json:
            print_json(record.model_dump(mode="json"))
        else:
            _print_record(found, record)
            if record.outcome is DecisionOutcome.NOTED:
                console().print(render_standing(await read_entry(client, found)))
        if record.outcome not in (DecisionOutcome.ACCEPTED, DecisionOutcome.NOTED):
            _explain(record)
            raise typer.Exit(REFUSED)

    run_async(work())


def _print_record(entry_id: "EntryId", record: DecisionRecord) -> None:
    say(f"{entry_id} {record.action} ", record.outcome)
    console().print(render_record(record))


def _explain(record: DecisionRecord) -> None:
    """Why a decision was not taken, and what can be done about it."""
    if record.outcome is DecisionOutcome.REJECTED:
        failed(f"{record.action} was rejected: {record.reason}")
    for code in record.refusals:
        rule = REFUSALS[code]
        overridable = f" (--override {code})" if rule.overridable else ""
        failed(f"{code}: {rule.when}; {rule.cure}{overridable}")


def _entry_id(text: str) -> "EntryId":
    from workers.dead_letters import EntryId

    try:
        return EntryId.parse(text)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _by(name: str | None) -> str:
    if name is not None:
        return name
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError) as error:
        raise UsageError("--by: your login name is not known here; say who decides") from error
