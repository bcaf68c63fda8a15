"""The person who looks after the dead letters, and decides at random."""

import asyncio
import random
import time
from collections import Counter
from typing import Any, Final

from temporalio.client import (
    Client,
    WorkflowHandle,
    WorkflowQueryFailedError,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.service import RPCError, RPCStatusCode

from tests.chaos.journal import Journal

OPEN_DEAD_LETTERS: Final = "WorkflowType = 'DeadLetter' AND ExecutionStatus = 'Running'"
_PARKED_PERCENT: Final = 4
_MOST_REDRIVES: Final = 3
_AT_ONCE: Final = 8
_ANSWER_SECONDS: Final = 20


class Operator:
    """Lists dead letters and decides them; what is asked is in the journal before it is sent.

    Attributes:
        parked: Runs one of whose dead letters is never decided, on purpose.
    """

    def __init__(self, client: Client, seed: int, journal: Journal) -> None:
        self._client = client
        self._seed = seed
        self._journal = journal
        self._busy: set[str] = set()
        self._visits: Counter[str] = Counter()
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self.parked: set[str] = set()

    async def work(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as visits:
            while True:
                for dead_letter in await self._listed():
                    if dead_letter not in self._busy:
                        self._busy.add(dead_letter)
                        visits.create_task(self._visit(dead_letter))
                await asyncio.sleep(1)

    async def _listed(self) -> list[str]:
        try:
            return [found.id async for found in self._client.list_workflows(OPEN_DEAD_LETTERS)]
        except RPCError:
            return []  # Temporal is away; the next round finds them

    async def _visit(self, dead_letter: str) -> None:
        """Looks at one, and decides it or not; it is listed again as long as it is open."""
        drawn = random.Random(f"operator {self._seed} {dead_letter} {self._visits[dead_letter]}")
        self._visits[dead_letter] += 1
        try:
            if random.Random(f"parked {self._seed} {dead_letter}").randrange(100) < _PARKED_PERCENT:
                self.parked.add(dead_letter.split("/", maxsplit=1)[0])
            else:
                await asyncio.sleep(drawn.uniform(0, 2))
                async with self._at_once:
                    await self._decide(self._client.get_workflow_handle(dead_letter), drawn)
        except (RPCError, WorkflowQueryFailedError, TimeoutError):
            pass  # away, or closed in the meantime; the next round sees which
        finally:
            self._busy.discard(dead_letter)

    async def _decide(self, dead_letter: WorkflowHandle[Any, Any], drawn: random.Random) -> None:
        looked_at = time.time()
        async with asyncio.timeout(_ANSWER_SECONDS):
            entry: dict[str, Any] = await dead_letter.query("entry")
        if entry["status"] != "AWAITING_DECISION":
            return
        action, payload = _decision(entry, drawn)
        payload |= {"decided_by": "chaos", "reason": "chaos", "decision_id": f"{drawn.getrandbits(64):016x}"}
        if drawn.random() < 0.3:
            payload["if_redrives"] = entry["redrives"]
        self._journal.write(
            "decide",
            dead_letter=dead_letter.id,
            action=action,
            payload=payload,
            looked_at=looked_at,
            operation_id=entry["operation_id"],
            idempotency_key=entry["idempotency_key"],
            side_effect=entry["side_effect"],
            error=entry["error"],
            refusals=entry["eligibility"]["refusals"],
        )
        record = await self._send(dead_letter, action, payload, by_signal=drawn.random() < 0.2)
        self._journal.write("decided", decision_id=payload["decision_id"], record=record)

    async def _send(
        self, dead_letter: WorkflowHandle[Any, Any], action: str, payload: dict[str, Any], *, by_signal: bool
    ) -> dict[str, Any] | None:
        """The record; None if it is not known, as after a signal."""
        for _ in range(3):
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    if by_signal:
                        await dead_letter.signal(action, payload)
                        return None
                    record: dict[str, Any] = await dead_letter.execute_update(
                        action, payload, id=payload["decision_id"]
                    )
                    return record
            except WorkflowUpdateFailedError:
                return None  # it closed before it answered
            except (RPCError, TimeoutError, WorkflowUpdateRPCTimeoutOrCancelledError) as error:
                if isinstance(error, RPCError) and error.status is RPCStatusCode.NOT_FOUND:
                    return None
                await asyncio.sleep(0.5)
        return None


_OVERRIDABLE: Final = frozenset({"SIDE_EFFECT_UNRESOLVED", "DEDUPE_WINDOW_EXPIRED", "REDRIVE_LIMIT", "TOOL_CHANGED"})


def _decision(entry: dict[str, Any], drawn: random.Random) -> tuple[str, dict[str, Any]]:
    refusals = set(entry["eligibility"]["refusals"])
    action = drawn.choices(("redrive", "resolve", "discard", "reconcile", "check"), (60, 14, 10, 12, 4))[0]
    hopeless = refusals - _OVERRIDABLE or entry["redrives"] >= _MOST_REDRIVES
    if action == "redrive" and hopeless:
        action = drawn.choice(("resolve", "discard"))
    match action:
        case "redrive":
            payload: dict[str, Any] = {}
            if drawn.random() < 0.15:
                payload["new_operation"] = True
            if drawn.random() < 0.5:
                payload["override"] = sorted(_OVERRIDABLE)
            return action, payload
        case "resolve":
            return action, {"output": {"id": "vouched", "key": entry["idempotency_key"]}}
        case _:
            return action, {}
