"""The embedded server: what it keeps between starts, and what it says when it cannot start."""

import asyncio
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.lab import Bench
from tests.tool_server import ToolServer
from tests.waiting import eventually
from workers.embedded import EmbeddedServer, EmbeddedServerError, embedded_server
from workflows.attributes import SEARCH_ATTRIBUTES


async def test_a_dead_letter_waits_through_a_restart_of_server_and_worker(
    tool_server: ToolServer, tmp_path: Path
) -> None:
    data = tmp_path / "not" / "there yet"
    async with embedded_server(data, port=0, ui_port=0) as server:
        bench = Bench(server.client, tool_server, tmp_path, "embedded")
        await bench.tool("charge", [{"status": 403}, {"body": {"id": "c-1"}}])
        await bench.tool("mail", [{}])
        async with bench.worker():
            run = await bench.start(
                {"id": "charge", "tool": "charge", "input": {"amount": 1}},
                {"id": "mail", "tool": "mail", "after": ["charge"], "input": {}},
            )
            before = await bench.parked(run, "charge")
    async with embedded_server(data, port=0, ui_port=0) as server:
        bench.client = server.client
        run = server.client.get_workflow_handle(run.id)
        async with bench.worker():
            after = await bench.parked(run, "charge")
            assert after == before
            assert (await bench.status(run)).status == "BLOCKED"
            record = await bench.decide(run, "charge", "redrive")
            assert record.outcome == "ACCEPTED"
            result = await run.result()
    assert result["counts"] == {"SUCCEEDED": 2}
    denied, charged = await tool_server.calls(bench.unique("charge"))
    assert denied.key == charged.key == before.idempotency_key
    assert len(await tool_server.calls(bench.unique("mail"))) == 1


async def test_a_folder_is_used_by_one_server_and_free_again_once_that_has_ended(tmp_path: Path) -> None:
    async with embedded_server(tmp_path, port=0, ui_port=0):
        with pytest.raises(EmbeddedServerError, match=r"another Temporal server uses the folder .* REDRIVE_DATA"):
            async with embedded_server(tmp_path, port=0, ui_port=0):
                pass
    async with embedded_server(tmp_path, port=0, ui_port=0) as server:
        assert await server.client.service_client.check_health()


async def test_a_server_that_a_killed_process_has_left_behind_keeps_its_folder(tmp_path: Path) -> None:
    program = (
        "import asyncio, os, sys; from pathlib import Path; from workers.embedded import embedded_server\n"
        "async def main():\n"
        "    async with embedded_server(Path(sys.argv[1]), port=0, ui_port=0):\n"
        "        os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, str(tmp_path))
    assert await process.wait() == -signal.SIGKILL
    with pytest.raises(EmbeddedServerError, match="pkill -f"):
        async with embedded_server(tmp_path, port=0, ui_port=0):
            pass
    killed = await asyncio.create_subprocess_exec("pkill", "-f", str(tmp_path / "temporal.db"))
    assert await killed.wait() == 0

    async def again() -> bool:
        try:
            async with embedded_server(tmp_path, port=0, ui_port=0):
                return True
        except EmbeddedServerError:
            return False

    await eventually(again, "the folder to be free")


async def test_it_listens_on_this_machine_alone_and_has_its_ui(temporal: EmbeddedServer) -> None:
    assert temporal.address.startswith("127.0.0.1:")
    assert temporal.ui_url.startswith("http://127.0.0.1:")
    assert await temporal.client.service_client.check_health()


async def test_its_namespace_knows_the_search_attributes(temporal: EmbeddedServer) -> None:
    for key in SEARCH_ATTRIBUTES:
        count = await temporal.client.count_workflows(f"{key.name} = 'nobody-has-this'")
        assert count.count == 0


@pytest.mark.parametrize(("which", "option"), [("port", "--port"), ("ui_port", "--ui-port")])
async def test_a_port_that_is_taken_is_named_with_the_option_that_chooses_another(
    tmp_path: Path, which: str, option: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number: int = taken.getsockname()[1]
        port, ui_port = (number, 0) if which == "port" else (0, number)
        with pytest.raises(EmbeddedServerError) as refused:
            async with embedded_server(tmp_path / "data", port=port, ui_port=ui_port):
                raise AssertionError("it started")
    assert str(number) in str(refused.value)
    assert option in str(refused.value)


@pytest.mark.parametrize("what", ["a file in its place", "a database that is none"])
async def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path, what: str) -> None:
    data = tmp_path / "data"
    if what == "a file in its place":
        data.write_text("mine")
    else:
        data.mkdir()
        (data / "temporal.db").write_bytes(b"this is a letter to my bank, and no database " * 100)
    with pytest.raises(EmbeddedServerError) as refused:
        async with embedded_server(data, port=0, ui_port=0):
            raise AssertionError("it started")
    assert str(data) in str(refused.value)
