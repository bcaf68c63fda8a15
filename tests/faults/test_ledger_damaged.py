"""The SQLite ledger deleted, replaced, damaged, not writable, or on a full disk: nothing is sent without a record.

The worker is a process of its own, so that what it leaves behind is what a real one leaves behind.
"""

import asyncio
import contextlib
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import WorkflowHandle

from contracts.dispatch import FailureDetails
from tests.faults.lookup import dispatched, last_failure, node_result, pending_call
from tests.lab import Bench
from tests.waiting import eventually
from tests.worker_process import WorkerProcess

Run = WorkflowHandle[Any, Any]

_ROOT = Path(__file__).resolve().parents[2]
NODE = {"id": "call", "input": {}}


async def turned_away(bench: Bench, run: Run) -> FailureDetails:
    """Why the run's call has come back without having been sent."""

    async def failure() -> FailureDetails | None:
        call = await pending_call(bench, run, "call")
        return await last_failure(call) if call is not None else None

    found = await eventually(failure, "a delivery that came back")
    assert (found.category, found.code) == ("DEPENDENCY_DOWN", "ledger_unavailable")
    assert (found.side_effect, found.attempt) == ("NONE", 0)
    assert found.next_eligible_at is not None
    return found


async def add_tools(bench: Bench) -> None:
    await bench.tool("answered", [{"gate": bench.unique("gate")}], timeout="60s")
    await bench.tool("unsent", [{}])


async def in_flight(bench: Bench) -> Run:
    """A run whose call has been sent, and waits for its answer."""
    run = await bench.start({**NODE, "tool": "answered"})
    await bench.tools.wait_for(bench.unique("answered"), calls=1)
    return run


async def answer_kept(bench: Bench, worker: WorkerProcess, run: Run) -> None:
    """The answer comes, and the worker has it, and cannot commit it."""
    await bench.tools.open_gate(bench.unique("gate"))
    await eventually(lambda: "is kept" in worker.log, "an answer that cannot be committed")
    await dispatched(bench, run, "call")


async def went_on(bench: Bench, *runs: Run) -> None:
    """Both runs end well, each by one call in one attempt."""
    for run in runs:
        async with asyncio.timeout(90):
            assert (await run.result())["status"] == "SUCCEEDED"
        node = await node_result(bench, run, "call")
        assert (node["source"], node["attempt_count"]) == ("EXECUTED", 1)
    for tool in ("answered", "unsent"):
        assert len(await bench.tools.calls(bench.unique(tool))) == 1


@pytest.mark.parametrize("what", ["ledger.db", "ledger.db-wal", "ledger.db-shm", "."])
async def test_a_ledger_that_is_moved_away_stops_every_call_until_it_is_back(bench: Bench, what: str) -> None:
    """SQLite itself goes on writing to a file that has no name any more."""
    home = bench.folder / "ledger"
    bench.ledger = f"sqlite:///{home / 'ledger.db'}"
    moved, away = home / what, bench.folder / "away"
    await add_tools(bench)
    async with WorkerProcess.start(bench) as worker:
        answered = await in_flight(bench)
        moved.rename(away)
        unsent = await bench.start({**NODE, "tool": "unsent"})
        message = (await turned_away(bench, unsent)).message
        assert str(home / "ledger.db") in message
        assert "was deleted or replaced" in message
        assert "put it back" in message
        await answer_kept(bench, worker, answered)
        assert await bench.tools.calls(bench.unique("unsent")) == []
        away.rename(moved)
        await went_on(bench, answered, unsent)


def _folder_deleted(path: Path) -> None:
    shutil.rmtree(path.parent)


def _all_deleted(path: Path) -> None:
    for file in path.parent.glob("ledger.db*"):
        file.unlink()


def _directory(path: Path) -> None:
    _all_deleted(path)
    path.mkdir()


def _replaced(path: Path) -> None:
    """By an empty one, as `touch` and some backup programs leave it."""
    _all_deleted(path)
    path.touch()


def _replaced_by_copy(path: Path) -> None:
    copy = path.with_suffix(".copy")
    shutil.copy(path, copy)
    copy.rename(path)


