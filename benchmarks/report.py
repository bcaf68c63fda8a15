"""What was found, as JSON for programs and as a table for people."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, Field

from benchmarks.machine import Machine, look
from benchmarks.measuring import Ratio, Row, Series

__all__ = ["DOCUMENT", "RESULTS", "Results", "kept", "render", "save", "write_table"]

_ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = _ROOT / "benchmarks" / "results.json"
DOCUMENT: Final = _ROOT / "docs" / "performance.md"

_BEGIN: Final = "<!-- measured: written by make bench -->"
_END: Final = "<!-- /measured -->"


class Results(BaseModel):
    """Everything that was measured on one machine, with one set of versions.

    Attributes:
        others: What the programs beside the rows have found, as they have said it.
        quick: Nothing was measured: the sizes were only good for seeing that it works.
    """

    machine: Machine = Field(default_factory=look)
    quick: bool = False
    rows: dict[str, Row] = {}
    others: dict[str, Any] = {}


def kept(path: Path) -> Results:
    """What `save` has written, so that a part of it can be measured anew; nothing, if it is of another machine."""
    now = Results()
    before = Results.model_validate_json(path.read_text()) if path.is_file() else now
    return before if before.machine == now.machine else now


def save(results: Results, path: Path) -> None:
    """As JSON."""
    path.write_text(results.model_dump_json(indent=2) + "\n")


def render(results: Results) -> str:
    """As Markdown."""
    return "\n".join([*_head(results), *_table(results.rows.values()), *_others(results)])


def write_table(results: Results, document: Path) -> None:
    """Puts it between the marks in a document."""
    text = document.read_text()
    found = re.compile(f"{re.escape(_BEGIN)}.*{re.escape(_END)}", re.DOTALL)
    if not found.search(text):
        raise ValueError(f"{document} has no place for the table: {_BEGIN} … {_END}")
    document.write_text(found.sub(lambda _: f"{_BEGIN}\n\n{render(results)}\n\n{_END}", text))


def _head(results: Results) -> Iterator[str]:
    machine = results.machine
    yield (
        f"{machine.processor}, {machine.cores} cores, {machine.memory_gb:g} GB, {machine.system}, Python "
        f"{machine.python}. Figures are medians of the rounds; in brackets the lowest and the highest."
    )
    if results.quick:
        yield "\n**Nothing was measured here: `--quick` only shows that it works.**"
    yield "\n" + ", ".join(f"{name} {version}" for name, version in machine.versions.items())


def _table(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        yield f"\n### {row.title}\n"
        weighed = any(series.cpu_ms for series in row.series)
        yield f"| what | figure |{' CPU of a node |' * weighed}"
        yield f"| --- | --- |{' --- |' * weighed}"
        for series in row.series:
            cpu = " + ".join(f"{name} {milliseconds:.1f} ms" for name, milliseconds in series.cpu_ms.items())
            yield f"| {series.label} | {_figure(series)} {series.unit} |{f' {cpu} |' * weighed}"
        if row.ratios:
            yield "\n| what | figure | target |"
            yield "| --- | --- | --- |"
        for ratio in row.ratios:
            target = "" if ratio.target is None else f"{ratio.target}: {'reached' if ratio.met else 'not reached'}"
            yield f"| {ratio.label} | **{_figure(ratio)}** {ratio.unit} | {target} |"
        for note in row.notes:
            yield f"\n{note}"
        yield f"\n{row.at:%Y-%m-%d}: {_counted(row.rounds, 'round')} in {row.seconds:.0f} s."


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _figure(found: Series | Ratio) -> str:
    if len(found.values) == 1:
        return _number(found.median)
    return f"{_number(found.median)} ({_number(min(found.values))} to {_number(max(found.values))})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _others(results: Results) -> Iterator[str]:
    for name, found in results.others.items():
        yield f"\n### {name}"
        for title, part in found.items():
            yield from _table_of(title, part)


def _table_of(title: str, part: Any) -> Iterator[str]:
    """Objects of figures, one a line, be they in a list or under names; what is no such table is in the JSON alone."""
    lines = (
        [{"": name, **line} for name, line in part.items() if isinstance(line, dict)]
        if isinstance(part, dict)
        else part
    )
    if title in _RAW or not isinstance(lines, list) or not lines or not all(isinstance(line, dict) for line in lines):
        return
    flat = [dict(_flat(line)) for line in lines]
    columns = list(dict.fromkeys(key for line in flat for key in line))
    yield f"\n{title.replace('_', ' ')}\n"
    yield "| " + " | ".join(column.replace("_", " ") for column in columns) + " |"
    yield "| " + " | ".join("---" for _ in columns) + " |"
    for line in flat:
        yield "| " + " | ".join(_cell(line.get(column, "")) for column in columns) + " |"


def _flat(line: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in line.items():
        if isinstance(value, dict):
            yield from _flat(value)
        elif not isinstance(value, list):
            yield key, value


_RAW: Final = ("machine", "versions", "each_round")


def _cell(value: Any) -> str:
    return _number(value) if isinstance(value, float) else str(value)
