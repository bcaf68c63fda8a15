"""Does to the cluster what the schedule says."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable

from tests.chaos.cluster import Cluster
from tests.chaos.schedule import Fault


class Faults:
    """The faults of one schedule.

    Attributes:
        done: How many there have been, by action and target.
    """

    def __init__(self, cluster: Cluster, faults: list[Fault], say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._left = faults
        self._say = say
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._under_way: set[asyncio.Task[None]] = set()
        self.done: Counter[tuple[str, str]] = Counter()

    def ended(self, operations: int) -> None:
        """So many operations have ended: what is due begins. Each target suffers one thing at a time."""
        while self._left and self._left[0].at <= operations:
            task = asyncio.create_task(self._do(self._left.pop(0)))
            self._under_way.add(task)

    async def over(self) -> None:
        """Begins what is left, and returns when everything is undone.

        Raises:
            Exception: whatever went wrong with a fault; that is a fault of this program.
        """
        if self._left:
            self.ended(self._left[-1].at)
        await asyncio.gather(*self._under_way)

    def check(self) -> None:
        """Raises what went wrong with a fault so far."""
        for task in self._under_way:
            if task.done():
                task.result()

    async def _do(self, fault: Fault) -> None:
        async with self._turns[fault.target]:
            self._say(f"{fault.action} {fault.target} for {fault.seconds:.1f} s")
            self.done[fault.action, fault.target] += 1
            if fault.action == "kill":
                await self._cluster.targets[fault.target].kill()
                await asyncio.sleep(fault.seconds)
                await self._cluster.targets[fault.target].restart()
            elif fault.action == "freeze":
                await self._cluster.targets[fault.target].freeze()
                await asyncio.sleep(fault.seconds)
                await self._cluster.targets[fault.target].resume()
            else:
                await self._cut(fault)

    async def _cut(self, fault: Fault) -> None:
        proxy = self._cluster.proxies[fault.target]
        match fault.action:
            case "cut":
                proxy.cut()
            case "refuse":
                proxy.cut()
                proxy.refuse()
                await asyncio.sleep(fault.seconds)
                proxy.accept()
            case "stall":
                proxy.stall()
                await asyncio.sleep(fault.seconds)
                proxy.flow()
            case _:
                raise ValueError(fault.action)