@pytest.mark.parametrize("damage", [_all_deleted, _folder_deleted, _replaced, _directory])
async def test_what_a_lost_ledger_knew_waits_for_people_and_is_never_sent_blindly(
    bench: Bench, damage: Callable[[Path], None]
) -> None:
    path = bench.folder / "ledger" / "ledger.db"
    bench.ledger = f"sqlite:///{path}"
    await add_tools(bench)
    async with WorkerProcess.start(bench) as worker:
        answered = await in_flight(bench)
        damage(path)
        unsent = await bench.start({**NODE, "tool": "unsent"})
        assert str(path) in (await turned_away(bench, unsent)).message
        await answer_kept(bench, worker, answered)
    if path.is_dir():
        path.rmdir()
    async with bench.worker():
        for run in (answered, unsent):
            entry = await bench.parked(run, "call")
            assert (entry.error.category, entry.error.code) == ("UNKNOWN_SIDE_EFFECT", "ledger_lost")
            assert entry.side_effect == "POSSIBLE"
            assert entry.eligibility.refusals == ["SIDE_EFFECT_UNRESOLVED"]
        # A person knows what was done, or can find out.
        record = await bench.decide(answered, "call", "resolve", output={"id": "found"})
        assert record.outcome == "ACCEPTED"
        record = await bench.decide(unsent, "call", "redrive", override=["SIDE_EFFECT_UNRESOLVED"])
        assert record.outcome == "ACCEPTED"
        for run in (answered, unsent):
            async with asyncio.timeout(60):
                assert (await run.result())["status"] == "SUCCEEDED"
    for tool in ("answered", "unsent"):
        assert len(await bench.tools.calls(bench.unique(tool))) == 1


async def test_a_ledger_that_is_lost_with_its_worker_in_mid_call_is_missed(bench: Bench) -> None:
    """Not even the workflow task may be left of it that has made the call."""
    gate = bench.unique("never")
    await bench.tool("blind", [{"gate": gate}], timeout="60s")
    async with WorkerProcess.start(bench) as worker:
        run = await bench.start({**NODE, "tool": "blind"})
        await bench.tools.wait_for(bench.unique("blind"), calls=1)
        await worker.kill()
    _all_deleted(bench.folder / "ledger.db")
    async with bench.worker():
        entry = await bench.parked(run, "call")
        assert (entry.error.category, entry.error.code) == ("UNKNOWN_SIDE_EFFECT", "ledger_lost")
        assert (await bench.decide(run, "call", "resolve", output={"id": "found"})).outcome == "ACCEPTED"
        assert (await run.result())["status"] == "SUCCEEDED"
    assert len(await bench.tools.calls(bench.unique("blind"))) == 1


async def test_a_copy_in_the_ledgers_place_is_not_written_beside_it(bench: Bench) -> None:
    path = bench.folder / "ledger.db"
    await add_tools(bench)
    async with WorkerProcess.start(bench) as worker:
        answered = await in_flight(bench)
        _replaced_by_copy(path)
        unsent = await bench.start({**NODE, "tool": "unsent"})
        assert "replaced" in (await turned_away(bench, unsent)).message
        await answer_kept(bench, worker, answered)
        assert await bench.tools.calls(bench.unique("unsent")) == []


def _mounted(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0


def _unmount(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def _full(folder: Path, worker: WorkerProcess, small_disk: bool) -> Generator[None]:
    """No room for another byte: on a small file system of its own, or else by the process's limit on a file's size."""
    if small_disk:
        filler = folder / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(b"\0" * 4096):
                pass
        yield
        filler.unlink()
    else:
        unlimited = resource.RLIM_INFINITY
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, ((folder / "ledger.db-wal").stat().st_size, unlimited))
        yield
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (unlimited, unlimited))


async def test_a_full_disk_stops_every_call_until_there_is_room_again(bench: Bench) -> None:
    home = bench.folder / "ledger"
    home.mkdir()
    bench.ledger = f"sqlite:///{home / 'ledger.db'}"
    await add_tools(bench)
    small_disk = _mounted("-t", "tmpfs", "-o", "size=1m", "redrive-test", str(home))
    try:
        async with WorkerProcess.start(bench) as worker:
            answered = await in_flight(bench)
            with _full(home, worker, small_disk):
                # Its input has no room where the last one may still have left some.
                unsent = await bench.start({**NODE, "tool": "unsent", "input": {"padding": "x" * 100_000}})
                message = (await turned_away(bench, unsent)).message
                assert str(home / "ledger.db") in message
                assert "the space on its disk" in message
                assert "goes on by itself" in message
                await answer_kept(bench, worker, answered)
                assert await bench.tools.calls(bench.unique("unsent")) == []
            await went_on(bench, answered, unsent)
    finally:
        if small_disk:
            _unmount(home)


