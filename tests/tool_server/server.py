"""The connections, and the routes of the tools: `/t/{name}` and `/r/{name}/{key}`."""

import asyncio
import contextlib
import json
import traceback
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl, unquote

import h11
import pydantic_core

from tests.tool_server.connection import Answer, Connection
from tests.tool_server.control import control
from tests.tool_server.faults import FAULTS
from tests.tool_server.script import Script, Step
from tests.tool_server.state import Call, CallSeen, Effect, EffectCommitted, Side, State


class Server:
    """Answers the requests of every connection, from one state."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._serving: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a new connection; for `asyncio.start_server`."""
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)  # one that nobody reads from has no other reference, and would be collected
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            traceback.print_exception(error)  # to stderr: where the handle finds that this was no fault of a script

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers a connection's requests until it is closed."""
        connection = Connection(reader, writer)
        try:
            while (head := await connection.next_request()) is not None:
                await self._answer(connection, head)
        except ConnectionError:
            pass  # the client went away: that is its right, and the call is recorded
        except h11.RemoteProtocolError as error:
            with contextlib.suppress(ConnectionError):  # it went away in the middle of its request
                await connection.send_raw(f"HTTP/1.1 400 Bad Request\r\n\r\n{error}\n".encode())
        finally:
            writer.close()

    async def _answer(self, connection: Connection, head: h11.Request) -> None:
        method = head.method.decode()
        path, _, query = head.target.decode().partition("?")
        parameters = dict(parse_qsl(query, keep_blank_values=True))
        match [unquote(part) for part in path.strip("/").split("/")]:
            case ["t", name, *_]:
                side: Side = "tool"
                key = None
            case ["r", name, first, *rest]:
                side = "reconcile"
                key = "/".join([first, *rest])
            case parts:
                body = await connection.read_body()
                await connection.send(await control(self._state, method, parts, parameters, body))
                return
        headers = _joined(head.headers)
        script, index, step = self._state.next_step(name, side)
        if side == "tool":
            key = headers.get(script.key_header.lower())
        call = Call(
            name=name,
            method=method,
            path=path,
            query=parameters,
            headers=headers,
            body=None,
            key=key,
            at=datetime.now(UTC),
            step=index,
        )
        await self._take(connection, side, call, script, step)

    async def _take(self, connection: Connection, side: Side, call: Call, script: Script, step: Step) -> None:
        """Has the call meet its step."""
        serial = self._state.next_serial()
        self._state.record(CallSeen(serial, side, call))
        fault = None if step.fault is None else FAULTS[step.fault]
        if fault is None or fault.reads_body:
            body = _parsed(await connection.read_body())
            if body is not None:
                call = replace(call, body=body)
                self._state.record(CallSeen(serial, side, call))
        answer = self._act(serial, call, script, step) if side == "tool" else self._reconcile(call, step)
        await asyncio.sleep(step.delay)
        if step.gate is not None:
            await self._state.gates[step.gate].wait()
        if fault is None:
            await connection.send(answer)
        else:
            await fault.run(connection, answer)

    def _act(self, serial: int, call: Call, script: Script, step: Step) -> Answer:
        """Lets the effect happen if it should, and says how to answer."""
        tool = self._state.tools[call.name]
        first = tool.first_by_key.get(call.key) if call.key is not None else None
        if step.commits and script.dedupe and first is not None:
            return _answer(step, first.status, first.body, raw=first.raw)
        body, raw = step.content({"id": f"{call.name}-{len(tool.effects) + 1}", "key": call.key})
        if step.commits:
            now = datetime.now(UTC)
            effect = Effect(name=call.name, key=call.key, at=now, status=step.status, body=body, raw=raw)
            self._state.record(EffectCommitted(serial, effect))
        return _answer(step, step.status, body, raw=raw)

    def _reconcile(self, call: Call, step: Step) -> Answer:
        """Says what is committed under the key, unless the step has an answer of its own."""
        if not step.tells_truth:
            body, raw = step.content({})
            return _answer(step, step.status, body, raw=raw)
        effect = self._state.tools[call.name].first_by_key.get(call.key or "")
        if effect is None:
            return _answer(step, 404, {})
        return _answer(step, 200, {"result": effect.body})


def _answer(step: Step, status: int, body: object, *, raw: bool = False) -> Answer:
    data = str(body) if raw else json.dumps(body)
    headers = tuple(
        (name, value)
        for name, values in step.headers.items()
        for value in ([values] if isinstance(values, str) else values)
    )
    answer = Answer(status, headers, data.encode(), step.size, step.rate)
    return answer if answer.has("content-type") else answer.with_header("content-type", "application/json")


def _joined(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Repeated headers as one, in the way of RFC 9110, section 5.3."""
    joined: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name, value = raw_name.decode(), raw_value.decode(errors="replace")
        joined[name] = f"{joined[name]}, {value}" if name in joined else value
    return joined


def _parsed(body: bytes) -> Any:
    if not body:
        return None
    try:
        return pydantic_core.from_json(body)
    except ValueError:  # not JSON: then it is text
        return body.decode(errors="replace")
