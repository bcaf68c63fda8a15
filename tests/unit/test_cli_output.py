"""How things are shown."""

import io
from datetime import UTC, datetime, timedelta, timezone

import pytest
from rich.console import Console

from cli.evidence import render_entry
from cli.output import coloured, console, moment, print_json, printable, say, table
from cli.progress import render
from contracts.dead_letters import (
    DecisionOutcome,
    DecisionRecord,
    Delivery,
    Eligibility,
    Entry,
    EntryStatus,
    ErrorInfo,
    RefusalCode,
    Runtime,
    ToolRef,
)
from contracts.failures import AttemptRecord, Category, SideEffect
from contracts.runs import NodeState, NodeStatus, RunState, RunStatus
from workers.runs import RunFailure, RunView

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


def shown(what: object, width: int = 200) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, markup=False).print(what)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("plain", "plain"),
        ("[bold]not markup[/bold]", "[bold]not markup[/bold]"),
        ("red \x1b[31m", "red \\x1b[31m"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("bell\a", "bell\\x07"),
        ("turned \u202e round", "turned \\u202e round"),
        ("half \ud800", "half \\ud800"),
        ("ünï →", "ünï →"),
    ],
)
def test_text_of_others_cannot_take_over_a_terminal(text: str, seen: str) -> None:
    assert printable(text) == seen


def test_markup_in_a_table_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(table(["ID"], [["[red]x[/red]"], ["[/]"]]))
    say("[bold]", "[/bold]")
    out = capsys.readouterr().out
    assert "[red]x[/red]" in out
    assert "[bold][/bold]" in out


def test_what_is_no_terminal_gets_every_character(capsys: pytest.CaptureFixture[str]) -> None:
    run_id = "r" * 200
    console().print(table(["ID", "STATUS"], [[f"{run_id}/{'n' * 64}", "AWAITING_DECISION"]]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == [f"{run_id}/{'n' * 64}", "AWAITING_DECISION"]


@pytest.mark.parametrize("width", [1, 10, 40])
def test_a_narrow_terminal_loses_nothing(width: int) -> None:
    text = shown(table(["ID"], [["abcdefghijklmnopqrstuvwxyz"]]), width=width)
    assert "".join(text.split()[1 if width > 1 else 2 :]) == "abcdefghijklmnopqrstuvwxyz"
    shown(render_entry(entry()), width=width)
    shown(render(view(5)), width=width)


def test_moments_are_utc() -> None:
    assert moment(datetime(2026, 1, 2, 5, 0, tzinfo=timezone(timedelta(hours=2)))) == "2026-01-02 03:00:00Z"
    assert moment(None) == ""


def test_json_can_be_printed_whatever_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"half": "\ud800", "ü": 1})
    assert capsys.readouterr().out.isascii()


def attempt(number: int, ended: datetime | None = NOW) -> AttemptRecord:
    return AttemptRecord(
        attempt=number,
        started_at=NOW,
        ended_at=ended,
        worker="7@host",
        category=Category.PERMISSION,
        code="http_403",
        message="HTTP 403 [red]Forbidden",
        http_status=403,
        side_effect=SideEffect.NONE,
    )


def entry(status: EntryStatus = EntryStatus.AWAITING_DECISION, run_id: str = "order 1") -> Entry:
    return Entry(
        run_id=run_id,
        node_id="charge",
        operation_id=f"{run_id}/charge/1",
        idempotency_key="key-1",
        logical_attempt=1,
        status=status,
        tool=ToolRef(name="payments.charge", version="7", fingerprint="sha256:abc"),
        input={"amount": 1999, "note": "[bold]"},
        error=ErrorInfo(category=Category.PERMISSION, code="http_403", message="[red]Forbidden", http_status=403),
        side_effect=SideEffect.POSSIBLE,
        attempts=[attempt(4), attempt(5, ended=None)],
        first_failed_at=NOW,
        last_failed_at=NOW,
        delivery=Delivery(workflow_id="w", workflow_run_id="r", activity_id="a", task_queue="redrive", attempt=3),
        runtime=Runtime(redrive="0.1.0", temporalio="1.35.0", build_id="b-1"),
        correlation_id="req-77",
        trace_id="4bf92f35",
        failure_fingerprint="sha256:def",
        redrives=2,
        attempts_omitted=3,
        decisions=[
            DecisionRecord(
                decision_id="d-1",
                action="redrive",
                decided_by="bob",
                reason="[/] try",
                at=NOW,
                outcome=DecisionOutcome.REFUSED,
                refusals=[RefusalCode.TOOL_CHANGED],
            )
        ],
        eligibility=Eligibility(
            redrivable=False, refusals=[RefusalCode.SIDE_EFFECT_UNRESOLVED, RefusalCode.RUN_CLOSED], checked_at=NOW
        ),
    )


