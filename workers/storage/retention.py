"""Deleting the payloads that nobody can need any more."""

from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from typing import Final

from temporalio.client import Client

from activities.executions import describe, executions, quote_value
from contracts.base import Model, UtcTime
from workers.storage.interface import Storage, Stored

__all__ = ["YOUNG", "TidyReport", "prune"]

YOUNG: Final = timedelta(days=1)
"""What was stored since then always stays: whatever refers to it may be on its way to Temporal."""


class TidyReport(Model):
    """What a prune has deleted, or would.

    Attributes:
        before: Only what was stored before then.
        runs: Runs of which something was deleted.
        payloads: How many payloads that was.
        bytes: How much room they took.
        kept: Runs whose payloads are old enough, but of which Temporal still knows a workflow.
    """

    dry_run: bool
    before: UtcTime
    runs: int
    payloads: int
    bytes: int
    kept: int


async def prune(client: Client, storage: Storage, older_than: timedelta, dry_run: bool) -> TidyReport:
    """Deletes payloads that were stored long ago, for runs of which Temporal knows nothing any more.

    A run, its nodes and their dead letters refer to the same payloads. As long as one of them is open it needs them
    (a parked one for months), and as long as a closed one is kept it can be looked at and reset. So Temporal's own
    retention decides, run by run: as `redrive ledger prune` has it.

    Raises:
        StorageError: the storage cannot be used.
    """
    before = datetime.now(UTC) - max(older_than, YOUNG)
    runs = payloads = size = kept = 0
    async for run_id, found in _by_run(storage, client.namespace, before):
        if await _is_known(client, run_id):
            kept += 1
            continue
        if not dry_run:
            await storage.drop(found, before)
        runs += 1
        payloads += len(found)
        size += sum(one.size for one in found)
    return TidyReport(dry_run=dry_run, before=before, runs=runs, payloads=payloads, bytes=size, kept=kept)


async def _by_run(storage: Storage, namespace: str, before: datetime) -> AsyncGenerator[tuple[str, list[Stored]]]:
    found: dict[str, list[Stored]] = {}
    async for stored in storage.older_than(namespace, before):
        found.setdefault(stored.run_id, []).append(stored)
    for run_id, payloads in found.items():
        yield run_id, payloads


async def _is_known(client: Client, run_id: str) -> bool:
    """Whether Temporal knows the run, or any workflow of it; where that cannot be asked, it may."""
    own, others = quote_value(run_id), quote_value(f"{run_id}/")
    if not run_id or own is None or others is None or await describe(client, run_id) is not None:
        return True
    async for _ in executions(client, [f"WorkflowId = {own} OR WorkflowId STARTS_WITH {others}"], page=1):
        return True
    return False
