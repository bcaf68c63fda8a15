"""A local HTTP tool server that misbehaves on request, as a process of its own, and the handle tests drive it with.

    async with ToolServer.start(tmp_path) as server:
        await server.script("charge", [{"status": 503, "commit": True}, {}], dedupe=True)
        ...                                      # something calls server.tool_url("charge") under a key, twice
        assert len(await server.effects("charge")) == 1

One process serves many tests at once: names keep them apart, so every test takes names of its own.

`script.py` says what a step may hold, `faults.py` what each fault does, `ports.py` what the special ports do,
`state.py` what is remembered, `server.py` and `control.py` which routes there are, `handle.py` what a test can ask.
"""

from tests.tool_server.faults import FAULTS
from tests.tool_server.handle import ToolServer
from tests.tool_server.state import Call, Effect

__all__ = ["FAULTS", "Call", "Effect", "ToolServer"]
