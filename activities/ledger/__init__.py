"""The operation ledger: what was sent, what came of it, and what a person decided."""

from activities.ledger.errors import LedgerUnavailableError
from activities.ledger.interface import Ledger
from activities.ledger.opening import open_ledger

__all__ = ["Ledger", "LedgerUnavailableError", "open_ledger"]
