"""On what it was measured: the machine and the versions of everything that took part."""

import platform
import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Final

import psutil
from pydantic import BaseModel

from benchmarks.contenders.restate import restate_server
from tests.postgres import programs
from workers.embedded import temporal_binary

__all__ = ["Machine", "look"]

_LIBRARIES: Final = (
    *("redrive", "temporalio", "httpx", "httpx-aiohttp", "aiohttp"),
    *("restate-sdk", "hypercorn", "dbos", "celery", "redis"),
)
_VERSION: Final = re.compile(r"\d+(\.\d+)+( \(Server [^)]*\))?")


class Machine(BaseModel):
    """A machine."""

    processor: str
    cores: int
    memory_gb: float
    system: str
    python: str
    versions: dict[str, str]


def look() -> Machine:
    """This machine."""
    binaries = {
        "temporal": temporal_binary(),
        "restate-server": restate_server(),
        "redis-server": shutil.which("redis-server"),
        "postgres": _postgres(),
    }
    servers = {name: _said_by(path) for name, path in binaries.items() if path is not None}
    return Machine(
        processor=_processor(),
        cores=psutil.cpu_count() or 0,
        memory_gb=round(psutil.virtual_memory().total / 1e9, 1),
        system=platform.platform(aliased=True),
        python=platform.python_version(),
        versions={name: version(name) for name in _LIBRARIES} | servers,
    )


def _processor() -> str:
    names = [line for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


def _postgres() -> str | None:
    try:
        return str(programs() / "postgres")
    except RuntimeError:
        return None


def _said_by(binary: str) -> str:
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    found = _VERSION.search(said)
    return found[0] if found else said.strip()
