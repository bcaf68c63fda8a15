"""tools.toml: what loads, and every kind of mistake, named with its place before anything is polled."""

import json
import math
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from contracts.base import Json
from contracts.failures import POLICIES, Category, SideEffect
from contracts.schemas import schema_problems
from contracts.tools import (
    Approval,
    Catalog,
    CatalogError,
    Effect,
    Idempotency,
    Tool,
    load_catalog,
    parse_duration,
    placeholders,
    read_catalog,
)
from tests.unit.json_values import any_json

CONTRACT = """
[tools."payments.charge"]
url = "https://pay.example.com/v1/charges"   # {field} placeholders are filled from the input, percent-encoded
method = "POST"                # default; GET and DELETE send the rest of the input as the query
version = "1"
effect = "write"               # "read": repeating it harms nothing
idempotency = "key"            # the remote dedupes by key; "none": it does not
key_header = "Idempotency-Key" # default
key_quoted = false             # true: a Structured Field string, as the IETF draft has it
dedupe_window = "24h"
timeout = "30s"                # for one whole attempt
max_response_bytes = 1048576
concurrency = 20               # at once, per worker
rate_per_second = 50           # across the whole task queue
headers = { "x-api-version" = "2026-01" }
auth = { bearer_env = "PAYMENTS_TOKEN" }     # or { header = "x-api-key", env = "PAYMENTS_KEY" }
input_schema = { type = "object", required = ["amount"] }   # JSON Schema inline, or a file path
output_schema = { type = "object", required = ["id"] }
approval = "required"          # default "optional"
max_redrives = 10

[tools."payments.charge".reconcile]
url = "https://pay.example.com/v1/operations/{idempotency_key}"   # also {operation_id}, and fields of the input
committed = [200]              # statuses that mean: it happened
absent = [404]                 # it did not; anything else is no answer, and is asked again
output = "/result"             # JSON Pointer to the result in a committed answer
absent_after = "60s"           # default: timeout. How long after an attempt's timeout the remote may still act

[[tools."payments.charge".rules]]            # first match wins, before the classification table
status = 409                                 # any of: status (200, "4xx"), header + equals, pointer + equals
category = "TRANSIENT"                       # or "SUCCESS"
side_effect = "NONE"

[[tools."payments.charge".rules]]
status = 200                                 # an error sent as a success
pointer = "/ok"
equals = false
category = "INVALID_INPUT"
side_effect = "NONE"

[tools."payments.charge".retry.TRANSIENT]    # overrides of the policy, per category
initial = "1s"
backoff = 2.0
maximum = "30s"
attempts = 6
"""
"""The contract's own example."""


def catalog_of(entry: dict[str, Any]) -> Catalog:
    return read_catalog({"tools": {"t": {"url": "https://tool.example/"} | entry}})


def tool(**entry: Any) -> Tool:
    return catalog_of(entry).tools["t"]


def problems(data: dict[str, Any]) -> list[str]:
    with pytest.raises(CatalogError) as caught:
        read_catalog(data)
    return caught.value.problems


# What loads.


def test_the_contracts_example_loads(tmp_path: Path) -> None:
    path = tmp_path / "tools.toml"
    path.write_text(CONTRACT)
    found = load_catalog(path).get("payments.charge")
    assert found is not None
    assert (found.effect, found.idempotency, found.approval) == (Effect.WRITE, Idempotency.KEY, Approval.REQUIRED)
    assert (found.dedupe_window, found.timeout, found.absent_after) == (
        timedelta(hours=24),
        timedelta(seconds=30),
        timedelta(seconds=60),
    )
    assert found.auth is not None
    assert found.auth.variable == "PAYMENTS_TOKEN"
    assert [str(rule.category) for rule in found.rules] == ["TRANSIENT", "INVALID_INPUT"]
    assert found.policy(Category.TRANSIENT) == POLICIES[Category.TRANSIENT]


def test_a_tool_needs_no_more_than_its_url() -> None:
    found = tool()
    assert (found.method, found.version, found.effect, found.idempotency) == ("POST", "1", "write", "none")
    assert (found.key_header, found.key_quoted, found.dedupe_window) == ("Idempotency-Key", False, None)
    assert (found.timeout, found.absent_after) == (timedelta(seconds=30), timedelta(seconds=30))
    assert (found.max_response_bytes, found.concurrency, found.rate_per_second) == (1024 * 1024, 20, None)
    assert (found.approval, found.max_redrives, found.reconcile, found.rules) == ("optional", 10, None, [])


