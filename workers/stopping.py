"""What SIGINT and SIGTERM do."""

import asyncio
import signal
from collections.abc import Generator
from contextlib import contextmanager, suppress

__all__ = ["until_stopped"]


@contextmanager
def until_stopped() -> Generator[None]:
    """SIGINT or SIGTERM ends the block, whatever it is just doing: all that it has entered is left in order.

    A second one changes nothing: what is in flight is finished first.
    """
    task = asyncio.current_task()
    assert task is not None
    stopped = False

    def stop() -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError):
            # Not on Windows, where Ctrl-C raises KeyboardInterrupt.
            asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        yield
    except asyncio.CancelledError:
        if not stopped:
            raise
        task.uncancel()
