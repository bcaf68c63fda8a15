"""Asks Temporal what became of every run, node and dead letter, and reads what the tools have done."""

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from temporalio.client import (
    Client,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowQueryFailedError,
)
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from tests.chaos.graphs import PlannedRun

_AT_ONCE: Final = 16
_KEYS: Final = uuid.UUID("6f1c0a5e-2f0b-5d0e-9d5c-3f6f5b1f7a11")
"""The namespace of idempotency keys, which is fixed for good."""
_T = TypeVar("_T")


async def collect(client: Client, runs: list[PlannedRun]) -> list[dict[str, Any]]:
    """For each run: its ``id``, ``spec``, ``workflow``, ``state`` (the query's answer), and for each of its nodes
    ``nodes[name]`` and ``dead_letters[name]``: both a workflow, the latter with its ``entry``; None: there is none.

    A workflow is ``{"status", "result", "error"}``.
    """
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def one(run: PlannedRun) -> dict[str, Any]:
        async with at_once:
            found: dict[str, Any] = {"id": run.id, "spec": run.spec, "nodes": {}, "dead_letters": {}}
            found["workflow"] = await _workflow(client, run.id)
            found["state"] = await _query(client, run.id, "status")
            calls = await _patiently(lambda: _calls_of(client, run.id)) if run.fast else {}
            for node in run.nodes:
                name = node["id"]
                found["nodes"][name] = await _workflow(client, f"{run.id}/{name}") or calls.get(name)
                entry_id = f"{run.id}/{name}/dead-letter"
                dead_letter = await _workflow(client, entry_id)
                if dead_letter is not None:
                    dead_letter["entry"] = await _query(client, entry_id, "entry")
                found["dead_letters"][name] = dead_letter
            return found

    return await asyncio.gather(*(one(run) for run in runs))


def tool_log(path: Path) -> list[dict[str, Any]]:
    """What the tools have heard and done."""
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


async def _workflow(client: Client, workflow_id: str) -> dict[str, Any] | None:
    """How the latest execution stands; None if there never was one."""

    async def ask() -> dict[str, Any] | None:
        try:
            status = (await client.get_workflow_handle(workflow_id).describe()).status
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return None
            raise
        assert status is not None
        found: dict[str, Any] = {"status": status.name, "result": None, "error": None}
        if status is not WorkflowExecutionStatus.RUNNING:
            try:
                found["result"] = await client.get_workflow_handle(workflow_id).result(follow_runs=False)
            except WorkflowFailureError as failure:
                cause = failure.cause
                found["error"] = cause.type if isinstance(cause, ApplicationError) else type(cause).__name__
                found["message"] = str(cause)
                if isinstance(cause, ApplicationError) and cause.details:
                    found["result"] = cause.details[0]
        return found

    return await _patiently(ask)


async def _calls_of(client: Client, run_id: str) -> dict[str, dict[str, Any]]:
    """The first attempts that a fast run has made itself, and that succeeded, in the form of a node's workflow."""
    calls: dict[str, dict[str, Any]] = {}
    try:
        events = [event async for event in client.get_workflow_handle(run_id).fetch_history_events()]
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return {}
        raise
    for event in events:
        # Made within a workflow task, or by an activity.
        payloads = event.activity_task_completed_event_attributes.result.payloads
        if event.HasField("marker_recorded_event_attributes"):
            payloads = event.marker_recorded_event_attributes.details["result"].payloads
        for found in await client.data_converter.decode(payloads):
            answer = (found.get("answer") or found) if isinstance(found, dict) else {}
            if answer.get("end") == "SUCCEEDED":
                operation = str(answer["operation_id"])
                result = {
                    "output": answer["output"],
                    "source": answer["source"],
                    "idempotency_key": str(uuid.uuid5(_KEYS, operation)),
                }
                name = operation.removeprefix(f"{run_id}/").rpartition("/")[0]
                calls[name] = {"status": "COMPLETED", "error": None, "result": result}
    return calls


async def _query(client: Client, workflow_id: str, name: str) -> Any:
    """A query's answer; None if the workflow cannot say."""

    async def ask() -> Any:
        try:
            return await client.get_workflow_handle(workflow_id).query(name)
        except WorkflowQueryFailedError:
            return None
        except RPCError as error:
            # It never was, or somebody has terminated it before it could begin.
            if error.status is RPCStatusCode.NOT_FOUND or "closed before" in error.message:
                return None
            raise

    return await _patiently(ask)


async def _patiently(ask: Callable[[], Awaitable[_T]]) -> _T:
    """The servers may just have come back."""
    for _ in range(20):
        try:
            async with asyncio.timeout(30):
                return await ask()
        except (RPCError, TimeoutError):
            await asyncio.sleep(1)
    return await ask()
