"""What ``read_outputs`` answers a run that has continued as new."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from activities.context import Context
from activities.http import HttpClients
from activities.ledger.sqlite import SqliteLedger
from activities.outputs import ReadOutputs
from activities.secrets import Secrets
from contracts.base import Json
from contracts.dispatch import OutputsRequest
from contracts.identity import OperationId
from contracts.limits import BY_REFERENCE
from contracts.tools import Catalog
from tests.unit.ledger_lab import granted, request

RUN = "long"


@asynccontextmanager
async def reading(folder: Path, **outputs: Json) -> AsyncGenerator[ReadOutputs]:
    """The activity, and a ledger in which nodes have ended with these outputs."""
    ledger = await SqliteLedger.open(folder / "ledger.db")
    for name, output in outputs.items():
        operation = OperationId(run_id=RUN, node_id=name, logical_attempt=1)
        grant = await granted(ledger, request(operation=operation))
        assert await ledger.succeed(operation, grant.epoch, output)
    secrets = Secrets.read(Catalog(tools={}), {})
    http = HttpClients(secrets)
    try:
        yield ReadOutputs(Context(Catalog(tools={}), secrets, http, ledger, "q", BY_REFERENCE))
    finally:
        await http.close()
        await ledger.close()


async def test_of_a_large_output_there_are_the_places_and_of_a_small_one_all(tmp_path: Path) -> None:
    large: Json = {"id": "l-1", "text": "x" * 100_000}
    async with reading(tmp_path, large=large, small={"id": "s-1", "more": 1}) as read:
        pointers = {"large": ["/id", "/nothing"], "small": ["/id"], "nobody": ["/id"]}
        answer = await read.read_outputs(OutputsRequest(run_id=RUN, pointers=pointers))
        assert answer == {"large": {"/id": "l-1"}, "small": {"": {"id": "s-1", "more": 1}}}
        whole = await read.read_outputs(OutputsRequest(run_id=RUN, pointers={"large": ["/id", ""]}))
        assert whole == {"large": {"": large}}


async def test_one_answer_comes_of_a_few_large_outputs_however_little_of_them_is_wanted(tmp_path: Path) -> None:
    large: Json = {"id": "l-1", "text": "x" * (BY_REFERENCE.output // 2)}
    names = [f"n{number}" for number in range(5)]
    async with reading(tmp_path, **dict.fromkeys(names, large)) as read:
        answer = await read.read_outputs(OutputsRequest(run_id=RUN, pointers={name: ["/id"] for name in names}))
    assert answer == {name: {"/id": "l-1"} for name in names[:2]}


async def test_places_within_each_other_do_not_multiply_an_output(tmp_path: Path) -> None:
    output: Json = "x" * (BY_REFERENCE.output // 2)
    pointers = ["/in" * depth for depth in range(1, 20)]
    for _ in pointers:
        output = {"in": output}
    async with reading(tmp_path, nested=output) as read:
        answer = await read.read_outputs(OutputsRequest(run_id=RUN, pointers={"nested": pointers}))
    assert list(answer["nested"]) == pointers[:2]
