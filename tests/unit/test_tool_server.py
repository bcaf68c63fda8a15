"""The tool server does what its scripts say, and each fault is to httpx the error that it is meant to be."""

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.tool_server import FAULTS, ToolServer

Steps = list[dict[str, object]]

SHORT = httpx.Timeout(10, read=0.3, write=0.3)
"""Timeouts for the faults which show only by one."""

SMALL = b'{"amount": 5}'
LARGE = b"x" * (16 << 20)
"""Much larger than the send buffer which net.ipv4.tcp_wmem allows (4 MB)."""


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ToolServer]:
    async with ToolServer.start(tmp_path_factory.mktemp("tool_server")) as server:
        yield server


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=10, verify=False, trust_env=False) as client:
        yield client


def keyed(key: str) -> dict[str, str]:
    return {"Idempotency-Key": key}


# Faults, as httpx sees them.


@pytest.mark.parametrize(
    ("fault", "error", "body"),
    [
        ("rst_after_read", httpx.ReadError, SMALL),
        ("fin_after_read", httpx.RemoteProtocolError, SMALL),
        ("garbage", httpx.RemoteProtocolError, SMALL),
        ("header_bomb", httpx.RemoteProtocolError, SMALL),
        ("hang", httpx.ReadTimeout, SMALL),
        ("never_read", httpx.WriteTimeout, LARGE),
        ("early_413_rst", httpx.ReadError, LARGE),
    ],
)
async def test_fault_before_an_answer(
    server: ToolServer, client: httpx.AsyncClient, fault: str, error: type[Exception], body: bytes
) -> None:
    await server.script(fault, [{"fault": fault}])
    timeout = SHORT if issubclass(error, httpx.TimeoutException) else httpx.Timeout(60)
    with pytest.raises(error) as raised:
        await client.post(server.tool_url(fault), content=body, timeout=timeout)
    assert raised.type is error
    (call,) = await server.calls(fault)
    assert call.committed == FAULTS[fault].reads_body
    assert len(await server.effects(fault)) == call.committed


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("truncated", httpx.RemoteProtocolError),
        ("rst_in_body", httpx.ReadError),
        ("hang_in_body", httpx.ReadTimeout),
        ("bad_gzip", httpx.DecodingError),
    ],
)
async def test_fault_in_the_body_leaves_the_status(
    server: ToolServer, client: httpx.AsyncClient, fault: str, error: type[Exception]
) -> None:
    await server.script(fault, [{"fault": fault, "status": 201}])
    async with client.stream("POST", server.tool_url(fault), content=SMALL, timeout=SHORT) as response:
        assert response.status_code == 201
        with pytest.raises(error) as raised:
            await response.aread()
    assert raised.type is error
    assert len(await server.effects(fault)) == 1


@pytest.mark.parametrize(
    ("fault", "content", "content_type"),
    [
        ("invalid_utf8", b'{"a": "\xff\xfe"}', "application/json"),
        ("not_json", b"<h1>It works!</h1>", "text/html"),
        ("deep_json", b"[[[]]]", "application/json"),
        ("nan", b'{"a": NaN}', "application/json"),
        ("duplicate_keys", b'{"a": 1, "a": 2}', "application/json"),
    ],
)
async def test_fault_is_a_wrong_body(
    server: ToolServer, client: httpx.AsyncClient, fault: str, content: bytes, content_type: str
) -> None:
    await server.script(fault, [{"fault": fault, "size": 3}])
    response = await client.post(server.tool_url(fault))
    assert (response.status_code, response.content) == (200, content)
    assert response.headers["content-type"] == content_type


async def test_huge_comes_in_chunks(server: ToolServer, client: httpx.AsyncClient) -> None:
    await server.script("huge", [{"fault": "huge", "size": 300_000}])
    response = await client.get(server.tool_url("huge"))
    assert response.headers["transfer-encoding"] == "chunked"
    assert len(response.content) == 300_000
    assert len(response.json()) == 300_000 - len('""')


async def test_huge_with_a_content_length(server: ToolServer, client: httpx.AsyncClient) -> None:
    step = {"fault": "huge", "size": 300_000, "headers": {"Content-Length": "300000"}}
    await server.script("huge-declared", [step])
    response = await client.get(server.tool_url("huge-declared"))
    assert response.headers["content-length"] == "300000"
    assert len(response.content) == 300_000


async def test_gzip_bomb_expands(server: ToolServer, client: httpx.AsyncClient) -> None:
    await server.script("gzip-bomb", [{"fault": "gzip_bomb", "size": 3_000_000}])
    async with client.stream("GET", server.tool_url("gzip-bomb")) as response:
        expanded = sum([len(piece) async for piece in response.aiter_bytes()])
    assert expanded == 3_000_000
    assert response.num_bytes_downloaded < 10_000


