"""``python -m benchmarks.worker_settings``: one figure for each setting of a Temporal worker that could matter.

The same settings stand there twice: what differs between the two is noise.
"""

import argparse
import asyncio
import dataclasses
import json
import logging
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.contenders.redrive import Mode, redrive
from benchmarks.lab import Engine, Lab, Sizes
from benchmarks.measuring import compare, ratio, throughput
from benchmarks.tool_server import ToolServer

__all__: list[str] = []

_USUAL: Final = "as it is"
VARIANTS: Final[Mapping[str, Mapping[str, Any]]] = {
    _USUAL: {},
    "as it is, again": {},
    "no sandbox": {"sandbox": "none"},
    "sandbox passes nothing through": {"sandbox": []},
    "2 workflow pollers": {"workflow_pollers": 2},
    "10 workflow pollers": {"workflow_pollers": 10},
    "workflow pollers adapt": {"workflow_pollers": 0},
    "2 activity pollers": {"activity_pollers": 2},
    "10 activity pollers": {"activity_pollers": 10},
    "activity pollers adapt": {"activity_pollers": 0},
    "20 activities at once": {"max_concurrent_activities": 20},
    "500 activities at once": {"max_concurrent_activities": 500},
    "20 workflow tasks at once": {"max_concurrent_workflow_tasks": 20},
    "500 workflow tasks at once": {"max_concurrent_workflow_tasks": 500},
    "50 workflows in the cache": {"max_cached_workflows": 50},
    "5,000 workflows in the cache": {"max_cached_workflows": 5_000},
    "no activities along with a workflow task": {"disable_eager_activity_execution": True},
    "3 activities along with a workflow task": {"max_eager_activity_reservations_per_workflow_task": 3},
    "100 activities along with a workflow task": {"max_eager_activity_reservations_per_workflow_task": 100},
}


def _engine(label: str, settings: Mapping[str, Any], mode: Mode) -> Engine:
    worker = (sys.executable, "-m", "benchmarks.tuned_worker", json.dumps(settings))
    return Engine(label, lambda lab: redrive(lab, mode, worker=worker))


async def _measure(root: Path, sizes: Sizes, mode: Mode, only: str) -> None:
    async with ToolServer.running(root) as tools:
        engines = [
            _engine(label, settings, mode) for label, settings in VARIANTS.items() if only in label or label == _USUAL
        ]
        series, _ = await compare(Lab(tools, root, sizes), engines, throughput(sizes.nodes))
    usual = series[_USUAL]
    print(f"{sizes.nodes} nodes, {mode} mode, medians of {sizes.rounds} rounds; beside: the same, pair by pair")
    for label, found in series.items():
        beside = ratio(label, found, usual).median
        cpu = ", ".join(f"{part} {milliseconds:.1f} ms" for part, milliseconds in found.cpu_ms.items())
        print(f"{label:58} {found.median:7.1f} nodes/s  {beside:5.2f}  CPU a node: {cpu}")


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worker_settings", description=__doc__)
    parser.add_argument("--mode", choices=["workflow", "fast"], default="workflow", help="of the runs")
    parser.add_argument("--only", default="", metavar="TEXT", help="of the settings, those named so, and none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=300)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    sizes = dataclasses.replace(Sizes(), rounds=arguments.rounds, nodes=arguments.nodes)
    with tempfile.TemporaryDirectory(prefix="redrive-bench-") as root:
        asyncio.run(_measure(Path(root), sizes, arguments.mode, arguments.only))


if __name__ == "__main__":
    main()
