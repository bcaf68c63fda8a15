"""The ledger, from outside: what it holds, and forgetting what nobody can need any more."""

from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from typing import Final

from temporalio.client import Client

from activities.executions import describe
from activities.ledger import Ledger
from activities.ledger.records import EndedRun, OperationRow
from contracts.base import Model, UtcTime
from contracts.failures import OperationState
from contracts.identity import dead_letter_workflow_id, node_workflow_id

__all__ = ["PruneReport", "list_operations", "prune"]

_PAGE: Final = 200


class PruneReport(Model):
    """What a prune has forgotten, or would.

    Attributes:
        before: Only what had ended before then.
        kept: Runs that are old enough, but that Temporal still knows of: an open workflow needs its ledger, a closed
            one can be reset.
    """

    dry_run: bool
    before: UtcTime
    runs: int
    operations: int
    attempts: int
    kept: int


async def list_operations(
    ledger: Ledger, state: OperationState, run_id: str | None, limit: int
) -> tuple[list[OperationRow], bool]:
    """Operations in a state, by their id, and whether there are more."""
    found = await ledger.operations(state, run_id, "", limit + 1)
    return found[:limit], len(found) > limit


async def prune(client: Client, ledger: Ledger, older_than: timedelta, dry_run: bool) -> PruneReport:
    """Forgets the runs that ended long ago, of which nothing is unsettled, and that Temporal has forgotten as well.

    A forgotten operation would be performed again. So nothing is dropped of a run that could still be reset, of which
    anything is open (paused ones included), or whose effects are uncertain.
    """
    before = datetime.now(UTC) - older_than
    runs = operations = attempts = kept = 0
    async for run in _ended_runs(ledger, before):
        if await _is_known(client, run):
            kept += 1
            continue
        dropped = await ledger.prune(run, before, dry_run=dry_run)
        runs += 1 if dropped.nodes else 0
        operations += dropped.operations
        attempts += dropped.attempts
    return PruneReport(dry_run=dry_run, before=before, runs=runs, operations=operations, attempts=attempts, kept=kept)


async def _ended_runs(ledger: Ledger, before: datetime) -> AsyncGenerator[EndedRun]:
    after = ""
    while page := await ledger.ended_runs(before, after, _PAGE):
        for run in page:
            yield run
        after = page[-1].run_id


async def _is_known(client: Client, run: EndedRun) -> bool:
    """Whether Temporal still knows any workflow of a run; by `describe`, since a list may be behind."""
    ids = [run.run_id]
    for node_id in run.node_ids:
        ids += [node_workflow_id(run.run_id, node_id), dead_letter_workflow_id(run.run_id, node_id)]
    for workflow_id in ids:
        if await describe(client, workflow_id) is not None:
            return True
    return False