async def test_slow_body_is_slow(server: ToolServer, client: httpx.AsyncClient) -> None:
    await server.script("slow-body", [{"fault": "slow_body", "size": 200, "rate": 1_000}])
    started = time.monotonic()
    response = await client.get(server.tool_url("slow-body"))
    assert len(response.content) == 200
    assert time.monotonic() - started >= 0.19


async def test_close_keepalive_makes_the_next_request_stale(server: ToolServer, client: httpx.AsyncClient) -> None:
    await server.script("stale", [{"fault": "close_keepalive"}])
    assert (await client.post(server.tool_url("stale"), content=SMALL)).status_code == 200
    with pytest.raises(httpx.RemoteProtocolError):
        await client.post(server.tool_url("stale"), content=SMALL)
    assert len(await server.calls("stale")) == 1


async def test_close_idle_is_noticed_before_the_next_request(server: ToolServer, client: httpx.AsyncClient) -> None:
    await server.script("idle", [{"fault": "close_idle"}])
    for _ in range(2):
        assert (await client.post(server.tool_url("idle"), content=SMALL)).status_code == 200
    assert len(await server.calls("idle")) == 2


async def test_ports_which_fail_before_a_request(server: ToolServer, client: httpx.AsyncClient) -> None:
    for url, error in {
        f"http://127.0.0.1:{server.close_unread_port}": httpx.ReadError,
        f"http://127.0.0.1:{server.blackhole_port}": httpx.ConnectTimeout,
        f"http://127.0.0.1:{server.refused_port}": httpx.ConnectError,
        server.url.replace("http:", "https:"): httpx.ConnectError,  # the TLS handshake
    }.items():
        with pytest.raises(httpx.TransportError) as raised:
            await client.post(url, content=SMALL, timeout=httpx.Timeout(10, connect=0.3))
        assert raised.type is error, url


def test_every_fault_is_tested() -> None:
    source = Path(__file__).read_text()
    assert [fault for fault in FAULTS if f'"{fault}"' not in source] == []


# What is recorded.


async def test_a_plain_success_without_a_script(server: ToolServer, client: httpx.AsyncClient) -> None:
    url = server.tool_url("plain") + "/v1/charges%2F7?dry=1&empty="
    response = await client.put(url, json={"amount": 5}, headers={**keyed("k1"), "X-Tag": "a"})
    assert (response.status_code, response.json()) == (200, {"id": "plain-1", "key": "k1"})
    (call,) = await server.calls("plain")
    assert (call.name, call.method, call.path) == ("plain", "PUT", "/t/plain/v1/charges%2F7")
    assert (call.query, call.body, call.key, call.step) == ({"dry": "1", "empty": ""}, {"amount": 5}, "k1", 0)
    assert call.headers["x-tag"] == "a"
    assert call.committed
    (effect,) = await server.effects("plain")
    assert (effect.name, effect.key, effect.body) == ("plain", "k1", {"id": "plain-1", "key": "k1"})
    assert call.at <= effect.at


async def test_repeated_headers_are_joined_and_text_stays_text(server: ToolServer, client: httpx.AsyncClient) -> None:
    await client.post(server.tool_url("text"), content="hello", headers=[("X-Tag", "a"), ("X-Tag", "b")])
    (call,) = await server.calls("text")
    assert (call.body, call.key, call.headers["x-tag"]) == ("hello", None, "a, b")


async def test_steps_are_taken_in_order_and_the_last_repeats(server: ToolServer, client: httpx.AsyncClient) -> None:
    steps: Steps = [
        {"status": 503, "headers": {"Retry-After": ["1", "2"]}},
        {"status": 500, "commit": True, "raw_body": "oops"},
        {"commit": False},
        {"status": 204},
    ]
    await server.script("steps", steps)
    responses = [await client.post(server.tool_url("steps"), headers=keyed(f"k{n}")) for n in range(5)]
    assert [response.status_code for response in responses] == [503, 500, 200, 204, 204]
    assert responses[0].headers["retry-after"] == "1, 2"
    assert [response.text for response in responses[1:4:2]] == ["oops", ""]
    calls = await server.calls("steps")
    assert [call.step for call in calls] == [0, 1, 2, 3, 3]
    assert [call.committed for call in calls] == [False, True, False, True, True]
    assert [effect.key for effect in await server.effects("steps")] == ["k1", "k3", "k4"]


