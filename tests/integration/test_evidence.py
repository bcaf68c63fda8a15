"""A dead letter's document: the same fields on every path into it, and what stands in them."""

import re
import sqlite3
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import pytest
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError, WorkflowHandle

from contracts.dead_letters import Entry
from contracts.identity import OperationId, node_workflow_id
from tests.faults.lookup import pending_call
from tests.integration.temporal_cli import TemporalCli
from tests.lab import FAST_RETRY, Bench
from tests.waiting import eventually
from tests.worker_process import WorkerProcess
from workers.embedded import EmbeddedServer

Run = WorkflowHandle[Any, Any]

DOCUMENT: dict[str, Any] = {
    **dict.fromkeys(["run_id", "node_id", "operation_id", "idempotency_key", "logical_attempt", "status"]),
    "tool": dict.fromkeys(["name", "version", "fingerprint"]),
    "input": None,
    "error": dict.fromkeys(["category", "code", "message", "http_status"]),
    "side_effect": None,
    "attempts": [
        dict.fromkeys(
            [
                *("attempt", "started_at", "ended_at", "worker", "category", "code", "message", "http_status"),
                *("side_effect", "next_eligible_at"),
            ]
        )
    ],
    **dict.fromkeys(["first_failed_at", "last_failed_at"]),
    "delivery": dict.fromkeys(["workflow_id", "workflow_run_id", "activity_id", "task_queue", "attempt"]),
    "runtime": dict.fromkeys(["redrive", "temporalio", "build_id"]),
    **dict.fromkeys(["correlation_id", "trace_id", "failure_fingerprint", "redrives", "attempts_omitted"]),
    "decisions": [
        dict.fromkeys(["decision_id", "action", "decided_by", "reason", "at", "outcome", "refusals"]),
    ],
    "eligibility": dict.fromkeys(["redrivable", "refusals", "checked_at"]),
}
"""The fields of the contract's document; `input` is whatever the tool was given."""


def fields(value: Any, like: Any = DOCUMENT, path: str = "") -> set[str]:
    """The paths of a document's fields, as far down as the contract's go."""
    if isinstance(like, list):
        return set().union(*(fields(item, like[0], f"{path}[]") for item in value)) if value else {path}
    if not isinstance(like, dict):
        return {path}
    assert isinstance(value, dict), f"{path} is {value!r}"
    return {path}.union(*(fields(item, like.get(name), f"{path}.{name}") for name, item in value.items()))


async def assert_complete(
    bench: Bench, run: Run, entry: Entry, node: str = "pay", correlation_id: str | None = None
) -> None:
    """Every field is there, in every attempt and decision, and says what is the case."""
    document: dict[str, Any] = await bench.dead_letter(run, node).query("entry")
    expected = fields(DOCUMENT)
    for name in ("attempts", "decisions"):
        for item in document[name]:
            assert set(item) == set(DOCUMENT[name][0]), name
        if not document[name]:
            expected = {path for path in expected if not path.startswith(f".{name}[]")} | {f".{name}"}
    assert fields(document) == expected

    operation = OperationId(run_id=run.id, node_id=node, logical_attempt=entry.logical_attempt)
    assert (entry.run_id, entry.node_id, entry.operation_id) == (run.id, node, str(operation))
    assert entry.idempotency_key == operation.idempotency_key
    assert entry.tool.fingerprint.startswith("sha256:")
    assert entry.error.message
    assert entry.error.code

    workflow = await bench.client.get_workflow_handle(node_workflow_id(run.id, node)).describe()
    assert (entry.delivery.workflow_id, entry.delivery.workflow_run_id) == (workflow.id, workflow.run_id)
    assert entry.delivery.activity_id
    assert entry.delivery.task_queue == bench.queue
    assert entry.delivery.attempt >= 1
    assert (entry.runtime.redrive, entry.runtime.temporalio) == (version("redrive"), version("temporalio"))
    assert entry.runtime.build_id
    assert entry.correlation_id == (correlation_id or f"for-{run.id}")
    assert re.fullmatch(r"[0-9a-f]{32}", entry.trace_id)
    assert re.fullmatch(r"(sha256:)?[0-9a-f]+", entry.failure_fingerprint)

    numbers = [attempt.attempt for attempt in entry.attempts]
    assert numbers == list(range(entry.attempts_omitted + 1, entry.attempts_omitted + len(numbers) + 1))
    assert workflow.start_time <= entry.first_failed_at <= entry.last_failed_at <= entry.eligibility.checked_at
    before = workflow.start_time
    for attempt in entry.attempts:
        assert before <= attempt.started_at <= (attempt.ended_at or attempt.started_at)
        if attempt.next_eligible_at is not None:
            assert attempt.ended_at is not None
            assert attempt.ended_at <= attempt.next_eligible_at
        assert attempt.worker
        # One that is in flight has nothing to say yet; what was lost says so.
        in_flight = attempt.ended_at is None and attempt.code is None
        assert in_flight or (attempt.category and attempt.code and attempt.message)
        before = attempt.ended_at or attempt.started_at
    # Where no attempt was made, the failure itself has a time.
    assert entry.last_failed_at == before or not entry.attempts
    assert entry.eligibility.redrivable is (not entry.eligibility.refusals)


