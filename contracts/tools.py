"""The catalog: what a tool is, how its file is read and checked, and the fingerprint of what a call to it means."""

import json
import re
import tomllib
from collections.abc import Mapping
from datetime import timedelta
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    Field,
    JsonValue,
    StrictBool,
    StrictInt,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from contracts.base import Model, Number, problems_of, tell
from contracts.canonical import content_hash, json_problem
from contracts.failures import POLICIES, Category, Policy, SideEffect
from contracts.identity import problem_with_tool_name
from contracts.pointers import is_pointer
from contracts.schemas import Schema, check_schema

__all__ = [
    "PLACEHOLDER",
    "Approval",
    "Auth",
    "Catalog",
    "CatalogError",
    "CatalogFile",
    "Duration",
    "Effect",
    "Idempotency",
    "Meaning",
    "Reconcile",
    "RetryOverride",
    "Rule",
    "Tool",
    "is_header_value",
    "load_catalog",
    "parse_duration",
    "placeholders",
    "read_catalog",
]

_DURATION: Final = re.compile(r"([0-9]{1,9})(ms|s|m|h|d)")
_UNITS: Final = {
    "ms": timedelta(milliseconds=1),
    "s": timedelta(seconds=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
}
_LONGEST_DURATION: Final = timedelta(days=3650)
PLACEHOLDER: Final = re.compile(r"\{([^{}]*)\}")
"""In a URL: a field of the input, or of the operation."""
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_ENVIRONMENT_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STATUS_CLASS: Final = re.compile(r"[1-5]xx")

_MOST_RESPONSE_BYTES: Final = 16 * 1024 * 1024
"""Reading JSON takes twenty times its size in memory, and the interpreter's lock for part of a second."""

_OURS: Final = frozenset(
    (
        "accept-encoding",
        "content-length",
        "content-type",
        "transfer-encoding",
        "host",
        "connection",
        "traceparent",
        "x-correlation-id",
    )
)
"""Headers that Redrive itself sets on every call."""


def parse_duration(text: object) -> timedelta:
    """Reads a duration such as ``"250ms"``, ``"30s"``, ``"5m"``, ``"24h"`` or ``"30d"``.

    Raises:
        ValueError: it is not one.
    """
    if isinstance(text, timedelta):
        return text
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError('not a duration: write "250ms", "30s", "5m", "24h" or "30d"')
    duration = int(match[1]) * _UNITS[match[2]]
    if duration > _LONGEST_DURATION:
        raise ValueError(f"longer than {_LONGEST_DURATION.days} days")
    return duration


Duration = Annotated[
    timedelta,
    BeforeValidator(parse_duration),
    WithJsonSchema({"type": "string", "pattern": f"^{_DURATION.pattern}$"}),
]
"""A duration as the catalog writes it."""

PositiveDuration = Annotated[Duration, Field(gt=timedelta(0))]

Status = Annotated[StrictInt, Field(ge=100, le=599)]


class Effect(StrEnum):
    """Whether a call changes something."""

    READ = "read"
    """Repeating it harms nothing."""
    WRITE = "write"


class Idempotency(StrEnum):
    """Whether the remote dedupes by key."""

    KEY = "key"
    NONE = "none"


class Approval(StrEnum):
    """Whether a node that calls the tool needs an approval."""

    REQUIRED = "required"
    OPTIONAL = "optional"


class Meaning(StrEnum):
    """What a rule makes of an answer: a success, or a failure of a category."""

    SUCCESS = "SUCCESS"
    TRANSIENT = Category.TRANSIENT
    RATE_LIMITED = Category.RATE_LIMITED
    DEPENDENCY_DOWN = Category.DEPENDENCY_DOWN
    INVALID_INPUT = Category.INVALID_INPUT
    PERMISSION = Category.PERMISSION
    UNKNOWN_SIDE_EFFECT = Category.UNKNOWN_SIDE_EFFECT


class Auth(Model):
    """Where a tool's secret comes from: always the environment, never the catalog itself."""

    bearer_env: str | None = None
    header: str | None = None
    env: str | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.bearer_env is None) == (self.header is None) or (self.header is None) != (self.env is None):
            raise ValueError('write either { bearer_env = "NAME" } or { header = "x-api-key", env = "NAME" }')
        if not _ENVIRONMENT_NAME.fullmatch(self.variable):
            raise ValueError("the name of an environment variable is letters, digits and '_' (never the secret itself)")
        if self.header is not None:
            _check_header_name(self.header)
        return self

    @property
    def variable(self) -> str:
        """The environment variable that holds the secret."""
        return self.bearer_env or self.env or ""

    def headers(self, secret: str) -> dict[str, str]:
        """The header that carries the secret."""
        return {"authorization": f"Bearer {secret}"} if self.header is None else {self.header: secret}


