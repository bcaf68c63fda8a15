"""The README and the documentation: every command in them is run, every table is held against the code."""

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from shutil import copytree
from typing import Any, Final

import httpx
import pytest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from activities.classify import Answer, Success, classify_answer
from contracts.dead_letters import REFUSALS, Entry
from contracts.failures import MAX_MESSAGE_BYTES, POLICIES
from contracts.limits import INLINE
from contracts.runs import NodeSpec, RunSpec, RunState, parse_run
from contracts.tools import Auth, Reconcile, RetryOverride, Rule, Tool, read_catalog
from tests.lab import Bench
from tests.waiting import eventually

ROOT: Final = Path(__file__).parents[2]
README: Final = ROOT / "README.md"
DOCS: Final = ROOT / "docs"
OPERATING: Final = DOCS / "operating.md"
PAGES: Final = sorted([README, *DOCS.glob("*.md")])
BIN: Final = Path(sys.executable).parent

NOT_RUN: Final = {
    "make demo": "tests/integration/test_demo.py runs the demo; here make only says what it would do",
    "make test": "it would run itself; make only says what it would do",
    "make install": "it would change the environment that runs this; make only says what it would do",
    ". .venv/bin/activate": "the environment that runs this is on the path already",
    "docker compose -f docker-compose.temporal.yml up --build --detach": "test_compose.py reads the file",
}
"""Commands that cannot be run in a test, and why."""

GOES_ON: Final = {
    "redrive demo --keep": (["--port", "0", "--ui-port", "0"], "# raises the card's limit"),
    "redrive dev": (["--port", "0", "--ui-port", "0"], "stop with Ctrl-C"),
    "redrive worker": ([], '"polling"'),
}
"""Commands that go on until they are stopped: free ports for them, and what they say when they are ready."""


NOT_YET: Final = (RPCStatusCode.NOT_FOUND, RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED)
"""How a query fails that comes too early, or while the worker has too much to do."""


def commands_of(page: Path) -> list[str]:
    """Every line of a page's sh blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def table_below(page: Path, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading."""
    text = page.read_text().split(f"# {heading}\n", 1)[1]
    table = re.search(r"^\|.*?\n(?!\|)", text, re.MULTILINE | re.DOTALL)
    assert table is not None, heading
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


@dataclass
class Reader:
    """Somebody with two terminals who follows a page, line by line."""

    folder: Path
    environment: dict[str, str]
    tools_url: str = "http://127.0.0.1:7280"
    waited_for: set[str] = field(default_factory=set)

    async def run(self, line: str) -> str:
        """Types a command, which must succeed."""
        line = line.replace("http://127.0.0.1:7280", self.tools_url)
        process = await asyncio.create_subprocess_exec(
            *("bash", "-euo", "pipefail", "-c", line),
            cwd=self.folder,
            env=self.environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = (part.decode() for part in await process.communicate())
        assert process.returncode == 0, f"{line}\n{out}\n{err}"
        assert "Traceback" not in err
        return out

    @asynccontextmanager
    async def running(self, line: str) -> AsyncGenerator[str]:
        """Types a command that goes on, waits until it is ready, and stops it in the end, which must succeed too."""
        arguments, ready = GOES_ON[line]
        said = self.folder / f"{line.replace(' ', '-')}.log"
        with said.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(*shlex.split(line), *arguments),
                cwd=self.folder,
                env=self.environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:

            def is_ready() -> bool:
                assert process.returncode is None, said.read_text()
                return ready in said.read_text()

            await eventually(is_ready, f"{line} to say {ready!r}", within=100)
            yield said.read_text()
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0, said.read_text()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def has_patience(self, line: str) -> None:
        """Waits, as the page says, until the runs that a line is about wait for a decision."""
        if re.search(r"workflow start|run start|raw_client.py start", line):
            return
        for run_id in dict.fromkeys(re.findall(r"\border-\d+\b", line)):
            if run_id not in self.waited_for:
                self.waited_for.add(run_id)
                await self.blocked(run_id)

    async def blocked(self, run_id: str) -> None:
        client = await Client.connect(self.environment["TEMPORAL_ADDRESS"])

        found = f"WorkflowId = '{run_id}/charge/dead-letter' AND RedriveStatus = 'AWAITING_DECISION'"

        async def waits() -> bool:
            run = client.get_workflow_handle(run_id)
            try:
                state = RunState.model_validate(await run.query("status"))
                if state.blocked != ["charge"]:
                    return False
                entry = Entry.model_validate(
                    await client.get_workflow_handle(f"{run_id}/charge/dead-letter").query("entry")
                )
            except RPCError as error:
                if error.status in NOT_YET:
                    return False
                raise
            # What lists them is a store of its own, which hears of them later.
            return entry.eligibility.redrivable and (await client.count_workflows(found)).count == 1

        await eventually(waits, f"{run_id} to wait for a decision", within=100)


def new_reader(folder: Path, environment: Mapping[str, str] | None = None) -> Reader:
    copytree(ROOT / "examples", folder / "examples", ignore=lambda *_: {"__pycache__"})
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("REDRIVE_", "TEMPORAL_"))}
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return Reader(folder, {**inherited, **(environment or {}), "PATH": path, "TMPDIR": str(folder)})


