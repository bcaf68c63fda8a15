"""A run's specification: any JSON whatever is read or refused, and every problem is named with its place."""

import itertools
import json
import re
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from contracts.base import Json
from contracts.canonical import MAX_DEPTH, content_hash
from contracts.limits import INLINE
from contracts.runs import (
    ApprovalGrant,
    InvalidRunError,
    MissingOutputError,
    NodeSpec,
    OnDiscard,
    RunSpec,
    parse_run,
    references,
    resolve,
)
from tests.unit.json_values import any_json, nested

CONTRACT: dict[str, Any] = json.loads("""
{
  "nodes": [
    {"id": "reserve", "tool": "inventory.reserve", "input": {"sku": "A-1", "quantity": 2}},
    {"id": "charge", "tool": "payments.charge",
     "input": {"amount": 1999, "reservation": {"$output": "reserve", "pointer": "/id"}},
     "approval": {"id": "apr-7", "granted_by": "alice", "expires_at": "2027-01-01T00:00:00Z"}},
    {"id": "mail", "tool": "mail.send", "after": ["charge"], "input": {"to": "a@example.com"},
     "on_discard": "continue", "deadline_seconds": 3600}
  ],
  "max_parallel": 100,
  "node_mode": "workflow",
  "correlation_id": "req-77",
  "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
}
""")

FIELDS = (
    *("nodes", "id", "tool", "input", "after", "approval", "on_discard", "deadline_seconds", "$output", "pointer"),
    *("max_parallel", "node_mode", "correlation_id", "traceparent", "granted_by", "expires_at", "a", "fast", "/a"),
)


def node(node_id: str = "a", **fields: Any) -> dict[str, Any]:
    return {"id": node_id, "tool": "t"} | fields


def parse(*nodes: Any, **fields: Any) -> RunSpec:
    return parse_run("order-1042", [{"nodes": list(nodes)} | fields])


def problems(*nodes: Any, **fields: Any) -> list[str]:
    with pytest.raises(InvalidRunError) as caught:
        parse(*nodes, **fields)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


# What is read.


def test_the_contracts_example_is_read() -> None:
    spec = parse_run("order-1042", [CONTRACT])
    reserve, charge, mail = spec.nodes
    assert (spec.max_parallel, spec.node_mode, spec.correlation_id) == (100, "workflow", "req-77")
    assert reserve.upstream() == []
    assert charge.upstream() == ["reserve"]
    assert charge.approval == ApprovalGrant(id="apr-7", granted_by="alice", expires_at=datetime(2027, 1, 1, tzinfo=UTC))
    assert mail.upstream() == ["charge"]
    assert (mail.on_discard, mail.deadline) == (OnDiscard.CONTINUE, timedelta(hours=1))


def test_what_is_left_out_has_its_default() -> None:
    spec = parse(node())
    (only,) = spec.nodes
    assert (spec.max_parallel, spec.node_mode, spec.correlation_id, spec.traceparent) == (100, "workflow", None, None)
    assert (only.input, only.after, only.approval, only.on_discard) == ({}, [], None, OnDiscard.FAIL)
    assert only.deadline == timedelta(days=7)


def test_an_input_may_be_any_json() -> None:
    for value in (None, 0, False, "", [], "x", [1, {"a": None}], 1.5, 10**30):
        assert parse(node(input=value)).nodes[0].input == value


def test_an_approval_is_over_at_its_very_moment() -> None:
    grant = ApprovalGrant(id="a", granted_by="b", expires_at=datetime(2027, 1, 1, tzinfo=UTC))
    assert not grant.expired(datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC))
    assert grant.expired(datetime(2027, 1, 1, tzinfo=UTC))
    assert not ApprovalGrant(id="a", granted_by="b").expired(datetime.max.replace(tzinfo=UTC))


# Any JSON.


