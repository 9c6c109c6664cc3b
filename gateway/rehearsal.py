"""Rehearsal: between requests a canned one walks the same code, so that its way stays in cache.

A gateway that is in use but not busy finds its code and tables thrown out of the processor's
caches by whatever ran since the last request, and then takes three times as long for each: at
50 requests/s that is most of what it adds to the time to first byte. Rehearsal walks a small
canned request through the process's own protocol, stages and upstream code, over transports
that go nowhere and with states of its own: it holds no lease of anybody, counts in no metric,
writes no record, teaches no estimator and opens no connection.

It runs only while the gateway is in use and idle at once: none after `EVERY_S` with a real
request in it (those keep the caches warm themselves), none when the event loop is late, none
once `IN_USE_S` have passed without a request. `server.keep_warm: false` turns it off.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable
from typing import Any, cast

import msgspec

from gateway.adapters.store.memory import MemoryLeases
from gateway.adapters.upstream import Connection, ConnectionKey, HttpUpstream
from gateway.domain import Principal
from gateway.pipeline import Pipeline
from gateway.policy.served import ServedModel
from gateway.stages.authenticate import Keyring
from gateway.telemetry import Metrics
from gateway.web.data_plane import DataPlane, Receive, Scope, Send
from gateway.web.protocol import GatewayProtocol

_log = logging.getLogger("sluice")

EVERY_S = 0.005
IN_USE_S = 5.0
RESTING_S = 0.25
"""Between two looks whether the gateway is in use again."""
LATE_S = 0.001
"""A timer that fires later than this says that the loop has better things to do."""

_KEY = b"sk-rehearsal"
_TEXT = b"The quick brown fox jumps over the lazy dog while the band plays on. " * 24
_BODY = (
    b'{"id":"chatcmpl-0","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"It does."},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":400,"completion_tokens":3,"total_tokens":403}}'
)
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(_BODY),
    _BODY,
)


class Rehearsal:
    """Walks the canned request of one process, from a timer of the event loop."""

    def __init__(
        self, model: ServedModel, clock: Callable[[], float], *, processes: int = 1
    ) -> None:
        """`model`: a copy that serves nobody else; `clock` monotonic, in seconds.

        `processes` share the machine: together they rehearse as often as one alone would.
        """
        self._every_s = EVERY_S * processes
        self.walked = 0
        """Canned requests answered with 200 so far."""
        self._upstream = HttpUpstream(_nowhere)
        pipeline = Pipeline(
            models={model.name: model},
            keyring=Keyring(
                {hashlib.sha256(_KEY).digest(): Principal(entitlement="none", tenant="none")}
            ),
            store=MemoryLeases({model.name: model}, clock),
            upstream=self._upstream,
            metrics=Metrics(),
            records=_Forget(),
            clock=clock,
            wall_clock=clock,
        )
        self._data_plane = DataPlane(
            pipeline, _no_control, new_id=lambda: "rehearsal", max_body_bytes=1 << 20
        )
        body = b'{"model":"%b","max_tokens":64,"messages":[{"role":"user","content":"%b"}]}' % (
            model.name.encode(),
            _TEXT,
        )
        self._request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer %b\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (_KEY, len(body), body)
        )
        self._protocol: GatewayProtocol | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._answered = 0
        self._used_s = float("-inf")
        self._failed = False
        """A defect; two hundred times a second it would fill the log."""

    def start(self, protocol: GatewayProtocol, real: DataPlane) -> None:
        """Begin, on the running loop: `protocol` is a connection's, used by nobody else."""
        protocol.data_plane = self._data_plane
        protocol.connection_made(cast("Any", _Mute(self._heard)))
        self._protocol = protocol
        self._answered = real.answered
        self._again(asyncio.get_running_loop(), real)

    async def close(self) -> None:
        """Stop for good."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._upstream.close()

    def walk(self) -> None:
        """Answer the canned request once; its task runs in the loop's next turn."""
        if self._protocol is not None and self._data_plane.running == 0:
            self._protocol.data_received(self._request)

    def _heard(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1 200 "):
            self.walked += 1
        elif data.startswith(b"HTTP/1.1 "):
            self._failed = True

    def _again(
        self, loop: asyncio.AbstractEventLoop, real: DataPlane, every_s: float = RESTING_S
    ) -> None:
        self._due_s = loop.time() + every_s
        self._timer = loop.call_at(self._due_s, self._tick, loop, real)

    def _tick(self, loop: asyncio.AbstractEventLoop, real: DataPlane) -> None:
        if self._failed:
            _log.error("rehearsal ended: its request was answered with an error")
            return
        now_s = loop.time()
        if real.answered != self._answered:
            self._answered = real.answered
            self._used_s = now_s
        elif now_s - self._used_s >= IN_USE_S:
            self._again(loop, real)
            return
        elif now_s - self._due_s < LATE_S:
            self.walk()
        self._again(loop, real, self._every_s)


class _Mute:
    """A transport that goes nowhere; `on_write` hears of what is written."""

    def __init__(self, on_write: Callable[[bytes], object] = len) -> None:
        self._on_write = on_write

    def write(self, data: bytes) -> None:
        """Returns nothing, as transports do: what is compiled insists on it."""
        self._on_write(data)

    def get_write_buffer_size(self) -> int:
        """Nothing is buffered."""
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is buffered."""

    def get_extra_info(self, name: str, default: object = None) -> object:
        """Nothing is known of nowhere."""
        return default

    def is_closing(self) -> bool:
        """Never by itself."""
        return False

    def close(self) -> None:
        """Nothing to close."""

    abort = pause_reading = resume_reading = close


async def _nowhere(
    upstream: HttpUpstream, loop: asyncio.AbstractEventLoop, key: ConnectionKey, _: float
) -> Connection:
    """A connection whose every request gets the canned answer."""
    connection = Connection(upstream, key)
    mute = _Mute(lambda _: loop.call_soon(connection.data_received, _ANSWER))
    connection.connection_made(cast("asyncio.BaseTransport", mute))
    return connection


class _Forget:
    """A sink without a bottom."""

    def append(self, record: msgspec.Struct) -> None:
        """See RecordSink."""


async def _no_control(scope: Scope, receive: Receive, send: Send) -> None:
    """No other path is rehearsed."""