class Reconcile(Model):
    """How to ask a tool what became of an operation.

    Attributes:
        url: May hold ``{idempotency_key}``, ``{operation_id}`` and fields of the input.
        committed: Statuses that mean that it happened.
        absent: Statuses that mean that it did not; any other is no answer.
        output: JSON Pointer (RFC 6901) to the result in a committed answer.
        absent_after: How long after an attempt's timeout the remote may still act on it (default: the tool's timeout).
    """

    url: str
    committed: list[Status] = Field(default=[200], min_length=1)
    absent: list[Status] = [404]
    output: str = ""
    absent_after: Duration | None = None

    @field_validator("url")
    @classmethod
    def _url(cls, url: str) -> str:
        _check_url(url)
        if not placeholders(url):
            # Whatever it answered would be taken for what became of every operation.
            raise ValueError("it has to say which operation is meant: put {idempotency_key} or {operation_id} into it")
        return url

    @field_validator("output")
    @classmethod
    def _pointer(cls, pointer: str) -> str:
        return _check_pointer(pointer)

    @model_validator(mode="after")
    def _disjoint(self) -> Self:
        both = sorted(set(self.committed) & set(self.absent))
        if both:
            raise ValueError(f"status {both[0]} cannot mean both committed and absent")
        return self


class Rule(Model):
    """A tool's own reading of an answer; the first that matches wins, before the classification table.

    All of the conditions that are given must hold: ``status``, and ``header`` or ``pointer`` with ``equals``.
    """

    status: StrictInt | str | None = None
    header: str | None = None
    pointer: str | None = None
    equals: JsonValue = None
    category: Meaning
    side_effect: SideEffect | None = None
    """None: as the classification table has it for the status."""

    @field_validator("equals")
    @classmethod
    def _equals(cls, value: JsonValue) -> JsonValue:
        return _check_json(value)

    @field_validator("status")
    @classmethod
    def _status(cls, status: int | str | None) -> int | str | None:
        if isinstance(status, str) and not _STATUS_CLASS.fullmatch(status):
            raise ValueError('a status is a number such as 409, or a class such as "4xx"')
        if isinstance(status, int) and not 100 <= status <= 599:
            raise ValueError("a status is between 100 and 599")
        return status

    @field_validator("pointer")
    @classmethod
    def _pointer(cls, pointer: str | None) -> str | None:
        return None if pointer is None else _check_pointer(pointer)

    @model_validator(mode="after")
    def _conditions(self) -> Self:
        if self.status is None and self.header is None and self.pointer is None:
            raise ValueError("a rule needs a condition: status, header + equals, or pointer + equals")
        if self.header is not None and self.pointer is not None:
            raise ValueError("a rule looks at one header or one pointer, not both: write two rules")
        looks = self.header is not None or self.pointer is not None
        if looks != ("equals" in self.model_fields_set):
            raise ValueError("header and pointer go with equals, and equals with one of them")
        if self.header is not None and not isinstance(self.equals, str):
            raise ValueError("a header equals a string")
        if self.category is Meaning.SUCCESS and self.side_effect not in (None, SideEffect.CONFIRMED):
            raise ValueError("a success has happened: leave its side_effect out")
        return self


class RetryOverride(Model):
    """What a tool changes of a category's policy; what it leaves out stays."""

    initial: PositiveDuration | None = None
    backoff: Number | None = Field(default=None, ge=1, le=100)
    maximum: PositiveDuration | None = None
    attempts: StrictInt | None = Field(default=None, ge=1, le=10_000)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.initial is not None and self.maximum is not None and self.maximum < self.initial:
            raise ValueError("maximum is shorter than initial")
        return self

    def applied_to(self, policy: Policy) -> Policy:
        """The policy with this override; a wait that is given alone takes the other one along."""
        changed = policy.model_copy(update=self.model_dump(exclude_none=True))
        if self.initial is None:
            return changed.model_copy(update={"initial": min(changed.initial, changed.maximum)})
        return changed.model_copy(update={"maximum": max(changed.initial, changed.maximum)})


