"""What the benchmarks make of what they have measured."""

from pathlib import Path

import pytest

from benchmarks.machine import Machine
from benchmarks.measuring import Ratio, Row, Series, Target, ratio
from benchmarks.report import DOCUMENT, Results, kept, render, save, write_table
from benchmarks.rows.outage import busiest

MACHINE = Machine(
    processor="a processor", cores=2, memory_gb=4, system="Linux", python="3.11", versions={"redrive": "0"}
)


def test_a_ratio_is_of_pairs_within_a_round() -> None:
    # Of the medians alone it would be 2.
    found = ratio("a / b", Series(label="a", unit="", values=[1, 20, 4]), Series(label="b", unit="", values=[1, 10, 2]))
    assert found.values == [1, 2, 2]


@pytest.mark.parametrize(
    ("target", "value", "met"),
    [
        (Target(least=0.9), 0.9, True),
        (Target(least=0.9), 0.89, False),
        (Target(most=1.3), 1.3, True),
        (Target(most=1.3), 1.31, False),
    ],
)
def test_a_target_is_met_or_not(target: Target, value: float, met: bool) -> None:
    assert target.met(value) is met


@pytest.mark.parametrize(
    ("arrivals", "seconds", "most"),
    [([], 1, 0), ([0, 0.5, 0.99, 1.0], 1, 3), ([0.9, 1.1, 1.2, 3], 1, 3), ([0, 4, 9.9, 10], 10, 0.3)],
)
def test_the_busiest_span_is_found_wherever_it_begins(arrivals: list[float], seconds: float, most: float) -> None:
    assert busiest(arrivals, seconds) == most


def test_the_table_says_what_was_not_reached_and_who_was_left_out() -> None:
    missed = Ratio(label="a / b", values=[0.5], target=Target(least=0.9))
    results = Results(
        machine=MACHINE, rows={"nodes": Row(title="Nodes", ratios=[missed], notes=["b is left out: why"])}
    )
    table = render(results)
    assert "| a / b | **0.5**  | ≥ 0.9: not reached |" in table
    assert "b is left out: why" in table


def test_the_document_has_a_place_for_the_table_which_can_be_written_again(tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    document.write_text(DOCUMENT.read_text())
    for title in ("First", "Second"):
        write_table(Results(machine=MACHINE, rows={"nodes": Row(title=title)}), document)
    text = document.read_text()
    assert "### Second" in text
    assert "### First" not in text
    assert text.partition("<!--")[0] == DOCUMENT.read_text().partition("<!--")[0]


def test_results_of_another_machine_are_not_mixed_in(tmp_path: Path) -> None:
    save(Results(machine=MACHINE, rows={"nodes": Row(title="Nodes")}), tmp_path / "results.json")
    assert kept(tmp_path / "results.json").rows == {}