async def started(bench: Bench, *nodes: Mapping[str, Any]) -> Run:
    run_id = f"{bench.name}-{nodes[-1]['tool']}"
    return await bench.start(*(dict(node) for node in nodes), run_id=run_id, correlation_id=f"for-{run_id}")


def pay(tool: str, **more: Any) -> dict[str, Any]:
    return {"id": "pay", "tool": tool, "input": {"amount": 1}} | more


async def give_up_without_a_slot(bench: Bench, run: Run, cli: TemporalCli) -> None:
    """Ends a call before an attempt was made: the only slot of its tool is in use."""

    async def came_back() -> bool:
        call = await pending_call(bench, run, "pay")
        return call is not None and call.HasField("last_failure")

    await eventually(came_back, "a delivery without a slot")
    call = ("-a", "call_tool", "-w", f"{run.id}/pay")
    await cli.done("activity", "update-options", "--schedule-to-close-timeout", "1s", *call)


async def test_a_document_is_complete_on_every_path_into_it(bench: Bench) -> None:
    turned_away = {"status": 503, "headers": {"retry-after": "0"}}
    await bench.tool("big", [{"body": "x" * 600_000}])
    await bench.tool("odd", [{"body": {"amount": "many"}}])
    # The tool's name says what is wrong with it; the node, what comes before its call.
    await bench.tool("at-once", [{"status": 403, "body": {"error": "no funds"}}])
    await bench.tool("exhausted", [turned_away], retry={"DEPENDENCY_DOWN": FAST_RETRY["TRANSIENT"] | {"attempts": 3}})
    await bench.tool("timed-out", [{"fault": "hang"}], timeout="1s")
    await bench.tool("lost-result", [{"fault": "truncated"}])
    await bench.tool("unreconciled", [{"status": 500}], reconcile=True, retry={"DEPENDENCY_DOWN": {"attempts": 1}})
    await bench.tools.reconcile_script(bench.unique("unreconciled"), [{"status": 503}])
    await bench.tool("large-result", [{"body": "x" * 2000}], max_response_bytes=1000)
    await bench.tool("large-input", [{}])
    await bench.tool("missing-input", [{}])
    await bench.tool("wrong-input", [{}], input_schema={"properties": {"amount": {"type": "integer"}}})
    await bench.tool("unapproved", [{}], approval="required")
    await bench.tool("expired", [{}])
    await bench.tool("revoked", [{"status": 503, "headers": {"retry-after": "3600"}}])
    await bench.tool("late", [{}])
    await bench.tool(
        "limited", [{"status": 429}], retry={"RATE_LIMITED": {"initial": "300ms", "maximum": "300ms", "attempts": 1000}}
    )
    await bench.tool("asks-too-much", [{"status": 429, "headers": {"retry-after": "90000"}}])
    old = {"id": "apr-7", "granted_by": "alice", "expires_at": "2020-01-01T00:00:00Z"}
    big, odd = {"id": "source", "tool": "big"}, {"id": "source", "tool": "odd"}
    of_source = {"amount": {"$output": "source"}}
    nodes: dict[str, list[dict[str, Any]]] = {name: [pay(name)] for name in bench.catalog if name not in ("big", "odd")}
    nodes |= {
        "large-input": [big, pay("large-input", input=of_source)],
        "missing-input": [odd, pay("missing-input", input={"amount": {"$output": "source", "pointer": "/none"}})],
        "wrong-input": [odd, pay("wrong-input", input={"amount": {"$output": "source", "pointer": "/amount"}})],
        "expired": [pay("expired", approval=old)],
        "revoked": [pay("revoked", approval={"id": "apr-8", "granted_by": "alice"})],
        "late": [pay("late", deadline_seconds=0.001)],
        "limited": [pay("limited", deadline_seconds=8)],
    }
    expected = {
        "at-once": ("PERMISSION", "http_403", 403, "NONE", 1),
        "exhausted": ("DEPENDENCY_DOWN", "http_503", 503, "NONE", 3),
        "timed-out": ("UNKNOWN_SIDE_EFFECT", "read_timeout", None, "POSSIBLE", 1),
        "lost-result": ("UNKNOWN_SIDE_EFFECT", "result_lost", 200, "CONFIRMED", 1),
        "unreconciled": ("UNKNOWN_SIDE_EFFECT", "http_500", 500, "POSSIBLE", 1),
        "large-result": ("UNKNOWN_SIDE_EFFECT", "result_unusable", 200, "CONFIRMED", 1),
        "large-input": ("INVALID_INPUT", "input_too_large", None, "NONE", 0),
        "missing-input": ("INVALID_INPUT", "output_missing", None, "NONE", 0),
        "wrong-input": ("INVALID_INPUT", "input_invalid", None, "NONE", 0),
        "unapproved": ("PERMISSION", "approval_required", None, "NONE", 0),
        "expired": ("PERMISSION", "approval_expired", None, "NONE", 0),
        "revoked": ("PERMISSION", "approval_revoked", None, "NONE", 1),
        "late": ("TRANSIENT", "deadline_exceeded", None, "NONE", 0),
        "limited": ("RATE_LIMITED", "deadline_exceeded", 429, "NONE", None),
        "asks-too-much": ("RATE_LIMITED", "http_429", 429, "NONE", 1),
    }
    assert set(expected) == set(nodes)
    async with bench.worker():
        runs = {name: await started(bench, *parts) for name, parts in nodes.items()}
        await bench.tools.wait_for(bench.unique("revoked"), calls=1)
        await runs["revoked"].signal("revoke_approval", {"approval_id": "apr-8", "revoked_by": "carol"})
        for name, run in runs.items():
            entry = await bench.parked(run, "pay")
            category, code, status, side_effect, calls = expected[name]
            made = len(await bench.tools.calls(bench.unique(name)))
            if name == "limited":  # its time may run out before a call, even the first, or before the wait for one
                category, status = category if made else "TRANSIENT", entry.error.http_status
            error = (entry.error.category, entry.error.code, entry.error.http_status)
            assert error == (category, code, status), name
            assert entry.side_effect == side_effect, name
            if calls is not None:
                assert made == calls, name
                # What is refused before it is sent is an attempt, too.
                assert len(entry.attempts) == max(calls, 1), name
            await assert_complete(bench, run, entry)

        # And with decisions in it, of each kind, also after a redrive.
        run = runs["at-once"]
        assert (await bench.decide(run, "pay", "check")).outcome == "NOTED"
        assert (await bench.decide(run, "pay", "redrive", if_redrives=9)).outcome == "REFUSED"
        await bench.dead_letter(run, "pay").signal("discard", "not an object")
        assert (await bench.decide(run, "pay", "redrive", input={"amount": 2})).outcome == "ACCEPTED"
        entry = await bench.parked(run, "pay", redrives=1)
        outcomes = [record.outcome for record in entry.decisions]
        assert outcomes == ["NOTED", "REFUSED", "REJECTED", "ACCEPTED"]
        assert [record.at for record in entry.decisions] == sorted(record.at for record in entry.decisions)
        await assert_complete(bench, run, entry)


