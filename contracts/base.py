"""What every model of the contracts shares: frozen, no unknown fields, aware UTC times, and errors with their place."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, JsonValue, ValidationError

__all__ = ["Json", "Model", "Unreadable", "UtcTime", "place", "problems_of", "tell"]

_JSON_TYPES: Mapping[type, str] = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "null",
}

Json = JsonValue
"""Any JSON value."""


def _to_utc(value: datetime) -> datetime:
    return value.astimezone(UTC)


UtcTime = Annotated[AwareDatetime, AfterValidator(_to_utc)]
"""A moment with its zone, kept in UTC; a naive one is refused."""


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
    problems = []
    for detail in error.errors(include_url=False, include_input=False, include_context=False):
        where = place((*prefix, *_meaningful(detail["loc"])))
        message = _MESSAGES.get(detail["type"], detail["msg"].removeprefix("Value error, "))
        problems.append(f"{where}: {message}" if where else message)
    return list(dict.fromkeys(problems))


_MESSAGES: dict[str, Any] = {
    "extra_forbidden": "unknown field",
    "missing": "required, but missing",
}


def _meaningful(location: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Drops the names of pydantic's own validators (``function-after[…]``) and union branches from a location."""
    return tuple(part for part in location if isinstance(part, int) or not _is_internal(part))


def _is_internal(part: str) -> bool:
    return part.startswith(("function-", "constrained-", "nullable", "tagged-union", "lax-or-strict", "json-or-python"))
