"""``redrive ledger``: what was sent, and what came of it."""

from typing import Annotated

import typer

from cli.documents import read_duration
from cli.errors import CommandError, UsageError
from cli.output import AsJson, console, moment, note, print_json, say, table
from cli.running import run_async
from contracts.failures import OperationState
from contracts.identity import OperationId

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="The operation ledger: what was sent, and what came of it.")


@app.command()
def show(
    operation_id: Annotated[
        str, typer.Argument(metavar="OPERATION_ID", help="RUN/NODE/LOGICAL_ATTEMPT, such as order-1042/charge/1.")
    ],
    as_json: AsJson = False,
) -> None:
    """Show all that the ledger knows of an operation; Temporal is not asked."""
    try:
        operation = str(OperationId.parse(operation_id))
    except ValueError as error:
        raise UsageError(str(error)) from error

    async def work() -> None:
        from cli.evidence import render_operation
        from workers.dead_letters import existing_ledger
        from workers.settings import load_settings

        settings = load_settings()
        async with existing_ledger(settings.ledger.get_secret_value()) as ledger:
            found = await ledger.operation(operation)
        if found is None:
            raise CommandError(f"the ledger knows no operation {operation!r}: nothing was ever sent for it from here")
        if as_json:
            print_json(found.model_dump(mode="json"))
        else:
            console().print(render_operation(found))

    run_async(work())


@app.command("list")
def list_(
    state: Annotated[
        OperationState, typer.Option(case_sensitive=False, help="Only in this state.")
    ] = OperationState.UNSETTLED,
    run: Annotated[str | None, typer.Option(metavar="ID", help="Only of this run.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Show no more than so many.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List the operations that are in a state, such as those whose effect is uncertain; Temporal is not asked."""

    async def work() -> None:
        from workers.dead_letters import existing_ledger
        from workers.ledger import list_operations
        from workers.settings import load_settings

        async with existing_ledger(load_settings().ledger.get_secret_value()) as ledger:
            found, more = await list_operations(ledger, state, run, limit)
        if as_json:
            print_json([row.model_dump(mode="json") for row in found])
        else:
            rows = [
                [row.operation_id, row.tool, row.state, row.side_effect, row.attempts, moment(row.last_sent_at)]
                for row in found
            ]
            console().print(table(["OPERATION", "TOOL", "STATE", "EFFECT", "ATTEMPTS", "LAST SENT"], rows))
        if more:
            note(f"there are more than {limit}; see them with --limit")

    run_async(work())


@app.command()
def prune(
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="DURATION", help="Only runs that ended longer ago, such as 30d.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be forgotten.")] = False,
    as_json: AsJson = False,
) -> None:
    """Forget runs that ended long ago, if nothing of them is unsettled and Temporal has forgotten them, too.

    A run started again under a forgotten id is a new one: its tools are called again.
    """
    duration = read_duration(older_than, "--older-than")

    async def work() -> None:
        from workers.client import connect
        from workers.dead_letters import existing_ledger
        from workers.ledger import prune as prune_ledger
        from workers.settings import load_settings

        settings = load_settings()
        client = await connect()
        async with existing_ledger(settings.ledger.get_secret_value()) as ledger:
            report = await prune_ledger(client, ledger, duration, dry_run)
        if as_json:
            print_json(report.model_dump(mode="json"))
            return
        say(
            "would forget " if dry_run else "forgot ",
            f"{report.runs} runs with {report.operations} operations and {report.attempts} attempts",
        )
        if report.kept:
            note(f"{report.kept} more are kept: Temporal still knows them, so that they could be reset")

    run_async(work())