async def test_the_newest_200_attempts_are_shown_and_the_older_ones_counted(bench: Bench) -> None:
    await bench.tool("pay", [{"status": 403}])
    async with bench.worker():
        run = await started(bench, pay("pay"))
        await bench.parked(run, "pay")
        # Temporal retries once a second at the soonest: the ledger is told of what would have taken minutes.
        _repeat_attempt(bench, 202)
        assert (await bench.decide(run, "pay", "redrive")).outcome == "ACCEPTED"
        entry = await bench.parked(run, "pay", redrives=1)
        assert (len(entry.attempts), entry.attempts_omitted) == (200, 4)
        await assert_complete(bench, run, entry)
        assert (await bench.status(run)).nodes["pay"].attempt_count == 204


def _repeat_attempt(bench: Bench, times: int) -> None:
    ledger = sqlite3.connect(bench.folder / "ledger.db")
    ledger.row_factory = sqlite3.Row
    with ledger:
        row = dict(ledger.execute("SELECT * FROM attempt").fetchone())
        for number in range(2, 2 + times):
            row |= {"attempt": number, "started_at": row["ended_at"]}
            columns, places = ", ".join(row), ", ".join(f":{name}" for name in row)
            ledger.execute(f"INSERT INTO attempt ({columns}) VALUES ({places})", row)
    ledger.close()


