"""Payloads in a folder: one file each, named by its content, whole or not there at all.

A file is a line that says which run it belongs to, and the payload. Its path is the namespace, a hash of the run's id
(fanned out), and the hash of the whole file, which is checked whenever it is read.
"""

import asyncio
import errno
import hashlib
import json
import os
import re
import uuid
from collections.abc import AsyncGenerator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final
from urllib.parse import quote

from google.protobuf.message import DecodeError
from temporalio.api.common.v1 import Payload
from temporalio.converter import (
    StorageDriver,
    StorageDriverClaim,
    StorageDriverRetrieveContext,
    StorageDriverStoreContext,
)

from workers.storage.interface import StorageError, Stored, owner_of

__all__ = ["FileStorage"]

_MAGIC: Final = b"redrive-payload 1 "
_KEY: Final = re.compile(r"ns-[A-Za-z0-9._~%-]*/[0-9a-f]{2}/[0-9a-f]{64}/[0-9a-f]{64}")
"""Keys come back from histories, where others may have written: none leads out of the folder."""
_TRIES: Final = 5
_LONGEST_HEAD: Final = 4096

_CURES: Final = {
    errno.ENOSPC: "is full: make room (`redrive storage prune` deletes what nothing refers to any more)",
    errno.EDQUOT: "is full: raise the quota, or make room with `redrive storage prune`",
    errno.EACCES: "may not be used by this user: give it the right to read and write there",
    errno.EPERM: "may not be used by this user: give it the right to read and write there",
    errno.EROFS: "is mounted read-only: mount it so that it can be written",
}


