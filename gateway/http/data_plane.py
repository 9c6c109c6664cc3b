"""The data plane: checks a request by its head and passes it with its body to the pipeline.

The gateway's HTTP protocol calls it, and `DirectReply` writes the answer straight to the client's
transport, one write per chunk: ASGI's messages, checks and awaits cost more than the rest of a
relayed chunk. Paths that are not its own go over ASGI to the control plane (FastAPI).

Header names and values of answers come from the gateway or from an engine's parsed head, never from
a client, so they need no escaping here.
"""

import asyncio
import http
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from hmac import compare_digest
from itertools import count
from typing import Any, Final, Protocol

from uvicorn.protocols.http.flow_control import FlowControl

from gateway.errors import KeysAwaited, Refusal, TooLarge, Unavailable
from gateway.http.body_bytes import BodyBytes, Share
from gateway.http.problems import error_body, error_event, error_headers
from gateway.http.wrong_keys import WrongKeys
from gateway.payload.head import lines_of
from gateway.ports import ClientReply, Lines
from gateway.records.endpoint import ROUTES, Endpoint
from gateway.records.record import NO_TRACE, Trace
from gateway.records.request import OPEN, Incoming, Principal, RequestHead

_log = logging.getLogger("sluice.data_plane")

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LARGE_BODY_BYTES = 256 * 1024
"""Larger bodies, and those in chunks, are read only for a known key."""
_SLASHED: Final = frozenset({"/health", "/ready", "/models", "/v1/models"})
"""Paths of the control plane that may end in a slash."""
_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in http.HTTPStatus}

_SLICE_BYTES: Final = 64 * 1024
MAX_HEAD_BYTES: Final = 4096
"""Longer heads are not kept, because a connection keeps its head until it closes."""
_MAX_DIGITS: Final = 7
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)[ \t]*(?=\r\n)", re.IGNORECASE)
_UNUSUAL: Final = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"connection"})


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
        "bodiless",
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
        self.bodiless = False
        """Whether only the head of a whole answer is sent, as for HEAD."""
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
        # A task that ends without an answer's end closes the connection.
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
        length = b"content-length: %d\r\n\r\n" % len(body)
        return b"".join((head, length, b"" if self.bodiless else body))

    def _end(self, data: bytes) -> None:
        """Write the end of an answer, if the client is still there."""
        if not self._transport.is_closing():
            self._transport.write(data)
        self.finished = True
        self._connection.finished()

    def _render(self, status: int, lines: Lines) -> bytes:
        ends = b"connection: close\r\n" if self.close_connection else b""
        return b"".join((status_line(status), lines, self.extra, ends))


