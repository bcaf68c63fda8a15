"""Payloads in a folder: whole or not there, checked when read, and every trouble says what to do."""

import asyncio
import errno
import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from temporalio.api.common.v1 import Payload
from temporalio.converter import (
    StorageDriverClaim,
    StorageDriverRetrieveContext,
    StorageDriverStoreContext,
    StorageDriverWorkflowInfo,
)

from workers.storage import StorageError, Stored, open_storage
from workers.storage.file import FileStorage

LONG_AGO = datetime.now(UTC) - timedelta(days=90)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "payloads with a blank"
    path.mkdir()
    return path


@pytest.fixture
def storage(folder: Path) -> FileStorage:
    return FileStorage(folder)


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def remove(folder: Path) -> None:
    folder.rmdir()


def payload(text: str) -> Payload:
    return Payload(metadata={"encoding": b"json/plain"}, data=f'"{text}"'.encode())


def stored_for(workflow_id: str | None, namespace: str = "default") -> StorageDriverStoreContext:
    return StorageDriverStoreContext(StorageDriverWorkflowInfo(namespace=namespace, id=workflow_id))


async def store(storage: FileStorage, text: str, workflow_id: str | None = "order-1/charge") -> StorageDriverClaim:
    (claim,) = await storage.store(stored_for(workflow_id), [payload(text)])
    return claim


async def retrieve(storage: FileStorage, *claims: StorageDriverClaim) -> list[Payload]:
    return await storage.retrieve(StorageDriverRetrieveContext(), claims)


async def found(storage: FileStorage, before: datetime, namespace: str = "default") -> list[Stored]:
    return [stored async for stored in storage.older_than(namespace, before)]


def age(folder: Path, key: str) -> None:
    os.utime(folder / key, (LONG_AGO.timestamp(), LONG_AGO.timestamp()))


async def test_what_is_stored_is_what_is_retrieved_in_order(storage: FileStorage) -> None:
    claims = await storage.store(stored_for("order-1"), [payload("a"), payload("b"), payload("a")])
    assert await retrieve(storage, *claims) == [payload("a"), payload("b"), payload("a")]
    assert claims[0] == claims[2]


@pytest.mark.parametrize("workflow_id", ["x", "a" * 200, "ä/日本語", "..", "../../etc/node", '"\\\n"', "\ud800", None])
@pytest.mark.parametrize("namespace", ["default", "..", "a/b", "ns with blank.x1y2", "日本"])
async def test_any_id_and_any_namespace_is_kept_inside_the_folder(
    storage: FileStorage, folder: Path, workflow_id: str | None, namespace: str
) -> None:
    (claim,) = await storage.store(stored_for(workflow_id, namespace), [payload("x")])
    (path,) = files_in(folder.parent)
    assert path.is_relative_to(folder)
    assert await retrieve(storage, claim) == [payload("x")]
    (row,) = await found(storage, datetime.now(UTC) + timedelta(days=1), namespace)
    assert (row.run_id, row.key) == ((workflow_id or "").partition("/")[0], claim.claim_data["key"])


async def test_many_may_store_the_same_at_once_and_all_read_it_whole(storage: FileStorage, folder: Path) -> None:
    text = "x" * 300_000
    others = FileStorage(folder)
    claims = await asyncio.gather(*(store(one, text) for one in [storage, others] * 20))
    assert len({claim.claim_data["key"] for claim in claims}) == 1
    assert set(map(str, await retrieve(storage, *claims))) == {str(payload(text))}
    assert len(files_in(folder)) == 1


async def test_what_is_damaged_is_refused_and_mended_by_storing_it_again(storage: FileStorage, folder: Path) -> None:
    claim = await store(storage, "precious")
    path = folder / claim.claim_data["key"]
    content = path.read_bytes()
    for damaged in (content[:-1], content.replace(b"precious", b"precioUs"), b""):
        path.write_bytes(damaged)
        with pytest.raises(StorageError, match=r"is damaged: put the file back from a copy"):
            await retrieve(storage, claim)
    assert await store(storage, "precious") == claim
    assert await retrieve(storage, claim) == [payload("precious")]


