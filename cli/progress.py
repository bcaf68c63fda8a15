"""How a run is shown: its nodes as a table, live on a terminal, as lines elsewhere."""

import shlex
from collections.abc import AsyncGenerator
from typing import Final

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from cli.output import coloured, console, moment, note, pairs, pretty_json, print_json_line, printable, say, table
from contracts.runs import NodeState, NodeStatus
from workers.runs import Retry, RunFailure, RunView

__all__ = ["follow", "render", "why_not"]

_ORDER: Final = (NodeStatus.DEAD_LETTERED, NodeStatus.RUNNING, NodeStatus.DISCARDED, NodeStatus.PENDING)
"""What is shown first where there is no room for all nodes."""
_MARGIN: Final = 8
_COMMANDS: Final = 10


def render(view: RunView, rows: int | None = None) -> RenderableType:
    """A run and its nodes; no more than so many of them where room is short."""
    parts: list[RenderableType] = [
        pairs(
            [
                ("run", view.run_id),
                ("status", view.status),
                ("started", moment(view.started_at)),
                ("ended", moment(view.ended_at) or None),
            ]
        )
    ]
    nodes = list(view.state.nodes.items()) if view.state is not None else []
    if nodes:
        shown = _most_telling(nodes, rows)
        parts += [Text(), table(["NODE", "TOOL", "STATUS", "OPERATION", "ATTEMPTS", "DEAD LETTER"], _rows(view, shown))]
        if len(shown) < len(nodes):
            parts.append(Text(f"and {_counted(len(nodes) - len(shown), 'more node')}"))
    commands = _commands(view)
    if commands:
        parts += [Text(), Text("waits for a decision:", style="yellow"), *(Text(f"  {line}") for line in commands)]
    if view.retrying:
        lines = [printable(_retry(retry)) for retry in view.retrying]
        parts += [Text(), Text("tried again by itself:", style="yellow"), *(Text(f"  {line}") for line in lines)]
    if view.unanswered is not None and view.ended_at is None:
        parts += [Text(), Text(printable(view.unanswered), style="bold yellow")]
    if view.failure is not None:
        parts += [Text(), *_failure(view.failure)]
    elif view.ended_at is not None and view.result is not None:
        parts += [Text(), Text("result", style="bold"), Text(printable(pretty_json(view.result)))]
    return Group(*parts)


def _rows(view: RunView, nodes: list[tuple[str, NodeState]]) -> list[list[object]]:
    return [
        [
            node_id,
            view.tools.get(node_id),
            node.status,
            node.operation_id,
            node.attempt_count or None,
            node.dead_letter.removesuffix("/dead-letter") if node.dead_letter else None,
        ]
        for node_id, node in nodes
    ]


def _most_telling(nodes: list[tuple[str, NodeState]], rows: int | None) -> list[tuple[str, NodeState]]:
    """In the run's own order; where there are too many, those that wait or are at work before those that are done."""
    if rows is None or len(nodes) <= rows:
        return nodes
    ranks = {status: rank for rank, status in enumerate(_ORDER)}
    ranked = sorted(range(len(nodes)), key=lambda index: ranks.get(nodes[index][1].status, len(ranks)))
    return [nodes[index] for index in sorted(ranked[: max(rows, 1)])]


def _waiting(view: RunView) -> list[str]:
    if view.state is None or view.ended_at is not None:
        return []
    return [node_id for node_id, node in view.state.nodes.items() if node.status is NodeStatus.DEAD_LETTERED]


def _commands(view: RunView) -> list[str]:
    waiting = _waiting(view)
    lines = [_command(view, node_id) for node_id in waiting[:_COMMANDS]]
    if len(waiting) > _COMMANDS:
        lines.append(f"redrive dlq list --run {shlex.quote(view.run_id)}   (all {len(waiting)} of them)")
    return lines


def _retry(retry: Retry) -> str:
    when = f"attempt {retry.attempt} " + (f"at {moment(retry.next_at)}" if retry.next_at else "is under way")
    return f"{retry.node_id}: {when}, after {retry.category}: {retry.message}"


def _command(view: RunView, node_id: str) -> str:
    return printable(f"redrive dlq show {shlex.quote(f'{view.run_id}/{node_id}')}")


def _failure(failure: RunFailure) -> list[Text]:
    title = Text.assemble("failed: ", (printable(failure.type), "red"))
    return [title, *(Text(f"  {printable(line)}") for line in failure.message.splitlines())]


def why_not(view: RunView) -> str | None:
    """Why a run that has ended did not succeed, or None."""
    if view.status == "SUCCEEDED":
        return None
    reason = f": {view.failure.type}: {view.failure.message}" if view.failure is not None else ""
    return f"run {view.run_id} has ended {view.status}{reason}"


async def follow(views: AsyncGenerator[RunView], as_json: bool) -> RunView:
    """Shows a run until its end, and answers with its last view."""
    if as_json:
        last = None
        async for last in views:
            print_json_line(last.document())
    elif console().is_terminal:
        last = await _follow_live(views)
    else:
        last = await _follow_lines(views)
    if last is None:
        raise RuntimeError("a run that is followed has at least its end")
    return last


async def _follow_live(views: AsyncGenerator[RunView]) -> RunView | None:
    last = None
    screen = console()
    with Live(console=screen, auto_refresh=False, transient=True) as live:
        async for last in views:
            if last.ended_at is None:
                live.update(render(last, rows=screen.height - _MARGIN), refresh=True)
    if last is not None:
        screen.print(render(last))
    return last


async def _follow_lines(views: AsyncGenerator[RunView]) -> RunView | None:
    last = None
    async for view in views:
        _print_changes(last, view)
        last = view
    return last


def _print_changes(before: RunView | None, view: RunView) -> None:
    """One line for each change."""
    if view.ended_at is None and view.unanswered not in (None, before.unanswered if before is not None else None):
        note(view.unanswered)
    known = before.state.nodes if before is not None and before.state is not None else {}
    for node_id, node in view.state.nodes.items() if view.state is not None else ():
        if node == known.get(node_id) or (node_id not in known and node.status is NodeStatus.PENDING):
            continue
        say(f"{view.run_id}/{node_id} ", coloured(node.status), _details(view, node_id, node))
    if before is None or before.status != view.status:
        say(f"{view.run_id} ", coloured(view.status))


def _details(view: RunView, node_id: str, node: NodeState) -> str:
    details = f" (operation {node.operation_id})" if node.operation_id else ""
    if node.attempt_count:
        details = f" (operation {node.operation_id}, {_counted(node.attempt_count, 'attempt')})"
    if node.status is NodeStatus.DEAD_LETTERED:
        details += f"; decide: {_command(view, node_id)}"
    return details


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
