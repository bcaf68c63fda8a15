"""``python -m benchmarks.tuned_worker SETTINGS``: ``redrive worker`` with other settings of Temporal's `Worker`.

The settings are a JSON object: arguments of `Worker` as they are; ``workflow_pollers`` and ``activity_pollers``, how
many requests for work at once (0: the SDK adapts it); ``sandbox``: ``none``, or modules it does not load anew.
"""

import asyncio
import gc
import json
import sys
from collections.abc import Mapping
from typing import Any

from temporalio.client import Client
from temporalio.plugin import SimplePlugin
from temporalio.worker import (
    PollerBehavior,
    PollerBehaviorAutoscaling,
    PollerBehaviorSimpleMaximum,
    UnsandboxedWorkflowRunner,
    WorkerConfig,
    WorkflowRunner,
)
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from workers.client import connect
from workers.logs import configure_logs
from workers.settings import load_settings
from workers.worker import serve

__all__: list[str] = []


class _Tuned(SimplePlugin):
    """Has the last word on every worker of its client."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__("tuned")
        self._settings = settings

    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        """See the base class."""
        config = super().configure_worker(config)
        for name, value in self._settings.items():
            match name:
                case "workflow_pollers":
                    config["workflow_task_poller_behavior"] = _pollers(value)
                case "activity_pollers":
                    config["activity_task_poller_behavior"] = _pollers(value)
                case "sandbox":
                    config["workflow_runner"] = _runner(value)
                case _:
                    config[name] = value  # type: ignore[literal-required]  # whatever `Worker` takes
        return config


def _pollers(count: int) -> PollerBehavior:
    return PollerBehaviorSimpleMaximum(count) if count else PollerBehaviorAutoscaling()


def _runner(sandbox: str | list[str]) -> WorkflowRunner:
    if sandbox == "none":
        return UnsandboxedWorkflowRunner()
    return SandboxedWorkflowRunner(restrictions=SandboxRestrictions.default.with_passthrough_modules(*sandbox))


async def _run(settings: Mapping[str, Any]) -> None:
    configure_logs()
    config = (await connect()).config()
    config["plugins"] = [_Tuned(settings)]
    await serve(Client(**config), load_settings())


if __name__ == "__main__":
    asyncio.run(_run(json.loads(sys.argv[1])))
    gc.collect()  # lets the SDK's threads go before the interpreter does
