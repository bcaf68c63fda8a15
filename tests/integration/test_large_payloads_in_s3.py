"""The same in a bucket: against a server that speaks S3, by the SDK's own driver."""

import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiobotocore.session import get_session
from moto.server import ThreadedMotoServer
from temporalio.api.common.v1 import Payload
from temporalio.converter import (
    StorageDriverClaim,
    StorageDriverRetrieveContext,
    StorageDriverStoreContext,
    StorageDriverWorkflowInfo,
)

from tests.lab import Bench
from workers.storage import Storage, StorageError, Stored, open_storage

TEXT = "x" * 3_000_000
BUCKET = "payloads"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}:{port}")
    for name, value in (("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "y"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    yield
    server.stop()


async def call(operation: str, **arguments: Any) -> Any:
    async with get_session().create_client("s3") as client:
        return await getattr(client, operation)(Bucket=BUCKET, **arguments)


@pytest.fixture
async def url(s3: None, request: pytest.FixtureRequest) -> str:
    await call("create_bucket")
    return f"s3://{BUCKET}/some/{request.node.name}"


@pytest.fixture
async def storage(url: str) -> Storage:
    opened = open_storage(url)
    await opened.check()
    return opened


async def store(storage: Storage, text: bytes, workflow_id: str) -> StorageDriverClaim:
    target = StorageDriverWorkflowInfo(namespace="default", id=workflow_id, run_id="r", type="Run")
    (claim,) = await storage.driver.store(StorageDriverStoreContext(target), [Payload(data=text)])
    return claim


async def found(storage: Storage, before: datetime) -> list[Stored]:
    return [stored async for stored in storage.older_than("default", before)]


async def test_a_run_carries_three_megabytes_through_a_bucket(bench: Bench, storage: Storage, url: str) -> None:
    bench.keep_large_payloads(url)
    await bench.tool("make", [{"body": {"text": TEXT}}], max_response_bytes=4 << 20, timeout="30s")
    await bench.tool("take")
    async with bench.worker():
        run = await bench.start(
            {"id": "make", "tool": "make", "input": {"text": TEXT}},
            {"id": "take", "tool": "take", "input": {"made": {"$output": "make", "pointer": "/text"}}},
        )
        assert (await run.result())["counts"] == {"SUCCEEDED": 2}
    (taken,) = await bench.tools.calls(bench.unique("take"))
    assert taken.body == {"made": TEXT}
    keys = [row["Key"] for row in (await call("list_objects_v2"))["Contents"]]
    assert len(keys) > 1
    assert all(key.startswith("some/test_") for key in keys)
    rows = await found(storage, datetime.now(UTC) + timedelta(days=1))
    assert {row.run_id for row in rows} == {run.id}


async def test_only_what_is_old_is_found_and_dropped(storage: Storage) -> None:
    one, other = await store(storage, b"one", "order/ä 1/charge"), await store(storage, b"two", "order-2")
    assert await found(storage, datetime.now(UTC) - timedelta(days=1)) == []
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    rows = await found(storage, tomorrow)
    assert {(row.run_id, row.key) for row in rows} == {
        ("order", one.claim_data["key"]),
        ("order-2", other.claim_data["key"]),
    }
    await storage.drop(rows[:1], datetime.now(UTC) - timedelta(days=1))
    assert len(await found(storage, tomorrow)) == 2
    await storage.drop([row for row in rows if row.run_id == "order-2"], tomorrow)
    assert [row.run_id for row in await found(storage, tomorrow)] == ["order"]
    with pytest.raises(StorageError, match=r"retrieve failed.*NoSuchKey"):
        await storage.driver.retrieve(StorageDriverRetrieveContext(), [other])
    assert (await storage.driver.retrieve(StorageDriverRetrieveContext(), [one]))[0].data == b"one"


async def test_a_reference_to_another_bucket_leads_nowhere(storage: Storage) -> None:
    claim = await store(storage, b"x", "order-1")
    forged = StorageDriverClaim({**claim.claim_data, "bucket": "theirs"})
    with pytest.raises(StorageError, match="names the bucket 'theirs'"):
        await storage.driver.retrieve(StorageDriverRetrieveContext(), [forged])


async def test_a_bucket_that_is_not_there_is_named(s3: None) -> None:
    with pytest.raises(StorageError, match="the bucket 'nobodys' cannot be used"):
        await open_storage("s3://nobodys").check()


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "workers.storage.s3", raising=False)
    monkeypatch.setitem(sys.modules, "aiobotocore.config", None)
    with pytest.raises(StorageError, match=r"pip install '\.\[s3\]'"):
        open_storage("s3://bucket")
