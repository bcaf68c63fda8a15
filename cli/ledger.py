"""``redrive ledger``: what was sent, and what came of it."""

from typing import Annotated

import typer

from cli.errors import CommandError, UsageError
from cli.output import AsJson, console, print_json
from cli.running import run_async
from contracts.identity import OperationId

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Look into the operation ledger: what was sent, and what came of it.")


@app.callback()
def _ledger() -> None:
    pass


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
