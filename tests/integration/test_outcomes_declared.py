"""What a tool declares of itself, its rules and its window, and what an operation's attempts come to together."""

from typing import Any

from tests.integration.outcome_table import (
    BUDGETS,
    RETRY,
    Ending,
    Row,
    assert_as_wanted,
    dead,
    executed,
    failed,
    perform,
    reconciled,
)
from tests.lab import Bench


def rules(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"rules": list(entries), **more}


async def test_a_rule_is_read_before_any_row(bench: Bench) -> None:
    quota = {"status": 429, "header": "X-Error-Code", "equals": "quota", "category": "PERMISSION"}
    not_ok = {"status": 200, "pointer": "/ok", "equals": False, "category": "INVALID_INPUT", "side_effect": "NONE"}
    refused = {"body": {"ok": False}, "commit": False}
    rows = [
        # By a status, a class of statuses, a header, a place in the body; and by none of them.
        Row(
            name="status",
            steps=[{"status": 409}, {}],
            tool=rules({"status": 409, "category": "TRANSIENT", "side_effect": "NONE"}),
            want=executed(failed("TRANSIENT", "http_409", "NONE")),
        ),
        Row(
            name="class",
            steps=[{"status": 422}],
            tool=rules({"status": "4xx", "category": "PERMISSION"}),
            want=dead("PERMISSION", "http_422", "NONE", attempts=1),
        ),
        Row(
            name="other-class",
            steps=[{"status": 422}],
            tool=rules({"status": "5xx", "category": "PERMISSION"}, {"status": 421, "category": "PERMISSION"}),
            want=dead("INVALID_INPUT", "http_422", "NONE", attempts=1),
        ),
        Row(
            name="header",
            steps=[{"status": 429, "headers": {"x-error-code": "quota"}}],
            tool=rules(quota),
            want=dead("PERMISSION", "http_429", "NONE", attempts=1),
        ),
        Row(
            name="other-header",
            steps=[{"status": 429, "headers": {"x-error-code": "burst"}}, {}],
            tool=rules(quota),
            want=executed(failed("RATE_LIMITED", "http_429", "NONE")),
        ),
        Row(
            name="body-of-a-failure",
            steps=[{"status": 400, "body": {"error": [{"code": "LOCKED"}]}}, {}],
            tool=rules({"status": 400, "pointer": "/error/0/code", "equals": "LOCKED", "category": "TRANSIENT"}),
            want=executed(failed("TRANSIENT", "http_400", "NONE")),
        ),
        Row(
            name="body-of-a-success",
            steps=[refused],
            tool=rules(not_ok),
            want=dead("INVALID_INPUT", "http_200", "NONE", attempts=1),
        ),
        Row(name="false-is-not-null", steps=[{"body": {"ok": None}}], tool=rules(not_ok), want=executed()),
        Row(name="false-is-not-zero", steps=[{"body": {"ok": 0}}], tool=rules(not_ok), want=executed()),
        Row(name="nowhere", steps=[{"body": {"id": 1}}], tool=rules(not_ok), want=executed()),
        Row(
            name="pointer-into-a-lost-body",
            steps=[{"body": {"ok": False}, "fault": "truncated", "commit": True}],
            tool=rules(not_ok),
            want=dead("UNKNOWN_SIDE_EFFECT", "result_lost", "CONFIRMED", attempts=1, effects=1),
        ),
        Row(
            name="first-match-wins",
            steps=[refused],
            tool=rules(not_ok, {"status": 200, "category": "PERMISSION", "side_effect": "NONE"}),
            want=dead("INVALID_INPUT", "http_200", "NONE", attempts=1),
        ),
        Row(
            name="accepted-is-not-done",
            steps=[{"status": 202, "commit": False}, {}],
            tool=rules({"status": 202, "category": "TRANSIENT", "side_effect": "NONE"}),
            want=executed(failed("TRANSIENT", "http_202", "NONE")),
        ),
    ]
    assert_as_wanted(rows, await perform(bench, rows))


