"""A run from its start to its result, on the real server."""

from tests.lab import Bench


async def test_a_run_feeds_outputs_into_inputs_and_returns_its_sinks(bench: Bench) -> None:
    await bench.tool("reserve", [{"body": {"id": "r-1"}}])
    await bench.tool("charge", [{"body": {"id": "c-1"}}])
    async with bench.worker():
        run = await bench.start(
            {"id": "reserve", "tool": "reserve", "input": {"sku": "A-1"}},
            {"id": "charge", "tool": "charge", "input": {"reservation": {"$output": "reserve", "pointer": "/id"}}},
        )
        result = await run.result()
    assert result == {
        "run_id": run.id,
        "status": "SUCCEEDED",
        "counts": {"SUCCEEDED": 2},
        "outputs": {"charge": {"id": "c-1"}},
        "outputs_omitted": None,
    }
    (call,) = await bench.tools.calls(bench.unique("charge"))
    assert call.body == {"reservation": "r-1"}


async def test_a_refused_call_waits_for_a_person_and_goes_on_after_the_redrive(bench: Bench) -> None:
    await bench.tool("charge", [{"status": 403}, {"body": {"id": "c-1"}}])
    async with bench.worker():
        run = await bench.start({"id": "charge", "tool": "charge", "input": {"amount": 1}})
        entry = await bench.parked(run, "charge")
        assert (entry.error.category, entry.error.code, entry.side_effect) == ("PERMISSION", "http_403", "NONE")
        assert entry.eligibility.redrivable
        assert (await bench.status(run)).status == "BLOCKED"
        record = await bench.decide(run, "charge", "redrive")
        assert record.outcome == "ACCEPTED"
        result = await run.result()
    assert result["outputs"] == {"charge": {"id": "c-1"}}
    first, second = await bench.tools.calls(bench.unique("charge"))
    assert first.key == second.key
