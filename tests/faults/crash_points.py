"""Every point at which a worker can die in the path of an operation, by its name.

The points follow from the product's own interfaces: a new method of the ledger, a new activity, a new workflow or a new
moment on the wire is a new point by itself, and the matrix fails until a cell covers it (`tests.faults.crash_cells`).
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from activities import stubs
from activities.ledger.interface import Ledger
from activities.wire import Moment
from workers.worker import WORKFLOWS

__all__ = ["DEEPEST", "EXCLUDED", "LEDGER_METHODS", "POINTS", "QUESTIONS", "Place", "Point"]


class Place(StrEnum):
    """Which of the product's interfaces a point belongs to."""

    LEDGER = "ledger"
    """Around a transaction: before it begins, after it is durable."""
    WIRE = "wire"
    """On the way of a request to a tool, and of its answer back: a `Moment`."""
    ACTIVITY = "activity"
    """Around an activity: delivered but not begun, done but not acknowledged."""
    QUESTION = "question"
    """Around a signal by which a sweep asks a workflow: before it is sent, after Temporal has it; there may be more."""
    TASK = "task"
    """In the n-th activation of a workflow, and in the one that ends it: its decisions are made, and Temporal has not
    heard of them. Whether what happens at once comes in one activation or in two is Temporal's to choose."""


@dataclass(frozen=True)
class Point:
    """A moment in the life of a worker."""

    place: Place
    what: str
    when: str

    def __str__(self) -> str:
        return f"{self.place}.{self.what}.{self.when}"

    @property
    def subject(self) -> str:
        """What a cell declares to pass, whatever the moment."""
        return f"{self.place}.{self.what}"


EXCLUDED: Final[Mapping[str, str]] = {
    "ledger.close": "of a worker that stops by itself; nothing is under way then",
    "ledger.operations": "asked by the `ledger` command, never by a worker",
    "ledger.ended_runs": "asked by the `ledger` command, never by a worker",
    "ledger.prune": "asked by the `ledger` command, never by a worker",
    "activity.read_outputs": "only reads, for a run that has continued as new; Temporal asks again",
}
"""What an interface has besides, and why it is no point."""

SENDERS: Final = ("call_tool", "call_at_once", "reconcile")
"""The activities that send requests to tools."""

QUESTIONS: Final = ("run_gone", "check", "dead_letter_gone", "node_gone")
"""The signals that a sweep sends; a new one is reported by the worker that passes it."""

DEEPEST: Final[Mapping[str, int]] = {"Run": 4, "Node": 6, "DeadLetter": 5, "Sweep": 5}
"""How many activations of a workflow are points of their own, besides its last: as many as a cell is sure of."""

LEDGER_METHODS: Final = [
    name for name, member in vars(Ledger).items() if inspect.isfunction(member) and not name.startswith("_")
]


def _points() -> list[Point]:
    points = [Point(Place.LEDGER, method, when) for method in LEDGER_METHODS for when in ("before", "after")]
    points += [Point(Place.WIRE, sender, when) for sender in SENDERS for when in Moment]
    points += [Point(Place.QUESTION, signal, when) for signal in QUESTIONS for when in ("before", "after")]
    points += [Point(Place.ACTIVITY, name, when) for name in stubs.__all__ for when in ("begin", "ack")]
    points += [
        Point(Place.TASK, workflow.__name__, when)
        for workflow in WORKFLOWS
        for when in [*map(str, range(1, DEEPEST[workflow.__name__] + 1)), "end"]
    ]
    return [point for point in points if point.subject not in EXCLUDED]


POINTS: Final[Mapping[str, Point]] = {str(point): point for point in _points()}
"""All of them, by name."""
