"""Runs what is asynchronous, so that the exit code is right every time."""

import asyncio
import gc
import time
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

__all__ = ["run_async"]

_T = TypeVar("_T")
_SETTLE_SECONDS: Final = 0.02


def run_async(work: Coroutine[Any, Any, _T]) -> _T:
    """Runs a coroutine to its end, and lets Temporal's own threads come to rest.

    Without the pause, a thread of theirs that is just letting go of a Python object sometimes aborts the interpreter at
    its exit (``PyGILState_Release``, exit code 134), although all the work is done.
    """
    try:
        return asyncio.run(work)
    finally:
        gc.collect()
        time.sleep(_SETTLE_SECONDS)
