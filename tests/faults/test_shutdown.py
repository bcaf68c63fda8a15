"""SIGTERM: no new work is taken, calls in flight finish and commit, and the process says that all is well."""

import time

from tests.faults.lookup import node_result, operation
from tests.lab import Bench
from tests.waiting import eventually
from tests.worker_process import WorkerProcess


async def test_calls_in_flight_at_sigterm_finish_and_nothing_new_is_taken(bench: Bench) -> None:
    gate = bench.unique("gate")
    await bench.tool("held", [{"gate": gate}], timeout="60s")
    await bench.tool("paced", [{"gate": gate}], timeout="60s", rate_per_second=100)  # on a queue of its own
    await bench.tool("silent", [{"fault": "hang"}], timeout="4s")
    await bench.tool("late", [{}])
    async with WorkerProcess.start(bench) as worker:
        held = await bench.start({"id": "call", "tool": "held", "input": {}})
        paced = await bench.start({"id": "call", "tool": "paced", "input": {}})
        silent = await bench.start({"id": "call", "tool": "silent", "input": {}})
        for name in ("held", "paced", "silent"):
            await bench.tools.wait_for(bench.unique(name), calls=1)
        worker.terminate()

        async def stopping() -> bool | None:
            return "stopping" in worker.log

        await eventually(stopping, "the worker to stop")
        late = await bench.start({"id": "call", "tool": "late", "input": {}})

        async def silence_noted() -> bool | None:
            return (await operation(bench, silent, "call")).attempts[0].ended_at is not None

        await eventually(silence_noted, "the end of the call that nobody answers")
        assert worker.running
        assert not await bench.tools.calls(bench.unique("late"))
        await bench.tools.open_gate(gate)
        assert await worker.exit_code() == 0, worker.log
        # Committed by the worker that was told to stop; nobody else has been there yet.
        for run in (held, paced):
            assert (await operation(bench, run, "call")).state == "SUCCEEDED"
        assert not await bench.tools.calls(bench.unique("late"))
    async with bench.worker():
        for run in (held, paced, late):
            await run.result()
            node = await node_result(bench, run, "call")
            # Of a fast run's own call, the run hears from the ledger.
            source = "REPLAYED" if run is held and bench.node_mode == "fast" else "EXECUTED"
            assert (node["source"], node["attempt_count"]) == (source, 1)
        entry = await bench.parked(silent, "call")
        assert (entry.error.code, entry.side_effect) == ("read_timeout", "POSSIBLE")
        assert [attempt.code for attempt in entry.attempts] == ["read_timeout"]
        for name in ("held", "paced", "silent", "late"):
            assert len(await bench.tools.calls(bench.unique(name))) == 1


async def test_an_idle_worker_ends_at_once(bench: Bench) -> None:
    # Far longer than the test may take: it is only waited for where a call is in flight.
    await bench.tool("slow", [{}], timeout="10m")
    async with WorkerProcess.start(bench) as worker:
        run = await bench.start({"id": "call", "tool": "slow", "input": {}})
        await run.result()
        began = time.monotonic()
        worker.terminate()
        worker.terminate()  # somebody is impatient
        assert await worker.exit_code() == 0, worker.log
    assert time.monotonic() - began < 30
