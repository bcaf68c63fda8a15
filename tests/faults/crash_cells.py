"""The cells of the crash-point matrix: tools, outcomes, decisions of people, a sweep; and which points each passes.

A cell declares the points that it passes when nothing disturbs it. At every one of them it is killed, once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, TypeVar

from tests.faults.crash_points import POINTS, QUESTIONS, Place, Point

__all__ = ["CELLS", "KINDS", "OUTCOMES", "SWEEP", "Cell", "Pair", "Way", "pairs", "sweeps"]

_RETRY: Final = {
    category: {"initial": "20ms", "maximum": "100ms", "attempts": 5} for category in ("TRANSIENT", "RATE_LIMITED")
} | {"DEPENDENCY_DOWN": {"initial": "20ms", "maximum": "100ms", "attempts": 2}}
_LONG: Final = "15s"
"""Longer than anything takes here; and over when Temporal has noticed that a worker is lost."""
_SHORT: Final = "5s"
"""What a call that hangs takes: its lease is renewed meanwhile."""

KINDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "read": {"effect": "read"},
    "key": {"idempotency": "key", "dedupe": True},
    "key-asked": {"idempotency": "key", "dedupe": True, "reconcile": True},
    "asked": {"reconcile": True},
    "blind": {},
}
"""What a tool declares of itself, as `tests.lab.Bench.tool` takes it."""

OUTCOMES: Final[Mapping[str, list[dict[str, Any]]]] = {
    "success": [{}],
    "limited": [{"status": 429, "headers": {"Retry-After": "1"}}, {}],
    "broken": [{"status": 500, "commit": True}, {}],
    "hung": [{"fault": "hang"}, {}],
}
"""What becomes of the first call, and of any after it: one too many has an effect of its own."""


@dataclass(frozen=True)
class Way:
    """What something passes on its way.

    Attributes:
        passes: The subjects or names of the points on its way.
        activations: How many activations each of its workflows has at least.
    """

    name: str
    passes: frozenset[str]
    activations: Mapping[str, int]

    def reaches(self, point: Point) -> bool:
        """Whether it is there to be killed at that point."""
        if point.place is Place.TASK:
            activations = self.activations.get(point.what, 0)
            return activations > 0 if point.when == "end" else int(point.when) <= activations
        return point.subject in self.passes or str(point) in self.passes


@dataclass(frozen=True)
class Cell(Way):
    """A tool, what becomes of its calls, what a person decides, and what it passes on its way.

    Attributes:
        tool: As `tests.lab.Bench.tool` takes it.
        steps: What its calls meet.
        asks: What questions at its reconcile route meet.
        mode: The run's `node_mode`.
        nodes: How many nodes of the run call it at once.
        cancelled: The run is cancelled once the tool has been called.
        decision: What a person does first with its dead letter; otherwise a redrive, or a resolve where an effect is
            possible.
        ends: How the run ends.
    """

    tool: Mapping[str, Any]
    steps: list[dict[str, Any]]
    asks: list[dict[str, Any]] = field(default_factory=list)
    mode: str = "workflow"
    nodes: int = 1
    cancelled: bool = False
    decision: str | None = None
    ends: str = "COMPLETED"

    @property
    def reads(self) -> bool:
        return self.tool.get("effect") == "read"

    @property
    def dedupes(self) -> bool:
        return self.tool.get("idempotency") == "key"

    @property
    def askable(self) -> bool:
        return bool(self.tool.get("reconcile"))


_CALLED: Final = {
    "activity.admit",
    "activity.call_tool",
    "ledger.claim",
    "wire.call_tool.before-send",
    "wire.call_tool.sent",
}
_ANSWERED: Final = {"wire.call_tool.headers", "wire.call_tool.body"}
_SUCCEEDED: Final = _CALLED | _ANSWERED | {"ledger.succeed"}
_FAILED: Final = _CALLED | {"ledger.fail"}
_RENEWED: Final = {"ledger.renew"}
_GATHERED: Final = {"activity.gather_evidence", "ledger.node"}
_ASKED: Final = _GATHERED | {"activity.reconcile", "wire.reconcile"}
_TAKEN: Final = _ASKED | {"ledger.settle_committed"}
_PARKED: Final = _GATHERED | {"activity.preflight", "activity.alert"}
_DECIDED: Final = _PARKED | {"activity.decide", "ledger.decide"}
_CANCELLED: Final = {"activity.cancel_nodes", "ledger.cancel"}

_PLAIN: Final = {"Run": 3, "Node": 2}
_RECONCILED: Final = {"Run": 3, "Node": 4}
_HELD: Final = {"Run": 4, "Node": 5, "DeadLetter": 4}


def _cell(name: str, kind: str, steps: list[dict[str, Any]], passes: set[str], **fields: Any) -> Cell:
    tool = {"timeout": _LONG, "retry": _RETRY, **KINDS[kind], **fields.pop("tool", {})}
    fields.setdefault("activations", _PLAIN)
    return Cell(name, frozenset(passes), tool=tool, steps=steps, **fields)


def _outcome(kind: str, outcome: str) -> Cell:
    """What one kind of tool passes on its way through one outcome."""
    passes, activations = _WAYS[outcome, kind] if (outcome, kind) in _WAYS else _WAYS[outcome, "*"]
    timeout = {"timeout": _SHORT} if outcome == "hung" else {}
    return _cell(f"{kind}-{outcome}", kind, OUTCOMES[outcome], passes, tool=timeout, activations=activations)


_WAYS: Final[Mapping[tuple[str, str], tuple[set[str], Mapping[str, int]]]] = {
    ("success", "*"): (_SUCCEEDED, _PLAIN),
    ("limited", "*"): (_SUCCEEDED | _FAILED, _PLAIN),
    ("broken", "read"): (_SUCCEEDED | _FAILED, _PLAIN),
    # It has stored its 500 under the key: all that the repeated call gets is the same answer.
    ("broken", "key"): (_FAILED | _ANSWERED | _DECIDED, _HELD),
    ("broken", "key-asked"): (_FAILED | _ANSWERED | _TAKEN, _RECONCILED),
    ("broken", "asked"): (_FAILED | _ANSWERED | _TAKEN, _RECONCILED),
    ("broken", "blind"): (_FAILED | _ANSWERED | _DECIDED, _HELD),
    ("hung", "*"): (_SUCCEEDED | _FAILED | _RENEWED, _PLAIN),
    ("hung", "asked"): (_FAILED | _RENEWED | _TAKEN, _RECONCILED),
    ("hung", "blind"): (_FAILED | _RENEWED | _DECIDED, _HELD),
}

_LOST: Final = {"fault": "fin_after_read"}
_FORBIDDEN: Final = {"status": 403}

_CELLS: Final[list[Cell]] = [
    *(_outcome(kind, outcome) for kind in KINDS for outcome in OUTCOMES),
    _cell(
        "absent",
        "asked",
        [_LOST | {"commit": False}, {}],
        _SUCCEEDED | _FAILED | _ASKED | {"ledger.settle_absent"},
        tool={"timeout": "2s"},
        activations={"Run": 3, "Node": 5},
    ),
    _cell(
        "unusable",
        "asked",
        [{"status": 500, "commit": True}, {}],
        _FAILED | _ANSWERED | _ASKED | _DECIDED | {"ledger.confirm"},
        tool={"reconcile": {"output": "/nothing"}},
        activations={"Run": 4, "Node": 6, "DeadLetter": 4},
    ),
    _cell(
        "unanswered",
        "asked",
        [_LOST, {}],
        _FAILED | _ASKED | _DECIDED,
        asks=[{"status": 503}, {"status": 503}, {}],
        decision="reconcile",
        activations={"Run": 4, "Node": 6, "DeadLetter": 5},
    ),
    _cell("redriven", "blind", [_FORBIDDEN, {}], _SUCCEEDED | _FAILED | _DECIDED, activations=_HELD),
    _cell(
        "discarded",
        "blind",
        [_FORBIDDEN, {}],
        _FAILED | _ANSWERED | _DECIDED,
        decision="discard",
        # Nothing is checked before it, so that what comes of the first check may come together with it.
        activations={**_HELD, "DeadLetter": 3},
        ends="FAILED",
    ),
    _cell(
        "cancelled",
        "blind",
        [{"delay": 8}, {}],
        _SUCCEEDED | _RENEWED | _CANCELLED,
        cancelled=True,
        activations={"Run": 4, "Node": 3},
        ends="CANCELED",
    ),
    _cell(
        "cancelled-hung",
        "blind",
        [{"fault": "hang"}, {}],
        _FAILED | _RENEWED | _CANCELLED | _DECIDED,
        tool={"timeout": _SHORT},
        cancelled=True,
        activations={"Run": 4, "Node": 4, "DeadLetter": 3},
        ends="CANCELED",
    ),
    _cell(
        "cancelled-waiting",
        "blind",
        [{"delay": 8}, {}],
        _SUCCEEDED | _CANCELLED | _GATHERED | {"ledger.age"},
        tool={"concurrency": 1},
        nodes=2,
        cancelled=True,
        activations={"Run": 4, "Node": 3},
        ends="CANCELED",
    ),
]

_OF_THE_RUN: Final = {"ledger.claim", "ledger.succeed", "ledger.fail", *_RENEWED, *_CANCELLED, "activity.admit"}
_AT_ONCE: Final = {"activity.call_at_once", "wire.call_at_once.before-send", "wire.call_at_once.sent"}
_AT_ONCE_ANSWERED: Final = {"wire.call_at_once.headers", "wire.call_at_once.body"}
_CALLED_BY_ITS_NODE: Final = {"activity.call_tool", "wire.call_tool"}


def _fast(cell: Cell) -> Cell:
    """The same with the first attempt in the run itself: what comes after it is a node's workflow again."""
    first = cell.steps[0]
    passes = (cell.passes & _OF_THE_RUN) | _AT_ONCE
    if "fault" not in first and cell.passes >= _ANSWERED:
        passes |= _AT_ONCE_ANSWERED
    if first.get("fault") == "hang" or "delay" in first:
        # An activity takes up what takes longer.
        passes |= {"activity.call_tool"}
    if cell.name in _CALLED_AGAIN:
        passes |= _CALLED_BY_ITS_NODE
    return replace(
        cell,
        name=f"fast-{cell.name}",
        mode="fast",
        passes=passes,
        activations={"Run": 2 if cell.steps == OUTCOMES["success"] else 3},
    )


