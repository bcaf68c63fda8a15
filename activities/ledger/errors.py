"""What can be wrong with a ledger."""

__all__ = ["LedgerUnavailableError"]


class LedgerUnavailableError(Exception):
    """The ledger cannot be read or written; nothing may be sent. The message names it and the cure.

    Attributes:
        uncertain: The answer was lost on its way: what was asked for may have been done.
    """

    def __init__(self, message: str, *, uncertain: bool = False) -> None:
        self.uncertain = uncertain
        super().__init__(message)
