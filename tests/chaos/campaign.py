"""One campaign: a cluster, its runs and its faults, until everything has come to rest; and the report on it."""

import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from temporalio.client import Client
from temporalio.runtime import LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter

from tests.chaos.checker import OFFENCES, Violation, check
from tests.chaos.cluster import Cluster, running_cluster
from tests.chaos.collect import collect, tool_log
from tests.chaos.driver import Called, Driver
from tests.chaos.faults import Faults
from tests.chaos.graphs import PlannedRun, plan
from tests.chaos.journal import Journal
from tests.chaos.operator import Operator
from tests.chaos.schedule import DATABASE, schedule
from tests.postgres import programs

_LOOK_SECONDS: Final = 0.3
_SETTLING_SECONDS: Final = 2
"""Between the last end and the questions: what is listed lags behind what is."""


@dataclass(frozen=True)
class Campaign:
    """What is asked for.

    Attributes:
        seed: All that is random follows from it.
        operations: Nodes, in all runs together.
        kills: SIGKILLs; freezes and cut connections come on top.
        ledger: ``sqlite`` or ``postgresql``.
        at_once: Runs that are open at once.
        patience: Seconds that a run may take before the next one has its turn, and that all of them have in the end
            before they count as stuck.
    """

    seed: int
    operations: int
    kills: int
    ledger: str = DATABASE
    at_once: int = 24
    patience: float = 900


