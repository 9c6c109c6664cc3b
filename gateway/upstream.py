"""HTTP/1.1 to workers over pooled keep-alive connections: asyncio.Protocol + httptools.

Rules:
- One connection serves one exchange at a time. It returns to the pool as soon as a whole
  response that allows keep-alive has arrived and the whole request was sent. Otherwise it is
  closed.
- Cancelling or aborting an exchange closes only its own connection, so the engine notices and
  stops generating. A finished exchange drops its reference to the connection.
- A pooled connection that dies before the first byte of a response was stale (the engine closed
  it while idle): the call is sent once more on a new connection. A new connection that dies is
  the worker's failure.
- Ended connections hold no reference cycle. A connection refers to its parser, and the parser
  to the connection; the garbage collector rarely visits old objects, so the pair would stay.
- All framing (heads, interim responses, chunk lines, trailers) is bounded in size. Trailers are
  ignored.
- There is no timer per request: one sweep every `_SWEEP_S` fails exchanges past their deadline.
  When the sweep is late because this process stalled, deadlines are extended by that delay.
- An engine that generates is alive: an answer that went silent is cut only if the engine's own
  counters stand still, or after the time that a whole answer may take.
- https workers use asyncio's TLS on the same path. Certificates are always verified, against
  the system's store (also SSL_CERT_FILE) or an authority of their own. Files that changed are
  read anew for new connections; while they cannot be read, the former ones hold.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Final, cast

import httptools

from gateway.errors import FailureKind, UpstreamFailure
from gateway.ports import UpstreamCall, UpstreamResponse
from gateway.records.attempt import EngineTls, PhaseTimeouts, WorkerAddress

_log = logging.getLogger("sluice.upstream")

_SWEEP_S = 0.25
_KEEP_IDLE_S = 4.0
"""Engines on uvicorn close idle connections after 5 s; the gateway closes them earlier."""
_IDLE_PER_WORKER = 256
_END_S = 1.0
"""From an answer's own end to the end of its body."""
_BUFFER_BYTES = 256 * 1024
"""Unread body bytes at which reading from the engine pauses."""
MAX_FRAMING_BYTES = 64 * 1024
"""Most bytes of framing in a row: head, interim responses, chunk extensions, trailers."""
_MAX_TARGETS = 8_192
"""Workers whose connection details are cached."""
_MAX_LINES = 64
"""Cached paths per worker."""
_TLS_LOOK_S = 2.0
"""Between two looks at TLS files, which happen when a connection is opened."""
_METADATA = ("169.254.", "::ffff:169.254.", "fe80:", "fd00:ec2::254")
"""Where a cloud's metadata service tells secrets; a name may lead there."""
_FRAMES = (b"content-length", b"transfer-encoding")
_LOCAL = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Connect errors for which the engine is not to blame: this machine has no file descriptor,
memory or local port left."""
_RESOLVER_FILES = 8
"""Open at once while a name is looked up, at most."""
_NO_PARSER = httptools.HttpResponseParser(object())
"""Stands in for the parser of a connection that is not open."""

ConnectionKey = tuple[str, str, int, EngineTls]
"""scheme, host, port, TLS."""


class _Exchange:
    """One request and its response (an UpstreamResponse once the head has arrived)."""

    __slots__ = (
        "_chunks",
        "_failure",
        "_loop",
        "_paused",
        "_sink",
        "_size",
        "_waiter",
        "body_begun",
        "connection",
        "deadline_s",
        "ended",
        "framing_bytes",
        "got_bytes",
        "granted_s",
        "head_done",
        "headers",
        "idle_s",
        "now_s",
        "silent_until_s",
        "status",
        "timeouts",
        "worker",
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, timeouts: PhaseTimeouts, worker: WorkerAddress
    ) -> None:
        self.connection: UpstreamConnection | None = None
        self.now_s = loop.time
        self.deadline_s = loop.time() + timeouts.first_byte_s
        self.idle_s = timeouts.idle_s
        self.timeouts = timeouts
        self.worker = worker
        self.granted_s = 0.0
        """Deadline that its engine was given because it generates; inf while it is asked."""
        self.silent_until_s = 0.0
        """No silence is granted beyond this time."""
        self.headers: list[tuple[bytes, bytes]] = []
        self.status = 0
        self.got_bytes = False
        self.body_begun = False
        self.framing_bytes = 0
        """Bytes received since the last byte of the body."""
        self.head_done = False
        self.ended = False
        self._loop = loop
        self._chunks: list[bytes] = []
        self._size = 0
        self._paused = False
        self._failure: tuple[FailureKind, str, bool] | None = None
        """Kind, message and whether the head had arrived.

        The exception is made only when it is raised: its traceback would hold this exchange.
        """
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[bytes], bool] | None = None

    async def head(self) -> None:
        """Wait for the response's head. Raises UpstreamFailure."""
        while not self.head_done:
            if self._failure is not None:
                raise _failure(self._failure)
            await self._woken()

    async def read(self) -> bytes:
        while not self._chunks:
            if self.ended:
                return b""
            if self._failure is not None:
                raise _failure(self._failure)
            await self._woken()
        return self._take()

    def take_whole(self) -> bytes | None:
        return self._take() if self.ended else None

    async def relay(self, sink: Callable[[bytes], bool]) -> bool:
        while True:
            if self._chunks and not sink(self._take()):
                return False
            if self.ended:
                return True
            if self._failure is not None:
                raise _failure(self._failure)
            self._sink = sink
            try:
                await self._woken()
            finally:
                full, self._sink = self._sink is None, None
            if full:
                return False

    def arrived(self) -> None:
        """Pass the data of one socket read to the sink, or wake the waiting reader."""
        sink = self._sink
        if sink is None:
            if not self.ended:  # else `finish` woke the reader
                self.wake()
            return
        chunks = self._chunks
        if len(chunks) == 1 and not self._paused:  # the usual case: one token's event
            self._size = 0
            data = chunks.pop()
        elif chunks:
            data = self._take()
        else:
            return
        if not sink(data):
            self._sink = None
            self.wake()

    def _take(self) -> bytes:
        chunks, self._chunks, self._size = self._chunks, [], 0
        if self._paused and self.connection is not None:
            self._paused = False
            self.deadline_s = self.now_s() + self.idle_s
            self.connection.resume()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def expect_end(self) -> None:
        self.idle_s = min(self.idle_s, _END_S)
        self.deadline_s = min(self.deadline_s, self.now_s() + self.idle_s)

    def abort(self) -> None:
        if not self.ended:
            self.fail("reset", "aborted by the gateway")

    def fail(self, kind: FailureKind, message: str) -> None:
        """End an unfinished exchange with a failure and close its connection."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.exchange = None
            connection.close()
        if not self.ended and self._failure is None:
            self._failure = (kind, message, self.head_done)
        self.wake()

    def add(self, body: bytes) -> None:
        """Take body bytes; pause reading when the reader is too far behind."""
        self.framing_bytes = 0
        if not self.body_begun:
            self.body_begun = True
            self.deadline_s = self.now_s() + self.idle_s
        self._chunks.append(body)
        self._size = size = self._size + len(body)
        if size > _BUFFER_BYTES and not self._paused and self.connection is not None:
            self._paused = True
            # The engine waits for the gateway, so no idle deadline applies.
            self.deadline_s = inf
            self.connection.pause()

    def finish(self) -> None:
        """Mark the response as complete; the caller keeps or closes the connection."""
        self.ended = True
        self.connection = None
        self.wake()

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _woken(self) -> asyncio.Future[None]:
        """A new future for the next event."""
        self._waiter = waiter = self._loop.create_future()
        return waiter


class UpstreamConnection(asyncio.Protocol):
    """One TCP connection; between exchanges it idles in its pool."""

    __slots__ = (
        "_close_delimited",
        "_parser",
        "_paused",
        "_transport",
        "exchange",
        "idle",
        "idle_since_s",
        "key",
        "owner",
    )

    def __init__(self, owner: "HttpUpstream", key: ConnectionKey) -> None:
        self.owner = owner
        self.key = key
        self.idle = owner.idle_of(key)
        """Idle connections to the same address, most recently used last."""
        self.idle_since_s = 0.0
        self.exchange: _Exchange | None = None
        self._transport: asyncio.Transport | None = None
        self._parser = _NO_PARSER
        self._close_delimited = False
        self._paused = False

    def send(self, exchange: _Exchange, request: bytes, rest: Sequence[bytes | memoryview]) -> None:
        """Begin an exchange; `rest` follows `request`."""
        self._close_delimited = False
        self.exchange = exchange
        exchange.connection = self
        if self._transport is not None:
            self._transport.write(request)
            for piece in rest:
                self._transport.write(piece)

    @property
    def usable(self) -> bool:
        """Whether it is open and not about to close."""
        return self._transport is not None and not self._transport.is_closing()

    def _sent_whole(self) -> bool:
        """Whether the whole request was sent: an engine may respond before it has read all of it.

        Unsent bytes would hold up the connection's next request.
        """
        return self._transport is not None and not self._transport.get_write_buffer_size()

    def close(self) -> None:
        """Close it and forget it."""
        self.owner.forget(self)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.abort()

    def pause(self) -> None:
        """Stop reading."""
        self._paused = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Resume reading if it was paused."""
        if self._paused and self.usable and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._parser = httptools.HttpResponseParser(self)
        # Makes uvloop write at once, not at the end of the loop iteration.
        self._transport.set_write_buffer_limits(high=0)
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:  # no exchange expects these bytes
            self.close()
            return
        exchange.got_bytes = True
        # The idle deadline applies from the first body byte on: engines send a stream's head
        # at once, before queueing and prefill.
        if exchange.body_begun:
            exchange.deadline_s = exchange.now_s() + exchange.idle_s
        exchange.framing_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            exchange.fail("protocol", f"not an HTTP/1.1 response: {type(error).__name__}")
            return
        if exchange.framing_bytes > MAX_FRAMING_BYTES and not exchange.ended:
            what = "chunks or trailers are" if exchange.head_done else "head is"
            exchange.fail("protocol", f"the response's {what} too large")
            return
        exchange.arrived()

    def connection_lost(self, exc: Exception | None) -> None:
        exchange, self.exchange = self.exchange, None
        self.owner.forget(self)
        self._parser = _NO_PARSER
        if exchange is None:
            return
        exchange.connection = None
        if self._close_delimited and exc is None:
            exchange.finish()
        else:
            exchange.fail("reset", "the engine closed the connection")

    # -- httptools

    def on_message_begin(self) -> None:
        if self.exchange is None:  # a second response to one request
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        exchange = self.exchange
        if exchange is not None and not exchange.head_done:  # else a trailer
            exchange.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        exchange = self.exchange
        if exchange is None:
            return
        status = self._parser.get_status_code()
        if status < 200:  # an interim response: the real head follows
            exchange.headers.clear()
            return
        exchange.status = status
        exchange.head_done = True
        for name, _ in exchange.headers:
            if name in _FRAMES:
                self._close_delimited = False
                return
        self._close_delimited = status not in (204, 304)

    def on_body(self, body: bytes) -> None:
        if self.exchange is not None:
            self.exchange.add(body)

    def on_message_complete(self) -> None:
        exchange = self.exchange
        if exchange is None or not exchange.head_done or self._close_delimited:
            return
        self.exchange = None
        if self._paused:
            self.resume()
        if self._parser.should_keep_alive() and self._sent_whole():
            self.idle_since_s = exchange.now_s()
            self.owner.give_back(self)
        else:
            self.close()
        exchange.finish()