async def command(bench: Bench) -> tuple[int, str]:
    """`redrive worker`, until it ends by itself."""
    ran = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "cli.main", "worker"],
        cwd=_ROOT,
        env=bench.environment(bench.client.service_client.config.target_host),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ran.returncode, ran.stderr


@contextlib.contextmanager
def _read_only(folder: Path) -> Generator[None]:
    """A folder that cannot be written; permissions do not hold root, but a mount does."""
    if _mounted("--bind", str(folder), str(folder)):
        try:
            assert _mounted("-o", "remount,bind,ro", str(folder))
            yield
        finally:
            _unmount(folder)
        return
    files = [folder, *folder.iterdir()]
    modes = [file.stat().st_mode for file in files]
    for file in files:
        file.chmod(0o555)
    yield
    for file, mode in zip(files, modes, strict=True):
        file.chmod(mode)


@contextlib.contextmanager
def _garbage(folder: Path) -> Generator[None]:
    """In all of its pages but the first."""
    with _changed(folder, lambda content: content[:4096] + b"\xa5" * (len(content) - 4096)):
        yield


@contextlib.contextmanager
def _truncated(folder: Path) -> Generator[None]:
    with _changed(folder, lambda content: content[: len(content) // 2]):
        yield


@contextlib.contextmanager
def _not_a_database(folder: Path) -> Generator[None]:
    with _changed(folder, lambda content: b"\xa5" * len(content)):
        yield


@contextlib.contextmanager
def _changed(folder: Path, change: Callable[[bytes], bytes]) -> Generator[None]:
    path = folder / "ledger.db"
    content = path.read_bytes()
    path.write_bytes(change(content))
    yield
    for name in ("ledger.db-wal", "ledger.db-shm"):
        (folder / name).unlink(missing_ok=True)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "cure"),
    [
        (_read_only, "its folder's permissions"),
        (_truncated, "it is damaged"),
        (_not_a_database, "it is damaged"),
    ],
)
async def test_a_worker_does_not_start_on_a_ledger_it_cannot_use_and_goes_on_once_it_is_mended(
    bench: Bench, damage: Callable[[Path], contextlib.AbstractContextManager[None]], cure: str
) -> None:
    home = bench.folder / "ledger"
    bench.ledger = f"sqlite:///{home / 'ledger.db'}"
    await bench.tool("pay", [{"status": 429, "headers": {"retry-after": "1"}}, {}])
    async with WorkerProcess.start(bench) as worker:
        run = await bench.start({**NODE, "tool": "pay"})
        await bench.tools.wait_for(bench.unique("pay"), calls=1)
        worker.terminate()
        assert await worker.exit_code() == 0
    with damage(home):
        code, errors = await command(bench)
        assert code == 3, errors
        assert str(home / "ledger.db") in errors
        assert cure in errors
        assert "Traceback" not in errors
    calls = len(await bench.tools.calls(bench.unique("pay")))
    async with bench.worker():
        async with asyncio.timeout(90):
            assert (await run.result())["status"] == "SUCCEEDED"
    assert (calls, len(await bench.tools.calls(bench.unique("pay")))) in ((1, 2), (2, 2))


async def test_garbage_within_a_ledger_stops_every_call_that_needs_it(bench: Bench) -> None:
    """What is damaged is found when it is read: a look at all of a large ledger would hold up every start."""
    home = bench.folder / "ledger"
    bench.ledger = f"sqlite:///{home / 'ledger.db'}"
    await bench.tool("unsent", [{}])
    async with WorkerProcess.start(bench) as worker:
        worker.terminate()
        assert await worker.exit_code() == 0
    with _garbage(home):
        async with WorkerProcess.start(bench) as worker:
            run = await bench.start({**NODE, "tool": "unsent"})
            message = (await turned_away(bench, run)).message
            assert str(home / "ledger.db") in message
            assert "it is damaged" in message
            assert await bench.tools.calls(bench.unique("unsent")) == []
    async with bench.worker(), asyncio.timeout(90):
        assert (await run.result())["status"] == "SUCCEEDED"
    assert len(await bench.tools.calls(bench.unique("unsent"))) == 1
