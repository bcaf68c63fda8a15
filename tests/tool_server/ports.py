"""The special ports: what can go wrong before a request is read."""

import asyncio
import contextlib
import socket

HOST = "127.0.0.1"
_PATIENCE = 0.05
"""Seconds after which a connect on the loopback has been dropped: one that can succeed takes microseconds."""


def bound(port: int = 0) -> socket.socket:
    """A socket bound to the port (0: a free one) which does not listen.

    As long as it is kept, connections to the port are refused, and nobody gets it by chance. With SO_REUSEADDR on both
    sides another process can still bind it, and listen (socket(7)).
    """
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((HOST, port))
    bound.setblocking(False)
    return bound


def port_of(bound: socket.socket) -> int:
    """The port it is bound to."""
    port: int = bound.getsockname()[1]
    return port


async def close_unread(listener: socket.socket) -> None:
    """Accepts for ever, and closes each connection when its first byte is there, unread: so the kernel sends an RST.

    Closing at once would be a race between our FIN and the peer's write, and what the peer sees a matter of luck.
    """
    listener.listen()
    loop = asyncio.get_running_loop()

    def close(peer: socket.socket) -> None:
        loop.remove_reader(peer)
        peer.close()

    while True:
        peer, _ = await loop.sock_accept(listener)
        loop.add_reader(peer, close, peer)


async def fill_backlog(listener: socket.socket) -> list[socket.socket]:
    """Listens, and fills the backlog, so that the kernel drops every further SYN and connect() times out.

    Returns:
        The connections which fill it. It stays full as long as they are kept.
    """
    listener.listen(0)
    loop = asyncio.get_running_loop()
    fillers: list[socket.socket] = []
    with contextlib.suppress(TimeoutError):  # the first SYN that is dropped
        while True:
            fillers.append(socket.socket())
            fillers[-1].setblocking(False)
            async with asyncio.timeout(_PATIENCE):
                await loop.sock_connect(fillers[-1], listener.getsockname())
    return fillers
