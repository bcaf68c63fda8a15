"""What every model of the contracts shares: frozen, no unknown fields, aware UTC times, and errors with their place."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Annotated

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    JsonValue,
    ValidationError,
)
from pydantic_core import core_schema

__all__ = ["Json", "Model", "Number", "Unreadable", "UtcTime", "place", "problems_of", "tell"]

_JSON_TYPES: Mapping[type, str] = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "null",
}

Json = Annotated[JsonValue, GetPydanticSchema(lambda _source, _handler: core_schema.any_schema())]
"""Any JSON value. As a field it is taken as it is: it was read as JSON, and looked through where it came in.

Pydantic would look at each value in it again whenever a model takes it over, 3 s for 7 MB of small ones on its way
through a run. What somebody may have made otherwise, as a catalog in TOML, is of pydantic's own `JsonValue`.
"""


Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""A finite number; not a text that looks like one."""


def _only_text(value: object) -> object:
    if isinstance(value, str | datetime) and str(value).strip("0123456789.-"):
        return value
    raise ValueError('not a time, such as "2027-01-01T00:00:00Z" (RFC 3339)')


def _to_utc(value: datetime) -> datetime:
    return value.astimezone(UTC)


UtcTime = Annotated[AwareDatetime, BeforeValidator(_only_text), AfterValidator(_to_utc)]
"""A moment with its zone, kept in UTC; a naive one, and a bare number, is refused."""


class Unreadable(str):
    """Stands for something that was sent and cannot be read as JSON; it says why."""

    __slots__ = ()


class Model(BaseModel):
    """Frozen, and an unknown field is an error rather than a typing mistake that is silently dropped."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_timedelta="float")


def place(location: Iterable[str | int], within: str = "") -> str:
    """Renders a path such as ``("nodes", 2, "after", 0)`` as ``nodes[2].after[0]``, within another place."""
    text = within
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def tell(value: object) -> str:
    """Names the JSON type of a value for a message, e.g. ``an object``."""
    return _JSON_TYPES.get(type(value), type(value).__name__)


def problems_of(error: ValidationError, prefix: tuple[str | int, ...] = ()) -> list[str]:
    """Every problem of a pydantic error as ``place: what is wrong``, without the values (they may be secret)."""
    places: dict[str, list[str]] = {}
    for detail in error.errors(include_url=False, include_input=False, include_context=False):
        where = place((*prefix, *_written(detail["loc"])))
        message = _MESSAGES.get(detail["type"], detail["msg"].removeprefix("Value error, "))
        # Pydantic writes a bound as Python has it.
        message = message.replace("datetime.timedelta(0)", "0 seconds")
        messages = places.setdefault(where, [])
        if message not in messages:
            messages.append(message)
    return [f"{where}: {_either(messages)}" if where else _either(messages) for where, messages in places.items()]


_MESSAGES: Mapping[str, str] = {
    "extra_forbidden": "unknown field",
    "missing": "required, but missing",
}

_BRANCHES = frozenset(("int", "str", "bool", "float", "none", "nullable", "str-enum", "literal", "definition-ref"))
"""What pydantic adds to a place for a branch of a union that it tried."""


def _written(location: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """A location as somebody could have written it: without pydantic's own names for validators and branches."""
    parts = [part for part in location if isinstance(part, int) or not ("[" in part or part.startswith("function-"))]
    while parts and parts[-1] in _BRANCHES:
        parts.pop()
    return tuple(parts)


def _either(messages: list[str]) -> str:
    """The branches of a union all failed, each in its own words."""
    return " or ".join(messages)
