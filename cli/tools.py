"""``redrive tools``: checks a catalog before a worker has to."""

import os
from pathlib import Path
from typing import Annotated

import typer

from cli.output import AsJson, console, note, print_json, table
from contracts.tools import Tool, load_catalog

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Check the catalog of tools.")


@app.callback()
def _tools() -> None:
    pass


@app.command()
def check(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The catalog; by default, what REDRIVE_TOOLS names.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a catalog: every problem with its place, or its tools."""
    from workers.settings import load_settings

    catalog = load_catalog(file if file is not None else load_settings().tools)
    tools = list(catalog.tools.values())
    if as_json:
        print_json([_document(tool) for tool in tools])
    else:
        rows = [[tool.name, tool.method, tool.effect, tool.idempotency, tool.fingerprint] for tool in tools]
        console().print(table(["TOOL", "METHOD", "EFFECT", "IDEMPOTENCY", "FINGERPRINT"], rows))
    for tool in tools:
        for variable in _missing(tool):
            note(f"note: {variable}, the secret of {tool.name}, is not set here; a worker needs it")


def _missing(tool: Tool) -> list[str]:
    return [] if tool.auth is None or os.environ.get(tool.auth.variable) else [tool.auth.variable]


def _document(tool: Tool) -> dict[str, object]:
    return {
        "name": tool.name,
        "method": tool.method,
        "url": tool.url,
        "version": tool.version,
        "effect": tool.effect,
        "idempotency": tool.idempotency,
        "fingerprint": tool.fingerprint,
        "missing_environment": _missing(tool),
    }
