"""The schemas take what the readers take, and refuse what they refuse."""

import tomllib
from typing import Any

import jsonschema
import pytest

from cli.schema import decision_schema, run_schema, tools_schema
from contracts.dead_letters import DECISIONS, Action, MalformedDecisionError, parse_decision
from contracts.runs import InvalidRunError, parse_run
from contracts.tools import CatalogError, read_catalog

RUN: dict[str, Any] = {
    "nodes": [
        {"id": "reserve", "tool": "inventory.reserve", "input": {"sku": "A-1", "quantity": 2}},
        {
            "id": "charge",
            "tool": "payments.charge",
            "input": {"amount": 1999, "reservation": {"$output": "reserve", "pointer": "/id"}},
            "approval": {"id": "apr-7", "granted_by": "alice", "expires_at": "2027-01-01T00:00:00Z"},
        },
        {
            "id": "mail",
            "tool": "mail.send",
            "after": ["charge"],
            "input": {"to": "a@example.com"},
            "on_discard": "continue",
            "deadline_seconds": 3600,
        },
    ],
    "max_parallel": 100,
    "node_mode": "workflow",
    "correlation_id": "req-77",
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
}

TOOLS = """
[tools."payments.charge"]
url = "https://pay.example.com/v1/charges"
method = "POST"
version = "1"
effect = "write"
idempotency = "key"
key_header = "Idempotency-Key"
key_quoted = false
dedupe_window = "24h"
timeout = "30s"
max_response_bytes = 1048576
concurrency = 20
rate_per_second = 50
headers = { "x-api-version" = "2026-01" }
auth = { bearer_env = "PAYMENTS_TOKEN" }
input_schema = { type = "object", required = ["amount"] }
output_schema = { type = "object", required = ["id"] }
approval = "required"
max_redrives = 10

[tools."payments.charge".reconcile]
url = "https://pay.example.com/v1/operations/{idempotency_key}"
committed = [200]
absent = [404]
output = "/result"
absent_after = "60s"

[[tools."payments.charge".rules]]
status = 409
category = "TRANSIENT"
side_effect = "NONE"

[[tools."payments.charge".rules]]
status = 200
pointer = "/ok"
equals = false
category = "INVALID_INPUT"
side_effect = "NONE"

[tools."payments.charge".retry.TRANSIENT]
initial = "1s"
backoff = 2.0
maximum = "30s"
attempts = 6
"""

DECISION = {"decided_by": "bob", "reason": "card limit raised"}


def fits(schema: dict[str, Any], value: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


@pytest.mark.parametrize("schema", [run_schema(), tools_schema(), decision_schema()], ids=["run", "tools", "decision"])
def test_each_is_a_schema_of_its_draft(schema: dict[str, Any]) -> None:
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(schema)


def test_the_contracts_run_fits() -> None:
    parse_run("order-1042", [RUN])
    assert fits(run_schema(), RUN)


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": []},
        {"nodes": [{"id": "a b", "tool": "t"}]},
        {"nodes": [{"id": "a", "tool": "t/x"}]},
        {"nodes": [{"id": "a"}]},
        {"nodes": [{"id": "a", "tool": "t", "on_discard": "ignore"}]},
        {"nodes": [{"id": "a", "tool": "t", "deadline_seconds": 0}]},
        {"nodes": [{"id": "a", "tool": "t", "retries": 3}]},
        {"max_parallel": 0},
        {"node_mode": "slow"},
        {"correlation_id": "with blank"},
        {"traceparent": "yes"},
        {"name": "x"},
    ],
    ids=str,
)
def test_a_run_that_is_refused_does_not_fit(change: dict[str, Any]) -> None:
    spec = RUN | change
    assert not fits(run_schema(), spec)
    with pytest.raises(InvalidRunError):
        parse_run("order-1042", [spec])


def test_the_contracts_catalog_fits() -> None:
    data = tomllib.loads(TOOLS)
    read_catalog(data)
    assert fits(tools_schema(), data)