def test_an_unknown_tool_is_none() -> None:
    assert catalog_of({}).get("other") is None


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("250ms", timedelta(milliseconds=250)),
        ("30s", timedelta(seconds=30)),
        ("5m", timedelta(minutes=5)),
        ("24h", timedelta(hours=24)),
        ("30d", timedelta(days=30)),
        ("007s", timedelta(seconds=7)),
    ],
)
def test_a_duration_is_a_number_and_a_unit(text: str, duration: timedelta) -> None:
    assert parse_duration(text) == duration


@pytest.mark.parametrize(
    "text",
    [
        "",
        "30",
        "s",
        "30 s",
        " 30s",
        "1.5s",
        "-1s",
        "+1s",
        "1w",
        "1S",
        "1h30m",
        "\u0661\u0662s",
        "²s",
        "1s\n",
        30,
        None,
        True,
    ],
)
def test_nothing_else_is_a_duration(text: object) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["999999999d", "4000d"])
def test_a_duration_too_long_to_reckon_with_is_refused(text: str) -> None:
    (problem,) = problems({"tools": {"t": {"url": "https://tool.example/", "timeout": text}}})
    assert problem.startswith('tools."t".timeout: longer than')


def test_what_a_tool_overrides_of_a_policy_and_leaves_out() -> None:
    found = tool(retry={"TRANSIENT": {"attempts": 2}, "RATE_LIMITED": {"initial": "1s", "backoff": 3}})
    transient, limited = found.policy(Category.TRANSIENT), found.policy(Category.RATE_LIMITED)
    assert transient == POLICIES[Category.TRANSIENT].model_copy(update={"attempts": 2})
    assert limited is not None
    assert (limited.initial, limited.backoff, limited.attempts) == (timedelta(seconds=1), 3, 10)
    assert found.policy(Category.DEPENDENCY_DOWN) == POLICIES[Category.DEPENDENCY_DOWN]
    assert found.policy(Category.PERMISSION) is None


def test_a_tool_may_wait_longer_or_shorter_than_the_policy_ever_does() -> None:
    longer = tool(retry={"TRANSIENT": {"initial": "2m"}}).policy(Category.TRANSIENT)
    assert longer is not None
    assert longer.wait_after(1, 0) == timedelta(minutes=2)
    shorter = tool(retry={"TRANSIENT": {"maximum": "500ms"}}).policy(Category.TRANSIENT)
    assert shorter is not None
    assert shorter.wait_after(5, 0) == timedelta(milliseconds=500)


def test_placeholders_are_found_in_order() -> None:
    assert placeholders("https://tool.example/{a}/{b}?c={a}") == ["a", "b", "a"]


# Mistakes.

