"""When a failed call is tried again, and how often: what the tool asks for, the policies, the deadline."""

import functools
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from temporalio.client import WorkflowHandle
from temporalio.service import RPCError, RPCStatusCode

from contracts.identity import node_workflow_id
from contracts.runs import NodeStatus
from tests.integration.outcome_table import (
    RETRY,
    Ending,
    Row,
    Seen,
    add,
    assert_as_wanted,
    dead,
    executed,
    failed,
    opened_ledger,
    perform,
    reconciled,
    settled,
)
from tests.lab import FAST_RETRY, Bench
from tests.waiting import eventually

LIMITED = failed("RATE_LIMITED", "http_429", "NONE")
DAY = 86_400

DATE_FORMS: dict[str, Callable[[datetime], str]] = {
    "imf-fixdate": lambda moment: f"{moment:%a, %d %b %Y %H:%M:%S} GMT",
    "rfc-850": lambda moment: f"{moment:%A, %d-%b-%y %H:%M:%S} GMT",
    "asctime": lambda moment: f"{moment:%a %b} {moment.day:2} {moment:%H:%M:%S %Y}",
}
"""HTTP's three (RFC 9110, section 5.6.7)."""


def limited(**headers: str) -> dict[str, Any]:
    return {"status": 429, "headers": {name.replace("_", "-"): value for name, value in headers.items()}}


def waited(seen: Seen) -> timedelta:
    """Between the first call's arrival and the second one's."""
    first, second, *_ = seen.calls
    return second.at - first.at


async def test_a_tool_is_not_called_again_before_the_time_that_it_asks_for(bench: Bench) -> None:
    moment = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=10)
    two = timedelta(seconds=2)
    by_delta = [
        Row(name="seconds", steps=[limited(retry_after="2"), {}], want=executed(LIMITED)),
        Row(name="reset", steps=[limited(ratelimit_reset="2"), {}], want=executed(LIMITED)),
        Row(name="ratelimit", steps=[limited(ratelimit='"burst";r=0;t=2'), {}], want=executed(LIMITED)),
        Row(
            name="retry-after-first",
            steps=[limited(retry_after="2", ratelimit_reset="0"), {}],
            want=executed(LIMITED),
        ),
        # Whoever turns a request away and says until when has done nothing: even a write without a key goes again.
        Row(
            name="unavailable",
            steps=[{"status": 503, "headers": {"retry-after": "2"}}, {}],
            want=executed(failed("DEPENDENCY_DOWN", "http_503", "NONE")),
        ),
        Row(
            name="locked",
            steps=[{"status": 423, "headers": {"retry-after": "2"}}, {}],
            want=executed(failed("TRANSIENT", "http_423", "NONE")),
        ),
        Row(
            name="broken",
            kind="key",
            steps=[{"status": 500, "headers": {"retry-after": "2"}}, {}],
            want=executed(failed("TRANSIENT", "http_500", "POSSIBLE")),
        ),
    ]
    by_date = [
        Row(name=name, steps=[limited(retry_after=form(moment)), {}], want=executed(LIMITED))
        for name, form in DATE_FORMS.items()
    ]
    past = moment - timedelta(days=1)
    at_once = [
        Row(name=f"past-{name}", steps=[limited(retry_after=form(past)), {}], want=executed(LIMITED))
        for name, form in DATE_FORMS.items()
    ]
    at_once += [
        Row(name=f"malformed-{number}", steps=[limited(retry_after=value), {}], want=executed(LIMITED))
        for number, value in enumerate(("soon", "-5", "1.5e9", "3600, 60", "2027-01-01T00:00:00Z", "+3600"))
    ]
    at_once.append(Row(name="no-header", steps=[limited(), {}], want=executed(LIMITED)))
    # A gateway stamps its rate limit on every answer, also on one that it gives after the tool has acted.
    unknown = [
        Row(
            name=name,
            steps=[{"status": 503, "commit": True, "headers": headers}],
            want=dead("UNKNOWN_SIDE_EFFECT", "http_503", "POSSIBLE", attempts=1, effects=1),
        )
        for name, headers in (
            ("unavailable-malformed", {"retry-after": "soon"}),
            ("unavailable-reset", {"ratelimit-reset": "0"}),
        )
    ]
    rows = [*by_delta, *by_date, *at_once, *unknown]
    all_seen = await perform(bench, rows)
    assert_as_wanted(rows, all_seen)
    for row in by_delta:
        assert waited(all_seen[row.name]) >= two, row.name
    for row in by_date:
        assert all_seen[row.name].calls[1].at >= moment, row.name
    for row in at_once:
        failure = all_seen[row.name].attempts[0]
        assert failure.next_eligible_at is not None
        assert failure.ended_at is not None
        # The policy's own wait, or none.
        assert failure.next_eligible_at - failure.ended_at < timedelta(seconds=1), row.name