class Tool(Model):
    """A remote tool, as ``tools.toml`` describes it. ``CONTRACT.md`` explains each field."""

    name: str = Field(exclude=True)
    url: str
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "POST"
    version: str = "1"
    effect: Effect = Effect.WRITE
    idempotency: Idempotency = Idempotency.NONE
    key_header: str = "Idempotency-Key"
    key_quoted: StrictBool = False
    dedupe_window: PositiveDuration | None = None
    timeout: PositiveDuration = timedelta(seconds=30)
    max_response_bytes: StrictInt = Field(default=1024 * 1024, ge=1, le=_MOST_RESPONSE_BYTES)
    concurrency: StrictInt = Field(default=20, ge=1, le=1000)
    rate_per_second: Number | None = Field(default=None, gt=0)
    headers: dict[str, str] = {}
    auth: Auth | None = None
    input_schema: Schema = True
    output_schema: Schema = True
    approval: Approval = Approval.OPTIONAL
    max_redrives: StrictInt = Field(default=10, ge=0)
    reconcile: Reconcile | None = None
    rules: list[Rule] = []
    retry: dict[Category, RetryOverride] = {}

    @field_validator("url")
    @classmethod
    def _url(cls, url: str) -> str:
        return _check_url(url)

    @field_validator("key_header")
    @classmethod
    def _key_header(cls, name: str) -> str:
        _check_header_name(name)
        return name

    @field_validator("headers")
    @classmethod
    def _headers(cls, headers: dict[str, str]) -> dict[str, str]:
        if len({name.lower() for name in headers}) < len(headers):
            raise ValueError("one header stands there twice")
        for name, value in headers.items():
            _check_header_name(name)
            if not is_header_value(value):
                raise ValueError(f"{name}: a header's value is printable ASCII, without blanks at its ends")
        return headers

    @field_validator("input_schema", "output_schema")
    @classmethod
    def _schema(cls, schema: Schema) -> Schema:
        _check_json(schema)
        check_schema(schema)
        return schema

    @field_validator("retry")
    @classmethod
    def _retry(cls, retry: dict[Category, RetryOverride]) -> dict[Category, RetryOverride]:
        for category in retry:
            if category not in POLICIES:
                raise ValueError(f"{category} is never retried by itself; {', '.join(POLICIES)} are")
        return retry

    @model_validator(mode="after")
    def _together(self) -> Self:
        key = self.key_header.lower()
        names = {name.lower() for name in self.headers}
        if key in names or key in _OURS or key == "authorization":
            raise ValueError(f"key_header: {self.key_header} is already used for something else")
        if self.auth is not None and (header := (self.auth.header or "authorization").lower()) in {key, *names}:
            raise ValueError(f"auth: the header {header} is already used for something else")
        if self.dedupe_window is not None and self.idempotency is Idempotency.NONE:
            raise ValueError('dedupe_window: only a tool with idempotency = "key" has one')
        return self

    @property
    def absent_after(self) -> timedelta:
        """How long after an attempt's timeout the remote may still act on it."""
        if self.reconcile is None or self.reconcile.absent_after is None:
            return self.timeout
        return self.reconcile.absent_after

    def harmless_to_repeat(self, since_first_send: timedelta) -> bool:
        """Whether an operation may be sent again under its key: the tool only reads, or still dedupes by the key."""
        if self.effect is Effect.READ:
            return True
        if self.idempotency is not Idempotency.KEY:
            return False
        return self.dedupe_window is None or since_first_send < self.dedupe_window

    def policy(self, category: Category) -> Policy | None:
        """The retry policy of a category: the default with the tool's overrides, or None where it is never retried."""
        default = POLICIES.get(category)
        override = self.retry.get(category)
        if default is None or override is None:
            return default
        return override.applied_to(default)

    @cached_property
    def fingerprint(self) -> str:
        """The hash of what changes what a call means; comments, order, limits and secrets' values do not."""
        meaning = self.model_dump(mode="json", include=_FINGERPRINTED)
        if self.reconcile is not None:
            # The order of these means nothing.
            statuses = {"committed": sorted(self.reconcile.committed), "absent": sorted(self.reconcile.absent)}
            meaning["reconcile"] |= statuses
        return content_hash(meaning)


_FINGERPRINTED: Final = {
    "url",
    "method",
    "version",
    "effect",
    "idempotency",
    "key_header",
    "key_quoted",
    "headers",
    "auth",
    "input_schema",
    "output_schema",
    "rules",
    "reconcile",
}


class CatalogFile(Model):
    """The shape of ``tools.toml`` (``redrive schema tools``)."""

    tools: dict[str, dict[str, JsonValue]]


class Catalog(Model):
    """All tools by name."""

    tools: dict[str, Tool]

    def get(self, name: str) -> Tool | None:
        """The tool of that name, or None."""
        return self.tools.get(name)


class CatalogError(Exception):
    """The catalog is not usable; ``problems`` names every problem with its place."""

    def __init__(self, source: str, problems: list[str]) -> None:
        self.source = source
        self.problems = problems
        super().__init__(f"{source}: " + "\n  ".join(["", *problems] if len(problems) > 1 else problems))


