"""What every storage can do, and whose the things in it are."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from temporalio.converter import StorageDriver, StorageDriverStoreContext, StorageDriverWorkflowInfo

__all__ = ["Storage", "StorageError", "Stored", "foreign_reference", "owner_of", "run_of"]


class StorageError(Exception):
    """A payload cannot be kept, or not be had; the message says what to do. Whoever needs it tries again."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A payload in a storage."""

    run_id: str
    key: str
    size: int


class Storage(Protocol):
    """A place for payloads, each kept under the run that it belongs to.

    Everything that refers to a payload (the run, its nodes, their dead letters) has the run's id as the first part of
    its workflow id, and what is stored for one run is never referred to by another. So a payload is needed as long as
    Temporal knows any of these workflows, and no longer.
    """

    @property
    def driver(self) -> StorageDriver:
        """What stores and retrieves; storing again what is there makes it young."""
        ...

    async def check(self) -> None:
        """Makes sure that it is there and can be written.

        Raises:
            StorageError: it is not.
        """
        ...

    def older_than(self, namespace: str, before: datetime) -> AsyncGenerator[Stored]:
        """What was last stored before then, for workflows of a namespace."""
        ...

    async def drop(self, stored: Sequence[Stored], before: datetime) -> None:
        """Deletes payloads, but for those that have become young since they were found."""
        ...


def foreign_reference(error: Exception) -> str | None:
    """What to do, where a payload is kept in a storage that is not configured here; None for any other error.

    The SDK says so by the texts of ``RuntimeError`` and ``ValueError``.
    """
    if not any(text in str(error) for text in ("[TMPRL1105]", "No driver found with name")):
        return None
    return (
        "this was too large for Temporal and is kept in an external storage, which is not configured here: set "
        "REDRIVE_STORAGE to what the workers have"
    )


def run_of(workflow_id: str) -> str:
    """The id of the run that a workflow belongs to."""
    return workflow_id.partition("/")[0]


def owner_of(context: StorageDriverStoreContext) -> tuple[str, str]:
    """The namespace and the run that a payload is stored for; each empty where nobody says."""
    target = context.target
    if target is None:
        return "", ""
    workflow_id = target.id if isinstance(target, StorageDriverWorkflowInfo) else None
    return target.namespace, run_of(workflow_id or "")
