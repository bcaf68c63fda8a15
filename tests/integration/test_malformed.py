"""Whatever the plain `temporal` command sends: a clear failure or a recorded rejection, never a hanging workflow."""

import asyncio
import json
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from contracts.dead_letters import Entry
from tests.integration.temporal_cli import Ran, TemporalCli
from tests.lab import Bench
from tests.waiting import eventually
from workers.embedded import EmbeddedServer

_SECONDS = 45
"""In which a failure must be there, however busy the machine is; a hanging workflow has none in an hour."""


@pytest.fixture
def cli(temporal: EmbeddedServer) -> TemporalCli:
    return TemporalCli(temporal.address)


@dataclass(frozen=True)
class Case:
    """Something that somebody sends, and what the answer must name."""

    name: str
    inputs: tuple[str, ...]
    problems: tuple[str, ...]
    more: tuple[str, ...] = ()
    run_id: str | None = None


def spec(*nodes: Any, **fields: Any) -> str:
    return json.dumps({"nodes": list(nodes), **fields})


def node(name: Any = "a", tool: Any = "pay", **fields: Any) -> dict[str, Any]:
    return {"id": name, "tool": tool, "input": {"amount": 1}, **fields}


def nested(levels: int, opening: str = "[", closing: str = "]") -> str:
    return opening * levels + "1" + closing * levels


def deep(levels: int, opening: str = "[", closing: str = "]") -> str:
    return json.dumps({"nodes": [node("a", "any", input="?")]}).replace('"?"', nested(levels, opening, closing))


def good(**fields: Any) -> str:
    return json.dumps({"decided_by": "bob", "reason": "card limit raised"} | fields)


def holding(value: str, **fields: Any) -> str:
    """A decision with a field that Python would not write."""
    return good(**fields).replace('"?"', value)


BINARY = ("--input-base64", "--input-meta", "encoding=binary/plain")

SHAPES = [
    Case("array", ("[]",), ("the specification is a JSON object, not an array",)),
    Case("string", ('"run"',), ("the specification is a JSON object, not a string",)),
    Case("number", ("7",), ("the specification is a JSON object, not a number",)),
    Case("null", ("null",), ("the specification is a JSON object, not null",)),
    Case("missing", (), ("one argument", "0 were sent")),
    Case("two", (spec(node()), spec(node())), ("one argument", "2 were sent")),
    Case("no-nodes", ("{}",), ("nodes: required",)),
    Case("empty", (spec(),), ("nodes: ",)),
    Case("nodes-object", ('{"nodes": {"a": {}}}',), ("nodes: ",)),
    Case("node-string", ('{"nodes": ["a", null, 7]}',), ("nodes[0]: ", "nodes[1]: ", "nodes[2]: ")),
    Case("node-empty", ('{"nodes": [{}]}',), ("nodes[0].id: required", "nodes[0].tool: required")),
    Case(
        "unknown-fields",
        (spec(node(), node("b", colour="red"), retries=3),),
        ("retries: unknown field", "nodes[1].colour: unknown field"),
    ),
    Case(
        "wrong-types",
        (
            spec(
                node("a", after="b", approval=[], deadline_seconds="soon", on_discard="maybe"),
                node(7, 8, deadline_seconds=-1, approval={"id": "", "granted_by": "x", "expires_at": "2027-01-01"}),
                max_parallel="ten",
                node_mode="slow",
                correlation_id=1,
                traceparent="00-x",
            ),
        ),
        (
            *(f"nodes[0].{field}: " for field in ("after", "approval", "deadline_seconds", "on_discard")),
            *(f"nodes[1].{field}: " for field in ("id", "tool", "deadline_seconds", "approval.id")),
            *(f"{field}: " for field in ("max_parallel", "node_mode", "correlation_id", "traceparent")),
        ),
    ),
    Case("not-finite", (spec(node()).replace('"amount": 1', '"amount": 1e999'),), ("not finite",)),
    Case("too-parallel", (spec(node(), max_parallel=0),), ("max_parallel: ",)),
    Case("slash", (spec(node()),), ("workflow id: a run id holds no '/'",), run_id="{}/x"),
    Case("long-id", (spec(node()),), ("workflow id: a run id has 1 to 200 characters",), run_id="{}" + "x" * 200),
    Case("control-id", (spec(node()),), ("workflow id: a run id holds no control characters",), run_id="{}\t"),
]

