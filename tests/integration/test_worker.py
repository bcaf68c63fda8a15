"""A worker's start: what it registers, and what it refuses to start with."""

import asyncio
import inspect
import sqlite3
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from pydantic import SecretStr
from temporalio.api.enums.v1 import IndexedValueType, TaskQueueType
from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest, RemoveSearchAttributesRequest
from temporalio.client import Client
from temporalio.common import SearchAttributeKey
from temporalio.plugin import SimplePlugin
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import WorkerConfig

from activities import stubs
from activities.ledger import LedgerUnavailableError
from contracts.tools import CatalogError
from tests.lab import Bench
from tests.postgres import PostgresServer
from tests.tool_server import ToolServer
from tests.worker_process import pollers
from workers.client import DATA_CONVERTER, TemporalUnavailableError
from workers.embedded import temporal_binary
from workers.settings import Settings
from workers.worker import running_worker
from workflows.attributes import SEARCH_ATTRIBUTES

_BAD_CATALOG = """
[tools.charge]
url = "ftp://pay.example.com"
timeout = "soon"
colour = "red"

[tools."not a name"]
url = "https://pay.example.com"

[tools.mail]
url = "https://mail.example.com/{"
input_schema = { type = "nothing" }
"""


class _Watched(SimplePlugin):
    """Notes with what each worker is made."""

    def __init__(self) -> None:
        super().__init__("watched")
        self.workers: list[WorkerConfig] = []

    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        self.workers.append(config)
        return super().configure_worker(config)


def _watched(client: Client) -> tuple[Client, _Watched]:
    plugin = _Watched()
    config = client.config()
    config["plugins"] = [plugin]
    return Client(**config), plugin


def _registered(config: WorkerConfig) -> dict[str, Callable[..., Any]]:
    return {_name(function): function for function in config.get("activities", [])}


def _name(function: Callable[..., Any]) -> str:
    name: str = vars(getattr(function, "__func__", function))["__temporal_activity_definition"].name
    return name


def _types(function: Callable[..., Any]) -> tuple[list[tuple[str, Any]], Any]:
    signature = inspect.signature(function, eval_str=True)
    return [(name, given.annotation) for name, given in signature.parameters.items()], signature.return_annotation


async def test_every_stub_has_an_implementation_of_the_same_name_and_types(bench: Bench) -> None:
    await bench.tool("charge", [{}])
    client, watched = _watched(bench.client)
    async with running_worker(client, bench.settings()):
        (main,) = watched.workers
    registered = _registered(main)
    assert sorted(registered) == sorted(stubs.__all__)
    for name in stubs.__all__:
        stub = getattr(stubs, name)
        assert _name(stub) == name
        given, answer = _types(stub)
        taken, answered = _types(registered[name])
        assert given == taken, name
        # `Any`: the workflow reads the answer itself.
        assert answer in (answered, Any), name


async def test_a_tool_with_a_rate_is_called_on_a_queue_of_its_own_that_the_server_paces(bench: Bench) -> None:
    await bench.tool("plain", [{}])
    await bench.tool("paced", [{}], rate_per_second=50)
    client, watched = _watched(bench.client)
    async with running_worker(client, bench.settings()):
        main, paced = watched.workers
        assert (main.get("task_queue"), main.get("max_task_queue_activities_per_second")) == (bench.queue, None)
        assert paced.get("task_queue") == f"{bench.queue}.paced"
        assert paced.get("max_task_queue_activities_per_second") == 50
        assert list(_registered(paced)) == ["call_tool"]
        run = await bench.start({"id": "a", "tool": "plain", "input": {}}, {"id": "b", "tool": "paced", "input": {}})
        await run.result()


async def _not_polled(bench: Bench) -> bool:
    kinds = (TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW, TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY)
    return not any([await pollers(bench.client, bench.queue, kind) for kind in kinds])


