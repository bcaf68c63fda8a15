"""What a process's calls of a tool with a rate pass through."""

import asyncio
import time
from datetime import timedelta

from activities.entry import Gate
from contracts.tools import Tool

_RATE = 20


async def test_calls_whose_turn_came_while_the_process_was_busy_do_not_leave_at_once() -> None:
    gate = Gate(Tool(name="t", url="http://127.0.0.1/", rate_per_second=_RATE))
    left: list[float] = []

    async def call(number: int) -> None:
        await gate.turn(timedelta(seconds=number / _RATE))
        left.append(time.monotonic())

    calls = [asyncio.create_task(call(number)) for number in range(12)]
    await asyncio.sleep(2 / _RATE)
    # Twice: those that wait for this process's own turn have been given one as well.
    for _ in range(2):
        time.sleep(4 / _RATE)  # noqa: ASYNC251 - the loop stands still
        await asyncio.sleep(1.5 / _RATE)
    await asyncio.gather(*calls)
    # One may follow another that woke late, but never a third.
    assert all(third - first >= 0.9 / _RATE for first, third in zip(left, left[2:], strict=False))
