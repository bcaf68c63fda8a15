"""The server of the tools: each call of each key meets a fault that the seed alone decides.

`python -m tests.chaos.tool --port P --log PATH --seed N` serves until it is killed. `/t/{kind}` is a tool,
`/r/{kind}/{key}` is where it is asked what came of a key. The log is append-only, one JSON object a line, written
before anything is answered:

    {"event": "call", "kind": ..., "key": ..., "number": n-th of its key, "at": ..., "input": ..., "fault": ...}
    {"event": "effect", "kind": ..., "key": ..., "at": ..., "body": ...}

An effect that is in the log has happened, and nothing else has. A server that comes back reads it first.
"""

import argparse
import asyncio
import hashlib
import json
import os
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import h11

from tests.chaos.graphs import KINDS, Kind
from tests.tool_server.connection import Answer, Connection
from tests.tool_server.faults import FAULTS

_LATE_SECONDS: Final = 1.5
"""After which an effect comes whose request was cut off."""


@dataclass(frozen=True)
class Misdeed:
    """What becomes of one call.

    Attributes:
        status: Of the answer.
        commits: Whether the effect happens.
        wire: What happens to the answer on its way, by its name in `tests.tool_server.faults`; None: it arrives.
        delay: Seconds before the answer.
        late: The effect comes only after the connection is gone.
        body: In place of the tool's own.
    """

    status: int = 200
    commits: bool = True
    wire: str | None = None
    delay: float = 0
    late: bool = False
    body: Any = None
    headers: tuple[tuple[str, str], ...] = ()


_PLAIN: Final = Misdeed()

MISDEEDS: Final[dict[str, tuple[int, Misdeed]]] = {
    # How often, of a thousand calls; the rest are answered as they should be.
    "slow": (200, Misdeed(delay=1.0)),
    "rate_limited": (40, Misdeed(429, commits=False, headers=(("retry-after", "1"),))),
    "away": (25, Misdeed(503, commits=False, headers=(("retry-after", "1"),))),
    "unavailable": (15, Misdeed(503, commits=False)),
    "error_before": (20, Misdeed(500, commits=False)),
    "error_after": (25, Misdeed(500, commits=True)),
    "gateway_timeout_after": (15, Misdeed(504, commits=True)),
    "timeout_status": (10, Misdeed(408, commits=False)),
    "forbidden": (20, Misdeed(403, commits=False)),
    "invalid": (15, Misdeed(400, commits=False)),
    "reset_before": (15, Misdeed(commits=False, wire="rst_after_read")),
    "reset_after": (20, Misdeed(wire="rst_after_read")),
    "reset_late": (15, Misdeed(wire="rst_after_read", late=True)),
    "closed_after": (10, Misdeed(wire="fin_after_read")),
    "garbage_after": (5, Misdeed(wire="garbage")),
    "hang_before": (10, Misdeed(commits=False, wire="hang")),
    "hang_after": (15, Misdeed(wire="hang")),
    "truncated": (15, Misdeed(wire="truncated")),
    "reset_in_body": (10, Misdeed(wire="rst_in_body")),
    "hang_in_body": (8, Misdeed(wire="hang_in_body")),
    "bad_gzip": (5, Misdeed(wire="bad_gzip")),
    "not_json": (5, Misdeed(wire="not_json")),
    "unusable": (5, Misdeed(body={"no": "id"})),
    "stale_connection": (20, Misdeed(wire="close_keepalive")),
    "closed_idle": (10, Misdeed(wire="close_idle")),
}

RULED: Final[dict[str, tuple[int, Misdeed]]] = {
    # What only the tool with rules of its own says, and what its rules make of it.
    "conflict": (60, Misdeed(409, commits=False)),
    "refused_as_success": (20, Misdeed(200, commits=False, body={"ok": False, "id": "none"})),
}

_CALM_AFTER: Final = 6
"""Calls of one key after which the tool behaves, so that everything ends."""


def misdeed(seed: int, kind: str, key: str, number: int) -> tuple[str, Misdeed]:
    """What becomes of the n-th call of a key: the same whenever and from whomever it comes."""
    if number > _CALM_AFTER:
        return "none", _PLAIN
    digest = hashlib.sha256(f"{seed}/{kind}/{key}/{number}".encode()).digest()
    drawn = int.from_bytes(digest[:8]) % 1000
    table = {**(RULED if kind == "ruled" else {}), **MISDEEDS}
    for name, (weight, what) in table.items():
        if drawn < weight:
            return name, what
        drawn -= weight
    return "none", _PLAIN


