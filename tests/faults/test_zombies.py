"""Workers that freeze past their lease with a call in their hands, and wake up when others have long gone on.

One worker holds a call of each kind of tool, freezes, and wakes up when the others have done what they can.
"""

import asyncio
import json
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import pytest
from temporalio.client import WorkflowHandle

from activities.ledger.records import OperationView
from contracts.dead_letters import Entry
from tests.faults.lookup import node_result, operation
from tests.faults.zombie_worker import AFTER_CHECK, BEFORE_CHECK, BEFORE_CONNECT
from tests.lab import NODE_MODES, Bench
from tests.tool_server import Call, ToolServer
from tests.waiting import eventually
from tests.worker_process import WorkerProcess
from workers.embedded import EmbeddedServer

pytestmark = pytest.mark.timeout(300)  # the first test waits for all of it, and a busy machine takes its time

_PLAN: Final = {
    "blind-early": BEFORE_CONNECT,
    "blind": BEFORE_CHECK,
    "key": BEFORE_CHECK,
    "late": AFTER_CHECK,
    "absent": BEFORE_CHECK,
    "absent-early": BEFORE_CONNECT,
}
"""Where the calls are when their worker freezes; that of `sent` has been sent, and has had its effect."""
_BLIND: Final = ("blind", "blind-early")
_NEVER_SENT: Final = [name for name, point in _PLAN.items() if point != AFTER_CHECK]


@dataclass(frozen=True)
class Story:
    """What became of one run with one node, `call`, whose first worker froze.

    Attributes:
        asleep: The calls the tool had got when the worker woke up.
        calls: And in the end.
        parked: The dead letter that was opened while the worker was frozen, if one was.
        woken: The same when the worker had woken up.
    """

    asleep: list[Call]
    calls: list[Call]
    effects: int
    view: OperationView
    node: Any
    parked: Entry | None
    woken: Entry | None


def _says(worker: WorkerProcess, line: str) -> bool:
    return line in worker.log.splitlines()


async def _stories(bench: Bench) -> dict[str, Story]:
    gate = bench.unique("gate")
    for name in _BLIND:
        await bench.tool(name, [{}], timeout="10m")
    for name in ("key", "late"):
        await bench.tool(name, [{}], dedupe=True, idempotency="key", timeout="10m")
    await bench.tool("sent", [{"gate": gate}], reconcile=True, timeout="10m")
    for name in ("absent", "absent-early"):
        # Its timeout is part of the horizon, which is waited for; so it is called last, and soon frozen.
        await bench.tool(name, [{}], reconcile=True, timeout="20s")
    release = bench.folder / "release"
    program = ("tests.faults.zombie_worker", json.dumps(_PLAN), str(release), f"--slots={len(bench.catalog)}")
    async with WorkerProcess.start(bench, program=program) as zombie:
        runs: dict[str, WorkflowHandle[Any, Any]] = {}
        for name in bench.catalog:
            runs[name] = await bench.start({"id": "call", "tool": name, "input": {"n": 1}})
            if name in _PLAN:
                await eventually(partial(_says, zombie, f"held {name}"), "the call to be held")
            else:
                await bench.tools.wait_for(bench.unique(name), effects=1)
        await zombie.freeze()
        async with bench.worker():
            parked = {name: await bench.parked(runs[name], "call") for name in _BLIND}
            others = [run for name, run in runs.items() if name not in _BLIND]
            async with asyncio.timeout(120):
                await asyncio.gather(*(run.result() for run in others))
            asleep = {name: await bench.tools.calls(bench.unique(name)) for name in runs}
            release.touch()
            zombie.resume()
            await bench.tools.open_gate(gate)

            async def all_came_back() -> bool:
                views = [await operation(bench, run, "call") for run in runs.values()]
                return all(view.attempts[0].ended_at is not None for view in views)

            await eventually(all_came_back, "the late ends of the frozen attempts")
            await bench.tools.wait_for(bench.unique("late"), calls=2)
            woken: dict[str, Entry] = {}
            for name in _BLIND:
                entry = bench.dead_letter(runs[name], "call")

                async def nothing_in_the_way(entry: WorkflowHandle[Any, Any] = entry) -> Entry | None:
                    await entry.signal("check", {})
                    found = Entry.model_validate(await entry.query("entry"))
                    return found if found.eligibility.redrivable else None

                woken[name] = await eventually(nothing_in_the_way, "the entry to know of the late end")
                assert not await bench.tools.calls(bench.unique(name))
                assert (await bench.decide(runs[name], "call", "redrive")).outcome == "ACCEPTED"
                await runs[name].result()
            return {
                name: Story(
                    asleep=asleep[name],
                    calls=await bench.tools.calls(bench.unique(name)),
                    effects=len(await bench.tools.effects(bench.unique(name))),
                    view=await operation(bench, run, "call"),
                    node=await node_result(bench, run, "call"),
                    parked=parked.get(name),
                    woken=woken.get(name),
                )
                for name, run in runs.items()
            }


