"""Records the stored histories anew, from a real server: `python -m tests.replay.record`.

A released version's histories are never recorded again: what they hold is parked somewhere, and must go on. Until there
is a release, record them anew whenever a workflow has changed its commands. What a history says of the machine that
made it is taken out.
"""

import argparse
import asyncio
import base64
import gc
import itertools
import json
import re
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from temporalio.client import WorkflowFailureError, WorkflowHandle

from contracts.dead_letters import Entry
from contracts.identity import dead_letter_workflow_id, node_workflow_id
from contracts.sweep import SweepResult
from tests.impatient import impatient_server
from tests.lab import Bench
from tests.tool_server import ToolServer
from tests.waiting import eventually
from workers.embedded import embedded_server

HISTORIES: Final = Path(__file__).parent / "histories"

Handle = WorkflowHandle[Any, Any]
Recorded = dict[str, Handle]
"""The name of each history, and the workflow that it is of."""

_GATE: Final = "replay-gate"
_TOOLS: Final[Mapping[str, dict[str, Any]]] = {
    "succeeded": {"steps": [{"status": 429}, {"body": {"id": "s-1"}}]},
    "follows": {"steps": [{}]},
    "redriven": {"steps": [{"status": 403}, {"status": 403}, {}]},
    "refused": {"steps": [{"status": 500}, {}]},
    "rejected": {"steps": [{"status": 403}]},
    "resolved": {"steps": [{"status": 500}]},
    "discarded": {"steps": [{"status": 422}]},
    "skipped": {"steps": [{}]},
    "cancelled": {"steps": [{"status": 403}]},
    "in-flight": {"steps": [{"gate": _GATE}]},
    "reconciled": {"steps": [{"status": 500, "commit": True, "body": {"id": "r-1"}}], "reconcile": True},
    "asked": {
        "steps": [{"status": 500, "commit": True}],
        "reconcile": True,
        "retry": {"DEPENDENCY_DOWN": {"attempts": 1}},
    },
    "revoked": {"steps": [{"status": 403}, {}], "approval": "required"},
    "reopened": {"steps": [{"status": 403}, {}]},
    "attached": {"steps": [{"status": 403}, {}]},
    "swept": {"steps": [{"status": 500}], "timeout": "1s"},
    "stopped": {"steps": [{"status": 403}, {}]},
    "fast": {"steps": [{}]},
    "fast-refused": {"steps": [{"status": 403}, {}]},
    "step": {"steps": [{}]},
    # More than a run carries along.
    "large": {"steps": [{"body": {"id": "l-1", "text": "x" * 400_000}}]},
    "takes": {"steps": [{}]},
    "refused-workflow": {"steps": [{"status": 403}, {}]},
    "refused-fast": {"steps": [{"status": 403}, {}]},
}

_STEPS: Final = {"workflow": 15, "fast": 80}
"""What makes a run long: a step is a workflow with its events, or one event."""

_numbers = itertools.count(1)
_ROOT: Final = Path(__file__).resolve().parents[2]
_WORKER: Final = re.compile(rf"\d+@{re.escape(socket.gethostname())}(-[0-9a-f]+)?")
_PORT: Final = re.compile(r"127\.0\.0\.1:\d+")


def _node(bench: Bench, run: Handle, node: str = "call") -> Handle:
    return bench.client.get_workflow_handle(node_workflow_id(run.id, node))


def _entry(bench: Bench, run: Handle, node: str = "call") -> Handle:
    return bench.client.get_workflow_handle(dead_letter_workflow_id(run.id, node))


async def _start(bench: Bench, tool: str, **node: Any) -> Handle:
    return await bench.start({"id": "call", "tool": tool, "input": {"amount": 1}} | node, run_id=f"run-{tool}")


async def _ended(run: Handle) -> None:
    with suppress(WorkflowFailureError):
        await run.result()


async def _obsolete(bench: Bench, run: Handle) -> None:
    async def obsolete() -> Entry | None:
        found = await bench.entry(run, "call")
        return found if found.status == "OBSOLETE" else None

    await eventually(obsolete, "an obsolete entry")


async def _succeeded(bench: Bench) -> Recorded:
    run = await bench.start(
        {"id": "call", "tool": "succeeded", "input": {}},
        {"id": "next", "tool": "follows", "input": {"of": {"$output": "call", "pointer": "/id"}}},
        run_id="run-succeeded",
    )
    await _ended(run)
    return {"run-succeeded": run, "node-succeeded": _node(bench, run)}


