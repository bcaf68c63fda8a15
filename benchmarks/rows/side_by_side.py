"""The same work done by several engines, in turns."""

from benchmarks.contenders.bare import bare_engine
from benchmarks.contenders.celery import celery_engine
from benchmarks.contenders.dbos import dbos_engine
from benchmarks.contenders.redrive import redrive_engine
from benchmarks.contenders.restate import restate_engine
from benchmarks.lab import Engine, Lab
from benchmarks.measuring import Measure, Ratio, Row, Series, Target, compare, latency, ratio, throughput

__all__ = ["dev_server", "latency_of_one", "parallel_nodes", "peers"]

REDRIVE = redrive_engine("Redrive, workflow")
REDRIVE_FAST = redrive_engine("Redrive, fast", "fast")
REDRIVE_STOCK = redrive_engine("Redrive, workflow, stock dev server", server="stock")
BARE_CHILD = bare_engine("Temporal, child per node", "ChildPerNode")
BARE_ACTIVITY = bare_engine("Temporal, activity per node", "ActivityPerNode")

PEERS = (
    restate_engine("Restate, ctx.run in one handler", "steps"),
    restate_engine("Restate, a service call per node", "fan_out"),
    dbos_engine("DBOS, steps, SQLite", "steps", "sqlite"),
    dbos_engine("DBOS, steps, PostgreSQL", "steps", "postgresql"),
    dbos_engine("DBOS, queue, SQLite", "queue", "sqlite"),
    dbos_engine("DBOS, queue, PostgreSQL", "queue", "postgresql"),
    celery_engine("Celery, late acks, Redis synced at every write"),
)

Pair = tuple[Engine, Engine, Target]


async def _row(title: str, lab: Lab, engines: list[Engine], measure: Measure, pairs: list[Pair]) -> Row:
    series, notes = await compare(lab, [engine for engine in engines if lab.wants(engine)], measure)
    ratios = [_pair(series, pair) for pair in pairs if {pair[0].label, pair[1].label} <= series.keys()]
    return Row(title=title, series=list(series.values()), ratios=ratios, notes=notes, rounds=lab.sizes.rounds)


def _pair(series: dict[str, Series], pair: Pair) -> Ratio:
    over, under, target = pair
    return ratio(f"{over.label} / {under.label}", series[over.label], series[under.label], target)


async def parallel_nodes(lab: Lab) -> Row:
    """Redrive beside the smallest Temporal code of the same shape: a workflow for each node, or all inside the run."""
    nodes = lab.sizes.nodes
    return await _row(
        f"{nodes:,} parallel nodes",
        lab,
        [REDRIVE, BARE_CHILD, REDRIVE_FAST, BARE_ACTIVITY],
        throughput(nodes),
        [
            (REDRIVE, BARE_CHILD, Target(least=0.90)),
            (REDRIVE_FAST, BARE_ACTIVITY, Target(least=0.80)),
            (REDRIVE_FAST, REDRIVE, Target(least=5)),
        ],
    )


async def latency_of_one(lab: Lab) -> Row:
    """What a single node takes when nothing else is going on."""
    times = lab.sizes.latencies
    return await _row(
        f"One node, start to result: p50 of {times}",
        lab,
        [REDRIVE, BARE_CHILD, REDRIVE_FAST, BARE_ACTIVITY],
        latency(times),
        [(REDRIVE, BARE_CHILD, Target(most=1.15)), (REDRIVE_FAST, BARE_ACTIVITY, Target(most=1.15))],
    )


async def dev_server(lab: Lab) -> Row:
    """What tuning the embedded server brings."""
    nodes = lab.sizes.stock_nodes
    return await _row(
        f"The embedded server beside the stock dev server, {nodes:,} nodes, a workflow each",
        lab,
        [REDRIVE, REDRIVE_STOCK],
        throughput(nodes),
        [(REDRIVE, REDRIVE_STOCK, Target(least=2))],
    )


async def peers(lab: Lab) -> Row:
    """Other engines, each with what it promises."""
    nodes = lab.sizes.nodes
    return await _row(f"Other engines, {nodes:,} nodes", lab, [*PEERS, REDRIVE_FAST], throughput(nodes), [])
