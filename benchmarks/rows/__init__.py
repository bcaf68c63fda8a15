"""What is measured, row by row; ``ROWS`` is all of it, in the order of the table."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from benchmarks.lab import Lab
from benchmarks.measuring import Row
from benchmarks.rows.ceiling import ceiling
from benchmarks.rows.graphs import graphs
from benchmarks.rows.long_run import long_run
from benchmarks.rows.outage import outage
from benchmarks.rows.parked import parked
from benchmarks.rows.side_by_side import dev_server, latency_of_one, parallel_nodes, peers

__all__ = ["ROWS"]

ROWS: Final[Mapping[str, Callable[[Lab], Awaitable[Row]]]] = {
    "ceiling": ceiling,
    "nodes": parallel_nodes,
    "latency": latency_of_one,
    "dev-server": dev_server,
    "peers": peers,
    "long": long_run,
    "graphs": graphs,
    "parked": parked,
    "outage": outage,
}
