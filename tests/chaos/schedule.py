"""What is done to the processes and connections, and when: all of it from the seed."""

import random
from dataclasses import dataclass
from typing import Final

from tests.chaos.graphs import SERVER_FREEZE, STALL, WORKER_FREEZE

WORKERS: Final = ("worker-1", "worker-2", "worker-3")
SERVERS: Final = ("temporal", "tools")
DATABASE: Final = "postgresql"

_PART_WITH_FAULTS: Final = 0.9
"""Of the operations; the last ones end in peace."""


@dataclass(frozen=True, order=True)
class Fault:
    """One thing that is done.

    Attributes:
        at: When: once so many operations have ended.
        action: ``kill``, ``freeze``, ``cut``, ``refuse`` or ``stall``.
        target: The process, or the server before which the proxy stands.
        seconds: Until it is undone.
    """

    at: int
    action: str
    target: str
    seconds: float


def schedule(seed: int, operations: int, kills: int, *, database: bool) -> list[Fault]:
    """So many kills, a third as many freezes and half as many cut connections, in the order of their time."""
    drawn = random.Random(f"schedule {seed}")
    servers = [*SERVERS, *([DATABASE] if database else [])]
    until = max(1, round(operations * _PART_WITH_FAULTS))
    faults = [
        Fault(drawn.randrange(until), "kill", _target(drawn, servers, workers=3), drawn.uniform(0, 3))
        for _ in range(kills)
    ]
    for _ in range(-(-kills // 3)):
        target = _target(drawn, servers, workers=4)
        seconds = drawn.uniform(*(WORKER_FREEZE if target in WORKERS else SERVER_FREEZE))
        faults.append(Fault(drawn.randrange(until), "freeze", target, seconds))
    for _ in range(-(-kills // 2)):
        action = drawn.choice(("cut", "cut", "refuse", "stall"))
        seconds = drawn.uniform(*STALL)
        faults.append(Fault(drawn.randrange(until), action, drawn.choice(servers), seconds))
    return sorted(faults)


def _target(drawn: random.Random, servers: list[str], workers: int) -> str:
    """A worker or a server; workers so many times as often as one server."""
    return drawn.choice(WORKERS) if drawn.random() < workers / (workers + len(servers)) else drawn.choice(servers)
