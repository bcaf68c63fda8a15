"""A call of the product's, with something of a test's on its way."""

import math
from datetime import timedelta

import aiohttp

from activities.http import Call
from activities.wire import Moment

__all__ = ["WatchedCall"]


class WatchedCall(Call):
    """Wraps a call: what it does about a moment it does between a test's own `before` and `after`."""

    def __init__(self, call: Call) -> None:
        super().__init__(lambda: None, math.inf)
        self._call = call

    @property
    def seconds_left(self) -> float:
        return self._call.seconds_left

    def timed_out(self, limit: timedelta) -> aiohttp.ServerTimeoutError:
        return self._call.timed_out(limit)

    async def reached(self, moment: Moment) -> None:
        await self.before(moment)
        await self._call.reached(moment)
        await self.after(moment)

    async def before(self, moment: Moment) -> None:
        """Nothing, unless a test says so."""

    async def after(self, moment: Moment) -> None:
        """The same."""
