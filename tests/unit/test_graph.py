"""Which nodes of a run may start, what becomes of the others, and what is kept for whom."""

import random
import time
from typing import Any

import pytest

from contracts.base import Json
from contracts.runs import MissingOutputError, NodeSpec, NodeState, NodeStatus, OnDiscard, RunStatus
from workflows.graph import Graph

DIAMOND = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}


def spec(name: str, after: list[str], **fields: Any) -> NodeSpec:
    return NodeSpec(id=name, tool="t", after=after, **fields)


def graph(edges: dict[str, list[str]], *continuing: str) -> Graph:
    """Nodes and what each waits for; the continuing ones are not missed when they are discarded."""
    return Graph(
        [
            spec(name, after, on_discard=OnDiscard.CONTINUE if name in continuing else OnDiscard.FAIL)
            for name, after in edges.items()
        ]
    )


def ready(graph: Graph) -> list[str]:
    """Starts every node that may start."""
    started = []
    while (name := graph.next_ready()) is not None:
        graph.start(name, NodeState(status=NodeStatus.RUNNING))
        started.append(name)
    return started


def end(graph: Graph, *names: str, status: NodeStatus = NodeStatus.SUCCEEDED, output: Json = None) -> None:
    for name in names:
        graph.end(name, NodeState(status=status), output)


def stands(graph: Graph) -> tuple[str, list[str]]:
    """The run's status, and who waits for a person."""
    return graph.status.value, list(graph.blocked)


def statuses(graph: Graph) -> dict[str, str]:
    return {name: state.status.value for name, state in graph.states.items()}


# What may start.


def test_a_node_starts_when_all_that_it_waits_for_have_succeeded() -> None:
    run = graph(DIAMOND)
    assert ready(run) == ["a"]
    end(run, "a")
    assert ready(run) == ["b", "c"]
    end(run, "c")
    assert ready(run) == []
    assert run.open_nodes() == ["b", "d"]
    end(run, "b")
    assert ready(run) == ["d"]
    end(run, "d")
    assert run.finished
    assert not run.failed
    assert run.counts == {NodeStatus.SUCCEEDED: 4}


def test_nodes_that_may_start_come_in_the_order_of_the_specification() -> None:
    assert ready(graph({name: [] for name in "zyxabc"})) == list("zyxabc")


def test_a_node_that_refers_to_an_output_waits_for_it() -> None:
    run = Graph([spec("b", [], input={"x": {"$output": "a"}}), spec("a", [])])
    assert ready(run) == ["a"]


def test_a_node_that_waits_twice_for_the_same_waits_once() -> None:
    run = Graph([spec("a", []), spec("b", ["a", "a"], input=[{"$output": "a"}, {"$output": "a"}])])
    assert ready(run) == ["a"]
    end(run, "a", output=1)
    assert ready(run) == ["b"]
    assert run.input_of("b") == [1, 1]


def test_a_run_without_nodes_is_over() -> None:
    assert Graph([]).finished


# What is not to be.


@pytest.mark.parametrize("status", [NodeStatus.DISCARDED, NodeStatus.CANCELLED])
def test_what_depends_on_a_node_without_a_result_is_skipped_and_the_rest_goes_on(status: NodeStatus) -> None:
    run = graph({"a": [], "b": ["a"], "c": ["b"], "x": [], "y": ["x"], "z": ["y", "a"]})
    assert ready(run) == ["a", "x"]
    end(run, "a", status=status)
    assert statuses(run)["b"] == statuses(run)["c"] == "SKIPPED"
    assert statuses(run)["z"] == "PENDING"
    end(run, "x")
    assert ready(run) == ["y"]
    end(run, "y")
    assert run.finished
    assert run.failed
    assert run.not_succeeded == ["a", "b", "c", "z"]
    assert run.counts == {NodeStatus.SUCCEEDED: 2, NodeStatus.SKIPPED: 3, status: 1}


def test_a_skipped_node_ends_a_run_whose_other_nodes_were_over() -> None:
    run = graph({"a": [], "b": ["a"], "c": []})
    ready(run)
    end(run, "c")
    end(run, "a", status=NodeStatus.DISCARDED)
    assert run.finished


def test_what_depends_on_a_node_that_is_not_missed_runs_all_the_same() -> None:
    run = graph({"a": [], "b": ["a"]}, "a")
    ready(run)
    end(run, "a", status=NodeStatus.DISCARDED)
    assert ready(run) == ["b"]
    end(run, "b")
    assert not run.failed
    assert run.not_succeeded == ["a"]


def test_a_node_that_is_not_missed_when_discarded_is_missed_when_cancelled_or_skipped() -> None:
    run = graph({"a": [], "b": ["a"], "c": ["b"]}, "a", "b")
    ready(run)
    end(run, "a", status=NodeStatus.CANCELLED)
    assert statuses(run) == {"a": "CANCELLED", "b": "SKIPPED", "c": "SKIPPED"}
    assert run.failed