async def test_a_new_script_starts_over_and_keeps_the_calls(server: ToolServer, client: httpx.AsyncClient) -> None:
    for status in (400, 401):
        await server.script("again", [{"status": status}])
        assert (await client.get(server.tool_url("again"))).status_code == status
    assert [call.step for call in await server.calls("again")] == [0, 0]
    await server.forget("again")
    assert await server.calls("again") == []
    assert (await client.get(server.tool_url("again"))).status_code == 200


@pytest.mark.parametrize("step", [{"stauts": 200}, {"fault": "gremlins"}, {"status": 99}, {"delay": -1}])
async def test_a_step_that_is_none_is_refused(server: ToolServer, step: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"steps.0.{next(iter(step))}"):
        await server.script("refused", [step])
    with pytest.raises(ValueError, match="neither commit nor dedupe"):
        await server.reconcile_script("refused", [{"commit": True}])


# Dedupe.


async def test_without_dedupe_every_committing_call_is_an_effect(server: ToolServer, client: httpx.AsyncClient) -> None:
    for _ in range(2):
        await client.post(server.tool_url("twice"), headers=keyed("k"))
    assert [effect.body["id"] for effect in await server.effects("twice")] == ["twice-1", "twice-2"]


async def test_dedupe_answers_a_known_key_as_the_first_time(server: ToolServer, client: httpx.AsyncClient) -> None:
    steps: Steps = [{"status": 201, "body": {"n": 1}}, {"body": {"n": 2}}, {"fault": "truncated"}, {"status": 403}]
    await server.script("once", steps, dedupe=True, key_header="X-Request-Id")
    headers = {"x-request-id": "k"}
    first = await client.post(server.tool_url("once"), headers=headers)
    second = await client.post(server.tool_url("once"), headers=headers)
    assert (first.status_code, first.json()) == (second.status_code, second.json()) == (201, {"n": 1})
    with pytest.raises(httpx.RemoteProtocolError):
        await client.post(server.tool_url("once"), headers=headers)
    assert (await client.post(server.tool_url("once"), headers=headers)).status_code == 403
    assert [call.committed for call in await server.calls("once")] == [True, False, False, False]
    (effect,) = await server.effects("once")
    assert (effect.key, effect.status, effect.body) == ("k", 201, {"n": 1})


async def test_dedupe_tells_keys_apart(server: ToolServer, client: httpx.AsyncClient) -> None:
    await server.script("apart", [], dedupe=True)
    for headers in (keyed("a"), keyed("b"), keyed("a"), {}, {}):
        await client.post(server.tool_url("apart"), headers=headers)
    assert [effect.key for effect in await server.effects("apart")] == ["a", "b", None, None]


# Reconcile.


async def test_reconcile_tells_what_is_committed(server: ToolServer, client: httpx.AsyncClient) -> None:
    key = "run/1:node é"
    assert server.reconcile_url("asked") == f"{server.url}/r/asked/{{idempotency_key}}"
    url = server.reconcile_url("asked").replace("{idempotency_key}", "run%2F1:node%20%C3%A9")
    before = await client.get(url)
    await server.script("asked", [{"body": {"n": 1}}, {"body": {"n": 2}}], key_header="X-Key")
    for _ in range(2):
        await client.post(server.tool_url("asked"), headers={b"X-Key": key.encode()})
    after = await client.get(url)
    assert (before.status_code, before.json()) == (404, {})
    assert (after.status_code, after.json()) == (200, {"result": {"n": 1}})
    assert [(call.key, call.committed) for call in await server.reconcile_calls("asked")] == [(key, False)] * 2
    assert len(await server.calls("asked")) == 2


async def test_reconcile_follows_its_script(server: ToolServer, client: httpx.AsyncClient) -> None:
    await client.post(server.tool_url("scripted"), headers=keyed("k"))
    await server.reconcile_script("scripted", [{"status": 503}, {"body": {"x": 1}}, {"fault": "fin_after_read"}, {}])
    url = server.reconcile_url("scripted").format(idempotency_key="k")
    unavailable, own = await client.get(url), await client.get(url)
    assert (unavailable.status_code, own.status_code, own.json()) == (503, 200, {"x": 1})
    with pytest.raises(httpx.RemoteProtocolError):
        await client.get(url)
    assert (await client.get(url)).json() == {"result": {"id": "scripted-1", "key": "k"}}
    assert [call.step for call in await server.reconcile_calls("scripted")] == [0, 1, 2, 3]


# Conditions instead of sleeping.


