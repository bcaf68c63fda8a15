"""The tools of the demo: an HTTP server that misbehaves as remote tools do, and that counts what it really did.

Each tool's trouble is a rule, not a script, so that any number of runs may use them:

- ``inventory.reserve`` and ``mail.send`` simply work.
- ``fraud.screen`` answers the first call of each key with 503.
- ``billing.invoice`` answers the first call of each key with 429 and ``Retry-After``.
- ``shipping.label`` acts, then cuts the connection: its answer is lost, but it can be asked what became of a key.
- ``payments.charge`` refuses what is above the card's limit with 403, until ``PUT /limit`` raises it.
"""

import asyncio
import json
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from string import Template
from typing import Final

from contracts.base import Json

__all__ = ["RETRY_AFTER_SECONDS", "SampleCall", "SampleTools", "sample_tools"]

RETRY_AFTER_SECONDS: Final = 2
"""What ``billing.invoice`` asks for."""

_HOST: Final = "127.0.0.1"
_PORT: Final = 7280
_FIRST_LIMIT: Final = 1000
_LARGEST_BODY: Final = 1024 * 1024

_CATALOG: Final = Template("""\
# The tools of the demo, as Redrive is told of them. Their server is workers/sample_tools.py.

[tools."inventory.reserve"]
url = "$base/reservations"
timeout = "5s"

[tools."fraud.screen"]
url = "$base/screenings"
idempotency = "key"            # it remembers keys: after a 503 the same key may be sent again
timeout = "5s"
retry.DEPENDENCY_DOWN = { initial = "1s" }

[tools."billing.invoice"]
url = "$base/invoices"
timeout = "5s"
retry.RATE_LIMITED = { initial = "1s" }   # only where it does not say when to come back

[tools."shipping.label"]
url = "$base/labels"
timeout = "5s"                 # it does not remember keys: a lost answer is asked for, never guessed

[tools."shipping.label".reconcile]
url = "$base/labels/{idempotency_key}"
output = "/label"

[tools."payments.charge"]
url = "$base/charges"
idempotency = "key"
timeout = "5s"
input_schema = { type = "object", required = ["amount"], properties = { amount = { type = "integer", minimum = 1 } } }

[tools."mail.send"]
url = "$base/mails"
timeout = "5s"
""")

_TOOLS: Final[Mapping[str, str]] = {
    "/reservations": "inventory.reserve",
    "/screenings": "fraud.screen",
    "/invoices": "billing.invoice",
    "/labels": "shipping.label",
    "/charges": "payments.charge",
    "/mails": "mail.send",
}


@dataclass(frozen=True, slots=True)
class SampleCall:
    """One call as the tool saw it.

    Attributes:
        status: What it answered; None: it cut the connection.
        question: It was asked what became of a key; nothing was done.
        note: What it did, for people.
        at: When it had answered, by ``time.monotonic``.
    """

    tool: str
    key: str
    status: int | None
    question: bool
    note: str
    at: float


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    key: str
    body: Json


@dataclass(frozen=True, slots=True)
class _Answer:
    """What is sent back; status None: nothing, the connection is cut."""

    status: int | None
    body: Json
    note: str
    headers: Mapping[str, str] = field(default_factory=dict)


