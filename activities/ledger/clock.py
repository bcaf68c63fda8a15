"""The clocks that the ledger trusts: each is compared with itself alone, never with another machine's."""

import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

__all__ = ["BootClock", "LedgerClock", "Moment", "boot_seconds"]


@dataclass(frozen=True, slots=True)
class Moment:
    """One reading of a ledger's clock.

    Attributes:
        now: For people, and for what outlives a restart of the machine.
        boot: Which clock ``seconds`` is read from; another one begins when the clock starts anew.
        seconds: What leases and horizons run by.
    """

    now: datetime
    boot: str
    seconds: float


class LedgerClock(Protocol):
    """The one clock by which a ledger's times are written and compared, whichever worker asks."""

    def read(self, connection: Any, /) -> Moment:
        """What it says now."""
        ...


class BootClock:
    """CLOCK_BOOTTIME: it does not jump, it counts while the machine sleeps, and all processes of a machine share it.

    A lease from before a restart of the machine is over, whatever its number says: its owner is gone.
    """

    def __init__(self) -> None:
        try:
            self._boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            # Without Linux's boot id, the moment of the boot stands for it; it is as stable as the wall clock is.
            self._boot = f"{sys.platform}-{round((time.time() - time.monotonic()) / 60)}"

    def read(self, _connection: Any, /) -> Moment:
        """See `LedgerClock.read`."""
        return Moment(now=datetime.now(UTC), boot=self._boot, seconds=boot_seconds())


def boot_seconds() -> float:
    """Seconds since the machine's boot, sleep included where the platform counts it."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)
