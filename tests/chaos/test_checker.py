"""The checker finds what must not be, in made-up logs; and nothing in those of a healthy run."""

import ast
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import checker
from tests.chaos.checker import OFFENCES, check

_PRODUCT = {"activities", "cli", "contracts", "workers", "workflows"}

Json = Any


class Story:
    """One run of one node (or more), as the logs tell it."""

    def __init__(self, tool: str = "blind") -> None:
        self.input = {"run": "r", "node": "n", "amount": 1, "upstream": []}
        self.run: Json = {
            "id": "r",
            "spec": {"nodes": [{"id": "n", "tool": tool, "input": self.input}]},
            "workflow": {
                "status": "COMPLETED",
                "error": None,
                "result": {
                    "run_id": "r",
                    "status": "SUCCEEDED",
                    "counts": {"SUCCEEDED": 1},
                    "outputs": {"n": {"id": "e"}},
                },
            },
            "state": {"nodes": {"n": {"status": "SUCCEEDED"}}},
            "nodes": {
                "n": {
                    "status": "COMPLETED",
                    "error": None,
                    "result": {"idempotency_key": "k", "source": "EXECUTED", "output": {"id": "e"}},
                }
            },
            "dead_letters": {"n": None},
        }
        self.log: list[Json] = []
        self.journal: list[Json] = []

    def called(self, key: str = "k", *, effect: bool = True, node: str = "n", at: float = 1) -> "Story":
        self.log.append({"event": "call", "key": key, "at": at, "input": {**self.input, "node": node}})
        if effect:
            self.log.append({"event": "effect", "key": key, "at": at, "body": {"id": "e"}})
        return self

    def decided(
        self, action: str, side_effect: str = "POSSIBLE", outcome: str = "ACCEPTED", **payload: Json
    ) -> "Story":
        self.journal.append(
            {
                "event": "decide",
                "dead_letter": "r/n/dead-letter",
                "action": action,
                "payload": {"decision_id": str(len(self.journal)), **payload},
                "looked_at": 5,
                "idempotency_key": self.log[-1]["key"],
                "side_effect": side_effect,
            }
        )
        decision_id = self.journal[-1]["payload"]["decision_id"]
        self.journal.append({"event": "decided", "decision_id": decision_id, "record": {"outcome": outcome}})
        return self

    def parked(self, side_effect: str = "POSSIBLE", node: str = "RUNNING") -> "Story":
        """The run waits for a decision."""
        self.run["workflow"] = {"status": "RUNNING", "error": None, "result": None}
        self.run["state"] = {"nodes": {"n": {"status": "DEAD_LETTERED"}}}
        self.run["nodes"]["n"] = {"status": node, "error": None, "result": None}
        self.run["dead_letters"]["n"] = {
            "status": "RUNNING",
            "entry": {
                "status": "AWAITING_DECISION",
                "side_effect": side_effect,
                "idempotency_key": "k",
                "error": {"code": "read_timeout"},
            },
        }
        return self

    def failed(self, status: str = "DISCARDED") -> "Story":
        """The run has failed, its node as said."""
        result = {"run_id": "r", "status": "FAILED", "counts": {status: 1}, "outputs": {}}
        self.run["workflow"] = {"status": "FAILED", "error": "RunFailed", "result": result}
        self.run["state"] = {"nodes": {"n": {"status": status}}}
        self.run["nodes"]["n"] = {"status": "FAILED", "error": "NodeDiscarded", "result": None}
        return self

    def cancelled(self) -> "Story":
        """Somebody has cancelled the run."""
        self.journal.append({"event": "tamper", "run": "r", "node": "n", "what": "cancel"})
        self.run["workflow"] = {"status": "CANCELED", "error": "CancelledError", "result": None}
        self.run["state"] = {"nodes": {"n": {"status": "CANCELLED"}}}
        self.run["nodes"]["n"] = {"status": "FAILED", "error": "NodeCancelled", "result": None}
        return self

    def abandoned(self) -> "Story":
        """Somebody has terminated the run, and nobody has started it again."""
        self.journal.append({"event": "tamper", "run": "r", "node": "n", "what": "abandon_run"})
        self.run["workflow"] = {"status": "TERMINATED", "error": "TerminatedError", "result": None}
        self.run["state"] = {"nodes": {"n": {"status": "RUNNING"}}}
        return self

    def with_source(self, source: str) -> "Story":
        self.run["nodes"]["n"]["result"]["source"] = source
        return self

    def with_output(self, output: Json) -> "Story":
        self.run["nodes"]["n"]["result"]["output"] = output
        self.run["workflow"]["result"]["outputs"]["n"] = output
        return self

    def with_run(self, **workflow: Json) -> "Story":
        self.run["workflow"] |= workflow
        return self

    def without_dead_letter(self) -> "Story":
        self.run["dead_letters"]["n"] = None
        return self

    def offences(self) -> set[str]:
        return {violation.offence for violation in check([copy.deepcopy(self.run)], self.log, self.journal)}


def _never_started() -> Story:
    story = Story()
    story.run |= {"workflow": None, "state": None, "nodes": {"n": None}}
    return story


def _garbled() -> Story:
    story = Story().called()
    story.log[0]["input"]["amount"] = 2
    return story