MISTAKES: list[tuple[dict[str, Any], list[str]]] = [
    ({"url": "tool.example"}, ["url: a URL begins with http:// or https:// and a host"]),
    ({"url": "ftp://tool.example/"}, ["url: a URL begins with"]),
    ({"url": "https://"}, ["url: a URL begins with"]),
    ({"url": "https://me:secret@tool.example/"}, ["url: no user name or password in a URL"]),
    ({"url": "https://tool.example/#x"}, ["url: a fragment"]),
    ({"url": "https://{host}/"}, ["url: placeholders stand in the path or the query"]),
    ({"url": "https://tool.example/{}"}, ["url: a placeholder is {field}"]),
    ({"url": "https://tool.example/{a"}, ["url: a placeholder is {field}"]),
    ({"url": "https://tool.example:99999/"}, ["url: not a URL"]),
    ({"url": "https://tool.example/a b"}, ["url: not a URL"]),
    ({"url": "https://[::1/"}, ["url: not a URL"]),
    ({"url": 5}, ["url: "]),
    ({"method": "post"}, ["method: "]),
    ({"method": "HEAD"}, ["method: "]),
    ({"version": 1}, ["version: "]),
    ({"effect": "none"}, ["effect: "]),
    ({"idempotency": "yes"}, ["idempotency: "]),
    ({"key_header": "a b"}, ["key_header: 'a b' is not a header's name"]),
    ({"key_header": "Host"}, ["key_header: Host is set by redrive itself"]),
    ({"key_header": "Authorization"}, ["key_header: Authorization is already used"]),
    ({"key_header": "X-A", "headers": {"x-a": "1"}}, ["key_header: X-A is already used"]),
    ({"key_quoted": "yes"}, ["key_quoted: "]),
    ({"key_quoted": 1}, ["key_quoted: "]),
    ({"dedupe_window": "24h"}, ["dedupe_window: only a tool with idempotency"]),
    ({"dedupe_window": "0s", "idempotency": "key"}, ["dedupe_window: "]),
    ({"timeout": "0s"}, ["timeout: Input should be greater than 0 seconds"]),
    ({"send": {"url": "https://tool.example/"}}, ["send: unknown field; a name with a dot is quoted: [tools."]),
    ({"timeout": 30}, ["timeout: not a duration"]),
    ({"max_response_bytes": 0}, ["max_response_bytes: "]),
    ({"concurrency": 0}, ["concurrency: "]),
    ({"concurrency": "20"}, ["concurrency: "]),
    ({"concurrency": True}, ["concurrency: "]),
    ({"rate_per_second": 0}, ["rate_per_second: "]),
    ({"rate_per_second": "5"}, ["rate_per_second: "]),
    ({"rate_per_second": math.inf}, ["rate_per_second: "]),
    ({"rate_per_second": math.nan}, ["rate_per_second: "]),
    ({"max_redrives": -1}, ["max_redrives: "]),
    ({"approval": True}, ["approval: "]),
    ({"headers": {"a b": "x"}}, ["headers: 'a b' is not a header's name"]),
    ({"headers": {"x": "ü"}}, ["headers: x: "]),
    ({"headers": {"x": "a\nb"}}, ["headers: x: "]),
    ({"headers": {"x": " a"}}, ["headers: x: "]),
    ({"headers": {"x": 5}}, ["headers.x: "]),
    ({"headers": {"traceparent": "x"}}, ["headers: traceparent is set by redrive itself"]),
    ({"headers": {"X-A": "1", "x-a": "2"}}, ["headers: "]),
    ({"headers": {"Authorization": "x"}, "auth": {"bearer_env": "A"}}, [""]),
    ({"auth": {}}, ["auth: write either"]),
    ({"auth": {"bearer_env": "A", "header": "x", "env": "B"}}, ["auth: write either"]),
    ({"auth": {"header": "x-api-key"}}, ["auth: write either"]),
    ({"auth": {"bearer_env": "not a name"}}, ["auth: the name of an environment variable"]),
    ({"auth": {"header": "x y", "env": "A"}}, ["auth: 'x y' is not a header's name"]),
    ({"auth": {"header": "X-A", "env": "A"}, "headers": {"x-a": "1"}}, ["auth: the header x-a is already used"]),
    ({"auth": {"token": "hunter2"}}, ["auth.token: unknown field"]),
    ({"auth": "hunter2"}, ["auth: "]),
    ({"input_schema": {"type": "strin"}}, ["input_schema: not a JSON Schema: $.type: "]),
    ({"output_schema": {"pattern": "("}}, ["output_schema: not a JSON Schema: $.pattern: "]),
    ({"input_schema": {"properties": {"a": {"minimum": "1"}}}}, ["input_schema: not a JSON Schema: $.properties.a.m"]),
    ({"input_schema": {"$ref": "#/$defs/missing"}}, ["input_schema: not a JSON Schema: $ref '#/$defs/missing' leads"]),
    (
        {"input_schema": {"items": {"$ref": "https://tool.example/x"}}},
        ["input_schema: not a JSON Schema: $ref 'https:"],
    ),
    ({"input_schema": {"$schema": "https://tool.example/x"}}, ["input_schema: not a JSON Schema: $schema names no"]),
    ({"input_schema": {"$schema": []}}, ["input_schema: not a JSON Schema: "]),
    ({"input_schema": {"maximum": math.inf}}, ["input_schema: "]),
    ({"output_schema": {"const": math.nan}}, ["output_schema: "]),
    ({"input_schema": 5}, ["input_schema: "]),
    ({"input_schema": []}, ["input_schema: "]),
    ({"input_schema": "missing.json"}, ["input_schema: cannot read missing.json"]),
    ({"reconcile": {}}, ["reconcile.url: required, but missing"]),
    ({"reconcile": {"url": "x"}}, ["reconcile.url: a URL begins with"]),
    ({"reconcile": {"url": "https://tool.example/ok"}}, ["reconcile.url: it has to say which operation is meant"]),
    ({"reconcile": {"url": "https://tool.example/{operation_id}", "committed": []}}, ["reconcile.committed: "]),
    ({"reconcile": {"url": "https://tool.example/{operation_id}", "committed": ["200"]}}, ["reconcile.committed[0]: "]),
    ({"reconcile": {"url": "https://tool.example/{operation_id}", "committed": [9999]}}, ["reconcile.committed"]),
    ({"reconcile": {"url": "https://tool.example/{operation_id}", "absent": [0]}}, ["reconcile.absent"]),
    (
        {"reconcile": {"url": "https://tool.example/{operation_id}", "absent": [200]}},
        ["reconcile: status 200 cannot mean both"],
    ),
    (
        {"reconcile": {"url": "https://tool.example/{operation_id}", "output": "id"}},
        ["reconcile.output: not a JSON Pointer"],
    ),
    (
        {"reconcile": {"url": "https://tool.example/{operation_id}", "absent_after": "soon"}},
        ["reconcile.absent_after: not a duration"],
    ),
    ({"rules": [{}]}, ["rules[0].category: required, but missing"]),
    ({"rules": {"status": 409}}, ["rules: "]),
    ({"rules": [{"category": "TRANSIENT"}]}, ["rules[0]: a rule needs a condition"]),
    ({"rules": [{"status": 409, "category": "OOPS"}]}, ["rules[0].category: "]),
    ({"rules": [{"status": 999, "category": "TRANSIENT"}]}, ["rules[0].status: "]),
    ({"rules": [{"status": "9xx", "category": "TRANSIENT"}]}, ["rules[0].status: "]),
    ({"rules": [{"status": 4.5, "category": "TRANSIENT"}]}, ["rules[0].status: "]),
    ({"rules": [{"status": True, "category": "TRANSIENT"}]}, ["rules[0].status: "]),
    ({"rules": [{"status": 409, "equals": 1, "category": "TRANSIENT"}]}, ["rules[0]: header and pointer go with"]),
    ({"rules": [{"header": "x", "category": "TRANSIENT"}]}, ["rules[0]: header and pointer go with equals"]),
    ({"rules": [{"header": "x", "equals": 5, "category": "TRANSIENT"}]}, ["rules[0]: a header equals a string"]),
    ({"rules": [{"pointer": "x", "equals": 5, "category": "TRANSIENT"}]}, ["rules[0].pointer: not a JSON Pointer"]),
    ({"rules": [{"pointer": "", "equals": math.nan, "category": "TRANSIENT"}]}, ["rules[0]"]),
    (
        {"rules": [{"pointer": "", "header": "x", "equals": "5", "category": "TRANSIENT"}]},
        ["rules[0]: a rule looks at one header or one pointer"],
    ),
    ({"rules": [{"status": 409, "category": "SUCCESS", "side_effect": "NONE"}]}, ["rules[0]: a success has happened"]),
    ({"rules": [{"status": 409, "category": "TRANSIENT", "side_effect": "MAYBE"}]}, ["rules[0].side_effect: "]),
    ({"retry": {"OOPS": {}}}, ["retry.OOPS: "]),
    ({"retry": {"PERMISSION": {"attempts": 2}}}, ["retry: PERMISSION is never retried by itself"]),
    ({"retry": {"TRANSIENT": {"attempts": 0}}}, ["retry.TRANSIENT.attempts: "]),
    ({"retry": {"TRANSIENT": {"backoff": 0.5}}}, ["retry.TRANSIENT.backoff: "]),
    ({"retry": {"TRANSIENT": {"initial": "0s"}}}, ["retry.TRANSIENT.initial: "]),
    ({"retry": {"TRANSIENT": {"max": "1s"}}}, ["retry.TRANSIENT.max: unknown field"]),
    ({"name": "x"}, ["name: unknown field"]),
    ({"colour": "blue"}, ["colour: unknown field"]),
    (
        {"timeout": "soon", "method": "x", "colour": 1, "retry": {"TRANSIENT": {"attempts": 0}}},
        ["method: ", "timeout: ", "retry.TRANSIENT.attempts: ", "colour: unknown field"],
    ),
    ({"input_schema": "missing.json", "timeout": "soon"}, ["input_schema: cannot read", "timeout: not a duration"]),
]


