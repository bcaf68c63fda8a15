"""What the server knows of a workflow, whoever is at work; and asking a workflow without waiting for ever.

The SDK's own ``describe`` and ``list_workflows`` raise for a *paused* workflow; one of those must not hide the others,
so the raw service is asked.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, TypeVar

from pydantic import ValidationError
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import WorkflowExecutionStatus
from temporalio.api.workflow.v1 import WorkflowExecutionInfo
from temporalio.api.workflowservice.v1 import (
    DescribeWorkflowExecutionRequest,
    GetWorkflowExecutionHistoryRequest,
    ListWorkflowExecutionsRequest,
)
from temporalio.client import Client, WorkflowQueryFailedError
from temporalio.common import SearchAttributeKey, TypedSearchAttributes
from temporalio.converter import decode_typed_search_attributes
from temporalio.service import RPCError, RPCStatusCode

from contracts.base import Json, Model, problems_of

__all__ = [
    "ANSWER_WITHIN",
    "NEWEST",
    "OPEN",
    "TOOK_TOO_LONG",
    "Execution",
    "NoAnswerError",
    "describe",
    "executions",
    "inputs_of",
    "matches",
    "no_answer",
    "query",
    "quote_value",
    "read_answer",
]

ANSWER_WITHIN: Final = timedelta(seconds=7)
"""How long a worker may take to answer a query, or to take up an update; without one, Temporal would wait for ever."""

OPEN: Final = "CloseTime IS NULL"
"""A list filter: every execution that has not ended, paused ones included."""
NEWEST: Final = "ExecutionStatus != 'ContinuedAsNew'"
"""A list filter: of a chain that has continued as new, only the last execution."""

TOOK_TOO_LONG: Final = frozenset({RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED})
"""How the SDK says that a call's own time limit was reached."""

_M = TypeVar("_M", bound=Model)
_PAGE: Final = 200
_PREFIX: Final = "WORKFLOW_EXECUTION_STATUS_"


class NoAnswerError(Exception):
    """No worker answers; the message names the task queue and the cure."""


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution of a workflow, as the server has it.

    Attributes:
        status: Temporal's own name for it, such as ``CONTINUED_AS_NEW``.
    """

    workflow_id: str
    workflow_run_id: str
    workflow_type: str
    status: str
    started_at: datetime
    ended_at: datetime | None
    task_queue: str
    attributes: TypedSearchAttributes


def _execution(info: WorkflowExecutionInfo, task_queue: str = "") -> Execution:
    try:
        status = WorkflowExecutionStatus.Name(info.status).removeprefix(_PREFIX)
    except ValueError:
        # A newer server's; it is shown as it came rather than hiding the workflow.
        status = f"STATUS_{info.status}"
    return Execution(
        workflow_id=info.execution.workflow_id,
        workflow_run_id=info.execution.run_id,
        workflow_type=info.type.name,
        status=status,
        started_at=info.start_time.ToDatetime(UTC),
        ended_at=info.close_time.ToDatetime(UTC) if info.HasField("close_time") else None,
        task_queue=info.task_queue or task_queue,
        attributes=decode_typed_search_attributes(info.search_attributes),
    )


async def describe(client: Client, workflow_id: str) -> Execution | None:
    """The newest execution of a workflow id, paused or not, or None."""
    try:
        answer = await client.workflow_service.describe_workflow_execution(
            DescribeWorkflowExecutionRequest(
                namespace=client.namespace, execution=WorkflowExecution(workflow_id=workflow_id)
            ),
            retry=True,
        )
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND and not _of_namespace(error):
            return None
        raise
    return _execution(answer.workflow_execution_info, answer.execution_config.task_queue.name)


def _of_namespace(error: RPCError) -> bool:
    return error.message.startswith("Namespace ")


async def executions(
    client: Client, filters: Sequence[str], wanted: Callable[[Execution], bool] | None = None
) -> AsyncGenerator[Execution]:
    """Every execution that fits all of the list filters, as the server orders them (newest first); paused ones too."""
    request = ListWorkflowExecutionsRequest(
        namespace=client.namespace, page_size=_PAGE, query=" AND ".join(f"({term})" for term in filters)
    )
    while True:
        page = await client.workflow_service.list_workflow_executions(request, retry=True)
        for info in page.executions:
            execution = _execution(info)
            if wanted is None or wanted(execution):
                yield execution
        if not page.next_page_token:
            return
        request.next_page_token = page.next_page_token


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


async def inputs_of(client: Client, execution: Execution) -> list[Json] | None:
    """What a workflow was started with, before it ever continued as new; None if the server has forgotten."""
    run_id = execution.workflow_run_id
    for _ in range(2):
        try:
            answer = await client.workflow_service.get_workflow_execution_history(
                GetWorkflowExecutionHistoryRequest(
                    namespace=client.namespace,
                    execution=WorkflowExecution(workflow_id=execution.workflow_id, run_id=run_id),
                    maximum_page_size=1,
                ),
                retry=True,
            )
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return None
            raise
        started = answer.history.events[0].workflow_execution_started_event_attributes
        if not started.continued_execution_run_id:
            try:
                return await client.data_converter.decode(started.input.payloads)
            except (RuntimeError, ValueError, KeyError):
                # Bytes, or an encoding that this client does not know: not what it would send.
                return []
        run_id = started.first_execution_run_id
    return None


async def query(client: Client, execution: Execution, name: str) -> Json:
    """Asks a workflow.

    Raises:
        NoAnswerError: no worker answers in time, or it cannot.
    """
    handle = client.get_workflow_handle(execution.workflow_id)
    try:
        answer: Json = await handle.query(name, rpc_timeout=ANSWER_WITHIN)
    except RPCError as error:
        if error.status in TOOK_TOO_LONG:
            raise no_answer(execution) from error
        if error.status is RPCStatusCode.FAILED_PRECONDITION:
            raise NoAnswerError(f"{execution.workflow_id} cannot be asked now: {error.message}") from error
        raise
    except WorkflowQueryFailedError as error:
        raise NoAnswerError(f"{execution.workflow_id} cannot be asked: {error.message}") from error
    return answer


def read_answer(kind: type[_M], answer: Json, execution: Execution) -> _M:
    """What a workflow answered.

    Raises:
        NoAnswerError: in a form that this version does not know.
    """
    try:
        return kind.model_validate(answer)
    except ValidationError as error:
        raise NoAnswerError(
            f"{execution.workflow_id} answers in a form that this version does not know "
            f"({'; '.join(problems_of(error)[:3])}): use the redrive that its worker has"
        ) from error


def no_answer(execution: Execution) -> NoAnswerError:
    """That nobody is at work on a workflow."""
    return NoAnswerError(
        f"no worker answers on task queue {execution.task_queue!r}: start one with `redrive worker`, or look at its log"
    )
