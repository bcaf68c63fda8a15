"""``call_tool`` and ``call_at_once``: how Temporal asks for an operation, and how it is answered."""

import asyncio
from collections import deque
from typing import Final

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.context import Context
from activities.entry import Gate, OperationEntry
from activities.ledger.clock import boot_seconds
from contracts.canonical import is_small, json_size
from contracts.dispatch import CallResult, Dispatch, FailureDetails, MadeAtOnce

__all__ = ["CallTool"]

_AT_ONCE_SECONDS: Final = 1.0
_AT_ONCE_BYTES: Final = 8 * 1024
"""What is done at once, within a workflow task: the server takes 4 MiB for all the answers of one."""
_KEPT: Final = 20
"""How many ends of calls are kept for the activities that come to take them up; of others the ledger tells."""


class CallTool:
    """The activity that performs a node's operation."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._gates = {tool.name: Gate(tool) for tool in context.catalog.tools.values()}
        self._under_way: set[asyncio.Task[CallResult]] = set()
        self._left: dict[_Place, OperationEntry] = {}
        self._kept: deque[_Place] = deque()

    @activity.defn(name="call_tool")
    async def call_tool(self, dispatch: Dispatch) -> CallResult:
        """Performs the operation that a dispatch names, unless the ledger knows better.

        Nothing is cancelled in mid-effect: once bytes may have gone, the call runs to its end whatever happens to the
        activity, because aborting unsends nothing and only loses the answer.

        Raises:
            ApplicationError: of the failure's category, with `FailureDetails`; retryable with the delay that the policy
                says, or, once the budget is spent, not.
        """
        entry = self._left.pop(_place(), None)
        if entry is None or not entry.performs(dispatch):
            entry = self._begin(dispatch)
        beat = asyncio.create_task(entry.beat())
        try:
            await entry.ended()
        finally:
            beat.cancel()
        return entry.work.result()

    @activity.defn(name="call_at_once")
    async def call_at_once(self, dispatch: Dispatch) -> MadeAtOnce:
        """The same for a first attempt, as a local activity of its run; without an answer, `call_tool` goes on with it.

        It goes on with whatever the server can wait for better: a slow tool, one that is not to be called yet, a ledger
        that is away. A call that has begun does not wait for it. If `call_tool` comes to the same process, it takes
        the call up; elsewhere, the ledger tells what became of it.
        """
        began = boot_seconds()
        answer = await self._at_once(dispatch)
        return MadeAtOnce(answer=answer, seconds=boot_seconds() - began)

    async def _at_once(self, dispatch: Dispatch) -> CallResult | FailureDetails | None:
        tool = self._context.catalog.get(dispatch.tool)
        if tool is None or tool.fingerprint != dispatch.fingerprint or activity.is_worker_shutdown():
            # For another worker: as long as this one has the run in its cache, it is given all of its local activities.
            return None
        entry = self._begin(dispatch)
        if await entry.ended(_AT_ONCE_SECONDS):
            try:
                answer: CallResult | FailureDetails = entry.work.result()
            except ApplicationError as error:
                if not error.non_retryable:
                    return None
                answer = FailureDetails.model_validate(error.details[0])
            output = answer.output if isinstance(answer, CallResult) else None
            if is_small(output) and json_size(output) <= _AT_ONCE_BYTES:
                return answer
        self._leave(entry)
        return None

    async def finish(self) -> None:
        """Waits for the calls that no activity waits for."""
        if self._under_way:
            await asyncio.wait(self._under_way)

    def _begin(self, dispatch: Dispatch) -> OperationEntry:
        entry = OperationEntry(self._context, self._gates.get(dispatch.tool), dispatch)
        self._under_way.add(entry.work)
        entry.work.add_done_callback(self._done)
        return entry

    def _done(self, work: asyncio.Task[CallResult]) -> None:
        self._under_way.discard(work)
        # What the ledger has is not missed where nobody waits for it; a bug would be.
        if not work.cancelled() and not isinstance(error := work.exception(), ApplicationError | None):
            activity.logger.error("a call has failed unexpectedly", exc_info=error)

    def _leave(self, entry: OperationEntry) -> None:
        if entry.in_line:
            entry.work.cancel()
            return
        place = _place()
        self._left[place] = entry
        entry.work.add_done_callback(lambda _: self._keep(place))

    def _keep(self, place: "_Place") -> None:
        self._kept.append(place)
        if len(self._kept) > _KEPT:
            self._left.pop(self._kept.popleft(), None)


_Place = tuple[str | None, str]
"""One execution of a workflow, and an activity of it."""


def _place() -> _Place:
    info = activity.info()
    return info.workflow_run_id, info.activity_id
