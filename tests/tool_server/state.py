"""What the server remembers: a log of events on disk, and what follows from them in memory.

Everything is an event, written to the log before it is acted on: so a server that was killed comes back with its
effects, its calls, its scripts and their positions.
"""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from tests.tool_server.script import Script, Step

Side = Literal["tool", "reconcile"]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A request that arrived. It is there as soon as its head is read; the body follows when that is read.

    Attributes:
        name: The tool's name.
        method: The request's method.
        path: The path as sent, still percent-encoded, without the query.
        query: The query's parameters (the last of each).
        headers: Lower-cased; the values of a repeated one are joined by `", "`.
        body: Parsed if it is JSON, else text; None if it is empty or was not read.
        key: The value of the script's key header; of a reconcile request, the key asked for.
        at: When the head was read.
        step: The index of the step it took.
        committed: Whether this call made an effect (a replay does not).
    """

    name: str
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any
    key: str | None
    at: datetime
    step: int
    committed: bool = False


@dataclass(frozen=True, kw_only=True)
class Effect:
    """Something the tool did, with the answer it committed to (`raw`: the body is text, not JSON)."""

    name: str
    key: str | None
    at: datetime
    status: int
    body: Any
    raw: bool = False


@dataclass(frozen=True)
class ScriptSet:
    name: str
    side: Side
    script: Script
    event: Literal["script"] = "script"


@dataclass(frozen=True)
class CallSeen:
    serial: int
    side: Side
    call: Call
    event: Literal["call"] = "call"


@dataclass(frozen=True)
class EffectCommitted:
    serial: int
    effect: Effect
    event: Literal["effect"] = "effect"


@dataclass(frozen=True)
class GateOpened:
    gate: str
    event: Literal["gate"] = "gate"


@dataclass(frozen=True)
class StateDeleted:
    name: str
    event: Literal["deleted"] = "deleted"


Event = ScriptSet | CallSeen | EffectCommitted | GateOpened | StateDeleted
_EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])


@dataclass
class Track:
    """One side of a name: its script, how many steps of it are taken, and the calls by serial number."""

    script: Script = field(default_factory=Script)
    taken: int = 0
    calls: dict[int, Call] = field(default_factory=dict)


@dataclass
class Tool:
    """Everything under one name."""

    tracks: dict[Side, Track] = field(default_factory=lambda: {"tool": Track(), "reconcile": Track()})
    effects: list[Effect] = field(default_factory=list)
    first_by_key: dict[str, Effect] = field(default_factory=dict)


class State:
    """The tools by name and the gates, as the log tells them."""

    def __init__(self, log: Path) -> None:
        """Reloads `log` if it exists, and goes on writing to it."""
        self.tools: defaultdict[str, Tool] = defaultdict(Tool)
        self.gates: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._changed = asyncio.Event()
        last = 0
        if log.exists():
            for line in log.read_bytes().splitlines():
                event = _EVENT.validate_json(line)
                self._apply(event)
                last = max(last, event.serial if isinstance(event, CallSeen) else 0)
        self._serials = itertools.count(last + 1)
        self._log = log.open("ab", buffering=0)

    def record(self, event: Event) -> None:
        """Writes the event to the log, acts on it, and wakes whoever waits."""
        self._log.write(_EVENT.dump_json(event, exclude_unset=True) + b"\n")
        self._apply(event)
        self._changed.set()
        self._changed = asyncio.Event()

    def next_serial(self) -> int:
        """A number for the next call, unique over the log."""
        return next(self._serials)

    def next_step(self, name: str, side: Side) -> tuple[Script, int, Step]:
        """The script of this side, and the step, with its index, that the next call takes."""
        track = self.tools[name].tracks[side]
        index, step = track.script.step(track.taken)
        return track.script, index, step

    async def until(self, true: Callable[[], bool]) -> None:
        """Returns once `true()`."""
        while not true():
            await self._changed.wait()

    def _apply(self, event: Event) -> None:
        match event:
            case ScriptSet(name, side, script):
                track = self.tools[name].tracks[side]
                track.script, track.taken = script, 0
            case CallSeen(serial, side, call):
                track = self.tools[call.name].tracks[side]
                track.taken += serial not in track.calls
                track.calls[serial] = call
            case EffectCommitted(serial, effect):
                tool = self.tools[effect.name]
                tool.effects.append(effect)
                if effect.key is not None:
                    tool.first_by_key.setdefault(effect.key, effect)
                calls = tool.tracks["tool"].calls
                if serial in calls:  # not if the state was deleted in the meantime
                    calls[serial] = replace(calls[serial], committed=True)
            case GateOpened(gate):
                self.gates[gate].set()
            case StateDeleted(name):
                self.tools.pop(name, None)