async def test_failures_of_one_kind_share_a_fingerprint_whatever_their_ids_numbers_and_times(bench: Bench) -> None:
    said = {
        "a": "cus_9f3a declined, 12.50 short, at 2026-01-31T10:00:00.123Z: 7d9f3c1e-4f3b-11ee-be56-0242ac120002",
        "b": "cus_77b0 declined, 7 short, at 2027-12-01T23:59:59+02:00: 0b5a2a4e-9a0e-42d5-8a35-d63f2a5a9d10",
        "c": "cus_9f3a closed, 12.50 short, at 2026-01-31T10:00:00.123Z: 7d9f3c1e-4f3b-11ee-be56-0242ac120002",
    }
    steps = [{"status": 403, "body": {"error": message}} for message in said.values()]
    await bench.tool("pay", [*steps, {"status": 402, "body": {"error": said["a"]}}])
    await bench.tool("other", steps)
    async with bench.worker():
        prints = []
        for tool in ["pay"] * 4 + ["other"]:
            run = await bench.start({"id": "pay", "tool": tool, "input": {}})
            prints.append((await bench.parked(run, "pay")).failure_fingerprint)
    same, again, other_message, other_code, other_tool = prints
    assert same == again
    assert len({same, other_message, other_code, other_tool}) == 4


