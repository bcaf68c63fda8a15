"""Every status of the outcome table, answered by a real tool to a tool of each kind."""

from collections.abc import Iterator, Sequence

from tests.integration.outcome_table import (
    BUDGETS,
    Kind,
    Row,
    Step,
    assert_as_wanted,
    dead,
    executed,
    failed,
    perform,
    reconciled,
)
from tests.lab import Bench

INVALID_INPUT = (400, 404, 405, 406, 410, 411, 412, 413, 414, 415, 416, 417, 422, 426, 428, 431, 501, 505, 307, 308)
OTHER_4XX = (418, 424, 444, 499)
PERMISSION = (401, 402, 403, 407, 451)
TRANSIENT = (408, 421, 423, 425)
GATEWAY = (502, 503, 504)
UNKNOWN = (500, 507, 506, 508, 511, 599, 300, 301, 302, 303, 304, 305, 306, 399)
SUCCESS = (200, 201, 202, 203, 204, 205, 206, 207, 226, 299)

KINDS: Sequence[Kind] = ("plain", "key", "read")

EVERY_KIND = (400, 307, 401, 423, 429, 500, 502, 303)
"""A status or two of each row are sent to every kind of tool; the others to the one that can lose most."""


def answer(bench: Bench, status: int, **more: object) -> Step:
    """The answer; one that redirects names a place which nobody may ever call."""
    redirect = {"location": bench.tools.tool_url(bench.unique("elsewhere"))} if 300 <= status < 400 else {}
    return {"status": status, "headers": redirect, **more}


def without_effect(bench: Bench, category: str, status: int) -> Iterator[Row]:
    """A status that means: certainly not executed. It means the same for every kind, and nobody asks."""
    for kind in KINDS if status in EVERY_KIND else KINDS[:1]:
        yield Row(
            name=f"{status}-{kind}",
            kind=kind,
            steps=[answer(bench, status)],
            reconcile=True,
            want=dead(category, f"http_{status}", "NONE", attempts=BUDGETS.get(category, 1)),
        )


def uncertain(bench: Bench, status: int) -> Iterator[Row]:
    """A status that leaves it open, from a tool that has acted."""
    code = f"http_{status}"
    retried = "DEPENDENCY_DOWN" if status in GATEWAY else "TRANSIENT"
    attempts = BUDGETS[retried]
    steps = [answer(bench, status, commit=True)]
    yield Row(
        name=f"{status}-plain",
        steps=steps,
        want=dead("UNKNOWN_SIDE_EFFECT", code, "POSSIBLE", attempts=1, effects=1),
    )
    if status not in EVERY_KIND:
        return
    yield Row(
        name=f"{status}-plain-asked",
        steps=steps,
        reconcile=True,
        want=reconciled(failed("UNKNOWN_SIDE_EFFECT", code, "POSSIBLE")),
    )
    yield Row(
        name=f"{status}-key",
        kind="key",
        steps=steps,
        want=dead(retried, code, "POSSIBLE", attempts=attempts, effects=1),
    )
    yield Row(
        name=f"{status}-key-asked",
        kind="key",
        steps=steps,
        reconcile=True,
        want=reconciled(*[failed(retried, code, "POSSIBLE")] * attempts),
    )
    yield Row(
        name=f"{status}-read",
        kind="read",
        steps=[answer(bench, status)],
        reconcile=True,
        want=dead(retried, code, "NONE", attempts=attempts),
    )


async def check(bench: Bench, rows: list[Row]) -> None:
    assert_as_wanted(rows, await perform(bench, rows))
    assert not await bench.tools.calls(bench.unique("elsewhere")), "a redirect was followed"


async def test_a_status_that_refuses_for_good_is_called_once_and_waits_for_a_person(bench: Bench) -> None:
    rows = [row for status in INVALID_INPUT + OTHER_4XX for row in without_effect(bench, "INVALID_INPUT", status)]
    rows += [row for status in PERMISSION for row in without_effect(bench, "PERMISSION", status)]
    await check(bench, rows)


async def test_a_status_that_refuses_for_now_is_tried_again_within_its_budget(bench: Bench) -> None:
    rows = [row for status in TRANSIENT for row in without_effect(bench, "TRANSIENT", status)]
    rows += without_effect(bench, "RATE_LIMITED", 429)
    code = "http_503"
    for kind in KINDS:
        rows += [
            Row(
                name=f"turned-away-{kind}",
                kind=kind,
                reconcile=True,
                steps=[answer(bench, 503) | {"headers": {"retry-after": "0"}}],
                want=dead("DEPENDENCY_DOWN", code, "NONE", attempts=BUDGETS["DEPENDENCY_DOWN"]),
            ),
            Row(
                name=f"recovers-{kind}",
                kind=kind,
                steps=[answer(bench, 423), {"commit": kind != "read"}],
                want=executed(failed("TRANSIENT", "http_423", "NONE"), kind=kind),
            ),
        ]
    await check(bench, rows)


async def test_a_conflict_is_the_same_key_in_progress_only_where_the_tool_dedupes_by_key(bench: Bench) -> None:
    conflict = [answer(bench, 409)]
    refused = dead("INVALID_INPUT", "http_409", "NONE", attempts=1)
    in_progress = failed("TRANSIENT", "http_409", "POSSIBLE")
    rows = [
        Row(name="plain", reconcile=True, steps=conflict, want=refused),
        Row(name="read", kind="read", reconcile=True, steps=conflict, want=refused),
        Row(
            name="read-by-key",
            kind="read",
            tool={"idempotency": "key"},
            steps=[*conflict, {"commit": False}],
            want=executed(failed("TRANSIENT", "http_409", "NONE"), kind="read"),
        ),
        Row(
            name="key",
            kind="key",
            steps=conflict,
            want=dead("TRANSIENT", "http_409", "POSSIBLE", attempts=BUDGETS["TRANSIENT"]),
        ),
        Row(name="key-done", kind="key", steps=[*conflict, {}], want=executed(in_progress)),
        Row(
            name="key-asked",
            kind="key",
            steps=[answer(bench, 409, commit=True)],
            reconcile=True,
            want=reconciled(in_progress, in_progress),
        ),
    ]
    await check(bench, rows)


async def test_a_status_that_leaves_the_effect_open_is_never_sent_again_without_a_key(bench: Bench) -> None:
    await check(bench, [row for status in (*GATEWAY, *UNKNOWN) for row in uncertain(bench, status)])


async def test_every_2xx_is_a_success(bench: Bench) -> None:
    rows = [
        Row(
            name=f"{status}-{kind}",
            kind=kind,
            steps=[{"status": status, "commit": kind != "read", "body": {"id": status}}],
            want=executed(kind=kind),
        )
        for status in SUCCESS
        for kind in (KINDS if status in (200, 202) else KINDS[:1])
    ]
    all_seen = await perform(bench, rows)
    assert_as_wanted(rows, all_seen)
    outputs = {name: seen.output for name, seen in all_seen.items()}
    # 204 has no body: its output is null.
    assert outputs == {row.name: None if row.name == "204-plain" else row.steps[0]["body"] for row in rows}