async def test_a_wait_past_the_deadline_or_past_a_day_is_a_dead_letter_at_once(bench: Bench) -> None:
    in_two_days = DATE_FORMS["imf-fixdate"](datetime.now(UTC) + timedelta(days=2))
    once = dead("RATE_LIMITED", "http_429", "NONE", attempts=1)
    down = dead("DEPENDENCY_DOWN", "http_503", "NONE", attempts=1)
    hour = {"deadline_seconds": 3600}
    rows = [
        Row(name="deadline", steps=[limited(retry_after="3601")], node=hour, want=once),
        Row(name="deadline-reset", steps=[limited(ratelimit_reset="3601")], node=hour, want=once),
        Row(name="deadline-date", steps=[limited(retry_after=in_two_days)], node=hour, want=once),
        Row(name="day", steps=[limited(retry_after=str(DAY + 1))], want=once),
        Row(name="day-date", steps=[limited(retry_after=in_two_days)], want=once),
        Row(name="for-ever", steps=[limited(retry_after="9999999999")], want=once),
        Row(name="down", steps=[{"status": 503, "headers": {"retry-after": str(DAY + 1)}}], want=down),
        # An effect that is possible is asked about, here as everywhere.
        Row(
            name="possible",
            kind="key",
            steps=[{"status": 500, "commit": True, "headers": {"retry-after": str(DAY + 1)}}],
            reconcile=True,
            want=reconciled(failed("TRANSIENT", "http_500", "POSSIBLE")),
        ),
    ]
    assert_as_wanted(rows, await perform(bench, rows))


async def test_each_category_has_its_own_budget(bench: Bench) -> None:
    locked = failed("TRANSIENT", "http_423", "NONE")
    refused = {"url": f"http://127.0.0.1:{bench.tools.refused_port}/"}
    defaults = {"retry": FAST_RETRY}
    rows = [
        # The policies' own numbers.
        Row(
            name="transient",
            steps=[{"status": 423}],
            tool=defaults,
            want=dead("TRANSIENT", "http_423", "NONE", attempts=6),
        ),
        Row(
            name="limited", steps=[limited()], tool=defaults, want=dead("RATE_LIMITED", "http_429", "NONE", attempts=10)
        ),
        Row(
            name="down",
            tool=defaults | refused,
            want=dead("DEPENDENCY_DOWN", "connect_failed", "NONE", attempts=12, calls=0),
        ),
        # A tool's own.
        *[
            Row(
                name=f"limited-{attempts}",
                steps=[limited(retry_after="0")],
                tool={"retry": {"RATE_LIMITED": {"attempts": attempts}}},
                want=dead("RATE_LIMITED", "http_429", "NONE", attempts=attempts),
            )
            for attempts in (1, 2)
        ],
        Row(
            name="down-1",
            tool=refused | {"retry": {"DEPENDENCY_DOWN": {"attempts": 1}}},
            want=dead("DEPENDENCY_DOWN", "connect_failed", "NONE", attempts=1, calls=0),
        ),
        # Counted apart: two of one and three of the other are allowed.
        Row(
            name="mixed",
            steps=[{"status": status} for status in (429, 423, 429, 423)],
            want=Ending(
                end="TRANSIENT http_423",
                side_effect="NONE",
                attempts=(LIMITED, locked, LIMITED, locked),
                calls=4,
                effects=0,
            ),
        ),
        Row(
            name="mixed-success",
            steps=[*({"status": status} for status in (429, 423, 429)), {}],
            want=executed(LIMITED, locked, LIMITED),
        ),
        Row(
            name="last-of-many",
            steps=[*[{"status": 423}] * 5, {}],
            tool=defaults,
            want=executed(*[locked] * 5),
        ),
    ]
    assert_as_wanted(rows, await perform(bench, rows))


async def test_waits_grow_by_the_policy_and_jitter_only_adds(bench: Bench) -> None:
    policy = {"initial": "200ms", "backoff": 3.0, "maximum": "1s", "attempts": 5}
    categories = {"TRANSIENT": 423, "RATE_LIMITED": 429}
    rows = [
        Row(name=category, steps=[{"status": status}], tool={"retry": {category: policy}})
        for category, status in categories.items()
    ]
    # Without an override the first wait is the table's.
    rows += [
        Row(name=f"default-{category}", steps=[{"status": status}, {}], tool={"retry": {}})
        for category, status in categories.items()
    ]
    all_seen = await perform(bench, rows)
    waits: dict[str, tuple[float, ...]] = dict.fromkeys(categories, (0.2, 0.6, 1.0, 1.0))
    waits |= {"default-TRANSIENT": (1.0,), "default-RATE_LIMITED": (5.0,)}
    for name, seen in all_seen.items():
        planned = [attempt for attempt in seen.attempts if attempt.next_eligible_at is not None]
        assert len(planned) == len(waits[name]), name
        for attempt, wait, following in zip(planned, waits[name], seen.calls[1:], strict=True):
            assert attempt.next_eligible_at is not None
            assert attempt.ended_at is not None
            assert attempt.next_eligible_at - attempt.started_at >= timedelta(seconds=wait), name
            assert attempt.next_eligible_at - attempt.ended_at <= timedelta(seconds=wait * 1.25), name
            assert following.at >= attempt.next_eligible_at, name