@pytest.fixture(scope="module", params=NODE_MODES)
async def stories(
    temporal: EmbeddedServer,
    tool_server: ToolServer,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> dict[str, Story]:
    """All of them, told to their end."""
    name = f"zombies-{request.param}"
    folder = tmp_path_factory.mktemp(name)
    return await _stories(Bench(temporal.client, tool_server, folder, name, node_mode=request.param))


@pytest.mark.parametrize("name", [*_PLAN, "sent"])
async def test_whatever_a_worker_held_when_it_froze_has_one_effect(stories: dict[str, Story], name: str) -> None:
    assert stories[name].effects == 1
    assert {call.key for call in stories[name].calls} == {stories[name].node["idempotency_key"]}


@pytest.mark.parametrize("name", _NEVER_SENT)
async def test_a_worker_that_wakes_up_before_the_first_byte_sends_nothing(stories: dict[str, Story], name: str) -> None:
    story = stories[name]
    # The only call is that of the worker that took over, or of the redrive.
    assert len(story.calls) == 1
    assert len(story.asleep) == (0 if name in _BLIND else 1)


@pytest.mark.parametrize("name", _BLIND)
async def test_that_it_sent_nothing_takes_the_doubt_from_the_dead_letter(stories: dict[str, Story], name: str) -> None:
    story = stories[name]
    assert story.parked is not None
    assert story.woken is not None
    assert (story.parked.error.code, story.parked.side_effect) == ("worker_lost", "POSSIBLE")
    assert story.parked.eligibility.refusals == ["SIDE_EFFECT_UNRESOLVED"]
    # Waking up, it may hear first that its delivery has been given up.
    assert story.woken.attempts[0].code in ("lease_lost", "cancelled")
    assert (story.woken.attempts[0].side_effect, story.woken.side_effect) == ("NONE", "NONE")
    assert (story.node["source"], story.node["attempt_count"]) == ("EXECUTED", 2)


@pytest.mark.parametrize("name", ["key", "absent", "absent-early", "late"])
async def test_what_it_brings_after_another_has_taken_over_changes_nothing(
    stories: dict[str, Story], name: str
) -> None:
    frozen, taken_over = stories[name].view.attempts
    assert frozen.code == "fenced"
    assert frozen.worker != taken_over.worker
    assert (taken_over.category, taken_over.side_effect) == (None, "CONFIRMED")
    assert (stories[name].node["source"], stories[name].node["attempt_count"]) == ("EXECUTED", 2)


async def test_a_byte_that_could_not_be_held_back_any_more_is_the_same_keys(stories: dict[str, Story]) -> None:
    assert (len(stories["late"].asleep), len(stories["late"].calls)) == (1, 2)


async def test_a_call_that_was_sent_before_its_worker_froze_is_asked_for_and_not_repeated(
    stories: dict[str, Story],
) -> None:
    story = stories["sent"]
    assert len(story.calls) == 1
    assert (story.node["source"], story.node["attempt_count"]) == ("RECONCILED", 1)
    (frozen,) = story.view.attempts
    assert frozen.code == "fenced"
