"""JSON Pointer (RFC 6901), by the jsonpointer library less what it adds to the RFC."""

from jsonpointer import EndOfList, JsonPointer, JsonPointerException

from contracts.base import Json

__all__ = ["at_pointer", "is_pointer"]


def is_pointer(text: str) -> bool:
    """Whether a text is a JSON Pointer."""
    try:
        JsonPointer(text)
    except JsonPointerException:
        return False
    return True


def at_pointer(value: Json, pointer: str) -> Json:
    """What a pointer points at.

    Raises:
        LookupError: nothing is there (``-``, the element after the last, is nothing: RFC 6901 section 7).
    """
    try:
        found = JsonPointer(pointer).resolve(value)
    except (JsonPointerException, TypeError) as error:
        raise LookupError(f"nothing at {pointer!r}") from error
    if isinstance(found, EndOfList):
        raise LookupError(f"nothing at {pointer!r}")
    answer: Json = found
    return answer
