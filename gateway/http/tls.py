"""The clients' port with TLS: the certificate in use, and connections until their handshake ends.

- The certificate is read anew when its files change. A pair that does not fit (a renewal writes one
  file after the other), or that cannot be read, changes nothing; the log says so once, and the next
  look tries again. Each handshake uses the certificate of its moment.
- The first byte of a connection is looked at: a client that speaks plain HTTP gets an answer that
  says so. Then the event loop does the handshake.
- A connection has HANDSHAKE_S from its start to the end of its handshake. At most MAX_HANDSHAKES
  are under way; beyond, the longest-waiting ones of the address that has most are closed.
- A handshake costs as much as serving a request, and needs no key. So one begins every
  BEGIN_EVERY_S at most, and addresses take turns: one address that floods costs others a turn each.
"""

import asyncio
import hashlib
import logging
import socket
import ssl
from _ssl import _test_decode_cert  # type: ignore[attr-defined]  # the only way without handshake
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from gateway.errors import BadRequest
from gateway.http.client_connection import RareLog, giving_way
from gateway.http.data_plane import closing
from gateway.http.wrong_keys import network
from gateway.metrics import Counter

LOOK_EVERY_S: Final = 2.0
_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Of TLS 1.2: forward secrecy and authenticated encryption. Those of 1.3 are all of that kind."""
HANDSHAKE_S: Final = 10.0
"""From a connection's start to the end of its handshake."""
SHUTDOWN_S: Final = 5.0
"""For a client to confirm the end of a connection; meanwhile what it sends is ignored."""
MAX_HANDSHAKES: Final = 512
"""Connections before and in their handshake."""
BEGIN_EVERY_S: Final = 0.003
"""Between the beginnings of two handshakes; one takes about a millisecond of the event loop."""
ACCEPTS: Final = 64
"""Connections accepted before other work gets its turn."""
PAUSE_S: Final = 0.5
"""Between two tries to accept while open files are short."""
_HANDSHAKE: Final = b"\x16"
"""First byte of a TLS connection."""
_HTTPS_REQUIRED: Final = BadRequest(
    "This port speaks HTTPS. Begin the URL with https://.",
    reason="https_required",
)
_log = logging.getLogger("sluice.tls")
_failed = RareLog(_log, "failed TLS handshake")


class Certificates:
    """Makes TLS contexts of files."""

    def __init__(self, cert: str, key: str, client_ca: str | None = None) -> None:
        """Reads the files. Raises OSError, ssl.SSLError included."""
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._digest, self.expires_unix_s = self._read()
        self.context = self._loaded()
        self.successful = True
        """Whether the last reading of the files succeeded."""

    def look(self) -> None:
        """Use the files' content if it changed. Raises nothing."""
        try:
            digest, expires_unix_s = self._read()
            if digest != self._digest:
                context = self._loaded()
                if self._read()[0] != digest:
                    return  # changed meanwhile: the next look sees all of it
                self.context, self._digest = context, digest
                until = datetime.fromtimestamp(expires_unix_s, UTC)
                _log.info("a new certificate is in use, valid until %s", until.isoformat())
        except OSError as error:
            if self.successful:
                _log.error("the certificate in use stays: %s", error)
            self.successful = False
        else:
            self.expires_unix_s, self.successful = expires_unix_s, True

    async def watch(self) -> None:
        """Look again and again."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await asyncio.to_thread(self.look)

    def _read(self) -> tuple[bytes, float]:
        """A digest of all files, and when the certificate expires."""
        files = [Path(f).read_bytes() for f in (self._cert, self._key, self._client_ca) if f]
        digest = hashlib.sha256(b"\0".join(hashlib.sha256(file).digest() for file in files))
        until = str(_test_decode_cert(self._cert)["notAfter"])
        return digest.digest(), float(ssl.cert_time_to_seconds(until))

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(_CIPHERS)
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self._cert, self._key, password="")  # never ask on the terminal
        if self._client_ca is not None:
            context.load_verify_locations(self._client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


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
        self._pending: dict[socket.socket, tuple[str, asyncio.Task[None]]] = {}
        """Address and task of connections before the end of their handshake; oldest first."""
        self._turns: dict[str, deque[asyncio.Future[None]]] = {}
        """By address, connections whose handshake may begin; the next address first."""
        self._begun = False
        """Whether a handshake began less than BEGIN_EVERY_S ago."""
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
            await asyncio.wait([task for _, task in self._pending.values()])

    def _listen(self, sock: socket.socket) -> None:
        if self._open:
            self._loop.add_reader(sock, self._accept, sock)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS):
            try:
                sock, peer = listener.accept()
            except (BlockingIOError, ConnectionError, InterruptedError):  # none waits, or it left
                return
            except OSError:  # no open file is left: do not ask again at once
                self._loop.remove_reader(listener)
                self._loop.call_later(PAUSE_S, self._listen, listener)
                return
            sock.setblocking(False)  # noqa: FBT003
            if len(self._pending) >= MAX_HANDSHAKES:
                oldest_last = reversed(self._pending.items())
                waiting = ((address, 0.0, sock) for sock, (address, _) in oldest_last)
                for crowded in giving_way(waiting, MAX_HANDSHAKES // 64):
                    self._failures.add("crowded")
                    self._pending.pop(crowded)[1].cancel()
            address = network(peer[0]) if isinstance(peer, tuple) else ""
            self._pending[sock] = address, self._loop.create_task(self._begin(sock, address))

    def _next_turn(self) -> None:
        self._begun = False
        while self._turns and not self._begun:
            address, waiting = next(iter(self._turns.items()))
            del self._turns[address]
            mine = waiting.popleft()
            if waiting:
                self._turns[address] = waiting  # behind the others
            if not mine.done():  # its connection may have ended
                mine.set_result(None)
                self._begun = True
                self._loop.call_later(BEGIN_EVERY_S, self._next_turn)

    async def _begin(self, sock: socket.socket, address: str) -> None:
        """Make a connection of a socket, or close it."""
        why, arrived = "timeout", asyncio.Event()
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                self._loop.add_reader(sock, arrived.set)
                try:
                    await arrived.wait()
                finally:
                    self._loop.remove_reader(sock)
                first = sock.recv(1, socket.MSG_PEEK)
                if first == _HANDSHAKE:
                    mine = self._loop.create_future()
                    self._turns.setdefault(address, deque()).append(mine)
                    if not self._begun:
                        self._next_turn()
                    await mine
                    why = "failed"
                    await self._loop.connect_accepted_socket(
                        self._protocol,
                        sock,
                        ssl=self._certificates.context,
                        ssl_handshake_timeout=HANDSHAKE_S,
                        ssl_shutdown_timeout=SHUTDOWN_S,
                    )
                    return
                why = "plain_http" if first else "left"
                if first:
                    await self._loop.sock_recv(sock, 65_536)  # unread, it would reset the answer
                    await self._loop.sock_sendall(sock, closing(_HTTPS_REQUIRED))
        except TimeoutError:
            why = "timeout"
        except OSError:  # also of TLS
            pass
        except asyncio.CancelledError:
            sock.close()
            raise
        finally:
            self._pending.pop(sock, None)
        with suppress(OSError):
            if why not in {"left", "plain_http"}:
                _failed.note(str(sock.getpeername()[0]))
        sock.close()
        if why != "left":
            self._failures.add(why)
