"""What can go wrong on the wire: before the request is sent, after it, and in the answer's body."""

from collections.abc import Iterator
from typing import Any

from tests.integration.outcome_table import (
    BUDGETS,
    KINDS,
    RETRY,
    Kind,
    Row,
    Step,
    add,
    assert_as_wanted,
    dead,
    executed,
    failed,
    opened_ledger,
    perform,
    reconciled,
    settled,
    succeeded,
    told,
)
from tests.integration.raw_server import never_reading_port
from tests.lab import Bench
from tests.waiting import eventually

TIMED_OUT = "3s"
"""The timeout of tools that never answer: long enough for a busy machine to connect and to send."""


def not_sent(name: str, kind: Kind, code: str, **tool: Any) -> Row:
    """The request never left: certainly no effect, whatever the kind, and nobody asks."""
    return Row(
        name=f"{name}-{kind}",
        kind=kind,
        reconcile=True,
        tool=tool,
        any_code=code == "*",
        want=dead("DEPENDENCY_DOWN", code, "NONE", attempts=BUDGETS["DEPENDENCY_DOWN"], calls=0),
    )


async def test_a_request_that_never_left_is_tried_again_whatever_the_tool(bench: Bench) -> None:
    tools = bench.tools
    refused = f"http://127.0.0.1:{tools.refused_port}/"
    rows = [not_sent("refused", kind, "connect_failed", url=refused) for kind in KINDS]
    rows += [
        # Without a resolver at all it is the connect timeout.
        not_sent("unknown-host", "plain", "*", url="http://no-such-host.invalid/"),
        not_sent("not-tls", "plain", "connect_failed", url=f"https://127.0.0.1:{tools.port}/"),
        not_sent(
            "unreachable", "plain", "connect_timeout", url=f"http://127.0.0.1:{tools.blackhole_port}/", timeout="1s"
        ),
    ]
    assert_as_wanted(rows, await perform(bench, rows))


def lost_once(name: str, code: str, step: Step, side_effect: str = "POSSIBLE", **tool: Any) -> Row:
    """The request went, the answer did not come (whole): a tool that writes without a key, and has acted."""
    return Row(
        name=f"{name}-plain",
        steps=[{"commit": True, **step}],
        tool=tool,
        want=dead("UNKNOWN_SIDE_EFFECT", code, side_effect, attempts=1, effects=1),
    )


def lost(name: str, code: str, step: Step, side_effect: str = "POSSIBLE", **tool: Any) -> Iterator[Row]:
    """The same for each kind of tool, with and without a way to ask."""
    acted: list[Step] = [{"commit": True, **step}]
    unknown = failed("UNKNOWN_SIDE_EFFECT", code, side_effect)
    retried = failed("TRANSIENT", code, side_effect)
    attempts = BUDGETS["TRANSIENT"]
    yield lost_once(name, code, step, side_effect, **tool)
    yield Row(name=f"{name}-plain-asked", steps=acted, tool=tool, reconcile=True, want=reconciled(unknown))
    yield Row(
        name=f"{name}-key",
        kind="key",
        steps=acted,
        tool=tool,
        want=dead("TRANSIENT", code, side_effect, attempts=attempts, effects=1),
    )
    yield Row(
        name=f"{name}-key-asked",
        kind="key",
        steps=acted,
        tool=tool,
        reconcile=True,
        want=reconciled(*[retried] * attempts),
    )
    yield Row(
        name=f"{name}-read",
        kind="read",
        steps=[{**step, "commit": False}],
        tool=tool,
        reconcile=True,
        want=dead("TRANSIENT", code, "NONE", attempts=attempts),
    )
    if not tool:
        yield Row(name=f"{name}-key-again", kind="key", steps=[*acted, {}], want=executed(retried))


async def test_an_answer_that_never_came_leaves_the_effect_possible(bench: Bench) -> None:
    rows = [
        *lost("reset", "connection_lost", {"fault": "rst_after_read"}),
        *lost("disconnect", "protocol_error", {"fault": "fin_after_read"}),
        *lost("read-timeout", "read_timeout", {"fault": "hang"}, timeout=TIMED_OUT),
        lost_once("garbage", "protocol_error", {"fault": "garbage"}),
        lost_once("header-bomb", "protocol_error", {"fault": "header_bomb"}),
    ]
    assert_as_wanted(rows, await perform(bench, rows))


async def test_a_request_that_went_in_part_leaves_the_effect_possible(bench: Bench) -> None:
    with never_reading_port() as never_reading:
        unread = {"url": f"http://127.0.0.1:{bench.tools.close_unread_port}/"}
        stuck = {"url": f"http://127.0.0.1:{never_reading}/", "timeout": TIMED_OUT}
        large = {"input": {"padding": "x" * 100_000}}
        rows = []
        for name, code, tool, node in (
            ("close-unread", "connection_lost", unread, {}),
            ("write-timeout", "write_timeout", stuck, large),
        ):
            more: dict[str, Any] = {"tool": tool, "node": node}
            rows += [
                Row(
                    name=f"{name}-plain",
                    want=dead("UNKNOWN_SIDE_EFFECT", code, "POSSIBLE", attempts=1, calls=0),
                    **more,
                ),
                Row(
                    name=f"{name}-key",
                    kind="key",
                    want=dead("TRANSIENT", code, "POSSIBLE", attempts=BUDGETS["TRANSIENT"], calls=0),
                    **more,
                ),
                Row(
                    name=f"{name}-read",
                    kind="read",
                    want=dead("TRANSIENT", code, "NONE", attempts=BUDGETS["TRANSIENT"], calls=0),
                    **more,
                ),
            ]
        assert_as_wanted(rows, await perform(bench, rows))


