"""What can be wrong with a ledger."""

__all__ = ["LedgerUnavailableError"]


class LedgerUnavailableError(Exception):
    """The ledger cannot be read or written; nothing may be sent. The message names it and the cure."""