class _Target:
    """Cached connection details of one worker."""

    __slots__ = ("idle", "key", "lines", "worker")

    def __init__(
        self, worker: WorkerAddress, key: ConnectionKey, idle: deque[UpstreamConnection]
    ) -> None:
        self.worker = worker
        self.key = key
        self.idle = idle
        self.lines: dict[str, bytes] = {}
        """Path -> request line with the host and authorization headers."""


class HttpUpstream:
    """Upstream for http:// and https:// workers (the port is `gateway.ports.Upstream`)."""

    def __init__(self, connect: "Connect | None" = None) -> None:
        """`connect` replaces the opening of sockets (for tests)."""
        self._connect: Final[Connect] = connect or _connect
        self._idle: dict[ConnectionKey, deque[UpstreamConnection]] = {}
        self._busy: set[UpstreamConnection] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._sweep_due_s = 0.0
        self._targets: dict[int, _Target] = {}
        """By `id` of a worker's address, which the value keeps alive."""
        self._users: dict[ConnectionKey, set[int]] = {}
        """The keys of `_targets` by where their workers are: these share the connections there."""
        self._tls: dict[EngineTls, tuple[ssl.SSLContext, float, tuple[int, ...]]] = {}
        """Context, the time of its last look at the files, and when they were modified."""
        self._closed = False
        self.generates: Callable[[WorkerAddress], Awaitable[bool]] | None = None
        """Says whether an engine generates, by its own counters; None: nobody knows."""
        self._looks: set[asyncio.Task[None]] = set()

    async def open(self, worker: WorkerAddress, call: UpstreamCall) -> UpstreamResponse:
        loop = self._loop
        if loop is None:  # cached: asking costs a system call
            loop = self._loop = asyncio.get_running_loop()
        if self._sweeper is None and not self._closed:
            self._set_sweep(loop)
        target = self._targets.get(id(worker)) or self._target(worker)
        line = target.lines.get(call.path)
        if line is None:
            line = _request_line(worker, call)
            if len(target.lines) < _MAX_LINES:
                target.lines[call.path] = line
        size = b"content-length: %d\r\n\r\n" % (call.size if call.rest else len(call.body))
        request = b"".join((line, call.lines, size, call.body))
        connection, idle, died = None, target.idle, False
        while idle:
            connection = idle.pop()
            if connection.usable:
                break
            connection = None
        while True:
            reused = connection is not None
            if connection is None:
                connection = await self._connection(target, loop, call, again=died)
            exchange = _Exchange(loop, call.timeouts, worker)
            self._busy.add(connection)
            connection.send(exchange, request, call.rest)
            try:
                await exchange.head()
            except BaseException as failure:
                exchange.abort()
                stale = isinstance(failure, UpstreamFailure) and failure.kind == "reset"
                if not (reused and stale) or exchange.got_bytes:
                    raise
                connection, died = None, True
            else:
                return exchange

    async def _connection(
        self, target: "_Target", loop: asyncio.AbstractEventLoop, call: UpstreamCall, *, again: bool
    ) -> UpstreamConnection:
        """A new connection; `again`: another one broke while it had the request."""
        try:
            return await self._connect(self, loop, target.key, call.timeouts.connect_s)
        except UpstreamFailure as failure:
            if again and failure.kind == "connect":  # perhaps the request ended the engine
                raise UpstreamFailure("reset", "the engine is gone") from failure
            raise

    async def close(self) -> None:
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for look in self._looks:
            look.cancel()
        for connection in [*self._busy, *(c for idle in self._idle.values() for c in idle)]:
            if connection.exchange is not None:
                connection.exchange.abort()
            connection.close()
        self._idle.clear()

    def idle_of(self, key: ConnectionKey) -> deque[UpstreamConnection]:
        """The idle connections to an address."""
        return self._idle.setdefault(key, deque())

    def disconnect(self, worker: WorkerAddress) -> None:
        """Forget a worker that is gone; close its idle connections if no other worker has them.

        The other may be a rank, another path, or the same engine with another key or model.
        """
        key = _key(worker)
        users = self._users.get(key, set())
        for user in [user for user in users if self._targets[user].worker == worker]:
            users.remove(user)
            del self._targets[user]
        if users:
            return
        self._users.pop(key, None)
        idle = self._idle.pop(key, None)
        while idle:
            idle.popleft().close()

    def give_back(self, connection: UpstreamConnection) -> None:
        """Return a connection to its pool after a complete exchange (called by the connection)."""
        self._busy.discard(connection)
        gone = self._idle.get(connection.key) is not connection.idle
        if gone or self._closed or len(connection.idle) >= _IDLE_PER_WORKER:
            connection.close()
            return
        connection.idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """Drop a connection that closes (called by the connection)."""
        self._busy.discard(connection)
        if connection.idle:
            with contextlib.suppress(ValueError):
                connection.idle.remove(connection)

    def _target(self, worker: WorkerAddress) -> _Target:
        if len(self._targets) >= _MAX_TARGETS:
            self._targets.clear()
            self._users.clear()
        key = _key(worker)
        self._users.setdefault(key, set()).add(id(worker))
        target = self._targets[id(worker)] = _Target(worker, key, self.idle_of(key))
        return target

    def tls_context(self, key: ConnectionKey) -> ssl.SSLContext | None:
        """The TLS context that verifies the certificate at an address; None for http."""
        if key[0] != "https":
            return None
        tls, now_s = key[3], time.monotonic()
        held = self._tls.get(tls)
        if held is not None and now_s - held[1] < _TLS_LOOK_S:
            return held[0]
        try:
            files = (tls.ca_file, tls.cert_file, tls.key_file)
            # Without pathlib, as this module is compiled.
            modified = tuple(os.stat(f).st_mtime_ns for f in files if f is not None)  # noqa: PTH116
            context = held[0] if held is not None and modified == held[2] else _tls_context(tls)
        except OSError as error:  # also ssl.SSLError
            if held is None:
                raise
            _log.error("TLS files for %s cannot be used, the former ones hold: %s", key[1], error)
            context, modified = held[0], held[2]
        self._tls[tls] = (context, now_s, modified)
        return context

    def _silent(self, exchange: _Exchange, now_s: float) -> None:
        """End an exchange past its deadline, unless its answer began and its engine generates."""
        if exchange.granted_s == inf:
            return
        if exchange.deadline_s != exchange.granted_s:  # a new silence
            allowed_s = exchange.timeouts.first_byte_s - exchange.idle_s
            exchange.silent_until_s = exchange.deadline_s + allowed_s
        if self.generates is None or not exchange.body_begun or now_s > exchange.silent_until_s:
            exchange.fail("timeout", "the engine went silent")
            return
        exchange.granted_s = inf
        look = asyncio.ensure_future(self._look(exchange, self.generates(exchange.worker)))
        self._looks.add(look)
        look.add_done_callback(self._looks.discard)

    async def _look(self, exchange: _Exchange, generates: Awaitable[bool]) -> None:
        """Give a silent answer more time if its engine generates."""
        alive = False
        try:
            alive = await generates
        finally:
            now_s = exchange.now_s()
            exchange.granted_s = now_s + exchange.idle_s
            if exchange.deadline_s < now_s:  # else it went on meanwhile
                exchange.deadline_s = exchange.granted_s
                if not alive:
                    exchange.fail("timeout", "the engine went silent")

    def _set_sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        self._sweep_due_s = loop.time() + _SWEEP_S
        self._sweeper = loop.call_at(self._sweep_due_s, self._sweep, loop)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = loop.time()
        late_s = max(0.0, now_s - self._sweep_due_s)
        for connection in list(self._busy):
            exchange = connection.exchange
            if exchange is None:
                continue
            exchange.deadline_s += late_s
            exchange.granted_s += late_s
            if exchange.deadline_s < now_s:
                self._silent(exchange, now_s)
        for idle in self._idle.values():
            while idle and now_s - idle[0].idle_since_s > _KEEP_IDLE_S:
                idle.popleft().close()
        self._sweeper = None
        if not self._closed:
            self._set_sweep(loop)


