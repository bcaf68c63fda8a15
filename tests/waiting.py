"""Waiting on conditions, never on time."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar, overload

_T = TypeVar("_T")

_OFTEN: Final = 0.05


@overload
async def eventually(
    condition: Callable[[], Awaitable[_T | None]], what: str, within: float = 60, every: float = _OFTEN
) -> _T: ...
@overload
async def eventually(
    condition: Callable[[], _T | None], what: str, within: float = 60, every: float = _OFTEN
) -> _T: ...
async def eventually(condition: Callable[[], Any], what: str, within: float = 60, every: float = _OFTEN) -> Any:
    """Asks until the answer is neither None nor False; the limit only bounds a failing test.

    What costs the server much is asked less often.
    """
    deadline = asyncio.get_running_loop().time() + within
    while True:
        found = condition()
        answer = await found if inspect.isawaitable(found) else found
        if answer is not None and answer is not False:
            return answer
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"waited {within} s for {what}")
        await asyncio.sleep(every)