async def _redriven(bench: Bench) -> Recorded:
    run = await _start(bench, "redriven")
    await bench.parked(run, "call")
    await bench.dead_letter(run, "call").signal("redrive", {"decided_by": "tester", "reason": "paid"})
    await bench.parked(run, "call", redrives=1)
    await bench.decide(run, "call", "redrive", input={"amount": 2})
    await _ended(run)
    return {
        "run-blocked-and-redriven": run,
        "node-redriven": _node(bench, run),
        "dead-letter-redriven": _entry(bench, run),
    }


async def _refused(bench: Bench) -> Recorded:
    run = await _start(bench, "refused")
    await bench.parked(run, "call")
    await bench.decide(run, "call", "redrive")
    await bench.decide(run, "call", "check")
    await bench.decide(run, "call", "reconcile")
    await bench.decide(run, "call", "redrive", override=["SIDE_EFFECT_UNRESOLVED"])
    await _ended(run)
    return {"node-redriven-at-risk": _node(bench, run), "dead-letter-refused-then-redriven": _entry(bench, run)}


async def _rejected(bench: Bench) -> Recorded:
    run = await _start(bench, "rejected", on_discard="continue")
    await bench.parked(run, "call")
    entry = bench.dead_letter(run, "call")
    await entry.signal("redrive", {"reason": "who am I?"})
    await entry.signal("redrive", args=[1, 2])
    await entry.signal("retry", {"decided_by": "tester"})

    async def kept() -> Entry | None:
        found = await bench.entry(run, "call")
        return found if len(found.decisions) == 3 else None

    await eventually(kept, "three rejected decisions")
    await entry.signal("discard", {"decided_by": "tester", "reason": "not needed"})
    await _ended(run)
    return {"run-continued-after-a-discard": run, "dead-letter-rejected": entry}


async def _resolved(bench: Bench) -> Recorded:
    run = await _start(bench, "resolved")
    await bench.parked(run, "call")
    await bench.decide(run, "call", "resolve", output={"id": "seen"})
    await _ended(run)
    return {"node-resolved": _node(bench, run), "dead-letter-resolved": _entry(bench, run)}


async def _discarded(bench: Bench) -> Recorded:
    run = await bench.start(
        {"id": "call", "tool": "discarded", "input": {}},
        {"id": "next", "tool": "skipped", "input": {}, "after": ["call"]},
        run_id="run-discarded",
    )
    await bench.parked(run, "call")
    await bench.decide(run, "call", "discard")
    await _ended(run)
    return {"run-failed": run, "node-discarded": _node(bench, run), "dead-letter-discarded": _entry(bench, run)}


async def _cancelled(bench: Bench) -> Recorded:
    run = await _start(bench, "cancelled")
    await bench.parked(run, "call")
    await run.cancel()
    await _ended(run)
    await _obsolete(bench, run)
    await bench.decide(run, "call", "redrive")
    return {"run-cancelled": run, "node-cancelled": _node(bench, run), "dead-letter-obsolete": _entry(bench, run)}


async def _cancelled_in_flight(bench: Bench) -> Recorded:
    run = await _start(bench, "in-flight")
    await bench.tools.wait_for(bench.unique("in-flight"), calls=1)
    await run.cancel()

    async def heard() -> bool | None:
        history = await _node(bench, run).fetch_history()
        return any(event.HasField("activity_task_cancel_requested_event_attributes") for event in history.events)

    await eventually(heard, "the node to be cancelled")
    await bench.tools.open_gate(_GATE)
    await _ended(run)
    return {"run-cancelled-in-flight": run, "node-cancelled-in-flight": _node(bench, run)}


async def _invalid(bench: Bench) -> Recorded:
    run = await bench.start({"id": "call", "tool": "nobody-has-this", "input": {}}, run_id="run-invalid")
    await _ended(run)
    return {"run-invalid": run}


async def _reconciled(bench: Bench) -> Recorded:
    run = await _start(bench, "reconciled")
    await _ended(run)
    return {"node-reconciled": _node(bench, run)}


async def _reconciled_by_a_person(bench: Bench) -> Recorded:
    await bench.tools.reconcile_script(bench.unique("asked"), [{"status": 503, "body": "later"}])
    run = await _start(bench, "asked")
    await bench.parked(run, "call")
    await bench.tools.reconcile_script(bench.unique("asked"), [{}])
    await bench.decide(run, "call", "reconcile")
    await _ended(run)
    return {"node-reconciled-by-a-person": _node(bench, run), "dead-letter-reconciled": _entry(bench, run)}