async def _refused(bench: Bench, error: type[Exception], **changes: Any) -> str:
    with pytest.raises(error) as refused:
        async with running_worker(bench.client, bench.settings().model_copy(update=changes)):
            raise AssertionError("it started")
    assert await _not_polled(bench)
    return str(refused.value)


async def test_a_bad_catalog_is_refused_before_anything_is_polled_and_every_problem_is_named(bench: Bench) -> None:
    await bench.tool("charge")
    bad = bench.folder / "bad.toml"
    bad.write_text(_BAD_CATALOG)
    message = await _refused(bench, CatalogError, tools=bad)
    assert str(bad) in message
    for place in (
        'tools."charge".url',
        'tools."charge".timeout',
        'tools."charge".colour: unknown field',
        'tools."not a name"',
        'tools."mail".url',
        'tools."mail".input_schema',
    ):
        assert place in message
    assert not (bench.folder / "ledger.db").exists()


@pytest.mark.parametrize("content", [None, b"", b"tools = 1", b"[tools", b"\xff\xfe", b"[tools.charge]\n"])
async def test_a_file_that_is_no_catalog_is_named(bench: Bench, content: bytes | None) -> None:
    await bench.tool("charge")
    path = bench.folder / "other.toml"
    if content is not None:
        path.write_bytes(content)
    assert str(path) in await _refused(bench, CatalogError, tools=path)