@asynccontextmanager
async def beside_the_demo(reader: Reader) -> AsyncGenerator[None]:
    """The demo in the one terminal, and what it says to paste in the other."""
    async with reader.running("redrive demo --keep") as said:
        reader.environment |= dict(re.findall(r"^  export (\w+)=(\S+)$", said, re.MULTILINE))
        url = re.search(r"curl -X PUT (\S+)/limit", said)
        assert url is not None
        reader.tools_url = url[1]
        yield


async def set_limit(reader: Reader, limit: int) -> None:
    async with httpx.AsyncClient() as client:
        answer = await client.put(f"{reader.tools_url}/limit", json=limit)
    assert answer.json() == {"limit": limit}


@pytest.mark.timeout(420)
async def test_every_command_of_the_readme_works_in_its_order(tmp_path: Path) -> None:
    reader = new_reader(tmp_path)
    # "Put an entry into tools.toml".
    (entry,) = re.findall(r"^```toml\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "tools.toml").write_text(entry)
    alone = dict(reader.environment)
    printed: dict[str, str] = {}
    async with beside_the_demo(reader):
        for line in commands_of(README):
            if line in NOT_RUN or line == "redrive demo --keep":
                continue
            if line in GOES_ON:
                terminal = Reader(tmp_path, alone if line == "redrive dev" else reader.environment)
                async with terminal.running(line):
                    continue
            if line == "redrive dlq list":
                # "Some seconds later all three wait."
                await reader.has_patience("order-7 order-8 order-9")
            await reader.has_patience(line)
            printed[line] = await reader.run(line)
    assert "BLOCKED" in printed["redrive run show order-7"]
    assert "order-9/charge" in printed["redrive dlq list"]
    assert "would a redrive be accepted?" in printed["redrive dlq show order-7/charge"]
    assert "http_403" in printed["redrive ledger show order-7/charge/1"]
    for run_id in ("order-7", "order-8", "order-9"):
        assert f"{run_id} SUCCEEDED" in printed[f"redrive run watch {run_id}"]


@pytest.mark.timeout(420)
async def test_every_command_of_operating_works_in_its_order(tmp_path: Path) -> None:
    reader = new_reader(tmp_path)
    lines = [line for line in commands_of(OPERATING) if "order-41" not in line]
    printed: dict[str, str] = {}
    async with beside_the_demo(reader):
        begun = set(re.findall(r"workflow start .*--workflow-id (order-\d+)", "\n".join(lines)))
        assert begun
        refused = sorted(set(re.findall(r"\border-\d+\b", "\n".join(lines))) - begun)
        for run_id in refused:
            await reader.run(f"redrive run start examples/order.json --id {run_id}")
        # "Whose charge was refused": the first lines list them.
        await reader.has_patience(" ".join(refused))
        for line in lines:
            await reader.has_patience(line)
            if "apr-8" in line:
                # What the decision is about: the bank now lets it pass.
                await set_limit(reader, 5000)
            printed[line] = await reader.run(line)
    outcomes = {line.split()[2]: text for line, text in printed.items() if line.startswith("redrive dlq ")}
    for action in ("redrive", "resolve", "discard"):
        assert f"{action} ACCEPTED" in outcomes[action]
    assert "order-21/charge" in outcomes["list"]
    assert "NOTED" in outcomes["check"]
    (result,) = (text for line, text in printed.items() if line.startswith("temporal workflow result"))
    assert "COMPLETED" in result
    (revoked,) = (text for line, text in printed.items() if "apr-8" in line)
    assert "ACCEPTED" in revoked


async def test_every_command_on_a_pending_call_works(bench: Bench, tmp_path: Path) -> None:
    away = {"status": 503, "headers": {"Retry-After": "3600"}}
    await bench.tool("payments.charge", [away])
    address = bench.client.service_client.config.target_host
    reader = new_reader(tmp_path, bench.environment(address))
    lines = [line for line in commands_of(OPERATING) if "order-41" in line]
    assert [line.split()[2] for line in lines] == ["describe", "pause", "unpause", "reset", "update-options"]
    async with bench.worker():
        run = await bench.start({"id": "charge", "tool": "payments.charge", "input": {}}, run_id="order-41")
        await eventually(lambda: pending_with_failure(bench, "order-41/charge"), "a call that waits")
        for line in lines:
            await reader.run(line)
        entry = await bench.parked(run, "charge")
        assert entry.attempts[0].category == "DEPENDENCY_DOWN"
        assert (await bench.decide(run, "charge", "resolve", output={"id": "by-hand"})).outcome == "ACCEPTED"
        assert (await run.result())["outputs"] == {"charge": {"id": "by-hand"}}
    assert len(await bench.tools.calls(bench.unique("payments.charge"))) == 1


async def pending_with_failure(bench: Bench, workflow_id: str) -> bool:
    try:
        description = await bench.client.get_workflow_handle(workflow_id).describe()
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return False
        raise
    return any(activity.HasField("last_failure") for activity in description.raw_description.pending_activities)


def test_what_is_not_run_is_there_and_make_knows_its_targets() -> None:
    lines = commands_of(README)
    for line in NOT_RUN:
        assert line in lines, f"{line} is not in the README any more"
        if line.startswith("make "):
            done = subprocess.run(
                ["make", "-n", *line.split()[1:]], cwd=ROOT, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
    assert (ROOT / "docker-compose.temporal.yml").is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        found = page.parent / file if file else page
        assert found.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{page.name}: {target}"


def test_the_picture_is_there_and_not_too_large() -> None:
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README.read_text())
    content = (ROOT / picture).read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) < 400_000