class SampleTools:
    """The running tools.

    Attributes:
        url: Where they are.
        limit: Of the card that ``payments.charge`` charges.
        calls: Every call, in the order of the answers.
    """

    def __init__(self, notice: Callable[[SampleCall], None] | None = None) -> None:
        self.url = ""
        self.limit = _FIRST_LIMIT
        self.calls: list[SampleCall] = []
        self._notice = notice
        self._seen: Counter[tuple[str, str]] = Counter()
        self._effects: dict[tuple[str, str], list[Json]] = defaultdict(list)
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    @property
    def catalog(self) -> str:
        """The ``tools.toml`` that describes them."""
        return _CATALOG.substitute(base=self.url)

    def effects(self, tool: str, key: str) -> int:
        """How often a tool has really acted on a key."""
        return len(self._effects[tool, key])

    def _answer(self, request: _Request) -> _Answer:
        if (request.method, request.path) == ("PUT", "/limit") and isinstance(request.body, int):
            self.limit = request.body
            return _Answer(200, {"limit": self.limit}, f"the card's limit is {self.limit} now")
        tool = _TOOLS.get(request.path)
        if tool is not None and request.method == "POST":
            answer = self._call(tool, request)
            self._note(SampleCall(tool, request.key, answer.status, False, answer.note, time.monotonic()))
            return answer
        resource, _, key = request.path.lstrip("/").partition("/")
        if (request.method, resource) == ("GET", "labels") and key:
            answer = self._look_up("shipping.label", key)
            self._note(SampleCall("shipping.label", key, answer.status, True, answer.note, time.monotonic()))
            return answer
        return _Answer(404, {"error": "there is nothing here"}, "")

    def _note(self, call: SampleCall) -> None:
        self.calls.append(call)
        if self._notice is not None:
            self._notice(call)

    def _call(self, tool: str, request: _Request) -> _Answer:
        key = request.key
        if not key:
            return _Answer(400, {"error": "an Idempotency-Key is required"}, "no key")
        if not isinstance(request.body, dict):
            return _Answer(400, {"error": "a JSON object is required"}, "no JSON object")
        self._seen[tool, key] += 1
        first = self._seen[tool, key] == 1
        match tool:
            case "fraud.screen" if first:
                return _Answer(503, {"error": "overloaded"}, "overloaded")
            case "billing.invoice" if first:
                after = str(RETRY_AFTER_SECONDS)
                return _Answer(429, {"error": "slow down"}, f"Retry-After: {after}", {"Retry-After": after})
            case "shipping.label":
                self._act(tool, key, {"label": f"lbl-{key[:8]}"})
                return _Answer(None, None, "the label is printed, then the connection is cut")
            case "payments.charge" if isinstance(amount := request.body.get("amount"), int) and amount > self.limit:
                error = f"the card's limit is {self.limit}, the charge is {amount}"
                return _Answer(403, {"error": error}, error)
            case _:
                return self._done(tool, key, {"id": f"{tool.partition('.')[0]}-{key[:8]}"})

    def _done(self, tool: str, key: str, result: Json) -> _Answer:
        if tool in ("fraud.screen", "payments.charge") and self._effects[tool, key]:
            return _Answer(200, self._effects[tool, key][0], "the same answer again")
        self._act(tool, key, result)
        return _Answer(200, result, "done")

    def _act(self, tool: str, key: str, result: Json) -> None:
        self._effects[tool, key].append(result)

    def _look_up(self, tool: str, key: str) -> _Answer:
        done = self._effects[tool, key]
        if not done:
            return _Answer(404, {"error": "unknown key"}, "what became of it? Nothing")
        return _Answer(200, {"label": done[0]}, "what became of it? It happened; here is the result")

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._open[task] = writer
        task.add_done_callback(self._open.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _read(reader)) is not None:
                answer = self._answer(request)
                if answer.status is None:
                    return
                writer.write(_render(answer))
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            # The other side has gone, or does not speak HTTP: there is nobody to answer.
            return
        finally:
            writer.transport.abort()

    async def open(self) -> None:
        """Begins to listen on the loopback interface, on port 7280 or, where that is taken, on a free one."""
        try:
            server = await asyncio.start_server(self._accept, _HOST, _PORT)
        except OSError:
            server = await asyncio.start_server(self._accept, _HOST, 0)
        port: int = server.sockets[0].getsockname()[1]
        self.url = f"http://{_HOST}:{port}"
        self._server = server

    async def close(self) -> None:
        """Hangs up on everybody."""
        if self._server is not None:
            self._server.close()
        for writer in self._open.values():
            writer.transport.abort()
        if self._open:
            await asyncio.wait(self._open)


@asynccontextmanager
async def sample_tools(notice: Callable[[SampleCall], None] | None = None) -> AsyncGenerator[SampleTools]:
    """Runs the tools.

    Args:
        notice: Is told of every call.
    """
    tools = SampleTools(notice)
    await tools.open()
    try:
        yield tools
    finally:
        await tools.close()


async def _read(reader: asyncio.StreamReader) -> _Request | None:
    """The next request of a connection (RFC 9112, as far as Redrive and curl use it); None: there is none."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(headers.get("content-length", "0"))
    if not 0 <= length <= _LARGEST_BODY:
        return None
    content = await reader.readexactly(length)
    try:
        body: Json = json.loads(content) if content else None
    except ValueError:
        body = None
    return _Request(method, path, headers.get("idempotency-key", ""), body)


def _render(answer: _Answer) -> bytes:
    assert answer.status is not None
    content = json.dumps(answer.body).encode()
    fields = {"Content-Type": "application/json", "Content-Length": str(len(content)), **answer.headers}
    lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join([*lines, "", ""]).encode() + content