async def _revoked(bench: Bench) -> Recorded:
    grant = {"id": "apr-1", "granted_by": "alice", "expires_at": "2099-01-01T00:00:00Z"}
    run = await _start(bench, "revoked", approval=grant)
    await bench.parked(run, "call")
    await run.signal("revoke_approval", {"approval_id": "apr-1", "revoked_by": "bob", "reason": "left"})

    async def told() -> Entry | None:
        found = await bench.entry(run, "call")
        return found if "APPROVAL_REVOKED" in found.eligibility.refusals else None

    await eventually(told, "the revocation")
    await bench.decide(run, "call", "redrive", approval=grant | {"id": "apr-2"})
    await _ended(run)
    return {
        "run-approval-revoked": run,
        "node-approval-renewed": _node(bench, run),
        "dead-letter-approval-revoked": _entry(bench, run),
    }


async def _reopened(bench: Bench) -> Recorded:
    run = await _start(bench, "reopened")
    await bench.parked(run, "call")
    before = (await bench.dead_letter(run, "call").describe()).run_id
    await bench.dead_letter(run, "call").terminate()

    async def again() -> bool | None:
        return (await bench.dead_letter(run, "call").describe()).run_id != before

    await eventually(again, "a second dead letter")
    await bench.parked(run, "call")
    await bench.decide(run, "call", "redrive")
    await _ended(run)
    return {"node-with-a-reopened-dead-letter": _node(bench, run)}


async def _attached(bench: Bench) -> Recorded:
    run = await _start(bench, "attached")
    await bench.parked(run, "call")
    await run.terminate()
    run = await _start(bench, "attached")

    async def asked() -> bool | None:
        history = await _node(bench, run).fetch_history()
        return any(
            event.workflow_execution_signaled_event_attributes.signal_name == "report_to" for event in history.events
        )

    await eventually(asked, "the second run to ask the node")
    await bench.decide(run, "call", "redrive")
    await _ended(run)
    return {"run-attached-to-its-node": run, "node-of-two-runs": _node(bench, run)}


async def _swept(bench: Bench) -> Recorded:
    run = await _start(bench, "swept")
    await bench.parked(run, "call")
    await run.terminate()
    await _node(bench, run).terminate()
    await _entry(bench, run).terminate()

    async def opened() -> Handle | None:
        sweep = await bench.client.start_workflow("Sweep", id=f"sweep-{next(_numbers)}", task_queue=bench.queue)
        result = SweepResult.model_validate(await sweep.result())
        return sweep if result.dead_letters_opened.count else None

    sweep = await eventually(opened, "a sweep that opens the dead letter again")
    await bench.parked(run, "call")
    await bench.decide(run, "call", "discard")
    return {"sweep-with-an-orphan": sweep, "dead-letter-of-an-orphan": _entry(bench, run)}


async def _stopped(bench: Bench) -> Recorded:
    run = await _start(bench, "stopped")
    await bench.parked(run, "call")
    await run.terminate()
    node = _node(bench, run)
    # This execution: another one stands under the same id later.
    stopped = bench.client.get_workflow_handle(node.id, run_id=(await node.describe()).run_id)
    await node.signal("run_gone", {"execution": None})
    await _ended(stopped)
    await _obsolete(bench, run)
    run = await _start(bench, "stopped")
    await bench.parked(run, "call")
    await bench.decide(run, "call", "redrive")
    await _ended(run)
    return {"node-of-a-run-that-is-gone": stopped, "dead-letter-obsolete-and-back": _entry(bench, run)}


async def _fast(bench: Bench) -> Recorded:
    run = await bench.start(
        {"id": "call", "tool": "fast"},
        {"id": "promoted", "tool": "fast-refused", "input": {"of": {"$output": "call", "pointer": "/id"}}},
        run_id="run-fast",
        node_mode="fast",
    )
    await bench.parked(run, "promoted")
    await bench.decide(run, "promoted", "redrive")
    await _ended(run)
    return {"run-fast": run, "node-promoted": _node(bench, run, "promoted")}


async def _continued(bench: Bench, mode: str) -> Handle:
    steps = _STEPS[mode]
    run = await bench.start(
        {"id": "parked", "tool": f"refused-{mode}"},
        {"id": "large", "tool": "large"},
        *({"id": f"n{n}", "tool": "step", "after": [f"n{n - 1}"] if n else []} for n in range(steps)),
        {"id": "takes", "tool": "takes", "after": ["parked"], "input": {"of": {"$output": "large", "pointer": "/id"}}},
        run_id=f"run-continued-{mode}",
        node_mode=mode,
        max_parallel=2,
    )
    await bench.parked(run, "parked")

    async def blocked() -> bool:
        return (await bench.status(run)).status == "BLOCKED"

    await eventually(blocked, "all the others to end")
    await bench.decide(run, "parked", "redrive")
    await _ended(run)
    # The last execution, which has taken up what the others left.
    return bench.client.get_workflow_handle(run.id, run_id=(await run.describe()).run_id)


