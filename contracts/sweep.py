"""What ``Sweep`` asks and answers: it looks for workflows whose run is gone, and for effects that nobody waits for."""

from typing import Final

from contracts.base import Model

__all__ = [
    "GONE",
    "MAX_NAMED",
    "Found",
    "Look",
    "NodeGone",
    "NodeRef",
    "RunExecution",
    "RunGone",
    "SweepResult",
]

GONE: Final = "redrive_gone"
"""The memo by which a node or a dead letter says that it knows that its run is gone: it is not asked again."""

MAX_NAMED: Final = 20
"""How many of what was found are named; all are counted."""


class RunExecution(Model):
    """One execution of a run, as Temporal names it, and the first of its chain of resets and continuations.

    No identity comes from these: they only tell one execution of a run from another.
    """

    first_run_id: str
    run_id: str


class RunGone(Model):
    """Asks a node to stop: its run is closed, and this was the last execution of it.

    None: the server has forgotten the run altogether.
    """

    execution: RunExecution | None


class NodeGone(Model):
    """Tells a run that an operator has ended one of its nodes."""

    node_id: str


class NodeRef(Model):
    """Names a node."""

    run_id: str
    node_id: str


class Found(Model):
    """How many were found, and which; the first of them, where they are many."""

    count: int = 0
    ids: list[str] = []

    @classmethod
    def of(cls, ids: list[str]) -> "Found":
        """All of them."""
        return cls(count=len(ids), ids=ids[:MAX_NAMED])


class SweepResult(Model):
    """What one sweep has found and done."""

    open_runs: int = 0
    open_nodes: int = 0
    open_dead_letters: int = 0
    described: int = 0
    """How often the server was asked about one workflow."""
    runs_gone: Found = Found()
    """Runs that are closed, and whose nodes or dead letters did not know yet."""
    nodes_stopped: Found = Found()
    """Nodes of such runs, asked to stop."""
    dead_letters_checked: Found = Found()
    """Dead letters of such runs, asked to check: without a possible effect, nobody needs to decide them."""
    dead_letters_missing: Found = Found()
    """Nodes that wait for a dead letter which an operator has ended: asked to open it again."""
    nodes_missing: Found = Found()
    """Nodes that an operator has ended: their runs were told."""
    woken: Found = Found()
    """Nodes and dead letters that the server had never begun."""
    dead_letters_opened: Found = Found()
    """Uncertain effects that nobody waited for: a person is told."""
    complete: bool = True
    """False where there was more than one sweep does; the next one goes on."""
    problem: str | None = None
    """Why the ledger could not be asked."""


class Look(Model):
    """What was found and done in Temporal, and the nodes whose uncertain effects nobody waits for."""

    result: SweepResult
    orphans: list[NodeRef]