@pytest.mark.parametrize(("entry", "expected"), MISTAKES, ids=[str(entry)[:60] for entry, _ in MISTAKES])
def test_every_mistake_is_named_with_its_place(entry: dict[str, Any], expected: list[str]) -> None:
    found = problems({"tools": {"t": {"url": "https://tool.example/"} | entry}})
    assert len(found) == len(expected), found
    for problem, beginning in zip(sorted(found), sorted(expected), strict=True):
        assert problem.startswith(f'tools."t".{beginning}' if beginning else 'tools."t"')
        # No problem is in the words of a library.
        assert not any(word in problem for word in ("json-or-python", "str-enum", "literal[", "[key]", "pydantic"))
        assert "hunter2" not in problem


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, ["tools: no tool is defined"]),
        ({"tools": {}}, ["tools: no tool is defined"]),
        ({"tools": 5}, ["tools: no tool is defined"]),
        ({"tool": {"a": {}}}, ["tool: unknown table", "tools: no tool is defined"]),
        ({"tools": {"a b": {}}}, ['tools."a b": a tool name is']),
        ({"tools": {"a": "https://tool.example/"}}, ['tools."a": a tool is a table, not a string']),
        ({"tools": {"a": {}, "b": {"url": "x"}}}, ['tools."a".url: required, but missing', 'tools."b".url: a URL']),
        ({"tools": {"a": {"url": "https://tool.example/"}}, "settings": {}}, ["settings: unknown table"]),
    ],
)
def test_what_is_wrong_with_the_whole_is_named(data: dict[str, Any], expected: list[str]) -> None:
    found = problems(data)
    assert len(found) == len(expected)
    assert all(problem.startswith(beginning) for problem, beginning in zip(found, expected, strict=True))


