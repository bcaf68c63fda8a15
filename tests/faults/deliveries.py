"""Deliveries of `call_tool` as Temporal makes them, but as many as wanted, at once, and of any age."""

import dataclasses
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.call_tool import CallTool
from activities.context import Context
from activities.http import HttpClients
from activities.ledger import open_ledger
from activities.reconcile import ReconcileOperation
from activities.secrets import Secrets
from contracts.dispatch import CallResult, Dispatch, FailureDetails, ReconcileAnswer, ReconcileRequest
from contracts.identity import trace_id_of
from contracts.tools import load_catalog
from tests.lab import Bench


def dispatch(bench: Bench, tool: str, run_id: str | None = None) -> Dispatch:
    """What a node would send for its first operation."""
    run_id = run_id or f"{bench.name}-{tool}"
    now = datetime.now(UTC)
    return Dispatch(
        run_id=run_id,
        node_id="call",
        logical_attempt=1,
        redrives=0,
        tool=tool,
        fingerprint=load_catalog(bench.write()).tools[tool].fingerprint,
        input={"amount": 1},
        deadline=now + timedelta(days=7),
        node_started_at=now,
        correlation_id=run_id,
        trace_id=trace_id_of(run_id, None),
    )


class Consumer:
    """One worker's `call_tool`, with a ledger connection and HTTP connections of its own.

    Attributes:
        heartbeat: What the last heartbeat said, of whichever delivery.
    """

    def __init__(self, context: Context) -> None:
        self.heartbeat: int | None = None
        self.ledger = context.ledger
        self._calls = CallTool(context)
        self._reconcile = ReconcileOperation(context).reconcile

    @classmethod
    @asynccontextmanager
    async def of(cls, bench: Bench) -> AsyncGenerator["Consumer", None]:
        """A worker of this bench. Every tool must be there."""
        catalog = load_catalog(bench.write())
        secrets = Secrets.read(catalog, os.environ)
        http = HttpClients(secrets)
        ledger = await open_ledger(bench.ledger_url)
        try:
            yield cls(Context(catalog, secrets, http, ledger, bench.queue))
        finally:
            await http.close()
            await ledger.close()

    async def deliver(
        self, work: Dispatch, *, scheduled: datetime, attempt: int = 1, attempted: int | None = None
    ) -> CallResult:
        """Performs one delivery.

        Args:
            work: The dispatch.
            scheduled: Temporal's time of this delivery.
            attempt: Temporal's number of it.
            attempted: What an earlier delivery's heartbeat said: the number of the last one that got an attempt.
        """
        environment = ActivityEnvironment()
        environment.on_heartbeat = self._note
        environment.info = dataclasses.replace(
            environment.info,
            activity_type="call_tool",
            activity_id="call_tool",
            attempt=attempt,
            current_attempt_scheduled_time=scheduled,
            scheduled_time=scheduled,
            started_time=datetime.now(UTC),
            heartbeat_details=[] if attempted is None else [attempted],
            heartbeat_timeout=timedelta(seconds=15),
            start_to_close_timeout=timedelta(seconds=65),
            workflow_id=f"{work.run_id}/{work.node_id}",
        )
        return await environment.run(self._calls.call_tool, work)

    async def deliver_at_once(self, work: Dispatch) -> CallResult | FailureDetails | None:
        """Performs a first attempt as a run does, within its workflow task."""
        environment = ActivityEnvironment()
        environment.info = dataclasses.replace(
            environment.info,
            activity_type="call_at_once",
            activity_id="call_tool",
            is_local=True,
            start_to_close_timeout=timedelta(seconds=65),
            workflow_id=work.run_id,
        )
        first = work.model_copy(update={"first_attempt": True, "made_at": datetime.now(UTC)})
        made = await environment.run(self._calls.call_at_once, first)
        return made.answer

    def _note(self, attempted: int) -> None:
        self.heartbeat = attempted

    async def reconcile(self, work: Dispatch) -> ReconcileAnswer:
        """Asks the tool what became of a dispatch's operation, as its node would."""
        request = ReconcileRequest(
            run_id=work.run_id,
            node_id=work.node_id,
            logical_attempt=work.logical_attempt,
            tool=work.tool,
            input=work.input,
            correlation_id=work.correlation_id,
            trace_id=work.trace_id,
        )
        return await ActivityEnvironment().run(self._reconcile, request)

    async def refused(self, work: Dispatch, **delivery: Any) -> ApplicationError:
        """Performs one delivery that is to come back empty-handed."""
        try:
            result = await self.deliver(work, **delivery)
        except ApplicationError as error:
            return error
        raise AssertionError(f"it was answered: {result}")


def details(error: ApplicationError) -> FailureDetails:
    """The retry envelope."""
    return FailureDetails.model_validate(error.details[0])
