"""The upstream port's contract, over real sockets against an engine that is scripted in bytes."""

import asyncio
import contextlib
import gc
import itertools
import os
import resource
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from gateway import upstream as adapter
from gateway.errors import UpstreamFailure
from gateway.fleet import probes as pages
from gateway.fleet.probes import EnginePages
from gateway.ports import Upstream, UpstreamCall, UpstreamResponse
from gateway.records.attempt import EngineTls, PhaseTimeouts, WorkerAddress
from gateway.upstream import HttpUpstream
from sluice.children import free_ports
from tests.builders import address

SOON_S = 20.0
"""What should happen at once has happened by then, also on a busy machine."""


class Connection:
    """The engine's side of one TCP connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def request(self) -> tuple[bytes, bytes]:
        """The next request: head and body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.startswith(b"content-length:")
        )
        return head, await self.reader.readexactly(length)

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0)

    async def answer(self, body: bytes = b"ok", head: bytes = b"") -> None:
        await self.request()
        await self.send(
            b"HTTP/1.1 200 OK\r\n%scontent-length: %d\r\n\r\n%s" % (head, len(body), body)
        )

    async def until_gone(self) -> None:
        """Wait until the gateway closed the connection."""
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(self.reader.read(), SOON_S) == b""

    def reset(self) -> None:
        """Close with a RST, as a killed process's kernel does."""
        sock: socket.socket = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Handler = Callable[[Connection], Awaitable[None]]