class DataPlane:
    """Serves the endpoints of `gateway.records.endpoint.ROUTES`; over ASGI, all else."""

    def __init__(
        self,
        serve: Callable[[Incoming, ClientReply], Awaitable[None]],
        know: Callable[[RequestHead], Principal],
        control: App,
        *,
        new_id: Callable[[], str],
        max_body_bytes: int,
        wrong_keys: WrongKeys | None = None,
        bodies: BodyBytes | None = None,
        trace: Callable[[bytes], Trace] | None = None,
    ) -> None:
        """`serve` answers a request; `know` gives the principal of its key, or raises Refusal.

        `trace` finds a request's place in a trace by the headers that are forwarded.
        """
        self._serve = serve
        self._know = know
        self._control = control
        self._new_id = new_id
        self._trace = trace
        self.max_body_bytes = max_body_bytes
        self.wrong_keys = wrong_keys or WrongKeys()
        self.bodies = bodies or BodyBytes()
        self.draining = False
        """New requests are refused while the running ones finish."""
        self.last_requests = False
        """While draining, serve one more request per connection; other replicas get the port's
        new connections."""
        self.running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the control plane; the protocol's own are answered before."""
        path = str(scope.get("path", ""))
        if scope.get("method") == "OPTIONS" and endpoint_of(path) is not None:
            headers = [(b"allow", b"POST, OPTIONS"), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 204, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return
        if scope.get("method") == "HEAD":  # to which uvicorn sends no body
            scope = scope | {"method": "GET"}
        if path.rstrip("/") in _SLASHED:
            scope = scope | {"path": path.rstrip("/")}
        await self._control(scope, receive, send)

    async def answer(
        self, endpoint: Endpoint, head: RequestHead, body: bytes, reply: DirectReply
    ) -> None:
        """Answer one request whose body is complete; cancelled when the client leaves."""
        lease_id = self._new_id()
        incoming = Incoming(
            request_id=head.request_id or lease_id,
            lease_id=lease_id,
            endpoint=endpoint,
            head=head,
            body=body,
            received_s=time.monotonic(),
            received_unix_s=time.time(),
            trace=NO_TRACE if self._trace is None else self._trace(head.forwarded),
        )
        self.running += 1
        try:
            await self._serve(incoming, reply)
        except Exception:  # noqa: BLE001 - last resort: a bug must not leave a bare 500
            _log.exception("request %s failed inside the gateway", incoming.request_id)
            broken = Refusal(
                "The gateway failed on this request; its log has the request id and the cause.",
                reason="internal_error",
            )
            await reply.refuse(broken, _id_header(head, lease_id))
        finally:
            self.running -= 1
            reply.ended()

    async def turn_away(self, refusal: Refusal, head: RequestHead, reply: DirectReply) -> None:
        """Refuse before the whole body was read; the connection cannot be reused."""
        reply.close_connection = True
        try:
            await reply.refuse(refusal, _id_header(head, self._new_id()))
        finally:
            reply.ended()

    def check(self, method: bytes, endpoint: Endpoint, head: RequestHead, length: int) -> None:
        """Refuse requests by their head alone, such as large bodies without a known key.

        `length` is the announced body length in bytes, -1 for a body in chunks. Raises Refusal.
        """
        if method != b"POST":
            raise Refusal(f"Use POST for {endpoint.path}.", reason="method_not_allowed")
        if self.draining and not self.last_requests:
            raise shutting_down()
        if not head.plain_body:
            raise Refusal(
                "Send the body without content-encoding; the gateway reads plain JSON.",
                reason="unsupported_content_encoding",
            )
        if not (head.form_body if endpoint.multipart else head.json_body):
            kind = "multipart/form-data" if endpoint.multipart else "application/json"
            raise Refusal(
                f"Send the body as content-type: {kind}.", reason="unsupported_content_type"
            )
        if length > self.max_body_bytes:
            raise too_large(self.max_body_bytes)
        self.check_size(head, length)

    def check_size(self, head: RequestHead, size: int) -> None:
        """Require a known key for a large body, by its announced or received bytes.

        So does a body in chunks (-1), which costs much more than its bytes.
        """
        if size > LARGE_BODY_BYTES:
            self._know(head)
        elif size < 0:
            with suppress(KeysAwaited):
                self._know(head)

    def proves(self, head: RequestHead) -> bool:
        """Whether a request shows a known key; always false on an open gateway."""
        try:
            return self._know(head) is not OPEN
        except Refusal:
            return False

    def share(self, head: RequestHead) -> Share:
        """The share that counts this request's body, for the tenant of its key."""
        try:
            owner = self._know(head).tenant
        except Refusal:
            owner = ""
        return Share(self.bodies, owner)


def endpoint_of(path: str) -> Endpoint | None:
    """The endpoint at a path; clients add a slash, or double one, where their base URL ends."""
    return ROUTES.get(path) or ROUTES.get("/" + "/".join(filter(None, path[:256].split("/"))))


def request_ids() -> Callable[[], str]:
    """A source of unique request ids: a random prefix per process, then a count."""
    prefix, counted = "req-" + secrets.token_hex(6), count(1)
    return lambda: f"{prefix}-{next(counted):x}"


def _id_header(head: RequestHead, made_id: str) -> Lines:
    return b"x-request-id: %b\r\n" % (head.request_id or made_id).encode()


def shutting_down() -> Unavailable:
    """The refusal of a new request while the running ones finish."""
    return Unavailable(
        "This gateway is shutting down. Try again: another one will answer.",
        reason="shutting_down",
        retry_after_s=1.0,
        should_retry=True,
    )


def too_large(limit: int) -> TooLarge:
    """The refusal of a body over the limit."""
    return TooLarge(f"The request body is larger than {limit} bytes, this gateway's limit.")


class KnownHead:
    """The bytes of a head before and after the digits of its content-length."""

    __slots__ = ("_after", "_before")

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after

    def body_of(self, data: bytes) -> tuple[int, int] | None:
        """(offset of the body in `data`, its announced length); None for another head."""
        before, after = self._before, self._after
        begin = len(before)
        end = data.find(b"\r", begin, begin + _MAX_DIGITS + 1)
        # The bytes contain a key, so the comparison takes constant time.
        if end < 0 or not compare_digest(data[:begin], before):
            return None
        body_at = end + len(after)
        length = data[begin:end]
        if not length.isdigit() or not compare_digest(data[end:body_at], after):
            return None
        return body_at, int(length)


def learn(data: bytes, headers: Sequence[tuple[bytes, bytes]]) -> KnownHead | None:
    """The head at the start of `data`, which the parser has accepted.

    `headers` are its headers except content-length. None if the bytes are ambiguous, if more than
    the body's length may vary, or if the meaning of the following bytes depends on more than the
    head.
    """
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES) + 4
    reported = {(name.lower(), value.lower()) for name, value in headers}
    reported.discard((b"connection", b"keep-alive"))
    if end < 4 or not _UNUSUAL.isdisjoint(name for name, _ in reported):
        return None
    head = data[:end]
    lengths = list(_LENGTH.finditer(head))
    lines = len(headers) + 3  # plus the request line, content-length and the empty line
    ends = (head.count(b"\n"), head.count(b"\r"), head.count(b"\r\n"))
    if len(lengths) != 1 or ends != (lines, lines, lines):
        return None
    begin, end = lengths[0].span(1)
    return KnownHead(head[:begin], head[end:])
