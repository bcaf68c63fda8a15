"""One byte form for one JSON value, so that content can be compared and hashed whatever the order of its keys."""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

from contracts.base import Json, Unreadable

__all__ = ["MAX_DEPTH", "canonical_json", "content_hash", "is_small", "json_problem", "json_size", "same_json"]


def canonical_json(value: Json) -> str:
    """JSON with sorted keys, no blanks, ASCII only.

    Raises:
        ValueError: a number that JSON does not have (NaN, Infinity).
    """
    return _CANONICAL.encode(value)


def content_hash(value: Json) -> str:
    """``sha256:`` and the hash of the canonical form."""
    return "sha256:" + hashlib.sha256(canonical_json(value).encode()).hexdigest()


def json_size(value: Json) -> int:
    """The bytes that a value takes as compact UTF-8 JSON, which is how it travels."""
    return len(_COMPACT.encode(value).encode("utf-8", "surrogatepass"))


def is_small(value: Json) -> bool:
    """Whether whatever looks at all of it is done at once; found out without looking at all of a large one."""
    left = _SMALL
    waiting = [value]
    while waiting and left >= 0:
        item = waiting.pop()
        if isinstance(item, str):
            left -= len(item) // _AS_LONG
        elif isinstance(item, list):
            left -= len(item)
            waiting += item[:_SMALL]
        elif isinstance(item, dict):
            left -= len(item)
            waiting += itertools.chain.from_iterable(itertools.islice(item.items(), _SMALL))
    return left >= 0


# Kept: `json.dumps` would make one for each value.
_CANONICAL: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
_COMPACT: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)

_SMALL: Final = 500
"""Values, and pieces of text, in a small value."""
_AS_LONG: Final = 64
"""Characters of a text that take as long as another value."""

MAX_DEPTH: Final = 100
"""How deep any JSON value may be nested; what holds it adds a few levels, and decoders end at about 200."""

_MAX_INTEGER: Final = 10**1000
_PLAIN: Final = frozenset((dict, list, str, float, int, bool, type(None)))

_S = TypeVar("_S", str, float, int)


def json_problem(value: Json, depth: int = MAX_DEPTH) -> str | None:
    """Why a value that was read as JSON cannot travel on, or None; ``depth`` is how deep it may be nested.

    JSON texts can say more than every reader of them can carry: numbers beyond a double (read as infinity), surrogates
    without their pair, bottomless nesting. Without recursion, since that is what it protects.
    """
    level: list[Json] = [value]
    for _ in range(depth + 1):
        if not _all_plain(level) and (problem := next(filter(None, map(_scalar_problem, level)), None)):
            return problem
        held = (_children(item) for item in level if isinstance(item, dict | list))
        level = list(itertools.chain.from_iterable(held))
        if not level:
            return None
    return f"it is nested deeper than {depth} levels"


def same_json(one: Json, other: Json) -> bool:
    """Whether two values are the same JSON value; Python takes True for 1, JSON does not."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _children(item: dict[str, Json] | list[Json]) -> Iterable[Json]:
    return item if isinstance(item, list) else itertools.chain(item.keys(), item.values())


def _all_plain(level: list[Json]) -> bool:
    """Whether nothing is the matter with any of them; what is, is found item by item, which is slow.

    Some megabytes may hold millions of values, and a workflow task has seconds for all that it does.
    """
    kinds = set(map(type, level))
    if not kinds <= _PLAIN:
        return False
    if float in kinds and not all(map(math.isfinite, _of(float, level))):
        return False
    if int in kinds and (max(_of(int, level)) > _MAX_INTEGER or min(_of(int, level)) < -_MAX_INTEGER):
        return False
    return str not in kinds or _is_utf8("".join(_of(str, level)))


def _of(kind: type[_S], level: list[Json]) -> Iterator[_S]:
    return (item for item in level if isinstance(item, kind))


def _scalar_problem(item: object) -> str | None:
    if isinstance(item, Unreadable):
        return str(item)
    if isinstance(item, str):
        return "it holds half of a surrogate pair" if not _is_utf8(item) else None
    if isinstance(item, float):
        return "it holds a number that is not finite" if not math.isfinite(item) else None
    if isinstance(item, int):
        return "it holds a number of more than 1000 digits" if abs(item) > _MAX_INTEGER else None
    # A payload of another encoding than JSON arrives as what that encoding says.
    return None if item is None or isinstance(item, dict | list) else "it is not JSON"


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