async def _connect(
    upstream: HttpUpstream, loop: asyncio.AbstractEventLoop, key: ConnectionKey, connect_s: float
) -> UpstreamConnection:
    """Open a connection to a worker. Raises UpstreamFailure."""
    connection = UpstreamConnection(upstream, key)
    try:
        async with asyncio.timeout(connect_s):
            context = upstream.tls_context(key)
            name = key[3].server_name if context is not None else None
            transport, _ = await loop.create_connection(
                lambda: connection, key[1], key[2], ssl=context, server_hostname=name
            )
    except TimeoutError as error:
        raise UpstreamFailure("connect", f"no connection in {connect_s:g} s") from error
    except UnicodeError as error:  # IDNA refuses the host
        raise UpstreamFailure("connect", f"not a host's name: {error}") from error
    except OSError as error:
        # Without a descriptor some resolvers find no such name, or anything at all invalid.
        exhausted = not isinstance(error, ConnectionError) and not _may_open()
        kind: FailureKind = "local" if exhausted or error.errno in _LOCAL else "connect"
        what = "name not found: " if isinstance(error, socket.gaierror) else ""
        raise UpstreamFailure(kind, what + (error.strerror or type(error).__name__)) from error
    peer = transport.get_extra_info("peername") or ("",)
    if str(peer[0]).startswith(_METADATA) and key[1] != peer[0]:
        connection.close()
        raise UpstreamFailure("connect", "its name leads to a cloud's metadata service")
    return connection


