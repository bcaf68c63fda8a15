"""What is looked at before a run is admitted: that its tools are there, and that its inputs fit them."""

from typing import Any

from activities.admit import tool_problems
from contracts.runs import parse_run
from contracts.tools import read_catalog

CATALOG = read_catalog(
    {
        "tools": {
            "charge": {
                "url": "https://tool.example/",
                "input_schema": {"required": ["amount"], "properties": {"amount": {"type": "integer"}}},
            },
            "mail": {"url": "https://tool.example/{to}"},
        }
    }
)


def problems(*nodes: dict[str, Any]) -> list[str]:
    return tool_problems(CATALOG, parse_run("r", [{"nodes": list(nodes)}]).nodes)


def test_a_run_whose_inputs_fit_has_no_problems() -> None:
    assert problems({"id": "a", "tool": "charge", "input": {"amount": 1}}, {"id": "b", "tool": "mail"}) == []


def test_an_unknown_tool_is_named_with_those_that_there_are() -> None:
    (found,) = problems({"id": "b", "tool": "mail"}, {"id": "a", "tool": "chrge"})
    assert found == "nodes[1].tool: there is no tool 'chrge' in the catalog; it has charge, mail"


def test_every_way_in_which_an_input_breaks_its_tools_schema_is_named() -> None:
    assert problems(
        {"id": "a", "tool": "charge", "input": {"amount": "x"}},
        {"id": "b", "tool": "charge"},
        {"id": "c", "tool": "charge", "input": {"amount": 1}},
    ) == [
        "nodes[0].input.amount: 'x' is not of type 'integer'",
        "nodes[1].input: 'amount' is a required property",
    ]


def test_an_input_with_references_is_looked_at_when_they_are_resolved() -> None:
    assert (
        problems(
            {"id": "a", "tool": "mail"},
            {"id": "b", "tool": "charge", "input": {"amount": {"$output": "a"}}},
            {"id": "c", "tool": "charge", "input": {"x": [{"$output": "a"}]}},
        )
        == []
    )


def test_a_tool_is_named_by_its_whole_name() -> None:
    assert len(problems({"id": "a", "tool": "Mail"}, {"id": "b", "tool": "mail.send"})) == 2
