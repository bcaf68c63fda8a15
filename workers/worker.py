"""The worker: workflows and activities, wired to the catalog, the secrets and the ledger."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any, Final

import structlog
from temporalio.client import Client
from temporalio.worker import Worker

from activities.admit import Admit
from activities.alert import Alert
from activities.call_tool import CallTool
from activities.context import Context, queue_of
from activities.decisions import CommitDecisions
from activities.evidence import GatherEvidence
from activities.http import HttpClients
from activities.ledger import open_ledger
from activities.preflight import Preflight
from activities.reconcile import ReconcileOperation
from activities.secrets import Secrets
from contracts.tools import Catalog, Tool, load_catalog
from workers.client import register_search_attributes
from workers.settings import Settings
from workflows.dead_letter import DeadLetter
from workflows.node import Node
from workflows.run import Run

__all__ = ["WORKFLOWS", "running_worker", "serve"]

WORKFLOWS: Final[Sequence[type]] = (Run, Node, DeadLetter)

_HEARTBEAT_THROTTLE: Final = timedelta(seconds=3)
"""A lost worker is noticed after the heartbeat timeout (15 s), which the SDK's own throttle would starve."""
_GRACE: Final = timedelta(seconds=30)
"""Beyond the longest tool timeout: to commit what came of the last calls."""

_log = structlog.get_logger("redrive.worker")


@asynccontextmanager
async def running_worker(client: Client, settings: Settings) -> AsyncGenerator[None]:
    """Runs a worker; on leaving, calls in flight finish and commit first.

    Raises:
        CatalogError: the catalog or a secret it names is not usable; nothing was polled.
        LedgerUnavailableError: the ledger cannot be opened.
        TemporalUnavailableError: the namespace lacks the search attributes and they cannot be added from here.
    """
    # httpx logs every URL it calls; the webhook's is a secret, and a tool's may hold what an input held.
    # httpcore logs every header at DEBUG, those with secrets too.
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    catalog = load_catalog(settings.tools)
    secrets = Secrets.read(catalog, os.environ)
    async with AsyncExitStack() as stack:
        ledger = await open_ledger(settings.ledger.get_secret_value())
        stack.push_async_callback(ledger.close)
        await register_search_attributes(client)
        http = HttpClients(secrets)
        stack.push_async_callback(http.close)
        context = Context(catalog, secrets, http, ledger, settings.task_queue)
        workers = _workers(client, settings, context)
        for worker in workers:
            await stack.enter_async_context(worker)
        _log.info("polling", task_queue=settings.task_queue, namespace=client.namespace, tools=len(catalog.tools))
        try:
            yield
        finally:
            # All at once: the stack would stop one after the other, and the last would go on taking work until then.
            await asyncio.gather(*(worker.shutdown() for worker in workers))


def _workers(client: Client, settings: Settings, context: Context) -> list[Worker]:
    """The worker, and one more for each tool with a rate: its queue is paced by the server, across all workers."""
    webhook = settings.alert_webhook
    call_tool = CallTool(context)
    decisions = CommitDecisions(context)
    grace = max(tool.timeout for tool in context.catalog.tools.values()) + _GRACE
    shared: dict[str, Any] = {
        "graceful_shutdown_timeout": grace,
        "max_heartbeat_throttle_interval": _HEARTBEAT_THROTTLE,
        "default_heartbeat_throttle_interval": _HEARTBEAT_THROTTLE,
    }
    main = Worker(
        client,
        task_queue=settings.task_queue,
        workflows=WORKFLOWS,
        activities=[
            Admit(context).admit,
            call_tool.call_tool,
            ReconcileOperation(context).reconcile,
            GatherEvidence(context).gather_evidence,
            Preflight(context).preflight,
            decisions.decide,
            decisions.cancel_nodes,
            Alert(webhook.get_secret_value() if webhook is not None else None).alert,
        ],
        **shared,
    )
    paced = [
        Worker(
            client,
            task_queue=queue_of(tool, settings.task_queue),
            activities=[call_tool.call_tool],
            max_task_queue_activities_per_second=tool.rate_per_second,
            **shared,
        )
        for tool in _rated(context.catalog)
    ]
    return [main, *paced]


def _rated(catalog: Catalog) -> list[Tool]:
    return [tool for tool in catalog.tools.values() if tool.rate_per_second is not None]


async def serve(client: Client, settings: Settings) -> None:
    """Runs a worker until SIGTERM or SIGINT, then lets it finish; see `running_worker` for what it raises."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running_worker(client, settings):
        await stop.wait()
        _log.info("stopping: no new work is taken, calls in flight finish")
