"""The laboratory of the integration tests: a real server, a real worker, a tool server that misbehaves."""

import itertools
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import SecretStr
from temporalio.client import Client, WorkflowHandle
from temporalio.service import RPCError, RPCStatusCode

from contracts.dead_letters import DecisionRecord, Entry
from contracts.identity import dead_letter_workflow_id
from contracts.runs import RunState
from tests.tool_server import ToolServer
from tests.waiting import eventually
from workers.client import converter_with
from workers.settings import Settings
from workers.worker import running_worker

FAST_RETRY: Mapping[str, Any] = {
    category: {"initial": "20ms", "maximum": "100ms"} for category in ("TRANSIENT", "RATE_LIMITED", "DEPENDENCY_DOWN")
}
"""Policies as they are, only sooner."""

NODE_MODES = ("workflow", "fast")

_numbers = itertools.count(1)


@dataclass
class Bench:
    """One test's own tools, catalog, ledger and task queue."""

    client: Client
    tools: ToolServer
    folder: Path
    name: str
    catalog: dict[str, Any] = field(default_factory=dict)
    webhook: str | None = None
    ledger: str | None = None
    """Where another ledger is than in the folder."""
    storage: str | None = None
    """Where large payloads are kept; see `keep_large_payloads`."""
    node_mode: str = "workflow"
    """What the spec of a run says unless the test does."""

    def unique(self, tool: str) -> str:
        """The name under which the tool server knows a tool of this test."""
        return f"{self.name}-{tool}"

    async def tool(
        self,
        name: str,
        steps: list[dict[str, Any]] | None = None,
        *,
        dedupe: bool = False,
        reconcile: bool | dict[str, Any] = False,
        **settings: Any,
    ) -> str:
        """Adds a tool to the catalog, and its script to the tool server."""
        remote = self.unique(name)
        if steps is not None or dedupe:
            await self.tools.script(remote, steps or [{}], dedupe=dedupe)
        entry: dict[str, Any] = {"url": self.tools.tool_url(remote), "timeout": "5s", "retry": dict(FAST_RETRY)}
        entry |= settings
        if reconcile:
            entry["reconcile"] = {
                "url": self.tools.reconcile_url(remote),
                "output": "/result",
                "absent_after": "100ms",
            } | (reconcile if isinstance(reconcile, dict) else {})
        self.catalog[name] = entry
        return name

    def write(self) -> Path:
        """Writes ``tools.toml``."""
        path = self.folder / "tools.toml"
        path.write_text(tomli_w.dumps({"tools": self.catalog}))
        return path

    @property
    def ledger_url(self) -> str:
        return self.ledger or f"sqlite:///{self.folder / 'ledger.db'}"

    @property
    def queue(self) -> str:
        return f"redrive-{self.name}"

    def settings(self) -> Settings:
        return Settings(
            tools=self.write(),
            ledger=SecretStr(self.ledger_url),
            task_queue=self.queue,
            alert_webhook=SecretStr(self.webhook) if self.webhook else None,
            data=self.folder,
            storage=self.storage,
        )

    def keep_large_payloads(self, storage: str | None) -> None:
        """Has this bench's client and its workers keep large payloads there."""
        self.storage = storage
        config = self.client.config()
        config["data_converter"] = converter_with(storage)
        self.client = Client(**config)

    def environment(self, address: str) -> dict[str, str]:
        """What a worker or a command in another process needs to find this bench."""
        return {
            **os.environ,
            "TEMPORAL_ADDRESS": address,
            "REDRIVE_TOOLS": str(self.write()),
            "REDRIVE_LEDGER": self.ledger_url,
            "REDRIVE_TASK_QUEUE": self.queue,
            "REDRIVE_ALERT_WEBHOOK": self.webhook or "",
            "REDRIVE_STORAGE": self.storage or "",
        }

    @asynccontextmanager
    async def worker(self) -> AsyncGenerator[None]:
        """A worker on this bench's catalog."""
        async with running_worker(self.client, self.settings()):
            yield

    async def start(self, *nodes: dict[str, Any], run_id: str | None = None, **spec: Any) -> WorkflowHandle[Any, Any]:
        """Starts a run as any client would: plain JSON, by name."""
        return await self.client.start_workflow(
            "Run",
            {"nodes": list(nodes), "node_mode": self.node_mode, **spec},
            id=run_id or f"{self.name}-run-{next(_numbers)}",
            task_queue=self.queue,
        )

    async def status(self, run: WorkflowHandle[Any, Any]) -> RunState:
        return RunState.model_validate(await run.query("status"))

    def dead_letter(self, run: WorkflowHandle[Any, Any], node: str) -> WorkflowHandle[Any, Any]:
        return self.client.get_workflow_handle(dead_letter_workflow_id(run.id, node))

    async def entry(self, run: WorkflowHandle[Any, Any], node: str) -> Entry:
        return Entry.model_validate(await self.dead_letter(run, node).query("entry"))

    async def parked(self, run: WorkflowHandle[Any, Any], node: str, redrives: int = 0) -> Entry:
        """Waits until a node has a dead letter that has been checked, and returns its entry."""

        async def entry() -> Entry | None:
            try:
                found = await self.entry(run, node)
            except RPCError as error:
                # A dead letter that has just been started is not ready to be asked on the time-skipping server.
                if error.status in (RPCStatusCode.NOT_FOUND, RPCStatusCode.FAILED_PRECONDITION):
                    return None
                raise
            checked = found.eligibility.redrivable or found.eligibility.refusals
            return found if found.redrives == redrives and found.status == "AWAITING_DECISION" and checked else None

        return await eventually(entry, f"a dead letter of {node} after {redrives} redrives")

    async def decide(self, run: WorkflowHandle[Any, Any], node: str, action: str, **payload: Any) -> DecisionRecord:
        """Sends a decision as an update and returns its record."""
        defaults: dict[str, Any] = {"decided_by": "tester"}
        if action in ("redrive", "discard", "resolve"):
            defaults["reason"] = "because"
        record = await self.dead_letter(run, node).execute_update(action, defaults | payload)
        return DecisionRecord.model_validate(record)
