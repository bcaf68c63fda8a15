"""The demo's stage: a server, a worker, the sample tools, an order that meets all kinds of trouble, and its check."""

import asyncio
import logging
import shlex
import socket
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from urllib.parse import quote

import structlog
from pydantic import SecretStr
from temporalio.client import Client, WorkflowHandle

from contracts.base import Json, Model
from contracts.canonical import canonical_json
from contracts.dead_letters import Action, Entry
from contracts.identity import dead_letter_workflow_id, node_workflow_id
from contracts.runs import NodeResult, RunResult, RunState, RunStatus, Source
from workers.embedded import EmbeddedServer, embedded_server
from workers.sample_tools import RETRY_AFTER_SECONDS, SampleCall, SampleTools, sample_tools
from workers.schedules import schedule_sweep
from workers.settings import Settings
from workers.worker import running_worker

__all__ = ["DECISION", "ORDER", "RAISED_LIMIT", "RUN_ID", "DemoError", "NodeReport", "Stage", "shortfalls", "stage"]

RUN_ID: Final = "order-1042"

_RESERVATION: Final[Json] = {"$output": "reserve", "pointer": "/id"}
ORDER: Final[dict[str, Json]] = {
    "nodes": [
        {"id": "reserve", "tool": "inventory.reserve", "input": {"sku": "A-1", "quantity": 2}},
        {"id": "screen", "tool": "fraud.screen", "input": {"reservation": _RESERVATION, "country": "GB"}},
        {"id": "invoice", "tool": "billing.invoice", "input": {"reservation": _RESERVATION, "amount": 1999}},
        {"id": "label", "tool": "shipping.label", "input": {"reservation": _RESERVATION, "to": "12 Main Street"}},
        {
            "id": "charge",
            "tool": "payments.charge",
            "after": ["screen"],
            "input": {"amount": 1999, "invoice": {"$output": "invoice", "pointer": "/id"}},
        },
        {
            "id": "mail",
            "tool": "mail.send",
            "input": {
                "to": "ada@example.com",
                "charge": {"$output": "charge", "pointer": "/id"},
                "label": {"$output": "label", "pointer": "/label"},
            },
        },
    ]
}
"""The run that the demo starts: six nodes, the last one waits for all others."""

PARKED: Final = "charge"
"""The node that dead-letters."""

DECISION: Final[dict[str, Json]] = {"decided_by": "demo", "reason": "card limit raised"}
"""The payload of the signal that redrives it."""

RAISED_LIMIT: Final = 2500

_AGAIN_SECONDS: Final = 0.1
_HOST: Final = "127.0.0.1"


class DemoError(Exception):
    """Something is not as promised; the message says what."""


class NodeReport(Model):
    """One node, as its result and as its tool have it.

    Attributes:
        calls: How often the tool was called.
        questions: How often it was only asked what became of the operation.
        effects: How often it has really acted.
    """

    node: str
    tool: str
    attempts: int
    idempotency_key: str
    calls: int
    questions: int
    effects: int
    source: Source


@dataclass(frozen=True, slots=True)
class Stage:
    """All that the demo needs, running."""

    server: EmbeddedServer
    tools: SampleTools
    settings: Settings
    log: Path

    @property
    def client(self) -> Client:
        """The server's."""
        return self.server.client

    @property
    def run(self) -> WorkflowHandle[Any, Any]:
        """The demo's run."""
        return self.client.get_workflow_handle(RUN_ID)

    def link(self, workflow_id: str) -> str:
        """Where a workflow is to be seen in Temporal's UI."""
        namespace = quote(self.client.namespace, safe="")
        return f"{self.server.ui_url}/namespaces/{namespace}/workflows/{quote(workflow_id, safe='')}"

    @property
    def environment(self) -> dict[str, str]:
        """What the command needs in another terminal."""
        return {
            "TEMPORAL_ADDRESS": self.server.address,
            "REDRIVE_LEDGER": self.settings.ledger.get_secret_value(),
        }

    async def start(self) -> None:
        """Starts the run as any client would: plain JSON, by name."""
        await self.client.start_workflow("Run", ORDER, id=RUN_ID, task_queue=self.settings.task_queue)

    async def status(self) -> RunState:
        """How the run is doing."""
        return RunState.model_validate(await self.run.query("status"))

    async def dead_letter(self) -> Entry:
        """Waits until nothing can proceed before a decision, and returns the evidence.

        Raises:
            DemoError: the run ended, or something else than the charge needs a decision.
        """
        state = await self._stopped()
        if state.blocked != [PARKED]:
            raise DemoError(f"the run is {state.status}, blocked by {state.blocked}: it should wait for {PARKED} alone")
        while True:
            entry = Entry.model_validate(await self._entry().query("entry"))
            if entry.eligibility.redrivable or entry.eligibility.refusals:
                return entry
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _stopped(self) -> RunState:
        while True:
            state = await self.status()
            if state.status is not RunStatus.RUNNING:
                return state
            await asyncio.sleep(_AGAIN_SECONDS)

    async def redrive(self) -> None:
        """Removes the cause, and sends the signal that anybody would send."""
        self.tools.limit = RAISED_LIMIT
        await self._entry().signal(Action.REDRIVE.value, DECISION)

    @property
    def signal_command(self) -> str:
        """The same signal by Temporal's own command."""
        entry_id = dead_letter_workflow_id(RUN_ID, PARKED)
        payload = shlex.quote(canonical_json(DECISION))
        return f"temporal workflow signal --workflow-id {entry_id} --name redrive --input {payload}"

    async def result(self) -> RunResult:
        """Waits for the end of the run."""
        return RunResult.model_validate(await self.run.result())

    async def reports(self) -> list[NodeReport]:
        """What became of every node, in the order of the run."""
        return [await self._report(node_id) for node_id in (await self.status()).nodes]

    async def _report(self, node_id: str) -> NodeReport:
        handle: WorkflowHandle[Any, Any] = self.client.get_workflow_handle(node_workflow_id(RUN_ID, node_id))
        result = NodeResult.model_validate(await handle.result())
        tool = _tool_of(node_id)
        calls = [call for call in self.tools.calls if (call.tool, call.key) == (tool, result.idempotency_key)]
        return NodeReport(
            node=node_id,
            tool=tool,
            attempts=result.attempt_count,
            idempotency_key=result.idempotency_key,
            calls=sum(not call.question for call in calls),
            questions=sum(call.question for call in calls),
            effects=self.tools.effects(tool, result.idempotency_key),
            source=result.source,
        )

    def _entry(self) -> WorkflowHandle[Any, Any]:
        return self.client.get_workflow_handle(dead_letter_workflow_id(RUN_ID, PARKED))


