"""A worker in a process of its own that only claims: ``python -m tests.unit.ledger_claims BACKEND FOLDER COUNT``.

It says when it has opened the ledger, waits for a line, claims ``COUNT`` operations ten times each, says in one line of
JSON how often each was granted, and waits for another line before it ends.
"""

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path

from activities.ledger.records import Granted
from contracts.identity import OperationId
from tests.unit.ledger_lab import BACKENDS, request

TIMES = 10


def operation(number: int) -> OperationId:
    return OperationId(run_id="crowded", node_id=f"n{number}", logical_attempt=1)


async def main(kind: str, folder: Path, count: int) -> None:
    async with BACKENDS[kind](folder) as backend:
        ledger = await backend.open()
        say("ready")
        await asyncio.to_thread(sys.stdin.readline)
        claims = [request(operation=operation(number)) for number in range(count) for _ in range(TIMES)]
        answers = await asyncio.gather(*(ledger.claim(claim) for claim in claims))
        won = Counter(
            str(claim.operation) for claim, answer in zip(claims, answers, strict=True) if isinstance(answer, Granted)
        )
        say(json.dumps(won))
        await asyncio.to_thread(sys.stdin.readline)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
