"""`redrive demo`, as a new user runs it; and the examples."""

import asyncio
import itertools
import json
import os
import re
import signal
import socket
import sys
import tomllib
import urllib.request
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from pydantic import BaseModel

from activities.requests import input_problems
from contracts.runs import Source, parse_run, references
from contracts.tools import Approval, Auth, Reconcile, RetryOverride, Rule, Tool, load_catalog
from tests.waiting import eventually
from workers.demo import ORDER, NodeReport, shortfalls
from workers.sample_tools import SampleCall

ROOT: Final = Path(__file__).parents[2]
EXAMPLES: Final = ROOT / "examples"
MAIN: Final = ("-m", "cli.main")


class Process:
    """A command that writes what it has to say into files, so that it can be read while it runs."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self.process = process
        self._folder = folder

    @property
    def out(self) -> str:
        return (self._folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self._folder / "err").read_text()

    async def says(self, text: str) -> str:
        def said() -> str | None:
            assert self.process.returncode is None or text in self.out, (self.process.returncode, self.out, self.err)
            return self.out if text in self.out else None

        return await eventually(said, f"{text!r}", within=100)


@asynccontextmanager
async def started(folder: Path, *arguments: str, **environment: str) -> AsyncGenerator[Process]:
    """Starts Python with these arguments; killed at the end, if it still runs."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("REDRIVE_", "TEMPORAL_"))}
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *arguments),
            cwd=folder,
            env={**inherited, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT), **environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
    try:
        yield Process(process, folder)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_every_effect_happens_once_and_programs_can_read_it(tmp_path: Path) -> None:
    async with started(tmp_path, *MAIN, "demo", "--port", "0", "--ui-port", "0", "--json") as demo:
        assert await demo.process.wait() == 0, demo.err
    document = json.loads(demo.out)
    assert document["problems"] == []
    assert {node["node"]: (node["attempts"], node["calls"], node["source"]) for node in document["nodes"]} == {
        "reserve": (1, 1, "EXECUTED"),
        "screen": (2, 2, "EXECUTED"),
        "invoice": (2, 2, "EXECUTED"),
        "label": (1, 1, "RECONCILED"),
        "charge": (2, 2, "EXECUTED"),
        "mail": (1, 1, "EXECUTED"),
    }
    assert [node["effects"] for node in document["nodes"]] == [1] * 6
    assert len({node["idempotency_key"] for node in document["nodes"]}) == 6
    assert [node["questions"] for node in document["nodes"]] == [0, 0, 0, 1, 0, 0]
    assert "Traceback" not in demo.err


async def test_it_finds_other_ports_shows_its_way_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with ExitStack() as stack:
        for port in (7233, 8233):
            taken = stack.enter_context(socket.socket())
            try:
                taken.bind(("127.0.0.1", port))
            except OSError:
                continue  # Somebody else has it, which is all that is needed.
            taken.listen()
        async with started(tmp_path, *MAIN, "demo", "--keep") as demo:
            out = await demo.says("# raises the card's limit")
            assert "Port 7233 is taken" in out
            assert "Port 8233 is taken" in out
            told = [
                ("inventory.reserve", "200"),
                ("fraud.screen", "503"),
                ("billing.invoice", "429"),
                ("shipping.label", "cut"),
                ("shipping.label", "asked"),
                ("payments.charge", "403"),
                ("payments.charge", "200"),
                ("mail.send", "200"),
            ]
            for tool, what in told:
                assert re.search(rf"^ +[\d.]+ s +{re.escape(tool)} +{what} ", out, re.MULTILINE), (tool, what, out)
            assert "order-1042/charge has a dead letter" in out
            assert "temporal workflow signal --workflow-id order-1042/charge/dead-letter --name redrive" in out
            assert "Every effect happened exactly once" in out
            links = set(re.findall(r"http://127\.0\.0\.1:\d+/namespaces/default/workflows/\S+", out))
            assert {link.rpartition("/")[2] for link in links} == {
                "order-1042",
                "order-1042%2Fcharge%2Fdead-letter",
                "order-1042%2Flabel",
                "order-1042%2Finvoice",
            }
            for link in links:
                assert ":8233/" not in link
                assert await asyncio.to_thread(status_of, link) == 200
            assert kept_in(tmp_path)
            demo.process.send_signal(signal.SIGINT)
            assert await demo.process.wait() == 0, demo.err
    assert not kept_in(tmp_path)
    assert "Traceback" not in demo.err


async def test_it_ends_when_nobody_reads_it_any_more(tmp_path: Path) -> None:
    with (tmp_path / "err").open("wb") as err:
        read, write = os.pipe()
        with os.fdopen(read) as lines, os.fdopen(write, "wb") as pipe:
            demo = await asyncio.create_subprocess_exec(
                *(sys.executable, *MAIN, "demo", "--port", "0", "--ui-port", "0"),
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(tmp_path)},
                stdout=pipe,
                stderr=err,
            )
            pipe.close()
            while "inventory.reserve" not in (line := await asyncio.to_thread(lines.readline)):
                assert line, (tmp_path / "err").read_text()
        # As `head` does it: the next call of a tool finds that nobody reads.
        try:
            async with asyncio.timeout(100):
                assert await demo.wait() == 1
        finally:
            if demo.returncode is None:
                demo.kill()
                await demo.wait()
    assert "Traceback" not in (tmp_path / "err").read_text()
    assert not kept_in(tmp_path)


def kept_in(folder: Path) -> list[Path]:
    return list(folder.glob("redrive-demo-*"))


