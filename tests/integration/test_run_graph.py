"""The graph of a run: what waits for what, how many at once, what goes where, and how it ends."""

import asyncio
import hashlib
import json
import re
from typing import Any

import pytest
from temporalio.client import WorkflowFailureError
from temporalio.exceptions import ApplicationError

from contracts.runs import NodeStatus
from tests.lab import Bench
from tests.waiting import eventually

GATED = "100s"
"""A tool's timeout where the test decides when it answers."""
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-01")


def node(name: str, tool: str, value: Any = None, **fields: Any) -> dict[str, Any]:
    return {"id": name, "tool": tool, **({} if value is None else {"input": value}), **fields}


def ref(name: str, pointer: str | None = None) -> dict[str, Any]:
    return {"$output": name} if pointer is None else {"$output": name, "pointer": pointer}


async def bodies(bench: Bench, tool: str) -> list[Any]:
    return [call.body for call in await bench.tools.calls(bench.unique(tool))]


async def failed_result(run: Any) -> dict[str, Any]:
    with pytest.raises(WorkflowFailureError) as failed:
        await run.result()
    cause = failed.value.cause
    assert isinstance(cause, ApplicationError)
    assert cause.type == "RunFailed"
    details: dict[str, Any] = cause.details[0]
    return details


async def test_no_more_than_max_parallel_nodes_are_at_work_and_the_window_slides(bench: Bench) -> None:
    gates = [f"{bench.name}-{number}" for number in range(6)]
    await bench.tool("slow", [{"gate": gate} for gate in gates], timeout=GATED)
    slow = bench.unique("slow")
    async with bench.worker():
        run = await bench.start(*(node(f"n{number}", "slow") for number in range(6)), max_parallel=2)
        for over in range(5):
            await bench.tools.wait_for(slow, calls=2 + over)

            async def slid(over: int = over) -> bool:
                counts = (await bench.status(run)).counts
                return counts.get(NodeStatus.SUCCEEDED, 0) == over

            await eventually(slid, f"{over} nodes to end")
            counts = (await bench.status(run)).counts
            assert (counts.get(NodeStatus.RUNNING), counts.get(NodeStatus.PENDING, 0)) == (2, 4 - over)
            assert len(await bench.tools.calls(slow)) == 2 + over
            await bench.tools.open_gate(gates[over])
        await bench.tools.open_gate(gates[5])
        assert (await run.result())["counts"] == {"SUCCEEDED": 6}


async def test_nodes_that_wait_for_a_person_leave_their_place_to_others(bench: Bench) -> None:
    await bench.tool("refused", [{"status": 403}])
    await bench.tool("pay")
    async with bench.worker():
        run = await bench.start(
            node("r1", "refused"), node("r2", "refused"), node("p1", "pay"), node("p2", "pay"), max_parallel=1
        )

        async def blocked() -> bool:
            return (await bench.status(run)).status == "BLOCKED"

        await eventually(blocked, "the run to be blocked")
        state = await bench.status(run)
        assert state.blocked == ["r1", "r2"]
        assert state.counts == {NodeStatus.DEAD_LETTERED: 2, NodeStatus.SUCCEEDED: 2}
        for name in state.blocked:
            await bench.decide(run, name, "discard")
        assert (await failed_result(run))["counts"] == {"SUCCEEDED": 2, "DISCARDED": 2}


