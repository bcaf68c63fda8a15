"""A worker whose wall clock is wrong, by as much as a file says at any time.

`python -m tests.faults.clock_worker SHIFT`, on the environment of a bench. SHIFT is a file that holds seconds. Whatever
the product asks of the wall clock is answered wrongly; what it asks of clocks that do not jump is not.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Final

from workers.client import connect
from workers.settings import load_settings
from workers.worker import serve

_SHIFTED: Final = frozenset({"activities", "workers"})
"""Contracts and workflows have no clock of their own."""


def _shift_wall_clock(shift: Callable[[], timedelta]) -> None:
    real_time = time.time

    class Shifted(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + shift()

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _SHIFTED and vars(module).get("datetime") is datetime:
            vars(module)["datetime"] = Shifted
    time.time = lambda: real_time() + shift().total_seconds()


async def _run() -> None:
    def end() -> None:
        os._exit(1)

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), end)
    await serve(await connect(), load_settings())


def main() -> None:
    """Reads the command line and runs."""
    parser = argparse.ArgumentParser(prog="tests.faults.clock_worker", description=__doc__)
    parser.add_argument("shift", type=Path, help="the file that holds the seconds by which the wall clock is wrong")
    path: Path = parser.parse_args().shift
    _shift_wall_clock(lambda: timedelta(seconds=float(path.read_text())))
    asyncio.run(_run())


if __name__ == "__main__":
    main()
