"""Which nodes of a run may start, and what becomes of the others. Pure; linear in nodes plus edges."""

from collections import Counter
from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter

from contracts.base import Json
from contracts.runs import NodeSpec, NodeState, NodeStatus, OnDiscard, RunState, RunStatus, resolve

__all__ = ["Graph"]

_FAILED = (NodeStatus.DISCARDED, NodeStatus.SKIPPED, NodeStatus.CANCELLED)


class Graph:
    """The nodes of a run, their states, and the outputs that somebody still needs."""

    def __init__(self, nodes: Sequence[NodeSpec]) -> None:
        self._specs: Mapping[str, NodeSpec] = {node.id: node for node in nodes}
        self._upstream = {node.id: node.upstream() for node in nodes}
        self._needed_by = Counter(name for upstream in self._upstream.values() for name in upstream)
        self._sinks = {node.id: None for node in nodes if not self._needed_by[node.id]}
        self._sorter: TopologicalSorter[str] = TopologicalSorter(self._upstream)
        self._sorter.prepare()
        self._ready: dict[str, None] = {}
        self._outputs: dict[str, Json] = {}
        self._states = {node.id: NodeState(status=NodeStatus.PENDING) for node in nodes}
        self._counts: Counter[NodeStatus] = Counter({NodeStatus.PENDING: len(nodes)})
        self._release()

    @property
    def not_succeeded(self) -> list[str]:
        """The nodes that failed, were skipped or were cancelled."""
        return [name for name, state in self._states.items() if state.status in _FAILED]

    def next_ready(self) -> str | None:
        """The node that may start next, or None; `start` takes it off."""
        return next(iter(self._ready), None)

    @property
    def finished(self) -> bool:
        """Whether every node has ended."""
        return not self._sorter.is_active()

    @property
    def blocked(self) -> list[str]:
        """The nodes that wait for a person."""
        if not self._counts[NodeStatus.DEAD_LETTERED]:
            return []
        return [name for name, state in self._states.items() if state.status is NodeStatus.DEAD_LETTERED]

    @property
    def counts(self) -> dict[NodeStatus, int]:
        """How many nodes are in each state; a state without any is left out."""
        return {status: self._counts[status] for status in NodeStatus if self._counts[status]}

    @property
    def failed(self) -> bool:
        """Whether a node failed that the run cannot do without."""
        return any(state.status in _FAILED and not self._excused(name) for name, state in self._states.items())

    @property
    def status(self) -> RunStatus:
        """The run's, as long as it is not over."""
        stuck = not self._ready and not self._counts[NodeStatus.RUNNING] and self._counts[NodeStatus.DEAD_LETTERED]
        return RunStatus.BLOCKED if stuck else RunStatus.RUNNING

    def spec(self, name: str) -> NodeSpec:
        """The specification of a node."""
        return self._specs[name]

    def __len__(self) -> int:
        return len(self._specs)

    def state(self, name: str) -> NodeState:
        """The state of a node."""
        return self._states[name]

    def states(self, run_id: str, status: RunStatus) -> RunState:
        """The answer of the ``status`` query."""
        return RunState(run_id=run_id, status=status, counts=self.counts, nodes=self._states, blocked=self.blocked)

    def open_nodes(self) -> list[str]:
        """The nodes that have not ended."""
        closed = (*_FAILED, NodeStatus.SUCCEEDED)
        return [name for name, state in self._states.items() if state.status not in closed]

    def input_of(self, name: str) -> Json:
        """A ready node's input with every reference resolved.

        Raises:
            MissingOutputError: an output does not hold what is referred to.
        """
        discarded = [up for up in self._upstream[name] if self._states[up].status is NodeStatus.DISCARDED]
        return resolve(self._specs[name].input, self._outputs, discarded)

    def start(self, name: str, state: NodeState) -> None:
        """A ready node is starting."""
        del self._ready[name]
        self.change(name, state)

    def change(self, name: str, state: NodeState) -> None:
        """A node has told how it is doing, or is done."""
        self._counts[self._states[name].status] -= 1
        self._counts[state.status] += 1
        self._states[name] = state

    def end(self, name: str, state: NodeState, output: Json = None) -> None:
        """A node has ended; those that waited for it become ready, or are skipped."""
        self._ready.pop(name, None)
        self._outputs[name] = output
        self._close(name, state)
        self._release()

    def give_up(self, status: NodeStatus) -> None:
        """Nothing more is started: every node that has not begun ends in that status."""
        self._ready.clear()
        for name, state in self._states.items():
            if state.status is NodeStatus.PENDING:
                self.change(name, NodeState(status=status))

    def outputs(self) -> dict[str, Json]:
        """The outputs of the sinks that succeeded."""
        return {name: self._outputs[name] for name in self._sinks if self._states[name].status is NodeStatus.SUCCEEDED}

    def _close(self, name: str, state: NodeState) -> None:
        self.change(name, state)
        for done_with in (name, *self._upstream[name]):
            # The last one that needed an output lets go of it; a sink's is the run's result.
            if done_with != name:
                self._needed_by[done_with] -= 1
            if not self._needed_by[done_with] and done_with not in self._sinks:
                self._outputs.pop(done_with, None)
        self._sorter.done(name)

    def _release(self) -> None:
        while names := self._sorter.get_ready():
            for name in names:
                if self._states[name].status is not NodeStatus.PENDING:
                    self._sorter.done(name)
                elif all(self._passable(upstream) for upstream in self._upstream[name]):
                    self._ready[name] = None
                else:
                    self._close(name, NodeState(status=NodeStatus.SKIPPED))

    def _passable(self, name: str) -> bool:
        return self._states[name].status is NodeStatus.SUCCEEDED or self._excused(name)

    def _excused(self, name: str) -> bool:
        return self._states[name].status is NodeStatus.DISCARDED and self._specs[name].on_discard is OnDiscard.CONTINUE