async def test_a_diamond_runs_its_sides_at_once_and_its_end_after_both(bench: Bench) -> None:
    left, right = f"{bench.name}-left", f"{bench.name}-right"
    await bench.tool("start", [{"body": {"n": 1, "exact": 10**30}}])
    await bench.tool("left", [{"gate": left, "body": ["l"]}], timeout=GATED)
    await bench.tool("right", [{"gate": right, "body": "r"}], timeout=GATED)
    await bench.tool("end", [{"body": {"id": "e"}}])
    await bench.tool("last", [{"raw_body": ""}])
    async with bench.worker():
        run = await bench.start(
            # Whatever order they are written in.
            node("last", "last", after=["end"]),
            node("end", "end", {"both": [ref("left"), {"r": ref("right")}], "first": ref("start", "/n")}),
            node("right", "right", {"from": ref("start")}),
            node("left", "left", after=["start"]),
            node("start", "start"),
        )
        await bench.tools.wait_for(bench.unique("left"), calls=1)
        await bench.tools.wait_for(bench.unique("right"), calls=1)
        assert await bodies(bench, "end") == []
        await bench.tools.open_gate(right)

        async def right_is_over() -> bool:
            return (await bench.status(run)).nodes["right"].status == "SUCCEEDED"

        await eventually(right_is_over, "the right side to end")
        state = await bench.status(run)
        assert (state.nodes["end"].status, state.nodes["end"].operation_id) == ("PENDING", None)
        assert await bodies(bench, "end") == []
        await bench.tools.open_gate(left)
        result = await run.result()
    assert result["outputs"] == {"last": None}
    assert await bodies(bench, "right") == [{"from": {"n": 1, "exact": 10**30}}]
    assert await bodies(bench, "left") == [{}]
    assert await bodies(bench, "end") == [{"both": [["l"], {"r": "r"}], "first": 1}]
    (end,), (last,) = [await bench.tools.calls(bench.unique(name)) for name in ("end", "last")]
    assert end.at <= last.at


OUTPUT = {"a/b": {"m~n": [10, {"x": None}, "z"]}, "": {"": "empty"}, "01": True, "ä ö": 0}
POINTERS = {
    "": OUTPUT,
    "/a~1b/m~0n/0": 10,
    "/a~1b/m~0n/1": {"x": None},
    "/a~1b/m~0n/1/x": None,
    "/": {"": "empty"},
    "//": "empty",
    "/01": True,
    "/ä ö": 0,
}
MISSING = ["/nope", "/a~1b/m~0n/3", "/a~1b/m~0n/-", "/a~1b/m~0n/00", "/a~1b/m~0n/-1", "/a~1b/m~0n/x", "/ä ö/0", "/a"]


async def test_pointers_pick_their_part_and_one_that_points_nowhere_sends_nothing(bench: Bench) -> None:
    await bench.tool("from", [{"body": OUTPUT}])
    await bench.tool("to")
    await bench.tool("never")
    await bench.tool("strict", input_schema={"type": "object", "properties": {"n": {"type": "integer"}}})
    picked = {f"p{number}": ref("from", pointer) for number, pointer in enumerate(POINTERS)}
    async with bench.worker():
        run = await bench.start(
            node("from", "from"),
            node("to", "to", {"deep": [[picked]], "default": ref("from")}),
            *(
                node(f"missing{number}", "never", {"x": [ref("from", pointer)]}, on_discard="continue")
                for number, pointer in enumerate(MISSING)
            ),
            node("unfit", "strict", {"n": ref("from", "/01")}, on_discard="continue"),
        )
        waiting = {f"missing{number}": pointer for number, pointer in enumerate(MISSING)}
        for name, pointer in waiting.items():
            entry = await bench.parked(run, name)
            assert (entry.error.category, entry.error.code) == ("INVALID_INPUT", "output_missing"), pointer
            assert pointer in entry.error.message
            assert (entry.side_effect, entry.redrives) == ("NONE", 0)
        unfit = await bench.parked(run, "unfit")
        assert (unfit.error.category, unfit.error.code) == ("INVALID_INPUT", "input_invalid")
        assert unfit.error.message.startswith("input.n: ")
        assert (unfit.input, unfit.side_effect, unfit.error.http_status) == ({"n": True}, "NONE", None)
        # What was missing can be supplied.
        assert (await bench.decide(run, "unfit", "redrive", input={"n": 1})).outcome == "ACCEPTED"
        assert (await bench.decide(run, "missing0", "redrive", input={"x": ["by hand"]})).outcome == "ACCEPTED"
        for name in list(waiting)[1:]:
            await bench.decide(run, name, "discard")
        result = await run.result()
    assert result["counts"] == {"SUCCEEDED": 4, "DISCARDED": len(MISSING) - 1}
    assert await bodies(bench, "to") == [
        {"deep": [[{f"p{number}": value for number, value in enumerate(POINTERS.values())}]], "default": OUTPUT}
    ]
    assert await bodies(bench, "never") == [{"x": ["by hand"]}]
    assert await bodies(bench, "strict") == [{"n": 1}]


