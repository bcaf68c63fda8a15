"""What the activities of one worker share."""

import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from temporalio import activity

from activities.http import HttpClients
from activities.ledger.interface import Ledger
from activities.secrets import Secrets
from contracts.dead_letters import Delivery
from contracts.dispatch import ToolFacts
from contracts.failures import MAX_RESENDS_AFTER_ABSENT, POLICIES, Category
from contracts.limits import INLINE, Limits
from contracts.tools import Catalog, Tool

__all__ = ["WORKER", "Context", "attempt_budgets", "delivery", "facts", "queue_of", "unique_owner"]

WORKER: Final = f"{os.getpid()}@{socket.gethostname()}"
"""This process, as people find it in a dead letter's attempts."""


@dataclass(frozen=True, slots=True)
class Context:
    """The catalog, the secrets, the connections and the ledger of a worker."""

    catalog: Catalog
    secrets: Secrets
    http: HttpClients
    ledger: Ledger
    task_queue: str
    limits: Limits = INLINE


def facts(tool: Tool, context: Context) -> ToolFacts:
    """What the workflows need to know of a tool."""
    return ToolFacts(
        name=tool.name,
        version=tool.version,
        fingerprint=tool.fingerprint,
        timeout=tool.timeout,
        absent_after=tool.absent_after,
        task_queue=queue_of(tool, context.task_queue),
        rated=tool.rate_per_second is not None,
        askable=tool.reconcile is not None,
        largest_output=min(tool.max_response_bytes, context.limits.output),
    )


def queue_of(tool: Tool, task_queue: str) -> str:
    """Where a tool is called: one with a rate has a queue of its own, whose rate the server keeps."""
    return task_queue if tool.rate_per_second is None else f"{task_queue}.{tool.name}"


def attempt_budgets(tool: Tool | None) -> Mapping[Category, int]:
    """How many attempts each category has; one where it is never retried by itself."""
    policies = {category: tool.policy(category) if tool else POLICIES.get(category) for category in Category}
    budgets = {category: policy.attempts if policy else 1 for category, policy in policies.items()}
    budgets[Category.UNKNOWN_SIDE_EFFECT] = 1 + MAX_RESENDS_AFTER_ABSENT
    return budgets


def delivery() -> Delivery:
    """Temporal's present delivery."""
    info = activity.info()
    return Delivery(
        workflow_id=info.workflow_id or "",
        workflow_run_id=info.workflow_run_id or "",
        activity_id=info.activity_id,
        task_queue=info.task_queue,
        attempt=info.attempt,
    )


def unique_owner() -> str:
    """A name for a claim that no other delivery ever has."""
    return f"{WORKER}/{uuid.uuid4()}"
