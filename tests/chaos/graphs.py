"""Random runs of random tools, in the JSON and TOML of the public contract; it shares no code with the product."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

WORKER_FREEZE: Final = (11.0, 18.0)
"""Seconds; a lease lasts 10, and a heartbeat's patience 15."""
SERVER_FREEZE: Final = (2.0, 6.0)
"""Seconds; the calls of the tools have a patience of at most 3."""
STALL: Final = (1.0, 4.0)
"""Seconds that a proxy holds back what it was given."""

ABSENT_AFTER: Final = 22
"""Seconds after a call's timeout in which it may still act: a worker may send until its lease of 10 s ends, a proxy
hold that back, and the tool be frozen when it arrives."""


@dataclass(frozen=True)
class Kind:
    """One kind of tool: what its catalog says of it, and what its server does.

    Attributes:
        name: Of the tool.
        weight: How often it is chosen.
        writes: Whether it has effects.
        remembers: Seconds for which its server knows a key again; None: it does not dedupe.
        asked: Whether it can be asked what came of a key.
        settings: What else the catalog says.
    """

    name: str
    weight: int
    writes: bool = True
    remembers: float | None = None
    asked: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


FOR_EVER: Final = 1e9

KINDS: Final[dict[str, Kind]] = {
    kind.name: kind
    for kind in (
        Kind("read", 15, writes=False, settings={"effect": "read", "timeout": "2s"}),
        Kind("key", 25, remembers=FOR_EVER, settings={"idempotency": "key", "timeout": "2s"}),
        # The window that is declared is shorter than the real one by the longest that a call can be under way.
        Kind("window", 10, remembers=90, settings={"idempotency": "key", "dedupe_window": "45s", "timeout": "2s"}),
        Kind("keyasked", 8, remembers=FOR_EVER, asked=True, settings={"idempotency": "key", "timeout": "2s"}),
        Kind("asked", 18, asked=True, settings={"timeout": "2s"}),
        Kind("blind", 10, settings={"timeout": "2s"}),
        Kind(
            "ruled",
            8,
            asked=True,
            settings={
                "timeout": "2s",
                "rules": [
                    {"status": 409, "category": "TRANSIENT", "side_effect": "NONE"},
                    {
                        "status": 200,
                        "pointer": "/ok",
                        "equals": False,
                        "category": "INVALID_INPUT",
                        "side_effect": "NONE",
                    },
                ],
            },
        ),
        Kind("rated", 6, remembers=FOR_EVER, settings={"idempotency": "key", "timeout": "2s", "rate_per_second": 50}),
    )
}

_RETRY: Final = {
    "TRANSIENT": {"initial": "200ms", "maximum": "2s", "attempts": 5},
    "RATE_LIMITED": {"initial": "300ms", "maximum": "2s", "attempts": 5},
    "DEPENDENCY_DOWN": {"initial": "500ms", "maximum": "4s", "attempts": 8},
}
_OUTPUT_SCHEMA: Final = {"type": "object", "required": ["id", "key"]}


def catalog(tools_url: str) -> dict[str, Any]:
    """``tools.toml``, as a document: every kind, at one address."""
    tools: dict[str, Any] = {}
    for kind in KINDS.values():
        tools[kind.name] = {
            "url": f"{tools_url}/t/{kind.name}",
            "output_schema": _OUTPUT_SCHEMA,
            "retry": _RETRY,
            **kind.settings,
        }
        if kind.asked:
            tools[kind.name]["reconcile"] = {
                "url": f"{tools_url}/r/{kind.name}/{{idempotency_key}}",
                "output": "/result",
                "absent_after": f"{ABSENT_AFTER}s",
            }
    return {"tools": tools}


_TAMPERING: Final = {
    # Of a hundred runs; the others are left alone.
    "cancel": 5,
    "terminate_run": 4,
    "abandon_run": 2,
    "reset_run": 4,
    "terminate_node": 4,
    "reset_node": 4,
    "terminate_dead_letter": 3,
}


@dataclass(frozen=True)
class PlannedRun:
    """A run to start, and what an operator does to it.

    Attributes:
        id: Its id.
        spec: What it is started with.
        tampering: Which of the operator's mishaps it meets; None: it is left alone.
        tampered_after: Seconds after its first node has begun.
    """

    id: str
    spec: dict[str, Any]
    tampering: str | None
    tampered_after: float

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """The nodes of the specification."""
        nodes: list[dict[str, Any]] = self.spec["nodes"]
        return nodes

    @property
    def fast(self) -> bool:
        """Whether it makes first attempts itself."""
        return self.spec.get("node_mode") == "fast"


def plan(seed: int, operations: int) -> Iterator[PlannedRun]:
    """Runs with that many nodes in all."""
    drawn = random.Random(f"graphs {seed}")
    left = operations
    number = 0
    while left > 0:
        number += 1
        size = min(left, drawn.choice((1, 1, 2, 3, 4, 5, 6, 8, 8, 10, 12, 15, 20)))
        left -= size
        yield _run(drawn, f"chaos-{seed}-{number}", size)


def _run(drawn: random.Random, run_id: str, size: int) -> PlannedRun:
    density = drawn.choice((0, 0.5, 1, 1, 2))
    names = [f"n{index}" for index in range(size)]
    nodes = [_node(drawn, run_id, name, names[:index], density) for index, name in enumerate(names)]
    spec: dict[str, Any] = {"nodes": nodes}
    if drawn.random() < 0.3:
        spec["max_parallel"] = drawn.randint(1, 4)
    (tampering,) = drawn.choices([*_TAMPERING, None], [*_TAMPERING.values(), 100 - sum(_TAMPERING.values())])
    # What a fast run leaves in flight when it is gone for good is told by a later sweep than is waited for here.
    if tampering != "abandon_run" and drawn.random() < 0.5:
        spec["node_mode"] = "fast"
    return PlannedRun(run_id, spec, tampering, drawn.uniform(0.3, 6))


def _node(drawn: random.Random, run_id: str, name: str, before: list[str], density: float) -> dict[str, Any]:
    (kind,) = drawn.choices(list(KINDS), [kind.weight for kind in KINDS.values()])
    upstream = drawn.sample(before, min(len(before), sum(drawn.random() < 0.5 for _ in range(round(2 * density)))))
    referred = [other for other in upstream if drawn.random() < 0.6]
    node: dict[str, Any] = {
        "id": name,
        "tool": kind,
        "input": {
            "run": run_id,
            "node": name,
            "amount": drawn.randint(1, 10_000),
            "upstream": [{"$output": other, "pointer": drawn.choice(("", "/id"))} for other in referred],
        },
    }
    if after := sorted(set(upstream) - set(referred)):
        node["after"] = after
    if drawn.random() < 0.4:
        node["on_discard"] = "continue"
    return node