async def test_every_missing_secret_is_named_with_its_tool(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.tool("charge", auth={"bearer_env": "REDRIVE_TEST_ABSENT"})
    await bench.tool("mail", auth={"header": "x-api-key", "env": "REDRIVE_TEST_EMPTY"})
    await bench.tool("post", auth={"bearer_env": "REDRIVE_TEST_BLANK"})
    monkeypatch.setenv("REDRIVE_TEST_EMPTY", "")
    monkeypatch.setenv("REDRIVE_TEST_BLANK", "line\nbreak-of-a-secret")
    message = await _refused(bench, CatalogError)
    for tool, variable in (
        ("charge", "REDRIVE_TEST_ABSENT"),
        ("mail", "REDRIVE_TEST_EMPTY"),
        ("post", "REDRIVE_TEST_BLANK"),
    ):
        assert f'tools."{tool}".auth' in message
        assert variable in message
    assert "break-of-a-secret" not in message


def _directory(path: Path) -> None:
    path.mkdir()


def _not_sqlite(path: Path) -> None:
    path.write_bytes(b"this is a letter to my bank, and no database " * 100)


def _somebody_elses(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE node (mine TEXT)")
    connection.close()


def _newer(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA user_version = 99")
    connection.close()


def _below_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text("")


@pytest.mark.parametrize("make", [_directory, _not_sqlite, _somebody_elses, _newer, _below_a_file])
async def test_a_ledger_that_cannot_be_used_is_named_and_left_as_it_is(
    bench: Bench, make: Callable[[Path], None]
) -> None:
    await bench.tool("charge")
    path = bench.folder / "place" / "mine.db"
    path.parent.mkdir()
    make(path)
    before = path.read_bytes() if path.is_file() else None
    message = await _refused(bench, LedgerUnavailableError, ledger=SecretStr(f"sqlite:///{path}"))
    assert str(path) in message
    assert "REDRIVE_LEDGER" in message or "use the redrive that wrote it" in message
    assert (path.read_bytes() if path.is_file() else None) == before


async def test_a_ledger_of_another_kind_is_refused_without_its_password(bench: Bench) -> None:
    await bench.tool("charge")
    secret = SecretStr("postgresql://redrive:hunter2@127.0.0.1:1/redrive")
    message = await _refused(bench, LedgerUnavailableError, ledger=secret)
    assert "hunter2" not in message
    assert "REDRIVE_LEDGER" in message or "127.0.0.1" in message


@asynccontextmanager
async def _bare_server(attributes: list[SearchAttributeKey[Any]]) -> AsyncGenerator[Client, None]:
    """A server as it comes, without what Redrive needs."""
    starting = WorkflowEnvironment.start_local(
        data_converter=DATA_CONVERTER,
        dev_server_existing_path=temporal_binary(),
        dev_server_log_level="error",
        search_attributes=attributes,
    )
    async with await starting as server:
        yield server.client


async def _attributes(client: Client) -> Mapping[str, IndexedValueType.ValueType]:
    known = await client.operator_service.list_search_attributes(
        ListSearchAttributesRequest(namespace=client.namespace)
    )
    return known.custom_attributes


async def test_the_search_attributes_are_registered_on_a_server_that_lacks_them(
    tool_server: ToolServer, tmp_path: Path
) -> None:
    async with _bare_server([SearchAttributeKey.for_int("RedriveTool")]) as client:
        bench = Bench(client, tool_server, tmp_path, "bare-server")
        await bench.tool("charge", [{"status": 403}, {}])
        # One of another type cannot be repaired from here, and would leave every workflow in task failures.
        message = await _refused(bench, TemporalUnavailableError)
        assert "RedriveTool" in message
        assert "search-attribute remove" in message
        await client.operator_service.remove_search_attributes(
            RemoveSearchAttributesRequest(namespace=client.namespace, search_attributes=["RedriveTool"])
        )
        # Two workers of two queues, started for the first time and at once.
        other = bench.settings().model_copy(update={"task_queue": "bare-server-too"})
        await asyncio.gather(_briefly(client, other), _briefly(client, bench.settings()))
        known = await _attributes(client)
        for key in SEARCH_ATTRIBUTES:
            assert known[key.name] == IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD
        async with bench.worker():
            run = await bench.start({"id": "call", "tool": "charge", "input": {}})
            await bench.parked(run, "call")
            await bench.decide(run, "call", "redrive")
            assert (await run.result())["status"] == "SUCCEEDED"


async def _briefly(client: Client, settings: Settings) -> None:
    async with running_worker(client, settings):
        pass


async def _warnings(bench: Bench, host: str) -> list[str]:
    """What a worker warns of that reaches the same Temporal by another name."""
    await bench.tool("pay", [{}])
    port = bench.client.service_client.config.target_host.rpartition(":")[2]
    client = await Client.connect(f"{host}:{port}", data_converter=DATA_CONVERTER)
    with structlog.testing.capture_logs() as logs:
        async with running_worker(client, bench.settings()):
            pass
    return [log["event"] for log in logs if log["log_level"] == "warning"]


_ELSEWHERE = "0.0.0.0"
"""Linux takes it for this machine; what it says is another one's."""


async def test_a_sqlite_ledger_beside_a_temporal_elsewhere_is_warned_of_once(bench: Bench) -> None:
    for host in ("127.0.0.1", "localhost"):
        assert await _warnings(bench, host) == []
    (warning,) = await _warnings(bench, _ELSEWHERE)
    assert "one machine" in warning
    assert "REDRIVE_LEDGER" in warning


async def test_a_ledger_in_postgresql_is_for_any_number_of_machines(bench: Bench, postgres: PostgresServer) -> None:
    bench.ledger = postgres.url(await postgres.database())
    assert await _warnings(bench, _ELSEWHERE) == []


async def test_a_worker_names_its_ledger_without_the_password(bench: Bench, postgres: PostgresServer) -> None:
    await bench.tool("pay", [{}])
    url = postgres.url(await postgres.database())
    # libpq takes this for a password, most readers of URLs take it for a query.
    bench.ledger = url.replace("@", ":hunter2?x@", 1)
    assert bench.ledger != url
    with structlog.testing.capture_logs() as logs:
        async with bench.worker():
            pass
    [named] = [log["ledger"] for log in logs if log["event"] == "polling"]
    assert named.startswith("postgresql://")
    assert named.endswith(url.rpartition("/")[2])
    assert "hunter2" not in str(logs)