GRAPHS = [
    Case(
        "cycle",
        (spec(node("a", after=["c"]), node("b", after=["a"]), node("c", after=["b"]), node("d")),),
        ("cycle: ", "a", "b", "c"),
    ),
    Case("itself", (spec(node("a", after=["a"])),), ("nodes[0]: cycle: a → a",)),
    Case("data-cycle", (spec(node("a", input={"amount": {"$output": "a"}})),), ("nodes[0]: cycle: ",)),
    Case(
        "dangling",
        (spec(node("a"), node("b", input={"x": [0, {"$output": "nope"}]}), node("c", after=["a", "gone"])),),
        ("nodes[1].input.x[1]: there is no node 'nope'", "nodes[2].after[1]: there is no node 'gone'"),
    ),
    Case("after-types", (spec(node("a", after=[7])),), ("nodes[0].after[0]: ",)),
    Case("duplicate", (spec(node("a"), node("b"), node("a")),), ("nodes[2].id: 'a' is already the id of nodes[0]",)),
    Case(
        "ids",
        (spec(*(node(name) for name in ("a/b", "", "-x", "x" * 65, "a\n", "ä", "a b", ".."))),),
        tuple(f"nodes[{index}].id: " for index in range(8)),
    ),
    Case("tool-name", (spec(node("a", "no/slash"), node("b", "")),), ("nodes[0].tool: ", "nodes[1].tool: ")),
    Case("unknown-tool", (spec(node(), node("b", "nope")),), ("nodes[1].tool: there is no tool 'nope'",)),
    Case(
        "schema",
        (spec(node("a", input={}), node("b", input={"amount": "x"}), node("c", input=[1]), node("d", "nope")),),
        ("nodes[0].input: ", "nodes[1].input.amount: ", "nodes[2].input: ", "nodes[3].tool: "),
    ),
    Case(
        "references",
        (
            spec(
                node("a"),
                node("b", input={"amount": {"$output": 7}}),
                node("c", input={"amount": {"$output": "a", "pointer": "id"}}),
                node("d", input={"amount": {"$output": "a", "default": 1}}),
                node("e", input={"amount": {"$output": "a", "pointer": None}}),
            ),
        ),
        (
            "nodes[1].input.amount.$output: ",
            "nodes[2].input.amount.pointer: ",
            "nodes[3].input.amount.default: unknown field",
            "nodes[4].input.amount.pointer: ",
        ),
    ),
]

BYTES = [
    Case("deep-101", (deep(101),), ("nested deeper than",)),
    Case("deep-190", (deep(190, '{"a":', "}"),), ("nested deeper than",)),
    Case("deep-250", (deep(250),), ("",)),
    Case("deep-9000", (deep(9000),), ("",)),
    Case("bare-deep", (nested(300),), ("",)),
    Case("surrogate", (spec(node("a", "any", input={"x": "?"})).replace('"?"', r'"\ud800"'),), ("",)),
    Case("surrogate-id", (spec(node("?")).replace('"?"', r'"\udfff"'),), ("",)),
    Case("huge-number", (spec(node()).replace('"amount": 1', f'"amount": {"9" * 5000}'),), ("",)),
    Case("bytes", ("/w==",), ("",), BINARY),
    Case("text", ("e30=",), ("",), BINARY),
    Case("nothing", ("",), ("null",), ("--input-meta", "encoding=binary/null")),
    Case("encoding", ("{}",), ("",), ("--input-meta", "encoding=x/y")),
    Case("protobuf", ("{}",), ("",), ("--input-meta", "encoding=json/protobuf")),
]


