"""Where work on values is done: most are small, some are megabytes."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from contracts.base import Json
from contracts.canonical import is_small

__all__ = ["look_into"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


async def look_into(value: Json, look: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Runs what looks into a value: in a thread if it is large, because heartbeats and leases must not wait for that.

    For a small one the thread would cost more than the work.
    """
    return look(*args, **kwargs) if is_small(value) else await asyncio.to_thread(look, *args, **kwargs)
