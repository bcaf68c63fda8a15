"""What a user gives: a duration; JSON as a file, as ``-`` for standard input, or itself."""

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from cli.errors import UsageError
from contracts.base import Json
from contracts.tools import parse_duration

__all__ = ["read_document", "read_duration", "read_json", "read_value"]


def read_duration(text: str, option: str) -> timedelta:
    """Reads a duration, such as ``30d``.

    Raises:
        UsageError: it is none.
    """
    try:
        return parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


def read_document(source: str, what: str) -> Json:
    """Reads JSON from a file or, for ``-``, from standard input.

    Raises:
        UsageError: it cannot be read, or is not JSON; ``what`` names it in the message.
    """
    return read_json(_content(source, what), f"{what} {'on standard input' if source == '-' else source}")


def read_value(source: str, what: str) -> Json:
    """Reads JSON from a file, from standard input, or from the argument itself where no such file exists.

    Raises:
        UsageError: it is none of them.
    """
    if source == "-" or _is_file(source):
        return read_document(source, what)
    try:
        return read_json(source, what)
    except UsageError as error:
        raise UsageError(f"there is no file {source[:200]!r}, and {error}") from error


def read_json(text: str, what: str) -> Json:
    """Reads JSON, strictly: no NaN, no Infinity.

    Raises:
        UsageError: it is not JSON.
    """

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"JSON has no {constant}")

    try:
        value: Json = json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise UsageError(f"{what}: nested too deep") from None
    except ValueError as error:
        raise UsageError(f"{what}: not JSON: {error}") from error
    return value


def _content(source: str, what: str) -> str:
    try:
        content = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise UsageError(f"{what}: cannot read {source}: {error.strerror or error}") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} {source}: not UTF-8: {error}") from error


def _is_file(source: str) -> bool:
    try:
        return Path(source).is_file()
    except (OSError, ValueError):
        # Too long for a file's name, or with a zero byte in it: JSON, then.
        return False
