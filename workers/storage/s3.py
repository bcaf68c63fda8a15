"""Payloads in a bucket of S3, by the SDK's own driver, which names each by its content and checks it when it is read.

Credentials, region and endpoint are found as everywhere with AWS (``AWS_PROFILE``, ``AWS_ENDPOINT_URL_S3`` and so on).
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import quote, unquote

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.exceptions import BotoCoreError, ClientError
from temporalio.api.common.v1 import Payload
from temporalio.contrib.aws.s3driver import S3StorageDriver, S3StorageDriverClient
from temporalio.converter import (
    StorageDriver,
    StorageDriverClaim,
    StorageDriverRetrieveContext,
    StorageDriverStoreContext,
)

from workers.storage.interface import StorageError, Stored, run_of

__all__ = ["S3Storage"]

_STALE: Final = timedelta(hours=12)
"""What was stored longer ago than this is stored again, so that it is young: nothing touches an object in place."""
_SAFE: Final = "!-_.*'()"
"""What the SDK's driver leaves as it is in a key."""
_CONFIG: Final = AioConfig(connect_timeout=10, read_timeout=30, retries={"mode": "standard", "max_attempts": 5})


class _Objects(S3StorageDriverClient):
    """The objects of one bucket under one prefix; a client for each use, which nobody has to close later."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._session = get_session()

    def client(self) -> AbstractAsyncContextManager[Any]:
        client: AbstractAsyncContextManager[Any] = self._session.create_client("s3", config=_CONFIG)
        return client

    async def put_object(self, *, bucket: str, key: str, data: bytes) -> None:
        async with self.client() as s3:
            await s3.put_object(Bucket=self._only(bucket), Key=self._prefix + key, Body=data)

    async def object_exists(self, *, bucket: str, key: str) -> bool:
        return await self.stored_at(bucket, key) > datetime.now(UTC) - _STALE

    async def get_object(self, *, bucket: str, key: str) -> bytes:
        async with self.client() as s3:
            answer = await s3.get_object(Bucket=self._only(bucket), Key=self._prefix + key)
            content: bytes = await answer["Body"].read()
            return content

    async def stored_at(self, bucket: str, key: str) -> datetime:
        """When; at the beginning of all time where it is not there."""
        async with self.client() as s3:
            try:
                head = await s3.head_object(Bucket=self._only(bucket), Key=self._prefix + key)
            except ClientError as error:
                if error.response.get("Error", {}).get("Code") == "404":
                    return datetime.min.replace(tzinfo=UTC)
                raise
            at: datetime = head["LastModified"]
            return at

    def _only(self, bucket: str) -> str:
        # References come back from histories, where others may have written.
        if bucket != self._bucket:
            raise StorageError(f"a reference names the bucket {bucket!r}; REDRIVE_STORAGE names {self._bucket!r}")
        return bucket


class _Driver(S3StorageDriver):
    """The SDK's, saying in its errors why, and that it is worth trying again."""

    async def store(self, context: StorageDriverStoreContext, payloads: Sequence[Payload]) -> list[StorageDriverClaim]:
        try:
            return await super().store(context, payloads)
        except (RuntimeError, ValueError) as error:
            raise _told(error) from error

    async def retrieve(
        self, context: StorageDriverRetrieveContext, claims: Sequence[StorageDriverClaim]
    ) -> list[Payload]:
        try:
            return await super().retrieve(context, claims)
        except (RuntimeError, ValueError) as error:
            raise _told(error) from error


def _told(error: Exception) -> StorageError:
    why = f": {error.__cause__}" if error.__cause__ is not None else ""
    return StorageError(f"REDRIVE_STORAGE: {error}{why}; what needs it is tried again")


class S3Storage:
    """A bucket, or a part of one, that every worker and every client may read and write."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._objects = _Objects(bucket, prefix)
        self._driver = _Driver(self._objects, bucket)

    @property
    def driver(self) -> StorageDriver:
        """See `workers.storage.interface.Storage`."""
        return self._driver

    async def check(self) -> None:
        """See `workers.storage.interface.Storage`."""
        try:
            await self._objects.put_object(bucket=self._bucket, key="redrive-check", data=b"")
        except (BotoCoreError, ClientError, OSError) as error:
            raise self._trouble(error) from error

    async def older_than(self, namespace: str, before: datetime) -> AsyncGenerator[Stored]:
        """See `workers.storage.interface.Storage`."""
        prefix = f"v0/ns/{quote(namespace, safe=_SAFE)}/wt/"
        try:
            async with self._objects.client() as s3:
                pages = s3.get_paginator("list_objects_v2")
                async for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix):
                    for found in page.get("Contents", []):
                        key = found["Key"].removeprefix(self._prefix)
                        # TYPE/wi/WORKFLOW_ID/ri/RUN/d/sha256/HASH; what is not kept for a workflow is left alone.
                        match key.removeprefix(prefix).split("/"):
                            case [_, "wi", workflow_id, *_] if workflow_id != "null" and found["LastModified"] < before:
                                yield Stored(run_id=run_of(unquote(workflow_id)), key=key, size=found["Size"])
                            case _:
                                pass
        except (BotoCoreError, ClientError, OSError) as error:
            raise self._trouble(error) from error

    async def drop(self, stored: Sequence[Stored], before: datetime) -> None:
        """See `workers.storage.interface.Storage`."""
        try:
            async with self._objects.client() as s3:
                for one in stored:
                    if await self._objects.stored_at(self._bucket, one.key) < before:
                        await s3.delete_object(Bucket=self._bucket, Key=self._prefix + one.key)
        except (BotoCoreError, ClientError, OSError) as error:
            raise self._trouble(error) from error

    def _trouble(self, error: Exception) -> StorageError:
        return StorageError(f"REDRIVE_STORAGE: the bucket {self._bucket!r} cannot be used: {error}")
