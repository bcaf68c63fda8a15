"""A tool's fingerprint: what changes what a call means changes it, and nothing else does."""

import tomllib
from typing import Any

import pytest

from contracts.tools import read_catalog

BASE: dict[str, Any] = {
    "url": "https://tool.example/v1/{sku}",
    "idempotency": "key",
    "dedupe_window": "24h",
    "headers": {"x-a": "1", "x-b": "2"},
    "auth": {"bearer_env": "TOKEN"},
    "input_schema": {"type": "object", "required": ["sku"], "properties": {"sku": {"type": "string"}}},
    "output_schema": {"type": "object"},
    "reconcile": {"url": "https://tool.example/operations/{idempotency_key}"},
    "rules": [
        {"status": 409, "category": "TRANSIENT"},
        {"pointer": "/ok", "equals": False, "category": "INVALID_INPUT", "side_effect": "NONE"},
    ],
}


def fingerprint(**changes: Any) -> str:
    return read_catalog({"tools": {"t": BASE | changes}}).tools["t"].fingerprint


CHANGES: list[dict[str, Any]] = [
    {"url": "https://tool.example/v2/{sku}"},
    {"method": "PUT"},
    {"version": "2"},
    {"effect": "read"},
    {"idempotency": "none", "dedupe_window": None},
    {"key_header": "X-Request-Id"},
    {"key_quoted": True},
    {"headers": {"x-a": "1"}},
    {"headers": {"x-a": "1", "x-b": "3"}},
    {"auth": {"bearer_env": "OTHER_TOKEN"}},
    {"auth": {"header": "x-api-key", "env": "TOKEN"}},
    {"auth": None},
    {"input_schema": True},
    {"input_schema": {"type": "object", "required": ["sku"], "properties": {"sku": {"type": "number"}}}},
    {"output_schema": {"type": "array"}},
    {"reconcile": None},
    {"reconcile": {"url": "https://tool.example/operations/{operation_id}"}},
    {"reconcile": BASE["reconcile"] | {"committed": [200, 201]}},
    {"reconcile": BASE["reconcile"] | {"absent": [404, 410]}},
    {"reconcile": BASE["reconcile"] | {"output": "/result"}},
    {"rules": []},
    {"rules": BASE["rules"][::-1]},
    {"rules": [BASE["rules"][0] | {"side_effect": "NONE"}, BASE["rules"][1]]},
    {"rules": [BASE["rules"][0], BASE["rules"][1] | {"equals": None}]},
    {"rules": [BASE["rules"][0], BASE["rules"][1] | {"equals": 0}]},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_what_changes_what_a_call_means_changes_the_fingerprint(change: dict[str, Any]) -> None:
    kept = {name: value for name, value in (BASE | change).items() if value is not None}
    assert read_catalog({"tools": {"t": kept}}).tools["t"].fingerprint != fingerprint()


def test_no_two_changes_look_alike() -> None:
    found = {
        read_catalog({"tools": {"t": {k: v for k, v in (BASE | change).items() if v is not None}}})
        .tools["t"]
        .fingerprint
        for change in CHANGES
    }
    assert len(found) == len(CHANGES)


@pytest.mark.parametrize(
    "change",
    [
        {"timeout": "5s"},
        {"dedupe_window": "48h"},
        {"max_response_bytes": 1},
        {"concurrency": 1},
        {"rate_per_second": 5},
        {"max_redrives": 0},
        {"approval": "required"},
        {"retry": {"TRANSIENT": {"attempts": 1}}},
        # What is the default may be written down or left out.
        {"method": "POST"},
        {"version": "1"},
        {"effect": "write"},
        {"key_header": "Idempotency-Key"},
        {"key_quoted": False},
        {"reconcile": BASE["reconcile"] | {"committed": [200], "absent": [404], "output": ""}},
        # The order of keys means nothing.
        {"headers": {"x-b": "2", "x-a": "1"}},
        {"input_schema": {"properties": {"sku": {"type": "string"}}, "required": ["sku"], "type": "object"}},
        {"rules": [dict(reversed(rule.items())) for rule in BASE["rules"]]},
    ],
    ids=str,
)
def test_what_does_not_change_what_a_call_means_leaves_the_fingerprint(change: dict[str, Any]) -> None:
    assert fingerprint(**change) == fingerprint()


def test_neither_a_name_nor_comments_nor_the_order_of_lines_changes_the_fingerprint() -> None:
    one = '[tools.a]\nurl = "https://tool.example/"\nmethod = "PUT"\n[tools.a.headers]\nx = "1"\n'
    other = '# comment\n[tools.b]\nmethod = "PUT" # more\nheaders = { x = "1" }\n\nurl = "https://tool.example/"\n'
    first = read_catalog(tomllib.loads(one)).tools["a"]
    second = read_catalog(tomllib.loads(other)).tools["b"]
    assert first.fingerprint == second.fingerprint


def test_a_secrets_value_is_nowhere_near_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint()
    monkeypatch.setenv("TOKEN", "another secret")
    assert fingerprint() == before


def test_the_fingerprint_of_a_plain_tool_never_changes() -> None:
    # Parked dead letters hold it for months: a release that computed it anew would refuse all their redrives.
    found = read_catalog({"tools": {"t": {"url": "https://tool.example/"}}}).tools["t"]
    assert found.fingerprint == "sha256:99ca949911c4e7a49b16ae96c444b15d99d39c7c66fd981f0934168f0f5caa98"
