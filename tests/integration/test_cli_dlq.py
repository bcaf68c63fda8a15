"""`redrive dlq` and `redrive ledger`: the real command against a real server, a real worker and a real ledger."""

import asyncio
import getpass
from collections.abc import Mapping
from typing import Any

import pytest
from temporalio.client import WorkflowHandle

from tests.integration.cli_support import Ran, Redrive
from tests.lab import Bench
from tests.waiting import eventually

# Each command is a process that imports much: on a busy machine a test takes a while.
pytestmark = pytest.mark.timeout(600)

Run = WorkflowHandle[Any, Any]

REFUSED: list[dict[str, Any]] = [{"status": 403, "body": {"error": "card limit [red] \x1b[31m"}}, {}]
UNKNOWN: list[dict[str, Any]] = [{"status": 500}, {}]
BECAUSE = ("--reason", "because", "--by", "bob")


@pytest.fixture
def redrive(bench: Bench) -> Redrive:
    return Redrive(bench)


async def parked(bench: Bench, steps: list[dict[str, Any]], **tool: Any) -> Run:
    """A run whose one node, `n`, waits for a decision."""
    await bench.tool("pay", steps, **tool)
    bench.write()
    run = await bench.start({"id": "n", "tool": "pay", "input": {"amount": 1999}})
    await bench.parked(run, "n")
    return run