async def _long(bench: Bench) -> Recorded:
    return {f"run-continued-{mode}": await _continued(bench, mode) for mode in ("workflow", "fast")}


SCENARIOS: Final[Mapping[Callable[[Bench], Awaitable[Recorded]], tuple[str, ...]]] = {
    _succeeded: ("run-succeeded", "node-succeeded"),
    _redriven: ("run-blocked-and-redriven", "node-redriven", "dead-letter-redriven"),
    _refused: ("node-redriven-at-risk", "dead-letter-refused-then-redriven"),
    _rejected: ("run-continued-after-a-discard", "dead-letter-rejected"),
    _resolved: ("node-resolved", "dead-letter-resolved"),
    _discarded: ("run-failed", "node-discarded", "dead-letter-discarded"),
    _cancelled: ("run-cancelled", "node-cancelled", "dead-letter-obsolete"),
    _cancelled_in_flight: ("run-cancelled-in-flight", "node-cancelled-in-flight"),
    _invalid: ("run-invalid",),
    _reconciled: ("node-reconciled",),
    _reconciled_by_a_person: ("node-reconciled-by-a-person", "dead-letter-reconciled"),
    _revoked: ("run-approval-revoked", "node-approval-renewed", "dead-letter-approval-revoked"),
    _reopened: ("node-with-a-reopened-dead-letter",),
    _attached: ("run-attached-to-its-node", "node-of-two-runs"),
    _swept: ("sweep-with-an-orphan", "dead-letter-of-an-orphan"),
    _fast: ("run-fast", "node-promoted"),
    _stopped: ("node-of-a-run-that-is-gone", "dead-letter-obsolete-and-back"),
}
"""What is run, and the histories that come of it."""

LONG: Final = ("run-continued-fast", "run-continued-workflow")
"""What comes of runs on a server that suggests early to continue as new."""

NAMES: Final = sorted([*(name for names in SCENARIOS.values() for name in names), *LONG])


def cleaned(value: Any) -> Any:
    """A history's JSON without what it says of the machine that made it: workers, ports, stack traces."""
    if isinstance(value, dict):
        parts = {key: cleaned(part) for key, part in value.items() if key != "stackTrace"}
        if "identity" in parts:
            parts["identity"] = "worker"
        if "data" in parts and "metadata" in parts:
            parts["data"] = _cleaned_payload(value["data"])
        return parts
    if isinstance(value, list):
        return [cleaned(part) for part in value]
    return _cleaned_text(value) if isinstance(value, str) else value


def _cleaned_payload(data: str) -> str:
    return base64.b64encode(_cleaned_text(base64.b64decode(data).decode()).encode()).decode()


def _cleaned_text(text: str) -> str:
    text = _PORT.sub("127.0.0.1:1", _WORKER.sub("worker", text))
    for secret in (str(_ROOT), socket.gethostname(), tempfile.gettempdir()):
        if secret in text:
            raise ValueError(f"a history names this machine: {secret} in {text[:500]}")
    return text


@asynccontextmanager
async def _laboratory() -> AsyncGenerator[Bench, None]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        async with (
            embedded_server(folder / "temporal", port=0, ui_port=0) as server,
            ToolServer.start(folder) as tools,
        ):
            yield Bench(server.client, tools, folder, "replay")


async def record() -> dict[str, str]:
    """Runs every scenario, and returns the histories that come of them, as JSON by their names.

    Raises:
        ValueError: a history names this machine.
    """
    async with _laboratory() as bench:
        for name, settings in _TOOLS.items():
            await bench.tool(name, **settings)
        async with bench.worker():
            recorded = await asyncio.gather(*[scenario(bench) for scenario in SCENARIOS])
            texts = {name: await _text(handle) for scenario in recorded for name, handle in scenario.items()}
        async with impatient_server() as client:
            impatient = replace(bench, client=client)
            async with impatient.worker():
                recorded_there = await _long(impatient)
                return texts | {name: await _text(handle) for name, handle in recorded_there.items()}


async def _text(handle: Handle) -> str:
    history = (await handle.fetch_history()).to_json_dict()
    return json.dumps(cleaned(history), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def main() -> None:
    """Reads the command line and records."""
    parser = argparse.ArgumentParser(prog="tests.replay.record", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=HISTORIES, help="where to write them")
    folder: Path = parser.parse_args().folder
    histories = asyncio.run(record())
    gc.collect()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    for name, text in histories.items():
        (folder / f"{name}.json").write_text(text)
    sys.stdout.write(f"{len(NAMES)} histories in {folder}\n")


if __name__ == "__main__":
    main()
