"""Where a run stands when it continues as new, compactly: a letter for each node of its specification."""

from collections.abc import Collection, Mapping
from typing import Final, Self

from contracts.base import Json, Model, UtcTime
from contracts.dispatch import ToolFacts
from contracts.identity import OperationId, dead_letter_workflow_id
from contracts.limits import Limits
from contracts.runs import NodeState, NodeStatus, Revocation

__all__ = ["RunProgress"]

_LETTERS: Final = {
    NodeStatus.PENDING: "P",
    NodeStatus.RUNNING: "R",
    NodeStatus.DEAD_LETTERED: "L",
    NodeStatus.SUCCEEDED: "S",
    NodeStatus.DISCARDED: "D",
    NodeStatus.SKIPPED: "K",
    NodeStatus.CANCELLED: "C",
}
_STATUSES: Final = {letter: status for status, letter in _LETTERS.items()}
_NEVER_STARTED: Final = frozenset((NodeStatus.PENDING, NodeStatus.SKIPPED))


class RunProgress(Model):
    """The second argument of a run that continues an earlier execution of itself; the first is its specification.

    Attributes:
        tools: As they were admitted.
        limits: The same.
        admitted_at: When, by Temporal's clock.
        letters: The status of each node, in the specification's order; in lower case where the node already knows that
            it has to tell how it ends.
        exceptions: Of nodes that are not at their first operation with at most one attempt: place, logical attempt,
            attempt count.
        dead_letters: The places of the nodes that have one.
        outputs: What nodes to come, or the run's result, still need, as far as there is room for it.
        elsewhere: The places of the nodes whose output is needed as well, and is in the ledger.
        revoked: The approvals that were revoked.
        reasons: Why nodes wait for a person, of as many as are named in the UI.
    """

    tools: dict[str, ToolFacts]
    limits: Limits
    admitted_at: UtcTime
    letters: str
    exceptions: list[tuple[int, int, int]] = []
    dead_letters: list[int] = []
    outputs: dict[str, Json] = {}
    elsewhere: list[int] = []
    revoked: list[Revocation] = []
    reasons: dict[str, str] = {}

    def with_nodes(self, states: Mapping[str, NodeState], told: Collection[str], elsewhere: Collection[str]) -> Self:
        """The same with the state of each node.

        Args:
            states: In the specification's order.
            told: The open nodes that know that they have to tell how they end.
            elsewhere: The nodes whose output is in the ledger.
        """
        letters: list[str] = []
        exceptions: list[tuple[int, int, int]] = []
        dead_letters: list[int] = []
        places: list[int] = []
        for place, (name, state) in enumerate(states.items()):
            letter = _LETTERS[state.status]
            letters.append(letter.lower() if name in told else letter)
            logical = OperationId.parse(state.operation_id).logical_attempt if state.operation_id else 0
            if (logical, state.attempt_count) != _usual(state.status):
                exceptions.append((place, logical, state.attempt_count))
            if state.dead_letter is not None:
                dead_letters.append(place)
            if name in elsewhere:
                places.append(place)
        update = {"exceptions": exceptions, "dead_letters": dead_letters, "elsewhere": places}
        return self.model_copy(update={"letters": "".join(letters), **update})

    def states(self, run_id: str, names: Collection[str]) -> dict[str, NodeState]:
        """The state of each node; ``names`` in the specification's order."""
        exceptions = {place: (logical, attempts) for place, logical, attempts in self.exceptions}
        dead_letters = set(self.dead_letters)
        states: dict[str, NodeState] = {}
        for place, (name, letter) in enumerate(zip(names, self.letters, strict=True)):
            status = _STATUSES[letter.upper()]
            logical, attempts = exceptions.get(place, _usual(status))
            operation = OperationId(run_id=run_id, node_id=name, logical_attempt=logical) if logical else None
            states[name] = NodeState(
                status=status,
                operation_id=str(operation) if operation is not None else None,
                attempt_count=attempts,
                dead_letter=dead_letter_workflow_id(run_id, name) if place in dead_letters else None,
            )
        return states

    def told(self, names: Collection[str]) -> set[str]:
        """The open nodes that know that they have to tell how they end."""
        return {name for name, letter in zip(names, self.letters, strict=True) if letter.islower()}

    def named(self, names: Collection[str], places: Collection[int]) -> list[str]:
        """The nodes at these places."""
        wanted = set(places)
        return [name for place, name in enumerate(names) if place in wanted]


def _usual(status: NodeStatus) -> tuple[int, int]:
    """The logical attempt and the attempt count of most nodes in a status."""
    if status in _NEVER_STARTED:
        return 0, 0
    return 1, 1 if status is NodeStatus.SUCCEEDED else 0
