"""A run: its specification, the validation that names every problem with its place, its status and its result."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from types import MappingProxyType
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, StrictInt, ValidationError

from contracts.base import Json, Model, Number, UtcTime, place, problems_of, tell
from contracts.canonical import json_problem, json_size
from contracts.identity import problem_with_node_id, problem_with_run_id, problem_with_tool_name, trace_id_of
from contracts.limits import INLINE, Limits
from contracts.pointers import at_pointer, is_pointer

__all__ = [
    "MAX_NODES_SHOWN",
    "ApprovalGrant",
    "InputTooLargeError",
    "InvalidRunError",
    "MissingOutputError",
    "NodeId",
    "NodeResult",
    "NodeSpec",
    "NodeState",
    "NodeStatus",
    "OnDiscard",
    "Reference",
    "Revocation",
    "RunId",
    "RunResult",
    "RunSpec",
    "RunState",
    "RunStatus",
    "Source",
    "bounded",
    "parse_run",
    "references",
    "resolve",
]

_MAX_PROBLEMS: Final = 100
_LONGEST_PROBLEM: Final = 500
MAX_NODES_SHOWN: Final = 1_000
"""In one answer of the ``status`` query."""
_MAX_NODES: Final = 10_000
"""To cancel a run with so many nodes waiting for a person is what one history can just take."""
_MAX_CYCLES: Final = 10
_REFERENCE_FIELDS: Final = frozenset(("$output", "pointer"))
_HUNDRED_YEARS: Final = 100 * 365 * 86400


class OnDiscard(StrEnum):
    """What a discarded node means for those that depend on it."""

    FAIL = "fail"
    CONTINUE = "continue"


class NodeStatus(StrEnum):
    """Where a node of a run stands."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    DEAD_LETTERED = "DEAD_LETTERED"
    SUCCEEDED = "SUCCEEDED"
    DISCARDED = "DISCARDED"
    SKIPPED = "SKIPPED"
    CANCELLED = "CANCELLED"


class RunStatus(StrEnum):
    """Where a run stands; BLOCKED: nothing can proceed before a decision."""

    RUNNING = "RUNNING"
    BLOCKED = "BLOCKED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class Source(StrEnum):
    """Where a node's output came from."""

    EXECUTED = "EXECUTED"
    REPLAYED = "REPLAYED"
    """The ledger already had the result; the tool was not called."""
    RECONCILED = "RECONCILED"
    RESOLVED = "RESOLVED"
    """A person vouched for it."""


def _checked(problem_with: Callable[[str], str | None]) -> AfterValidator:
    def check(text: str) -> str:
        problem = problem_with(text)
        if problem:
            raise ValueError(problem)
        return text

    return AfterValidator(check)


def _check_traceparent(text: str) -> str:
    trace_id_of("", text)
    return text


RunId = Annotated[str, _checked(problem_with_run_id)]
NodeId = Annotated[str, _checked(problem_with_node_id)]
ToolName = Annotated[str, _checked(problem_with_tool_name)]
ShortText = Annotated[str, Field(min_length=1, max_length=200)]


class ApprovalGrant(Model):
    """Somebody's leave for one node's call: for that tool and that input, until it expires or is revoked."""

    id: ShortText
    granted_by: ShortText
    expires_at: UtcTime | None = None

    def expired(self, now: datetime) -> bool:
        """Whether it no longer holds."""
        return self.expires_at is not None and self.expires_at <= now


class Revocation(Model):
    """The payload of ``revoke_approval``."""

    approval_id: ShortText
    revoked_by: ShortText
    reason: str = Field(default="", max_length=200)


class NodeSpec(Model):
    """One node: a tool and its input."""

    id: NodeId
    tool: ToolName
    input: Json = Field(default_factory=dict)
    after: list[str] = []
    approval: ApprovalGrant | None = None
    on_discard: OnDiscard = OnDiscard.FAIL
    deadline_seconds: Number = Field(default=7 * 86400, gt=0, le=_HUNDRED_YEARS)

    @property
    def deadline(self) -> timedelta:
        """How long the node may try, from when it is ready."""
        return timedelta(seconds=self.deadline_seconds)

    def upstream(self) -> list[str]:
        """The ids of the nodes that must have ended before this one, each once, in order of appearance."""
        return list(dict.fromkeys([*self.after, *(reference.node for reference in references(self.input))]))