class FileStorage(StorageDriver):
    """A folder that every worker and every client sees under the same path.

    It is never created from here: where a mount is missing, a new folder would be an empty one.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def driver(self) -> StorageDriver:
        """See `workers.storage.interface.Storage`."""
        return self

    def name(self) -> str:
        """Part of every reference in every history: never to be changed."""
        return "redrive.file"

    async def store(self, context: StorageDriverStoreContext, payloads: Sequence[Payload]) -> list[StorageDriverClaim]:
        """Stores payloads; on the disk, not only in its cache, when this returns.

        Raises:
            StorageError: one cannot be stored.
        """
        namespace, run_id = owner_of(context)
        return [
            StorageDriverClaim({"key": await asyncio.to_thread(self._store, namespace, run_id, payload)})
            for payload in payloads
        ]

    async def retrieve(
        self,
        context: StorageDriverRetrieveContext,  # noqa: ARG002 - the SDK's name
        claims: Sequence[StorageDriverClaim],
    ) -> list[Payload]:
        """Retrieves payloads.

        Raises:
            StorageError: one is not there, or not what was stored.
        """
        return [await asyncio.to_thread(self._retrieve, claim.claim_data.get("key", "")) for claim in claims]

    async def check(self) -> None:
        """See `workers.storage.interface.Storage`."""
        await asyncio.to_thread(self._check)

    async def older_than(self, namespace: str, before: datetime) -> AsyncGenerator[Stored]:
        """See `workers.storage.interface.Storage`."""
        await asyncio.to_thread(self._check)
        folders = await asyncio.to_thread(lambda: sorted((self._root / _folder_of(namespace)).glob("*/*")))
        for folder in folders:
            for stored in await asyncio.to_thread(self._old, folder, before):
                yield stored

    async def drop(self, stored: Sequence[Stored], before: datetime) -> None:
        """See `workers.storage.interface.Storage`."""
        await asyncio.to_thread(self._drop, stored, before)

    def _check(self) -> None:
        if not self._root.is_dir():
            raise StorageError(
                f"REDRIVE_STORAGE: there is no folder {self._root}: mount it, or create it before the first use "
                "(every worker and client needs the same one)"
            )
        probe = self._root / _temporary()
        try:
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise self._trouble(error) from error

    def _trouble(self, error: OSError) -> StorageError:
        what = _CURES.get(error.errno or 0, f"cannot be used: {error.strerror or error}")
        return StorageError(f"REDRIVE_STORAGE: the folder {self._root} {what}; meanwhile it is tried again")

    def _store(self, namespace: str, run_id: str, payload: Payload) -> str:
        content = _MAGIC + json.dumps(run_id).encode() + b"\n" + payload.SerializeToString(deterministic=True)
        run = hashlib.sha256(run_id.encode("utf-8", "surrogatepass")).hexdigest()
        folder = self._root / _folder_of(namespace) / run[:2] / run
        path = folder / hashlib.sha256(content).hexdigest()
        for _ in range(_TRIES):
            if not self._root.is_dir():
                raise StorageError(
                    f"REDRIVE_STORAGE: the folder {self._root} is gone: mount it again; it is waited for"
                )
            try:
                # Also mends one that was damaged.
                if _is_whole(path):
                    os.utime(path)
                    # Still there under its name: whoever takes it away from here on sees that it is young.
                    path.stat()
                else:
                    _write(self._root, path, content)
            except (FileNotFoundError, FileExistsError):
                # Its folder is just being tidied up; it is made anew.
                continue
            except OSError as error:
                raise self._trouble(error) from error
            return path.relative_to(self._root).as_posix()
        raise StorageError(f"REDRIVE_STORAGE: others keep deleting {folder}; it is tried again")

    def _retrieve(self, key: str) -> Payload:
        if not _KEY.fullmatch(key):
            raise StorageError("a reference to a payload is not one that redrive has written")
        path = self._root / key
        try:
            content = path.read_bytes()
        except FileNotFoundError as error:
            raise StorageError(
                f"REDRIVE_STORAGE: there is no {path}: give every worker and client the folder in which it was stored "
                "(is it mounted?), or put the file back from a copy; it is waited for"
            ) from error
        except OSError as error:
            raise self._trouble(error) from error
        if hashlib.sha256(content).hexdigest() == path.name:
            try:
                return Payload.FromString(content.partition(b"\n")[2])
            except DecodeError:
                # Whole, but never written by us: damaged all the same.
                pass
        raise StorageError(f"REDRIVE_STORAGE: {path} is damaged: put the file back from a copy; what needs it waits")

    def _old(self, folder: Path, before: datetime) -> list[Stored]:
        found: list[Stored] = []
        for path in sorted(folder.iterdir()):
            try:
                status = path.stat()
                if status.st_mtime >= before.timestamp():
                    continue
                if path.name.startswith("."):
                    # Of a process that was killed while it wrote.
                    path.unlink()
                    continue
                with path.open("rb") as file:
                    head = file.readline(_LONGEST_HEAD)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self._trouble(error) from error
            if head.startswith(_MAGIC) and head.endswith(b"\n"):
                found.append(
                    Stored(
                        run_id=json.loads(head[len(_MAGIC) :]),
                        key=path.relative_to(self._root).as_posix(),
                        size=status.st_size,
                    )
                )
        return found

    def _drop(self, stored: Sequence[Stored], before: datetime) -> None:
        folders: dict[Path, None] = {}
        for one in stored:
            path = self._root / one.key
            aside = path.with_name(_temporary())
            folders[path.parent] = None
            try:
                # Whoever stores it again from here on writes it anew; whoever has just done so is seen.
                path.rename(aside)
                if aside.stat().st_mtime >= before.timestamp():
                    aside.replace(path)
                else:
                    aside.unlink()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self._trouble(error) from error
        for folder in folders:
            try:
                folder.rmdir()
                folder.parent.rmdir()
            except OSError:
                # Not empty: there is something that is needed.
                continue


def _folder_of(namespace: str) -> str:
    return f"ns-{quote(namespace, safe='')}"


def _temporary() -> str:
    return f".{uuid.uuid4().hex}"


def _is_whole(path: Path) -> bool:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == path.name
    except FileNotFoundError:
        return False


def _write(root: Path, path: Path, content: bytes) -> None:
    """Writes a file so that it is there as a whole, also after a power cut, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(_temporary())
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = path.parent
    while True:
        _sync(folder)
        if folder == root:
            return
        folder = folder.parent


def _sync(folder: Path) -> None:
    # Windows cannot, and need not.
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