def load_catalog(path: Path) -> Catalog:
    """Reads the catalog at a path; schemas given as paths are relative to its folder.

    Raises:
        CatalogError: it is not there, not TOML, or has problems; every one is named with its place.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise CatalogError(str(path), [f"cannot be read: {reason} (set REDRIVE_TOOLS to your catalog)"]) from error
    try:
        data = tomllib.loads(content.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CatalogError(str(path), [f"not TOML: {error}"]) from error
    return read_catalog(data, source=str(path), folder=path.parent)


def read_catalog(data: Mapping[str, Any], source: str = "tools.toml", folder: Path | None = None) -> Catalog:
    """Checks a catalog that has been read already; see `load_catalog`."""
    problems = [f'{key}: unknown table; tools stand under [tools."NAME"]' for key in data if key != "tools"]
    entries = data.get("tools")
    if not isinstance(entries, dict) or not entries:
        raise CatalogError(source, [*problems, 'tools: no tool is defined; begin with [tools."NAME"]'])
    tools: dict[str, Tool] = {}
    for name, entry in entries.items():
        where = f'tools."{name}"'
        if problem := problem_with_tool_name(name):
            problems.append(f"{where}: {problem}")
            continue
        if not isinstance(entry, dict):
            problems.append(f"{where}: a tool is a table, not {tell(entry)}")
            continue
        if (inner := _dotted(entry)) is not None:
            problems.append(f'{where}.{inner}: unknown field; a name with a dot is quoted: [tools."{name}.{inner}"]')
            continue
        fields, unreadable = _with_schemas(entry, folder)
        problems += [f"{where}.{problem}" for problem in unreadable]
        try:
            tools[name] = Tool(**(fields | {"name": name}))
        except ValidationError as error:
            problems += [
                f"{where}.{problem}" if ":" in problem else f"{where}: {problem}" for problem in problems_of(error)
            ]
        if "name" in entry:
            problems.append(f"{where}.name: unknown field; the table's own name is the tool's")
    if problems:
        raise CatalogError(source, problems)
    return Catalog(tools=tools)


def _with_schemas(entry: dict[str, Any], folder: Path | None) -> tuple[dict[str, Any], list[str]]:
    """Reads the schemas that are given as file paths; also says which could not be read."""
    entry = dict(entry)
    problems = []
    for field in ("input_schema", "output_schema"):
        if isinstance(entry.get(field), str):
            path = (folder or Path()) / entry[field]
            try:
                entry[field] = json.loads(path.read_text("utf-8"))
            except (OSError, ValueError, RecursionError) as error:
                problems.append(f"{field}: cannot read {path}: {error}")
                del entry[field]
    return entry, problems


def _dotted(entry: Mapping[str, Any]) -> str | None:
    """What stands within a tool, and is one itself: TOML takes the dot of an unquoted name for a table within."""
    unknown = (key for key, value in entry.items() if key not in Tool.model_fields and isinstance(value, dict))
    return next((key for key in unknown if "url" in entry[key]), None)


def placeholders(url: str) -> list[str]:
    """The names of the ``{field}`` placeholders of a URL, in order."""
    return PLACEHOLDER.findall(url)


def _check_url(url: str) -> str:
    names = placeholders(url)
    bare = PLACEHOLDER.sub("x", url)
    if "{" in bare or "}" in bare or not all(names):
        raise ValueError("a placeholder is {field}, with the name of an input's field")
    try:
        parts = urlsplit(bare)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError("a URL begins with http:// or https:// and a host")
    if port == 0:
        raise ValueError("not a URL: port 0")
    if parts.username is not None or parts.password is not None:
        raise ValueError("no user name or password in a URL: use auth, which reads the environment")
    if parts.fragment:
        raise ValueError("a fragment (#…) is never sent")
    if PLACEHOLDER.search(url.split("://", 1)[1].split("/", 1)[0].split("?", 1)[0]):
        raise ValueError("placeholders stand in the path or the query, never in the host")
    if not url.isprintable() or " " in url:
        raise ValueError("not a URL: it holds blanks or control characters")
    return url


def _check_pointer(pointer: str) -> str:
    if not is_pointer(pointer):
        raise ValueError('not a JSON Pointer (RFC 6901), such as "/result/id"')
    return pointer


def is_header_value(text: str) -> bool:
    """Whether a text can be sent as a header's value (RFC 9110 section 5.5, less what only obsolete senders use)."""
    return text.isascii() and text.isprintable() and text == text.strip()


def _check_json(value: JsonValue) -> JsonValue:
    if problem := json_problem(value):
        raise ValueError(problem)
    return value


def _check_header_name(name: str) -> None:
    if not _HEADER_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a header's name")
    if name.lower() in _OURS:
        raise ValueError(f"{name} is set by redrive itself")