@given(
    any_json("url", "method", "timeout", "rules", "reconcile", "retry", "input_schema", "$ref", "https://a.example/{x}")
)
def test_no_table_is_another_error(value: Json) -> None:
    found = read({"tools": {"t": value, "u": {"url": "https://tool.example/", "input_schema": value}}})
    if isinstance(found, Catalog):
        assert all(tool.fingerprint for tool in found.tools.values())
    else:
        assert all(problem.startswith('tools."') for problem in found)


def read(data: dict[str, Any]) -> Catalog | list[str]:
    try:
        return read_catalog(data)
    except CatalogError as error:
        return error.problems


# Files.


def test_a_schema_may_be_a_file_beside_the_catalog(tmp_path: Path) -> None:
    (tmp_path / "schemas").mkdir()
    (tmp_path / "schemas" / "in.json").write_text('{"type": "object", "required": ["ü"]}')
    (tmp_path / "tools.toml").write_text('[tools.t]\nurl = "https://tool.example/"\ninput_schema = "schemas/in.json"\n')
    found = load_catalog(tmp_path / "tools.toml").tools["t"]
    assert found.input_schema == {"type": "object", "required": ["ü"]}
    assert found.fingerprint == tool(input_schema={"type": "object", "required": ["ü"]}).fingerprint


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "cannot read"),
        ("\ud800", "cannot read"),
        ('{"type": "strin"}', "not a JSON Schema"),
        ("[" * 100_000, "cannot read"),
        ("5", ""),
    ],
)
def test_a_schema_file_that_is_none_is_named(tmp_path: Path, content: str, expected: str) -> None:
    (tmp_path / "in.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    (tmp_path / "tools.toml").write_text('[tools.t]\nurl = "https://tool.example/"\ninput_schema = "in.json"\n')
    with pytest.raises(CatalogError) as caught:
        load_catalog(tmp_path / "tools.toml")
    (problem,) = caught.value.problems
    assert problem.startswith(f'tools."t".input_schema: {expected}')


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[tools", "not TOML"),
        (b"\xff\xfe", "not TOML"),
        (b"[tools.a]\nurl = 'x'\n[tools.a]\n", "not TOML"),
        (b"a = " + b"[" * 10_000, "not TOML"),
    ],
)
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "tools.toml"
    path.write_bytes(content)
    with pytest.raises(CatalogError, match=expected) as caught:
        load_catalog(path)
    assert str(path) in str(caught.value)


