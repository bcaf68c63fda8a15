"""Waiting on conditions, never on time."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import TypeVar

_T = TypeVar("_T")


async def eventually(
    condition: Callable[[], Awaitable[_T | bool | None] | _T | bool | None], what: str, within: float = 60
) -> _T:
    """Asks until the answer is neither None nor False; the limit only bounds a failing test."""
    deadline = asyncio.get_running_loop().time() + within
    while True:
        found = condition()
        answer = await found if inspect.isawaitable(found) else found
        if answer is not None and answer is not False:
            return answer
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"waited {within} s for {what}")
        await asyncio.sleep(0.05)
