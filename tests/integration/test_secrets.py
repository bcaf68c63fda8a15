"""A tool's secret, and the alert's address, appear nowhere but on the wire: not even when a tool sends them back."""

import json
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import WorkflowHandle
from temporalio.service import RPCError, RPCStatusCode

from tests.lab import Bench
from tests.tool_server import Call
from tests.waiting import eventually

_SHOWN = 10
"""Even so much of a secret's beginning is too much."""


class Secret:
    """A secret, and the spellings in which tools send it back."""

    def __init__(self, prefix: str, rest: str = "") -> None:
        self.start = f"{prefix}{secrets.token_hex(8)}"
        self.value = self.start + rest

    @property
    def php(self) -> str:
        return json.dumps(self.value).replace("/", r"\/")

    @property
    def go(self) -> str:
        return json.dumps(self.value).replace("<", r"\u003c").replace("&", r"\u0026")

    @property
    def escaped(self) -> str:
        """Every character of it."""
        return '"' + "".join(f"\\u{ord(character):04X}" for character in self.value) + '"'

    def leaks(self, content: bytes) -> str | None:
        """Where it, or its beginning in any spelling, stands in there."""
        for spelling in (self.start[:_SHOWN], self.escaped[1 : 6 * _SHOWN + 1]):
            if (at := content.find(spelling.encode())) >= 0:
                return content[max(at - 80, 0) : at + 80].decode(errors="replace")
        return None


def successes(secret: Secret, key: Secret) -> dict[str, dict[str, Any]]:
    """Tools that succeed, and what they say."""
    said = {"sent": {"authorization": f"Bearer {secret.value}", "x-api-key": key.value}, secret.value: [secret.value]}
    return {
        "echo": {"body": said},
        "php": {"raw_body": f'{{"sent": {secret.php}, "list": [{secret.php}]}}'},
        "go": {"raw_body": f'{{"sent": {secret.go}}}'},
        "escaped": {"raw_body": f'{{"sent": {secret.escaped}}}'},
        "twice": {"raw_body": f"{{{secret.php}: 1, {secret.go}: 2}}"},
        "bare": {"raw_body": secret.php},
    }


def failures(secret: Secret, key: Secret) -> dict[str, dict[str, Any]]:
    """Tools that end in a dead letter, and what they say."""
    said = {"error": f"not you, {secret.value}", "key": key.value}
    bearer = f"Bearer {secret.value}"
    return {
        "denied": {"status": 403, "body": said, "headers": {"WWW-Authenticate": bearer, "X-Request-Id": key.value}},
        "denied-php": {"status": 403, "raw_body": f'{{"sent": {secret.php}}}'},
        "denied-escaped": {"status": 403, "raw_body": f'{{"sent": {secret.escaped}}}'},
        "text": {"status": 400, "raw_body": f"no\n  such {secret.value}", "headers": {"content-type": "text/plain"}},
        "moved": {"status": 302, "raw_body": "", "headers": {"Location": f"https://example.com/?token={secret.value}"}},
        "html": {"status": 500, "raw_body": f"<pre>{bearer}\n{key.value}</pre>"},
        # An excerpt of the body is cut somewhere: not in the middle of a secret.
        "padded": {"status": 403, "raw_body": "x" * 480 + bearer},
        "spaced": {"status": 403, "raw_body": " " * 31_980 + bearer},
        "slow": {"status": 200, "raw_body": f'"{"x" * 57}{bearer}"', "fault": "slow_body", "rate": 400},
        "cut": {"status": 200, "body": said, "fault": "truncated"},
        "not-json": {"status": 200, "raw_body": f"{{{secret.value}}}"},
        "unfit": {"body": {"sent": secret.value, secret.value: 1}},
    }


LIMITS: Mapping[str, dict[str, Any]] = {
    "unfit": {
        "output_schema": {"type": "object", "properties": {"sent": {"enum": ["x"]}}, "additionalProperties": False}
    },
    "slow": {"max_response_bytes": 64},
}


