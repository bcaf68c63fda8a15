"""One seed, one chaos."""

from collections import Counter

import pytest

from tests.chaos.graphs import KINDS, plan
from tests.chaos.schedule import DATABASE, WORKERS, schedule
from tests.chaos.tool import MISDEEDS, RULED, misdeed


@pytest.mark.parametrize("database", [True, False])
def test_one_seed_gives_one_schedule(database: bool) -> None:
    first, again, other = (schedule(seed, 1_000, 50, database=database) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_one_seed_gives_the_same_runs() -> None:
    assert list(plan(7, 300)) == list(plan(7, 300))
    assert list(plan(7, 300)) != list(plan(8, 300))


def test_a_call_meets_the_same_fault_whenever_it_comes() -> None:
    calls = [(kind, f"key-{key}", number) for kind in KINDS for key in range(50) for number in (1, 2, 3)]
    first = [misdeed(7, *call) for call in calls]
    assert [misdeed(7, *call) for call in reversed(calls)] == first[::-1]
    assert [misdeed(8, *call) for call in calls] != first


def test_every_fault_of_the_tools_occurs_and_calls_end_well_in_the_end() -> None:
    seen = Counter(misdeed(7, "ruled", f"key-{key}", 1)[0] for key in range(5_000))
    assert set(seen) == {"none", *MISDEEDS, *RULED}
    assert {misdeed(7, "ruled", f"key-{key}", 20)[0] for key in range(500)} == {"none"}


def test_the_schedule_has_the_kills_that_were_asked_for_and_every_target_and_action() -> None:
    faults = schedule(7, 10_000, 200, database=True)
    assert sum(fault.action == "kill" for fault in faults) == 200
    everything = {*WORKERS, "temporal", "tools", DATABASE}
    assert {fault.target for fault in faults if fault.action == "kill"} == everything
    assert {fault.target for fault in faults if fault.action == "freeze"} == everything
    assert {fault.action for fault in faults} == {"kill", "freeze", "cut", "refuse", "stall"}
    assert faults == sorted(faults)
    assert faults[-1].at < 10_000


def test_workers_are_frozen_for_longer_than_their_lease() -> None:
    faults = schedule(7, 10_000, 200, database=True)
    assert all(fault.seconds > 10 for fault in faults if fault.action == "freeze" and fault.target in WORKERS)


def test_the_runs_have_as_many_nodes_as_were_asked_for_and_every_kind_of_tool() -> None:
    runs = list(plan(7, 1_000))
    assert sum(len(run.nodes) for run in runs) == 1_000
    assert {node["tool"] for run in runs for node in run.nodes} == set(KINDS)
    assert len({run.id for run in runs}) == len(runs)
