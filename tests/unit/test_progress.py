"""What a run carries along when it continues as new."""

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from contracts.identity import OperationId, dead_letter_workflow_id
from contracts.limits import INLINE
from contracts.progress import RunProgress
from contracts.runs import NodeState, NodeStatus

RUN = "order-1042"
OPEN = (NodeStatus.RUNNING, NodeStatus.DEAD_LETTERED)
NOTHING = RunProgress(tools={}, limits=INLINE, admitted_at=datetime.now(UTC), letters="")


@st.composite
def nodes(draw: st.DrawFn) -> dict[str, NodeState]:
    states: dict[str, NodeState] = {}
    for place, status in enumerate(draw(st.lists(st.sampled_from(NodeStatus), max_size=30))):
        name = f"n{place}"
        logical = 0 if status in (NodeStatus.PENDING, NodeStatus.SKIPPED) else draw(st.integers(0, 3))
        operation = OperationId(run_id=RUN, node_id=name, logical_attempt=logical) if logical else None
        letter = dead_letter_workflow_id(RUN, name) if draw(st.booleans()) else None
        states[name] = NodeState(
            status=status,
            operation_id=str(operation) if operation else None,
            attempt_count=draw(st.integers(0, 3)),
            dead_letter=letter,
        )
    return states


@given(nodes())
def test_every_node_is_as_it_was(states: dict[str, NodeState]) -> None:
    told = {name for place, (name, state) in enumerate(states.items()) if state.status in OPEN and place % 2}
    elsewhere = {name for place, name in enumerate(states) if place % 3 == 0}
    carried = RunProgress.model_validate_json(NOTHING.with_nodes(states, told, elsewhere).model_dump_json())
    names = list(states)
    assert carried.states(RUN, names) == states
    assert carried.told(names) == told
    assert set(carried.named(names, carried.elsewhere)) == elsewhere


def test_ten_thousand_nodes_are_carried_in_as_many_bytes() -> None:
    done = {
        f"n{place}": NodeState(status=NodeStatus.SUCCEEDED, operation_id=f"{RUN}/n{place}/1", attempt_count=1)
        for place in range(10_000)
    }
    assert len(NOTHING.with_nodes(done, set(), set()).model_dump_json()) < 10_500