def places(folder: Path) -> dict[str, bytes]:
    """The files of a database, as they are on the disk."""
    return {str(path): path.read_bytes() for path in folder.glob("*.db*")}


async def history(handle: WorkflowHandle[Any, Any]) -> bytes:
    """All events of a workflow, its payloads in them as they are; and as JSON, as it is exported."""
    events = await handle.fetch_history()
    return b"".join(event.SerializeToString() for event in events.events) + events.to_json().encode()


async def everything_of(bench: Bench, runs: Mapping[str, WorkflowHandle[Any, Any]]) -> dict[str, bytes]:
    """What Temporal tells of the runs, their nodes and their dead letters."""
    told: dict[str, bytes] = {}
    for run in runs.values():
        names = (await bench.status(run)).nodes
        ids = [run.id, *(f"{run.id}/{name}{more}" for name in names for more in ("", "/dead-letter"))]
        for workflow_id in ids:
            handle = bench.client.get_workflow_handle(workflow_id)
            try:
                told[f"history of {workflow_id}"] = await history(handle)
            except RPCError as error:
                if error.status is RPCStatusCode.NOT_FOUND:
                    continue  # most nodes have no dead letter
                raise
            queries = ["__temporal_workflow_metadata"]
            queries += ["status"] if workflow_id == run.id else []
            queries += ["entry"] if workflow_id.endswith("/dead-letter") else []
            for query in queries:
                told[f"{query} of {workflow_id}"] = repr(await handle.query(query)).encode()
    return told


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> Secret:
    made = Secret("tkn-", '/+=="<\\&')
    monkeypatch.setenv("SECRETS_TEST_TOKEN", made.value)
    return made


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> Secret:
    made = Secret("key-")
    monkeypatch.setenv("SECRETS_TEST_KEY", made.value)
    return made