async def test_a_gate_holds_the_answer_but_not_the_effect(server: ToolServer, client: httpx.AsyncClient) -> None:
    await server.script("held", [{"gate": "held-gate"}])
    async with asyncio.TaskGroup() as tasks:
        answers = [tasks.create_task(client.post(server.tool_url("held"))) for _ in range(2)]
        await server.wait_for("held", calls=2, effects=2, timeout=5)
        assert not any(answer.done() for answer in answers)
        await server.open_gate("held-gate")
    assert [answer.result().status_code for answer in answers] == [200, 200]
    assert (await client.post(server.tool_url("held"))).status_code == 200


async def test_a_delayed_answer_is_committed_before(server: ToolServer, client: httpx.AsyncClient) -> None:
    await server.script("late", [{"delay": 60}])
    with pytest.raises(httpx.ReadTimeout):
        await client.post(server.tool_url("late"), timeout=SHORT)
    assert len(await server.effects("late")) == 1


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_peer_that_did_not_wait_is_no_error(server: ToolServer, fault: str) -> None:
    """Nor is it for the server: its fixture would tell."""
    name = f"impatient-{fault}"
    await server.script(name, [{"gate": name, "fault": fault}])
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"POST /t/{name} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}".encode())
    await server.wait_for(name, calls=1, timeout=5)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()  # an RST
    await server.open_gate(name)


async def test_a_call_counts_as_soon_as_its_head_is_read(server: ToolServer) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /t/head HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n")
    await server.wait_for("head", calls=1, timeout=5)
    (call,) = await server.calls("head")
    assert (call.body, call.committed) == (None, False)
    writer.write(b"12345")
    await server.wait_for("head", effects=1, timeout=5)
    (call,) = await server.calls("head")
    assert (call.body, call.committed) == (12345, True)
    writer.close()


async def test_waiting_in_vain_says_what_there_was(server: ToolServer) -> None:
    with pytest.raises(TimeoutError, match='"calls":0'):
        await server.wait_for("nobody", calls=1, timeout=0.05)


# The process.


async def test_what_happened_survives_a_kill(tmp_path: Path) -> None:
    async with ToolServer.start(tmp_path) as server, httpx.AsyncClient(timeout=10, verify=False) as client:
        url, port, pid = server.tool_url("survivor"), server.port, server.pid
        await server.script("survivor", [{"status": 201}, {"fault": "hang"}, {"status": 202}], dedupe=True)
        await client.post(url, json={"a": 1}, headers=keyed("k1"))
        hanging = asyncio.create_task(client.post(url, headers=keyed("k2")))
        await server.wait_for("survivor", effects=2, timeout=5)
        before = await server.calls("survivor"), await server.effects("survivor")
        await server.kill()
        with pytest.raises(httpx.RemoteProtocolError):
            await hanging
        with pytest.raises(httpx.ConnectError):
            await client.post(url)

        await server.restart()
        assert server.port == port
        assert server.pid != pid
        assert (await server.calls("survivor"), await server.effects("survivor")) == before
        replayed = await client.post(url, headers=keyed("k1"))
        assert (replayed.status_code, replayed.json()) == (201, {"id": "survivor-1", "key": "k1"})
        (*_, call) = await server.calls("survivor")
        assert (call.step, call.committed) == (2, False)
        assert len(await server.effects("survivor")) == 2


async def test_an_error_of_the_server_is_no_fault(tmp_path: Path) -> None:
    async def use() -> None:
        async with ToolServer.start(tmp_path) as server, httpx.AsyncClient(timeout=10, verify=False) as client:
            await server.script("liar", [{"headers": {"Content-Length": "1000"}}])
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get(server.tool_url("liar"))

    with pytest.raises(RuntimeError, match="LocalProtocolError: Too little data for declared Content-Length"):
        await use()


@pytest.mark.parametrize("end", ["sigterm", "eof"])
async def test_the_process_ends_cleanly_whatever_is_going_on(tmp_path: Path, end: str) -> None:
    command = [sys.executable, "-m", "tests.tool_server", "--port", "0", "--log", str(tmp_path / "log"), "--until-eof"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    listening = json.loads(process.stdout.readline())
    assert listening.keys() == {"port", "close_unread_port", "blackhole_port", "refused_port"}
    with socket.create_connection(("127.0.0.1", listening["port"])) as idle:
        if end == "sigterm":
            os.kill(process.pid, signal.SIGTERM)
            _, stderr = process.communicate(timeout=5)
        else:
            _, stderr = process.communicate(timeout=5)  # which closes its stdin
        assert idle.recv(1) == b""
    assert (process.returncode, stderr) == (0, b"")
