"""The command line itself: what it takes, and what it refuses before anything is asked."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cli.errors import UsageError
from cli.main import app

COMMANDS = {
    "dev": [],
    "worker": [],
    "setup": [],
    "schema": [],
    "run": ["start", "show", "watch", "cancel", "list"],
    "dlq": ["list", "groups", "show", "check", "redrive", "discard", "resolve", "reconcile"],
    "ledger": ["show", "list", "prune"],
    "demo": [],
    "tools": ["check"],
}


def invoke(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


@pytest.mark.parametrize("noun", COMMANDS)
def test_every_command_explains_itself(noun: str) -> None:
    assert invoke(noun, "--help").exit_code == 0
    for verb in COMMANDS[noun]:
        assert invoke(noun, verb, "--help").exit_code == 0


def test_the_version_is_told() -> None:
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.output.startswith("redrive ")


@pytest.mark.parametrize("kind", ["run", "tools", "decision"])
def test_a_schema_is_json_and_nothing_else(kind: str) -> None:
    result = invoke("schema", kind)
    assert result.exit_code == 0
    assert "$schema" in json.loads(result.stdout)


@pytest.mark.parametrize(
    "arguments",
    [
        ["nope"],
        ["run"],
        ["run", "start", "run.json"],
        ["schema", "nope"],
        ["run", "list", "--limit", "0"],
        ["dlq", "redrive", "order-1/charge"],
        ["dlq", "discard", "order-1/charge", "--by", "bob"],
        ["dlq", "resolve", "order-1/charge", "--reason", "x"],
        ["dlq", "resolve", "order-1/charge", "--output", "{}"],
        ["dlq", "redrive", "order-1/charge", "--reason", "x", "--if-redrives", "-1"],
        ["ledger", "list", "--state", "nope"],
        ["ledger", "prune"],
        ["dev", "--port", "70000"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    assert invoke(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "show", "a/b"], "no '/'"),
        (["run", "watch", ""], "1 to 200 characters"),
        (["run", "cancel", "a\nb"], "no control characters"),
        (["dlq", "show", "order-1"], "RUN_ID/NODE_ID"),
        (["dlq", "discard", "order-1/a b", "--reason", "x"], "a node id is"),
        (["dlq", "list", "--since", "yesterday"], "--since: not a duration"),
        (["dlq", "groups", "--since", "yesterday"], "--since: not a duration"),
        (["ledger", "prune", "--older-than", "long"], "--older-than: not a duration"),
        (["ledger", "show", "order-1/charge"], "RUN_ID/NODE_ID/LOGICAL_ATTEMPT"),
        (["dlq", "redrive", "order-1/charge", "--reason", "x", "--input", "nope.json"], "cannot read"),
        (["dlq", "redrive", "order-1/charge", "--reason", "x", "--approval", "{"], "not JSON"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_before_anything_is_asked(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:1")
    result = invoke(*arguments)
    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)


@pytest.mark.parametrize("text", ["[]", '"x"', "7"])
def test_a_run_is_a_json_object(text: str) -> None:
    result = invoke("run", "start", "-", "--id", "order-1", stdin=text)
    assert isinstance(result.exception, UsageError)
    assert "JSON object" in str(result.exception)


def test_a_good_catalog_shows_its_tools_and_a_bad_one_all_its_problems(tmp_path: Path) -> None:
    good = tmp_path / "good.toml"
    good.write_text('[tools.charge]\nurl = "https://example.com"\nauth = { bearer_env = "NO_SUCH_VARIABLE" }\n')
    result = invoke("tools", "check", str(good), "--json")
    assert result.exit_code == 0
    tool = json.loads(result.stdout)[0]
    assert (tool["name"], tool["missing_environment"]) == ("charge", ["NO_SUCH_VARIABLE"])
    assert "NO_SUCH_VARIABLE" in result.stderr
    bad = tmp_path / "bad.toml"
    bad.write_text('[tools.a]\nurl = "ftp://x"\n[tools.b]\n')
    result = invoke("tools", "check", str(bad))
    assert 'tools."a".url' in str(result.exception)
    assert 'tools."b".url' in str(result.exception)