async def test_a_lost_worker_leaves_a_complete_document_that_says_so(bench: Bench) -> None:
    gate = f"{bench.name}-gate"
    held: list[dict[str, Any]] = [{"gate": gate}]
    await bench.tool("blind", held, timeout="60s")
    await bench.tool("keyed", held, timeout="60s", idempotency="key", retry={"TRANSIENT": {"attempts": 1}})
    # Whether it happened it does not say; "absent" would not be believed before the timeout.
    retry = {"DEPENDENCY_DOWN": {"attempts": 1}}
    await bench.tool("silent", held, timeout="60s", reconcile=True, retry=retry)
    await bench.tools.reconcile_script(bench.unique("silent"), [{"status": 503}])
    # Two are saved: what only reads is read again, and what has happened is found out.
    await bench.tool("read", [*held, {"body": "read"}], timeout="60s", effect="read", method="GET")
    await bench.tool("asked", [{"gate": gate, "body": "done"}], timeout="60s", reconcile=True)
    async with WorkerProcess.start(bench) as worker:
        runs = {name: await started(bench, pay(name)) for name in bench.catalog}
        for name in runs:
            await bench.tools.wait_for(bench.unique(name), calls=1)
        lost = worker.pid
        await worker.kill()
    async with bench.worker():
        expected = {
            "blind": ("UNKNOWN_SIDE_EFFECT", ["SIDE_EFFECT_UNRESOLVED"]),
            "keyed": ("TRANSIENT", []),
            "silent": ("UNKNOWN_SIDE_EFFECT", ["SIDE_EFFECT_UNRESOLVED"]),
        }
        for name, (category, refusals) in expected.items():
            entry = await bench.parked(runs[name], "pay")
            assert (entry.error.category, entry.error.code) == (category, "worker_lost"), name
            assert entry.side_effect == "POSSIBLE"
            assert entry.eligibility.refusals == refusals
            (attempt,) = entry.attempts
            assert (attempt.code, attempt.ended_at, attempt.side_effect) == ("worker_lost", None, "POSSIBLE")
            assert attempt.worker.startswith(f"{lost}@")
            await assert_complete(bench, runs[name], entry)
            assert len(await bench.tools.calls(bench.unique(name))) == 1
        for name, output in (("read", "read"), ("asked", "done")):
            assert (await runs[name].result())["outputs"] == {"pay": output}
        assert len(await bench.tools.effects(bench.unique("asked"))) == 1
        await bench.tools.open_gate(gate)


async def test_a_document_is_complete_also_where_an_operator_or_the_sweep_has_made_it(
    bench: Bench, temporal: EmbeddedServer
) -> None:
    cli = TemporalCli(temporal.address)
    gate = f"{bench.name}-gate"
    await bench.tool("cancelled", [{"gate": bench.unique("lost"), "fault": "fin_after_read"}], timeout="100s")
    await bench.tool("by-hand", [{"gate": gate}], timeout="100s")
    await bench.tool("crowded", [{"gate": gate}], timeout="100s", concurrency=1)
    await bench.tool("reopened", [{"status": 403}])
    await bench.tool("swept", [{"status": 500, "commit": True}], timeout="1s")
    async with bench.worker():
        runs = {name: await started(bench, pay(name)) for name in bench.catalog}
        for name in runs:
            await bench.tools.wait_for(bench.unique(name), calls=1)
        # Its only slot is in use: it is given up before it has made an attempt.
        run_id = f"{bench.name}-unheard"
        unheard = await bench.start(pay("crowded"), run_id=run_id, correlation_id=f"for-{run_id}")

        await give_up_without_a_slot(bench, unheard, cli)
        call = ("-a", "call_tool", "-w")
        await cli.done("activity", "fail", "--reason", "by hand", *call, f"{runs['by-hand'].id}/pay")
        await runs["cancelled"].cancel()
        await bench.parked(runs["reopened"], "pay")
        reopened = bench.dead_letter(runs["reopened"], "pay")
        before = (await reopened.describe()).run_id
        await reopened.terminate("by mistake")
        swept = await bench.parked(runs["swept"], "pay")
        for workflow_id in (runs["swept"].id, f"{runs['swept'].id}/pay", f"{runs['swept'].id}/pay/dead-letter"):
            await bench.client.get_workflow_handle(workflow_id).terminate("by mistake")

        async def opened_again() -> bool:
            await bench.client.execute_workflow("Sweep", id=f"{bench.name}-sweep", task_queue=bench.queue)
            states = [(await bench.dead_letter(runs[name], "pay").describe()) for name in ("swept", "reopened")]
            return all(state.status is WorkflowExecutionStatus.RUNNING for state in states) and (
                states[1].run_id != before
            )

        await eventually(opened_again, "the dead letters to be opened again")

        async def cancel_is_known() -> bool:
            handle = bench.client.get_workflow_handle(f"{runs['cancelled'].id}/pay")
            return (await handle.describe()).raw_description.workflow_extended_info.cancel_requested

        await eventually(cancel_is_known, "the node to be cancelled")
        expected = {
            "by-hand": ("UNKNOWN_SIDE_EFFECT", "POSSIBLE", 1),
            "cancelled": ("UNKNOWN_SIDE_EFFECT", "POSSIBLE", 1),
            "reopened": ("PERMISSION", "NONE", 1),
            "swept": ("UNKNOWN_SIDE_EFFECT", "POSSIBLE", 1),
            # Of which the ledger knows nothing, but it is older than the node: it would know.
            "unheard": ("TRANSIENT", "NONE", 0),
        }
        for name, (category, side_effect, attempts) in expected.items():
            if name == "cancelled":
                await bench.tools.open_gate(bench.unique("lost"))
            run = unheard if name == "unheard" else runs[name]
            entry = await bench.parked(run, "pay")
            seen = (entry.error.category, entry.side_effect, len(entry.attempts))
            assert seen == (category, side_effect, attempts), name
            # The ledger, which is all that is left of a run that was swept, does not know what it was for.
            await assert_complete(bench, run, entry, correlation_id=run.id if name == "swept" else None)
            if name == "swept":
                assert (entry.first_failed_at, entry.last_failed_at) == (swept.first_failed_at, swept.last_failed_at)
        await bench.tools.open_gate(gate)