def crowds(folder: Path) -> Iterable[Case]:
    """Those too large for a command line."""
    long_name = "n" * 100_000
    nodes: dict[str, list[dict[str, Any]]] = {
        "unknown-tools": [{"id": f"n{index}", "tool": "nope"} for index in range(5_000)],
        "schema-breakers": [{"id": f"n{index}", "tool": "pay", "input": {"amount": "x"}} for index in range(5_000)],
        "long-cycles": [
            {"id": f"{long_name}{index}", "tool": "pay", "after": [f"{long_name}{(index + 1) % 4}"]}
            for index in range(4)
        ],
        "too-many": [{"id": f"n{index}", "tool": "pay"} for index in range(30_000)],
        "large": [node("a", "any", input={"x": "y" * 1_200_000})],
    }
    wanted = {
        "unknown-tools": ("nodes[0].tool: there is no tool 'nope'", "more"),
        "schema-breakers": ("nodes[0].input.amount: ", "more"),
        "long-cycles": ("nodes[0].id: ",),
        "too-many": ("nodes: 30000 nodes; ",),
        "large": ("bytes; 1048576 are allowed",),
    }
    for name, crowd in nodes.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps({"nodes": crowd}, separators=(",", ":")))
        yield Case(name, (), wanted[name], ("--input-file", str(path)))


async def failure_of(client: Client, workflow_id: str, within: float = _SECONDS) -> ApplicationError:
    """How the workflow failed; a hanging one, or a success, fails the test."""
    try:
        async with asyncio.timeout(within):
            result = await client.get_workflow_handle(workflow_id).result(follow_runs=False)
    except WorkflowFailureError as error:
        if isinstance(error.cause, ApplicationError):
            return error.cause
        raise AssertionError(f"{workflow_id} ended with {error.cause!r}") from error
    except TimeoutError:
        raise AssertionError(f"{workflow_id} hangs") from None
    raise AssertionError(f"{workflow_id} came to {result}")


async def all_hold(checks: Iterable[Awaitable[None]]) -> None:
    """Awaits them all, and tells of all that failed."""
    outcomes = await asyncio.gather(*checks, return_exceptions=True)
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert not failures, "\n".join(f"- {failure!r}"[:600] for failure in failures)


@pytest.mark.parametrize("table", ["shapes", "graphs", "bytes", "crowds"])
async def test_a_run_that_cannot_be_executed_fails_at_once_naming_every_problem(
    bench: Bench, cli: TemporalCli, table: str
) -> None:
    schema = {"type": "object", "required": ["amount"], "properties": {"amount": {"type": "number"}}}
    await bench.tool("pay", input_schema=schema)
    await bench.tool("any")
    for number in range(20):
        await bench.tool(f"a-tool-with-a-long-name-as-they-may-have-{number}")
    cases = {"shapes": SHAPES, "graphs": GRAPHS, "bytes": BYTES, "crowds": list(crowds(bench.folder))}[table]

    async def check(case: Case) -> None:
        run_id = (case.run_id or "{}").format(f"{bench.name}-{table}-{case.name}")
        started = await cli.start(bench.queue, run_id, *case.inputs, more=case.more)
        assert started.code == 0, started
        failure = await failure_of(bench.client, run_id)
        assert failure.type == "InvalidRun", (case.name, failure.type, failure.message[:300])
        assert failure.message
        assert len(failure.message.encode()) < 256 * 1024, (case.name, len(failure.message))
        # It says where, but repeats no values: they may be secret.
        assert "input_value" not in failure.message
        lines = failure.message.splitlines()
        for problem in case.problems:
            assert any(problem in line for line in lines), (case.name, problem, failure.message[:500])
        # The same id is free for a good one, and nothing is remembered against it.
        if case.run_id is None and case.name in ("array", "cycle", "deep-250", "large"):
            assert (await cli.start(bench.queue, run_id, spec(node()))).code == 0
            async with asyncio.timeout(_SECONDS):
                result = await bench.client.get_workflow_handle(run_id).result()
            assert result["status"] == "SUCCEEDED"

    async with bench.worker():
        if table == "crowds":
            for case in cases:
                await check(case)
        else:
            await all_hold(check(case) for case in cases)
    # Nothing was executed but the good ones.
    good = sum(case.name in ("array", "cycle", "deep-250", "large") for case in cases)
    assert len(await bench.tools.calls(bench.unique("pay"))) == good
    assert await bench.tools.calls(bench.unique("any")) == []


