"""Names and list filters, as pure rules."""

from datetime import UTC, datetime, timedelta

import pytest

from activities.executions import quote_value
from workers.dead_letters import EntryId, Filter, list_filters

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize("text", ["order-1042/charge", "order-1042/charge/dead-letter"])
def test_a_dead_letter_is_named_by_run_and_node_or_by_its_workflow(text: str) -> None:
    entry_id = EntryId.parse(text)
    assert str(entry_id) == "order-1042/charge"
    assert entry_id.workflow_id == "order-1042/charge/dead-letter"


def test_a_node_may_be_called_dead_letter() -> None:
    assert EntryId.parse("r/dead-letter").node_id == "dead-letter"
    assert EntryId.parse("r/dead-letter/dead-letter").node_id == "dead-letter"


@pytest.mark.parametrize("text", ["", "order-1042", "/charge", "order/", "a/b/1", "a/b/c/dead-letter", "a/-b", "a/b c"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"(a|run|node) id |RUN_ID/NODE_ID"):
        EntryId.parse(text)


@pytest.mark.parametrize(
    ("value", "quoted"),
    [
        ("plain", "'plain'"),
        ("o'brien", "'o\\'brien'"),
        ("' OR '1'='1", "'\\' OR \\'1\\'=\\'1'"),
        ("a%b_c", "'a%b_c'"),
        ('say "x"', None),
        ("back\\slash", None),
    ],
)
def test_a_value_never_leaves_its_quotes(value: str, quoted: str | None) -> None:
    assert quote_value(value) == quoted


def test_by_default_only_what_waits_is_listed() -> None:
    filters = list_filters(Filter(), NOW)
    assert filters == ["WorkflowType = 'DeadLetter'", "CloseTime IS NULL", "RedriveStatus = 'AWAITING_DECISION'"]


def test_every_filter_narrows() -> None:
    wanted = Filter(
        tool="pay", category="PERMISSION", run_id="o'b", fingerprint="sha256:1", since=timedelta(hours=24), closed=True
    )
    assert list_filters(wanted, NOW)[1:] == [
        "ExecutionStatus != 'ContinuedAsNew'",
        "RedriveTool = 'pay'",
        "RedriveCategory = 'PERMISSION'",
        "RedriveRunId = 'o\\'b'",
        "RedriveFingerprint = 'sha256:1'",
        "StartTime >= '2026-11-28T12:00:00+00:00'",
    ]


def test_what_the_server_cannot_compare_is_left_to_us() -> None:
    wanted = Filter(run_id='a"b')
    assert not any("RedriveRunId" in term for term in list_filters(wanted, NOW))
    assert 'a"b' in wanted.attributes.values()
