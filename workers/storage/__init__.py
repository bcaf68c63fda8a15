"""Where payloads are kept that are too large for Temporal: a folder, or a bucket of S3. Temporal keeps a reference.

Each is a `temporalio.converter.StorageDriver`, for the data converter of every client and worker, and can be tidied up.
"""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from workers.storage.file import FileStorage
from workers.storage.interface import Storage, StorageError, Stored, foreign_reference

__all__ = ["Storage", "StorageError", "Stored", "foreign_reference", "open_storage"]


def open_storage(url: str) -> Storage:
    """The storage that a ``REDRIVE_STORAGE`` names, as `workers.settings` has checked it; it is not looked at yet.

    Raises:
        StorageError: it needs an extra that is not installed.
    """
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.scheme == "file":
        return FileStorage(Path(path))
    try:
        from workers.storage.s3 import S3Storage  # noqa: PLC0415 - an extra, which most do without
    except ModuleNotFoundError as error:
        raise StorageError(
            f"REDRIVE_STORAGE names a bucket of S3, and {error.name} is not installed: install "
            "Redrive's extra, in its clone by pip install '.[s3]'"
        ) from error
    return S3Storage(parts.netloc, path.strip("/"))
