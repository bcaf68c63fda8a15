"""``admit``: is this a run that can be executed? Every problem with its place, or the facts about its tools."""

import asyncio

from temporalio import activity

from activities.context import Context, facts
from contracts.base import Json
from contracts.dispatch import Admission
from contracts.runs import InvalidRunError, NodeSpec, bounded, parse_run, references
from contracts.schemas import schema_problems
from contracts.tools import Catalog

__all__ = ["Admit", "tool_problems"]


class Admit:
    """The activity that a run begins with."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @activity.defn(name="admit")
    async def admit(self, run_id: str, payloads: list[Json]) -> Admission:
        """Validates whatever was sent as a run's specification; problems are an answer, not a failure."""
        # In a thread: leases are renewed on this loop, and a large specification takes seconds.
        return await asyncio.to_thread(self._admit, run_id, payloads)

    def _admit(self, run_id: str, payloads: list[Json]) -> Admission:
        try:
            spec = parse_run(run_id, payloads, self._context.limits)
        except InvalidRunError as error:
            return Admission(problems=error.problems)
        problems = tool_problems(self._context.catalog, spec.nodes)
        if problems:
            return Admission(problems=bounded(problems))
        names = dict.fromkeys(node.tool for node in spec.nodes)
        tools = {name: tool for name in names if (tool := self._context.catalog.get(name)) is not None}
        found = {name: facts(tool, self._context) for name, tool in tools.items()}
        return Admission(tools=found, limits=self._context.limits)


def tool_problems(catalog: Catalog, nodes: list[NodeSpec]) -> list[str]:
    """Unknown tools, and inputs that break their tool's schema; references are resolved, and looked at, later."""
    problems: list[str] = []
    for index, node in enumerate(nodes):
        tool = catalog.get(node.tool)
        if tool is None:
            known = ", ".join(sorted(catalog.tools)[:20])
            problems.append(f"nodes[{index}].tool: there is no tool {node.tool!r} in the catalog; it has {known}")
        elif next(references(node.input), None) is None:
            problems += schema_problems(tool.input_schema, node.input, f"nodes[{index}].input")
    return problems