@given(any_json(*FIELDS))
@example({"nodes": [node(input=float("inf"))]})
@example({"nodes": [node(input=float("nan"))]})
@example({"nodes": [node(input="\ud800")]})
@example({"nodes": [node(input={"\udfff": 1})]})
@example({"\ud800": 1})
@example({"nodes": [node(input=10**5000)]})
@example({"nodes": [node(input=nested(MAX_DEPTH))]})
def test_any_json_is_read_or_refused_and_what_is_read_can_travel(value: Json) -> None:
    spec = read(value)
    if isinstance(spec, RunSpec):
        assert RunSpec.model_validate_json(spec.model_dump_json()) == spec
        assert all(content_hash(only.input) for only in spec.nodes)
    else:
        assert spec
        assert all(problem.encode() for problem in spec)


def read(value: Json) -> RunSpec | list[str]:
    try:
        return parse_run("order-1042", [value])
    except InvalidRunError as error:
        return error.problems


SHAPED = st.fixed_dictionaries(
    {
        "nodes": st.lists(
            st.fixed_dictionaries(
                {"id": st.sampled_from("abc") | any_json(max_leaves=3), "tool": st.just("t") | any_json(max_leaves=3)},
                optional={
                    "input": any_json("$output", "pointer", "a", "/a", max_leaves=8),
                    "after": st.lists(st.sampled_from("abcd")) | any_json(max_leaves=3),
                    "approval": any_json("id", "granted_by", "expires_at", "2027-01-01T00:00:00Z", max_leaves=4),
                    "on_discard": st.sampled_from(["fail", "continue"]) | any_json(max_leaves=2),
                    "deadline_seconds": any_json(max_leaves=1),
                },
            ),
            max_size=5,
        ),
    },
    optional={
        "max_parallel": any_json(max_leaves=1),
        "node_mode": st.sampled_from(["fast", "workflow"]),
        "correlation_id": any_json(max_leaves=1),
        "traceparent": any_json(max_leaves=1),
    },
)


@given(SHAPED)
def test_almost_a_run_is_read_or_refused_and_what_is_read_holds_together(value: dict[str, Any]) -> None:
    spec = read(value)
    if not isinstance(spec, RunSpec):
        assert spec
        return
    ids = [only.id for only in spec.nodes]
    assert len(set(ids)) == len(ids)
    done: set[str] = set()
    for _ in ids:
        done |= {only.id for only in spec.nodes if done.issuperset(only.upstream())}
    assert done == set(ids)


@pytest.mark.parametrize("value", [nested(100_000), {"nodes": [node(input=nested(100_000))]}], ids=["all", "input"])
def test_bottomless_nesting_is_refused(value: Json) -> None:
    with pytest.raises(InvalidRunError, match=r"nested deeper than 100 levels|not an array"):
        parse_run("order-1042", [value])


@pytest.mark.parametrize("sent", [[], [CONTRACT, CONTRACT], [CONTRACT, None]])
def test_a_run_takes_one_argument(sent: list[Json]) -> None:
    with pytest.raises(InvalidRunError, match=f"takes one argument, its specification; {len(sent)} were sent"):
        parse_run("order-1042", sent)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (None, "null"),
        ([], "an array"),
        ("nodes", "a string"),
        (5, "a number"),
        (1.5, "a number"),
        (True, "a boolean"),
    ],
)
def test_a_specification_is_an_object(value: Json, what: str) -> None:
    with pytest.raises(InvalidRunError, match=f"the specification is a JSON object, not {what}"):
        parse_run("order-1042", [value])


@pytest.mark.parametrize("run_id", ["", "a/b", "a\nb", "x" * 201])
def test_a_bad_run_id_is_a_problem_among_the_others(run_id: str) -> None:
    with pytest.raises(InvalidRunError) as caught:
        parse_run(run_id, [{"nodes": [node(tool="")]}])
    first, second = caught.value.problems
    assert first.startswith("workflow id: a run id")
    assert second.startswith("nodes[0].tool: ")