_HEALTHY: dict[str, Callable[[], Story]] = {
    "one call, one effect": lambda: Story().called(),
    "an effect whose answer was lost, and was then asked for": lambda: (
        Story("asked").called().with_source("RECONCILED")
    ),
    "called twice, deduped": lambda: Story("key").called().called(effect=False),
    "read twice": lambda: Story("read").called(effect=False).called(effect=False),
    "a second effect at a risk that a person has accepted": lambda: (
        Story().called().decided("redrive", override=["SIDE_EFFECT_UNRESOLVED"]).called()
    ),
    "a new operation at an accepted risk": lambda: (
        Story().called("first").decided("redrive", override=["SIDE_EFFECT_UNRESOLVED"], new_operation=True).called()
    ),
    "a new operation after nothing had happened": lambda: (
        Story().called("first", effect=False).decided("redrive", "NONE", new_operation=True).called()
    ),
    "resolved by a person": lambda: Story().called(effect=False).decided("resolve").with_source("RESOLVED"),
    "discarded, although it may have happened": lambda: Story().called().decided("discard").failed(),
    "parked at a listed dead letter": lambda: Story().called().parked(),
    "abandoned, its node at a listed dead letter": lambda: Story().called().parked().abandoned(),
    "cancelled before anything was sent": lambda: Story().cancelled(),
    "cancelled, its uncertain effect in a dead letter that outlives it": lambda: (
        Story().called().parked(node="FAILED").cancelled()
    ),
}

_OFFENCES: dict[str, tuple[str, Callable[[], Story]]] = {
    "two effects": ("duplicate", lambda: Story().called().called()),
    "two effects of a tool that dedupes": ("duplicate", lambda: Story("key").called().called()),
    "two effects after a redrive that overrode nothing": (
        "duplicate",
        lambda: Story().called().decided("redrive").called(),
    ),
    "two effects after an override that was refused": (
        "duplicate",
        lambda: Story().called().decided("redrive", outcome="REFUSED", override=["SIDE_EFFECT_UNRESOLVED"]).called(),
    ),
    "two effects under two keys": (
        "duplicate",
        lambda: Story().called("first").decided("redrive", "NONE", new_operation=True).called(),
    ),
    "succeeded without an effect": ("lost", lambda: Story().called(effect=False)),
    "succeeded without a call": ("lost", lambda: Story("read")),
    "succeeded under a key that the tool has not seen": ("lost", lambda: Story().called("other")),
    "succeeded with another answer": ("lost", lambda: Story().called().with_output({"id": "made up"})),
    "the run's output is not its node's": (
        "lost",
        lambda: (
            Story()
            .called()
            .with_run(result={"status": "SUCCEEDED", "counts": {"SUCCEEDED": 1}, "outputs": {"n": {"id": "made up"}}})
        ),
    ),
    "cancelled after its effect, and nobody was told": ("forgotten", lambda: Story().called().cancelled()),
    "failed after its effect, and nobody was told": ("forgotten", lambda: Story().called().failed()),
    "a dead letter that denies an effect": ("denied", lambda: Story().called().parked(side_effect="NONE")),
    "a decision on a dead letter that denied an effect": (
        "denied",
        lambda: Story().called().decided("discard", side_effect="NONE").failed(),
    ),
    "open without a dead letter": ("stuck", lambda: Story().called().parked().without_dead_letter()),
    "a node left open": (
        "stuck",
        lambda: Story().called().parked().without_dead_letter().with_run(status="CANCELED", error="CancelledError"),
    ),
    "an abandoned run's node that no sweep has found": (
        "stuck",
        lambda: Story().called().parked().without_dead_letter().abandoned(),
    ),
    "terminated by nobody": (
        "unexplained",
        lambda: Story().called().with_run(status="TERMINATED", error="TerminatedError", result=None),
    ),
    "a second key without a new operation": (
        "rekeyed",
        lambda: Story("read").called("first", effect=False).called(effect=False),
    ),
    "one key for two nodes": ("rekeyed", lambda: Story().called().called(effect=False, node="other")),
    "an effect of a node that the run does not have": (
        "unexplained",
        lambda: Story().called().called("x", node="other"),
    ),
    "discarded by nobody": ("unexplained", lambda: Story().called(effect=False).failed()),
    "resolved by nobody": ("unexplained", lambda: Story().called().with_source("RESOLVED")),
    "cancelled by nobody": (
        "unexplained",
        lambda: Story().called().with_run(status="CANCELED", error="CancelledError", result=None),
    ),
    "a run that was refused": ("unexplained", lambda: Story().called().with_run(status="FAILED", error="InvalidRun")),
    "a run that never was": ("lost", _never_started),
    "called with another input": ("garbled", _garbled),
}


@pytest.mark.parametrize("name", _HEALTHY)
def test_nothing_is_found_where_nothing_is_wrong(name: str) -> None:
    assert _HEALTHY[name]().offences() == set()


@pytest.mark.parametrize("name", _OFFENCES)
def test_what_must_not_be_is_found(name: str) -> None:
    offence, story = _OFFENCES[name]
    assert offence in story().offences()


def test_every_offence_has_a_case() -> None:
    assert {offence for offence, _ in _OFFENCES.values()} == set(OFFENCES)


@pytest.mark.parametrize("module", ["checker", "collect", "graphs", "tool", "operator", "driver"])
def test_what_judges_shares_no_code_with_the_product(module: str) -> None:
    tree = ast.parse(Path(checker.__file__).with_name(f"{module}.py").read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not _PRODUCT & {name.partition(".")[0] for name in names}