async def test_what_temporal_itself_refuses_starts_nothing(bench: Bench, cli: TemporalCli) -> None:
    path = bench.folder / "three_megabytes.json"
    path.write_text(spec(node("a", "any", input={"x": "y" * 3_000_000})))
    large = await cli.start(bench.queue, f"{bench.name}-large", more=("--input-file", str(path)))
    assert (large.code, "exceeds limit" in large.errors) == (1, True)
    broken = await cli.start(bench.queue, f"{bench.name}-broken", '{"nodes": [}')
    assert (broken.code, "not valid JSON" in broken.errors) == (1, True)
    for name in ("large", "broken"):
        with pytest.raises(RPCError) as refused:
            await bench.client.get_workflow_handle(f"{bench.name}-{name}").describe()
        assert refused.value.status is RPCStatusCode.NOT_FOUND


GARBAGE: Sequence[tuple[tuple[str, ...], tuple[str, ...]]] = [
    ((), ()),
    (("null",), ()),
    (("[]",), ()),
    (("7", "8"), ()),
    (("{}",), ()),
    (('{"approval_id": 7, "node_id": 7, "workflow_id": 7, "status": 7}',), ()),
    (('{"workflow_id": ""}',), ()),
    ((json.dumps({"workflow_id": "x" * 3000}),), ()),
    (('{"workflow_id": "nobody there"}',), ()),
    ((nested(300),), ()),
    ((r'{"approval_id": "\ud800", "revoked_by": "x"}',), ()),
    (("/w==",), BINARY),
    (("{}",), ("--input-meta", "encoding=x/y")),
]


async def test_garbage_sent_to_a_run_and_its_nodes_changes_nothing(bench: Bench, cli: TemporalCli) -> None:
    """Every signal that they know, and some that they do not."""
    await bench.tool("pay", [{"gate": f"{bench.name}-gate"}], timeout="10m")
    approval = {"id": "apr-1", "granted_by": "alice"}
    signals = {
        "{}": ("revoke_approval", "node_changed", "node_ended", "node_gone", "nobody knows"),
        "{}/a": ("revoke_approval", "report_to", "run_gone", "dead_letter_gone", "dead_letter_settled", "nobody knows"),
    }

    async def send(workflow_id: str, name: str, inputs: tuple[str, ...], more: tuple[str, ...]) -> None:
        await cli.signal(workflow_id, name, *inputs, more=more)

    async with bench.worker():
        run = await bench.start(node("a", approval=approval))
        await bench.tools.wait_for(bench.unique("pay"), calls=1)
        await all_hold(
            send(whose.format(run.id), name, inputs, more)
            for whose, names in signals.items()
            for name in names
            for inputs, more in (GARBAGE[:3] if name == "nobody knows" else GARBAGE)
        )
        unknown = await cli.run("workflow", "query", "--workflow-id", run.id, "--type", "nope")
        assert (unknown.code, "nope" in unknown.errors) == (1, True)
        refused = await cli.update(run.id, "nope", "{}")
        assert (refused.code, "nope" in refused.errors) == (1, True)
        assert (await cli.query(run.id, "status"))["nodes"]["a"]["status"] == "RUNNING"
        await bench.tools.open_gate(f"{bench.name}-gate")
        async with asyncio.timeout(_SECONDS):
            result = await run.result()
    assert result["counts"] == {"SUCCEEDED": 1}
    assert len(await bench.tools.calls(bench.unique("pay"))) == 1


