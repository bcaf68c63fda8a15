"""Who is who: run, node and operation ids, and the idempotency key that a tool sees.

Identity never comes from Temporal's own run id, from ``workflow.uuid4()`` or from a clock: all of them change on a
reset, a restart or a continue-as-new, and the key on the wire must not.
"""

import hashlib
import re
import unicodedata
import uuid
from typing import Final, Self

from contracts.base import Model

__all__ = [
    "KEY_NAMESPACE",
    "NODE_ID",
    "OperationId",
    "dead_letter_workflow_id",
    "fairness_key_of",
    "node_workflow_id",
    "problem_with_node_id",
    "problem_with_run_id",
    "problem_with_tool_name",
    "trace_id_of",
]

KEY_NAMESPACE: Final = uuid.UUID("6f1c0a5e-2f0b-5d0e-9d5c-3f6f5b1f7a11")
"""The UUIDv5 namespace of idempotency keys. Fixed for good: changing it would change every key on the wire."""

NODE_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""The alphabet of node ids and tool names."""

_MAX_RUN_ID: Final = 200
_MAX_FAIRNESS_KEY: Final = 64
_TRACEPARENT: Final = re.compile(r"00-(?P<trace_id>[0-9a-f]{32})-(?P<parent_id>[0-9a-f]{16})-[0-9a-f]{2}")


class OperationId(Model):
    """One operation: ``{run_id}/{node_id}/{logical_attempt}``; no part holds a ``/``."""

    run_id: str
    node_id: str
    logical_attempt: int

    def __str__(self) -> str:
        return f"{self.run_id}/{self.node_id}/{self.logical_attempt}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads an operation id.

        Raises:
            ValueError: what is wrong with it.
        """
        parts = text.split("/")
        if len(parts) != 3 or not parts[2].isascii() or not parts[2].isdigit() or parts[2].startswith("0"):
            raise ValueError("an operation id is RUN_ID/NODE_ID/LOGICAL_ATTEMPT, such as order-1042/charge/1")
        problem = problem_with_run_id(parts[0]) or problem_with_node_id(parts[1])
        if problem:
            raise ValueError(problem)
        return cls(run_id=parts[0], node_id=parts[1], logical_attempt=int(parts[2]))

    @property
    def idempotency_key(self) -> str:
        """The key on the wire: UUIDv5 (RFC 9562 section 5.5) of the operation id."""
        return str(uuid.uuid5(KEY_NAMESPACE, str(self)))


def node_workflow_id(run_id: str, node_id: str) -> str:
    """The workflow id of a node."""
    return f"{run_id}/{node_id}"


def dead_letter_workflow_id(run_id: str, node_id: str) -> str:
    """The workflow id of a node's dead letter."""
    return f"{run_id}/{node_id}/dead-letter"


def problem_with_run_id(run_id: str) -> str | None:
    """What is wrong with a run id, or None."""
    if not 1 <= len(run_id) <= _MAX_RUN_ID:
        return f"a run id has 1 to {_MAX_RUN_ID} characters, this one has {len(run_id)}"
    if "/" in run_id:
        return "a run id holds no '/'"
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in run_id):
        return "a run id holds no control characters"
    return None


def problem_with_node_id(node_id: str) -> str | None:
    """What is wrong with a node id, or None."""
    return _problem_with_name(node_id, "a node id")


def problem_with_tool_name(name: str) -> str | None:
    """What is wrong with a tool's name, or None."""
    return _problem_with_name(name, "a tool name")


def _problem_with_name(name: str, kind: str) -> str | None:
    if NODE_ID.fullmatch(name):
        return None
    return f"{kind} is a letter or digit, then up to 63 letters, digits, '.', '_' or '-'"


def fairness_key_of(run_id: str) -> str:
    """What Temporal shares its queues out by: a run's own id where that is short enough (64 bytes), else its hash."""
    return run_id if len(run_id.encode()) <= _MAX_FAIRNESS_KEY else hashlib.sha256(run_id.encode()).hexdigest()


def trace_id_of(run_id: str, traceparent: str | None = None) -> str:
    """The trace that every call of a run belongs to: the given one's, else derived from the run id.

    Raises:
        ValueError: the traceparent is not one of W3C Trace Context, version 00
            (https://www.w3.org/TR/trace-context/#traceparent-header).
    """
    if traceparent is None:
        return hashlib.sha256(run_id.encode()).hexdigest()[:32]
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None or set(match["trace_id"]) == {"0"} or set(match["parent_id"]) == {"0"}:
        raise ValueError(
            "not a W3C traceparent, such as 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01 (leave it out "
            "to have one derived from the run id)"
        )
    return match["trace_id"]