async def test_what_depends_on_a_discarded_node_is_skipped_or_goes_on_as_its_spec_says(bench: Bench) -> None:
    await bench.tool("no", [{"status": 403}])
    await bench.tool("yes")
    await bench.tool("later", [{"gate": f"{bench.name}-gate"}], timeout=GATED)
    async with bench.worker():
        going_on = await bench.start(
            node("gone", "no", on_discard="continue"),
            node("null", "yes", {"whole": ref("gone"), "part": [ref("gone", "/id")], "own": 1}),
            node("after", "yes", {"own": 2}, after=["gone", "null"]),
        )
        failing = await bench.start(
            node("gone", "no"),
            node("skipped", "yes", after=["gone"], on_discard="continue"),
            node("skipped-too", "yes", after=["skipped"]),
            node("independent", "later"),
            node("after-it", "yes", {"own": 3}, after=["independent"]),
            node("half", "yes", after=["gone", "independent"]),
        )
        for run in (going_on, failing):
            await bench.parked(run, "gone")
            assert (await bench.decide(run, "gone", "discard")).outcome == "ACCEPTED"
        result = await going_on.result()

        async def skipped() -> bool:
            return (await bench.status(failing)).counts.get(NodeStatus.SKIPPED) == 2

        await eventually(skipped, "what cannot run to be skipped")
        state = await bench.status(failing)
        assert (state.status, state.nodes["independent"].status) == ("RUNNING", "RUNNING")
        await bench.tools.open_gate(f"{bench.name}-gate")
        details = await failed_result(failing)
        status = await bench.status(failing)
    assert (result["status"], result["counts"]) == ("SUCCEEDED", {"SUCCEEDED": 2, "DISCARDED": 1})
    assert set(result["outputs"]) == {"after"}
    assert (details["run_id"], details["status"]) == (failing.id, "FAILED")
    assert details["counts"] == {"SUCCEEDED": 2, "DISCARDED": 1, "SKIPPED": 3}
    assert set(details["outputs"]) == {"after-it"}
    assert status.status == "FAILED"
    assert {name: str(state.status) for name, state in status.nodes.items()} == {
        "gone": "DISCARDED",
        "skipped": "SKIPPED",
        "skipped-too": "SKIPPED",
        "independent": "SUCCEEDED",
        "after-it": "SUCCEEDED",
        "half": "SKIPPED",
    }
    sent = sorted(await bodies(bench, "yes"), key=lambda body: int(body["own"]))
    assert sent == [{"whole": None, "part": [None], "own": 1}, {"own": 2}, {"own": 3}]


async def test_a_run_is_blocked_once_nothing_can_proceed_before_a_decision(bench: Bench) -> None:
    await bench.tool("no", [{"status": 403}, {"status": 403}, {"gate": f"{bench.name}-second"}], timeout=GATED)
    await bench.tool("slow", [{"gate": f"{bench.name}-first"}], timeout=GATED)
    async with bench.worker():
        run = await bench.start(
            node("x", "no"), node("y", "no"), node("slow", "slow"), node("then", "slow", after=["x"])
        )

        async def stands(status: str, blocked: list[str]) -> None:
            async def so() -> bool:
                state = await bench.status(run)
                return (str(state.status), state.blocked) == (status, blocked)

            await eventually(so, f"{status} {blocked}")

        await stands("RUNNING", ["x", "y"])
        await bench.tools.open_gate(f"{bench.name}-first")
        await stands("BLOCKED", ["x", "y"])
        for name in ("x", "y"):
            await bench.parked(run, name)
        state = (await bench.status(run)).nodes["x"]
        assert (state.status, state.dead_letter) == ("DEAD_LETTERED", f"{run.id}/x/dead-letter")
        assert (state.operation_id, state.attempt_count) == (f"{run.id}/x/1", 1)
        await bench.decide(run, "x", "redrive")
        await bench.tools.wait_for(bench.unique("no"), calls=3)
        await stands("RUNNING", ["y"])
        await bench.tools.open_gate(f"{bench.name}-second")
        await stands("BLOCKED", ["y"])
        await bench.decide(run, "y", "resolve", output=None)
        result = await run.result()
        state = (await bench.status(run)).nodes["x"]
    assert result["outputs"] == {"y": None, "slow": result["outputs"]["slow"], "then": result["outputs"]["then"]}
    assert (state.status, state.dead_letter, state.attempt_count) == ("SUCCEEDED", None, 2)


