"""What the server knows of a workflow, whoever is at work.

The SDK's own ``describe`` and ``list_workflows`` raise for a *paused* workflow; one of those must not hide the others,
so the raw service is asked.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from temporalio.api.common.v1 import Memo, WorkflowExecution
from temporalio.api.enums.v1 import WorkflowExecutionStatus
from temporalio.api.workflow.v1 import WorkflowExecutionInfo
from temporalio.api.workflowservice.v1 import DescribeWorkflowExecutionRequest, ListWorkflowExecutionsRequest
from temporalio.client import Client
from temporalio.common import SearchAttributeKey, TypedSearchAttributes
from temporalio.converter import decode_typed_search_attributes
from temporalio.service import RPCError, RPCStatusCode

__all__ = ["NEWEST", "OPEN", "Execution", "describe", "executions", "matches", "quote_value"]

OPEN: Final = "CloseTime IS NULL"
"""A list filter: every execution that has not ended, paused ones included."""
NEWEST: Final = "ExecutionStatus != 'ContinuedAsNew'"
"""A list filter: of a chain that has continued as new, only the last execution."""

_PAGE: Final = 200
_PREFIX: Final = "WORKFLOW_EXECUTION_STATUS_"


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution of a workflow, as the server has it.

    Attributes:
        first_run_id: The first execution of its chain of resets and continuations; only `describe` knows it.
        status: Temporal's own name for it, such as ``CONTINUED_AS_NEW``.
        cancelling: Whether it was asked to cancel; only `describe` knows it.
        events: How long its history is; the same.
    """

    workflow_id: str
    workflow_run_id: str
    first_run_id: str
    workflow_type: str
    status: str
    started_at: datetime
    ended_at: datetime | None
    task_queue: str
    attributes: TypedSearchAttributes
    memo: Memo
    events: int
    cancelling: bool = False


def _execution(info: WorkflowExecutionInfo, task_queue: str = "", cancelling: bool = False) -> Execution:
    try:
        status = WorkflowExecutionStatus.Name(info.status).removeprefix(_PREFIX)
    except ValueError:
        # A newer server's; it is shown as it came rather than hiding the workflow.
        status = f"STATUS_{info.status}"
    return Execution(
        workflow_id=info.execution.workflow_id,
        workflow_run_id=info.execution.run_id,
        first_run_id=info.first_run_id,
        workflow_type=info.type.name,
        status=status,
        started_at=info.start_time.ToDatetime(UTC),
        ended_at=info.close_time.ToDatetime(UTC) if info.HasField("close_time") else None,
        task_queue=info.task_queue or task_queue,
        attributes=decode_typed_search_attributes(info.search_attributes),
        memo=info.memo,
        events=info.history_length,
        cancelling=cancelling,
    )


async def describe(client: Client, workflow_id: str, workflow_run_id: str = "") -> Execution | None:
    """The newest execution of a workflow id, or a certain one, paused or not, or None."""
    try:
        answer = await client.workflow_service.describe_workflow_execution(
            DescribeWorkflowExecutionRequest(
                namespace=client.namespace, execution=WorkflowExecution(workflow_id=workflow_id, run_id=workflow_run_id)
            ),
            retry=True,
        )
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND and not _of_namespace(error):
            return None
        raise
    return _execution(
        answer.workflow_execution_info,
        answer.execution_config.task_queue.name,
        answer.workflow_extended_info.cancel_requested,
    )


def _of_namespace(error: RPCError) -> bool:
    return error.message.startswith("Namespace ")


async def executions(
    client: Client, filters: Sequence[str], wanted: Callable[[Execution], bool] | None = None, page: int = _PAGE
) -> AsyncGenerator[Execution]:
    """Every execution that fits all of the list filters, as the server orders them (newest first); paused ones too."""
    request = ListWorkflowExecutionsRequest(
        namespace=client.namespace, page_size=page, query=" AND ".join(f"({term})" for term in filters)
    )
    while True:
        answer = await client.workflow_service.list_workflow_executions(request, retry=True)
        for info in answer.executions:
            execution = _execution(info)
            if wanted is None or wanted(execution):
                yield execution
        if not answer.next_page_token:
            return
        request.next_page_token = answer.next_page_token


def quote_value(value: str) -> str | None:
    """A value inside a list filter; None where the filter cannot hold it, so that it must be compared here.

    The server reads a backslash and a double quote back wrongly: with either in a value, nothing is ever found.
    """
    if "\\" in value or '"' in value:
        return None
    escaped = value.replace("'", "\\'")
    return f"'{escaped}'"


def matches(execution: Execution, wanted: Mapping[SearchAttributeKey[str], str]) -> bool:
    """Whether an execution has these search attributes."""
    return all(execution.attributes.get(key) == value for key, value in wanted.items())