async def test_that_no_attempt_was_made_is_believed_of_a_ledger_that_would_know_and_of_no_other(
    bench: Bench, temporal: EmbeddedServer
) -> None:
    gate = f"{bench.name}-gate"
    await bench.tool("crowded", [{"gate": gate}], timeout="100s", concurrency=1)
    async with bench.worker():
        crowd = await bench.start(pay("crowded"))
        await bench.tools.wait_for(bench.unique("crowded"), calls=1)
        run = await bench.start(pay("crowded"))
        await give_up_without_a_slot(bench, run, TemporalCli(temporal.address))
        entry = await bench.parked(run, "pay")
        assert (entry.side_effect, entry.eligibility.refusals, entry.attempts) == ("NONE", [], [])
        await bench.tools.open_gate(gate)
        await crowd.result()
    for path in bench.folder.glob("ledger.db*"):
        path.unlink()
    async with bench.worker():
        await bench.decide(run, "pay", "check")
        entry = await bench.entry(run, "pay")
        assert (entry.side_effect, entry.eligibility.refusals) == ("POSSIBLE", ["SIDE_EFFECT_UNRESOLVED"])
        # The cancel is all that the new ledger knows of the node.
        await run.cancel()
        with pytest.raises(WorkflowFailureError):
            await run.result()
        await bench.decide(run, "pay", "check")
        entry = await bench.entry(run, "pay")
        assert (entry.status, entry.side_effect) == ("AWAITING_DECISION", "POSSIBLE")
        assert entry.eligibility.refusals == ["RUN_CLOSED", "SIDE_EFFECT_UNRESOLVED"]


async def test_a_run_says_where_each_of_its_dead_letters_is(bench: Bench) -> None:
    await bench.tool("pay", [{"status": 403}])
    await bench.tool("next", [{}])
    async with bench.worker():
        run = await bench.start(
            {"id": "pay", "tool": "pay", "input": {}}, {"id": "next", "tool": "next", "after": ["pay"]}
        )
        entry = await bench.parked(run, "pay")

        async def blocked() -> bool:
            return (await bench.status(run)).status == "BLOCKED"

        await eventually(blocked, "the run to be blocked")
        state = await bench.status(run)
        assert state.blocked == ["pay"]
        node = state.nodes["pay"]
        assert (node.status, node.operation_id) == ("DEAD_LETTERED", entry.operation_id)
        assert node.dead_letter == bench.dead_letter(run, "pay").id
        assert state.nodes["next"].status == "PENDING"