def test_one_upstream_too_few_is_enough_to_be_skipped() -> None:
    run = graph(DIAMOND, "b")
    ready(run)
    end(run, "a")
    ready(run)
    end(run, "b", status=NodeStatus.DISCARDED)
    end(run, "c", status=NodeStatus.DISCARDED)
    assert statuses(run)["d"] == "SKIPPED"


# Where the run stands.


def test_a_run_is_blocked_when_nothing_can_proceed_before_a_decision() -> None:
    run = graph({"a": [], "b": [], "c": ["a"]})
    assert stands(run) == ("RUNNING", [])
    ready(run)
    run.change("a", NodeState(status=NodeStatus.DEAD_LETTERED, dead_letter="r/a/dead-letter"))
    assert stands(run) == ("RUNNING", ["a"])
    run.change("b", NodeState(status=NodeStatus.DEAD_LETTERED))
    assert stands(run) == ("BLOCKED", ["a", "b"])
    run.change("b", NodeState(status=NodeStatus.RUNNING))
    assert stands(run) == ("RUNNING", ["a"])
    end(run, "b")
    assert stands(run) == ("BLOCKED", ["a"])
    assert run.counts == {NodeStatus.PENDING: 1, NodeStatus.DEAD_LETTERED: 1, NodeStatus.SUCCEEDED: 1}
    assert run.open_nodes() == ["a", "c"]


def test_a_run_with_a_node_that_could_start_is_not_blocked() -> None:
    run = graph({"a": [], "b": []})
    run.start("a", NodeState(status=NodeStatus.RUNNING))
    run.change("a", NodeState(status=NodeStatus.DEAD_LETTERED))
    assert run.status is RunStatus.RUNNING


# Outputs.


def test_an_input_is_filled_with_the_outputs_it_refers_to() -> None:
    run = Graph(
        [
            spec("a", []),
            spec("b", [], on_discard=OnDiscard.CONTINUE),
            spec("c", [], input={"id": {"$output": "a", "pointer": "/id"}, "b": [{"$output": "b", "pointer": "/x"}]}),
        ]
    )
    ready(run)
    end(run, "a", output={"id": "r-1"})
    end(run, "b", status=NodeStatus.DISCARDED)
    assert ready(run) == ["c"]
    assert run.input_of("c") == {"id": "r-1", "b": [None]}


def test_an_output_without_what_is_referred_to_is_missing() -> None:
    run = Graph([spec("a", []), spec("b", [], input={"$output": "a", "pointer": "/id"})])
    ready(run)
    end(run, "a", output={})
    with pytest.raises(MissingOutputError):
        run.input_of("b")


def test_a_runs_outputs_are_those_of_the_nodes_nothing_depends_on() -> None:
    run = graph({"a": [], "b": ["a"], "c": ["a"], "lonely": [], "lost": []})
    ready(run)
    end(run, "a", output=1)
    ready(run)
    end(run, "b", output=2)
    end(run, "c", output=None)
    end(run, "lonely", output=4)
    end(run, "lost", status=NodeStatus.DISCARDED)
    assert run.outputs() == {"b": 2, "c": None, "lonely": 4}


class Noticed(dict[str, int]):
    """An output that can be watched."""

    alive = 0

    def __init__(self) -> None:
        super().__init__(x=1)
        Noticed.alive += 1

    def __del__(self) -> None:
        Noticed.alive -= 1


def watched(name: str, run: Graph, **changes: Any) -> None:
    end(run, name, output=Noticed(), **changes)  # type: ignore[arg-type]  # a dict all the same


def test_an_output_is_let_go_when_the_last_that_needed_it_has_ended() -> None:
    run = graph(DIAMOND)
    ready(run)
    watched("a", run)
    ready(run)
    watched("b", run)
    assert Noticed.alive == 2
    watched("c", run)
    # Both that needed a's have ended.
    assert Noticed.alive == 2
    ready(run)
    watched("d", run)
    # Only the sink's is kept: it is the run's result.
    assert Noticed.alive == 1
    assert list(run.outputs()) == ["d"]


def test_an_output_that_only_skipped_nodes_needed_is_let_go() -> None:
    run = graph({"a": [], "b": [], "c": ["a", "b"], "d": ["c"]})
    ready(run)
    watched("a", run)
    watched("b", run, status=NodeStatus.DISCARDED)
    assert run.finished
    assert Noticed.alive == 0


# Size.


def test_a_chain_of_five_thousand_runs_link_by_link() -> None:
    names = [f"n{number}" for number in range(5000)]
    run = graph({name: names[number - 1 : number] if number else [] for number, name in enumerate(names)})
    for name in names:
        assert ready(run) == [name]
        end(run, name)
    assert run.finished


def test_a_chain_of_five_thousand_is_skipped_at_once() -> None:
    names = [f"n{number}" for number in range(5000)]
    run = graph({name: names[number - 1 : number] if number else [] for number, name in enumerate(names)})
    ready(run)
    end(run, names[0], status=NodeStatus.DISCARDED)
    assert run.finished
    assert run.counts == {NodeStatus.DISCARDED: 1, NodeStatus.SKIPPED: 4999}


