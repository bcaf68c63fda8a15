"""Compares what the tools have done with what the runs say.

It shares no code with the product, and knows of it only the JSON that anybody can read: a run's result and ``status``,
a node's result, a dead letter's ``entry``. The tools' own log is the truth.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from tests.chaos.graphs import KINDS

OFFENCES: Final = {
    "duplicate": "more effects than one, beyond the risks that a person has accepted",
    "lost": "a node succeeded without an effect, or with another result than its effect's",
    "forgotten": "an effect that neither a node's success nor a dead letter accounts for",
    "denied": "a dead letter said that nothing had happened, and it had",
    "stuck": "a workflow is open, and waits for no listed dead letter",
    "rekeyed": "an operation was called with more keys than one, or one key for two operations or two inputs",
    "unexplained": "an end that nobody has caused",
    "garbled": "a node was called with another input than its run's",
}
"""What must never be found."""

Json = Any


@dataclass(frozen=True)
class Violation:
    """Something that must not be."""

    offence: str
    where: str
    what: str


@dataclass
class Node:
    """All that is known of one node.

    Attributes:
        keys: The idempotency keys of its calls, in the order of their first call.
        calls: Its calls, from the tools' log.
        effects: By key.
        decisions: Those that may have been accepted, from the journal.
    """

    keys: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    effects: defaultdict[str, list[Json]] = field(default_factory=lambda: defaultdict(list))
    decisions: list[Json] = field(default_factory=list)

    @property
    def all_effects(self) -> list[Json]:
        """Of all of its operations."""
        return [effect for effects in self.effects.values() for effect in effects]

    def decided(self, action: str, **payload: Json) -> list[Json]:
        """Decisions of this kind that may have been accepted."""
        return [
            decision
            for decision in self.decisions
            if decision["action"] == action
            and all(decision["payload"].get(name) == value for name, value in payload.items())
        ]

    @property
    def risks(self) -> int:
        """How often a person has accepted that its effect may happen once more."""
        return sum(1 for decision in self.decided("redrive") if decision["payload"].get("override"))


def check(runs: list[Json], log: list[Json], journal: list[Json]) -> list[Violation]:
    """Everything that must not be, in a set of runs that has come to rest."""
    nodes, violations = _facts(log, journal)
    tampered = {(event["run"], event["what"]) for event in journal if event["event"] == "tamper"}
    for run in runs:
        violations += _of_run(run, tampered)
        violations += _at_rest(run)
        for spec in run["spec"]["nodes"]:
            node = nodes.pop((run["id"], spec["id"]), Node())
            where = f"{run['id']}/{spec['id']}"
            violations += [
                Violation(offence, where, what)
                for rule in (_duplicates, _lost, _forgotten, _denied, _rekeyed, _unexplained, _garbled)
                for offence, what in rule(run, spec, node)
            ]
    violations += [Violation("unexplained", f"{run}/{name}", "called, but never asked for") for run, name in nodes]
    return violations


def _facts(log: list[Json], journal: list[Json]) -> tuple[dict[tuple[str, str], Node], list[Violation]]:
    nodes: defaultdict[tuple[str, str], Node] = defaultdict(Node)
    owners: dict[str, tuple[str, str]] = {}
    violations: list[Violation] = []
    for event in log:
        key = event["key"]
        if event["event"] == "call":
            whose = (event["input"]["run"], event["input"]["node"])
            if owners.setdefault(key, whose) != whose:
                violations.append(Violation("rekeyed", "/".join(whose), f"has the key {key} of {owners[key]}"))
            node = nodes[whose]
            node.calls.append(event)
            if key not in node.keys:
                node.keys.append(key)
        else:
            nodes[owners[key]].effects[key].append(event)
    answers = {event["decision_id"]: event["record"] for event in journal if event["event"] == "decided"}
    for event in journal:
        if event["event"] != "decide":
            continue
        record = answers.get(event["payload"]["decision_id"])
        run, name, _ = event["dead_letter"].split("/")
        if record is None or record["outcome"] in ("ACCEPTED", "NOTED"):
            nodes[run, name].decisions.append(event)
    return dict(nodes), violations


def _of_run(run: Json, tampered: set[tuple[str, str]]) -> Iterator[Violation]:
    """How a run may end."""
    workflow, name = run["workflow"], run["id"]
    if workflow is None:
        yield Violation("lost", name, "the run was never started")
        return
    counts = Counter(node["status"] for node in (run["state"] or {"nodes": {}})["nodes"].values())
    result = workflow["result"] or {}
    match workflow["status"]:
        case "RUNNING":
            return
        case "COMPLETED":
            continues = sum(node.get("on_discard") == "continue" for node in run["spec"]["nodes"])
            succeeded = result["counts"].get("SUCCEEDED", 0)
            if result["status"] != "SUCCEEDED" or succeeded < len(run["spec"]["nodes"]) - continues:
                yield Violation("unexplained", name, f"completed with {result}")
            for node, output in result["outputs"].items():
                theirs = run["nodes"][node]
                if theirs is None or theirs["result"] is None or theirs["result"]["output"] != output:
                    yield Violation("lost", f"{name}/{node}", f"the run's output is {output}, the node's {theirs}")
        case "FAILED" if workflow["error"] == "RunFailed":
            if not result["counts"].get("DISCARDED") and not counts["DISCARDED"]:
                yield Violation("unexplained", name, f"failed, but nothing was discarded: {result}")
        case "CANCELED" if (name, "cancel") in tampered:
            return
        case "TERMINATED" if (name, "abandon_run") in tampered:
            return
        case status:
            yield Violation("unexplained", name, f"{status}: {workflow['error']}: {workflow.get('message')}")


def _at_rest(run: Json) -> Iterator[Violation]:
    """Whether everything that is still open waits for a person who has been told."""
    waiting = {
        name
        for name, dead_letter in run["dead_letters"].items()
        if dead_letter is not None
        and dead_letter["status"] == "RUNNING"
        and dead_letter["entry"] is not None
        and dead_letter["entry"]["status"] == "AWAITING_DECISION"
    }
    workflow = run["workflow"]
    if workflow is not None and workflow["status"] == "RUNNING":
        running = [
            name for name, node in (run["state"] or {"nodes": {}})["nodes"].items() if node["status"] == "RUNNING"
        ]
        if not waiting or running or run["state"] is None:
            yield Violation("stuck", run["id"], f"open; running: {running}; waiting: {sorted(waiting)}; {run['state']}")
    for name, node in run["nodes"].items():
        if node is not None and node["status"] == "RUNNING" and name not in waiting:
            yield Violation("stuck", f"{run['id']}/{name}", "the node is open, its dead letter is not")


Found = Iterator[tuple[str, str]]


def _duplicates(run: Json, spec: Json, node: Node) -> Found:
    """One effect for each node, whatever happened, but for the risks that a person has accepted."""
    if len(node.all_effects) > 1 + node.risks:
        what = {key: len(effects) for key, effects in node.effects.items()}
        yield "duplicate", f"{what} effects of {spec['tool']}, and {node.risks} risks were accepted"


def _lost(run: Json, spec: Json, node: Node) -> Found:
    workflow = run["nodes"][spec["id"]]
    if workflow is None or workflow["status"] != "COMPLETED":
        state = (run["state"] or {"nodes": {}})["nodes"].get(spec["id"])
        if state is not None and state["status"] == "SUCCEEDED":
            yield "lost", f"the run says that it succeeded, and its workflow is {workflow}"
        return
    result = workflow["result"]
    if result["source"] == "RESOLVED":
        return
    key = result["idempotency_key"]
    if not KINDS[spec["tool"]].writes:
        if key not in node.keys:
            yield "lost", f"{result['source']}, but the tool was never called with {key}"
    elif not node.effects[key]:
        yield "lost", f"{result['source']} as {key}, and the tool has no effect of it"
    elif all(effect["body"] != result["output"] for effect in node.effects[key]):
        yield "lost", f"its output {result['output']} is not what its effect answered"


def _forgotten(run: Json, spec: Json, node: Node) -> Found:
    workflow = run["nodes"][spec["id"]]
    dead_letter = run["dead_letters"][spec["id"]]
    told = [decision["side_effect"] for decision in node.decisions]
    if dead_letter is not None and dead_letter["entry"] is not None:
        told.append(dead_letter["entry"]["side_effect"])
    succeeded = workflow is not None and workflow["status"] == "COMPLETED"
    if node.all_effects and not succeeded and all(side_effect == "NONE" for side_effect in told):
        yield "forgotten", f"{len(node.all_effects)} effects; its workflow: {workflow}; its dead letter: {dead_letter}"


def _denied(run: Json, spec: Json, node: Node) -> Found:
    for decision in node.decisions:
        if decision["side_effect"] == "NONE":
            for effect in node.effects[decision["idempotency_key"]]:
                if effect["at"] < decision["looked_at"]:
                    yield "denied", f"by the entry of {decision['dead_letter']}, before {decision['action']}"
    dead_letter = run["dead_letters"][spec["id"]]
    if dead_letter is None or dead_letter["status"] != "RUNNING" or dead_letter["entry"] is None:
        return
    entry = dead_letter["entry"]
    if entry["side_effect"] == "NONE" and node.effects[entry["idempotency_key"]]:
        yield "denied", f"by the open entry: {entry['error']}"


def _rekeyed(run: Json, spec: Json, node: Node) -> Found:
    renewed = len(node.decided("redrive", new_operation=True))
    if len(node.keys) > 1 + renewed:
        yield "rekeyed", f"{len(node.keys)} keys, and {renewed} new operations"
    for key in node.keys:
        inputs = {repr(call["input"]) for call in node.calls if call["key"] == key}
        if len(inputs) > 1:
            yield "rekeyed", f"the key {key} has carried {sorted(inputs)}"


def _unexplained(run: Json, spec: Json, node: Node) -> Found:
    """Ends of nodes that only a person can bring about."""
    workflow = run["nodes"][spec["id"]]
    state = (run["state"] or {"nodes": {}})["nodes"].get(spec["id"])
    gone = run["workflow"] is not None and run["workflow"]["status"] in ("CANCELED", "TERMINATED")
    if workflow is None or gone:
        return
    if workflow["status"] == "COMPLETED" and workflow["result"]["source"] == "RESOLVED" and not node.decided("resolve"):
        yield "unexplained", "resolved, and nobody did"
    if state is not None and state["status"] == "DISCARDED" and not node.decided("discard"):
        yield "unexplained", f"discarded, and nobody did: {workflow}"
    if state is not None and state["status"] == "CANCELLED":
        yield "unexplained", f"cancelled, and nobody did: {workflow}"


def _garbled(run: Json, spec: Json, node: Node) -> Found:
    """References stand for what the upstream's effect answered."""
    for call in node.calls:
        sent, meant = call["input"], spec["input"]
        if {**sent, "upstream": None} != {**meant, "upstream": None} or len(sent["upstream"]) != len(meant["upstream"]):
            yield "garbled", f"{sent} instead of {meant}"
            continue
        for value, reference in zip(sent["upstream"], meant["upstream"], strict=True):
            if value not in list(_meanings(run, reference)):
                yield "garbled", f"{reference} was sent as {value}"


def _meanings(run: Json, reference: Json) -> Iterable[Json]:
    upstream = run["nodes"][reference["$output"]]
    if upstream is None or upstream["status"] != "COMPLETED":
        yield None  # it was discarded, and the run went on
        return
    output = upstream["result"]["output"]
    yield output if reference["pointer"] == "" else output.get("id")