def status_of(url: str) -> int:
    with urllib.request.urlopen(url, timeout=30) as answer:
        status: int = answer.status
        return status


async def test_a_port_that_was_asked_for_and_is_taken_is_said(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with started(tmp_path, *MAIN, "demo", "--port", str(port), "--ui-port", "0") as demo:
            assert await demo.process.wait() == 3
    assert f"port {port}" in demo.err
    assert "--port" in demo.err
    assert "Traceback" not in demo.err


async def test_it_fails_and_says_what_is_not_as_promised(tmp_path: Path) -> None:
    # A tool that acts twice on one call, and one of the promises that no client can keep.
    (tmp_path / "broken.py").write_text(
        "from workers import sample_tools\n"
        "act = sample_tools.SampleTools._act\n"
        "def twice(self, tool, key, result):\n"
        "    for _ in range(2 if tool == 'shipping.label' else 1):\n"
        "        act(self, tool, key, result)\n"
        "sample_tools.SampleTools._act = twice\n"
        "from cli.main import main\n"
        "main()\n"
    )
    async with started(tmp_path, "broken.py", "demo", "--port", "0", "--ui-port", "0") as demo:
        assert await demo.process.wait() == 1
    assert "label: shipping.label has counted 2 effects instead of 1" in demo.err
    assert "Every effect happened exactly once" not in demo.out


NODES: Final = ("reserve", "screen", "invoice", "label", "charge", "mail")
TOOLS: Final = (
    "inventory.reserve",
    "fraud.screen",
    "billing.invoice",
    "shipping.label",
    "payments.charge",
    "mail.send",
)
CALLS: Final = (1, 2, 2, 1, 2, 1)


def reports(node: str = "", **changes: Any) -> list[NodeReport]:
    return [
        NodeReport(
            node=name,
            tool=tool,
            attempts=calls,
            idempotency_key=f"key-{name}",
            calls=calls,
            questions=0,
            effects=1,
            source=Source.RECONCILED if name == "label" else Source.EXECUTED,
        ).model_copy(update=changes if name == node else {})
        for name, tool, calls in zip(NODES, TOOLS, CALLS, strict=True)
    ]


def calls(*more: SampleCall, second_invoice_at: float = 12.0) -> list[SampleCall]:
    times = {"billing.invoice": itertools.chain([10.0, second_invoice_at])}
    return [
        SampleCall(tool, f"key-{node}", 200, False, "", next(times.get(tool, itertools.repeat(0.0))))
        for node, tool, count in zip(NODES, TOOLS, CALLS, strict=True)
        for _ in range(count)
    ] + list(more)


@pytest.mark.parametrize(
    ("nodes", "seen", "problem"),
    [
        (reports("mail", effects=0), calls(), "mail: mail.send has counted 0 effects instead of 1"),
        (reports("charge", effects=2), calls(), "charge: payments.charge has counted 2 effects instead of 1"),
        (reports("reserve", calls=2), calls(), "reserve: (calls, source) is"),
        (reports("label", source=Source.EXECUTED), calls(), "label: (calls, source) is"),
        (reports()[:-1], calls(), "mail: (calls, source) is None"),
        (reports(), calls(SampleCall("mail.send", "other", 200, False, "", 0.0)), "mail: mail.send has seen the keys"),
        (reports(), calls(second_invoice_at=11.5), "invoice: called again after 1.50 s"),
    ],
)
def test_a_broken_promise_is_found(nodes: list[NodeReport], seen: list[SampleCall], problem: str) -> None:
    assert [found[: len(problem)] for found in shortfalls(nodes, seen)] == [problem]


def test_nothing_is_found_where_all_is_well() -> None:
    assert shortfalls(reports(), calls()) == []


def test_the_example_catalog_uses_every_field_there_is() -> None:
    tools = tomllib.loads((EXAMPLES / "tools.toml").read_text())["tools"].values()
    parts: list[tuple[type[BaseModel], list[dict[str, Any]]]] = [
        (Tool, list(tools)),
        (Auth, [tool["auth"] for tool in tools if "auth" in tool]),
        (Reconcile, [tool["reconcile"] for tool in tools if "reconcile" in tool]),
        (Rule, [rule for tool in tools for rule in tool.get("rules", [])]),
        (RetryOverride, [retry for tool in tools for retry in tool.get("retry", {}).values()]),
    ]
    for model, entries in parts:
        used = {field for entry in entries for field in entry}
        assert used >= model.model_fields.keys() - {"name"}, model


def test_the_example_run_fits_the_example_catalog_and_the_demo() -> None:
    catalog = load_catalog(EXAMPLES / "tools.toml")
    document = json.loads((EXAMPLES / "order.json").read_text())
    run = parse_run("order-1", [document])
    for node in run.nodes:
        tool = catalog.tools[node.tool]
        assert tool.approval is Approval.OPTIONAL or node.approval is not None, node.id
        if not any(references(node.input)):
            assert input_problems(tool, node.input) == [], node.id
    assert {(node.id, node.tool, *node.upstream()) for node in run.nodes} == {
        (node.id, node.tool, *node.upstream()) for node in parse_run("demo", [ORDER]).nodes
    }


def test_the_example_of_secrets_names_those_that_the_example_catalog_reads() -> None:
    lines = (EXAMPLES / "worker.env").read_text().splitlines()
    named = {line.partition("=")[0] for line in lines if line and not line.startswith("#")}
    catalog = load_catalog(EXAMPLES / "tools.toml")
    assert named == {tool.auth.variable for tool in catalog.tools.values() if tool.auth is not None}
