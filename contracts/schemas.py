"""JSON Schema (draft 2020-12 unless a schema says otherwise), by the jsonschema library; nothing is ever fetched."""

import re
from typing import Final

from jsonschema import Draft202012Validator, SchemaError
from jsonschema import ValidationError as SchemaViolation
from jsonschema.exceptions import UnknownType
from jsonschema.validators import validator_for
from pydantic import JsonValue
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, UnknownDialect, specification_with

from contracts.base import Json, place

__all__ = ["Schema", "check_schema", "schema_problems"]

Schema = bool | dict[str, JsonValue]
"""A JSON Schema."""

_UNUSABLE_SCHEMA: Final = (
    Unresolvable,
    UnknownType,
    RecursionError,
    ArithmeticError,
    AttributeError,
    KeyError,
    ValueError,
    TypeError,
    re.error,
)
"""What applying a schema can raise that its own meta-schema does not find."""

_DATA_KEYWORDS: Final = frozenset(("const", "enum", "default", "examples"))
"""Keywords of JSON Schema that hold data, not schemas."""
_DEFAULT_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_MAX_SCHEMA_PROBLEMS: Final = 20
_LONGEST_QUOTE: Final = 300


def schema_problems(schema: Schema, value: Json, where: str) -> list[str]:
    """Every way (twenty at most) in which a value breaks a schema, as ``place: what``; an empty list if it fits.

    ``where`` is the place of the value itself, such as ``nodes[2].input``.

    Nothing is fetched: a ``$ref`` to somewhere else is a problem of its own.
    """
    if schema in ({}, True):
        # Most tools have none, and every call asks twice.
        return []
    validator = validator_for(schema, default=Draft202012Validator)(schema, registry=Registry())
    problems: list[str] = []
    try:
        for error in validator.iter_errors(value):
            if len(problems) == _MAX_SCHEMA_PROBLEMS:
                problems.append("(and more)")
                break
            problems.append(f"{place(error.absolute_path, where)}: {_schema_message(error)}")
    except _UNUSABLE_SCHEMA as error:
        problems.append(f"{where}: the tool's schema itself cannot be applied: {error}")
    return problems


def check_schema(schema: Schema) -> None:
    """Checks that something is a JSON Schema whose references lead somewhere; nothing is fetched.

    Raises:
        ValueError: what is wrong with it.
    """
    if isinstance(schema, bool):
        return
    dialect = schema.get("$schema", _DEFAULT_DIALECT)
    try:
        specification_with(str(dialect))
    except UnknownDialect as error:
        raise ValueError("not a JSON Schema: $schema names no known draft; leave it out for 2020-12") from error
    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"not a JSON Schema: {place(error.absolute_path, '$')}: {error.message}") from error
    resource = Resource.from_contents(schema, default_specification=DRAFT202012)
    resolver = Registry().with_resource(resource.id() or "", resource).crawl().resolver(resource.id() or "")
    for reference in _references_of(schema):
        try:
            resolver.lookup(reference)
        except Unresolvable as error:
            raise ValueError(f"not a JSON Schema: $ref {reference!r} leads nowhere (nothing is fetched)") from error


def _references_of(schema: Json) -> list[str]:
    """Every ``$ref`` that the root can resolve; what stands under an ``$id`` of its own is left to the first use."""
    found: list[str] = []
    pending: list[Json] = [schema]
    while pending:
        item = pending.pop()
        if isinstance(item, dict) and (item is schema or "$id" not in item):
            if isinstance(reference := item.get("$ref"), str):
                found.append(reference)
            pending += [child for key, child in item.items() if key not in _DATA_KEYWORDS]
        elif isinstance(item, list):
            pending += item
    return found


def _schema_message(error: SchemaViolation) -> str:
    # jsonschema quotes the whole value, which may be large or private; the place names it well enough.
    if len(error.message) > _LONGEST_QUOTE:
        return f"breaks {error.validator!r}: {error.validator_value!r}"[:_LONGEST_QUOTE]
    return error.message