async def test_nodes_and_dead_letters_started_by_hand_with_garbage_fail_at_once(bench: Bench, cli: TemporalCli) -> None:
    await bench.tool("pay")
    one_argument = [*(inputs for inputs, more in GARBAGE if not more), ('{"entry": {}}',), ('{"node_id": "a"}',)]

    async def check(kind: str, number: int, inputs: tuple[str, ...], more: tuple[str, ...] = ()) -> None:
        workflow_id = f"{bench.name}-{kind}-{number}"
        assert (await cli.start(bench.queue, workflow_id, *inputs, kind=kind, more=more)).code == 0
        failure = await failure_of(bench.client, workflow_id)
        assert (failure.type or "").startswith("Invalid"), (kind, inputs, failure)
        assert failure.message

    async with bench.worker():
        await all_hold(
            [
                *(
                    check(kind, number, inputs)
                    for kind in ("Node", "DeadLetter")
                    for number, inputs in enumerate(one_argument)
                ),
                *(check(kind, 99, ("/w==",), BINARY) for kind in ("Node", "DeadLetter")),
            ]
        )
    assert await bench.tools.calls(bench.unique("pay")) == []


DECISIONS: Sequence[tuple[str, tuple[str, ...], str, tuple[str, ...]]] = [
    ("redrive", (), "one argument", ()),
    ("redrive", ("null",), "a JSON object, not null", ()),
    ("redrive", ("[1]",), "a JSON object, not an array", ()),
    ("redrive", ('"go"',), "a JSON object, not a string", ()),
    ("redrive", (good(), good()), "2 were sent", ()),
    ("redrive", ("{}",), "decided_by: required", ()),
    ("redrive", ('{"decided_by": "bob"}',), "reason: required", ()),
    ("redrive", ('{"decided_by": 7, "reason": []}',), "decided_by: ", ()),
    ("redrive", ('{"decided_by": "", "reason": "x"}',), "decided_by: ", ()),
    ("redrive", (good(inptu={}),), "inptu: unknown field", ()),
    ("redrive", (good(override=["EVERYTHING"]),), "override[0]: ", ()),
    ("redrive", (good(override=["RUN_CLOSED"]),), "RUN_CLOSED cannot be overridden", ()),
    ("redrive", (good(approval={"id": "x"}),), "approval.granted_by: required", ()),
    ("redrive", (good(if_redrives=-1),), "if_redrives: ", ()),
    ("redrive", (good(decision_id=""),), "decision_id: ", ()),
    ("redrive", (holding("1e999", input="?"),), "not finite", ()),
    ("redrive", (holding(nested(150), input="?"),), "nested deeper", ()),
    ("redrive", (holding(nested(198), input="?"),), "nested deeper", ()),
    ("redrive", (holding(nested(250), input="?"),), "", ()),
    ("redrive", (holding(r'"\ud800"', decided_by="?"),), "", ()),
    ("redrive", ("/w==",), "", BINARY),
    ("redrive", ("{}",), "", ("--input-meta", "encoding=x/y")),
    ("resolve", (good(),), "output: required", ()),
    ("resolve", (good(output={"id": 7}),), "output.id: ", ()),
    ("resolve", (holding(nested(198), output="?"),), "", ()),
    ("discard", ('{"reason": "x"}',), "decided_by: required", ()),
    ("discard", (good(reason="x" * 5000),), "reason: ", ()),
    ("reconcile", ("{}",), "decided_by: required", ()),
    ("check", ("7",), "a JSON object, not a number", ()),
    ("check", ('{"decided_by": []}',), "decided_by: ", ()),
]
UNKNOWN = ("approve", "Redrive", "retry now")


