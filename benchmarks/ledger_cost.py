"""What the ledger costs: a claim and its success, durable, by one caller and by fifty at once.

``python -m benchmarks.ledger_cost --json FILE`` measures SQLite, and PostgreSQL where its server programs are
installed, on a server of its own that waits for the disk as any other does. CPU is this process's, user and system
together; what PostgreSQL's server spends is its own. Every round does everything once, in another order each time;
what is printed is the median over the rounds.
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import sqlite3
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from activities.ledger import Ledger, open_ledger
from activities.ledger.records import ClaimRequest, Granted
from contracts.base import Json
from contracts.canonical import content_hash
from contracts.dead_letters import Delivery
from contracts.failures import Category, SideEffect
from contracts.identity import OperationId
from tests.postgres import PostgresServer, programs

INPUT: Final[Json] = {"order": "order-1042", "amount": 1999, "currency": "EUR"}
OUTPUT: Final[Json] = {"id": "ch_1042", "status": "succeeded", "amount": 1999}
CALLERS: Final = (1, 50)


@dataclass(frozen=True)
class Sample:
    """One round of one case, for each operation; milliseconds of the wall clock are from an operation's own begin."""

    cpu_ms: float
    operations_per_second: float
    p50_ms: float
    p99_ms: float


def claims(name: str, count: int) -> list[ClaimRequest]:
    """Claims of new operations, as Temporal's deliveries would make them."""
    now = datetime.now(UTC)
    return [
        ClaimRequest(
            operation=OperationId(run_id=f"{name}-{number // 100}", node_id=f"n{number}", logical_attempt=1),
            redrives=0,
            tool="payments.charge",
            fingerprint="sha256:tool",
            input=INPUT,
            input_hash=content_hash(INPUT),
            scheduled_at=now,
            node_started_at=now,
            now=now,
            delivery=Delivery(
                workflow_id=f"{name}/n{number}",
                workflow_run_id="0199-run",
                activity_id="1",
                task_queue="redrive",
                attempt=1,
            ),
            owner=f"worker/{number}",
            worker="worker",
            budgets=dict.fromkeys(Category, 10),
            risk=SideEffect.POSSIBLE,
        )
        for number in range(count)
    ]


async def measure(ledger: Ledger, name: str, callers: int, count: int) -> Sample:
    """So many operations, by so many callers at once; each caller waits for its answer, then begins the next."""
    waiting = iter(claims(name, count))
    took: list[float] = []

    async def caller() -> None:
        for claim in waiting:
            begun = time.perf_counter()
            granted = await ledger.claim(claim)
            assert isinstance(granted, Granted), granted
            assert await ledger.succeed(claim.operation, granted.epoch, OUTPUT)
            took.append(time.perf_counter() - begun)

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(caller() for _ in range(callers)))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    cuts = statistics.quantiles(took, n=100)
    return Sample(
        cpu_ms=1000 * cpu / count,
        operations_per_second=count / wall,
        p50_ms=1000 * cuts[49],
        p99_ms=1000 * cuts[98],
    )


def middle(samples: Iterable[Sample]) -> Sample:
    """The median of each figure."""
    rows = [asdict(sample) for sample in samples]
    return Sample(**{name: statistics.median(row[name] for row in rows) for name in rows[0]})


@asynccontextmanager
async def ledgers(folder: Path) -> AsyncGenerator[dict[str, Ledger]]:
    """An empty ledger of each kind that this machine has."""
    async with AsyncExitStack() as stack:
        urls = {"sqlite": f"sqlite:///{folder / 'ledger.db'}"}
        try:
            programs()
        except RuntimeError as error:
            print(f"without PostgreSQL: {error}")
        else:
            server = await stack.enter_async_context(PostgresServer.running())
            urls["postgresql"] = server.url(await server.database())
        opened: dict[str, Ledger] = {}
        for kind, url in urls.items():
            opened[kind] = await open_ledger(url)
            stack.push_async_callback(opened[kind].close)
        yield opened


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    return {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": [round(load, 1) for load in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "postgresql": _postgres(),
        **{name: version(name) for name in ("redrive", "pydantic", "aiosql", "psycopg")},
    }


def _postgres() -> str | None:
    try:
        command = [str(programs() / "postgres"), "--version"]
    except RuntimeError:
        return None
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[2]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


async def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger_cost", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, every round of them")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--operations", type=int, default=2000, help="for each round of fifty callers (one: a tenth)")
    parser.add_argument("--folder", type=Path, help="where the ledger's file is made: on the disk to be measured")
    options = parser.parse_args()
    on = machine()
    print("  ".join(f"{name} {value}" for name, value in on.items()))
    taken: dict[tuple[str, int], list[Sample]] = {}
    with tempfile.TemporaryDirectory(prefix="redrive-ledger-cost-", dir=options.folder) as folder:
        async with ledgers(Path(folder)) as opened:
            cases = list(itertools.product(opened, CALLERS))
            for number in range(options.rounds + 1):
                for kind, callers in random.sample(cases, len(cases)):
                    count = options.operations if callers > 1 else options.operations // 10
                    sample = await measure(opened[kind], f"{kind}-{callers}-{number}", callers, count)
                    # The first round only warms up.
                    if number:
                        taken.setdefault((kind, callers), []).append(sample)
    print(f"{'ledger':<12}{'callers':>8}{'CPU ms/op':>12}{'op/s':>10}{'p50 ms':>10}{'p99 ms':>10}")
    for (kind, callers), samples in sorted(taken.items(), reverse=True):
        figures = middle(samples)
        print(
            f"{kind:<12}{callers:>8}{figures.cpu_ms:>12.3f}{figures.operations_per_second:>10.0f}"
            f"{figures.p50_ms:>10.2f}{figures.p99_ms:>10.2f}"
        )
    if options.json:
        report = {
            "machine": on,
            "rounds": options.rounds,
            "results": [
                {
                    "ledger": kind,
                    "callers": callers,
                    "median": asdict(middle(samples)),
                    "rounds": [asdict(sample) for sample in samples],
                }
                for (kind, callers), samples in taken.items()
            ],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
