"""A server that suggests early to continue as new: after sixty events, not after thousands."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from workers.client import DATA_CONVERTER
from workers.embedded import temporal_binary
from workflows.attributes import SEARCH_ATTRIBUTES

SUGGESTED_AFTER: Final = 60
_TUNING: Final = (
    *("--dynamic-config-value", f"limit.historyCount.suggestContinueAsNew={SUGGESTED_AFTER}"),
    *("--dynamic-config-value", "history.transferProcessorMaxPollRPS=10000"),
    *("--dynamic-config-value", "history.timerProcessorMaxPollRPS=10000"),
)


@asynccontextmanager
async def impatient_server() -> AsyncGenerator[Client]:
    """Runs it, in memory."""
    environment = await WorkflowEnvironment.start_local(
        data_converter=DATA_CONVERTER,
        search_attributes=SEARCH_ATTRIBUTES,
        dev_server_existing_path=temporal_binary(),
        dev_server_extra_args=_TUNING,
        dev_server_log_level="error",
    )
    async with environment:
        yield environment.client
