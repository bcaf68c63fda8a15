"""``redrive schema``: JSON Schemas of what people write, from the models that read it.

What pydantic cannot tell of a model, because a validator of Python says it, is added here.
"""

from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any, Final

import typer
from pydantic.json_schema import models_json_schema

from cli.output import print_json
from contracts.dead_letters import DECISIONS, REFUSALS
from contracts.failures import POLICIES
from contracts.identity import NODE_ID
from contracts.runs import RunSpec
from contracts.tools import Tool

__all__ = ["Kind", "decision_schema", "run_schema", "schema", "tools_schema"]

_DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"
_NAME: Final = f"^{NODE_ID.pattern}$"
_TRACEPARENT: Final = "^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$"
_HTTP_URL: Final = "^https?://[^/?#]"

_Schema = dict[str, Any]


class Kind(StrEnum):
    """What there is a schema of."""

    RUN = "run"
    TOOLS = "tools"
    DECISION = "decision"


def schema(kind: Annotated[Kind, typer.Argument(help="What to describe.")]) -> None:
    """Print a JSON Schema (draft 2020-12): of a run's specification, of tools.toml, or of a dead letter's decisions."""
    match kind:
        case Kind.RUN:
            print_json(run_schema())
        case Kind.TOOLS:
            print_json(tools_schema())
        case Kind.DECISION:
            print_json(decision_schema())


def run_schema() -> _Schema:
    """What starts a run."""
    document = RunSpec.model_json_schema()
    node = document["$defs"]["NodeSpec"]["properties"]
    node["id"]["pattern"] = node["tool"]["pattern"] = node["after"]["items"]["pattern"] = _NAME
    node["input"] = _described(
        'Any JSON. {"$output": NODE, "pointer": P} inside it stands for that node\'s output at JSON Pointer P.'
    )
    _text_of(document["properties"]["traceparent"])["pattern"] = _TRACEPARENT
    return _titled("A run of redrive", "What starts a run: plain JSON, from any Temporal client.", document)


def tools_schema() -> _Schema:
    """``tools.toml``, read as JSON."""
    document = Tool.model_json_schema()
    definitions = document.pop("$defs")
    tool = document
    tool["description"] = "A remote tool."
    # The table's own name is the tool's: it is no field.
    del tool["properties"]["name"]
    tool["required"].remove("name")
    for field in Tool.model_fields:
        default = Tool.model_fields[field].default
        if isinstance(default, timedelta):
            tool["properties"][field]["default"] = f"{default.total_seconds():.0f}s"
    for field in ("input_schema", "output_schema"):
        tool["properties"][field]["anyOf"].append(
            {
                "type": "string",
                "description": "The path of a file with a JSON Schema, relative to the catalog's folder.",
            }
        )
    tool["properties"]["url"]["pattern"] = definitions["Reconcile"]["properties"]["url"]["pattern"] = _HTTP_URL
    tool["properties"]["retry"]["propertyNames"] = {"enum": [str(category) for category in POLICIES]}
    definitions["Auth"]["oneOf"] = [{"required": ["bearer_env"]}, {"required": ["header", "env"]}]
    rule = definitions["Rule"]
    rule["anyOf"] = [{"required": [condition]} for condition in ("status", "header", "pointer")]
    rule["dependentRequired"] = {"header": ["equals"], "pointer": ["equals"]}
    rule["properties"]["status"]["anyOf"][:2] = [
        {"type": "integer", "minimum": 100, "maximum": 599},
        {"type": "string", "pattern": "^[1-5]xx$"},
    ]
    definitions["Tool"] = tool
    return _titled(
        "The catalog of tools",
        "tools.toml, read as JSON.",
        {
            "type": "object",
            "properties": {
                "tools": {
                    "type": "object",
                    "minProperties": 1,
                    "propertyNames": {"pattern": _NAME},
                    "additionalProperties": {"$ref": "#/$defs/Tool"},
                }
            },
            "required": ["tools"],
            "additionalProperties": False,
            "$defs": definitions,
        },
    )


def decision_schema() -> _Schema:
    """The payload of each decision, under ``$defs`` by its name; as a whole it takes any of them."""
    _, document = models_json_schema([(model, "validation") for model in DECISIONS.values()])
    definitions = document["$defs"]
    overridable = [str(code) for code, rule in REFUSALS.items() if rule.overridable]
    definitions["RedriveDecision"]["properties"]["override"]["items"] = {"enum": overridable}
    # Given as null it would be an edited input; left out, the input stays.
    definitions["RedriveDecision"]["properties"]["input"] = _described("An edited input: always a new operation.")
    definitions.pop("RefusalCode", None)
    for action, model in DECISIONS.items():
        definitions[str(action)] = definitions.pop(model.__name__) | {"title": str(action)}
    return _titled(
        "Decisions on a dead letter",
        "The payload of the signal and of the update that the decision's name stands for: one definition each.",
        {"anyOf": [{"$ref": f"#/$defs/{action}"} for action in DECISIONS], "$defs": definitions},
    )


def _titled(title: str, description: str, document: _Schema) -> _Schema:
    return {"$schema": _DRAFT, **document, "title": title, "description": description}


def _described(description: str) -> _Schema:
    return {"description": description}


def _text_of(optional: _Schema) -> _Schema:
    """The branch of a text that may also be null."""
    branch: _Schema = next(branch for branch in optional["anyOf"] if branch.get("type") == "string")
    return branch