@pytest.mark.parametrize(
    "tool",
    [
        {},
        {"url": "ftp://example.com/x"},
        {"url": "https://example.com/x", "name": "x"},
        {"url": "https://example.com/x", "timeout": 30},
        {"url": "https://example.com/x", "timeout": "30"},
        {"url": "https://example.com/x", "method": "TRACE"},
        {"url": "https://example.com/x", "auth": {"bearer_env": "A", "header": "b", "env": "C"}},
        {"url": "https://example.com/x", "auth": {"header": "b"}},
        {"url": "https://example.com/x", "rules": [{"category": "TRANSIENT"}]},
        {"url": "https://example.com/x", "rules": [{"status": "40x", "category": "TRANSIENT"}]},
        {"url": "https://example.com/x", "rules": [{"pointer": "/ok", "category": "TRANSIENT"}]},
        {"url": "https://example.com/x", "retry": {"PERMISSION": {"attempts": 2}}},
        {"url": "https://example.com/x", "reconcile": {"committed": [200]}},
    ],
    ids=str,
)
def test_a_tool_that_is_refused_does_not_fit(tool: dict[str, Any]) -> None:
    data = {"tools": {"t": tool}}
    assert not fits(tools_schema(), data)
    with pytest.raises(CatalogError):
        read_catalog(data)


def test_a_catalog_needs_a_tool_with_a_usable_name() -> None:
    wrong: list[dict[str, Any]] = [
        {},
        {"tools": {}},
        {"tools": {"a b": {"url": "https://example.com"}}},
        {"tools": {}, "x": 1},
    ]
    for data in wrong:
        assert not fits(tools_schema(), data)


def test_a_schema_may_be_a_files_path() -> None:
    assert fits(tools_schema(), {"tools": {"t": {"url": "https://example.com", "input_schema": "charge.json"}}})


def test_defaults_are_written_as_the_catalog_writes_them() -> None:
    properties = tools_schema()["$defs"]["Tool"]["properties"]
    for field in properties.values():
        if isinstance(field.get("default"), str) and "pattern" in field:
            assert fits(field, field["default"])
    assert properties["timeout"]["default"] == "30s"


def test_there_is_a_definition_for_each_decision() -> None:
    schema = decision_schema()
    assert set(DECISIONS) <= set(schema["$defs"])
    assert fits(schema, DECISION)


@pytest.mark.parametrize(
    ("action", "payload"),
    [
        ("redrive", DECISION),
        ("redrive", DECISION | {"input": None, "new_operation": True, "override": ["REDRIVE_LIMIT"]}),
        ("redrive", DECISION | {"approval": {"id": "a", "granted_by": "alice"}, "if_redrives": 0, "decision_id": "d"}),
        ("discard", DECISION),
        ("resolve", DECISION | {"output": {"id": 1}}),
        ("reconcile", {"decided_by": "bob"}),
        ("check", {}),
    ],
    ids=str,
)
def test_a_decision_that_is_taken_fits(action: str, payload: dict[str, Any]) -> None:
    schema = decision_schema()
    parse_decision(Action(action), [payload])
    assert fits({"$ref": f"#/$defs/{action}", "$defs": schema["$defs"]}, payload)


@pytest.mark.parametrize(
    ("action", "payload"),
    [
        ("redrive", {"reason": "x"}),
        ("redrive", DECISION | {"override": ["RUN_CLOSED"]}),
        ("redrive", DECISION | {"override": ["NOPE"]}),
        ("redrive", DECISION | {"output": 1}),
        ("redrive", DECISION | {"if_redrives": -1}),
        ("discard", {"decided_by": "bob"}),
        ("discard", {"decided_by": "", "reason": "x"}),
        ("resolve", DECISION),
        ("reconcile", {}),
        ("check", {"who": "bob"}),
    ],
    ids=str,
)
def test_a_malformed_decision_does_not_fit(action: str, payload: dict[str, Any]) -> None:
    schema = decision_schema()
    assert not fits({"$ref": f"#/$defs/{action}", "$defs": schema["$defs"]}, payload)
    with pytest.raises(MalformedDecisionError):
        parse_decision(Action(action), [payload])