async def test_a_2xx_whose_body_was_lost_has_happened(bench: Bench) -> None:
    code, happened = "result_lost", "CONFIRMED"
    rows = [
        *lost("truncated", code, {"fault": "truncated"}, happened),
        # All are lost in the same way: what each kind of tool makes of it is in the rows above.
        *[
            lost_once(fault, code, {"fault": fault, "size": 100_000}, happened)
            for fault in ("rst_in_body", "bad_gzip", "invalid_utf8", "not_json", "nan", "deep_json")
        ],
        lost_once("hang_in_body", code, {"fault": "hang_in_body"}, happened, timeout=TIMED_OUT),
        lost_once("slow_body", code, {"fault": "slow_body", "rate": 100, "size": 100_000}, happened, timeout=TIMED_OUT),
    ]
    assert_as_wanted(rows, await perform(bench, rows))


async def test_a_2xx_that_cannot_be_used_is_never_repeated_whatever_the_tool(bench: Bench) -> None:
    code = "result_unusable"
    once = dead("UNKNOWN_SIDE_EFFECT", code, "CONFIRMED", attempts=1, effects=1)
    unusable = failed("UNKNOWN_SIDE_EFFECT", code, "CONFIRMED")
    breaking: dict[str, Any] = {"output_schema": {"type": "object", "required": ["receipt"]}}
    small = {"max_response_bytes": 1_000}
    rows = [
        *[
            Row(name=f"{name}-{kind}", kind=kind, steps=[{"commit": True, **step}], tool=tool, want=once)
            for name, step, tool in (
                ("breaks-schema", {}, breaking),
                ("too-large", {"fault": "huge", "size": 100_000}, small),
                ("gzip-bomb", {"fault": "gzip_bomb", "size": 10_000_000}, small),
                ("larger-than-any-output", {"fault": "huge", "size": 1_100_000}, {"max_response_bytes": 4_000_000}),
            )
            for kind in ("plain", "key")
            if kind == "plain" or name in ("breaks-schema", "too-large")
        ],
        Row(
            name="breaks-schema-read",
            kind="read",
            reconcile=True,
            steps=[{"commit": False}],
            tool=breaking,
            want=dead("UNKNOWN_SIDE_EFFECT", code, "NONE", attempts=1),
        ),
        # Whoever can be asked may give the same result in a smaller form, or the same unusable one again.
        Row(
            name="too-large-asked",
            steps=[{"commit": True, "fault": "huge", "size": 100_000}],
            tool=small,
            reconcile=True,
            want=reconciled(unusable),
        ),
        Row(
            name="breaks-schema-asked",
            kind="key",
            steps=[{}],
            tool=breaking,
            reconcile=True,
            want=dead("UNKNOWN_SIDE_EFFECT", code, "CONFIRMED", attempts=1, effects=1, asked=1),
        ),
    ]
    assert_as_wanted(rows, await perform(bench, rows))


async def test_the_status_of_a_failure_counts_whatever_becomes_of_its_body(bench: Bench) -> None:
    refused = dead("PERMISSION", "http_403", "NONE", attempts=1)
    rows = [
        Row(name=f"403-{fault}", steps=[{"status": 403, "fault": fault}], want=refused)
        for fault in ("truncated", "rst_in_body", "bad_gzip", "not_json")
    ]
    rows += [
        Row(
            name="403-hang",
            steps=[{"status": 403, "fault": "hang_in_body"}],
            tool={"timeout": TIMED_OUT},
            want=refused,
        ),
        Row(
            name="403-huge",
            steps=[{"status": 403, "fault": "huge", "size": 100_000}],
            tool={"max_response_bytes": 1_000},
            want=refused,
        ),
        Row(
            name="500-truncated",
            steps=[{"status": 500, "fault": "truncated", "commit": True}],
            want=dead("UNKNOWN_SIDE_EFFECT", "http_500", "POSSIBLE", attempts=1, effects=1),
        ),
    ]
    assert_as_wanted(rows, await perform(bench, rows))


async def test_a_full_pool_is_no_attempt_at_the_tool_and_costs_none(bench: Bench) -> None:
    row = Row(
        name="pooled",
        steps=[{"fault": "rst_after_read", "commit": True}, {}],
        reconcile=True,
        asked_steps=[{"gate": bench.unique("asked")}],
        tool={"concurrency": 1, "retry": RETRY | {"TRANSIENT": {"attempts": 1}}},
    )
    node = await add(bench, row)
    async with bench.worker(), opened_ledger(bench) as ledger:
        asking = await bench.start(node)
        # The question holds the tool's only connection; no slot, since those are for calls.
        await bench.tools.wait_for(bench.unique(row.name), reconcile_calls=1)
        waiting = await bench.start(node)

        async def gave_up() -> bool:
            view = await ledger.node(waiting.id, row.name)
            return view is not None and any(attempt.ended_at for attempt in view.attempts)

        await eventually(gave_up, "the pool to be found full")
        await bench.tools.open_gate(bench.unique("asked"))
        await settled(bench, asking)
        await settled(bench, waiting)
        view = await ledger.node(waiting.id, row.name)
    assert view is not None
    *failures, success = map(told, view.attempts)
    assert set(failures) == {failed("TRANSIENT", "pool_exhausted", "NONE")}
    assert success == succeeded()
    # One of each run.
    assert len(await bench.tools.calls(bench.unique(row.name))) == 2
    assert len(await bench.tools.effects(bench.unique(row.name))) == 2