def _may_open() -> bool:
    """Whether this process has the file descriptors left that a resolver takes."""
    opened: list[int] = []
    try:
        for _ in range(_RESOLVER_FILES):
            opened.append(os.open(os.devnull, os.O_RDONLY))  # noqa: PERF401 - each is closed
    except OSError:
        return False
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return True


Connect = Callable[
    [HttpUpstream, asyncio.AbstractEventLoop, ConnectionKey, float], Awaitable[UpstreamConnection]
]
"""Opens a connection: (upstream, loop, address, time limit in seconds)."""


def _key(worker: WorkerAddress) -> ConnectionKey:
    return (worker.scheme, worker.host, worker.port, worker.tls)


def _tls_context(tls: EngineTls) -> ssl.SSLContext:
    """Raises OSError, ssl.SSLError included."""
    context = ssl.create_default_context(cafile=tls.ca_file)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = tls.verify == "full"
    if tls.cert_file is not None:
        context.load_cert_chain(tls.cert_file, tls.key_file, password="")
    return context


def _failure(failure: tuple[FailureKind, str, bool]) -> UpstreamFailure:
    kind, message, head_received = failure
    return UpstreamFailure(kind, message, head_received=head_received)


def _request_line(worker: WorkerAddress, call: UpstreamCall) -> bytes:
    host = f"[{worker.host}]" if ":" in worker.host else worker.host
    lines = (
        f"{call.method} {worker.path_prefix}{call.path} HTTP/1.1\r\nhost: {host}:{worker.port}\r\n"
        "accept-encoding: identity\r\n"
    )
    if worker.api_key is not None:
        lines += f"authorization: Bearer {worker.api_key}\r\n"
    return lines.encode("latin-1")