def test_fifty_thousand_edges_are_no_burden() -> None:
    dice = random.Random(1)
    began = time.process_time()
    run = graph({f"n{n}": [f"n{dice.randrange(n)}" for _ in range(10)] if n else [] for n in range(5000)})
    ended = 0
    while names := ready(run):
        dice.shuffle(names)
        end(run, *names)
        ended += len(names)
        assert run.status is RunStatus.RUNNING
    assert ended == 5000
    assert run.finished
    assert run.counts == {NodeStatus.SUCCEEDED: 5000}
    # Far above what linear work takes, far below what quadratic work would take.
    assert time.process_time() - began < 10


def test_five_thousand_nodes_at_once_are_started_in_order_and_quickly() -> None:
    began = time.process_time()
    run = graph({f"n{number}": [] for number in range(5000)} | {"last": [f"n{number}" for number in range(5000)]})
    assert ready(run) == [f"n{number}" for number in range(5000)]
    end(run, *(f"n{number}" for number in range(5000)))
    assert ready(run) == ["last"]
    assert time.process_time() - began < 10


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_every_node_ends_and_none_before_its_upstreams(seed: int) -> None:
    dice = random.Random(seed)
    edges = {
        f"n{number}": [f"n{dice.randrange(number)}" for _ in range(dice.randrange(4))] if number else []
        for number in range(40)
    }
    continuing = [name for name in edges if dice.random() < 0.5]
    run = graph(edges, *continuing)
    running: list[str] = []
    while not run.finished:
        running += ready(run)
        name = running.pop(dice.randrange(len(running)))
        for upstream in edges[name]:
            state = run.state(upstream).status
            assert state is NodeStatus.SUCCEEDED or (state is NodeStatus.DISCARDED and upstream in continuing)
        end(run, name, status=dice.choice([NodeStatus.SUCCEEDED] * 3 + [NodeStatus.DISCARDED]))
    assert running == []
    assert run.open_nodes() == []
    assert sum(run.counts.values()) == 40
    skipped = [name for name, status in statuses(run).items() if status == "SKIPPED"]
    for name in skipped:
        bad = [up for up in edges[name] if statuses(run)[up] != "SUCCEEDED" and up not in continuing]
        assert bad or any(statuses(run)[up] == "SKIPPED" for up in edges[name])
    missed = [name for name, status in statuses(run).items() if status == "DISCARDED" and name not in continuing]
    assert run.failed == bool(missed or skipped)


# Taking a run up again.


def test_a_graph_goes_on_from_any_point_as_if_it_had_never_stopped() -> None:
    drawn = random.Random(7)
    for _ in range(200):
        names = [f"n{number}" for number in range(12)]
        edges = {name: drawn.sample(names[:place], min(place, drawn.randrange(3))) for place, name in enumerate(names)}
        run = graph(edges, *drawn.sample(names, 6))
        order: list[str] = []
        while not run.finished:
            ready(run)
            order.append(drawn.choice(run.begun_nodes()))
            status = NodeStatus.SUCCEEDED if drawn.random() < 0.8 else NodeStatus.DISCARDED
            end(run, order[-1], status=status, output=order[-1])
            if drawn.random() < 0.5:
                specs = [run.spec(name) for name in names]
                run = Graph(specs, run.states, run.needed)
        assert set(order) == {name for name, status in statuses(run).items() if status != "SKIPPED"}
        whole = graph(edges, *[name for name in names if run.spec(name).on_discard is OnDiscard.CONTINUE])
        for name in order:
            ready(whole)
            end(whole, name, status=run.state(name).status, output=name)
        assert (statuses(whole), whole.outputs(), whole.failed) == (statuses(run), run.outputs(), run.failed)


def test_an_output_that_is_elsewhere_is_asked_for_by_whoever_refers_to_it_and_dropped_after_the_last() -> None:
    done = NodeState(status=NodeStatus.SUCCEEDED)
    specs = [
        spec("a", []),
        NodeSpec(id="b", tool="t", input={"of": {"$output": "a"}, "x": {"$output": "a", "pointer": "/x"}}),
        spec("c", ["a"]),
        spec("sink", []),
    ]
    pending = NodeState(status=NodeStatus.PENDING)
    run = Graph(specs, {"a": done, "b": pending, "c": pending, "sink": done}, {}, ["a", "sink"])
    assert (run.to_fetch("b"), run.to_fetch("c"), run.sinks_to_fetch()) == ({"a": ["", "/x"]}, {}, ["sink"])
    assert run.input_of("b", places={"a": {"": 1, "/x": 2}}) == {"of": 1, "x": 2}
    run.fetched("a", {"x": 2})
    assert run.input_of("b") == {"of": {"x": 2}, "x": 2}
    assert ready(run) == ["b", "c"]
    end(run, "b", "c")
    assert (dict(run.needed), list(run.elsewhere)) == ({"b": None, "c": None}, ["sink"])
    run.fetched("sink", 2)
    assert run.outputs() == {"b": None, "c": None, "sink": 2}
