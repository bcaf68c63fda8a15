"""``redrive demo``: the main job in half a minute, on a machine that has nothing but Redrive."""

import asyncio
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli.errors import CommandError
from cli.output import AsJson, console, print_json, table
from cli.running import run_async

if TYPE_CHECKING:
    from contracts.dead_letters import Entry
    from contracts.runs import RunState
    from workers.demo import NodeReport, Stage
    from workers.sample_tools import SampleCall

__all__ = ["demo"]

_LIMIT_SECONDS: Final = 120
_LOOK_SECONDS: Final = 0.2
_LOG_LINES: Final = 20
_FULL_KEYS: Final = 110
"""Columns that the last table needs to show whole keys."""

_WHAT_TO_SEE: Final = (
    ("", "the run: its nodes as child workflows, and who waited for whom"),
    ("/charge/dead-letter", "the dead letter: the evidence, the signal, what came of it"),
    ("/label", "the lost answer: call_tool has failed, reconcile has found out"),
    ("/invoice", "the rate limit: call_tool at attempt 2, not before the time that its tool asked for"),
)
"""Workflows of the run, by how their ids go on."""


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Stay up until Ctrl-C, to look around and try things.")] = False,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Where Temporal listens; 0 takes a free one.", show_default="7233"),
    ] = None,
    ui_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Where its UI listens; 0 takes a free one.", show_default="8233"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run an order against tools that misbehave, on an embedded Temporal server; nothing is kept.

    It retries, is rate-limited, loses an answer and reconciles it, dead-letters, is redriven by a signal and succeeds.
    Exit code 1 if any effect has not happened exactly once.
    """
    story = _Story(console() if not as_json else Console(stderr=True, markup=False, emoji=False, highlight=False))
    run_async(story.tell(keep, port, ui_port, as_json))


class _Story:
    """Tells what happens while it happens."""

    def __init__(self, screen: Console) -> None:
        self._screen = screen
        self._began = time.monotonic()
        self._calls: dict[str, int] = {}
        self._reader_gone = False
        self._teller: asyncio.Task[None] | None = None

    async def tell(self, keep: bool, port: int | None, ui_port: int | None, as_json: bool) -> None:
        """The whole demo, from the start of the server to its end; or until nobody reads it, as of ``| head``."""
        self._teller = asyncio.current_task()
        try:
            await self._tell(keep, port, ui_port, as_json)
        except asyncio.CancelledError:
            if self._reader_gone:
                raise BrokenPipeError from None
            raise

    async def _tell(self, keep: bool, port: int | None, ui_port: int | None, as_json: bool) -> None:
        from workers.demo import shortfalls, stage

        self._title("Redrive demo: an order of six steps, and tools that misbehave")
        async with stage(port, ui_port, self._called, self._remark) as running:
            self._say(f"  Temporal  {running.server.address}, its UI at {running.server.ui_url}")
            self._say("  worker    in this process, on task queue redrive")
            self._say(f"  tools     {running.tools.url}")
            reports = await self._within_limit(running)
            problems = shortfalls(reports, running.tools.calls)
            if as_json:
                print_json({"nodes": [report.model_dump(mode="json") for report in reports], "problems": problems})
            self._show_reports(reports)
            if problems:
                raise CommandError("\n".join(["not as promised:", *(f"  {problem}" for problem in problems)]))
            self._say("\nEvery effect happened exactly once, and each node kept one key.", style="bold green")
            self._where_to_look(running, keep)
            if keep:
                await self._stay()

    async def _within_limit(self, running: "Stage") -> list["NodeReport"]:
        from temporalio.client import WorkflowFailureError

        from workers.demo import DemoError

        try:
            async with asyncio.timeout(_LIMIT_SECONDS):
                return await self._play(running)
        except TimeoutError:
            reason = f"it has not come to its end within {_LIMIT_SECONDS} s"
        except DemoError as error:
            reason = str(error)
        except WorkflowFailureError as error:
            reason = f"the run has failed: {error.cause}"
        log = running.log.read_text(encoding="utf-8").splitlines()[-_LOG_LINES:]
        raise CommandError("\n".join([f"not as promised: {reason}", "the worker's last words:", *log]))

    async def _play(self, running: "Stage") -> list["NodeReport"]:
        from workers.demo import RUN_ID

        self._title(f"Run {RUN_ID} is started. What its tools see:")
        self._began = time.monotonic()
        await running.start()
        async with _live(self._screen, running):
            entry = await running.dead_letter()
        self._show_dead_letter(running, entry)
        await running.redrive()
        async with _live(self._screen, running):
            result = await running.result()
        self._title(f"Run {RUN_ID} {result.status} after {time.monotonic() - self._began:.1f} s.", style="bold green")
        return await running.reports()

    def _called(self, call: "SampleCall") -> None:
        """A line for each call that a tool sees."""
        if call.question:
            what, style = "asked", "cyan"
        else:
            what, style = ("cut", "red") if call.status is None else (str(call.status), _style(call.status))
        note = call.note
        if not call.question:
            number = self._calls[call.key] = self._calls.get(call.key, 0) + 1
            note += f" (call {number}, same key)" if number > 1 else ""
        line = Text.assemble(
            (f"  {call.at - self._began:5.1f} s  ", "dim"), f"{call.tool:18}", (f"{what:6}", style), note
        )
        try:
            self._screen.print(line, soft_wrap=True)
        except SystemExit:
            # rich's answer to a pipe that nobody reads any more. Out of a tool's task it would end the event loop with
            # the server and the worker on it, instead of the demo.
            self._reader_gone = True
            if self._teller is not None:
                self._teller.cancel()

    def _show_dead_letter(self, running: "Stage", entry: "Entry") -> None:
        name = f"{entry.run_id}/{entry.node_id}"
        self._title(f"The run is BLOCKED: {name} has a dead letter, and waits for a person.", style="bold yellow")
        self._say(f"  error        {entry.error.category}, {entry.error.message}")
        self._say(f"  side effect  {entry.side_effect}: it certainly has not happened")
        self._say("  redrive      would be accepted" if entry.eligibility.redrivable else "  redrive      refused")
        self._say(f"  see it       {running.link(f'{name}/dead-letter')}")
        self._title("Now the card's limit is raised, and a person redrives it, by a signal as anybody can send it:")
        self._say(f"  {running.signal_command}")
        self._say(f"  (or: redrive dlq redrive {name} --reason 'card limit raised')\n")

    def _show_reports(self, reports: Sequence["NodeReport"]) -> None:
        whole = self._screen.width >= _FULL_KEYS
        rows = [
            [
                report.node,
                report.tool,
                report.attempts,
                report.idempotency_key if whole else f"{report.idempotency_key[:13]}…",
                report.calls,
                report.effects,
                report.source,
            ]
            for report in reports
        ]
        self._screen.print()
        self._screen.print(
            table(["NODE", "TOOL", "ATTEMPTS", "IDEMPOTENCY KEY", "CALLS SEEN", "EFFECTS", "SOURCE"], rows)
        )

    def _where_to_look(self, running: "Stage", keep: bool) -> None:
        from workers.demo import RUN_ID

        self._title("What to look at in the Temporal UI" + (":" if keep else " (with `redrive demo --keep`):"))
        for suffix, what in _WHAT_TO_SEE:
            self._say(f"  {running.link(RUN_ID + suffix)}")
            self._say(f"    {what}", style="dim")
        if keep:
            self._title("All of it stays up until Ctrl-C. For another terminal:")
            for name, value in running.environment.items():
                self._say(f"  export {name}={shlex.quote(value)}")
            self._say(f"  curl -X PUT {running.tools.url}/limit -d 5000", end="")
            self._say("   # raises the card's limit", style="dim")

    async def _stay(self) -> None:
        from workers.stopping import until_stopped

        with until_stopped():
            await asyncio.Event().wait()
        self._say("\nstopping; nothing of the demo is kept")

    def _remark(self, text: str) -> None:
        self._say(f"  {text}", style="yellow")

    def _title(self, text: str, style: str = "bold") -> None:
        self._say(f"\n{text}", style=style)

    def _say(self, text: str, style: str = "", end: str = "\n") -> None:
        self._screen.print(Text(text, style=style), soft_wrap=True, end=end)
        # Whoever reads a pipe follows it live, too.
        sys.stdout.flush()


class _live:  # noqa: N801 - read like a function
    """Below the calls, on a terminal: how the nodes are doing right now."""

    def __init__(self, screen: Console, running: "Stage") -> None:
        self._screen = screen
        self._running = running
        self._following: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        if self._screen.is_terminal:
            self._following = asyncio.create_task(self._follow())

    async def __aexit__(self, *_: object) -> None:
        if self._following is not None:
            self._following.cancel()
            with suppress(asyncio.CancelledError):
                await self._following

    async def _follow(self) -> None:
        with Live(console=self._screen, auto_refresh=False, transient=True) as live:
            while True:
                live.update(_nodes(await self._running.status()), refresh=True)
                await asyncio.sleep(_LOOK_SECONDS)


def _nodes(state: "RunState") -> Table:
    return table(["  NODE", "STATUS"], [[f"  {node_id}", node.status] for node_id, node in state.nodes.items()])


def _style(status: int) -> str:
    return "green" if status < 300 else "yellow"
