"""The routes with which a test controls the server, and asks it what happened."""

import asyncio
from typing import Any

import pydantic_core
from pydantic import ValidationError

from tests.tool_server.connection import Answer
from tests.tool_server.script import Script
from tests.tool_server.state import GateOpened, ScriptSet, Side, State, StateDeleted


async def control(state: State, method: str, parts: list[str], query: dict[str, str], body: bytes) -> Answer:
    """The answer to a request that is for no tool."""
    match method, parts:
        case "PUT", ["_script", name]:
            return _set_script(state, name, "tool", body)
        case "PUT", ["_script", name, "reconcile"]:
            return _set_script(state, name, "reconcile", body)
        case "GET", ["_calls", name]:
            return _json(200, list(state.tools[name].tracks["tool"].calls.values()))
        case "GET", ["_calls", name, "reconcile"]:
            return _json(200, list(state.tools[name].tracks["reconcile"].calls.values()))
        case "GET", ["_effects", name]:
            return _json(200, state.tools[name].effects)
        case "GET", ["_wait", name]:
            return await _wait(state, name, query)
        case "POST", ["_gate", gate]:
            state.record(GateOpened(gate))
            return _json(200, {})
        case "DELETE", ["_state", name]:
            state.record(StateDeleted(name))
            return _json(200, {})
        case _:
            return _json(404, {"error": f"no such route: {method} /{'/'.join(parts)}"})


def _set_script(state: State, name: str, side: Side, body: bytes) -> Answer:
    try:
        script = Script.model_validate_json(body)
    except ValidationError as error:
        return _json(400, {"error": str(error)})
    if side == "reconcile" and (script.dedupe or any(step.commit for step in script.steps)):
        return _json(400, {"error": "a reconcile route has no effects: it can neither commit nor dedupe"})
    state.record(ScriptSet(name, side, script))
    return _json(200, {})


async def _wait(state: State, name: str, query: dict[str, str]) -> Answer:
    """200 once there are as many as asked for, 408 after the timeout, both with what there is."""

    def seen() -> dict[str, int]:
        tool = state.tools[name]
        return {
            "calls": len(tool.tracks["tool"].calls),
            "reconcile_calls": len(tool.tracks["reconcile"].calls),
            "effects": len(tool.effects),
        }

    wanted = {what: int(query.get(what, 0)) for what in seen()}
    try:
        async with asyncio.timeout(float(query.get("timeout", 30))):
            await state.until(lambda: all(count >= wanted[what] for what, count in seen().items()))
    except TimeoutError:
        return _json(408, seen())
    return _json(200, seen())


def _json(status: int, body: Any) -> Answer:
    return Answer(status, (("content-type", "application/json"),), pydantic_core.to_json(body))
