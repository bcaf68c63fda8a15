"""One byte form for one JSON value, so that content can be compared and hashed whatever the order of its keys."""

import hashlib
import json

from contracts.base import Json

__all__ = ["canonical_json", "content_hash", "depth_exceeds", "json_size"]


def canonical_json(value: Json) -> str:
    """JSON with sorted keys, no blanks, ASCII only.

    Raises:
        ValueError: a number that JSON does not have (NaN, Infinity).
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def content_hash(value: Json) -> str:
    """``sha256:`` and the hash of the canonical form."""
    return "sha256:" + hashlib.sha256(canonical_json(value).encode()).hexdigest()


def json_size(value: Json) -> int:
    """The bytes that a value takes as compact UTF-8 JSON, which is how it travels."""
    return len(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass"))


def depth_exceeds(value: Json, limit: int) -> bool:
    """Whether a value is nested deeper than so many levels; without recursion, since that is what it protects."""
    level: list[Json] = [value]
    for _ in range(limit):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True