async def test_an_entry_is_found_shown_and_redriven(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("pay", REFUSED)
    async with bench.worker():
        run = await parked(bench, REFUSED)
        entry = await bench.entry(run, "n")
        own = f"{run.id}/n"

        async def found(*filters: str) -> bool:
            rows = (await redrive("dlq", "list", "--json", "--limit", "1000", *filters)).ended(0).json
            return own in [row["id"] for row in rows]

        await eventually(lambda: found("--run", run.id), "the entry to be listed")
        matching = [
            ("--tool", "pay"),
            ("--category", "permission"),
            ("--fingerprint", entry.failure_fingerprint),
            ("--since", "1h"),
            ("--all",),
        ]
        other = [("--tool", "mail"), ("--category", "TRANSIENT"), ("--run", "o'brien"), ("--run", 'a"b\\c')]
        assert all(await asyncio.gather(*(found(*filters) for filters in matching)))
        assert not any(await asyncio.gather(*(found(*filters) for filters in other)))

        table, shown, document = await asyncio.gather(
            redrive("dlq", "list", "--run", run.id),
            redrive("dlq", "show", own),
            redrive("dlq", "show", f"{own}/dead-letter", "--json"),
        )
        assert table.out.splitlines()[1].split()[:4] == [own, "pay", "PERMISSION", "AWAITING_DECISION"]
        assert "card limit [red] \\u001b[31m" in shown.ended(0).out
        assert f"redrive dlq redrive {own} --if-redrives 0 --reason" in shown.out
        assert document.json["eligibility"]["redrivable"] is True
        assert document.json["decisions"] == [], "looking is not remembered"
        assert document.json["input"] == {"amount": 1999}

        record = (await redrive("dlq", "redrive", own, "--reason", "limit raised", "--json")).ended(0).json
        assert (record["action"], record["outcome"], record["decided_by"]) == ("redrive", "ACCEPTED", getpass.getuser())
        assert (await run.result())["status"] == "SUCCEEDED"

        async def listed_as_redriven() -> bool:
            rows = (await redrive("dlq", "list", "--run", run.id, "--all", "--json")).ended(0).json
            return [row["status"] for row in rows] == ["REDRIVEN"]

        await eventually(listed_as_redriven, "the entry to be listed as redriven")
        closed, left = await asyncio.gather(
            redrive("dlq", "show", own, "--json"), redrive("dlq", "list", "--run", run.id, "--json")
        )
    assert closed.ended(0).json["status"] == "REDRIVEN"
    assert left.json == []


async def test_a_category_that_there_is_not_is_no_empty_list(redrive: Redrive) -> None:
    for command in ("list", "groups"):
        said = (await redrive("dlq", command, "--category", "PERMISION")).ended(2).err
        assert "'PERMISION' is none of TRANSIENT, " in said


async def test_a_run_whose_id_the_list_filter_cannot_hold_is_found_all_the_same(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("pay", REFUSED)
    run_id = f'{bench.name} "quoted" back\\slash o\'brien'
    async with bench.worker():
        run = await bench.start({"id": "n", "tool": "pay"}, run_id=run_id)
        await bench.parked(run, "n")

        async def found() -> bool:
            rows = (await redrive("dlq", "list", "--run", run_id, "--json")).ended(0).json
            return [row["id"] for row in rows] == [f"{run_id}/n"]

        await eventually(found, "the entry to be listed")
        (await redrive("dlq", "discard", f"{run_id}/n", *BECAUSE)).ended(0)


async def test_a_refusal_is_explained_and_can_be_overridden(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("pay", UNKNOWN)
    async with bench.worker():
        run = await parked(bench, UNKNOWN)
        own = f"{run.id}/n"
        shown = (await redrive("dlq", "show", own)).ended(0)
        assert "sending again could repeat it; find out at the tool" in shown.out
        assert "--override SIDE_EFFECT_UNRESOLVED" in shown.out
        refused = (await redrive("dlq", "redrive", own, *BECAUSE, "--json")).ended(1)
        assert refused.json["outcome"] == "REFUSED"
        assert refused.json["refusals"] == ["SIDE_EFFECT_UNRESOLVED"]
        assert "sending again could repeat it" in refused.err
        assert "--override SIDE_EFFECT_UNRESOLVED" in refused.err
        accepted = await redrive("dlq", "redrive", own, *BECAUSE, "--override", "side_effect_unresolved")
        assert "ACCEPTED" in accepted.ended(0).out
        await run.result()


async def test_a_redrive_may_bring_an_input_an_approval_and_a_new_operation(bench: Bench, redrive: Redrive) -> None:
    (bench.folder / "approval.json").write_text('{"id": "apr-8", "granted_by": "alice"}')
    await bench.tool("pay", [{"status": 403}, {"status": 403}, {}])
    async with bench.worker():
        run = await parked(bench, [{"status": 403}, {"status": 403}, {}])
        own = f"{run.id}/n"
        edited = await redrive("dlq", "redrive", own, *BECAUSE, "--input", "-", stdin='{"amount": 5}')
        edited.ended(0)
        entry = await bench.parked(run, "n", redrives=1)
        assert (entry.input, entry.logical_attempt) == ({"amount": 5}, 2)
        anew = await redrive("dlq", "redrive", own, *BECAUSE, "--new-operation", "--approval", "approval.json")
        anew.ended(0)
        await run.result()
    keys = [call.key for call in await bench.tools.calls(bench.unique("pay"))]
    assert len(set(keys)) == 3


async def test_what_was_looked_at_must_still_be_so(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("pay", [{"status": 403}])
    async with bench.worker():
        run = await parked(bench, [{"status": 403}])
        own = f"{run.id}/n"
        (await redrive("dlq", "redrive", own, *BECAUSE, "--if-redrives", "0")).ended(0)
        await bench.parked(run, "n", redrives=1)
        late = (await redrive("dlq", "discard", own, *BECAUSE, "--if-redrives", "0", "--json")).ended(1)
        assert late.json["refusals"] == ["EVIDENCE_CHANGED"]
        assert "look again" in late.err
        (await redrive("dlq", "discard", own, *BECAUSE)).ended(0)


@pytest.mark.parametrize("output", ['{"id": "m-1"}', "result.json", "-"], ids=["JSON", "a file", "standard input"])
async def test_a_node_is_resolved_with_a_result(bench: Bench, redrive: Redrive, output: str) -> None:
    (bench.folder / "result.json").write_text('{"id": "m-1"}')
    schema: dict[str, Any] = {"output_schema": {"type": "object", "required": ["id"]}}
    await bench.tool("pay", [{"status": 403}], **schema)
    async with bench.worker():
        run = await parked(bench, [{"status": 403}], **schema)
        own = f"{run.id}/n"
        unfit = (await redrive("dlq", "resolve", own, *BECAUSE, "--output", "{}", "--json")).ended(1)
        assert unfit.json["outcome"] == "REJECTED"
        assert "'id' is a required property" in unfit.err
        ran = await redrive("dlq", "resolve", own, *BECAUSE, "--output", output, stdin='{"id": "m-1"}')
        assert "ACCEPTED" in ran.ended(0).out
        assert (await run.result())["outputs"] == {"n": {"id": "m-1"}}


async def test_reconciling_and_checking_tell_where_the_entry_stands(bench: Bench, redrive: Redrive) -> None:
    reconcile = {"reconcile": True}
    await bench.tool("pay", [{"status": 403}], **reconcile)
    async with bench.worker():
        run = await parked(bench, [{"status": 403}], **reconcile)
        own = f"{run.id}/n"
        checked, by_name, asked = [
            await redrive("dlq", *arguments)
            for arguments in (
                ("check", own),
                ("check", own, "--by", "bob", "--json"),
                ("reconcile", own, "--by", "bob"),
            )
        ]
        assert "NOTED" in checked.ended(0).out
        assert "would a redrive be accepted?" in checked.out
        assert by_name.ended(0).json["decided_by"] == "bob"
        assert "NOTED" in asked.ended(0).out
        assert "side effect" in asked.out
        decisions = (await bench.entry(run, "n")).decisions
        assert [(record.action, record.decided_by) for record in decisions] == [("check", "bob"), ("reconcile", "bob")]


async def test_a_malformed_decision_is_bad_input_and_nothing_is_sent(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("pay", [{"status": 403}])
    async with bench.worker():
        run = await parked(bench, [{"status": 403}])
        own = f"{run.id}/n"
        wrong = await asyncio.gather(
            redrive("dlq", "redrive", own, "--by", "bob"),
            redrive("dlq", "redrive", own, "--reason", "", "--by", "bob"),
            redrive("dlq", "redrive", own, *BECAUSE, "--override", "RUN_CLOSED"),
            redrive("dlq", "redrive", own, *BECAUSE, "--approval", "{}"),
            redrive("dlq", "discard", own, "--reason", "x", "--by", ""),
            redrive("dlq", "resolve", own, *BECAUSE, "--output", "nope.json"),
        )
        messages = [ran.ended(2).err for ran in wrong]
        assert (await bench.entry(run, "n")).decisions == []
    assert "--reason" in messages[0]
    assert "RUN_CLOSED cannot be overridden" in messages[2]
    assert "approval.granted_by: required" in messages[3]


async def test_a_closed_entry_answers_from_the_ledger(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("pay", REFUSED)
    async with bench.worker():
        run = await parked(bench, REFUSED)
        own = f"{run.id}/n"
        decide = ("dlq", "redrive", own, *BECAUSE, "--json")
        first = (await redrive(*decide, "--decision-id", "d-1")).ended(0)
        await run.result()
        elsewhere: Mapping[str, str] = {"REDRIVE_LEDGER": f"sqlite:///{bench.folder}/elsewhere.db"}
        again, other, new_elsewhere, named_elsewhere = await asyncio.gather(
            redrive(*decide, "--decision-id", "d-1"),
            redrive(*decide),
            redrive(*decide, environment=elsewhere),
            redrive(*decide, "--decision-id", "d-1", environment=elsewhere),
        )
    assert again.ended(0).json == first.json
    assert other.ended(1).json["refusals"] == ["NODE_CLOSED"]
    assert "NODE_CLOSED" in other.err
    assert new_elsewhere.ended(1).json["refusals"] == ["NODE_CLOSED"]
    assert "there is no ledger" in named_elsewhere.ended(3).err
    assert not (bench.folder / "elsewhere.db").exists()


async def test_what_is_no_dead_letter_is_told(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("pay", [{}])
    async with bench.worker():
        run = await bench.start({"id": "n", "tool": "pay"})
        await run.result()
        for ran in await asyncio.gather(
            redrive("dlq", "show", f"{run.id}/n"), redrive("dlq", "discard", f"{run.id}/n", *BECAUSE)
        ):
            assert "there is no dead letter" in ran.ended(1).err


async def test_without_a_worker_a_decision_does_not_hang(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("pay", REFUSED)
    async with bench.worker():
        run = await parked(bench, REFUSED)
    own = f"{run.id}/n"
    shown, decided = await asyncio.gather(
        redrive("dlq", "show", own),
        redrive("dlq", "redrive", own, *BECAUSE, "--decision-id", "d-1", "--if-redrives", "0"),
    )
    assert f"no worker answers on task queue '{bench.queue}'" in shown.ended(3).err
    assert "--decision-id d-1" in decided.ended(3).err
    async with bench.worker():
        (await redrive("dlq", "redrive", own, *BECAUSE, "--decision-id", "d-1")).ended(0)
        await run.result()
    assert len(await bench.tools.effects(bench.unique("pay"))) == 1


async def test_the_ledger_tells_of_an_operation(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("pay", REFUSED)
    async with bench.worker():
        run = await parked(bench, REFUSED)
    # The ledger is asked, and nobody else.
    alone = {"TEMPORAL_ADDRESS": "127.0.0.1:1"}
    shown, document, unknown = await asyncio.gather(
        redrive("ledger", "show", f"{run.id}/n/1", environment=alone),
        redrive("ledger", "show", f"{run.id}/n/1", "--json", environment=alone),
        redrive("ledger", "show", f"{run.id}/n/2", environment=alone),
    )
    assert "FAILED" in shown.ended(0).out
    assert document.json["operation_id"] == f"{run.id}/n/1"
    assert document.json["attempts"][0]["http_status"] == 403
    assert "knows no operation" in unknown.ended(1).err


async def test_looking_makes_no_ledger(bench: Bench, redrive: Redrive) -> None:
    ran: Ran = await redrive("ledger", "show", "order-1/charge/1")
    assert "REDRIVE_LEDGER" in ran.ended(3).err
    assert not (bench.folder / "ledger.db").exists()


async def test_dead_letters_are_counted_by_how_they_failed(bench: Bench, redrive: Redrive) -> None:
    await bench.tool("pay", [{"status": 403, "body": {"error": f"card {number} refused"}} for number in range(3)])
    await bench.tool("ship", UNKNOWN[:1])
    async with bench.worker():
        runs = [
            await bench.start({"id": "n", "tool": tool, "input": {"amount": 1}})
            for tool in ("pay", "pay", "ship", "pay")
        ]
        entries = [await bench.parked(run, "n") for run in runs]
        prints = [entry.failure_fingerprint for entry in entries]
        assert len(set(prints)) == 2

        async def counted(*filters: str) -> list[dict[str, Any]]:
            ran = await redrive("dlq", "groups", "--json", "--limit", "1000", "--since", "1h", *filters)
            found: list[dict[str, Any]] = ran.ended(0).json
            return [group for group in found if group["failure_fingerprint"] in prints]

        async def all_there() -> list[dict[str, Any]] | None:
            found = await counted("--tool", "pay")
            own = [group for group in found if group["example"].startswith(bench.name)]
            return own if own and own[0]["count"] >= 3 and await counted("--run", runs[2].id) else None

        [group] = await eventually(all_there, "the dead letters to be listed")
        assert (group["tool"], group["category"], group["code"]) == ("pay", "PERMISSION", "http_403")
        assert group["failure_fingerprint"] == prints[0]
        assert group["first_opened_at"] <= group["last_opened_at"]
        [single] = await counted("--run", runs[2].id)
        assert (single["count"], single["tool"], single["example"]) == (1, "ship", f"{runs[2].id}/n")
        assert single["first_opened_at"] == single["last_opened_at"]
        table = (await redrive("dlq", "groups", "--run", runs[2].id)).ended(0).out.splitlines()
        assert table[1].split()[:4] == ["1", "ship", "UNKNOWN_SIDE_EFFECT", "http_500"]
    # Without a worker, what is counted is right all the same.
    [single] = await counted("--run", runs[2].id)
    assert (single["count"], single["code"]) == (1, None)
