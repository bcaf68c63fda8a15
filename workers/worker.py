"""The worker: workflows and activities, wired to the catalog, the secrets and the ledger."""

import asyncio
import ipaddress
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

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
from activities.ledger.interface import Ledger
from activities.outputs import ReadOutputs
from activities.preflight import Preflight
from activities.reconcile import ReconcileOperation
from activities.secrets import Secrets
from activities.sweep import Sweeping
from contracts.tools import Catalog, Tool, load_catalog
from workers.client import register_search_attributes
from workers.runner import workflow_runner
from workers.settings import Settings
from workers.stopping import until_stopped
from workers.storage import open_storage
from workflows.dead_letter import DeadLetter
from workflows.node import Node
from workflows.run import Run
from workflows.sweep import Sweep

__all__ = ["WORKFLOWS", "Wiring", "running_worker", "serve"]

WORKFLOWS: Final[Sequence[type]] = (Run, Node, DeadLetter, Sweep)

_HEARTBEAT_THROTTLE: Final = timedelta(seconds=3)
"""A lost worker is noticed after the heartbeat timeout (15 s), which the SDK's own throttle would starve."""
_ENDLESS: Final = 60
"""Seconds of one workflow task after which its code is taken to loop for ever; the slowest machine is done with any."""
_EAGER: Final = 20
"""How many calls a workflow task may bring along instead of queueing them. With 3, the default, a fast run's node costs
the server 3.6 ms of CPU, with 20 it is 2.7 ms, with 100 2.3 ms; but what is brought along passes by everybody else."""
_AT_ONCE: Final = 1_000
"""How many calls are made within workflow tasks; a hundred, the default, are one run's."""
_GRACE: Final = timedelta(seconds=30)
"""Beyond the longest tool timeout: to commit what came of the last calls."""

_log = structlog.get_logger("redrive.worker")


@dataclass(frozen=True, slots=True)
class Wiring:
    """What a worker reaches the ledger and the tools with."""

    open_ledger: Callable[[str], Awaitable[Ledger]] = open_ledger
    http_clients: Callable[[Secrets], HttpClients] = HttpClients


@asynccontextmanager
async def running_worker(client: Client, settings: Settings, wiring: Wiring = Wiring()) -> AsyncGenerator[None]:
    """Runs a worker; on leaving, calls in flight finish and commit first.

    Raises:
        CatalogError: the catalog or a secret it names is not usable; nothing was polled.
        LedgerUnavailableError: the ledger cannot be opened.
        StorageError: the storage for large payloads is not there, or cannot be written.
        TemporalUnavailableError: the namespace lacks the search attributes and they cannot be added from here.
    """
    # Every try to reach a database that is away; what comes of it is told by whoever needed the ledger.
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)
    catalog = load_catalog(settings.tools)
    secrets = Secrets.read(catalog, os.environ)
    if settings.storage is not None:
        await open_storage(settings.storage).check()
    async with AsyncExitStack() as stack:
        ledger = await wiring.open_ledger(settings.ledger.get_secret_value())
        stack.push_async_callback(ledger.close)
        await register_search_attributes(client)
        _warn_of_a_ledger_for_one_machine(client, settings)
        http = wiring.http_clients(secrets)
        stack.push_async_callback(http.close)
        context = Context(catalog, secrets, http, ledger, settings.task_queue, settings.limits)
        call_tool = CallTool(context)
        # After the workers: a call may be under way that no activity waits for.
        stack.push_async_callback(call_tool.finish)
        workers = _workers(client, settings, context, call_tool)
        for worker in workers:
            await stack.enter_async_context(worker)
        _log.info(
            "polling",
            task_queue=settings.task_queue,
            namespace=client.namespace,
            tools=len(catalog.tools),
            ledger=ledger.name,
        )
        try:
            yield
        finally:
            _log.info("stopping: no new work is taken, calls in flight finish")
            # All at once: the stack would stop one after the other, and the last would go on taking work until then.
            await asyncio.gather(*(worker.shutdown() for worker in workers))


def _warn_of_a_ledger_for_one_machine(client: Client, settings: Settings) -> None:
    address = client.service_client.config.target_host
    if settings.ledger.get_secret_value().startswith("sqlite:") and not _is_loopback(address):
        _log.warning(
            "the SQLite ledger is for one machine: a worker on another one, with a ledger of its own, would know "
            "nothing of what this one has sent; for more than one machine set REDRIVE_LEDGER to postgresql://...",
            temporal=address,
        )


def _is_loopback(address: str) -> bool:
    host = urlsplit(f"//{address}").hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _workers(client: Client, settings: Settings, context: Context, call_tool: CallTool) -> list[Worker]:
    """The worker, and one more for each tool with a rate: its queue is paced by the server, across all workers."""
    webhook = settings.alert_webhook
    decisions = CommitDecisions(context)
    sweeping = Sweeping(context)
    grace = max(tool.timeout for tool in context.catalog.tools.values()) + _GRACE
    shared: dict[str, Any] = {
        "max_eager_activity_reservations_per_workflow_task": _EAGER,
        "graceful_shutdown_timeout": grace,
        "max_heartbeat_throttle_interval": _HEARTBEAT_THROTTLE,
        "default_heartbeat_throttle_interval": _HEARTBEAT_THROTTLE,
    }
    main = Worker(
        client,
        task_queue=settings.task_queue,
        workflows=WORKFLOWS,
        workflow_runner=workflow_runner(client.data_converter),
        max_concurrent_local_activities=_AT_ONCE,
        activities=[
            Admit(context).admit,
            call_tool.call_tool,
            call_tool.call_at_once,
            ReconcileOperation(context).reconcile,
            GatherEvidence(context).gather_evidence,
            Preflight(context).preflight,
            ReadOutputs(context).read_outputs,
            decisions.decide,
            decisions.cancel_nodes,
            sweeping.look_around,
            sweeping.gather_orphan,
            Alert(webhook.get_secret_value() if webhook is not None else None).alert,
        ],
        **shared,
    )
    _give_time(main)
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


def _give_time(worker: Worker) -> None:
    """Lets a busy machine finish a workflow task that has much to read, as 10,000 signals or megabytes of outputs.

    After two seconds the SDK takes that for a deadlock and interrupts the workflow, which it then often cannot evict:
    this worker has lost it, and does not end at SIGTERM any more. A task that only takes longer than the server waits,
    ten seconds, is had again. The SDK has no option for this but ``debug_mode``: workflows in the main thread.
    """
    inner = worker._workflow_worker  # pyright: ignore[reportPrivateUsage]  # there is no other way
    assert inner is not None
    inner._deadlock_timeout_seconds = _ENDLESS  # pyright: ignore[reportPrivateUsage]


def _rated(catalog: Catalog) -> list[Tool]:
    return [tool for tool in catalog.tools.values() if tool.rate_per_second is not None]


async def serve(client: Client, settings: Settings) -> None:
    """Runs a worker until SIGTERM or SIGINT, then lets it finish; see `running_worker` for what it raises."""
    with until_stopped():
        async with running_worker(client, settings):
            await asyncio.Event().wait()
