"""Client connections: accepted by the parent, each handed to the worker that has the fewest.

Why not SO_REUSEPORT: the kernel deals connections out by a hash, so of few long-lived ones one
worker may get most; those that wait in a dead worker's queue are lost; and a second gateway
started by mistake would share the port in silence. A connection is handed over once, as a
descriptor; none of its bytes passes the parent.

Clients reuse the connections they used last, so that as many connections are not as much work:
when one worker answers clearly more than another, it gives idle connections away, those first
that were used last. It has to have answered more twice in a row: workers tell ten times a second,
so of equal ones one has told three times by now and the other twice.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Final

BACKLOG: Final = 4096
AT_ONCE: Final = 64
"""Connections accepted before other work has its turn."""
EVEN_S: Final = 0.25
"""How often the workers' shares are compared."""
EVEN_FROM: Final = 10
"""Requests in that time from which on they are."""
UNEVEN: Final = 1.15
"""Times the mean: what a worker may answer before it gives connections away."""
FAR_UNEVEN: Final = 1.3
"""From here on it gives away half of what it has too many, not one or two."""
PAUSE_S: Final = 0.05
"""Before accepting again, when the system has no descriptors or a worker takes none."""

_log = logging.getLogger("sluice.workers")


def bound(host: str, port: int) -> list[socket.socket]:
    """Sockets bound to every address of a host, not listening yet. Raises OSError.

    For port 0 the system chooses one, the same for all addresses.
    """
    found: list[socket.socket] = []
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    try:
        for family, kind, protocol, _, address in dict.fromkeys(infos):
            sock = socket.socket(family, kind, protocol)
            found.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            chosen = port or (found[0].getsockname()[1] if len(found) > 1 else 0)
            sock.bind((address[0], chosen, *address[2:]))
            sock.setblocking(False)  # noqa: FBT003
    except OSError:
        for sock in found:
            sock.close()
        raise
    return found


class Door:
    """The parent's side: accepts, and hands over."""

    def __init__(self, listeners: Sequence[socket.socket]) -> None:
        """`listeners`: bound, non-blocking."""
        self._listeners = listeners
        self._ways: dict[int, socket.socket] = {}
        """Worker -> the socket that descriptors go through."""
        self._open: dict[int, int] = {}
        """Worker -> connections handed over and not closed, as far as it said."""
        self._answered: dict[int, int] = {}
        """Worker -> requests since the shares were compared."""
        self.ask_back: Callable[[int, int], None] = lambda _index, _count: None
        """Has a worker give so many connections away."""
        self._busiest = -1
        """The worker that answered clearly more when the shares were last compared; -1: none."""
        self._evening: asyncio.TimerHandle | None = None
        self._accepting = False
        self._listening = False
        self._pause: asyncio.TimerHandle | None = None
        self._least = -1
        """The worker that answered the fewest requests lately."""

    def add(self, index: int, way: socket.socket) -> None:
        """A worker is ready: from now on it gets its share."""
        way.setblocking(False)  # noqa: FBT003
        self._ways[index] = way
        self._open[index] = 0
        asyncio.get_running_loop().add_reader(way, self._take_back, index)
        if self._listening:
            self._resume()

    def remove(self, index: int) -> None:
        """A worker takes no more. Without any, connections wait."""
        way = self._ways.pop(index, None)
        self._open.pop(index, None)
        if way is not None:
            asyncio.get_running_loop().remove_reader(way)
            way.close()
        if not self._ways:
            self._rest()

    def told(self, index: int, closed: int, answered: int) -> None:
        """So many of a worker's connections have ended, and so many requests."""
        if index in self._open:
            self._open[index] = max(0, self._open[index] - closed)
            self._answered[index] = self._answered.get(index, 0) + answered

    def listen(self) -> None:
        """Begin."""
        for listener in self._listeners:
            listener.listen(BACKLOG)
        self._listening = True
        if self._ways:
            self._resume()
        self._evening = asyncio.get_running_loop().call_later(EVEN_S, self._even)

    def close(self) -> None:
        """Stop listening."""
        self._rest()
        self._listening = False
        if self._evening is not None:
            self._evening.cancel()
        for listener in self._listeners:
            listener.close()
        for index in list(self._ways):
            self.remove(index)

    # -- inside

    def _resume(self) -> None:
        self._pause = None
        if not self._accepting:
            self._accepting = True
            loop = asyncio.get_running_loop()
            for listener in self._listeners:
                loop.add_reader(listener, self._accept, listener)

    def _rest(self, pause_s: float | None = None) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        loop = asyncio.get_running_loop()
        if self._accepting:
            self._accepting = False
            for listener in self._listeners:
                loop.remove_reader(listener)
        if pause_s is not None:
            self._pause = loop.call_later(pause_s, self._resume)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(AT_ONCE):
            if not self._accepting:
                return
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.error("no connection can be accepted, trying again: %s", error)
                self._rest(PAUSE_S)
                return
            with connection:
                self._hand_over(connection)

    def _even(self) -> None:
        """Compare the workers' shares, and have the busiest give away what it used last."""
        self._evening = asyncio.get_running_loop().call_later(EVEN_S, self._even)
        answered, self._answered = self._answered, {}
        shares = {index: answered.get(index, 0) for index in self._ways}
        total = sum(shares.values())
        before, self._busiest = self._busiest, -1
        if len(shares) < 2 or total < EVEN_FROM:
            return
        busiest = max(shares, key=lambda index: shares[index])
        excess = shares[busiest] * len(shares) / total
        if excess <= UNEVEN:
            return
        self._busiest = busiest
        if busiest != before:
            return
        self._least = min(shares, key=lambda index: shares[index])
        count = 1 if excess < 1.5 else 2
        if excess > FAR_UNEVEN:  # many clients came at once while counts were old
            surplus = self._open.get(busiest, 0) * (1 - 1 / excess)
            count = max(count, min(AT_ONCE, int(surplus / 2)))
        self.ask_back(busiest, count)

    def _take_back(self, index: int) -> None:
        """Connections that a worker gives away: the least busy one gets them."""
        way = self._ways[index]
        try:
            said, descriptors, _, _ = socket.recv_fds(way, 1, 1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            said, descriptors = b"", []
        if not said:  # it is gone; its link says so, too
            asyncio.get_running_loop().remove_reader(way)
        for descriptor in descriptors:
            with socket.socket(fileno=descriptor) as connection:
                self._hand_over(connection, self._least)

    def _hand_over(self, connection: socket.socket, first: int = -1) -> None:
        """To the worker with the fewest connections, or to one that should get it."""
        for index in sorted(self._ways, key=lambda i: (i != first, self._open[i])):
            try:
                socket.send_fds(self._ways[index], [b"c"], [connection.fileno()])
            except OSError:
                continue  # it is full, or about to be removed
            self._open[index] += 1
            return
        _log.error("no worker process takes a connection: one is refused")
        self._rest(PAUSE_S)
