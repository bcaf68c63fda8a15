"""Which nodes of a run may start, and what becomes of the others. Pure; linear in nodes plus edges."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from graphlib import TopologicalSorter
from types import MappingProxyType
from typing import Final

from contracts.base import Json
from contracts.limits import INLINE
from contracts.runs import NodeSpec, NodeState, NodeStatus, OnDiscard, RunStatus, references, resolve

__all__ = ["Graph"]

_FAILED = (NodeStatus.DISCARDED, NodeStatus.SKIPPED, NodeStatus.CANCELLED)
_OPEN = (NodeStatus.RUNNING, NodeStatus.DEAD_LETTERED)
_SHARED: Final = 10


class Graph:
    """The nodes of a run, their states, and the outputs that somebody still needs."""

    def __init__(
        self,
        nodes: Sequence[NodeSpec],
        states: Mapping[str, NodeState] | None = None,
        outputs: Mapping[str, Json] | None = None,
        elsewhere: Collection[str] = (),
    ) -> None:
        """Takes a run up from its beginning, or from where another execution of it has left off.

        Args:
            nodes: The specification's.
            states: Of every node.
            outputs: Those that are still needed, and at hand.
            elsewhere: The nodes whose output is needed as well, and has to be fetched.
        """
        self._specs: Mapping[str, NodeSpec] = {node.id: node for node in nodes}
        self._upstream = {node.id: node.upstream() for node in nodes}
        self._needed_by = Counter(name for upstream in self._upstream.values() for name in upstream)
        self._sinks = {node.id: None for node in nodes if not self._needed_by[node.id]}
        self._sorter: TopologicalSorter[str] = TopologicalSorter(self._upstream)
        self._sorter.prepare()
        self._ready: dict[str, None] = {}
        self._outputs: dict[str, Json] = dict(outputs or {})
        self._elsewhere = dict.fromkeys(elsewhere)
        self._states = dict(states or {node.id: NodeState(status=NodeStatus.PENDING) for node in nodes})
        self._counts = Counter(state.status for state in self._states.values())
        self._blocked = {name: None for name, state in self._states.items() if state.status is NodeStatus.DEAD_LETTERED}
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
    def blocked(self) -> Collection[str]:
        """The nodes that wait for a person."""
        return self._blocked.keys()

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

    def upstream(self, name: str) -> Collection[str]:
        """The nodes that must have ended before a node."""
        return self._upstream[name]

    def state(self, name: str) -> NodeState:
        """The state of a node."""
        return self._states[name]

    @property
    def states(self) -> Mapping[str, NodeState]:
        """The state of each node, in the specification's order."""
        return self._states

    @property
    def running(self) -> int:
        """How many nodes are at work: neither waiting for others, nor for a person, nor ended."""
        return self._counts[NodeStatus.RUNNING]

    def open_nodes(self) -> list[str]:
        """The nodes that have not ended."""
        closed = (*_FAILED, NodeStatus.SUCCEEDED)
        return [name for name, state in self._states.items() if state.status not in closed]

    def has_begun(self, name: str) -> bool:
        """Whether there is such a node, and it has been started, and has not ended."""
        return name in self._states and self._states[name].status in _OPEN

    def begun_nodes(self) -> list[str]:
        """The nodes that have been started, and have not ended."""
        return [name for name, state in self._states.items() if state.status in _OPEN]

    def to_fetch(self, name: str) -> dict[str, list[str]]:
        """What a ready node's input needs of outputs that have to be fetched first: by node, the places in it."""
        pointers: dict[str, dict[str, None]] = {}
        if self._elsewhere:
            for reference in references(self._specs[name].input):
                if reference.node in self._elsewhere:
                    pointers.setdefault(reference.node, {})[reference.pointer] = None
        return {upstream: list(places) for upstream, places in pointers.items()}

    def is_shared(self, name: str) -> bool:
        """Whether so many still need a node's output that it is worth keeping as a whole."""
        return self._needed_by[name] >= _SHARED

    def sinks_to_fetch(self) -> list[str]:
        """The sinks that succeeded whose output has to be fetched."""
        return [name for name in self._sinks if name in self._elsewhere]

    def fetched(self, name: str, output: Json) -> None:
        """An output that had to be fetched is at hand."""
        # Two nodes that need the same one may both have asked for it.
        self._elsewhere.pop(name, None)
        self._outputs[name] = output

    @property
    def needed(self) -> Mapping[str, Json]:
        """The outputs at hand that somebody still needs."""
        return self._outputs

    @property
    def elsewhere(self) -> Collection[str]:
        """The nodes whose output is needed, too, and has to be fetched."""
        return self._elsewhere.keys()

    def input_of(
        self, name: str, largest: int = INLINE.input, places: Mapping[str, Mapping[str, Json]] = MappingProxyType({})
    ) -> Json:
        """A ready node's input with every reference resolved.

        Args:
            name: The node.
            largest: How many bytes it may have.
            places: By node and pointer, what it refers to in outputs that are elsewhere.

        Raises:
            MissingOutputError: an output does not hold what is referred to.
            InputTooLargeError: it would have more bytes than ``largest``.
        """
        discarded = [up for up in self._upstream[name] if self._states[up].status is NodeStatus.DISCARDED]
        return resolve(self._specs[name].input, self._outputs, discarded, largest, places)

    def start(self, name: str, state: NodeState) -> None:
        """A ready node is starting."""
        del self._ready[name]
        self.change(name, state)

    def change(self, name: str, state: NodeState) -> None:
        """A node has told how it is doing, or is done."""
        self._counts[self._states[name].status] -= 1
        self._counts[state.status] += 1
        self._states[name] = state
        if state.status is NodeStatus.DEAD_LETTERED:
            self._blocked[name] = None
        else:
            self._blocked.pop(name, None)

    def end(self, name: str, state: NodeState, output: Json = None) -> None:
        """A node has ended; those that waited for it become ready, or are skipped."""
        self._ready.pop(name, None)
        if state.status is NodeStatus.SUCCEEDED:
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
        """The outputs of the sinks that succeeded, as far as they are at hand."""
        succeeded = (name for name in self._sinks if self._states[name].status is NodeStatus.SUCCEEDED)
        return {name: self._outputs[name] for name in succeeded if name in self._outputs}

    def _close(self, name: str, state: NodeState) -> None:
        self.change(name, state)
        for done_with in (name, *self._upstream[name]):
            # The last one that needed an output lets go of it; a sink's is the run's result.
            if done_with != name:
                self._needed_by[done_with] -= 1
            if not self._needed_by[done_with] and done_with not in self._sinks:
                self._outputs.pop(done_with, None)
                self._elsewhere.pop(done_with, None)
        self._sorter.done(name)

    def _release(self) -> None:
        while names := self._sorter.get_ready():
            for name in names:
                if self._states[name].status in _OPEN:
                    # An earlier execution has started it; it will tell how it ends.
                    continue
                if self._states[name].status is not NodeStatus.PENDING:
                    self._close(name, self._states[name])
                elif all(self._passable(upstream) for upstream in self._upstream[name]):
                    self._ready[name] = None
                else:
                    self._close(name, NodeState(status=NodeStatus.SKIPPED))

    def _passable(self, name: str) -> bool:
        return self._states[name].status is NodeStatus.SUCCEEDED or self._excused(name)

    def _excused(self, name: str) -> bool:
        return self._states[name].status is NodeStatus.DISCARDED and self._specs[name].on_discard is OnDiscard.CONTINUE