async def test_a_secret_is_sent_to_its_tool_and_found_nowhere_else(
    bench: Bench,
    secret: Secret,
    key: Secret,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    caplog.set_level(logging.DEBUG)
    address, marker = Secret("hook-"), Secret("marker-")
    bearer: dict[str, Any] = {"auth": {"bearer_env": "SECRETS_TEST_TOKEN"}}
    good, bad = successes(secret, key), failures(secret, key)
    for name, step in good.items():
        await bench.tool(name, [step], **bearer)
    for name, step in bad.items():
        await bench.tool(name, [step], **bearer, **LIMITS.get(name, {}))
    # Others: a header of its own; a retry in between; an answer that is lost, and told by the reconcile URL.
    await bench.tool(
        "keyed",
        [{"status": 429, "body": {"key": key.value}}, {"body": {"sent": key.value}}],
        auth={"header": "x-api-key", "env": "SECRETS_TEST_KEY"},
    )
    await bench.tool("lost", [{"fault": "fin_after_read", "commit": True, "body": {"sent": secret.value}}], **bearer)
    bench.catalog["lost"]["reconcile"] = {"url": bench.tools.reconcile_url(bench.unique("lost")), "output": "/result"}
    await bench.tools.reconcile_script(bench.unique("lost"), [{"status": 500, "body": {"sent": secret.value}}, {}])
    await bench.tools.script(
        bench.unique("hook"),
        [{"fault": "rst_after_read"}, {"status": 500, "body": {"at": address.value}}, {"body": {"at": address.value}}],
    )
    bench.webhook = f"{bench.tools.tool_url(bench.unique('hook'))}/{address.value}?token={address.value}"

    def node(tool: str) -> dict[str, Any]:
        return {"id": tool, "tool": tool, "input": {"marker": marker.value}, "on_discard": "continue"}

    async with bench.worker():
        run = await bench.start(*(node(name) for name in bench.catalog))
        for number, name in enumerate(bad):
            entry = await bench.parked(run, name)
            assert (entry.side_effect == "NONE") == ("http_" in entry.error.code and name not in ("html", "moved")), (
                name
            )
            await bench.decide(run, name, "check")
            if number % 2:
                await bench.decide(run, name, "discard")
            else:
                await bench.decide(run, name, "resolve", output={"sent": "x"})
        # Every alert arrives in the end, after one was lost and one refused.
        await bench.tools.wait_for(bench.unique("hook"), calls=len(bad) + 2, timeout=60)
        result = await run.result()
        told = await everything_of(bench, {"run": run})
        written = places(bench.folder)
    found = {
        **told,
        **written,
        **{name: content for path in _temporal(tmp_path_factory) for name, content in places(path).items()},
        "result": json.dumps(result).encode(),
        "logs": (caplog.text + "".join(capfd.readouterr())).encode(),
    }

    leaks = {
        name: where
        for hidden in (secret, key, address)
        for name, content in found.items()
        if (where := hidden.leaks(content))
    }
    assert not leaks, "\n".join(f"{name}: {where!r}" for name, where in leaks.items())

    # It looked in the right places: what is no secret is there.
    assert marker.leaks(found[f"history of {run.id}/echo"])
    assert any(marker.leaks(content) for content in written.values())
    assert any(marker.leaks(content) for name, content in found.items() if "temporal.db" in name)
    assert b"http_403" in found["logs"]
    # It was sent; and what a tool says is kept but for the secret in it.
    (echo,) = await bench.tools.calls(bench.unique("echo"))
    assert echo.headers["authorization"] == f"Bearer {secret.value}"
    assert {call.headers["x-api-key"] for call in await bench.tools.calls(bench.unique("keyed"))} == {key.value}
    (asked, *_) = await bench.tools.reconcile_calls(bench.unique("lost"))
    assert asked.headers["authorization"] == f"Bearer {secret.value}"
    alerts: list[Call] = await bench.tools.calls(bench.unique("hook"))
    assert all(address.value in alert.path and alert.query == {"token": address.value} for alert in alerts)
    outputs = result["outputs"]
    assert outputs["echo"] == {
        "sent": {"authorization": "Bearer [redacted]", "x-api-key": "[redacted]"},
        "[redacted]": ["[redacted]"],
    }
    assert outputs["php"] == {"sent": "[redacted]", "list": ["[redacted]"]}
    assert [outputs[name] for name in ("go", "escaped", "keyed", "lost")] == [{"sent": "[redacted]"}] * 4
    assert outputs["bare"] == "[redacted]"


def _temporal(factory: pytest.TempPathFactory) -> list[Path]:
    """Where the test's Temporal server keeps its database."""
    return list(factory.getbasetemp().glob("temporal[0-9]*"))


async def test_a_secret_of_digits_breaks_no_answer(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are no place for secrets to leak from; taking them for one would lose a result that was good."""
    monkeypatch.setenv("SECRETS_TEST_PIN", "1234")
    await bench.tool("pin", [{"body": {"amount": 123456, "note": "1234"}}], auth={"bearer_env": "SECRETS_TEST_PIN"})
    async with bench.worker():
        run = await bench.start({"id": "a", "tool": "pin"})
        assert (await run.result())["outputs"] == {"a": {"amount": 123456, "note": "[redacted]"}}


async def test_what_is_said_while_a_call_waits_holds_no_secret(bench: Bench, secret: Secret) -> None:
    """What the UI shows of a pending activity: its last failure."""
    hour = {"RATE_LIMITED": {"initial": "1h", "maximum": "1h"}}
    step = {"status": 429, "body": {"sent": f"Bearer {secret.value}"}, "headers": {"X-Echo": secret.value}}
    await bench.tool("busy", [step], auth={"bearer_env": "SECRETS_TEST_TOKEN"}, retry=hour)
    async with bench.worker():
        run = await bench.start({"id": "a", "tool": "busy"})
        await bench.tools.wait_for(bench.unique("busy"), calls=1)
        handle = bench.client.get_workflow_handle(f"{run.id}/a")

        async def shown() -> bytes | None:
            description = (await handle.describe()).raw_description
            pending = next(iter(description.pending_activities), None)
            return description.SerializeToString() if pending and pending.HasField("last_failure") else None

        said = await eventually(shown, "the failure to be shown")
        assert b"http_429" in said
        assert secret.leaks(said) is None
        await run.cancel()
