"""``redrive run``: start runs, see how they are doing, follow, cancel and list them."""

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from cli.documents import read_document
from cli.errors import REFUSED, CommandError, UsageError
from cli.output import AsJson, console, failed, moment, note, print_json, say, table
from cli.running import run_async
from contracts.identity import problem_with_run_id

if TYPE_CHECKING:
    from workers.runs import Start

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Start runs, see how they are doing, follow, cancel and list them.")

RunId = Annotated[str, typer.Argument(metavar="ID", help="The run's id, which is its workflow id in Temporal.")]


@app.command()
def start(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The specification as JSON; - reads standard input.")],
    run_id: Annotated[str, typer.Option("--id", metavar="ID", help="The run's id; it names the business event.")],
    watch: Annotated[bool, typer.Option("--watch", help="Follow it to its end, as `redrive run watch` does.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start a run. Safe to repeat with the same id: nothing is done twice.

    What runs or has succeeded with the same specification is left alone; what has ended otherwise is started again, and
    does only what is not done yet. Another specification under a used id is refused.
    """
    _require_run_id(run_id)
    spec = read_document(file, "the run's specification")
    if not isinstance(spec, dict):
        raise UsageError("the run's specification is a JSON object (`redrive schema run` describes it)")

    async def work() -> None:
        from contracts.runs import parse_run
        from workers.client import connect
        from workers.runs import start_run
        from workers.settings import load_settings

        settings = load_settings()
        # Without Temporal first: what is wrong with it is known even where nothing runs.
        parse_run(run_id, [spec], settings.limits)
        client = await connect()
        started = await start_run(client, settings, run_id, spec)
        if not (watch and as_json):
            _print_start(started, as_json)
        if watch:
            await _follow(run_id, as_json)

    run_async(work())


def _print_start(started: "Start", as_json: bool) -> None:
    from workers.runs import StartOutcome

    if as_json:
        print_json(started.model_dump(mode="json"))
        return
    match started.outcome:
        case StartOutcome.STARTED:
            say(f"started run {started.run_id}")
        case StartOutcome.RESTARTED:
            say(f"started run {started.run_id} again: what the ledger knows as done is not done again")
        case StartOutcome.ALREADY_RUNNING:
            say(f"run {started.run_id} is already running (", started.status, "), with the same specification")
        case StartOutcome.ALREADY_SUCCEEDED:
            say(
                f"run {started.run_id} has already ", started.status, ", with the same specification; not started again"
            )


@app.command()
def show(run_id: RunId, as_json: AsJson = False) -> None:
    """Show how a run and each of its nodes is doing, and how it ended."""
    _require_run_id(run_id)

    async def work() -> None:
        from cli.progress import render
        from workers.client import connect
        from workers.runs import view_run

        view = await view_run(await connect(), run_id)
        if view.unanswered is not None:
            note(f"its nodes cannot be shown: {view.unanswered}")
        if as_json:
            print_json(view.document())
        else:
            console().print(render(view))

    run_async(work())


@app.command()
def watch(run_id: RunId, as_json: AsJson = False) -> None:
    """Follow a run to its end; exit code 1 if it does not succeed.

    On a terminal it shows live progress, elsewhere one line for each change; with --json, one JSON object a line, the
    last of which shows the run as it ended.
    """
    _require_run_id(run_id)
    run_async(_follow(run_id, as_json))


async def _follow(run_id: str, as_json: bool) -> None:
    from cli.progress import follow, why_not
    from workers.client import connect
    from workers.runs import watch_run

    last = await follow(watch_run(await connect(), run_id), as_json)
    if reason := why_not(last):
        failed(reason)
        raise typer.Exit(REFUSED)


@app.command()
def cancel(run_id: RunId, as_json: AsJson = False) -> None:
    """Cancel a run: nothing new is sent, what is in flight is settled, then it ends."""
    _require_run_id(run_id)

    async def work() -> None:
        from workers.client import connect
        from workers.runs import cancel_run, status_of

        found = await cancel_run(await connect(), run_id)
        status = status_of(found)
        if found.ended_at is not None and status != "CANCELLED":
            raise CommandError(f"run {run_id} has already ended {status}: there is nothing to cancel")
        if as_json:
            print_json({"run_id": run_id, "status": status, "cancel_requested": found.ended_at is None})
        elif found.ended_at is None:
            say(f"asked run {run_id} to cancel; follow it with: redrive run watch {shlex.quote(run_id)}")
        else:
            say(f"run {run_id} is already ", status)

    run_async(work())


@app.command("list")
def list_(
    status: Annotated[
        str | None,
        typer.Option(
            metavar="STATUS",
            help="RUNNING, BLOCKED, SUCCEEDED, FAILED or CANCELLED; or TERMINATED or TIMED_OUT, by an operator.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Show no more than so many.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List runs, the newest first; one that was started again is listed once for each time."""

    async def work() -> None:
        from workers.client import connect
        from workers.runs import RUN_STATUSES, list_runs, status_of

        wanted = status.upper() if status is not None else None
        if wanted is not None and wanted not in RUN_STATUSES:
            raise UsageError(f"--status: {status!r} is none of {', '.join(RUN_STATUSES)}")
        found, more = await list_runs(await connect(), wanted, limit)
        if as_json:
            print_json(
                [
                    {
                        "run_id": run.workflow_id,
                        "status": status_of(run),
                        "started_at": run.started_at.isoformat(),
                        "ended_at": run.ended_at.isoformat() if run.ended_at is not None else None,
                        "workflow_run_id": run.workflow_run_id,
                    }
                    for run in found
                ]
            )
        else:
            rows = [[run.workflow_id, status_of(run), moment(run.started_at), moment(run.ended_at)] for run in found]
            console().print(table(["ID", "STATUS", "STARTED", "ENDED"], rows))
        if more:
            note(f"there are more than {limit}; see them with --limit")

    run_async(work())


def _require_run_id(run_id: str) -> None:
    if problem := problem_with_run_id(run_id):
        raise UsageError(problem)
