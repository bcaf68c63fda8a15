"""The schema of the ledger, step by step, in SQL that every database here understands.

SQLite takes the steps by itself (``sqlite.py``); in PostgreSQL Alembic takes them, and remembers which.
"""

from pathlib import Path
from typing import Final

__all__ = ["FOLDER", "STEPS", "statements"]

FOLDER: Final = Path(__file__).parent
STEPS: Final = sorted(path.stem for path in FOLDER.glob("*.sql"))
"""In the order in which they are taken."""


def statements(step: str) -> list[str]:
    """The statements of one step."""
    return (FOLDER / f"{step}.sql").read_text().split(";\n")