async def test_a_rule_can_make_a_success_of_any_answer(bench: Bench) -> None:
    gone = rules({"status": 404, "category": "SUCCESS"})
    rows = [
        Row(
            name="already-gone",
            steps=[{"status": 404, "body": {"id": "gone"}, "commit": True}],
            tool=gone | {"method": "DELETE"},
            want=executed(),
        ),
        Row(
            name="already-done",
            kind="key",
            steps=[{"status": 409, "body": {"state": "done", "id": 7}, "commit": True}],
            tool=rules({"pointer": "/state", "equals": "done", "category": "SUCCESS"}),
            want=executed(),
        ),
        Row(
            name="unusable",
            steps=[{"status": 404, "body": [], "commit": True}],
            tool=gone | {"output_schema": {"type": "object"}},
            want=dead("UNKNOWN_SIDE_EFFECT", "result_unusable", "CONFIRMED", attempts=1, effects=1),
        ),
        Row(
            name="lost",
            steps=[{"status": 404, "fault": "truncated", "commit": True}],
            tool=gone,
            want=dead("UNKNOWN_SIDE_EFFECT", "result_lost", "CONFIRMED", attempts=1, effects=1),
        ),
    ]
    all_seen = await perform(bench, rows)
    assert_as_wanted(rows, all_seen)
    assert all_seen["already-gone"].output == {"id": "gone"}
    assert all_seen["already-done"].output == {"state": "done", "id": 7}


async def test_a_rule_that_names_no_side_effect_takes_it_from_the_table(bench: Bench) -> None:
    transient_500 = rules({"status": 500, "category": "TRANSIENT"})
    possible = failed("TRANSIENT", "http_500", "POSSIBLE")
    rows = [
        # A category that is retried makes no effect harmless to repeat: nothing is sent a second time without a key.
        Row(
            name="plain",
            steps=[{"status": 500, "commit": True}],
            tool=transient_500,
            want=Ending(
                end="UNKNOWN_SIDE_EFFECT http_500", side_effect="POSSIBLE", attempts=(possible,), calls=1, effects=1
            ),
        ),
        Row(
            name="plain-asked",
            steps=[{"status": 500, "commit": True}],
            tool=transient_500,
            reconcile=True,
            want=reconciled(possible),
        ),
        Row(
            name="key",
            kind="key",
            steps=[{"status": 500}, {}],
            tool=transient_500,
            want=executed(possible),
        ),
        Row(
            name="read",
            kind="read",
            steps=[{"status": 500}],
            tool=transient_500,
            want=dead("TRANSIENT", "http_500", "NONE", attempts=BUDGETS["TRANSIENT"]),
        ),
        Row(
            name="refused-after-all",
            steps=[{"status": 500}, {}],
            tool=rules({"status": 500, "category": "TRANSIENT", "side_effect": "NONE"}),
            want=executed(failed("TRANSIENT", "http_500", "NONE")),
        ),
        Row(
            name="success-turned-down",
            steps=[{"body": {"ok": False}}],
            tool=rules({"pointer": "/ok", "equals": False, "category": "PERMISSION"}),
            want=dead("PERMISSION", "http_200", "CONFIRMED", attempts=1, effects=1),
        ),
        Row(
            name="refusal-in-doubt",
            steps=[{"status": 403, "commit": True}],
            tool=rules({"status": 403, "category": "PERMISSION", "side_effect": "POSSIBLE"}),
            reconcile=True,
            want=reconciled(failed("PERMISSION", "http_403", "POSSIBLE")),
        ),
        Row(
            name="unknown-by-rule",
            kind="key",
            steps=[{"status": 403}, {}],
            tool=rules({"status": 403, "category": "UNKNOWN_SIDE_EFFECT", "side_effect": "POSSIBLE"}),
            want=executed(failed("TRANSIENT", "http_403", "POSSIBLE")),
        ),
        Row(
            name="read-by-rule",
            kind="read",
            steps=[{"status": 403}],
            tool=rules({"status": 403, "category": "PERMISSION", "side_effect": "POSSIBLE"}),
            want=dead("PERMISSION", "http_403", "NONE", attempts=1),
        ),
    ]
    assert_as_wanted(rows, await perform(bench, rows))


