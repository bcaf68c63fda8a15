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
from tests.waiting import eventually
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


async def node_result(bench: Bench, run: WorkflowHandle[Any, Any], node: str) -> dict[str, Any]:
    """What a node has ended with: its workflow, or the run's own first attempt."""
    handle = bench.client.get_workflow_handle(node_workflow_id(run.id, node))
    try:
        result: dict[str, Any] = await handle.result()
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:
            raise
    else:
        return result
    operation_id = OperationId(run_id=run.id, node_id=node, logical_attempt=1)
    async for event in run.fetch_history_events():
        payloads = event.activity_task_completed_event_attributes.result.payloads
        if event.HasField("marker_recorded_event_attributes"):
            payloads = event.marker_recorded_event_attributes.details["result"].payloads
        for found in await DATA_CONVERTER.decode(payloads):
            # What was made at once says how long it took as well.
            answer = (found.get("answer") or found) if isinstance(found, dict) else {}
            if answer.get("operation_id") == str(operation_id):
                return {**answer, "idempotency_key": operation_id.idempotency_key}
    raise AssertionError(f"{operation_id} has no result")


async def pending_call(bench: Bench, run: WorkflowHandle[Any, Any], node: str) -> PendingActivityInfo | None:
    """A node's call, while Temporal waits for its end."""
    for workflow_id, call in ((node_workflow_id(run.id, node), "call_tool"), (run.id, node)):
        try:
            pending = (await bench.client.get_workflow_handle(workflow_id).describe()).raw_description
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                continue
            raise
        for activity in pending.pending_activities:
            if activity.activity_type.name == "call_tool" and activity.activity_id == call:
                return activity
    return None


async def dispatched(bench: Bench, run: WorkflowHandle[Any, Any], node: str) -> PendingActivityInfo:
    """A node's call, as soon as the server knows of it, which it does of a run's own one after a second."""

    async def found() -> PendingActivityInfo | None:
        return await pending_call(bench, run, node)

    call: PendingActivityInfo = await eventually(found, f"a pending call of {node}")
    return call


async def last_failure(call: PendingActivityInfo) -> FailureDetails | None:
    """Why a pending call's last delivery came back."""
    details = call.last_failure.application_failure_info.details.payloads
    return (await DATA_CONVERTER.decode(details, [FailureDetails]))[0] if details else None