async def test_what_is_not_there_is_named_with_the_cure(storage: FileStorage, folder: Path) -> None:
    claim = await store(storage, "x")
    (folder / claim.claim_data["key"]).unlink()
    with pytest.raises(StorageError, match=r"there is no .*: give every worker and client the folder"):
        await retrieve(storage, claim)


@pytest.mark.parametrize(
    "claim", [{}, {"key": "../../../etc/passwd"}, {"key": "/etc/passwd"}, {"key": "ns-x/../../" + "a" * 64}]
)
async def test_a_reference_that_others_have_made_up_leads_nowhere(
    storage: FileStorage, claim: Mapping[str, str]
) -> None:
    with pytest.raises(StorageError, match="not one that redrive has written"):
        await retrieve(storage, StorageDriverClaim(claim))


async def test_a_folder_that_is_missing_is_never_made(storage: FileStorage, folder: Path) -> None:
    remove(folder)
    with pytest.raises(StorageError, match=r"there is no folder .*: mount it, or create it"):
        await storage.check()
    with pytest.raises(StorageError, match=r"is gone: mount it again"):
        await store(storage, "x")
    assert not files_in(folder.parent)


@pytest.mark.parametrize(
    ("number", "cure"),
    [
        (errno.ENOSPC, "is full: make room"),
        (errno.EDQUOT, "is full: raise the quota"),
        (errno.EACCES, "may not be used by this user"),
        (errno.EROFS, "is mounted read-only"),
        (errno.EIO, "cannot be used: Input/output error"),
    ],
)
async def test_a_folder_that_cannot_be_written_says_why_and_is_left_as_it_was(
    storage: FileStorage, folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, cure: str
) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(StorageError, match=cure):
            await store(storage, "x")
    assert files_in(folder) == []
    assert await retrieve(storage, await store(storage, "x")) == [payload("x")]


async def test_only_what_is_old_is_found_and_dropped(storage: FileStorage, folder: Path) -> None:
    old, young = await store(storage, "old"), await store(storage, "young")
    other = await store(storage, "old", "order-2")
    for claim in (old, other):
        age(folder, claim.claim_data["key"])
    before = datetime.now(UTC) - timedelta(days=1)
    rows = await found(storage, before)
    assert {(row.run_id, row.key) for row in rows} == {
        ("order-1", old.claim_data["key"]),
        ("order-2", other.claim_data["key"]),
    }
    assert await found(storage, before, "another-namespace") == []
    await storage.drop(rows, before)
    assert await found(storage, datetime.now(UTC) + timedelta(days=1)) == [
        Stored("order-1", young.claim_data["key"], (folder / young.claim_data["key"]).stat().st_size)
    ]
    assert not (folder / other.claim_data["key"]).parent.exists()
    assert await retrieve(storage, young) == [payload("young")]


async def test_what_is_stored_again_while_it_is_tidied_up_stays(storage: FileStorage, folder: Path) -> None:
    claim = await store(storage, "x")
    age(folder, claim.claim_data["key"])
    before = datetime.now(UTC) - timedelta(days=1)
    rows = await found(storage, before)
    await store(storage, "x")
    await storage.drop(rows, before)
    assert await retrieve(storage, claim) == [payload("x")]


async def test_storing_and_tidying_up_at_once_never_loses_what_was_stored(storage: FileStorage, folder: Path) -> None:
    before = datetime.now(UTC) - timedelta(days=1)
    for _ in range(300):
        claim = await store(storage, "x")
        age(folder, claim.claim_data["key"])
        rows = await found(storage, before)
        await asyncio.gather(storage.drop(rows, before), store(storage, "x"))
        assert await retrieve(storage, claim) == [payload("x")]


async def test_what_a_killed_process_has_left_is_swept_out(storage: FileStorage, folder: Path) -> None:
    claim = await store(storage, "x")
    left = (folder / claim.claim_data["key"]).with_name(".half-written")
    left.write_bytes(b"half")
    os.utime(left, (LONG_AGO.timestamp(), LONG_AGO.timestamp()))
    assert await found(storage, datetime.now(UTC) - timedelta(days=1)) == []
    assert not left.exists()


async def test_a_setting_with_percent_signs_names_the_folder(folder: Path) -> None:
    await open_storage(folder.as_uri()).check()
