"""The data plane's answer, written straight to the client's transport: one write per chunk.

This avoids ASGI's messages, checks and awaits, which cost more on the hot path than the rest of a
relayed chunk. Header names and values come from the gateway or from an engine's parsed head, never
from a client, so they need no escaping here.

A client that leaves cancels the answering task, but the end of an answer may come earlier in the
same loop iteration. Writes therefore check the transport: a closed uvloop transport raises.
"""

import asyncio
import http
from typing import Final, Protocol

from uvicorn.protocols.http.flow_control import FlowControl

from gateway.errors import Refusal
from gateway.http.body_bytes import Share
from gateway.http.problems import error_body, error_event, error_headers
from gateway.payload.head import lines_of
from gateway.ports import Lines
from gateway.records.endpoint import Endpoint

_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in http.HTTPStatus}

_SLICE_BYTES: Final = 64 * 1024


def status_line(status: int) -> bytes:
    """The status line with its CRLF; unknown codes have no phrase."""
    return _LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def closing(refusal: Refusal, extra: Lines = b"") -> bytes:
    """A whole answer that refuses and announces the connection's end."""
    body = error_body(refusal)
    end = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
    lines = lines_of(error_headers(refusal))
    return b"".join((status_line(refusal.status), lines, extra, end, body))


class ReplyConnection(Protocol):
    """A client connection that writes replies one after the other."""

    @property
    def transport(self) -> asyncio.Transport:
        """Where answers are written."""
        ...

    @property
    def flow(self) -> FlowControl:
        """Flow control of the write side."""
        ...

    def wrong_key_delay_s(self) -> float:
        """Delay of a 401 for this client, in seconds."""

    def finished(self) -> None:
        """Called when the whole answer is written."""

    def ended(self, reply: "DirectReply") -> None:
        """Called when the answering task ends, with or without an answer."""


class DirectReply:
    """ClientReply over a client connection's transport (HTTP/1.1)."""

    __slots__ = (
        "_connection",
        "_endpoint",
        "_events",
        "_flow",
        "_head",
        "_transport",
        "close_connection",
        "extra",
        "finished",
        "held",
        "key_refused",
        "share",
        "started",
        "task",
    )

    def __init__(self, endpoint: Endpoint, connection: ReplyConnection) -> None:
        """Write to `connection`; its `finished` is called once the whole answer is written."""
        self._endpoint = endpoint
        self._connection = connection
        self._transport = connection.transport
        self._flow = connection.flow
        self._head = b""
        self._events = True
        self.started = False
        self.finished = False
        self.close_connection = False
        self.key_refused = False
        self.extra: Lines = b""
        """Further header lines of the answer."""
        self.task: asyncio.Task[None] | None = None
        """The answering task."""
        self.held: asyncio.TimerHandle | None = None
        """Timer that writes a delayed refusal; the answering task may have ended."""
        self.share: Share | None = None
        """The share that counts the request's bytes, if they are many enough."""

    async def start(self, status: int, lines: Lines, *, events: bool = True) -> None:
        self.started = True
        self._events = events
        self._head = self._render(status, lines) + b"transfer-encoding: chunked\r\n\r\n"

    async def write(self, data: bytes) -> None:
        if not self.write_now(data):
            await self._flow.drain()

    def write_now(self, data: bytes) -> bool:
        transport = self._transport
        if transport.is_closing():
            return False
        if self._head:
            head, self._head = self._head, b""
            transport.write(b"%b%x\r\n%b\r\n" % (head, len(data), data))
        else:
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return not self._flow.write_paused

    async def drain(self) -> None:
        await self._flow.drain()

    def probe(self) -> None:
        """Send bytes that a client must ignore; the system of a client that left sends a reset.

        Before the head these are an interim answer, in a stream a leading zero of the next chunk's
        size. The connection closes after this answer, because the client sends no more requests.
        """
        self.close_connection = True
        if self.finished or self._transport.is_closing():
            return
        if not self.started or self.held is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif not self._head:
            self._transport.write(b"0")

    async def finish(self) -> None:
        self._end(self._head + b"0\r\n\r\n")

    async def send(self, status: int, lines: Lines, body: bytes) -> None:
        self.started = True
        data = self._whole(status, lines, body)
        if len(data) > _SLICE_BYTES:
            view = memoryview(data)
            while len(view) > _SLICE_BYTES and not self._transport.is_closing():
                self._transport.write(view[:_SLICE_BYTES])
                view = view[_SLICE_BYTES:]
                await self._flow.drain()
            data = bytes(view)
        self._end(data)

    async def refuse(self, refusal: Refusal, lines: Lines) -> None:
        if self.started:
            await self.break_off(refusal)
            return
        self.started = True
        self.key_refused = refusal.status in {401, 403}
        body = error_body(refusal, self._endpoint.dialect)
        data = self._whole(refusal.status, lines_of(error_headers(refusal)) + lines, body)
        delay_s = self._connection.wrong_key_delay_s() if refusal.status == 401 else 0.0
        if delay_s:
            self.held = asyncio.get_running_loop().call_later(delay_s, self._end, data)
        else:
            self._end(data)

    async def break_off(self, refusal: Refusal) -> None:
        """See ClientReply. A task that ends without an answer's end closes the connection."""
        if not self._events:
            return
        await self.write(error_event(refusal, self._endpoint.name, self._endpoint.dialect))
        await self.finish()

    def ended(self) -> None:
        self.give_back()
        self._connection.ended(self)

    def give_back(self) -> None:
        """Release the bytes of the request. Idempotent."""
        if self.share is not None:
            self.share.give_back()

    def _whole(self, status: int, lines: Lines, body: bytes) -> bytes:
        head = self._render(status, lines)
        return b"".join((head, b"content-length: %d\r\n\r\n" % len(body), body))

    def _end(self, data: bytes) -> None:
        """Write the end of an answer, if the client is still there."""
        if not self._transport.is_closing():
            self._transport.write(data)
        self.finished = True
        self._connection.finished()

    def _render(self, status: int, lines: Lines) -> bytes:
        ends = b"connection: close\r\n" if self.close_connection else b""
        return b"".join((status_line(status), lines, self.extra, ends))