@dataclass
class Report:
    """What was seen."""

    campaign: Campaign
    runs: int = 0
    operations: int = 0
    called: int = 0
    calls: int = 0
    effects: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    restarts_by_itself: dict[str, int] = field(default_factory=dict)
    misdeeds: dict[str, int] = field(default_factory=dict)
    tampering: dict[str, int] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    dead_letters: dict[str, int] = field(default_factory=dict)
    decisions: dict[str, int] = field(default_factory=dict)
    parked: int = 0
    violations: list[Violation] = field(default_factory=list)
    seconds: float = 0
    machine: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    at: str = ""

    @property
    def kills(self) -> int:
        """All of them."""
        return sum(count for what, count in self.faults.items() if what.startswith("kill "))

    def text(self) -> str:
        """As a table."""
        offences = Counter(violation.offence for violation in self.violations)
        rows: list[tuple[str, object]] = [
            ("seed", self.campaign.seed),
            ("ledger", self.campaign.ledger),
            ("runs", self.runs),
            ("operations", self.operations),
            ("operations that were called", self.called),
            ("calls", self.calls),
            ("effects", self.effects),
            ("kills", self.kills),
            *((f"  {what}", count) for what, count in sorted(self.faults.items())),
            *((f"restarted by itself: {name}", count) for name, count in self.restarts_by_itself.items() if count),
            *((f"mishap: {what}", count) for what, count in sorted(self.tampering.items())),
            *((f"runs that ended {status}", count) for status, count in sorted(self.ends.items())),
            *((f"dead letters: {what}", count) for what, count in sorted(self.dead_letters.items())),
            *((f"decisions: {what}", count) for what, count in sorted(self.decisions.items())),
            ("runs parked at a dead letter", self.parked),
            *((offence, offences[offence]) for offence in OFFENCES),
            ("seconds", round(self.seconds, 1)),
            ("operations/s", round(self.operations / self.seconds, 1) if self.seconds else 0),
            ("versions", ", ".join(f"{name} {number}" for name, number in self.versions.items())),
            ("machine", self.machine),
            ("at", self.at),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        lines += [f"VIOLATION {violation.offence} {violation.where}: {violation.what}" for violation in self.violations]
        return "\n".join(lines)

    def json(self) -> str:
        """As a document."""
        # Not asdict() of the whole: it takes a Counter apart.
        parts = {"campaign": asdict(self.campaign), "violations": [asdict(one) for one in self.violations]}
        return json.dumps(vars(self) | parts | {"kills": self.kills}, indent=2)


async def run_campaign(campaign: Campaign, folder: Path, say: Callable[[str], None]) -> Report:
    """Runs it, in a folder that then holds every log."""
    began = time.monotonic()
    runs = list(plan(campaign.seed, campaign.operations))
    journal = Journal(folder / "journal.jsonl")
    database = campaign.ledger == DATABASE
    faults = schedule(campaign.seed, campaign.operations, campaign.kills, database=database)

    def tell(what: str) -> None:
        say(f"{time.monotonic() - began:7.1f} s  {what}")

    async with running_cluster(folder, campaign.seed, database=database) as cluster:
        client = await _connect(cluster)
        operator = Operator(client, campaign.seed, journal)
        driver = Driver(client, operator, journal, at_once=campaign.at_once, patience=campaign.patience)
        chaos = Faults(cluster, faults, tell)
        tell(f"everything runs, in {folder}")
        background = [
            asyncio.create_task(operator.work()),
            asyncio.create_task(_watch(cluster, driver, chaos, tell)),
        ]
        driving = asyncio.create_task(driver.drive(runs))
        try:
            await asyncio.wait([driving, *background], return_when=asyncio.FIRST_COMPLETED)
            for task in background:
                if task.done():
                    task.result()  # its error is this program's
            await driving
            await chaos.over()
            tell("the faults are over")
            await driver.settle(runs)
            tell("at rest; asking what became of everything")
            await asyncio.sleep(_SETTLING_SECONDS)
        finally:
            for task in [driving, *background]:
                task.cancel()
            await asyncio.gather(driving, *background, return_exceptions=True)
        found = await collect(client, runs)
        (folder / "collected.json").write_text(json.dumps(found))
        log = tool_log(cluster.tools_log)
        report = _report(campaign, runs, found, log, journal, chaos, cluster)
    journal.close()
    report.seconds = time.monotonic() - began
    return report


async def _connect(cluster: Cluster) -> Client:
    # That the server is away again and again is no news here.
    quiet = Runtime(telemetry=TelemetryConfig(logging=LoggingConfig(TelemetryFilter("ERROR", "ERROR"))))
    while True:
        with suppress(RuntimeError):  # it has only just been started
            return await Client.connect(cluster.address, runtime=quiet)
        await asyncio.sleep(0.2)


async def _watch(cluster: Cluster, driver: Driver, chaos: Faults, tell: Callable[[str], None]) -> None:
    """Has the faults begin as the runs go on."""
    told = 0.0
    calls = Called(cluster.tools_log)
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        called = calls.count()
        chaos.ended(max(called, driver.ended))
        chaos.check()
        if time.monotonic() - told > 10:
            told = time.monotonic()
            tell(f"{called} operations called, {driver.ended} in runs that are over; {sum(chaos.done.values())} faults")


def _report(
    campaign: Campaign,
    runs: list[PlannedRun],
    found: list[dict[str, Any]],
    log: list[dict[str, Any]],
    journal: Journal,
    chaos: Faults,
    cluster: Cluster,
) -> Report:
    calls = [event for event in log if event["event"] == "call"]
    decisions = {event["payload"]["decision_id"]: event for event in journal.events if event["event"] == "decide"}
    outcomes: Counter[str] = Counter()
    for event in journal.events:
        if event["event"] == "decided":
            outcome = event["record"]["outcome"] if event["record"] else "not answered"
            outcomes[f"{decisions[event['decision_id']]['action']} {outcome}"] += 1
    seen = {(event["dead_letter"], event["operation_id"], event["error"]["category"]) for event in decisions.values()}
    open_ones = [
        dead_letter
        for run in found
        for dead_letter in run["dead_letters"].values()
        if dead_letter is not None and dead_letter["status"] == "RUNNING"
    ]
    return Report(
        campaign,
        runs=len(runs),
        operations=sum(len(run.nodes) for run in runs),
        called=len({event["key"] for event in calls}),
        calls=len(calls),
        effects=len(log) - len(calls),
        faults={f"{action} {target}": count for (action, target), count in chaos.done.items()},
        restarts_by_itself={name: process.ends for name, process in cluster.processes.items()},
        misdeeds=Counter(event["fault"] for event in calls),
        tampering=Counter(event["what"] for event in journal.events if event["event"] == "tamper"),
        ends=Counter(run["workflow"]["status"] if run["workflow"] else "NEVER" for run in found),
        dead_letters=Counter(category for _, _, category in seen) | Counter({"open at the end": len(open_ones)}),
        decisions=outcomes,
        parked=sum(1 for run in found if run["workflow"] and run["workflow"]["status"] == "RUNNING"),
        violations=check(found, log, journal.events),
        machine=f"{platform.platform()}, {os.cpu_count()} CPUs",
        versions=_versions(cluster),
        at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _versions(cluster: Cluster) -> dict[str, str]:
    found = {
        "redrive": version("redrive"),
        "temporalio": version("temporalio"),
        "python": platform.python_version(),
        "server": _says_version(Path(sys.executable).parent / "temporal"),
    }
    if DATABASE in cluster.targets:
        found[DATABASE] = _says_version(programs() / "postgres")
    return found


def _says_version(program: Path) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout.strip()


def new_folder() -> Path:
    """Where a campaign keeps what it leaves."""
    return Path(tempfile.mkdtemp(prefix="redrive-chaos-"))