class Engine:
    """A server that plays one handler a connection; the last one is repeated."""

    def __init__(self, *handlers: Handler, tls: ssl.SSLContext | None = None) -> None:
        self._handlers = handlers
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0
        self.errors: list[BaseException] = []
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(
            self._connected, "127.0.0.1", 0, ssl=self._tls, limit=1 << 20
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.errors:
            raise self.errors[0]

    def play(self, *handlers: Handler) -> None:
        """Play these from now on."""
        self._handlers = handlers

    def stop(self) -> None:
        """Accept no further connections."""
        self._server.close()

    def worker(self, **more: Any) -> WorkerAddress:
        return address(port=self.port, **more)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handler = self._handlers[min(self.connections, len(self._handlers) - 1)]
        self.connections += 1
        task = asyncio.get_running_loop().create_task(self._play(handler, reader, writer))
        self._tasks.add(task)

    async def _play(
        self, handler: Handler, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            await handler(Connection(reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the gateway closed: the handler had nothing more to say
        except (AssertionError, TimeoutError) as error:
            self.errors.append(error)
        finally:
            writer.close()


def call(body: bytes = b"{}", **timeouts: float) -> UpstreamCall:
    return UpstreamCall(
        method="POST",
        path="/v1/chat/completions",
        lines=b"content-type: application/json\r\nx-request-id: r1\r\n",
        body=body,
        timeouts=PhaseTimeouts(**timeouts),
    )


async def read_all(response: UpstreamResponse) -> bytes:
    found = []
    while data := await response.read():
        found.append(data)
    return b"".join(found)


async def exchange(upstream: Upstream, engine: Engine, body: bytes = b"{}") -> bytes:
    """One whole exchange; its body."""
    return await read_all(await upstream.open(engine.worker(), call(body)))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110 - the condition is any expression
            await asyncio.sleep(0.001)


async def fails(awaited: Awaitable[object]) -> UpstreamFailure:
    with pytest.raises(UpstreamFailure) as failed:
        await asyncio.wait_for(awaited, SOON_S)
    return failed.value


async def always_ok(c: Connection) -> None:
    while True:
        await c.answer()


async def echo(c: Connection) -> None:
    while True:
        _, body = await c.request()
        await c.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body), body)


async def silent(c: Connection) -> None:
    await c.request()
    await c.until_gone()


@pytest.fixture
async def upstream(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HttpUpstream]:
    monkeypatch.setattr(adapter, "_SWEEP_S", 0.02)
    made = HttpUpstream()
    yield made
    await made.close()


# -- a whole exchange


async def test_the_engine_gets_the_request_as_it_was_called(upstream: Upstream) -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def handler(c: Connection) -> None:
        seen.append(await c.request())
        await c.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    async with Engine(handler) as engine:
        worker = engine.worker(path_prefix="/engine-1", api_key="wk")
        await read_all(await upstream.open(worker, call(b'{"a": 1}')))
    head, body = seen[0]
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /engine-1/v1/chat/completions HTTP/1.1"
    assert sorted(lines[1:]) == sorted(
        [
            f"host: 127.0.0.1:{engine.port}",
            "accept-encoding: identity",
            "authorization: Bearer wk",
            "content-type: application/json",
            "x-request-id: r1",
            "content-length: 8",
            "",
            "",
        ]
    )
    assert body == b'{"a": 1}'


async def test_status_and_headers_come_with_lower_case_names(upstream: Upstream) -> None:
    async def handler(c: Connection) -> None:
        await c.request()
        await c.send(b"HTTP/1.1 418 Teapot\r\nX-Some: A b\r\nContent-Length: 2\r\n\r\nno")

    async with Engine(handler) as engine:
        response = await upstream.open(engine.worker(), call())
        assert response.status == 418
        assert (b"x-some", b"A b") in response.headers
        assert await read_all(response) == b"no"


async def test_the_end_stays_the_end(upstream: Upstream) -> None:
    async with Engine(always_ok) as engine:
        response = await upstream.open(engine.worker(), call())
        await read_all(response)
        assert await response.read() == b""


BODIES = {
    "content-length": b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
    "chunked": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    b"3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
    "chunked with trailers": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    b"5;x=y\r\nhello\r\n0\r\nx-trailer: 1\r\n\r\n",
    "until close": b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nhello",
    "http/1.0": b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello",
    "after 100 continue": b"HTTP/1.1 100 Continue\r\n\r\n"
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
    "after early hints": b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
}


@pytest.mark.parametrize("split", [False, True], ids=["in one piece", "byte by byte"])
@pytest.mark.parametrize("framing", BODIES)
async def test_the_body_is_the_same_however_it_is_framed_and_split(
    upstream: Upstream, framing: str, split: bool
) -> None:
    async def handler(c: Connection) -> None:
        await c.request()
        answer = BODIES[framing]
        await c.send(*([bytes([b]) for b in answer] if split else [answer]))

    async with Engine(handler) as engine:
        response = await upstream.open(engine.worker(), call())
        assert response.status == 200
        assert await read_all(response) == b"hello"
        assert (b"link", b"x") not in response.headers


async def test_an_answer_without_a_body_ends_at_once(upstream: Upstream) -> None:
    async def handler(c: Connection) -> None:
        await c.request()
        await c.send(b"HTTP/1.1 204 No Content\r\n\r\n")
        await always_ok(c)

    async with Engine(handler) as engine:
        assert await exchange(upstream, engine) == b""
        assert await exchange(upstream, engine) == b"ok"
        assert engine.connections == 1


async def test_a_large_request_arrives_whole(upstream: Upstream) -> None:
    body = bytes(range(256)) * 40_000
    async with Engine(echo) as engine:
        assert await exchange(upstream, engine, body) == body


# -- connections


async def test_a_connection_is_used_again(upstream: Upstream) -> None:
    async with Engine(always_ok) as engine:
        for _ in range(5):
            assert await exchange(upstream, engine) == b"ok"
        assert engine.connections == 1


async def test_a_connection_that_the_engine_will_close_is_not_used_again(
    upstream: Upstream,
) -> None:
    async def closing(c: Connection) -> None:
        await c.answer(head=b"connection: close\r\n")
        await c.until_gone()

    async with Engine(closing) as engine:
        for _ in range(2):
            assert await exchange(upstream, engine) == b"ok"
        assert engine.connections == 2


async def test_a_connection_whose_answer_was_not_read_to_its_end_is_not_used_again(
    upstream: Upstream,
) -> None:
    async def half(c: Connection) -> None:
        await c.request()
        await c.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
        await c.until_gone()

    async with Engine(half, always_ok) as engine:
        response = await upstream.open(engine.worker(), call())
        response.abort()
        assert await exchange(upstream, engine) == b"ok"
        assert engine.connections == 2


async def test_a_connection_whose_request_was_not_taken_whole_is_not_used_again(
    upstream: Upstream,
) -> None:
    """The engine answers early and reads no further: the next request would wait behind."""
    done = asyncio.Event()

    async def early(c: Connection) -> None:
        await c.reader.readuntil(b"\r\n\r\n")
        await c.send(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
        await done.wait()

    async with Engine(early, always_ok) as engine:
        assert await exchange(upstream, engine, bytes(64 << 20)) == b"no"
        assert await asyncio.wait_for(exchange(upstream, engine), SOON_S) == b"ok"
        assert engine.connections == 2
        done.set()


async def test_workers_do_not_share_connections(upstream: Upstream) -> None:
    async with Engine(always_ok) as one, Engine(always_ok) as two:
        for engine in (one, two, one, two):
            await exchange(upstream, engine)
        assert (one.connections, two.connections) == (1, 1)


async def test_idle_connections_are_closed_before_the_engine_would(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "_KEEP_IDLE_S", 0.03)
    gone = asyncio.Event()

    async def handler(c: Connection) -> None:
        await c.answer()
        await c.until_gone()
        gone.set()

    async with Engine(handler) as engine:
        await exchange(upstream, engine)
        await asyncio.wait_for(gone.wait(), SOON_S)


async def test_a_connection_closed_while_it_idled_is_replaced(upstream: Upstream) -> None:
    async def once(c: Connection) -> None:
        await c.answer()

    async with Engine(once) as engine:
        for _ in range(3):
            assert await exchange(upstream, engine) == b"ok"


async def test_a_stale_connection_is_retried_once_without_the_caller_noticing(
    upstream: Upstream,
) -> None:
    async def stale(c: Connection) -> None:
        await c.answer()
        await c.request()  # and the connection dies with the second request on it

    async with Engine(stale, always_ok) as engine:
        assert await exchange(upstream, engine) == b"ok"
        assert await exchange(upstream, engine) == b"ok"
        assert engine.connections == 2


async def test_a_stale_connection_is_retried_only_once(upstream: Upstream) -> None:
    async def stale(c: Connection) -> None:
        await c.answer()
        await c.request()

    async def dead(c: Connection) -> None:
        await c.request()

    async with Engine(stale, dead) as engine:
        await exchange(upstream, engine)
        failure = await fails(exchange(upstream, engine))
        assert (failure.kind, failure.head_received) == ("reset", False)
        assert engine.connections == 2


async def test_an_engine_that_a_request_ends_did_not_refuse_it(upstream: Upstream) -> None:
    """Else the request would count as never sent, and be tried wherever there is an engine."""
    async with Engine(echo) as engine:

        async def ends(c: Connection) -> None:
            await c.answer()
            await c.request()
            engine.stop()

        engine.play(ends)
        await exchange(upstream, engine)
        assert (await fails(exchange(upstream, engine))).kind == "reset"


async def test_an_answer_that_had_begun_is_never_asked_for_again(upstream: Upstream) -> None:
    async def begun(c: Connection) -> None:
        await c.answer()
        await c.request()
        await c.send(b"HTTP/1.1 200")

    async with Engine(begun, always_ok) as engine:
        await exchange(upstream, engine)
        assert (await fails(exchange(upstream, engine))).kind == "reset"
        assert engine.connections == 1


@pytest.mark.parametrize("cut", [None, 20])
async def test_an_answer_that_nobody_asked_for_is_never_taken_for_the_next_one(
    upstream: Upstream, cut: int | None
) -> None:
    """Two answers in one segment, the second perhaps in part: the connection is given up."""
    extra = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"

    async def first(c: Connection) -> None:
        await c.request()
        await c.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok" + extra[:cut])
        await c.request()
        await c.send(extra[cut or 0 :])

    async with Engine(first, always_ok) as engine:
        assert await exchange(upstream, engine) == b"ok"
        assert await exchange(upstream, engine) == b"ok"
        assert engine.connections == 2


async def test_bytes_on_an_idle_connection_close_it(upstream: Upstream) -> None:
    said = asyncio.Event()

    async def noisy(c: Connection) -> None:
        await c.answer()
        await asyncio.sleep(0.02)
        await c.send(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
        await c.until_gone()
        said.set()

    async with Engine(noisy, always_ok) as engine:
        await exchange(upstream, engine)
        await asyncio.wait_for(said.wait(), SOON_S)
        assert await exchange(upstream, engine) == b"ok"
        assert engine.connections == 2


async def test_concurrent_exchanges_never_mix(upstream: Upstream) -> None:
    async def scattered(c: Connection) -> None:
        while True:
            _, body = await c.request()
            await c.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for at in range(0, len(body), 7):
                piece = body[at : at + 7]
                await c.send(b"%x\r\n%s\r\n" % (len(piece), piece))
            await c.send(b"0\r\n\r\n")

    async def one(n: int) -> bool:
        body = b"%03d " % n * 20
        return await exchange(upstream, engine, body) == body

    async with Engine(scattered) as engine:
        for _ in range(2):
            assert all(await asyncio.gather(*(one(n) for n in range(20))))
        assert engine.connections <= 20


# -- failures


async def test_a_refused_connection_is_a_connect_failure(upstream: Upstream) -> None:
    failure = await fails(upstream.open(address(port=free_ports(1)[0]), call()))
    assert (failure.kind, failure.head_received) == ("connect", False)


async def test_an_unknown_host_is_a_connect_failure(upstream: Upstream) -> None:
    assert (await fails(upstream.open(address(host="no.invalid"), call()))).kind == "connect"


async def test_a_connection_that_is_not_made_in_time_is_a_connect_failure(
    upstream: Upstream,
) -> None:
    """An engine that accepts and never answers the TLS handshake."""

    async def mute(c: Connection) -> None:
        await c.reader.read()

    async with Engine(mute) as engine:
        worker = engine.worker(scheme="https")
        # Enough for a busy machine to make the TLS context and get the connection accepted.
        assert (await fails(upstream.open(worker, call(connect_s=0.3)))).kind == "connect"


@contextlib.contextmanager
def no_open_files_left() -> Iterator[None]:
    """This process may open no further file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.open(os.devnull, os.O_RDONLY)
    os.close(probe)
    # The lowest free descriptor is the first that may not be had.
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "no.invalid"])
async def test_no_open_file_left_is_not_the_engines_fault(upstream: Upstream, host: str) -> None:
    async with Engine(always_ok) as engine:
        worker = address(host=host, port=engine.port)
        with no_open_files_left():
            failure = await fails(upstream.open(worker, call()))
    assert (failure.kind, failure.head_received) == ("local", False)


@pytest.mark.parametrize("rst", [False, True], ids=["closed", "reset"])
async def test_a_connection_that_dies_before_the_head_is_a_reset(
    upstream: Upstream, rst: bool
) -> None:
    async def dying(c: Connection) -> None:
        await c.request()
        if rst:
            c.reset()

    async with Engine(dying) as engine:
        failure = await fails(upstream.open(engine.worker(), call()))
        assert (failure.kind, failure.head_received) == ("reset", False)
        assert engine.connections == 1, "a fresh connection that dies is the worker's failure"


@pytest.mark.parametrize("rst", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize(
    "begun",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nsome",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nsome\r\n",
    ],
)
async def test_a_connection_that_dies_in_the_body_is_a_reset_after_what_arrived(
    upstream: Upstream, begun: bytes, rst: bool
) -> None:
    read = asyncio.Event()

    async def dying(c: Connection) -> None:
        await c.request()
        await c.send(begun)
        await read.wait()
        if rst:
            c.reset()

    async with Engine(dying) as engine:
        response = await upstream.open(engine.worker(), call())
        assert await response.read() == b"some"
        read.set()
        failure = await fails(response.read())
        assert (failure.kind, failure.head_received) == ("reset", True)


async def test_an_answer_that_ends_with_its_connection_is_broken_by_a_rst(
    upstream: Upstream,
) -> None:
    read = asyncio.Event()

    async def dying(c: Connection) -> None:
        await c.request()
        await c.send(b"HTTP/1.1 200 OK\r\n\r\nsome")
        await read.wait()
        c.reset()

    async with Engine(dying) as engine:
        response = await upstream.open(engine.worker(), call())
        assert await response.read() == b"some"
        read.set()
        assert (await fails(response.read())).kind == "reset"


@pytest.mark.parametrize(
    "said", [b"SSH-2.0-OpenSSH_9.6\r\n", b"\x00\x01\x02\x03\x04", b"HTTP/9 nonsense\r\n\r\n"]
)
async def test_what_is_not_http_is_a_protocol_failure(upstream: Upstream, said: bytes) -> None:
    async def garbage(c: Connection) -> None:
        await c.request()
        await c.send(said)
        await c.until_gone()

    async with Engine(garbage) as engine:
        assert (await fails(upstream.open(engine.worker(), call()))).kind == "protocol"


async def test_a_broken_chunk_is_a_protocol_failure_within_the_body(upstream: Upstream) -> None:
    async def garbage(c: Connection) -> None:
        await c.request()
        await c.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n")
        await asyncio.sleep(0.02)
        await c.send(b"zz\r\n")
        await c.until_gone()

    async with Engine(garbage) as engine:
        response = await upstream.open(engine.worker(), call())
        assert await response.read() == b"ok"
        failure = await fails(response.read())
        assert (failure.kind, failure.head_received) == ("protocol", True)


async def test_a_head_that_never_ends_is_a_protocol_failure(upstream: Upstream) -> None:
    async def endless(c: Connection) -> None:
        await c.request()
        await c.send(b"HTTP/1.1 200 OK\r\n")
        for n in itertools.count():
            await c.send(b"x-%d: %s\r\n" % (n, b"y" * 1000))

    async with Engine(endless) as engine:
        failure = await fails(upstream.open(engine.worker(), call()))
        assert (failure.kind, str(failure)) == ("protocol", "the response's head is too large")


ENDLESS = {
    # what begins, and what is repeated
    "trailers": (b"0\r\n", b"x: %s\r\n" % (b"y" * 1000)),
    "one trailer": (b"0\r\nx: ", b"y" * 1000),
    "chunk extensions": (b"1;x=", b"y" * 1000),
}


@pytest.mark.parametrize("what", ENDLESS)
async def test_framing_that_never_ends_is_a_protocol_failure(upstream: Upstream, what: str) -> None:
    begins, more = ENDLESS[what]

    async def endless(c: Connection) -> None:
        await c.request()
        await c.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n", begins)
        for _ in range(2_000):  # 2 MB: many times what a head may have
            await c.send(more)
        await c.until_gone()

    async with Engine(endless) as engine:
        response = await upstream.open(engine.worker(), call())
        failure = await fails(read_all(response))
        assert (failure.kind, failure.head_received) == ("protocol", True)


async def test_interim_answers_without_end_are_a_protocol_failure(upstream: Upstream) -> None:
    async def endless(c: Connection) -> None:
        await c.request()
        for _ in range(20_000):
            c.writer.write(b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n")
            await c.writer.drain()
        await c.until_gone()

    async with Engine(endless) as engine:
        assert (await fails(upstream.open(engine.worker(), call()))).kind == "protocol"


async def test_trailers_are_not_taken_for_headers(upstream: Upstream) -> None:
    async def handler(c: Connection) -> None:
        await c.request()
        await c.send(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
            b"2\r\nok\r\n0\r\ncontent-type: text/html\r\n\r\n"
        )

    async with Engine(handler) as engine:
        response = await upstream.open(engine.worker(), call())
        assert await read_all(response) == b"ok"
        assert [name for name, _ in response.headers] == [b"transfer-encoding"]


async def test_an_engine_that_does_not_begin_in_time_is_a_timeout(upstream: Upstream) -> None:
    async with Engine(silent) as engine:
        failure = await fails(upstream.open(engine.worker(), call(first_byte_s=0.05)))
        assert (failure.kind, failure.head_received) == ("timeout", False)


async def test_an_engine_that_falls_silent_in_the_body_is_a_timeout(upstream: Upstream) -> None:
    async def stalls(c: Connection) -> None:
        await c.request()
        await c.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nsome")
        await c.until_gone()

    async with Engine(stalls) as engine:
        response = await upstream.open(engine.worker(), call(idle_s=0.05))
        assert await response.read() == b"some"
        failure = await fails(response.read())
        assert (failure.kind, failure.head_received) == ("timeout", True)


class Counting:
    """An engine whose stream is silent while its own counter of tokens moves, or does not."""

    def __init__(self, looks: int, *, moves: bool = True, name: str = "vllm") -> None:
        """`looks` at the counter are waited for before the answer goes on."""
        self._name = name.encode()
        self.looks = looks
        self._moves = moves
        self._looked = asyncio.Event()

    async def play(self, c: Connection) -> None:
        while (await c.request())[0].startswith(b"GET /metrics"):
            self.looks -= 1
            counted = 20_000 - self.looks if self._moves else 7
            page = b"%b:generation_tokens_total %d\n" % (self._name, counted)
            await c.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(page), page)
            if self.looks <= 0:
                self._looked.set()
        await c.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nsome")
        await self._looked.wait()
        await c.send(b" more")


@pytest.mark.parametrize("name", ["vllm", "sglang"])
async def test_an_engine_that_generates_is_not_silent(
    upstream: HttpUpstream, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(pages, "LOOK_EVERY_S", 0.01)
    upstream.generates = EnginePages(upstream, SOON_S).generates
    counting = Counting(looks=6, name=name)  # two silences of two looks at least
    async with Engine(counting.play) as engine:
        response = await upstream.open(engine.worker(), call(idle_s=0.02))
        assert await read_all(response) == b"some more"


@pytest.mark.parametrize(
    ("moves", "first_byte_s"),
    [(False, 600.0), (True, 0.1)],
    ids=["its counter stands still", "as long as a whole answer may take"],
)
async def test_a_silent_engine_is_cut_all_the_same(
    upstream: HttpUpstream, monkeypatch: pytest.MonkeyPatch, moves: bool, first_byte_s: float
) -> None:
    monkeypatch.setattr(pages, "LOOK_EVERY_S", 0.01)
    upstream.generates = EnginePages(upstream, SOON_S).generates
    async with Engine(Counting(looks=10_000, moves=moves).play) as engine:
        response = await upstream.open(
            engine.worker(), call(idle_s=0.02, first_byte_s=first_byte_s)
        )
        assert (await fails(read_all(response))).kind == "timeout"


async def test_time_in_which_this_process_stood_still_is_not_the_engine_s(
    upstream: Upstream,
) -> None:
    async def goes_on(c: Connection) -> None:
        await c.request()
        await c.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nsome")
        await asyncio.sleep(0.05)
        time.sleep(1.0)  # noqa: ASYNC251 - the loop of both
        await asyncio.sleep(0.05)
        await c.send(b" more")

    async with Engine(goes_on) as engine:
        response = await upstream.open(engine.worker(), call(idle_s=0.5))
        assert await read_all(response) == b"some more"


async def test_an_engine_that_goes_on_slowly_is_not_timed_out(upstream: Upstream) -> None:
    async def slow(c: Connection) -> None:
        await c.request()
        await c.send(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n")
        for _ in range(8):
            await asyncio.sleep(0.04)
            await c.send(b"x")

    async with Engine(slow) as engine:
        response = await upstream.open(engine.worker(), call(first_byte_s=0.25, idle_s=0.25))
        assert await read_all(response) == b"x" * 8


# -- leaving


async def test_aborting_closes_the_socket_that_the_engine_sees(upstream: Upstream) -> None:
    gone = asyncio.Event()

    async def streaming(c: Connection) -> None:
        await c.request()
        await c.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nsome")
        await c.until_gone()
        gone.set()

    async with Engine(streaming) as engine:
        response = await upstream.open(engine.worker(), call())
        await response.read()
        response.abort()
        response.abort()
        await asyncio.wait_for(gone.wait(), SOON_S)
        assert (await fails(response.read())).kind == "reset"


async def test_aborting_what_is_finished_leaves_its_connection_alone(upstream: Upstream) -> None:
    async with Engine(always_ok) as engine:
        first = await upstream.open(engine.worker(), call())
        await read_all(first)
        second = await upstream.open(engine.worker(), call())
        first.abort()
        assert await read_all(second) == b"ok"
        assert engine.connections == 1


async def test_cancelling_open_closes_its_own_connection_and_no_other(upstream: Upstream) -> None:
    gone, asked, answer = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def left(c: Connection) -> None:
        await c.request()
        asked.set()
        await c.until_gone()
        gone.set()

    async def stays(c: Connection) -> None:
        await c.request()
        await answer.wait()
        await c.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    async with Engine(left, stays) as engine:
        leaving = asyncio.create_task(exchange(upstream, engine))
        await asyncio.wait_for(asked.wait(), SOON_S)
        staying = asyncio.create_task(exchange(upstream, engine))
        await until(lambda: engine.connections == 2)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await asyncio.wait_for(gone.wait(), SOON_S)
        answer.set()
        assert await asyncio.wait_for(staying, SOON_S) == b"ok"


async def test_cancelling_a_read_and_aborting_closes_the_socket(upstream: Upstream) -> None:
    gone = asyncio.Event()

    async def streaming(c: Connection) -> None:
        await c.request()
        await c.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nsome")
        await c.until_gone()
        gone.set()

    async with Engine(streaming) as engine:
        response = await upstream.open(engine.worker(), call())
        await response.read()
        reading = asyncio.ensure_future(response.read())
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        response.abort()
        await asyncio.wait_for(gone.wait(), SOON_S)


async def test_closing_aborts_what_runs_and_closes_what_idles(upstream: Upstream) -> None:
    gone: list[int] = []

    async def one(c: Connection) -> None:
        await c.answer()
        await c.until_gone()
        gone.append(1)

    async with Engine(silent) as busy, Engine(one) as idle:
        await exchange(upstream, idle)
        running = asyncio.create_task(exchange(upstream, busy))
        await until(lambda: busy.connections == 1)
        await asyncio.sleep(0.01)
        await upstream.close()
        assert (await fails(running)).kind == "reset"
        await until(lambda: gone)


async def test_a_worker_that_is_gone_leaves_no_connection_behind() -> None:
    gone: list[int] = []

    async def one(c: Connection) -> None:
        await c.answer()
        await c.until_gone()
        gone.append(1)

    async def late(c: Connection) -> None:
        await c.request()
        await go.wait()
        await c.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await c.until_gone()
        gone.append(2)

    go = asyncio.Event()
    upstream = HttpUpstream()
    async with Engine(one, late) as engine:
        worker = engine.worker()
        assert await exchange(upstream, engine) == b"ok"
        upstream.disconnect(worker)
        await until(lambda: gone == [1])
        running = asyncio.create_task(exchange(upstream, engine))
        await until(lambda: engine.connections == 2)
        upstream.disconnect(worker)  # a probe may still be on its way
        go.set()
        assert await running == b"ok"
        await until(lambda: gone == [1, 2])
        assert not any(upstream._idle.values())
    await upstream.close()


@pytest.mark.parametrize("change", [{"api_key": "new"}, {"path_prefix": "/b"}, {"rank": 1}])
async def test_a_worker_that_goes_leaves_the_connections_to_others_at_its_address(
    upstream: HttpUpstream, change: dict[str, Any]
) -> None:
    async with Engine(always_ok) as engine:
        gone, stays = engine.worker(), engine.worker(**change)
        for worker in (gone, stays):
            await read_all(await upstream.open(worker, call()))
        upstream.disconnect(gone)
        for _ in range(3):
            await read_all(await upstream.open(stays, call()))
        assert engine.connections == 1
        upstream.disconnect(stays)
        assert not upstream._idle
        assert not upstream._users
        assert not upstream._targets


async def test_forgotten_workers_lose_no_connection(
    upstream: HttpUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "_MAX_TARGETS", 1)
    async with Engine(always_ok) as engine:
        first, second = engine.worker(api_key="a"), engine.worker(api_key="b")
        for worker in (first, second, first, second):
            await read_all(await upstream.open(worker, call()))
        upstream.disconnect(first)
        await read_all(await upstream.open(second, call()))
        assert engine.connections == 1


# -- a slow reader


class FastEngine:
    """Sends 50 MB as fast as they are taken."""

    total = 50 << 20

    def __init__(self) -> None:
        self.written = 0

    async def answer(self, c: Connection) -> None:
        piece = bytes(range(256)) * 256
        await c.request()
        await c.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % self.total)
        while self.written < self.total:
            c.writer.write(piece)
            await c.writer.drain()
            self.written += len(piece)


async def test_a_slow_reader_slows_the_engine_and_loses_nothing(upstream: Upstream) -> None:
    fast = FastEngine()
    async with Engine(fast.answer) as engine:
        response = await upstream.open(engine.worker(), call(idle_s=0.05))
        before = -1
        while before != fast.written:  # until the engine stands still
            before = fast.written
            await asyncio.sleep(0.1)
        # Beyond the kernel's socket buffers (some MB) only little is held here.
        assert fast.written < fast.total // 2
        largest = size = 0
        while data := await response.read():
            largest = max(largest, len(data))
            size += len(data)
        assert size == fast.total
        assert largest <= 1 << 20


async def test_an_engine_that_falls_silent_after_a_slow_reader_caught_up_is_a_timeout(
    upstream: Upstream,
) -> None:
    """While reading is paused no deadline runs; it does again from the next read on."""

    async def stalls(c: Connection) -> None:
        await c.request()
        await c.send(b"HTTP/1.1 200 OK\r\ncontent-length: 999999\r\n\r\n", b"x" * 263_000)
        await c.until_gone()

    async with Engine(stalls) as engine:
        response = await upstream.open(engine.worker(), call(idle_s=0.2))
        await asyncio.sleep(0.3)
        got = 0
        while got < 263_000:
            got += len(await response.read())
        assert (await fails(response.read())).kind == "timeout"


# -- relaying


@pytest.mark.parametrize("every", [1, 3, 1000])
async def test_relay_hands_on_every_byte_in_order_however_often_the_sink_has_enough(
    upstream: Upstream, every: int
) -> None:
    pieces = [b"%d," % n for n in range(200)]

    async def streams(c: Connection) -> None:
        await c.request()
        await c.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in pieces:
            c.writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await c.writer.drain()
            await asyncio.sleep(0)
        await c.send(b"0\r\n\r\n")

    async with Engine(streams) as engine:
        response = await upstream.open(engine.worker(), call())
        got: list[bytes] = []

        def sink(data: bytes) -> bool:
            got.append(data)
            return len(got) % every != 0

        while not await response.relay(sink):
            pass
        assert b"".join(got) == b"".join(pieces)
        assert await response.relay(sink) is True, "the end stays the end"


async def test_relay_hands_on_what_arrived_before_it_fails(upstream: Upstream) -> None:
    async def breaks(c: Connection) -> None:
        await c.request()
        await c.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n", b"half")
        c.writer.transport.abort()

    async with Engine(breaks) as engine:
        response = await upstream.open(engine.worker(), call())
        got: list[bytes] = []

        def sink(data: bytes) -> bool:
            got.append(data)
            return True

        failure = await fails(response.relay(sink))
        assert (failure.kind, failure.head_received) == ("reset", True)
        assert b"".join(got) == b"half"


async def test_a_sink_that_has_enough_slows_the_engine(upstream: Upstream) -> None:
    fast = FastEngine()
    async with Engine(fast.answer) as engine:
        response = await upstream.open(engine.worker(), call())
        size = 0

        def sink(data: bytes) -> bool:
            nonlocal size
            size += len(data)
            return False

        assert await response.relay(sink) is False
        before = -1
        while before != fast.written:  # until the engine stands still
            before = fast.written
            await asyncio.sleep(0.1)
        assert fast.written < fast.total // 2
        while not await response.relay(sink):
            pass
        assert size == fast.total


async def test_cancelling_a_relay_and_aborting_closes_the_socket(upstream: Upstream) -> None:
    gone = asyncio.Event()

    async def stalls(c: Connection) -> None:
        await c.request()
        await c.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", b"x")
        await c.until_gone()
        gone.set()

    async with Engine(stalls) as engine:
        response = await upstream.open(engine.worker(), call())
        task = asyncio.create_task(response.relay(lambda _data: True))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        response.abort()
        await asyncio.wait_for(gone.wait(), 5)


# -- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ca.pem, and cert.pem and key.pem for 127.0.0.1 signed by it."""
    at = tmp_path_factory.mktemp("tls")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")

    def openssl(*arguments: str) -> None:
        subprocess.run(("openssl", *arguments), cwd=at, check=True, capture_output=True)

    openssl(
        *("req", "-x509", *new_key, "-keyout", "ca-key.pem", "-out", "ca.pem", "-days", "1"),
        *("-subj", "/CN=test ca", "-addext", "keyUsage=critical,keyCertSign"),
    )
    openssl("req", *new_key, "-keyout", "key.pem", "-out", "csr.pem", "-subj", "/CN=engine")
    (at / "ext").write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
    openssl(
        *("x509", "-req", "-in", "csr.pem", "-CA", "ca.pem", "-CAkey", "ca-key.pem", "-days", "1"),
        *("-CAcreateserial", "-extfile", "ext", "-out", "cert.pem"),
    )
    return at


def server_tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    return context


async def test_an_https_worker_is_served_and_its_connection_used_again(
    upstream: Upstream, certificate: Path
) -> None:
    body = b"x" * 300_000
    async with Engine(echo, tls=server_tls(certificate)) as engine:
        worker = engine.worker(scheme="https", tls=EngineTls(ca_file=str(certificate / "ca.pem")))
        for _ in range(2):
            response = await upstream.open(worker, call(body))
            assert await read_all(response) == body
        assert engine.connections == 1


async def test_a_name_that_leads_to_a_metadata_service_is_sent_nothing(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "_METADATA", ("127.",) * 4)  # compiled, its length is fixed
    async with Engine(always_ok, always_ok) as engine:
        named = engine.worker(host="localhost")
        failure = await fails(upstream.open(named, call()))
        assert (failure.kind, "metadata" in str(failure)) == ("connect", True)
        await read_all(await upstream.open(engine.worker(), call()))  # stated as an address


async def test_a_certificate_of_an_unknown_authority_is_refused(
    upstream: Upstream, certificate: Path
) -> None:
    async with Engine(echo, tls=server_tls(certificate)) as engine:
        failure = await fails(upstream.open(engine.worker(scheme="https"), call()))
        assert failure.kind == "connect"


async def test_a_ca_file_that_is_missing_is_a_connect_failure(upstream: Upstream) -> None:
    worker = address(scheme="https", tls=EngineTls(ca_file="/nowhere/ca.pem"))
    assert (await fails(upstream.open(worker, call()))).kind == "connect"


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".test"])
async def test_a_name_that_no_host_can_have_is_a_connect_failure(
    upstream: Upstream, host: str
) -> None:
    assert (await fails(upstream.open(address(host=host), call()))).kind == "connect"


# -- memory


def held() -> int:
    """Connections and exchanges that exist, ended or not."""
    kinds = (adapter.UpstreamConnection, adapter._Exchange)
    return sum(isinstance(found, kinds) for found in gc.get_objects())


async def read_and_fail(upstream: Upstream, engine: Engine) -> None:
    # Not `fails`: an exception that pytest looks at is in a circle.
    with contextlib.suppress(UpstreamFailure):
        await exchange(upstream, engine)


async def leave_it(upstream: Upstream, engine: Engine) -> None:
    (await upstream.open(engine.worker(), call())).abort()


async def no_connection(upstream: Upstream, engine: Engine) -> None:
    with contextlib.suppress(UpstreamFailure):
        await upstream.open(address(port=free_ports(1)[0]), call())


async def half(c: Connection) -> None:
    await c.request()
    await c.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
    c.reset()


async def once(c: Connection) -> None:
    await c.answer()


async def hanging(c: Connection) -> None:
    await c.request()
    await c.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n")
    await c.until_gone()


@pytest.mark.parametrize(
    ("handler", "use"),
    [(half, read_and_fail), (hanging, leave_it), (always_ok, no_connection), (once, exchange)],
)
async def test_what_has_ended_does_not_wait_for_the_garbage_collector(
    handler: Handler, use: Callable[[Upstream, Engine], Awaitable[object]], upstream: HttpUpstream
) -> None:
    """The collector hardly looks at what is old, as connections are."""
    async with Engine(handler) as engine:
        gc.collect()
        gc.disable()
        try:
            before = held()
            for _ in range(3):
                await use(upstream, engine)
            await until(lambda: held() == before)
        finally:
            gc.enable()
