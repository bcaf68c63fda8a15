"""`python -m tests.tool_server --port 0 --log PATH`: runs until SIGTERM.

When it listens it prints one line of JSON with its ports: `port`, `close_unread_port`, `blackhole_port` and
`refused_port`.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from tests.tool_server import ports
from tests.tool_server.server import Server
from tests.tool_server.state import State


async def run(port: int, log: Path, *, until_eof: bool) -> None:
    """Serves until SIGTERM, or the end of stdin if asked."""
    stop = asyncio.Event()

    def stop_at_eof() -> None:
        if not os.read(sys.stdin.fileno(), 1):
            stop.set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    if until_eof:
        loop.add_reader(sys.stdin.fileno(), stop_at_eof)

    listener = await asyncio.start_server(Server(State(log)).accept, ports.HOST, port, backlog=1_024)
    close_unread, blackhole, refused = ports.bound(), ports.bound(), ports.bound()
    accepting = asyncio.create_task(ports.close_unread(close_unread))
    filling = await ports.fill_backlog(blackhole)
    listening = {
        "port": listener.sockets[0].getsockname()[1],
        "close_unread_port": ports.port_of(close_unread),
        "blackhole_port": ports.port_of(blackhole),
        "refused_port": ports.port_of(refused),
    }
    sys.stdout.write(json.dumps(listening) + "\n")
    sys.stdout.flush()
    await stop.wait()
    listener.close()
    accepting.cancel()
    for kept in (close_unread, blackhole, refused, *filling):
        kept.close()


def main() -> None:
    """Reads the command line and runs."""
    parser = argparse.ArgumentParser(prog="tests.tool_server", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="where to listen; 0: a free port")
    parser.add_argument("--log", type=Path, required=True, help="where to keep what happens, across restarts")
    parser.add_argument("--until-eof", action="store_true", help="stop when stdin ends, with the one who started us")
    arguments = parser.parse_args()
    asyncio.run(run(arguments.port, arguments.log, until_eof=arguments.until_eof))


if __name__ == "__main__":
    main()
