"""What holds a call back for the sake of its tool: that it asked to be left alone, that it is down, or its rate.

What one call has learned holds for all others; one probe finds out when that is over, not every operation by itself.
All of it inside transactions of the `Store`.
"""

from datetime import timedelta
from typing import Any, Final

from activities.ledger.clock import Moment
from activities.ledger.records import ClaimRequest, Paused
from activities.ledger.rows import Row, lease_left, own_time, to_text, to_time
from contracts.failures import Category, Code, Outcome
from contracts.identity import OperationId

__all__ = ["Pauses"]

_REFUSALS: Final = (Category.RATE_LIMITED, Category.DEPENDENCY_DOWN)
_DOWN: Final = 3
"""Failures in a row: one bad answer of a flaky tool must not stop a thousand others."""
_PROBING: Final = timedelta(seconds=1)
"""In how long the others ask again while a probe is under way; most have an end by then."""
_TURN_WITHIN: Final = timedelta(seconds=5)
"""How long a delivery waits for its turn at most; a queue longer than that waits in Temporal."""
_ROUNDING: Final = 0.001


class Pauses:
    """The tools' pauses, over the queries of one SQL dialect.

    There is one while ``until`` is set: before that time nobody is granted a claim, and from then on one at a time, the
    probe, until one has been answered. Whose failure it came from may be the probe sooner: it has a time of its own,
    which an operator can bring forward. Without ``until``, failures of an unreachable tool are only counted.
    """

    def __init__(self, queries: Any) -> None:
        self._sql = queries

    def wait(self, connection: Any, moment: Moment, request: ClaimRequest, epoch: int) -> timedelta | Paused:
        """How long a claim that is about to be granted has to wait before its call, or that it is not granted now."""
        return self._ask(connection, moment, request, epoch) or self._take_turn(connection, moment, request)

    def _ask(self, connection: Any, moment: Moment, request: ClaimRequest, epoch: int) -> Paused | None:
        """None makes it the probe where there is a pause."""
        pause = self._sql.pause(connection, tool=request.tool)
        if pause is None or pause["until"] is None:
            return None
        category = Category(pause["category"])
        left = _left(moment, pause)
        if left > timedelta(0) and pause["opener"] != str(request.operation):
            return Paused(remaining=left, category=category)
        # A probe whose lease has run out is lost; the next one takes its place, and of many at once, the first.
        probing = lease_left(moment, pause)
        if probing <= timedelta(0) and self._sql.begin_probe(
            connection,
            tool=request.tool,
            operation_id=str(request.operation),
            epoch=epoch,
            until=pause["until"],
            earlier=pause["probe"],
            earlier_epoch=pause["probe_epoch"],
        ):
            return None
        return Paused(remaining=_PROBING, category=category, probing=True)

    def _take_turn(self, connection: Any, moment: Moment, request: ClaimRequest) -> timedelta | Paused:
        """An interval behind the call before it.

        The server's limit on the tool's queue keeps the average; after a pause it lets through what has gathered there.
        """
        if request.interval is None:
            return timedelta(0)
        now, interval = moment.seconds, request.interval.total_seconds()
        latest = now + _TURN_WITHIN.total_seconds()
        turn = self._sql.take_turn(
            connection,
            tool=request.tool,
            boot=moment.boot,
            now=now,
            interval=interval,
            after_now=now + interval,
            latest=latest,
            beyond=latest + interval + _ROUNDING,
        )
        if turn is None:
            free_at = self._sql.turn(connection, tool=request.tool)["free_at"]
            return Paused(remaining=timedelta(seconds=free_at - latest), category=Category.RATE_LIMITED, paced=True)
        return timedelta(seconds=max(0.0, turn["free_at"] - interval - now))

    def answered(self, connection: Any, operation: OperationId, epoch: int) -> None:
        """The tool works: nothing is counted any more, and if the probe says so, the pause is over.

        Whoever was on its way when the pause began lifts nothing: that others got through is why a tool says 429.
        """
        self._sql.lift_pause(connection, operation_id=str(operation), epoch=epoch)

    def failed(
        self,
        connection: Any,
        moment: Moment,
        operation: Row,
        outcome: Outcome,
        wait: timedelta | None,
        floor: timedelta | None,
    ) -> None:
        """What a failed attempt says of its tool.

        Args:
            connection: In its transaction.
            moment: The present.
            operation: Its row, under the epoch of the attempt.
            outcome: How the attempt failed.
            wait: In how long its next one is planned; None: a person is asked; the others find out.
            floor: How long the tool asks to be left alone, by everybody.
        """
        attempt = {"operation_id": operation["operation_id"], "epoch": operation["epoch"]}
        # A deadline that passes before a call only repeats the category of the last one.
        refused = outcome.category in _REFUSALS and outcome.code != Code.DEADLINE_EXCEEDED
        if not refused:
            if outcome.http_status is not None:
                self._sql.lift_pause(connection, **attempt)
            else:
                # It says nothing of the tool; if it was the probe, another has to be.
                self._sql.end_probe(connection, **attempt)
            return
        probe = self._sql.end_probe(connection, **attempt) == 1
        now = {"started_at": to_text(moment.now), "started_boot": moment.boot, "started_clock": moment.seconds}
        pause = self._sql.count_failure(connection, tool=operation["tool"], category=outcome.category, **now)
        opens = outcome.category is Category.RATE_LIMITED or pause["until"] is not None or pause["failures"] >= _DOWN
        asked = floor if floor is not None else wait
        if asked is None or not opens:
            return
        left = _left(moment, pause)
        # What was on its way when the pause began does not change it, unless the tool itself asks for more.
        if left <= timedelta(0) or (asked > left and (probe or floor is not None)):
            self._sql.open_pause(
                connection,
                tool=operation["tool"],
                operation_id=operation["operation_id"],
                category=outcome.category,
                until=to_text(moment.now + asked),
                **now,
            )


def _left(moment: Moment, pause: Row) -> timedelta:
    return to_time(pause["until"]) - own_time(moment, pause) if pause["until"] is not None else timedelta(0)