@dataclass
class State:
    """What the log tells."""

    calls: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    effects: dict[str, tuple[float, Any]] = field(default_factory=dict)
    serial: int = 0


class Tools:
    """Answers the calls of every connection, from one log."""

    def __init__(self, log: Path, seed: int) -> None:
        self._seed = seed
        self._state = State()
        self._tasks: set[asyncio.Task[None]] = set()
        if log.exists():
            for line in log.read_bytes().splitlines():
                self._apply(json.loads(line))
        self._log = log.open("ab", buffering=0)

    def _record(self, **event: Any) -> None:
        event["at"] = time.time()
        self._log.write(json.dumps(event).encode() + b"\n")
        self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        if event["event"] == "call":
            self._state.calls[event["key"]] += 1
        elif event["event"] == "effect":
            self._state.serial += 1
            self._state.effects.setdefault(event["key"], (event["at"], event["body"]))

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a new connection; for `asyncio.start_server`."""
        self._spawn(self._serve(reader, writer))

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        try:
            while (head := await connection.next_request()) is not None:
                await self._answer(connection, head)
        except (ConnectionError, h11.RemoteProtocolError):
            pass  # the client went away, or was cut off
        finally:
            writer.close()

    async def _answer(self, connection: Connection, head: h11.Request) -> None:
        headers = {name.decode(): value.decode() for name, value in head.headers}
        body = await connection.read_body()
        match head.target.decode().partition("?")[0].strip("/").split("/"):
            case ["t", kind]:
                await self._act(connection, KINDS[kind], headers["idempotency-key"], json.loads(body))
            case ["r", kind, key]:
                await self._tell(connection, kind, key)
            case _:
                await connection.send(_answer(404, {}))

    async def _act(self, connection: Connection, kind: Kind, key: str, input: Any) -> None:
        number = self._state.calls[key] + 1
        name, what = misdeed(self._seed, kind.name, key, number)
        self._record(event="call", kind=kind.name, key=key, number=number, input=input, fault=name)
        body = {"id": f"{kind.name}-{key}-{number}", "key": key, "ok": True}
        if kind.writes and what.commits:
            if what.late:
                self._spawn(self._commit_late(kind, key, body))
            else:
                body = self._commit(kind, key, body)
        answer = _answer(what.status, body if what.body is None else what.body, what.headers)
        await asyncio.sleep(what.delay)
        if what.wire is None:
            await connection.send(answer)
        else:
            await FAULTS[what.wire].run(connection, answer)

    def _commit(self, kind: Kind, key: str, body: Any) -> Any:
        """Lets the effect happen, unless the key is remembered; answers what the key's effect answered."""
        known = self._state.effects.get(key)
        if known is not None and kind.remembers is not None and time.time() < known[0] + kind.remembers:
            return known[1]
        self._record(event="effect", kind=kind.name, key=key, body=body)
        return body

    async def _commit_late(self, kind: Kind, key: str, body: Any) -> None:
        await asyncio.sleep(_LATE_SECONDS)
        self._commit(kind, key, body)

    async def _tell(self, connection: Connection, kind: str, key: str) -> None:
        """What came of a key; now and then it cannot say."""
        self._state.calls[f"ask {key}"] += 1
        number = self._state.calls[f"ask {key}"]
        drawn = hashlib.sha256(f"{self._seed}/ask {kind}/{key}/{number}".encode()).digest()[0]
        known = self._state.effects.get(key)
        if drawn < 16 and number < _CALM_AFTER:
            await connection.send(_answer(503, {}))
        elif drawn < 32 and number < _CALM_AFTER:
            connection.reset()
        elif known is None:
            await connection.send(_answer(404, {}))
        else:
            await connection.send(_answer(200, {"result": known[1]}))


def _answer(status: int, body: Any, headers: tuple[tuple[str, str], ...] = ()) -> Answer:
    return Answer(status, (*headers, ("content-type", "application/json")), json.dumps(body).encode())


async def serve(port: int, log: Path, seed: int) -> None:
    """Serves until it is killed."""
    listener = await asyncio.start_server(Tools(log, seed).accept, "127.0.0.1", port, backlog=1_024)
    os.write(1, b"listening\n")
    await listener.serve_forever()


def main() -> None:
    """Reads the command line and runs."""
    parser = argparse.ArgumentParser(prog="tests.chaos.tool", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.port, arguments.log, arguments.seed))


if __name__ == "__main__":
    main()
