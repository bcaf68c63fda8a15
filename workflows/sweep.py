"""``Sweep``: finds what no workflow waits for. A schedule starts it every minute; each one looks once, and ends."""

from datetime import timedelta
from typing import Any, Final

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError, WorkflowAlreadyStartedError

with workflow.unsafe.imports_passed_through():
    from activities import stubs
    from contracts.identity import node_workflow_id
    from contracts.sweep import Found, NodeRef, SweepResult
    from workflows.opening import open_dead_letter
    from workflows.options import COMMIT_TIMEOUT, HEARTBEAT_TIMEOUT, QUICK_RETRY

__all__ = ["Sweep"]

_LOOK_TIMEOUT: Final = timedelta(minutes=10)
_LOOK_RETRY: Final = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_attempts=3)
"""The next sweep comes in a minute."""
_MAX_HISTORY_BYTES: Final = 10 * 1024 * 1024
"""An entry may have a megabyte: what does not fit is for the next sweep."""


@workflow.defn(name="Sweep")
class Sweep:
    """One sweep. `redrive setup` makes its schedule; anybody may start one, too."""

    @workflow.run
    async def run(self, *_payloads: Any) -> SweepResult:
        """Looks around, asks, and opens the dead letters that are missing.

        Raises:
            ApplicationError: ``SweepIncomplete``, with the result as details: the ledger could not be asked.
        """
        look = await workflow.execute_activity(
            stubs.look_around,
            start_to_close_timeout=_LOOK_TIMEOUT,
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
            retry_policy=_LOOK_RETRY,
            summary="whose run is gone? what does nobody wait for?",
        )
        opened: list[str] = []
        complete = look.result.complete
        for orphan in look.orphans:
            if workflow.info().get_current_history_size() > _MAX_HISTORY_BYTES:
                complete = False
                break
            if await self._open(orphan):
                opened.append(node_workflow_id(orphan.run_id, orphan.node_id))
        result = look.result.model_copy(update={"dead_letters_opened": Found.of(opened), "complete": complete})
        workflow.set_current_details(_told(result))
        if result.problem is not None:
            raise ApplicationError(result.problem, result, type="SweepIncomplete", non_retryable=True)
        return result

    async def _open(self, orphan: NodeRef) -> bool:
        """Whether a dead letter was opened: not if somebody was faster, or its effect has been settled."""
        start = await workflow.execute_activity(
            stubs.gather_orphan,
            orphan,
            start_to_close_timeout=COMMIT_TIMEOUT,
            retry_policy=QUICK_RETRY,
            summary=f"what became of {node_workflow_id(orphan.run_id, orphan.node_id)}?",
        )
        if start is None:
            return False
        # Which only a workflow knows.
        build_id = workflow.info().get_current_build_id()
        runtime = start.entry.runtime.model_copy(update={"build_id": build_id})
        entry = start.entry.model_copy(update={"runtime": runtime})
        try:
            _ = await open_dead_letter(start.model_copy(update={"entry": entry}))
        except WorkflowAlreadyStartedError:
            return False
        return True


_LINES: Final = (
    ("runs_gone", "runs are gone"),
    ("nodes_stopped", "of their nodes were asked to stop"),
    ("dead_letters_checked", "of their dead letters were asked to look again"),
    ("dead_letters_missing", "nodes were asked to open their dead letter again"),
    ("nodes_missing", "nodes were ended by an operator; their runs were told"),
    ("woken", "workflows had never begun, and were woken"),
    ("dead_letters_opened", "dead letters were opened for effects that nobody waited for"),
)


def _told(result: SweepResult) -> str:
    """What a person sees who opens this in the Temporal UI."""
    opened = f"{result.open_runs} runs, {result.open_nodes} nodes and {result.open_dead_letters} dead letters are open"
    lines = [f"{opened}; {result.described} workflows were looked at."]
    for name, what in _LINES:
        found: Found = getattr(result, name)
        if found.count:
            more = f", and {found.count - len(found.ids)} more" if found.count > len(found.ids) else ""
            lines.append(f"- **{found.count}** {what}: {', '.join(f'`{name}`' for name in found.ids)}{more}")
    if not result.complete:
        lines.append("- there was more than one sweep does: the next one goes on")
    return "\n".join(lines)
