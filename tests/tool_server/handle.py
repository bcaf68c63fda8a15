"""What a test holds of the server: it starts, scripts, asks, kills and restarts it."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter

from tests.tool_server import ports
from tests.tool_server.state import Call, Effect

_CALLS = TypeAdapter(list[Call])
_EFFECTS = TypeAdapter(list[Effect])
_ROOT = Path(__file__).resolve().parents[2]
_STOPPING = 5.0
"""Seconds that a stopping server may take."""


class ToolServer:
    """A running tool server. Usable from any event loop; names keep tests apart.

    Attributes:
        port: Where it listens. It is kept over `kill` and `restart`, and connections to it are refused in between.
        url: Its origin, `http://127.0.0.1:PORT`.
        close_unread_port: Accepts connections, and closes them with the request unread.
        blackhole_port: Connecting to it times out.
        refused_port: Connecting to it is refused.
    """

    port: int
    close_unread_port: int
    blackhole_port: int
    refused_port: int

    def __init__(self, directory: Path, port: int) -> None:
        self._log = directory / "tool_server.jsonl"
        self._stderr = directory / "tool_server.stderr"
        self._reserved = ports.bound(port)
        self.port = ports.port_of(self._reserved)
        self._process: subprocess.Popen[str] | None = None

    @classmethod
    @asynccontextmanager
    async def start(cls, directory: Path, port: int = 0) -> AsyncGenerator[Self, None]:
        """A server of its own, stopped at the end. Its log and its stderr are in `directory`.

        Raises:
            RuntimeError: If it does not start; or, at the end, if it had errors of its own, which look like a fault.
        """
        server = cls(directory, port)
        try:
            await server.restart()
            yield server
        finally:
            await server._stop()
        if errors := server._stderr.read_text():
            raise RuntimeError(f"the tool server had errors:\n{errors}")

    @property
    def url(self) -> str:
        """Its origin."""
        return f"http://{ports.HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """The process's id.

        Raises:
            RuntimeError: If it does not run.
        """
        if self._process is None:
            raise RuntimeError("the tool server does not run")
        return self._process.pid

    def tool_url(self, name: str) -> str:
        """Where the tool of this name is called."""
        return f"{self.url}/t/{quote(name, safe='')}"

    def reconcile_url(self, name: str) -> str:
        """Where that tool is asked, with a literal `{idempotency_key}` in it."""
        return f"{self.url}/r/{quote(name, safe='')}/{{idempotency_key}}"

    async def script(
        self,
        name: str,
        steps: Sequence[Mapping[str, object]],
        *,
        dedupe: bool = False,
        key_header: str = "idempotency-key",
    ) -> None:
        """Has the tool take these steps, from the first; what was called and done stays. See `script.Step`.

        Raises:
            ValueError: If a step is not one.
        """
        script = {"steps": list(steps), "dedupe": dedupe, "key_header": key_header}
        await self._ask("PUT", f"/_script/{quote(name, safe='')}", script)

    async def reconcile_script(self, name: str, steps: Sequence[Mapping[str, object]]) -> None:
        """Has the tool's reconcile route take these steps. One without status and body tells the truth.

        Raises:
            ValueError: If a step is not one.
        """
        await self._ask("PUT", f"/_script/{quote(name, safe='')}/reconcile", {"steps": list(steps)})

    async def calls(self, name: str) -> list[Call]:
        """The tool's calls, in the order of their arrival."""
        return _CALLS.validate_json(await self._ask("GET", f"/_calls/{quote(name, safe='')}"))

    async def reconcile_calls(self, name: str) -> list[Call]:
        """The requests to the tool's reconcile route, in the order of their arrival."""
        return _CALLS.validate_json(await self._ask("GET", f"/_calls/{quote(name, safe='')}/reconcile"))

    async def effects(self, name: str) -> list[Effect]:
        """What the tool has done, in order."""
        return _EFFECTS.validate_json(await self._ask("GET", f"/_effects/{quote(name, safe='')}"))

    async def wait_for(
        self, name: str, calls: int = 0, effects: int = 0, timeout: float = 30, *, reconcile_calls: int = 0
    ) -> None:
        """Returns once there have been at least so many (a call counts as soon as its head is read).

        Raises:
            TimeoutError: If there have not, after `timeout` seconds.
        """
        wanted = {"calls": calls, "effects": effects, "reconcile_calls": reconcile_calls}
        query = "&".join(f"{what}={count}" for what, count in wanted.items())
        await self._ask("GET", f"/_wait/{quote(name, safe='')}?{query}&timeout={timeout}", timeout=timeout)

    async def open_gate(self, gate: str) -> None:
        """Lets the answers go which wait at the gate, now and for ever."""
        await self._ask("POST", f"/_gate/{quote(gate, safe='')}")

    async def forget(self, name: str) -> None:
        """Forgets the scripts, the calls and the effects of the name."""
        await self._ask("DELETE", f"/_state/{quote(name, safe='')}")

    async def kill(self) -> None:
        """SIGKILL. Returns when the process is gone, its connections are closed, and its port refuses new ones."""
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
            self._forget_process()

    async def restart(self) -> None:
        """Starts it again on the same port, with all it remembers, killing it first if it runs.

        The special ports are new ones.

        Raises:
            RuntimeError: If it does not start.
        """
        await self.kill()
        arguments = ["--port", str(self.port), "--log", str(self._log), "--until-eof"]
        with self._stderr.open("ab") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.tool_server", *arguments],
                cwd=_ROOT,
                stdin=subprocess.PIPE,  # it ends with us, however we end
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self._process = process
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        if not line:
            await self.kill()
            raise RuntimeError(f"the tool server did not start:\n{self._stderr.read_text()}")
        listening = json.loads(line)
        self.close_unread_port = listening["close_unread_port"]
        self.blackhole_port = listening["blackhole_port"]
        self.refused_port = listening["refused_port"]

    async def _stop(self) -> None:
        """SIGTERM, and SIGKILL if that does not help."""
        if self._process is not None:
            self._process.terminate()
            try:
                await asyncio.to_thread(self._process.wait, _STOPPING)
            except subprocess.TimeoutExpired:
                await self.kill()
            else:
                self._forget_process()
        self._reserved.close()

    def _forget_process(self) -> None:
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
        self._process = None

    async def _ask(self, method: str, path: str, body: object = None, timeout: float = 30) -> bytes:
        """A request to a control route, on a connection of its own: no kill and no other event loop can break it."""
        async with httpx.AsyncClient(verify=False, trust_env=False, timeout=timeout + 10) as client:
            response = await client.request(method, self.url + path, json=body)
        match response.status_code:
            case 200:
                return response.content
            case 400:
                raise ValueError(response.json()["error"])
            case 408:
                raise TimeoutError(f"{method} {path}: only {response.text} after {timeout} s")
            case _:
                raise RuntimeError(f"{method} {path}: {response.status_code} {response.text}")