_CALLED_AGAIN: Final = {
    *(f"{kind}-limited" for kind in KINDS),
    *(f"{kind}-hung" for kind in ("read", "key", "key-asked")),
    "read-broken",
    "absent",
    "redriven",
}
"""The cells whose second call is answered as it should be."""

CELLS: Final = [*_CELLS, *map(_fast, _CELLS)]

SWEEP: Final = Way(
    "sweep",
    frozenset(
        {
            "activity.look_around",
            "activity.gather_orphan",
            "ledger.unsettled",
            "ledger.node",
            "ledger.operation",
            *(f"question.{signal}" for signal in QUESTIONS),
        }
    ),
    {"Sweep": 5},
)
"""A sweep that finds everything there is to find, most of it twice (`tests.faults.crash_sweeps`)."""

_W_co = TypeVar("_W_co", bound=Way, covariant=True)


@dataclass(frozen=True)
class Pair(Generic[_W_co]):
    """A cell that is killed at a point."""

    point: Point
    cell: _W_co

    def __str__(self) -> str:
        return f"{self.cell.name} at {self.point}"


def pairs() -> list[Pair[Cell]]:
    """The whole matrix of what is called."""
    return [Pair(point, cell) for point in POINTS.values() for cell in CELLS if cell.reaches(point)]


def sweeps() -> list[Pair[Way]]:
    """Every point of a sweep."""
    return [Pair(point, SWEEP) for point in POINTS.values() if SWEEP.reaches(point)]
