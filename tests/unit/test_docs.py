"""What the documentation names of the tests is there."""

import ast
import functools
import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
PAGES: Final = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
NAMED: Final = re.compile(r"(tests/[\w/.-]*\.py)(?:::(\w+))?")
"""A test's file, and where it says so the test; a parametrized one is named without its brackets."""


@functools.cache
def defined_in(file: Path) -> frozenset[str]:
    """The names of a file's tests."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    body = ast.parse(file.read_text()).body
    return frozenset(node.name for node in body if isinstance(node, functions) and node.name.startswith("test_"))


def unknown(text: str) -> list[str]:
    """What a text names of the tests, and is not there."""
    return [
        match[0]
        for match in NAMED.finditer(text)
        if not (file := ROOT / match[1]).is_file() or (match[2] and match[2] not in defined_in(file))
    ]


def rows_of(page: Path) -> list[list[str]]:
    """The cells of a page's tables, without their heads."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    heads = [number - 1 for number, line in enumerate(lines) if re.fullmatch(r"[|\s:-]+", line)]
    return [row for number, row in enumerate(rows) if number not in heads and number - 1 not in heads]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_is_there(page: Path) -> None:
    assert unknown(page.read_text()) == []


def test_a_test_that_is_not_there_is_found() -> None:
    here = Path(__file__).relative_to(ROOT).as_posix()
    there = f"`{here}::test_every_test_that_a_page_names_is_there`, `{here}`"
    gone = [f"{here}::test_that_was_renamed", "tests/unit/test_that_was_moved.py::test_any", "tests/no/such_file.py"]
    assert unknown(f"{there} {', '.join(gone)}") == gone


def test_every_reported_fault_names_the_test_that_holds_it() -> None:
    rows = rows_of(DOCS / "reported-faults.md")
    assert len(rows) >= 30
    assert [row for row in rows if len(row) != 3 or not NAMED.search(row[2])] == []
