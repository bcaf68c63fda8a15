"""How a dead letter is started: by its node, or by ``Sweep`` where there is no node any more."""

from typing import Any

from temporalio import workflow
from temporalio.common import SearchAttributePair, TypedSearchAttributes
from temporalio.workflow import ChildWorkflowCancellationType, ParentClosePolicy

with workflow.unsafe.imports_passed_through():
    from contracts.dispatch import DeadLetterInput, DeadLetterResult
    from contracts.identity import dead_letter_workflow_id
    from workflows.attributes import CATEGORY, FINGERPRINT, RUN_ID, STATUS, TOOL

__all__ = ["DeadLetterHandle", "open_dead_letter"]

DeadLetterHandle = workflow.ChildWorkflowHandle[Any, DeadLetterResult]


async def open_dead_letter(start: DeadLetterInput) -> DeadLetterHandle:
    """Starts a dead letter, which outlives whoever starts it.

    Raises:
        WorkflowAlreadyStartedError: it is open.
    """
    entry = start.entry
    return await workflow.start_child_workflow(
        "DeadLetter",
        start,
        id=dead_letter_workflow_id(entry.run_id, entry.node_id),
        result_type=DeadLetterResult,
        parent_close_policy=ParentClosePolicy.ABANDON,
        cancellation_type=ChildWorkflowCancellationType.ABANDON,
        search_attributes=TypedSearchAttributes(
            [
                SearchAttributePair(RUN_ID, entry.run_id),
                SearchAttributePair(TOOL, entry.tool.name),
                SearchAttributePair(CATEGORY, entry.error.category),
                SearchAttributePair(STATUS, entry.status),
                SearchAttributePair(FINGERPRINT, entry.failure_fingerprint),
            ]
        ),
        static_summary=f"{entry.node_id}: {entry.error.category} {entry.error.code} at {entry.tool.name}",
        static_details=f"{entry.error.message}\n\nThe `entry` query has the whole evidence.",
    )