class RunSpec(Model):
    """What a user sends to start a run; see ``redrive schema run``."""

    nodes: list[NodeSpec] = Field(min_length=1)
    max_parallel: StrictInt = Field(default=100, ge=1, le=1000)
    node_mode: Literal["workflow", "fast"] = "workflow"
    correlation_id: str | None = Field(default=None, min_length=1, max_length=200, pattern=r"^[\x21-\x7e]+$")
    traceparent: Annotated[str, AfterValidator(_check_traceparent)] | None = None


class RunResult(Model):
    """The result of a run, and the details of a failed one."""

    run_id: str
    status: RunStatus
    counts: dict[NodeStatus, int]
    outputs: dict[str, Json]
    outputs_omitted: list[str] | None = None


class NodeResult(Model):
    """The result of a node."""

    node_id: str
    operation_id: str
    idempotency_key: str
    output: Json
    attempt_count: int
    source: Source


class NodeState(Model):
    """One node in the answer of the ``status`` query."""

    status: NodeStatus
    operation_id: str | None = None
    attempt_count: int = 0
    dead_letter: str | None = None


class RunState(Model):
    """The answer of the ``status`` query; ``next`` is what to ask for more nodes ``after``, where there are more."""

    run_id: str
    status: RunStatus
    counts: dict[NodeStatus, int]
    nodes: dict[str, NodeState]
    blocked: list[str]
    next: str | None = None


def bounded(problems: list[str]) -> list[str]:
    """The problems as they can travel: a hundred at most, each at most so long, and how many more there are."""
    shown = [problem if len(problem) <= _LONGEST_PROBLEM else f"{problem[:_LONGEST_PROBLEM]}…" for problem in problems]
    more = len(problems) - _MAX_PROBLEMS
    return [*shown[:_MAX_PROBLEMS], f"(and {more} more problems)"] if more > 0 else shown


class InvalidRunError(Exception):
    """The specification of a run is not usable; ``problems`` names every problem with its place."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = bounded(list(problems))
        super().__init__("\n".join(self.problems))


class InputTooLargeError(Exception):
    """An input would be too large with all its references resolved."""

    def __init__(self, largest: int) -> None:
        super().__init__(f"the resolved input has more than {largest} bytes; that many are allowed")


class MissingOutputError(Exception):
    """A reference points at something that its node's output does not hold."""


class Reference(Model):
    """A reference inside an input: the place it stands at, and what it stands for."""

    where: tuple[str | int, ...]
    node: str
    pointer: str


def references(value: Json) -> Iterator[Reference]:
    """Every reference inside an input."""
    # Iterative: an input may be nested deeper than Python's stack.
    pending: list[tuple[tuple[str | int, ...], Json]] = [((), value)]
    while pending:
        where, item = pending.pop()
        if isinstance(item, dict):
            if "$output" in item:
                yield Reference(where=where, node=str(item["$output"]), pointer=str(item.get("pointer", "")))
            else:
                pending += [((*where, key), child) for key, child in reversed(item.items())]
        elif isinstance(item, list):
            pending += [((*where, index), child) for index, child in reversed(list(enumerate(item)))]


def resolve(
    value: Json,
    outputs: Mapping[str, Json],
    discarded: Collection[str] = (),
    largest: int = INLINE.input,
    places: Mapping[str, Mapping[str, Json]] = MappingProxyType({}),
) -> Json:
    """Puts outputs in the place of references.

    Args:
        value: An input.
        outputs: The output of every node that it refers to.
        discarded: The nodes whose references stand for null.
        largest: How many bytes it may come to.
        places: By node and pointer, what is in outputs that are not at hand as a whole.

    Raises:
        MissingOutputError: a pointer points at nothing.
        InputTooLargeError: it is never built then.
    """

    def found(node: str, pointer: str) -> Json:
        if node in discarded:
            return None
        try:
            return places[node][pointer] if node in places else at_pointer(outputs[node], pointer)
        except LookupError as error:
            raise MissingOutputError(f"the output of {node!r} has nothing at {pointer!r}") from error

    _check_size(value, found, largest)
    return _resolved(value, found)


def _check_size(value: Json, found: Callable[[str, str], Json], largest: int) -> None:
    sizes: dict[tuple[str, str], int] = {}
    total = own = json_size(value)
    for reference in references(value):
        key = (reference.node, reference.pointer)
        if key not in sizes:
            sizes[key] = json_size(found(*key))
        total += sizes[key]
        if total > largest + own:
            raise InputTooLargeError(largest)


def _resolved(value: Json, found: Callable[[str, str], Json]) -> Json:
    if isinstance(value, list):
        return [_resolved(item, found) for item in value]
    if not isinstance(value, dict):
        return value
    if "$output" not in value:
        return {key: _resolved(item, found) for key, item in value.items()}
    return found(str(value["$output"]), str(value.get("pointer", "")))


