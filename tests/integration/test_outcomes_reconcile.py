"""Uncertain effects whose tool can be asked: committed, absent, or no answer."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from contracts.failures import MAX_RESENDS_AFTER_ABSENT
from tests.integration.outcome_table import (
    BUDGETS,
    Ending,
    Kind,
    Row,
    assert_as_wanted,
    dead,
    failed,
    perform,
    reconciled,
)
from tests.lab import Bench

WRITES: Sequence[Kind] = ("plain", "key")
LOST: dict[str, Any] = {"fault": "rst_after_read", "commit": True}
FORGOTTEN: dict[str, Any] = {"fault": "rst_after_read", "commit": False}
UNKNOWN = failed("UNKNOWN_SIDE_EFFECT", "connection_lost", "POSSIBLE")


def undecided(side_effect: str, asked: int) -> Ending:
    """A dead letter of one lost call after so many questions."""
    return dead("UNKNOWN_SIDE_EFFECT", "connection_lost", side_effect, attempts=1, effects=1, asked=asked)


async def test_a_committed_answer_is_the_nodes_result(bench: Bench) -> None:
    by_operation_and_input = f"{bench.tools.url}/r/{bench.unique('by-operation-and-input')}/{{row}}/{{operation_id}}"
    rows = [
        Row(name="told", steps=[LOST], reconcile=True, want=reconciled(UNKNOWN)),
        Row(
            name="whole-body",
            steps=[LOST],
            reconcile={"output": ""},
            asked_steps=[{"status": 200, "body": {"id": 1}}],
            want=reconciled(UNKNOWN),
        ),
        Row(
            name="null",
            steps=[LOST],
            reconcile={"output": "/result/0"},
            asked_steps=[{"status": 200, "body": {"result": [None]}}],
            want=reconciled(UNKNOWN),
        ),
        Row(
            name="own-statuses",
            steps=[LOST],
            reconcile={"committed": [410], "absent": [200], "output": "/a~1b"},
            asked_steps=[{"status": 410, "body": {"a/b": "c"}}],
            want=reconciled(UNKNOWN),
        ),
        Row(
            name="by-operation-and-input",
            steps=[LOST],
            reconcile={"url": by_operation_and_input},
            asked_steps=[{"status": 200, "body": {"result": 5}}],
            want=reconciled(UNKNOWN),
        ),
    ]
    all_seen = await perform(bench, rows)
    assert_as_wanted(rows, all_seen)
    outputs = {name: seen.output for name, seen in all_seen.items()}
    (call,) = all_seen["told"].calls
    assert outputs == {
        "told": {"id": f"{bench.unique('told')}-1", "key": call.key},
        "whole-body": {"id": 1},
        "null": None,
        "own-statuses": "c",
        "by-operation-and-input": 5,
    }
    (asked,) = all_seen["by-operation-and-input"].asked
    assert asked.method == "GET"
    assert asked.key is not None
    assert asked.key.startswith("by-operation-and-input/")
    assert asked.key.endswith("/by-operation-and-input/1"), "the field of the input, then the operation's id"


async def test_no_answer_is_asked_again_and_in_the_end_a_person_is_told(bench: Bench) -> None:
    attempts = BUDGETS["DEPENDENCY_DOWN"]
    redirect = {"status": 302, "headers": {"location": bench.tools.tool_url(bench.unique("elsewhere"))}}
    no_answers: dict[str, dict[str, Any]] = {
        "500": {"status": 500},
        "403": {"status": 403},
        "302": redirect,
        "202": {"status": 202},
        "reset": {"fault": "rst_after_read"},
        "garbage": {"fault": "garbage"},
    }
    rows = [
        Row(
            name=f"never-{name}",
            steps=[LOST],
            reconcile=True,
            asked_steps=[step],
            want=undecided("POSSIBLE", attempts),
        )
        for name, step in no_answers.items()
    ]
    rows += [
        Row(name="not-askable", steps=[LOST], want=undecided("POSSIBLE", 0)),
        Row(
            name="refused",
            steps=[LOST],
            reconcile={"url": f"http://127.0.0.1:{bench.tools.refused_port}/{{idempotency_key}}"},
            want=undecided("POSSIBLE", 0),
        ),
        Row(
            name="timed-out",
            steps=[LOST],
            reconcile=True,
            asked_steps=[{"fault": "hang"}],
            tool={"timeout": "3s", "retry": {"DEPENDENCY_DOWN": {"initial": "20ms", "attempts": 2}}},
            want=undecided("POSSIBLE", 2),
        ),
        Row(
            name="in-the-end",
            steps=[LOST],
            reconcile=True,
            asked_steps=[{"status": 503}, {"fault": "fin_after_read"}, {}],
            want=reconciled(UNKNOWN, asked=3),
        ),
    ]
    assert_as_wanted(rows, await perform(bench, rows))
    assert not await bench.tools.calls(bench.unique("elsewhere")), "a redirect was followed"


async def test_a_committed_answer_without_a_usable_result_confirms_the_effect(bench: Bench) -> None:
    confirmed = undecided("CONFIRMED", 1)
    rows = [
        Row(name="nothing-there", steps=[LOST], reconcile={"output": "/nowhere"}, want=confirmed),
        Row(name="not-json", steps=[LOST], reconcile=True, asked_steps=[{"fault": "not_json"}], want=confirmed),
        Row(
            name="too-large",
            steps=[LOST],
            reconcile=True,
            asked_steps=[{"fault": "huge"}],
            tool={"max_response_bytes": 1_000},
            want=confirmed,
        ),
        Row(
            name="breaks-schema",
            steps=[LOST],
            reconcile=True,
            tool={"output_schema": {"required": ["receipt"]}},
            want=confirmed,
        ),
        # Confirmed without a result is as final for a tool that dedupes as for any other.
        Row(
            name="key",
            kind="key",
            steps=[LOST],
            reconcile={"output": "/nowhere"},
            want=Ending(
                end="TRANSIENT connection_lost",
                side_effect="CONFIRMED",
                attempts=(failed("TRANSIENT", "connection_lost", "CONFIRMED"),) * 2,
                calls=2,
                effects=1,
                asked=1,
            ),
        ),
    ]
    assert_as_wanted(rows, await perform(bench, rows))


async def test_absent_is_believed_only_after_the_horizon_and_then_sent_again_with_the_same_key(bench: Bench) -> None:
    horizon = timedelta(seconds=10)
    slow: dict[str, Any] = {"timeout": "5s"}
    after: dict[str, Any] = {"absent_after": "5s"}
    resends = MAX_RESENDS_AFTER_ABSENT
    rows = [
        # The first "absent" was too early: the effect came after it.
        Row(
            name="late-effect",
            steps=[LOST],
            reconcile=after,
            tool=slow,
            asked_steps=[{"status": 404}, {}],
            want=reconciled(UNKNOWN, asked=2),
        ),
        Row(name="absent-once", steps=[FORGOTTEN, {}], reconcile=after, tool=slow),
        Row(name="absent-for-ever", steps=[FORGOTTEN], reconcile=True, tool={"timeout": "2s"}),
        Row(name="absent-until-the-last", steps=[FORGOTTEN] * resends + [{}], reconcile=True, tool={"timeout": "2s"}),
        # For whoever dedupes by key the budget is the category's: it was sent again anyway.
        Row(name="absent-by-key", kind="key", steps=[FORGOTTEN], reconcile=True, tool={"timeout": "2s"}),
        # A tool that has said 200 is not called again, whatever it says later.
        *[
            Row(
                name=f"{kind}-unusable-and-absent",
                kind=kind,
                steps=[{}],
                tool={"timeout": "2s", "output_schema": {"required": ["receipt"]}},
                reconcile=True,
                asked_steps=[{"status": 404}],
            )
            for kind in WRITES
        ],
    ]
    all_seen = await perform(bench, rows)
    assert_as_wanted(rows, all_seen)

    early, late = all_seen["late-effect"].asked
    assert late.at >= all_seen["late-effect"].attempts[0].started_at + horizon > early.at

    once = all_seen["absent-once"]
    assert (once.ending.end, once.ending.calls, once.ending.effects) == ("EXECUTED", 2, 1)
    assert once.attempts[1].started_at >= once.attempts[0].started_at + horizon

    for_ever = all_seen["absent-for-ever"].ending
    assert for_ever.end.startswith("UNKNOWN_SIDE_EFFECT ")
    assert (for_ever.side_effect, for_ever.calls) == ("NONE", 1 + resends)

    last = all_seen["absent-until-the-last"].ending
    assert (last.end, last.calls, last.effects) == ("EXECUTED", 1 + resends, 1)

    by_key = all_seen["absent-by-key"].ending
    assert by_key.end.startswith("TRANSIENT ")
    assert (by_key.side_effect, by_key.calls) == ("NONE", BUDGETS["TRANSIENT"])

    for kind in WRITES:
        unusable = all_seen[f"{kind}-unusable-and-absent"].ending
        assert (unusable.end, unusable.side_effect) == ("UNKNOWN_SIDE_EFFECT result_unusable", "CONFIRMED")
        assert (unusable.calls, unusable.effects) == (1, 1)