# Problems and their places.

MISTAKES: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["nodes: required, but missing"]),
    ({"nodes": []}, ["nodes: "]),
    ({"nodes": {}}, ["nodes: "]),
    ({"nodes": None}, ["nodes: "]),
    ({"nodes": ["a"]}, ["nodes[0]: "]),
    ({"nodes": [{}]}, ["nodes[0].id: required, but missing", "nodes[0].tool: required, but missing"]),
    ({"nodes": [node(id=5)]}, ["nodes[0].id: "]),
    ({"nodes": [node("a b")]}, ["nodes[0].id: a node id is"]),
    ({"nodes": [node("a/b")]}, ["nodes[0].id: a node id is"]),
    ({"nodes": [node(tool="a/b")]}, ["nodes[0].tool: a tool name is"]),
    ({"nodes": [node(), node()]}, ["nodes[1].id: 'a' is already the id of nodes[0]"]),
    ({"nodes": [node(colour="blue")]}, ["nodes[0].colour: unknown field"]),
    ({"nodes": [node(on_discard="skip")]}, ["nodes[0].on_discard: "]),
    ({"nodes": [node(after="a")]}, ["nodes[0].after: "]),
    ({"nodes": [node(after=[5])]}, ["nodes[0].after[0]: "]),
    ({"nodes": [node(after=["b"])]}, ["nodes[0].after[0]: there is no node 'b'"]),
    ({"nodes": [node(), node("b", after=["a", "c"])]}, ["nodes[1].after[1]: there is no node 'c'"]),
    ({"nodes": [node(deadline_seconds=0)]}, ["nodes[0].deadline_seconds: "]),
    ({"nodes": [node(deadline_seconds=-1)]}, ["nodes[0].deadline_seconds: "]),
    ({"nodes": [node(deadline_seconds=1e300)]}, ["nodes[0].deadline_seconds: "]),
    ({"nodes": [node(deadline_seconds="60")]}, ["nodes[0].deadline_seconds: "]),
    ({"nodes": [node(deadline_seconds=True)]}, ["nodes[0].deadline_seconds: "]),
    ({"nodes": [node(approval="alice")]}, ["nodes[0].approval: "]),
    (
        {"nodes": [node(approval={})]},
        ["nodes[0].approval.granted_by: required, but missing", "nodes[0].approval.id: required, but missing"],
    ),
    ({"nodes": [node(approval={"id": "a", "granted_by": ""})]}, ["nodes[0].approval.granted_by: "]),
    *(
        (
            {"nodes": [node(approval={"id": "a", "granted_by": "b", "expires_at": when})]},
            ["nodes[0].approval.expires_at: "],
        )
        for when in ("2027-01-01T00:00:00", "2027-01-01", "soon", 1893456000, "1893456000", True)
    ),
    ({"nodes": [node()], "max_parallel": 0}, ["max_parallel: "]),
    ({"nodes": [node()], "max_parallel": 1001}, ["max_parallel: "]),
    ({"nodes": [node()], "max_parallel": 1.5}, ["max_parallel: "]),
    ({"nodes": [node()], "max_parallel": "5"}, ["max_parallel: "]),
    ({"nodes": [node()], "max_parallel": True}, ["max_parallel: "]),
    ({"nodes": [node()], "node_mode": "slow"}, ["node_mode: "]),
    ({"nodes": [node()], "correlation_id": ""}, ["correlation_id: "]),
    ({"nodes": [node()], "correlation_id": "a\r\nX-Evil: 1"}, ["correlation_id: "]),
    ({"nodes": [node()], "correlation_id": "ü"}, ["correlation_id: "]),
    ({"nodes": [node()], "traceparent": "x"}, ["traceparent: not a W3C traceparent"]),
    ({"nodes": [node()], "retries": 5}, ["retries: unknown field"]),
    ({"nodes": [node(input={"x": {"$output": "b"}})]}, ["nodes[0].input.x: there is no node 'b'"]),
    ({"nodes": [node(input=[1, [{"$output": "b"}]])]}, ["nodes[0].input[1][0]: there is no node 'b'"]),
    ({"nodes": [node(input={"$output": 5})]}, ["nodes[0].input.$output: a node's id, not a number"]),
    (
        {"nodes": [node(), node("b", input={"x": {"$output": "a", "pointer": "id"}})]},
        ["nodes[1].input.x.pointer: not a JSON Pointer"],
    ),
    (
        {"nodes": [node(), node("b", input={"$output": "a", "pointer": 5})]},
        ["nodes[1].input.pointer: not a JSON Pointer"],
    ),
    (
        {"nodes": [node(), node("b", input={"$output": "a", "default": 5})]},
        ["nodes[1].input.default: unknown field of a reference"],
    ),
    ({"nodes": [node(after=["a"])]}, ["nodes[0]: cycle: a → a"]),
    ({"nodes": [node(input={"$output": "a"})]}, ["nodes[0]: cycle: a → a"]),
]