async def test_a_key_is_trusted_only_inside_its_window(bench: Bench) -> None:
    late: dict[str, Any] = {"dedupe_window": "3s", "retry": RETRY | {"TRANSIENT": {"initial": "4s", "attempts": 3}}}
    in_time = late | {"dedupe_window": "1h"}
    first = {"status": 500, "commit": True}
    possible = failed("TRANSIENT", "http_500", "POSSIBLE")
    busy = failed("TRANSIENT", "http_423", "NONE")
    rows = [
        Row(name="inside", kind="key", steps=[{"status": 500}, {}], tool=in_time, want=executed(possible)),
        Row(
            name="outside",
            kind="key",
            steps=[first, {}],
            tool=late,
            want=Ending(
                end="UNKNOWN_SIDE_EFFECT http_500", side_effect="POSSIBLE", attempts=(possible,), calls=1, effects=1
            ),
        ),
        Row(name="outside-asked", kind="key", steps=[first, {}], tool=late, reconcile=True, want=reconciled(possible)),
        # Nothing that is certain not to have happened needs a window.
        Row(name="outside-refused", kind="key", steps=[{"status": 423}, {}], tool=late, want=executed(busy)),
        Row(
            name="outside-unknown",
            kind="key",
            steps=[{"status": 423}, first],
            tool=late,
            want=Ending(
                end="UNKNOWN_SIDE_EFFECT http_500",
                side_effect="POSSIBLE",
                attempts=(busy, failed("UNKNOWN_SIDE_EFFECT", "http_500", "POSSIBLE")),
                calls=2,
                effects=1,
            ),
        ),
    ]
    assert_as_wanted(rows, await perform(bench, rows))


async def test_an_operations_side_effect_is_the_worst_that_nothing_has_settled(bench: Bench) -> None:
    lost = failed("TRANSIENT", "connection_lost", "POSSIBLE")
    cut_off = failed("TRANSIENT", "result_lost", "CONFIRMED")
    refused = failed("PERMISSION", "http_403", "NONE")
    acted = {"fault": "rst_after_read", "commit": True}
    forgot = {"fault": "rst_after_read", "commit": False}
    rows = [
        Row(
            name="refused-later",
            kind="key",
            steps=[acted, {"status": 403}],
            want=Ending(
                end="PERMISSION http_403", side_effect="POSSIBLE", attempts=(lost, refused), calls=2, effects=1
            ),
        ),
        Row(
            name="refused-later-asked",
            kind="key",
            steps=[acted, {"status": 403}],
            reconcile=True,
            want=reconciled(lost, refused),
        ),
        Row(
            name="confirmed-and-refused",
            kind="key",
            steps=[{"fault": "truncated"}, {"status": 403}],
            want=Ending(
                end="PERMISSION http_403", side_effect="CONFIRMED", attempts=(cut_off, refused), calls=2, effects=1
            ),
        ),
        Row(
            name="limited-for-ever",
            kind="key",
            steps=[acted, {"status": 429}],
            want=Ending(
                end="RATE_LIMITED http_429",
                side_effect="POSSIBLE",
                attempts=(lost, *[failed("RATE_LIMITED", "http_429", "NONE")] * BUDGETS["RATE_LIMITED"]),
                calls=1 + BUDGETS["RATE_LIMITED"],
                effects=1,
            ),
        ),
        Row(
            name="success-settles",
            kind="key",
            steps=[acted, {"status": 423}, {}],
            want=executed(lost, failed("TRANSIENT", "http_423", "NONE")),
            tool={"retry": RETRY | {"TRANSIENT": {"initial": "20ms", "attempts": 3}}},
        ),
        Row(
            name="absent-settles",
            kind="key",
            steps=[forgot, {"status": 403}],
            reconcile=True,
            tool={"timeout": "3s"},
            asked_steps=[{"status": 404}],
        ),
    ]
    all_seen = await perform(bench, rows)
    assert_as_wanted(rows, all_seen)
    # It is asked again until the first attempt can have no effect any more.
    settled = all_seen["absent-settles"].ending
    assert (settled.end, settled.side_effect, settled.calls) == ("PERMISSION http_403", "NONE", 2)
