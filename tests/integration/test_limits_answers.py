"""What a tool may answer, however large, deep, slow or endless: a clear error, one call, and bounded memory."""

import asyncio
import gzip
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import WorkflowHandle

from tests.integration.raw_server import Answering, RawServer, for_ever, head, saying, whole
from tests.lab import Bench
from tests.worker_process import WorkerProcess

# Megabytes, which a workflow task has seconds for.
pytestmark = pytest.mark.exhaustive

Run = WorkflowHandle[Any, Any]

_MOST_GROWTH = 48 * 1024
"""kB by which a worker's memory may have grown at its highest: some answers of 1 MiB at once, as text and as values.

httpx's own decoders would take more for one piece of one answer.
"""

LOST = ("UNKNOWN_SIDE_EFFECT", "result_lost", "CONFIRMED")
UNUSABLE = ("UNKNOWN_SIDE_EFFECT", "result_unusable", "CONFIRMED")
NO_ANSWER = ("UNKNOWN_SIDE_EFFECT", "read_timeout", "POSSIBLE")
BROKEN = ("UNKNOWN_SIDE_EFFECT", "protocol_error", "POSSIBLE")
REFUSED = ("PERMISSION", "http_403", "NONE")
Wanted = tuple[str, str, str]


def bomb(wbits: int = 31, size: int = 128_000_000) -> bytes:
    """So many zeros, a thousand times smaller; 31 is gzip's format, 15 zlib's."""
    compressor = zlib.compressobj(wbits=wbits)
    zeros = b"0" * 1_000_000
    return b"".join([*(compressor.compress(zeros) for _ in range(size // len(zeros))), compressor.flush()])


def highest(worker: WorkerProcess) -> int:
    """The most memory that a worker has ever had, in kB."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{worker.pid}/status").read_text())
    assert found is not None
    return int(found[1])


async def dead_letters_as_wanted(
    bench: Bench, server: RawServer, wanted: Mapping[str, tuple[Wanted, str]], runs: Mapping[str, Run]
) -> None:
    """Each has failed as it should, says why, and was called once."""
    wrong = []
    for name, (outcome, says) in wanted.items():
        entry = await bench.parked(runs[name], "call")
        found = (entry.error.category, entry.error.code, entry.side_effect)
        calls = len(server.requests[name])
        if found != outcome or says not in entry.error.message or calls != 1:
            wrong.append((name, found, entry.error.message, calls))
        assert len(entry.error.message.encode()) <= 2048, name
    assert wrong == []


async def started(bench: Bench, name: str) -> Run:
    return await bench.start({"id": "call", "tool": name, "input": {}})


async def test_bombs_end_in_a_clear_error_and_never_in_memory(bench: Bench) -> None:
    gzipped = bomb()
    twice = gzip.compress(gzipped)
    zeros = b"0" * 65_536
    large = f"larger than max_response_bytes ({1024 * 1024})"
    unasked = "where gzip was asked for"
    rows: dict[str, tuple[bytes | Answering, tuple[Wanted, str]]] = {
        "gzip": (whole(gzipped, "content-encoding: gzip"), (UNUSABLE, large)),
        "deflate": (whole(bomb(wbits=15), "content-encoding: deflate"), (UNUSABLE, large)),
        "gzip-in-members": (whole(gzip.compress(zeros) * 100_000, "content-encoding: gzip"), (UNUSABLE, large)),
        "gzip-of-nothing": (whole(gzip.compress(b"") * 100_000, "content-encoding: gzip"), (UNUSABLE, large)),
        "gzip-twice": (whole(twice, "content-encoding: gzip, gzip"), (LOST, unasked)),
        "gzip-in-two-fields": (
            whole(twice, "content-encoding: gzip", "content-encoding: gzip"),
            (LOST, unasked),
        ),
        "brotli": (whole(b"\x8b\xff\xff\x9f" * 1000, "content-encoding: br"), (LOST, unasked)),
        "zstd": (whole(b"\x28\xb5\x2f\xfd" * 1000, "content-encoding: zstd"), (LOST, unasked)),
        "gzip-403": (whole(gzipped, "content-encoding: gzip", status="403 Forbidden"), (REFUSED, "00000")),
        "brotli-403": (whole(b"?", "content-encoding: br", status="403 Forbidden"), (REFUSED, "HTTP 403")),
        "100-megabytes": (for_ever(head("content-length: 100000000"), zeros), (UNUSABLE, large)),
        "endless": (for_ever(head("connection: close"), zeros), (UNUSABLE, large)),
        "endless-chunks": (
            for_ever(head("transfer-encoding: chunked"), b"400\r\n" + b"0" * 1024 + b"\r\n"),
            (UNUSABLE, large),
        ),
        "endless-403": (for_ever(head(status="403 Forbidden"), zeros), (REFUSED, "00000")),
    }
    answers = {name: row if callable(row) else saying(row) for name, (row, _) in rows.items()}
    # What else is read of an answer: the question about a call, and the webhook's.
    answers["webhook"] = for_ever(head("content-length: 100000000000"), zeros)
    answers["asked"] = saying(whole(b"{}", status="500 Internal Server Error"))
    answers["question"] = saying(whole(gzipped, "content-encoding: gzip"))
    answers["warm"] = saying(whole(b'"' + b"x" * 1_000_000 + b'"'))
    async with RawServer.start(answers) as server:
        bench.webhook = server.url("webhook")
        for name in rows:
            await bench.tool(name, url=server.url(name), timeout="30s")
        question = server.url("question") + "?key={idempotency_key}"
        await bench.tool("asked", url=server.url("asked"), reconcile={"url": question, "output": ""})
        await bench.tool("warm", url=server.url("warm"))
        async with WorkerProcess.start(bench) as worker:
            for run in [await started(bench, "warm") for _ in range(4)]:
                async with asyncio.timeout(60):
                    await run.result()
            before = highest(worker)
            wanted = {name: row[1] for name, row in rows.items()}
            runs = {name: await started(bench, name) for name in rows}
            await dead_letters_as_wanted(bench, server, wanted, runs)
            entry = await bench.parked(await started(bench, "asked"), "call")
            assert (entry.error.code, entry.side_effect) == ("http_500", "CONFIRMED")
            grown = highest(worker) - before
            assert grown < _MOST_GROWTH, f"{grown} kB more than {before} kB"


async def test_answers_that_never_end_take_no_longer_than_the_tools_timeout(bench: Bench) -> None:
    chunked = "transfer-encoding: chunked"
    rows: dict[str, tuple[Answering, tuple[Wanted, str]]] = {
        "early-hints": (for_ever(b"", b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"), (NO_ANSWER, "timeout")),
        "continues": (for_ever(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), (NO_ANSWER, "timeout")),
        "slow-head": (for_ever(b"HTTP/1.1 200 OK\r\nx-slow: ", b"a", pause=0.05), (NO_ANSWER, "timeout")),
        "slow-headers": (for_ever(b"HTTP/1.1 200 OK\r\n", b"x-slow: a\r\n", pause=0.05), (NO_ANSWER, "timeout")),
        "endless-head": (
            for_ever(b"HTTP/1.1 200 OK\r\nx-bomb: ", b"a" * 65_536),
            (BROKEN, "Got more than 65536 bytes"),
        ),
        "endless-headers": (for_ever(b"HTTP/1.1 200 OK\r\n", b"x-bomb: a\r\n" * 5000), (BROKEN, "Too many headers")),
        "endless-status": (for_ever(b"HTTP/1.1 200 O", b"K" * 65_536), (BROKEN, "Got more than 65536 bytes")),
        "slow-chunks": (for_ever(head(chunked), b"1\r\n0\r\n", pause=0.05), (LOST, "body was lost")),
        "endless-size": (for_ever(head(chunked) + b"1;", b"x" * 65_536), (LOST, "body was lost")),
        "endless-trailers": (for_ever(head(chunked) + b"1\r\n1\r\n0\r\n", b"x: y\r\n" * 5000), (LOST, "body was lost")),
        "slow-trailers": (for_ever(head(chunked) + b"1\r\n1\r\n0\r\n", b"x: y\r\n", 0.05), (LOST, "body was lost")),
        "10-kB-a-second": (
            for_ever(head("content-length: 100000000"), b"0" * 500, pause=0.05),
            (LOST, "body was lost"),
        ),
    }
    async with RawServer.start({name: answer for name, (answer, _) in rows.items()}) as server:
        for name in rows:
            await bench.tool(name, url=server.url(name), timeout="3s")
        await bench.tool("good", [{}])
        async with bench.worker():
            runs = {name: await started(bench, name) for name in rows}
            # Nothing of this keeps others from being served.
            async with asyncio.timeout(60):
                await (await started(bench, "good")).result()
            await dead_letters_as_wanted(bench, server, {name: row[1] for name, row in rows.items()}, runs)


async def test_answers_at_the_edge_are_read_or_refused_for_what_they_are(bench: Bench) -> None:
    deep = b"[" * 100 + b"]" * 100
    good: dict[str, tuple[bytes, Any]] = {
        "gzip": (whole(gzip.compress(b'{"a": 1}'), "content-encoding: gzip"), {"a": 1}),
        "x-gzip": (whole(gzip.compress(b"1"), "content-encoding: X-GZIP"), 1),
        "two-members": (whole(gzip.compress(b"[1,") + gzip.compress(b"2]"), "content-encoding: gzip"), [1, 2]),
        "deflate": (whole(zlib.compress(b"1"), "content-encoding: deflate"), 1),
        "identity": (whole(b"1", "content-encoding: identity"), 1),
        "empty-gzip": (whole(b"", "content-encoding: gzip"), None),
        "largest": (whole(b'"' + b"x" * (1024 * 1024 - 2) + b'"'), "x" * (1024 * 1024 - 2)),
        "largest-gzip": (
            whole(gzip.compress(b'"' + b"x" * (1024 * 1024 - 2) + b'"'), "content-encoding: gzip"),
            "x" * (1024 * 1024 - 2),
        ),
        # As everywhere else, inputs and Temporal's own decoding included: the last one counts.
        "duplicate-keys": (whole(b'{"a": 1, "b": 2, "a": 3}'), {"a": 3, "b": 2}),
        "trailers": (
            head("transfer-encoding: chunked", "trailer: x") + b"1\r\n1\r\n0\r\nx: y\r\n\r\n",
            1,
        ),
        "early-hints": (b"HTTP/1.1 103 Early Hints\r\n\r\n" * 3 + whole(b"1"), 1),
        "thousand-digits": (whole(b"9" * 1000), int("9" * 1000)),
    }
    packed = gzip.compress(b'{"a": "' + b"x" * 100_000 + b'"}')
    bad: dict[str, tuple[bytes, tuple[Wanted, str]]] = {
        "one-byte-more": (whole(b'"' + b"x" * (1024 * 1024 - 1) + b'"'), (UNUSABLE, "larger")),
        "cut-gzip": (whole(packed[:-20], "content-encoding: gzip"), (LOST, "ends too early")),
        "cut-trailer": (whole(packed[:-4], "content-encoding: gzip"), (LOST, "ends too early")),
        "wrong-checksum": (whole(packed[:-8] + b"\0" * 8, "content-encoding: gzip"), (LOST, "body was lost")),
        "rubbish-after-gzip": (whole(packed + b"rubbish", "content-encoding: gzip"), (LOST, "body was lost")),
        "not-gzip": (whole(b"{}", "content-encoding: gzip"), (LOST, "body was lost")),
        "unheard-of": (whole(b"{}", f"content-encoding: {'q' * 5000}"), (LOST, "content-encoding")),
        "nan": (whole(b'{"a": NaN}'), (LOST, "not JSON")),
        "infinite": (whole(b"1e400"), (LOST, "not finite")),
        "100000-digits": (whole(b"9" * 100_000), (LOST, "not JSON")),
        "nested-deep": (whole(b"[" * 500_000 + b"]" * 500_000), (LOST, "nested too deep")),
        "nested-deeper-than-allowed": (whole(b"[[" + deep + b"]]"), (LOST, "nested deeper")),
        "half-a-surrogate": (whole(rb'"\ud800"'), (LOST, "surrogate")),
        "not-utf-8": (whole(b'"\xff"'), (LOST, "not JSON")),
        "redirected": (
            head("location: /redirected", "content-length: 0", status="302 Found"),
            (("UNKNOWN_SIDE_EFFECT", "http_302", "POSSIBLE"), "302"),
        ),
    }
    answers = {f"good-{name}": saying(answer) for name, (answer, _) in good.items()}
    answers |= {name: saying(answer) for name, (answer, _) in bad.items()}
    async with RawServer.start(answers) as server:
        for name in answers:
            await bench.tool(name, url=server.url(name), timeout="30s")
        async with bench.worker():
            runs = {name: await started(bench, name) for name in answers}
            for name, (_, output) in good.items():
                async with asyncio.timeout(60):
                    result = await runs[f"good-{name}"].result()
                assert result["outputs"] == {"call": output}, name
            await dead_letters_as_wanted(bench, server, {name: row[1] for name, row in bad.items()}, runs)
    assert b"accept-encoding: gzip\r\n" in server.requests["good-gzip"][0].lower()
