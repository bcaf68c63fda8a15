"""What Celery's worker runs."""

import os
from typing import Any

import celery  # type: ignore[import-untyped]  # it has no types
import httpx

from benchmarks.calls import call_blocking

_URL = os.environ["BENCH_URL"]

app = celery.Celery("benchmarks", broker=os.environ["BENCH_REDIS"], backend=os.environ["BENCH_REDIS"])
app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True)

_client: list[httpx.Client] = []
"""One for each process, made when it is first needed: connections do not survive a fork."""


@app.task(name="benchmarks.call")  # type: ignore[untyped-decorator]
def call(key: str) -> Any:
    if not _client:
        _client.append(httpx.Client(timeout=30))
    return call_blocking(_client[0], _URL, key)