@pytest.mark.parametrize(("spec", "expected"), MISTAKES, ids=[str(spec)[:70] for spec, _ in MISTAKES])
def test_every_mistake_is_named_with_its_place(spec: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(InvalidRunError) as caught:
        parse_run("order-1042", [spec])
    found = [problem for problem in caught.value.problems if "there is no node '5'" not in problem]
    assert len(found) == len(expected), found
    assert all(one.startswith(begin) for one, begin in zip(sorted(found), sorted(expected), strict=True)), found


def test_many_problems_are_named_at_once() -> None:
    found = problems(
        node(id="a b"),
        node("x", tool=5, after=["nowhere"]),
        node("x", input={"y": [{"$output": "lost", "pointer": "no slash"}]}, colour=1),
        node("p", after=["q"]),
        node("q", after=["p"]),
        max_parallel=0,
        extra=1,
    )
    places = sorted(problem.split(": ")[0] for problem in found)
    assert places == sorted(
        [
            *("nodes[0].id", "nodes[1].tool", "nodes[1].after[0]", "nodes[2].id", "nodes[2].colour"),
            *("nodes[2].input.y[0].pointer", "nodes[2].input.y[0]", "max_parallel", "extra"),
            next(problem for problem in found if "cycle" in problem).split(": ")[0],
        ]
    )


def test_problems_beyond_a_hundred_are_counted() -> None:
    found = problems(*[node(f"n{number}", tool="") for number in range(150)])
    assert len(found) == 101
    assert found[-1] == "(and 50 more problems)"


def test_a_cycle_is_named_by_its_nodes_in_the_order_of_the_flow() -> None:
    (found,) = problems(
        node("free"), node("a", after=["c"]), node("b", input={"x": {"$output": "a"}}), node("c", after=["b", "free"])
    )
    match = re.fullmatch(r"nodes\[(\d)\]: cycle: (.*)", found)
    assert match is not None
    names = match[2].split(" → ")
    assert names[0] == names[-1] == ["free", "a", "b", "c"][int(match[1])]
    flow = {("a", "b"), ("b", "c"), ("c", "a")}
    assert set(itertools.pairwise(names)) == flow


def test_every_cycle_is_named() -> None:
    found = problems(*[node(name, after=[other]) for name, other in ("ab", "ba", "cd", "dc", "ee")])
    assert sorted(sorted(set(problem.split("cycle: ")[1].split(" → "))) for problem in found) == [
        ["a", "b"],
        ["c", "d"],
        ["e"],
    ]


@pytest.mark.parametrize(("size", "fits"), [(INLINE.spec, True), (INLINE.spec + 1, False), (3 * INLINE.spec, False)])
def test_a_specification_of_more_than_a_mebibyte_is_refused(size: int, fits: bool) -> None:
    overhead = len(json.dumps({"nodes": [node(input="")]}, separators=(",", ":")))
    big = node(input="x" * (size - overhead))
    if fits:
        assert isinstance(parse(big), RunSpec)
    else:
        assert problems(big) == [f"the specification has {size} bytes; {INLINE.spec} are allowed"]


@pytest.mark.parametrize(
    "nodes",
    [
        [{}] * 300_000,
        [5] * 400_000,
        [node("a", after=["x"] * 200_000)],
        [node("a", input=[{"$output": "x"}] * 40_000)],
        [node(str(n), after=[str(m) for m in range(400) if m != n]) for n in range(400)],
        [node(str(n), after=[str(n ^ 1)]) for n in range(4_000)],
    ],
    ids=["empty", "numbers", "dangling", "references", "all on all", "pairs"],
)
def test_even_the_worst_specification_is_refused_in_seconds(nodes: list[Any]) -> None:
    began = time.process_time()
    assert problems(*nodes)
    # Far above what it takes, far below what quadratic work would take.
    assert time.process_time() - began < 20


# References.


def test_references_are_found_wherever_they_stand() -> None:
    value: Json = {"a": [{"$output": "x"}, 1], "b": {"c": {"$output": "y", "pointer": "/0/~1"}}, "$output2": "no"}
    found = [(reference.where, reference.node, reference.pointer) for reference in references(value)]
    assert found == [(("a", 0), "x", ""), (("b", "c"), "y", "/0/~1")]
    assert next(references({"$output": "x"})).where == ()
    assert list(references(nested(1000))) == []


def test_upstream_is_each_node_once_in_order_of_appearance() -> None:
    only = NodeSpec(id="a", tool="t", after=["z", "y", "z"], input=[{"$output": "x"}, {"$output": "y"}])
    assert only.upstream() == ["z", "y", "x"]


OUTPUT: Json = {"id": "r-1", "list": [1, {"deep": None}], "a/b": {"m~n": True}, "": 0, "01": "x"}


@pytest.mark.parametrize(
    ("pointer", "value"),
    [
        ("", OUTPUT),
        ("/id", "r-1"),
        ("/list/0", 1),
        ("/list/1/deep", None),
        ("/a~1b/m~0n", True),
        ("/", 0),
        ("/01", "x"),
    ],
)
def test_a_reference_stands_for_what_its_pointer_points_at(pointer: str, value: Json) -> None:
    resolved = resolve({"x": [{"$output": "up", "pointer": pointer}], "y": 1}, {"up": OUTPUT})
    assert resolved == {"x": [value], "y": 1}


@pytest.mark.parametrize(
    "pointer",
    [
        "/nothing",
        "/list/2",
        "/list/-",
        "/list/-1",
        "/list/00",
        "/list/x",
        "/list/\u0661",
        "/id/0",
        "/id/x",
        "/list/0/x",
        "/x/y",
    ],
)
def test_a_pointer_at_nothing_is_a_missing_output(pointer: str) -> None:
    with pytest.raises(MissingOutputError, match="'up' has nothing at"):
        resolve({"$output": "up", "pointer": pointer}, {"up": OUTPUT})


@pytest.mark.parametrize("pointer", ["", "/anything"])
def test_a_reference_to_a_discarded_node_is_null(pointer: str) -> None:
    value: Json = {"a": {"$output": "up", "pointer": pointer}, "b": {"$output": "other"}}
    assert resolve(value, {"other": 1}, discarded=["up"]) == {"a": None, "b": 1}


def test_a_resolved_output_is_not_looked_into_for_references() -> None:
    assert resolve({"$output": "up"}, {"up": {"$output": "secret"}}) == {"$output": "secret"}


@given(any_json("a", "b"))
def test_an_input_without_references_is_itself(value: Json) -> None:
    # Hypothesis tries the code's own words, too.
    assume(not any(references(value)))
    assert str(resolve(value, {})) == str(value)
