"""How results are printed: tables and texts for people, JSON for programs; what others have written never as markup."""

import json
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import IO, Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = [
    "AsJson",
    "coloured",
    "console",
    "failed",
    "moment",
    "note",
    "pairs",
    "pretty_json",
    "print_json",
    "print_json_line",
    "printable",
    "say",
    "table",
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]
"""The option that every command has which prints a result."""

_WIDE: Final = 4000
"""Columns of what is no terminal: nothing is ever cut off or wrapped for a program that reads it."""

_COLOURS: Final = {
    "SUCCEEDED": "green",
    "RESOLVED": "green",
    "ACCEPTED": "green",
    "RUNNING": "cyan",
    "REDRIVEN": "cyan",
    "NOTED": "cyan",
    "BLOCKED": "yellow",
    "DEAD_LETTERED": "yellow",
    "AWAITING_DECISION": "yellow",
    "FAILED": "red",
    "REFUSED": "red",
    "REJECTED": "red",
    "TERMINATED": "red",
    "TIMED_OUT": "red",
}


def _console(stream: IO[str]) -> Console:
    return Console(
        file=stream,
        width=None if stream.isatty() else _WIDE,
        markup=False,
        emoji=False,
        highlight=False,
    )


def console() -> Console:
    """Standard output."""
    return _console(sys.stdout)


def printable(value: object) -> str:
    """Text as it may be shown: control characters, which could take over a terminal, are written out."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs")
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def coloured(value: object) -> Text:
    """A cell or a word; a status has its colour."""
    text = printable(value)
    return Text(text, style=_COLOURS.get(text, ""))


def say(*parts: object) -> None:
    """A line on standard output, its parts put together."""
    console().print(Text.assemble(*(coloured(part) for part in parts)), soft_wrap=True)


def note(message: object) -> None:
    """A remark on standard error; it never gets into a result."""
    _console(sys.stderr).print(Text(printable(message), style="yellow"), soft_wrap=True)


def failed(message: object) -> None:
    """Why a command has failed, on standard error."""
    _console(sys.stderr).print(Text.assemble(("error: ", "bold red"), printable(message)), soft_wrap=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table without frames, that can be cut and searched by other programs; None is an empty cell."""
    result = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in result.columns:
        column.overflow = "fold"
    for row in rows:
        result.add_row(*("" if cell is None else coloured(cell) for cell in row))
    return result


def pairs(rows: Iterable[tuple[str, object]]) -> Table:
    """Names and what they stand for; what is None is left out."""
    result = Table.grid(padding=(0, 2, 0, 0))
    result.add_column(style="bold", no_wrap=True)
    result.add_column(overflow="fold")
    for name, value in rows:
        if value is not None:
            result.add_row(name, value if isinstance(value, Text) else coloured(value))
    return result


def moment(time: datetime | None) -> str:
    """A moment for people: UTC, to the second."""
    return "" if time is None else f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"


def pretty_json(value: Any) -> str:
    """JSON for people to read."""
    return json.dumps(value, indent=2, ensure_ascii=False)


def print_json(value: Any) -> None:
    """JSON, and nothing else, on standard output. ASCII: it can be printed whatever the terminal's encoding is."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def print_json_line(value: Any) -> None:
    """One line of JSON, at once: for what goes on."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()