def test_the_entry_of_the_readme_is_a_catalog() -> None:
    (entry,) = re.findall(r"^```toml\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert list(read_catalog(tomllib.loads(entry)).tools) == ["sms.send"]


def test_every_refusal_is_documented_with_its_cure() -> None:
    assert table_below(OPERATING, "Refusals") == [
        [f"`{code}`", rule.when, rule.cure, "yes" if rule.overridable else "no"] for code, rule in REFUSALS.items()
    ]


def test_every_field_of_a_tool_is_documented_with_its_default() -> None:
    rows = {
        name: row[1] for row in table_below(DOCS / "tools.md", "Fields") for name in re.findall(r"`([\w.]+)`", row[0])
    }
    assert {name.partition(".")[0] for name in rows} == Tool.model_fields.keys() - {"name"}
    text = (DOCS / "tools.md").read_text()
    for model in (Auth, Reconcile, Rule, RetryOverride):
        for name in model.model_fields:
            assert re.search(rf"\b{name}\b", text), f"{model.__name__}.{name}"
    tool = Tool(name="x", url="https://example.com")
    for name, default in rows.items():
        if re.fullmatch(r"`.*`|\d+", default) and name != "timeout":
            value = getattr(tool, name)
            assert default.strip('`"') == str(value).lower() if isinstance(value, bool) else str(value), name
    assert rows["timeout"] == f'`"{tool.timeout.total_seconds():.0f}s"`'


def test_every_field_of_a_run_is_documented_with_its_default() -> None:
    page = DOCS / "runs.md"
    (example,) = re.findall(r"^```json\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    node = parse_run("any", [json.loads(example)]).nodes[0]
    tables = re.findall(r"^\| field of a (node|run) .*?(?=^\n)", page.read_text(), re.MULTILINE | re.DOTALL)
    assert tables == ["node", "run"]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", page.read_text(), re.MULTILINE)
    fields = {**NodeSpec.model_fields, **RunSpec.model_fields}
    assert [name for name, _ in rows] == [name for name in fields if name != "nodes"]
    for name, default in rows:
        if re.fullmatch(r"`.*`|\d+", default):
            value = fields[name].get_default(call_default_factory=True, validated_data={})
            assert default.strip('`"') == ("{}" if value == {} else str(value)), name
    assert node.deadline_seconds == 604800


def test_the_reading_of_statuses_is_as_documented() -> None:
    tool = Tool(name="x", url="https://example.com")
    documented: dict[int, list[str]] = {}
    for statuses, category, side_effect in table_below(DOCS / "tools.md", "What an outcome means"):
        if statuses.startswith(("2xx", "503 with")):
            continue
        for status in re.findall(r"\b\d{3}\b", statuses):
            documented[int(status)] = [category.strip("`"), side_effect.strip("`")]
    for status in range(300, 600):
        read = classify_answer(tool, Answer(status, {}, datetime.now(UTC)), False)
        assert not isinstance(read, Success)
        others = {3: 303, 4: 499, 5: 599}[status // 100]
        fallback = ["INVALID_INPUT", "NONE"] if others == 499 else ["UNKNOWN_SIDE_EFFECT", "POSSIBLE"]
        assert [read.category, read.side_effect] == documented.get(status, fallback), status
    assert len(documented) >= 40
    waits = classify_answer(tool, Answer(503, {"retry-after": "1"}, datetime.now(UTC)), False)
    assert not isinstance(waits, Success)
    assert [waits.category, waits.side_effect] == ["DEPENDENCY_DOWN", "NONE"]


def test_the_policies_are_as_documented() -> None:
    rows = {row[0].strip("`"): row[2] for row in table_below(README, "What happens to failures")}
    for category, policy in POLICIES.items():
        first, longest = policy.initial.total_seconds(), policy.maximum.total_seconds()
        span = f"{longest:.0f} s" if longest < 60 else f"{longest / 60:.0f} min"
        for part in (f"after {first:.0f} s", "doubling", f"to {span}", f"{policy.attempts} attempts"):
            assert part in rows[category], (category, part)
        assert policy.backoff == 2


def test_the_limits_are_as_documented() -> None:
    rows: dict[str, Any] = {row[0]: row[1] for row in table_below(DOCS / "limits.md", "Limits")}
    sizes = {
        "a run's specification": INLINE.spec,
        "a node's input, references resolved": INLINE.input,
        "a node's output": INLINE.output,
        "the outputs in a run's result": INLINE.run_outputs,
        "an error's message": MAX_MESSAGE_BYTES,
    }
    for what, size in sizes.items():
        said = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
        assert rows[what].startswith(said), what
