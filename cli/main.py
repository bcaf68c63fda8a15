"""The ``redrive`` command: its parts, and the one place where errors become messages and exit codes."""

import sys
from typing import Annotated

import typer

from cli import dlq, ledger, run, schema, storage, tools, worker
from cli.demo import demo
from cli.errors import REFUSED, explain
from cli.output import failed

__all__ = ["app", "main"]

app = typer.Typer(
    name="redrive",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Durable runs of HTTP tool calls on Temporal: every effect once, every failure explained, every dead letter "
    "redrivable.",
    epilog="Exit codes: 0 done; 1 refused or failed; 2 usage or bad input; 3 cannot reach Temporal or the ledger.",
)

app.command()(demo)
app.command()(worker.dev)
app.command()(worker.worker)
app.command()(worker.setup)
app.add_typer(run.app, name="run")
app.add_typer(dlq.app, name="dlq")
app.add_typer(ledger.app, name="ledger")
app.add_typer(storage.app, name="storage")
app.add_typer(tools.app, name="tools")
app.command()(schema.schema)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"redrive {version('redrive')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Runs the command; ends the process with its exit code."""
    try:
        _run()
    except BrokenPipeError:
        # Whoever read the output has gone, as `head` does: nobody is left to tell, and the interpreter must not either.
        sys.stdout = None
        sys.exit(REFUSED)


def _run() -> None:
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character shows its code instead of ending the command.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        app(prog_name="redrive")
    except Exception as error:
        explanation = explain(error)
        if explanation is None:
            raise
        failed(explanation.message)
        sys.exit(explanation.code)
    finally:
        sys.stdout.flush()


if __name__ == "__main__":
    main()
