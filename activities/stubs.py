"""What workflows see of the activities: their names and their types, and nothing that touches the world."""

from typing import Any

from temporalio import activity

from contracts.base import Json
from contracts.dead_letters import Entry
from contracts.dispatch import (
    Admission,
    CancelRequest,
    DeadLetterInput,
    DecideAnswer,
    DecideRequest,
    Dispatch,
    Evidence,
    EvidenceRequest,
    MadeAtOnce,
    OutputsRequest,
    PreflightAnswer,
    PreflightRequest,
    ReconcileAnswer,
    ReconcileRequest,
)
from contracts.sweep import Look, NodeRef

__all__ = [
    "admit",
    "alert",
    "call_at_once",
    "call_tool",
    "cancel_nodes",
    "decide",
    "gather_evidence",
    "gather_orphan",
    "look_around",
    "preflight",
    "read_outputs",
    "reconcile",
]


@activity.defn
async def admit(run_id: str, payloads: list[Json]) -> Admission:
    """See `activities.admit`."""
    raise NotImplementedError


@activity.defn
async def call_at_once(dispatch: Dispatch) -> MadeAtOnce:
    """See `activities.call_tool`."""
    raise NotImplementedError


@activity.defn
async def call_tool(dispatch: Dispatch) -> Any:
    """See `activities.call_tool`; a `CallResult`, unless a person has completed it by hand with something else."""
    raise NotImplementedError


@activity.defn
async def reconcile(request: ReconcileRequest) -> ReconcileAnswer:
    """See `activities.reconcile`."""
    raise NotImplementedError


@activity.defn
async def gather_evidence(request: EvidenceRequest) -> Evidence:
    """See `activities.evidence`."""
    raise NotImplementedError


@activity.defn
async def preflight(request: PreflightRequest) -> PreflightAnswer:
    """See `activities.preflight`."""
    raise NotImplementedError


@activity.defn
async def read_outputs(request: OutputsRequest) -> dict[str, dict[str, Json]]:
    """See `activities.outputs`."""
    raise NotImplementedError


@activity.defn
async def decide(request: DecideRequest) -> DecideAnswer:
    """See `activities.decisions`."""
    raise NotImplementedError


@activity.defn
async def cancel_nodes(request: CancelRequest) -> list[str]:
    """See `activities.decisions`."""
    raise NotImplementedError


@activity.defn
async def alert(entry: Entry) -> None:
    """See `activities.alert`."""
    raise NotImplementedError


@activity.defn
async def look_around() -> Look:
    """See `activities.sweep`."""
    raise NotImplementedError


@activity.defn
async def gather_orphan(orphan: NodeRef) -> DeadLetterInput | None:
    """See `activities.sweep`."""
    raise NotImplementedError
