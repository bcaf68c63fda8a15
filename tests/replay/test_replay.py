"""Stored histories replay: what is parked by one version goes on under the next.

A history that does not replay any more: before a release, `python -m tests.replay.record` and look at what has changed;
after one, put the change behind `workflow.patched`.
"""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from temporalio import workflow
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer, UnsandboxedWorkflowRunner

from tests.replay.record import HISTORIES, NAMES, cleaned
from workers.client import DATA_CONVERTER
from workers.worker import WORKFLOWS
from workflows.dead_letter import DeadLetter
from workflows.node import Node
from workflows.run import Run

_TYPES = {"run": "Run", "node": "Node", "dead-letter": "DeadLetter", "sweep": "Sweep"}


def _history(name: str) -> WorkflowHistory:
    text = (HISTORIES / f"{name}.json").read_text()
    started = json.loads(text)["events"][0]["workflowExecutionStartedEventAttributes"]
    return WorkflowHistory.from_json(started["workflowId"], text)


def _type(history: WorkflowHistory) -> str:
    return history.events[0].workflow_execution_started_event_attributes.workflow_type.name


@pytest.fixture(scope="module")
async def failures() -> Mapping[str, Exception]:
    """What happened to the histories that do not replay, by Temporal's run id."""

    async def histories() -> AsyncIterator[WorkflowHistory]:
        for path in HISTORIES.glob("*.json"):
            yield _history(path.stem)

    replayer = Replayer(workflows=WORKFLOWS, data_converter=DATA_CONVERTER)
    return (await replayer.replay_workflows(histories(), raise_on_replay_failure=False)).replay_failures


def test_every_history_is_stored_and_no_other() -> None:
    assert sorted(path.stem for path in HISTORIES.glob("*.json")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_stored_history_replays(name: str, failures: Mapping[str, Exception]) -> None:
    history = _history(name)
    assert _TYPES[next(prefix for prefix in _TYPES if name.startswith(prefix + "-"))] == _type(history)
    if (failure := failures.get(history.run_id)) is not None:
        raise failure


@pytest.mark.parametrize("name", NAMES)
def test_a_stored_history_says_nothing_of_the_machine_that_made_it(name: str) -> None:
    history = json.loads((HISTORIES / f"{name}.json").read_text())
    assert cleaned(history) == history


@workflow.defn(name="Run")
class HastyRun(Run):
    """Admits twice."""

    @workflow.init
    def __init__(self, *payloads: Any) -> None:
        super().__init__(*payloads)

    @workflow.run
    async def run(self, *payloads: Any) -> Any:
        await self._admit()
        return await super().run(*payloads)


@workflow.defn(name="Node")
class HastyNode(Node):
    """Sleeps first."""

    @workflow.run
    async def run(self, *payloads: Any) -> Any:
        await workflow.sleep(1)
        return await super().run(*payloads)


@workflow.defn(name="DeadLetter")
class SilentDeadLetter(DeadLetter):
    """Tells nobody."""

    @workflow.run
    async def run(self, *payloads: Any) -> Any:
        return await super().run(*payloads)

    async def _announce(self) -> None:
        pass


CHANGED = [HastyRun, HastyNode, SilentDeadLetter]


@pytest.mark.parametrize(
    "name", ["run-succeeded", "run-failed", "node-succeeded", "node-redriven", "dead-letter-redriven"]
)
async def test_a_workflow_with_other_commands_does_not_replay(name: str) -> None:
    replayer = Replayer(workflows=CHANGED, data_converter=DATA_CONVERTER, workflow_runner=UnsandboxedWorkflowRunner())
    with pytest.raises(workflow.NondeterminismError):
        await replayer.replay_workflow(_history(name))


@workflow.defn(name="Node")
class RenamedNode(Node):
    """The same commands."""

    @workflow.run
    async def run(self, *payloads: Any) -> Any:
        return await super().run(*payloads)


async def test_a_workflow_with_the_same_commands_replays() -> None:
    replayer = Replayer(
        workflows=[RenamedNode], data_converter=DATA_CONVERTER, workflow_runner=UnsandboxedWorkflowRunner()
    )
    await replayer.replay_workflow(_history("node-redriven"))