async def test_every_call_carries_the_trace_and_the_correlation_id_of_its_run(bench: Bench) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    await bench.tool("again", [{"status": 429}, {}])
    await bench.tool("lost", [{"fault": "fin_after_read"}], reconcile=True)
    await bench.tool("no", [{"status": 403}, {}])
    nodes = [node("again", "again"), node("lost", "lost"), node("no", "no", after=["again"])]
    odd = f"{bench.name}-ordér 7 %\u2603"
    async with bench.worker():
        given = await bench.start(*nodes, correlation_id="req-77", traceparent=f"00-{trace}-00f067aa0ba902b7-00")
        entry = await bench.parked(given, "no")
        assert (entry.trace_id, entry.correlation_id) == (trace, "req-77")
        await bench.decide(given, "no", "redrive")
        await given.result()
        derived = await bench.start(*nodes)
        strange = await bench.start(*nodes, run_id=odd)
        await asyncio.gather(derived.result(), strange.result())
    for name, count in {"again": 4, "lost": 3, "no": 4}.items():
        calls = await bench.tools.calls(bench.unique(name))
        asked = await bench.tools.reconcile_calls(bench.unique(name))
        assert (len(calls), len(asked)) == (count, 3 if name == "lost" else 0), name
        seen: dict[str, set[str | None]] = {}
        parents = []
        for call in (*calls, *asked):
            match = _TRACEPARENT.fullmatch(call.headers["traceparent"])
            assert match
            seen.setdefault(match[1], set()).add(call.headers.get("x-correlation-id"))
            parents.append(match[2])
        # The same trace and id for every call of a run; without a traceparent the trace follows from the run id.
        assert seen.pop(trace) == {"req-77"}
        assert seen.pop(hashlib.sha256(derived.id.encode()).hexdigest()[:32]) == {derived.id}
        (odd_ids,) = seen.values()
        assert len(odd_ids) == 1
        assert len(set(parents)) == len(parents)


async def test_three_hundred_nodes_at_once_are_each_done_exactly_once(bench: Bench) -> None:
    await bench.tool("item", input_schema={"type": "object", "required": ["n"]}, concurrency=50)
    await bench.tool("sum")
    async with bench.worker():
        run = await bench.start(
            *(node(f"n{number}", "item", {"n": number}) for number in range(300)),
            node("sum", "sum", {"ids": [ref(f"n{number}", "/id") for number in range(300)]}),
        )
        result = await run.result()
    assert result["counts"] == {"SUCCEEDED": 301}
    calls = await bench.tools.calls(bench.unique("item"))
    assert sorted(call.body["n"] for call in calls) == list(range(300))
    assert len({call.key for call in calls}) == 300
    (total,) = await bodies(bench, "sum")
    assert len(set(total["ids"])) == 300


