"""The secrets of the tools: read once from the environment, sent in a header, and kept out of everything else."""

import re
from collections.abc import Mapping
from typing import Final

from contracts.base import Json
from contracts.tools import Catalog, CatalogError, Tool, is_header_value

__all__ = ["REDACTED", "Secrets"]

REDACTED: Final = "[redacted]"
_SHORTEST: Final = 4


class Secrets:
    """The secret of each tool that has one."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)
        self.longest = max(map(len, values.values()), default=0)
        """The length of the longest secret."""
        longest_first = sorted(set(values.values()), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(_any_spelling, longest_first)) or r"(?!)")

    def __repr__(self) -> str:
        return f"Secrets({', '.join(self._values)})"

    @classmethod
    def read(cls, catalog: Catalog, environment: Mapping[str, str]) -> "Secrets":
        """Reads every secret that the catalog names.

        Raises:
            CatalogError: a variable is not set, or its value cannot be sent in a header.
        """
        values: dict[str, str] = {}
        problems = []
        for tool in catalog.tools.values():
            if tool.auth is None:
                continue
            where = f'tools."{tool.name}".auth: the environment variable {tool.auth.variable}'
            value = environment.get(tool.auth.variable, "")
            if not value:
                problems.append(f"{where} is not set")
            elif len(value) < _SHORTEST or not is_header_value(value):
                problems.append(
                    f"{where} does not hold a secret: it must be {_SHORTEST} or more printable ASCII characters, "
                    "without blanks at its ends"
                )
            else:
                values[tool.name] = value
        if problems:
            raise CatalogError("secrets", problems)
        return cls(values)

    def headers(self, tool: Tool) -> dict[str, str]:
        """The header that authenticates a call to a tool."""
        return tool.auth.headers(self._values[tool.name]) if tool.auth is not None else {}

    def redact(self, text: str) -> str:
        """The text without any secret in it."""
        if not self._values:
            return text
        return self._pattern.sub(REDACTED, text)

    def redact_json(self, value: Json) -> Json:
        """The same for every string of a JSON value, the names of its fields included."""
        if not self._values:
            return value
        if isinstance(value, str):
            return self.redact(value)
        if isinstance(value, list):
            return [self.redact_json(item) for item in value]
        if isinstance(value, dict):
            return {self.redact(name): self.redact_json(item) for name, item in value.items()}
        return value


def _any_spelling(secret: str) -> str:
    """A pattern for a secret as it is, and as any JSON writer may have escaped it: each character by itself."""
    return "".join(
        rf"(?:{re.escape(character)}|\\u00(?i:{ord(character):02x})"
        + (rf"|\\{re.escape(character)}" if character in '"\\/' else "")
        + ")"
        for character in secret
    )
