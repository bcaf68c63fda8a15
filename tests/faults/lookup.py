"""What the faults' tests ask: the ledger from outside, and Temporal about what is pending."""

from typing import Any

from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import WorkflowHandle
from temporalio.service import RPCError, RPCStatusCode

from activities.ledger import open_ledger
from activities.ledger.records import OperationView
from contracts.dispatch import FailureDetails
from contracts.identity import OperationId, node_workflow_id
from tests.lab import Bench
from workers.client import DATA_CONVERTER


async def operation(bench: Bench, run: WorkflowHandle[Any, Any], node: str) -> OperationView:
    """A node's first operation, as the ledger has it."""
    ledger = await open_ledger(bench.ledger_url)
    try:
        view = await ledger.operation(str(OperationId(run_id=run.id, node_id=node, logical_attempt=1)))
    finally:
        await ledger.close()
    assert view is not None
    return view


async def pending_call(bench: Bench, run: WorkflowHandle[Any, Any], node: str) -> PendingActivityInfo | None:
    """A node's call, while Temporal waits for its end."""
    handle = bench.client.get_workflow_handle(node_workflow_id(run.id, node))
    try:
        pending = (await handle.describe()).raw_description.pending_activities
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return None
        raise
    return next((activity for activity in pending if activity.activity_type.name == "call_tool"), None)


async def last_failure(call: PendingActivityInfo) -> FailureDetails | None:
    """Why a pending call's last delivery came back."""
    details = call.last_failure.application_failure_info.details.payloads
    return (await DATA_CONVERTER.decode(details, [FailureDetails]))[0] if details else None