@asynccontextmanager
async def stage(
    port: int | None, ui_port: int | None, notice: Callable[[SampleCall], None], remark: Callable[[str], None]
) -> AsyncGenerator[Stage]:
    """Runs the server, the tools and the worker, their state in a temporary folder: every demo begins from scratch.

    Args:
        port: Where Temporal listens; None: 7233, or a free one where that is taken.
        ui_port: Where its UI listens; None: 8233, or a free one.
        notice: Is told of every call that the tools see.
        remark: Is told what differs from what people expect.

    Raises:
        EmbeddedServerError: the server does not start.
    """
    port = _usual(7233, "Temporal", remark) if port is None else port
    ui_port = _usual(8233, "its UI", remark) if ui_port is None else ui_port
    with TemporaryDirectory(prefix="redrive-demo-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        log = folder / "worker.log"
        async with sample_tools(notice) as tools:
            settings = Settings(
                tools=folder / "tools.toml",
                ledger=SecretStr(f"sqlite:///{folder / 'ledger.db'}"),
                task_queue="redrive",
                alert_webhook=None,
                data=folder,
            )
            settings.tools.write_text(tools.catalog)
            with _logging_to(log):
                async with (
                    embedded_server(folder, port, ui_port, log_level="never", storage=settings.storage) as server,
                    running_worker(server.client, settings),
                ):
                    await schedule_sweep(server.client, settings.task_queue)
                    yield Stage(server, tools, settings, log)


@contextmanager
def _logging_to(path: Path) -> Generator[None]:
    """What the worker has to say would only be in the way of the story."""
    before = structlog.get_config()
    root = logging.getLogger()
    with path.open("w", encoding="utf-8") as file:
        handler = logging.StreamHandler(file)
        root.addHandler(handler)
        structlog.configure(
            processors=[structlog.processors.TimeStamper(fmt="iso"), structlog.processors.KeyValueRenderer()],
            logger_factory=structlog.WriteLoggerFactory(file),
            cache_logger_on_first_use=False,
        )
        try:
            yield
        finally:
            root.removeHandler(handler)
            structlog.configure(**before)


def _usual(port: int, what: str, remark: Callable[[str], None]) -> int:
    """The port where people expect it; 0, which takes a free one, where somebody else has it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            remark(f"Port {port} is taken, by another Temporal perhaps: {what} listens on a free one instead.")
            return 0
    return port


def _tool_of(node_id: str) -> str:
    """The tool that a node of the order calls."""
    return next(str(node["tool"]) for node in _nodes() if node["id"] == node_id)


def _nodes() -> list[dict[str, Json]]:
    nodes = ORDER["nodes"]
    assert isinstance(nodes, list)
    return [node for node in nodes if isinstance(node, dict)]


def shortfalls(reports: Sequence[NodeReport], calls: Sequence[SampleCall]) -> list[str]:
    """Everything that is not as promised; an empty list if all is well."""
    found = [
        f"{report.node}: {report.tool} has counted {report.effects} effects instead of 1"
        for report in reports
        if report.effects != 1
    ]
    for report in reports:
        keys = {call.key for call in calls if call.tool == report.tool}
        if keys != {report.idempotency_key}:
            found.append(f"{report.node}: {report.tool} has seen the keys {sorted(keys)} instead of one and the same")
    seen = {report.node: (report.calls, report.source) for report in reports}
    for node, expected in _EXPECTED.items():
        if seen.get(node) != expected:
            found.append(f"{node}: (calls, source) is {seen.get(node)} instead of {expected}")
    limited = [call.at for call in calls if call.tool == "billing.invoice"]
    if len(limited) > 1 and (waited := limited[1] - limited[0]) < RETRY_AFTER_SECONDS:
        found.append(f"invoice: called again after {waited:.2f} s; its tool asked for {RETRY_AFTER_SECONDS} s")
    return found


_EXPECTED: Final[dict[str, tuple[int, Source]]] = {
    "reserve": (1, Source.EXECUTED),
    "screen": (2, Source.EXECUTED),
    "invoice": (2, Source.EXECUTED),
    "label": (1, Source.RECONCILED),
    "charge": (2, Source.EXECUTED),
    "mail": (1, Source.EXECUTED),
}
"""Calls that each tool sees, and where the result came from."""
