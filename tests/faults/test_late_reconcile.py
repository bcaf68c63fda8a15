"""A reconcile whose node a person has decided on meanwhile: it answers what the ledger has taken, nothing else."""

from datetime import UTC, datetime, timedelta

import pytest

from contracts.dead_letters import DecisionOutcome, DecisionRecord, ToolRef
from contracts.dispatch import Change, DecideRequest, NodeEnd, Verdict
from tests.faults.deliveries import Consumer, dispatch
from tests.lab import Bench
from tests.waiting import eventually

pytestmark = pytest.mark.workflow_mode("it starts no run")


async def test_what_the_tool_says_of_a_node_that_a_person_has_discarded_is_not_its_result(bench: Bench) -> None:
    await bench.tool("asked", [{"fault": "rst_after_read", "commit": True}], reconcile=True)

    async def happened() -> bool:
        return len(await bench.tools.effects(bench.unique("asked"))) == 1

    async with Consumer.of(bench) as consumer:
        work = dispatch(bench, "asked")
        await consumer.refused(work, scheduled=datetime.now(UTC))
        await eventually(happened, "the effect")
        discarded = DecisionRecord(
            decision_id="d-1",
            action="discard",
            decided_by="bob",
            reason="",
            at=datetime.now(UTC),
            outcome=DecisionOutcome.ACCEPTED,
        )
        request = DecideRequest(
            run_id=work.run_id,
            node_id=work.node_id,
            redrives=0,
            logical_attempt=1,
            record=discarded,
            change=Change.DISCARD,
            tool=ToolRef(name=work.tool, version="1", fingerprint=work.fingerprint),
        )
        await consumer.ledger.decide(request, datetime.now(UTC) + timedelta(seconds=1))
        answer = await consumer.reconcile(work)
        node = await consumer.ledger.node(work.run_id, work.node_id)
    assert (answer.verdict, answer.usable) == (Verdict.NO_ANSWER, False)
    assert node is not None
    assert node.end is NodeEnd.DISCARDED