def parse_run(run_id: str, payloads: list[Json], limits: Limits = INLINE) -> RunSpec:
    """Reads the specification of a run from whatever was sent.

    Tools and their schemas are not looked at; see ``activities.admit``.

    Raises:
        InvalidRunError: with every problem.
    """
    problems = [f"workflow id: {problem}"] if (problem := problem_with_run_id(run_id)) else []
    if len(payloads) != 1:
        raise InvalidRunError([*problems, f"a run takes one argument, its specification; {len(payloads)} were sent"])
    spec = payloads[0]
    if not isinstance(spec, dict):
        raise InvalidRunError([*problems, f"the specification is a JSON object, not {tell(spec)}"])
    if problem := json_problem(spec):
        raise InvalidRunError([*problems, f"the specification cannot be read: {problem}"])
    size = json_size(spec)
    if size > limits.spec:
        raise InvalidRunError([*problems, f"the specification has {size} bytes; {limits.spec} are allowed"])
    nodes = spec.get("nodes")
    if isinstance(nodes, list) and len(nodes) > _MAX_NODES:
        raise InvalidRunError([*problems, f"nodes: {len(nodes)} nodes; {_MAX_NODES} are allowed"])
    parsed: RunSpec | None = None
    try:
        parsed = RunSpec.model_validate(spec)
    except ValidationError as error:
        problems += problems_of(error)
    if isinstance(nodes, list):
        problems += _graph_problems(nodes)
    if problems or parsed is None:
        raise InvalidRunError(problems)
    return parsed


def _graph_problems(nodes: list[Json]) -> list[str]:
    """Duplicates, dangling references and cycles; what has the wrong type is pydantic's to report."""
    problems: list[str] = []
    first: dict[str, int] = {}
    for index, node in enumerate(nodes):
        if isinstance(node, dict) and isinstance(node_id := node.get("id"), str):
            if node_id in first:
                problems.append(f"nodes[{index}].id: {node_id!r} is already the id of nodes[{first[node_id]}]")
            first.setdefault(node_id, index)
    edges: dict[str, list[str]] = {}
    for index, node in enumerate(nodes):
        if not isinstance(node, dict):
            continue
        upstream = []
        after = node.get("after")
        for position, name in enumerate(after if isinstance(after, list) else []):
            if isinstance(name, str):
                upstream.append((f"nodes[{index}].after[{position}]", name))
        problems += _reference_problems(f"nodes[{index}].input", node.get("input"))
        upstream += [
            (place(reference.where, f"nodes[{index}].input"), reference.node)
            for reference in references(node.get("input"))
        ]
        for where, name in upstream:
            if name not in first:
                problems.append(f"{where}: there is no node {name!r}")
            elif isinstance(node.get("id"), str):
                edges.setdefault(str(node["id"]), []).append(name)
    return problems + [f"nodes[{first[cycle[-1]]}]: cycle: {' → '.join(cycle)}" for cycle in _cycles(edges)]


def _reference_problems(prefix: str, value: Json) -> list[str]:
    problems: list[str] = []
    pending: list[tuple[str, Json]] = [(prefix, value)]
    while pending:
        where, item = pending.pop()
        if isinstance(item, list):
            pending += [(place([index], where), child) for index, child in enumerate(item)]
        elif isinstance(item, dict) and "$output" not in item:
            pending += [(place([key], where), child) for key, child in item.items()]
        elif isinstance(item, dict):
            pointer = item.get("pointer", "")
            problems += [f"{where}.{key}: unknown field of a reference" for key in item.keys() - _REFERENCE_FIELDS]
            if not isinstance(item["$output"], str):
                problems.append(f"{where}.$output: a node's id, not {tell(item['$output'])}")
            if not isinstance(pointer, str) or not is_pointer(pointer):
                problems.append(f'{where}.pointer: not a JSON Pointer (RFC 6901), such as "/id"')
    return problems


def _cycles(edges: Mapping[str, list[str]]) -> Iterator[list[str]]:
    """Cycles, each through other edges, in the order of the flow (upstream first), until none is left."""
    graph = {node: list(dict.fromkeys(upstream)) for node, upstream in edges.items()}
    for _ in range(_MAX_CYCLES):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            # Each node of the list is a predecessor of the next; the first and the last are the same.
            cycle: list[str] = error.args[1]
            yield cycle
            graph[cycle[-1]].remove(cycle[-2])
        else:
            return