async def test_large_values_are_limits_with_names_and_never_hang_a_run(bench: Bench) -> None:
    await bench.tool("large", [{"body": "x" * 600_000}], max_response_bytes=1_100_000)
    await bench.tool("huge", [{"body": "x" * 1_090_000}], max_response_bytes=1_100_000)
    await bench.tool("medium", [{"body": ["x" * 400_000]}])
    await bench.tool("take")
    await bench.tool("never")
    async with bench.worker():
        # Sinks, of which only the first fits into the result.
        omitting = await bench.start(*(node(f"s{number}", "large") for number in range(3)), node("small", "take"))
        # Inputs that are too large, as they were sent and as they are resolved.
        limits = await bench.start(
            node("large", "large"),
            node("resolved", "never", {"x": ref("large")}, on_discard="continue"),
            node("sent", "never", {"x": "y" * 530_000}, on_discard="continue"),
            node("huge", "huge", on_discard="continue"),
        )
        # One task of the run's must not start all of these: twelve times 400 kB is more than the server takes at once.
        many = await bench.start(
            node("medium", "medium"), *(node(f"take{number}", "take", {"x": ref("medium")}) for number in range(12))
        )
        for name in ("resolved", "sent"):
            entry = await bench.parked(limits, name)
            assert (entry.error.category, entry.error.code) == ("INVALID_INPUT", "input_too_large")
            assert "524288" in entry.error.message
            assert (entry.side_effect, entry.eligibility.redrivable) == ("NONE", False)
            assert "INPUT_INVALID" in entry.eligibility.refusals
            assert (await bench.decide(limits, name, "redrive")).outcome == "REFUSED"
            await bench.decide(limits, name, "discard")
        entry = await bench.parked(limits, "huge")
        assert (entry.error.category, entry.error.code) == ("UNKNOWN_SIDE_EFFECT", "result_unusable")
        assert entry.side_effect == "CONFIRMED"
        await bench.decide(limits, "huge", "resolve", output="x" * 1_000_000)
        results = await asyncio.gather(omitting.result(), limits.result(), many.result())
    assert results[0]["outputs_omitted"] == ["s1", "s2"]
    assert set(results[0]["outputs"]) == {"s0", "small"}
    assert results[0]["counts"] == {"SUCCEEDED": 4}
    assert (results[1]["outputs"], results[1]["outputs_omitted"]) == ({"huge": "x" * 1_000_000}, None)
    assert results[2]["counts"] == {"SUCCEEDED": 13}
    assert await bodies(bench, "never") == []
    assert len(await bodies(bench, "huge")) == 1


async def test_strange_outputs_pass_through_unchanged_or_need_a_person(bench: Bench) -> None:
    """What JSON allows, and Python or Temporal may not carry: never a changed value, never a hanging node."""
    raw = {
        "numbers": '{"big": 123456789012345678901234567890, "small": 1e-7, "minus": -0.0, "float": 0.1}',
        "text": json.dumps({"\x00": "\U0001f4b8 \u2028 \x7f", "ünï": "\\u0000"}),
        "deep-90": "[" * 90 + "]" * 90,
        "deep-150": "[" * 150 + "]" * 150,
        "deep-199": '{"a":' * 199 + "1" + "}" * 199,
        "deep-5000": "[" * 5000 + "]" * 5000,
        "surrogate": r'{"half": "\ud83d"}',
        "infinite": '{"n": 1e999}',
        "digits": "9" * 5000,
    }
    for name, text in raw.items():
        await bench.tool(name, [{"raw_body": text}])
    await bench.tool("take")
    async with bench.worker():
        run = await bench.start(
            *(node(name, name) for name in raw),
            *(node(f"take-{name}", "take", {"name": name, "value": ref(name)}) for name in raw),
        )

        async def over(name: str) -> None:
            async def known() -> bool:
                state = (await bench.status(run)).nodes.get(name)
                return state is not None and state.status in ("SUCCEEDED", "DEAD_LETTERED")

            await eventually(known, f"{name} to end or to need a person")
            if (await bench.status(run)).nodes[name].status == "SUCCEEDED":
                return
            entry = await bench.parked(run, name)
            assert (entry.error.category, entry.side_effect) == ("UNKNOWN_SIDE_EFFECT", "CONFIRMED"), name
            await bench.decide(run, name, "resolve", output={"resolved": name})

        await asyncio.gather(*(over(name) for name in raw))
        assert (await run.result())["counts"] == {"SUCCEEDED": 2 * len(raw)}
    taken = {body["name"]: body["value"] for body in await bodies(bench, "take")}
    for name, text in raw.items():
        if taken[name] != {"resolved": name}:
            assert json.dumps(taken[name]) == json.dumps(json.loads(text)), name
    assert {"numbers", "text", "deep-90"} <= {name for name in raw if taken[name] != {"resolved": name}}