def test_a_catalog_that_is_not_there_is_named_with_the_cure(tmp_path: Path) -> None:
    for path in (tmp_path / "tools.toml", tmp_path):
        with pytest.raises(CatalogError, match="REDRIVE_TOOLS") as caught:
            load_catalog(path)
        assert str(path) in str(caught.value)


# Values against schemas.


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        (True, {"x": 1}, []),
        (False, 1, ["input"]),
        ({"type": "object"}, {}, []),
        ({"type": "object"}, 5, ["input"]),
        ({"properties": {"a": {"items": {"type": "integer"}}}}, {"a": [1, "x", 2, "y"]}, ["input.a[1]", "input.a[3]"]),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "number"}}}, "x", ["input"]),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "string"}]}, [1], ["input[0]"]),
        (
            {"$id": "https://tool.example/s", "$defs": {"n": {"$anchor": "n", "type": "null"}}, "$ref": "#n"},
            1,
            ["input"],
        ),
    ],
)
def test_a_value_that_breaks_a_schema_is_told_where(schema: Any, value: Json, expected: list[str]) -> None:
    found = schema_problems(tool(input_schema=schema).input_schema, value, "input")
    assert sorted(problem.split(":")[0] for problem in found) == expected


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"$ref": "#"}, 1),
        ({"$ref": "#/$defs/missing"}, 1),
        ({"multipleOf": 0.5}, 10**400),
        ({"pattern": "("}, "x"),
        ({"$id": "http://[", "$ref": "x"}, 1),
    ],
)
def test_a_schema_that_cannot_be_applied_is_a_problem_not_an_error(schema: Any, value: Json) -> None:
    assert [problem[:6] for problem in schema_problems(schema, value, "input")] == ["input:"]


@pytest.mark.parametrize(
    "hidden", [5, "x", [], {"type": "nonsense"}, {"required": 5}, {"properties": 5}, {"pattern": "("}, {"items": 5}]
)
@pytest.mark.parametrize("value", [1, "x", {"a": 1}, [1]])
def test_a_schema_in_a_place_where_no_draft_looks_for_one_is_no_error(hidden: Json, value: Json) -> None:
    schema: Any = {"$ref": "#/elsewhere", "elsewhere": hidden}
    try:
        loaded = tool(input_schema=schema)
    except CatalogError:
        return
    assert isinstance(schema_problems(loaded.input_schema, value, "input"), list)


def test_a_schema_somewhere_else_is_not_fetched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"
        assert schema_problems({"$ref": url}, 1, "input")
        assert problems({"tools": {"t": {"url": "https://tool.example/", "input_schema": {"$ref": url}}}})
        with pytest.raises(BlockingIOError):
            server.accept()


def test_what_only_looks_like_a_reference_is_data() -> None:
    for schema in ({"const": {"$ref": "x"}}, {"enum": [{"$ref": "x"}]}, {"properties": {"$ref": {"type": "string"}}}):
        assert tool(input_schema=schema).input_schema == schema
    assert schema_problems({"const": {"$ref": "x"}}, {"$ref": "x"}, "input") == []


def test_problems_are_few_and_short_however_large_the_value() -> None:
    large: list[Json] = ["x" * 100_000] * 100
    found = schema_problems({"items": {"type": "integer"}}, large, "input")
    assert len(found) == 21
    assert found[-1] == "(and more)"
    assert all(len(problem) < 400 for problem in found)


@given(any_json())
def test_no_value_is_an_error_to_a_schema(value: Json) -> None:
    schema: Any = {
        "type": "object",
        "patternProperties": {"^a": {"multipleOf": 0.1}},
        "uniqueItems": True,
        "minItems": 1,
    }
    json.dumps(schema_problems(schema, value, "input"))


def test_a_rule_takes_the_names_of_the_taxonomy() -> None:
    (rule,) = tool(rules=[{"status": 409, "category": "TRANSIENT", "side_effect": "NONE"}]).rules
    assert (str(rule.category), rule.side_effect) == ("TRANSIENT", SideEffect.NONE)
