"""Accepts TLS connections: looks at the first byte, then lets the event loop do the handshake.

- A connection has HANDSHAKE_S from its start to the end of its handshake. At most MAX_HANDSHAKES
  are under way; beyond, the one that has taken longest is closed, so slow ones cannot keep fast
  ones out.
- A client that speaks plain HTTP gets an answer that says so.
- Each handshake uses the certificate of its moment.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from gateway.errors import BadRequest
from gateway.metrics import Counter
from gateway.web.http.certificates import Certificates
from gateway.web.http.client_connection import RareLog
from gateway.web.http.direct_reply import status_line
from gateway.web.problems import error_body

HANDSHAKE_S: Final = 10.0
"""From a connection's start to the end of its handshake."""
SHUTDOWN_S: Final = 5.0
"""For a client to confirm the end of a connection; meanwhile what it sends is ignored."""
MAX_HANDSHAKES: Final = 512
"""Connections before and in their handshake."""
ACCEPTS: Final = 64
"""Connections accepted before other work gets its turn."""
PAUSE_S: Final = 0.5
"""Between two tries to accept while open files are short."""
_HANDSHAKE: Final = 0x16
"""First byte of a TLS connection."""
_failed = RareLog(logging.getLogger("sluice.tls"), "failed TLS handshake")


class TlsListener:
    """Listens on sockets, in the way of asyncio.Server."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        protocol: Callable[[], asyncio.Protocol],
        certificates: Certificates,
        failures: Counter,
        *,
        backlog: int,
    ) -> None:
        """`failures`: handshakes that failed, by reason. Listens at once."""
        self.sockets = tuple(sockets)
        self._protocol = protocol
        self._certificates = certificates
        self._failures = failures
        self._loop = asyncio.get_running_loop()
        self._pending: dict[socket.socket, asyncio.Task[None]] = {}
        """Oldest first."""
        self._open = True
        for sock in self.sockets:
            sock.listen(backlog)
            self._listen(sock)

    def close(self) -> None:
        """Stop listening. Handshakes under way go on."""
        if self._open:
            self._open = False
            for sock in self.sockets:
                self._loop.remove_reader(sock)
                sock.close()

    async def wait_closed(self) -> None:
        """Wait for the end of handshakes under way."""
        if self._pending:
            await asyncio.wait(list(self._pending.values()))

    def _listen(self, sock: socket.socket) -> None:
        if self._open:
            self._loop.add_reader(sock, self._accept, sock)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS):
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, ConnectionError, InterruptedError):  # none waits, or it left
                return
            except OSError:  # no open file is left: do not ask again at once
                self._loop.remove_reader(listener)
                self._loop.call_later(PAUSE_S, self._listen, listener)
                return
            sock.setblocking(False)  # noqa: FBT003
            if len(self._pending) >= MAX_HANDSHAKES:
                self._failures.add("crowded")
                self._pending.pop(next(iter(self._pending))).cancel()
            task = self._loop.create_task(self._begin(sock))
            self._pending[sock] = task

    async def _begin(self, sock: socket.socket) -> None:
        """Make a connection of a socket, or close it."""
        why = "timeout"
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                first = await self._first_byte(sock)
                if first == _HANDSHAKE:
                    why = "failed"
                    await self._loop.connect_accepted_socket(
                        self._protocol,
                        sock,
                        ssl=self._certificates.context,
                        ssl_handshake_timeout=HANDSHAKE_S,
                        ssl_shutdown_timeout=SHUTDOWN_S,
                    )
                    return
                why = "left" if first is None else "plain_http"
                if first is not None:
                    await self._say_https(sock)
        except TimeoutError:
            why = "timeout"
        except OSError:  # also of TLS
            pass
        except asyncio.CancelledError:
            sock.close()
            raise
        finally:
            self._pending.pop(sock, None)
        self._fail(sock, why)

    def _fail(self, sock: socket.socket, why: str) -> None:
        with suppress(OSError):
            if why not in {"left", "plain_http"}:
                _failed.note(str(sock.getpeername()[0]))
        sock.close()
        if why != "left":
            self._failures.add(why)

    async def _first_byte(self, sock: socket.socket) -> int | None:
        """The first byte that a client sends, without taking it; None if it left."""
        arrived = self._loop.create_future()
        self._loop.add_reader(sock, _arrived, arrived)
        try:
            await arrived
        finally:
            self._loop.remove_reader(sock)
        seen = sock.recv(1, socket.MSG_PEEK)
        return seen[0] if seen else None

    async def _say_https(self, sock: socket.socket) -> None:
        """Answer a request in plain HTTP."""
        body = error_body(
            BadRequest(
                "This port speaks HTTPS. Begin the URL with https://.",
                reason="https_required",
                code="https_required",
            )
        )
        await self._loop.sock_recv(sock, 65_536)  # unread data would reset the answer
        await self._loop.sock_sendall(
            sock,
            b"%bcontent-type: application/json\r\nx-sluice-reason: https_required\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b"
            % (status_line(400), len(body), body),
        )


def _arrived(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