async def test_malformed_decisions_are_kept_as_rejected_and_a_good_one_is_still_taken(
    bench: Bench, cli: TemporalCli
) -> None:
    schema = {"type": "object", "properties": {"id": {"type": "string"}}}
    await bench.tool("pay", [{"status": 403}, {}], output_schema=schema)
    large = bench.folder / "large.json"
    large.write_text(good(output="x" * 1_100_000))
    async with bench.worker():
        run = await bench.start(node("a"))
        await bench.parked(run, "a")
        letter = f"{run.id}/a/dead-letter"

        async def send(name: str, inputs: tuple[str, ...], more: tuple[str, ...] = ()) -> None:
            await cli.signal(letter, name, *inputs, more=more)

        async def rejected(count: int) -> Entry:
            async def kept() -> Entry | None:
                entry = await bench.entry(run, "a")
                return entry if sum(record.outcome == "REJECTED" for record in entry.decisions) >= count else None

            return await eventually(kept, f"{count} rejections", within=_SECONDS)

        # Each in its turn, so that one which is lost is known by its name.
        count = 0
        lost = []
        for name, inputs, problem, more in DECISIONS:
            await send(name, inputs, more)
            try:
                entry = await rejected(count + 1) if count == 0 else await _kept(bench, run, count + 1)
            except AssertionError:
                lost.append((name, inputs[:1] and inputs[0][:60], more))
                continue
            count += 1
            (newest,) = entry.decisions[count - 1 :]
            assert newest.action == name
            assert problem in newest.reason, (problem, newest)
            assert newest.refusals == []
            assert "input_value" not in newest.reason
        assert lost == []
        await asyncio.gather(
            *(send(name, (good(),)) for name in UNKNOWN),
            send("resolve", (), ("--input-file", str(large))),
            send("node_gone ", ("1",)),
        )
        entry = await rejected(len(DECISIONS) + len(UNKNOWN) + 2)
        assert {*UNKNOWN, "node_gone "} <= {record.action for record in entry.decisions}
        assert (entry.status, entry.redrives) == ("AWAITING_DECISION", 0)
        record = (await cli.update(letter, "redrive", good())).json()["result"]
        assert record["outcome"] == "ACCEPTED"
        async with asyncio.timeout(_SECONDS):
            assert (await run.result())["counts"] == {"SUCCEEDED": 1}


async def _kept(bench: Bench, run: Any, count: int) -> Entry:
    """The entry once it has so many decisions; a check, which is answered in its turn, says when to give up."""
    await bench.decide(run, "a", "check", decided_by="")
    entry = await bench.entry(run, "a")
    assert len(entry.decisions) >= count
    return entry


async def test_a_malformed_update_is_refused_to_its_sender_and_changes_nothing(bench: Bench, cli: TemporalCli) -> None:
    schema = {"type": "object", "properties": {"id": {"type": "string"}}}
    await bench.tool("pay", [{"status": 403}, {}], output_schema=schema)
    async with bench.worker():
        run = await bench.start(node("a"))
        before = await bench.parked(run, "a")
        letter = f"{run.id}/a/dead-letter"

        async def check(name: str, inputs: tuple[str, ...], problem: str, more: tuple[str, ...]) -> None:
            ran = await cli.update(letter, name, *inputs, more=more)
            if ran.code == 0:
                # What breaks the tool's schema is only known after asking a worker: a record, not a failed update.
                assert ran.json()["result"]["outcome"] == "REJECTED", ran
            else:
                assert problem in ran.errors, (problem, ran)

        async def unknown(name: str) -> Ran:
            return await cli.update(letter, name, good())

        await all_hold(check(*decision) for decision in DECISIONS)
        for ran in await asyncio.gather(*(unknown(name) for name in UNKNOWN)):
            assert ran.code == 1
        after = await bench.entry(run, "a")
        assert [record.outcome for record in after.decisions if record.outcome != "REJECTED"] == []
        assert after.model_copy(update={"decisions": [], "eligibility": before.eligibility}) == before
        await cli.signal(letter, "redrive", good())
        async with asyncio.timeout(_SECONDS):
            assert (await run.result())["counts"] == {"SUCCEEDED": 1}


async def test_signals_between_the_workflows_forged_by_hand_leave_a_dead_letter_answering(
    bench: Bench, cli: TemporalCli
) -> None:
    await bench.tool("pay", [{"status": 403}, {}])
    async with bench.worker():
        run = await bench.start(node("a"))
        await bench.parked(run, "a")
        letter = f"{run.id}/a/dead-letter"
        sent = [
            cli.signal(letter, name, *inputs, more=more)
            for name in ("revoke_approval", "report_to")
            for inputs, more in GARBAGE
        ]
        await asyncio.gather(*sent)
        assert (await bench.decide(run, "a", "check")).outcome == "NOTED"
        assert (await bench.entry(run, "a")).status == "AWAITING_DECISION"
        await cli.signal(letter, "node_gone", "1", "2")
        assert (await bench.decide(run, "a", "discard")).outcome == "ACCEPTED"
        failure = await failure_of(bench.client, run.id)
        assert failure.type == "RunFailed"
