"""A worker's end of the way that connections come by (`handover` has the parent's)."""

import asyncio
import contextlib
import socket
from collections.abc import Callable

from gateway.adapters.shared.handover import AT_ONCE


class Way:
    """Takes connections over, and gives them away."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setblocking(False)  # noqa: FBT003
        self._serve: Callable[[], asyncio.Protocol] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun = 0

    @property
    def taken(self) -> int:
        """Connections so far whose protocol stands, or stood, or could not be made.

        Without those on their way: neither open nor ended, they would be taken for ended.
        """
        return self._begun - len(self._tasks)

    def open(self, serve: Callable[[], asyncio.Protocol]) -> None:
        """Begin: `serve` makes the protocol of one connection."""
        self._serve = serve
        asyncio.get_running_loop().add_reader(self._sock, self._take)

    def give_away(self, connection: socket.socket) -> None:
        """Hand a connection back, for another worker."""
        with connection, contextlib.suppress(OSError):
            socket.send_fds(self._sock, [b"c"], [connection.fileno()])

    def close(self) -> None:
        """Take no more."""
        if self._serve is not None:
            self._serve = None
            asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()

    def _take(self) -> None:
        for _ in range(AT_ONCE):
            try:
                said, descriptors, _, _ = socket.recv_fds(self._sock, 1, 1)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                said, descriptors = b"", []
            if not said:  # the parent is gone; the link says so, too
                asyncio.get_running_loop().remove_reader(self._sock)
                return
            for descriptor in descriptors:
                self._begin(socket.socket(fileno=descriptor))

    def _begin(self, connection: socket.socket) -> None:
        serve = self._serve
        if serve is None:
            connection.close()
            return
        self._begun += 1
        connection.setblocking(False)  # noqa: FBT003
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = asyncio.ensure_future(self._connect(serve, connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(
        self, serve: Callable[[], asyncio.Protocol], connection: socket.socket
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(serve, connection)
        except OSError:
            connection.close()  # it is gone already