def test_an_entry_is_shown_whole() -> None:
    text = shown(render_entry(entry()), width=400)
    wanted = [
        *("order 1/charge", "AWAITING_DECISION", "payments.charge", "version 7", "sha256:abc", "order 1/charge/1"),
        *("key-1", "[red]Forbidden", "http_403", "POSSIBLE", "it may have been executed", "3 earlier ones"),
        *("no end known", "7@host", '"note": "[bold]"', "req-77", "4bf92f35", "sha256:def", "d-1", "[/] try"),
        *("temporalio 1.35.0", "b-1", "task queue redrive", "TOOL_CHANGED"),
    ]
    for part in wanted:
        assert part in text


def test_an_entry_says_what_stands_in_the_way_and_what_can_be_done() -> None:
    text = shown(render_entry(entry()), width=400)
    assert "sending again could repeat it; find out at the tool" in text
    assert "the run has ended; start a new run" in text
    assert "redrive dlq resolve 'order 1/charge' --if-redrives 2" in text
    assert "dlq redrive" not in text, "nothing helps against a run that has ended"


@pytest.mark.parametrize(
    ("refusals", "options"),
    [
        ([], ""),
        ([RefusalCode.SIDE_EFFECT_UNRESOLVED], " --override SIDE_EFFECT_UNRESOLVED"),
        ([RefusalCode.INPUT_INVALID], " --input INPUT.json"),
        ([RefusalCode.APPROVAL_VOID, RefusalCode.APPROVAL_EXPIRED], " --approval APPROVAL.json"),
    ],
)
def test_the_redrive_that_is_offered_would_be_accepted(refusals: list[RefusalCode], options: str) -> None:
    eligibility = Eligibility(redrivable=not refusals, refusals=refusals, checked_at=NOW)
    text = shown(render_entry(entry().model_copy(update={"eligibility": eligibility})), width=400)
    line = f"  redrive dlq redrive 'order 1/charge' --if-redrives 2 --reason '…'{options}"
    assert line in [each.rstrip() for each in text.splitlines()]


@pytest.mark.parametrize("effect", list(SideEffect))
def test_the_tool_is_only_asked_where_that_can_tell_something_new(effect: SideEffect) -> None:
    text = shown(render_entry(entry().model_copy(update={"side_effect": effect})), width=400)
    assert ("dlq reconcile" in text) is (effect is SideEffect.POSSIBLE)


def test_a_closed_entry_has_nothing_to_decide() -> None:
    text = shown(render_entry(entry(EntryStatus.REDRIVEN)), width=400)
    assert "dlq redrive" not in text
    assert "would a redrive be accepted" not in text


def view(nodes: int, **changes: object) -> RunView:
    states = {
        f"n{index}": NodeState(
            status=NodeStatus.DEAD_LETTERED if index == nodes - 1 else NodeStatus.SUCCEEDED,
            operation_id=f"order 1/n{index}/1",
            attempt_count=1,
            dead_letter=f"order 1/n{index}/dead-letter" if index == nodes - 1 else None,
        )
        for index in range(nodes)
    }
    state = RunState(run_id="order 1", status=RunStatus.BLOCKED, counts={}, nodes=states, blocked=[f"n{nodes - 1}"])
    return RunView(run_id="order 1", status="BLOCKED", started_at=NOW, state=state, tools={"n0": "echo"}).model_copy(
        update=changes
    )


def test_a_blocked_run_names_the_command_to_act() -> None:
    text = shown(render(view(2)))
    assert "redrive dlq show 'order 1/n1'" in text
    assert "echo" in text


def test_where_room_is_short_what_waits_is_shown_before_what_is_done() -> None:
    text = shown(render(view(50), rows=3))
    assert "n49" in text
    assert "and 47 more nodes" in text
    assert len(text.splitlines()) < 15


def test_a_run_that_nobody_answers_for_says_so() -> None:
    text = shown(render(view(1, state=None, unanswered="no worker answers on task queue 'q'")))
    assert "no worker answers on task queue 'q'" in text


def test_an_ended_run_shows_its_failure_or_its_result() -> None:
    failure = RunFailure(type="InvalidRun", message="nodes[0].tool: no such tool\nnodes[1].id: bad")
    text = shown(render(view(1, ended_at=NOW, status="FAILED", state=None, failure=failure)))
    assert "InvalidRun" in text
    assert "  nodes[1].id: bad" in text
    text = shown(render(view(1, ended_at=NOW, status="SUCCEEDED", result={"outputs": {"a": [1]}})))
    assert '"outputs"' in text


def test_only_a_status_has_a_colour() -> None:
    assert coloured("SUCCEEDED").style == "green"
    assert coloured("other").style == ""
