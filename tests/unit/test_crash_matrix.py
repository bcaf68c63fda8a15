"""The crash-point matrix is whole: every point has a name and a cell, and every kind of call meets every outcome."""

import inspect
from collections import Counter

import pytest

from activities import stubs
from activities.ledger.interface import Ledger
from tests.faults.crash_cells import CELLS, KINDS, OUTCOMES, SWEEP, pairs, sweeps
from tests.faults.crash_points import DEEPEST, EXCLUDED, LEDGER_METHODS, POINTS, QUESTIONS, Place
from workers.worker import WORKFLOWS

_OF_EVERY_CALL = [
    name
    for name in POINTS
    if name.startswith(("ledger.claim.", "activity.admit.", "activity.call_tool.", "task.Run.end", "task.Node.end"))
    or name in ("wire.call_tool.before-send", "wire.call_tool.sent", "task.Run.1")
]
_OF_EVERY_ANSWER = ["wire.call_tool.headers", "wire.call_tool.body"]


def test_every_point_has_a_cell() -> None:
    reached = {str(pair.point) for pair in [*pairs(), *sweeps()]}
    assert [name for name in POINTS if name not in reached] == []


def test_every_cell_passes_only_points_that_there_are() -> None:
    known = {*POINTS, *(point.subject for point in POINTS.values())}
    assert {name for cell in [*CELLS, SWEEP] for name in cell.passes} <= known


@pytest.mark.parametrize("place", Place)
def test_the_points_cover_the_products_interfaces(place: Place) -> None:
    members = {
        Place.LEDGER: {name for name, _ in inspect.getmembers(Ledger, inspect.isfunction) if not name.startswith("_")},
        Place.WIRE: {"call_tool", "call_at_once", "reconcile"},
        Place.QUESTION: set(QUESTIONS),
        Place.ACTIVITY: set(stubs.__all__),
        Place.TASK: {workflow.__name__ for workflow in WORKFLOWS},
    }[place]
    named = {point.what for point in POINTS.values() if point.place is place}
    excluded = {name.partition(".")[2] for name in EXCLUDED if name.startswith(f"{place}.")}
    assert named | excluded == members
    assert not named & excluded


def test_what_is_no_point_still_exists() -> None:
    """A reason for something that is gone is a reason to look again."""
    ledger = {name.partition(".")[2] for name in EXCLUDED if name.startswith("ledger.")}
    assert ledger <= set(LEDGER_METHODS)
    assert DEEPEST.keys() == {workflow.__name__ for workflow in WORKFLOWS}


def test_every_kind_of_tool_meets_every_outcome_at_every_point_of_a_call() -> None:
    cells = {f"{kind}-{outcome}" for kind in KINDS for outcome in OUTCOMES}
    killed = Counter((str(pair.point), pair.cell.name) for pair in pairs())
    assert killed.keys() >= {(point, cell) for point in _OF_EVERY_CALL for cell in cells}
    # Nothing answers a call that hangs, unless it is repeated.
    answered = cells - {"asked-hung", "blind-hung"}
    assert killed.keys() >= {(point, cell) for point in _OF_EVERY_ANSWER for cell in answered}
    assert set(killed.values()) == {1}
