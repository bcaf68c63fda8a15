"""The secrets of the tools: read once from the environment, sent in a header, and kept out of everything else."""

import json
from collections.abc import Mapping
from typing import Final

from contracts.tools import Catalog, CatalogError, Tool

__all__ = ["REDACTED", "Secrets"]

REDACTED: Final = "[redacted]"
_SHORTEST: Final = 4


class Secrets:
    """The secret of each tool that has one."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)
        # A tool may echo what it was sent; JSON may have escaped it.
        forms = {form for value in values.values() for form in (value, json.dumps(value)[1:-1])}
        self._forms = sorted(forms, key=len, reverse=True)

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
            elif len(value) < _SHORTEST or not value.isascii() or not value.isprintable():
                problems.append(
                    f"{where} does not hold a secret: it must be {_SHORTEST} or more printable ASCII characters"
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
        for form in self._forms:
            text = text.replace(form, REDACTED)
        return text

    def redact_bytes(self, content: bytes) -> bytes:
        """The same for a body as it came."""
        for form in self._forms:
            content = content.replace(form.encode(), REDACTED.encode())
        return content
