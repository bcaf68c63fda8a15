"""From a URL to a ledger."""

from pathlib import Path

from activities.ledger.errors import LedgerUnavailableError
from activities.ledger.interface import Ledger
from activities.ledger.sqlite import SqliteLedger

__all__ = ["open_ledger"]


async def open_ledger(url: str) -> Ledger:
    """Opens the ledger that ``REDRIVE_LEDGER`` names, such as ``sqlite:///.redrive/ledger.db``.

    Raises:
        LedgerUnavailableError: it cannot be used. The message never holds the URL: it may hold a password.
    """
    scheme, _, rest = url.partition("://")
    if scheme == "sqlite" and rest.startswith("/") and len(rest) > 1:
        # As SQLAlchemy has it: three slashes and a relative path, four and an absolute one.
        return await SqliteLedger.open(Path(rest[1:]))
    if scheme == "postgresql":
        return await _postgres(url)
    raise LedgerUnavailableError("set REDRIVE_LEDGER to sqlite:///PATH or to postgresql://USER@HOST/DATABASE")


async def _postgres(url: str) -> Ledger:
    try:
        from activities.ledger.postgres import PostgresLedger  # noqa: PLC0415 - an extra: not everybody has it
    except ImportError as error:
        raise LedgerUnavailableError(
            f"a ledger in PostgreSQL needs more packages ({error}): install Redrive's extra, in its clone by "
            "pip install '.[postgresql]'"
        ) from error
    return await PostgresLedger.open(url)
