"""A ledger that somebody else has locked."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

_HOLDER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
connection.execute("ROLLBACK")
"""


@asynccontextmanager
async def locked(ledger: Path) -> AsyncGenerator[None, None]:
    """Another process has the ledger, until the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(ledger)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert await asyncio.to_thread(process.stdout.readline) == b"locked\n"
        yield
    finally:
        process.stdin.close()
        await asyncio.to_thread(process.wait)
        process.stdout.close()
