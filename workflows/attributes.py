"""The search attributes, by which runs, nodes and dead letters are found in Temporal."""

from typing import Final

from temporalio.common import SearchAttributeKey

__all__ = ["CATEGORY", "FINGERPRINT", "RUN_ID", "SEARCH_ATTRIBUTES", "STATUS", "TOOL"]

RUN_ID: Final = SearchAttributeKey.for_keyword("RedriveRunId")
TOOL: Final = SearchAttributeKey.for_keyword("RedriveTool")
CATEGORY: Final = SearchAttributeKey.for_keyword("RedriveCategory")
STATUS: Final = SearchAttributeKey.for_keyword("RedriveStatus")
FINGERPRINT: Final = SearchAttributeKey.for_keyword("RedriveFingerprint")

SEARCH_ATTRIBUTES: Final = (RUN_ID, TOOL, CATEGORY, STATUS, FINGERPRINT)
"""All of them; a worker does not poll before the namespace knows them."""