async def test_past_its_deadline_a_node_is_a_dead_letter_of_its_last_category(bench: Bench) -> None:
    patient = {"initial": "1s", "maximum": "1s", "attempts": 1000}
    policies: dict[str, Any] = {"retry": dict.fromkeys(RETRY, patient)}
    soon: dict[str, Any] = {"deadline_seconds": 8}
    rows = [
        Row(name="transient", steps=[{"status": 423}], tool=policies, node=soon),
        Row(name="limited", steps=[limited()], tool=policies, node=soon),
        Row(
            name="down",
            tool=policies | {"url": f"http://127.0.0.1:{bench.tools.refused_port}/"},
            node=soon,
        ),
        Row(name="possible", kind="key", steps=[{"status": 500, "commit": True}], tool=policies, node=soon),
        Row(
            name="possible-asked",
            kind="key",
            steps=[{"status": 500, "commit": True}],
            tool=policies,
            node=soon,
            reconcile=True,
        ),
        # A tool that answers after the deadline has answered.
        Row(name="late-answer", steps=[{"delay": 9}], tool=policies, node=soon, want=executed()),
    ]
    all_seen = await perform(bench, rows)
    assert_as_wanted(rows, all_seen)
    ends = {name: (seen.ending.end, seen.ending.side_effect) for name, seen in all_seen.items()}
    assert ends == {
        "transient": ("TRANSIENT deadline_exceeded", "NONE"),
        "limited": ("RATE_LIMITED deadline_exceeded", "NONE"),
        "down": ("DEPENDENCY_DOWN deadline_exceeded", "NONE"),
        "possible": ("TRANSIENT deadline_exceeded", "POSSIBLE"),
        "possible-asked": ("RECONCILED", ""),
        "late-answer": ("EXECUTED", ""),
    }
    for name, seen in all_seen.items():
        # Nothing is sent after it.
        end = seen.attempts[0].started_at + timedelta(seconds=soon["deadline_seconds"])
        assert all(attempt.started_at < end for attempt in seen.attempts if attempt.code != "deadline_exceeded"), name


async def test_waiting_for_a_slot_costs_no_attempt_and_past_the_deadline_nothing_is_sent(bench: Bench) -> None:
    gate = bench.unique("gate")
    once = RETRY | {"TRANSIENT": {"attempts": 1}}
    row = Row(name="slow", steps=[{"gate": gate}, {}], tool={"concurrency": 1, "timeout": "110s", "retry": once})
    node = await add(bench, row)
    async with bench.worker(), opened_ledger(bench) as ledger:
        first = await bench.start(node)
        await bench.tools.wait_for(bench.unique(row.name), calls=1)
        late = await bench.start({**node, "deadline_seconds": 0.5})
        waiting = await bench.start(node)
        for run in (late, waiting):
            await eventually(functools.partial(_came_back, bench, run, row.name), "a delivery without a slot")
        await bench.tools.open_gate(gate)
        ends = {run: (await settled(bench, run))[row.name] for run in (first, waiting, late)}
        entry = await bench.entry(late, row.name)
        unsent = await ledger.node(late.id, row.name)
    assert [end.status for end in ends.values()] == ["SUCCEEDED", "SUCCEEDED", "DEAD_LETTERED"]
    assert [end.attempt_count for end in ends.values()] == [1, 1, 1]
    assert (entry.error.category, entry.error.code, entry.side_effect) == ("TRANSIENT", "deadline_exceeded", "NONE")
    assert unsent is not None
    assert unsent.attempts == entry.attempts
    assert len(await bench.tools.calls(bench.unique(row.name))) == 2


async def _came_back(bench: Bench, run: WorkflowHandle[Any, Any], node: str) -> bool:
    """Whether the node's call has been delivered more than once: after five seconds, without a slot."""
    workflow = bench.client.get_workflow_handle(node_workflow_id(run.id, node))
    try:
        described = await workflow.describe()
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return False
        raise
    return any(activity.attempt > 1 for activity in described.raw_description.pending_activities)


async def test_a_tool_that_asked_one_node_to_wait_is_free_for_the_others(bench: Bench) -> None:
    # Locked, not limited: it is about this call, and none of the others.
    row = Row(name="busy", steps=[{"status": 423, "headers": {"retry-after": "3600"}}, {}], tool={"concurrency": 1})
    node = await add(bench, row)
    async with bench.worker(), opened_ledger(bench) as ledger:
        waiting = await bench.start(node)

        async def told_to_wait() -> bool:
            view = await ledger.node(waiting.id, row.name)
            return view is not None and any(attempt.next_eligible_at for attempt in view.attempts)

        await eventually(told_to_wait, "the first node to be told to wait")
        others = [await bench.start(node) for _ in range(3)]
        for other in others:
            assert (await settled(bench, other))[row.name].status is NodeStatus.SUCCEEDED
        assert (await bench.status(waiting)).nodes[row.name].status is NodeStatus.RUNNING
        await waiting.cancel()
        await eventually(lambda: _ended(bench, waiting), "the run to be cancelled")
    assert len(await bench.tools.calls(bench.unique(row.name))) == 4


async def _ended(bench: Bench, run: Any) -> bool:
    return (await bench.status(run)).status == "CANCELLED"
