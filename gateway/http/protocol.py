"""HTTP from clients: uvicorn's httptools protocol plus the protections of a public gateway.

- Data plane requests bypass ASGI: the protocol collects the body, one task runs the pipeline, and
  the answer is written straight to the transport. All other requests go through uvicorn's ASGI.
- Data that arrives while an answer runs, or waits to be read, is discarded, and the connection
  closes after that answer: pipelined data cannot corrupt one. A lost connection cancels its request
  at once, without a watcher task.
- Heads are bounded in bytes and lines; trailers, which are not interpreted, and chunk framing in
  bytes. Malformed HTTP gets a 400 in OpenAI's format. Upgrades are ignored.
- A chunk costs as much to parse as a thousand bytes. So a body in chunks needs a known key before
  any of it is parsed, chunks are bounded by number, and they count in the turns of large bodies.
- Clients that keep a connection open send the same head each time, except for the length of the
  body. A request that begins with the bytes of a head that came twice is not parsed, because
  comparing 2 KB costs less than parsing them with a callback per header.
- The bytes held for requests, heads included, are bounded over all connections, and large bodies
  take turns on the event loop (`body_bytes`).
"""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from hmac import compare_digest
from io import BytesIO
from itertools import chain
from typing import Any, Final, cast
from urllib.parse import unquote

import httptools

from gateway.errors import BadRequest, Refusal
from gateway.http.body_bytes import COUNTED_FROM_BYTES, LARGE_BYTES, LargeBodies
from gateway.http.client_connection import ClientConnection
from gateway.http.cors import Cors, Headers
from gateway.http.data_plane import (
    LARGE_BODY_BYTES,
    MAX_HEAD_BYTES,
    DataPlane,
    DirectReply,
    KnownHead,
    endpoint_of,
    learn,
    too_large,
)
from gateway.payload.head import lines_of, read_head
from gateway.records.endpoint import Endpoint
from gateway.records.request import RequestHead

MAX_HEADERS: Final = 256
"""Bound on the lines of a head, because each costs more memory than its bytes."""
_HEADER_COST_BYTES: Final = 160
"""Memory that a header line takes besides its bytes."""
_CHUNK_FRAME_BYTES: Final = 16
"""Size digits and line breaks of one chunk; anything longer counts as chunk extensions."""
FREE_CHUNKS: Final = 1024
"""Chunks of a body that may be of any size."""
MIN_CHUNK_BYTES: Final = 32
"""Least size, on average, of the chunks beyond those."""
_CHUNK_COST_BYTES: Final = 1024
"""Bytes that are read in the time that one chunk takes to parse."""
_MAX_SURPLUS_BYTES: Final = 32 * 1024 * 1024
"""Most bytes after a request that is being answered; beyond it the connection is aborted."""
_UPLOADS: Final = "/v1/files"
"""Posted there, a body is passed on as it comes, and takes as long as it keeps coming."""
_PUBLIC: Final = (b"/v1/", b"/models")
"""How paths begin that a page may call, beside the data plane's."""
_LENGTH_NAME: Final = len(b"content-length")
_NOT_READ: Final = b"\n"
"""Differs from any joined headers, because a header name is never empty."""
_UPGRADE: Final = frozenset({b"connection", b"upgrade", b"http2-settings"})


class _EnoughError(Exception):
    """Stops the parser: the rest of the read must not be parsed."""


class GatewayProtocol(ClientConnection):
    """One client connection."""

    max_head_bytes = 64 * 1024
    large_bodies = LargeBodies()
    cors = Cors()
    data_plane: DataPlane
    """Answers its requests without ASGI."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_end = b""
        """Last bytes of the incoming head, to find an end that is split over two reads."""
        self._framing_bytes = 0
        """Bytes of the incoming body that are neither content nor the usual framing of a chunk."""
        self._chunks = 0
        self._surplus_bytes = 0
        """Bytes received after a request that is being answered."""
        self._announced = b""
        """Its content-length, or b"". Kept out of `headers`, where it would make heads differ."""
        self._head = RequestHead()
        self._head_of = _NOT_READ
        """Names and values that `_head` was read from, joined by line breaks."""
        self._again = False
        """Whether the last head equals the one before it."""
        self._known_head: KnownHead | None = None
        """`_head` as sent, for a request to `_known_endpoint`, once the head came twice."""
        self._known_endpoint: Endpoint | None = None
        self._size = 0
        self._proven: bool | None = None
        """Whether the incoming request has shown a known key; None before it was looked up."""
        self._chunked = False
        self._uploads = False
        """Whether the incoming request uploads a file."""

    def data_received(self, data: bytes) -> None:
        """Bound the head, then parse."""
        if self._lingers_since_s is not None or self.answering or self.flow.write_paused:
            self._pass_over(data)
            return
        begins = not self._head_bytes
        if begins and self._known_head is not None:
            data = self._take_known(self._known_head, data)
            if not data:
                return
        in_body, chunks = self._head_bytes < 0, self._chunks
        if in_body:
            self._framing_bytes += len(data)
        elif self._head_bytes + len(data) <= self.max_head_bytes and not self._head_end:
            self._head_bytes += len(data)  # fits even if all of it is head
            self._head_end = data[-3:]
        else:
            head = self._head_end + data
            end = head.find(b"\r\n\r\n")
            self._head_bytes += len(data) if end < 0 else max(0, end - len(self._head_end))
            self._head_end = head[-3:]
            if self._head_bytes > self.max_head_bytes:
                self._refuse_head()
                return
        self._parse(data)
        if self._head_bytes:  # the request is incomplete
            cost_bytes = len(data) + _CHUNK_COST_BYTES * max(0, self._chunks - chunks)
            self._wait_for_rest(cost_bytes, in_body=in_body)
        elif self._holds and not self._asgi_answers:
            self._let_go()
        if begins and self._again and self._known_head is None:
            taken = self._endpoint is not None or self._answering is not None
            self._known_head = learn(data, self.headers) if taken else None

    def shutdown(self) -> None:
        """Uvicorn stops: close now if idle, else after the answer."""
        if self._answering is None:
            super().shutdown()
        elif self._reply is not None:
            self._reply.close_connection = True

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:  # once more, without that wish
            method = self.parser.get_method()
            if method == b"CONNECT":
                self._refuse_malformed()
                return
            lowered = _lowered(self.headers)
            reported = [pair for pair in lowered if pair[0] not in _UPGRADE]
            if self._announced:
                reported.append((b"content-length", self._announced))
            if any(name == b"connection" and b"close" in value.lower() for name, value in lowered):
                reported.append((b"connection", b"close"))
            lines = b"".join(b"%b: %b\r\n" % pair for pair in reported)
            version = self.parser.get_http_version().encode()
            head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, lines)
            self.parser = httptools.HttpRequestParser(self)
            self._parse(head + data[upgrade.args[0] :])
        except httptools.HttpParserError:
            if self.answering:  # the error is in data after the request that is being answered
                self._pass_over(data)
            elif len(self.headers or ()) > MAX_HEADERS:
                self._refuse_head()
            elif self._chunks > FREE_CHUNKS + self._size // MIN_CHUNK_BYTES:
                self._refuse(
                    BadRequest(
                        f"The request's body comes in {self._chunks} chunks of {self._size} bytes "
                        f"in all. Send chunks of {MIN_CHUNK_BYTES} bytes or more, or send "
                        "content-length instead.",
                        reason="chunks_too_small",
                    ),
                    unread=True,
                )
            else:
                self._refuse_malformed()

    def on_message_begin(self) -> None:
        """Start a request's clock. State for ASGI is created later, if needed."""
        if self.answering:
            raise _EnoughError
        self.url = b""
        self.headers = []
        self._announced = b""
        self._size = self._framing_bytes = self._chunks = 0
        self._proven = None
        self._inbound_since_s = self.loop.time()
        self._idle_since_s = None

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(name) == _LENGTH_NAME and name.lower() == b"content-length":
            self._announced = value
        elif self._head_bytes >= 0:  # not a trailer
            self.headers.append((name, value))
            if len(self.headers) > MAX_HEADERS:
                raise _EnoughError

    def on_headers_complete(self) -> None:
        """Choose the direct path of the data plane, or ASGI for everything else."""
        if self.parser.should_upgrade():
            return  # `_parse` does it again
        self._head_bytes = -1
        self._head_end = b""
        url, method = self.url, self.parser.get_method()
        endpoint = endpoint_of(_path(url))
        if endpoint is not None and method != b"OPTIONS":
            self._endpoint = endpoint
            self._body = b""
            self._open(endpoint)
            return
        headers = _lowered(self.headers)
        _, expects = _framing(headers)
        self._uploads = method == b"POST" and _path(url) == _UPLOADS
        if method == b"OPTIONS" and url == b"*":
            url = b"/"
        if self._announced:
            headers.append((b"content-length", self._announced))
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expects
        self._head_of = _NOT_READ
        self._known_head = None
        more: Headers = ()
        if url.startswith(_PUBLIC) or endpoint_of(_path(url)):
            more = self.cors.headers(headers, preflight=method == b"OPTIONS")
        self._extra = lines_of(more)
        cast("dict[str, Any]", self.scope)["headers"] = headers
        super().on_headers_complete()
        self.cycle.default_headers = [*self.cycle.default_headers, *more]

    def on_chunk_header(self) -> None:
        """Bound the chunks, and exclude their usual framing from `_framing_bytes`."""
        self._framing_bytes -= _CHUNK_FRAME_BYTES
        self._chunks += 1
        if self._chunks > FREE_CHUNKS + self._size // MIN_CHUNK_BYTES:
            raise _EnoughError

    def on_body(self, body: bytes) -> None:
        """Collect a direct request's body, up to the limit."""
        self._size += len(body)
        self._framing_bytes -= len(body)
        if self._endpoint is None:
            if self._answering is None:
                super().on_body(body)
            return
        if not self._body:
            self._body = body
        else:
            if isinstance(self._body, bytes):
                # BytesIO returns its value without a copy, unlike a bytearray.
                first, self._body = self._body, BytesIO()
                self._body.write(first)
            self._body.write(body)
        if self._size > self.data_plane.max_body_bytes:
            self._turn_away(too_large(self.data_plane.max_body_bytes))

    def on_message_complete(self) -> None:
        """The request is complete: stop its clock, answer it, count the next head from zero."""
        if self.parser.should_upgrade():
            return
        self._head_bytes = 0
        self._inbound_since_s = None
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is None:
            if self._answering is None:
                self._asgi_answers = not self.cycle.response_complete
                if (head_bytes := _memory_bytes(self.headers)) > COUNTED_FROM_BYTES:
                    self._hold(head_bytes)
                super().on_message_complete()
                # The gateway notices that a client left only while it reads the connection.
                self.flow.resume_reading()
            return
        body = self._body if isinstance(self._body, bytes) else self._body.getvalue()
        self._body = b""
        if (reply := self._reply) is None:
            return
        try:
            self._cover(reply, len(body))
        except Refusal as refusal:
            self._turn_away(refusal)
            return
        if len(body) > LARGE_BYTES:
            self._run(reply, self._answer_large(endpoint, body, reply))
        else:
            self._run(reply, self.data_plane.answer(endpoint, self._head, body, reply))

    def _refuse_head(self) -> None:
        self._refuse(
            Refusal(
                f"The request's headers or trailers are larger than {self.max_head_bytes} bytes "
                f"or more than {MAX_HEADERS}. Send fewer or shorter headers.",
                reason="headers_too_large",
            ),
            unread=True,
        )

    def _wait_for_rest(self, cost_bytes: int, *, in_body: bool) -> None:
        """Bound the bytes held for an incomplete request. `cost_bytes`: what the last read cost."""
        if self.answering or self._lingers_since_s is not None or self.transport.is_closing():
            return
        # Chunks with short framing earn no credit for later ones; the read that contains the head
        # counted as head.
        self._framing_bytes = max(0, self._framing_bytes) if in_body else 0
        if self._framing_bytes > self.max_head_bytes:
            self._refuse_head()
            return
        if self._endpoint is not None:
            plane = self.data_plane
            if self._proven is None:  # once: a forged token costs a signature each time
                self._proven = plane.proves(self._head)
            try:
                if not self._proven:
                    plane.check_size(self._head, self._size)
                elif self._reply is not None:
                    self._cover(self._reply, self._size)
            except Refusal as refusal:
                self._turn_away(refusal)
                return
            if self._size + cost_bytes > COUNTED_FROM_BYTES:
                self.large_bodies.took(self.transport, cost_bytes, self.loop)
            if self._proven:
                self._hold(self._framing_bytes)
                return
        head_bytes = max(0, self._head_bytes) + _memory_bytes(self.headers or ())
        size = self._size
        if self._uploads and in_body:
            self._inbound_since_s, size = self.loop.time(), len(self.cycle.body)
        self._hold(size + head_bytes + self._framing_bytes)

    def _pass_over(self, data: bytes) -> None:
        """Discard data after a request that is being, or was, answered.

        Too much of it aborts the connection, even during an answer.
        """
        if not self._surplus_bytes and not data.strip(b"\r\n"):
            return  # some clients end a body with a line break
        self.large_bodies.took(self.transport, len(data), self.loop)
        if self._lingers_since_s is not None:
            return
        self._surplus_bytes += len(data)
        if self._reply is not None:
            self._reply.close_connection = True
        if self._surplus_bytes > _MAX_SURPLUS_BYTES:
            self.transport.abort()
        elif not self.answering:  # the whole answer is written; the client has yet to read it
            self._close_answered(unread=True)

    def _open(self, endpoint: Endpoint) -> None:
        # Names and values contain no line break, so joining is unambiguous. They contain a key,
        # so the comparison takes constant time.
        sent = b"\n".join(chain.from_iterable(self.headers))
        self._again = compare_digest(sent, self._head_of) and endpoint is self._known_endpoint
        if not self._again:
            self._head_of = sent
            self._known_head = None
            self._known_endpoint = endpoint
            lowered = _lowered(self.headers)
            self._chunked, self.expect_100_continue = _framing(lowered)
            self._head = read_head(lowered)
            self._extra = lines_of(self.cors.headers(lowered))
        head, announced, plane = self._head, self._announced, self.data_plane
        length = int(announced) if announced.isdigit() else -1 if self._chunked else 0
        self._reply = reply = DirectReply(endpoint, self)
        reply.extra = self._extra
        self._old = self.parser.get_http_version() != "1.1"
        keeps = self.parser.should_keep_alive() and not self._old
        reply.close_connection = not keeps or plane.draining
        method = self.parser.get_method()
        reply.bodiless = method == b"HEAD"
        try:
            plane.check(method, endpoint, head, length)
            if length > COUNTED_FROM_BYTES:
                self._proven = plane.proves(head)
                if self._proven:
                    self._cover(reply, length)
        except Refusal as refusal:
            self._turn_away(refusal)
            raise _EnoughError from None  # nothing of the body is parsed
        if self.expect_100_continue and not self._old:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _take_known(self, known: KnownHead, data: bytes) -> bytes:
        """Answer a complete request with the known head, or wait for the rest of its body.

        Returns what the parser gets, which has seen nothing of the request: b"" if it is taken.
        """
        half, plane, endpoint = self._half, self.data_plane, self._known_endpoint
        if half:
            data, self._half = half + data, b""
        measures = None if plane.draining else known.body_of(data)
        body_at, size = measures or (0, -1)
        missing = body_at + size - len(data)
        fits = 0 <= size <= min(LARGE_BODY_BYTES, plane.max_body_bytes)
        if endpoint is None or not fits or missing < 0 or (missing and half):
            if half and self._reply is not None:
                self._reply.give_back()  # `_open` counts anew
            return data
        reply = self._reply
        if reply is None:
            self._reply = reply = DirectReply(endpoint, self)
            reply.extra = self._extra
        try:
            if not missing or plane.proves(self._head):
                self._cover(reply, size)
            else:
                self._hold(len(data) + len(self._head_of))
        except Refusal as refusal:
            self._run(reply, plane.turn_away(refusal, self._head, reply))
            return b""
        self._idle_since_s = None
        if missing:
            self._half = data
            self._inbound_since_s = self.loop.time()
            return b""
        self._inbound_since_s = None
        self._run(reply, plane.answer(endpoint, self._head, data[body_at:], reply))
        if self._holds:
            self._let_go()
        return b""

    async def _answer_large(self, endpoint: Endpoint, body: bytes, reply: DirectReply) -> None:
        head = self._head
        try:
            await self.large_bodies.alone()
        except asyncio.CancelledError:
            reply.ended()
            raise
        await self.data_plane.answer(endpoint, head, body, reply)

    def _cover(self, reply: DirectReply, size: int) -> None:
        """Count a request with a body of `size` bytes, unless it is small. Raises Refusal."""
        held_bytes = size + len(self._head_of)
        if held_bytes > COUNTED_FROM_BYTES:
            if reply.share is None:
                reply.share = self.data_plane.share(self._head)
            reply.share.cover(held_bytes)

    def _turn_away(self, refusal: Refusal) -> None:
        self._let_go()
        if self._reply is not None:
            self._reply.give_back()
            turning = self.data_plane.turn_away(refusal, self._head, self._reply)
            self._run(self._reply, turning)

    def _run(self, reply: DirectReply, answer: Coroutine[Any, Any, None]) -> None:
        self._answering = reply.task = task = self.loop.create_task(answer)
        self.tasks.add(task)

    def wrong_key_delay_s(self) -> float:
        return 0.0 if self.client is None else self.data_plane.wrong_keys.delay_s(self.client[0])

    def finished(self) -> None:
        reply, self._reply = self._reply, None
        self._answering = None
        if reply is not None and not reply.key_refused:
            self._served = True
        if len(self._head_of) > MAX_HEAD_BYTES:
            self._forget_head()
        self._idle_since_s = self.loop.time()
        self.server_state.total_requests += 1
        if reply is None or reply.close_connection:
            self._close_answered(unread=bool(self._head_bytes or self._surplus_bytes))

    def ended(self, reply: DirectReply) -> None:
        """The task calls this itself: a callback takes one more iteration."""
        if reply.task is not None:
            self.tasks.discard(reply.task)
            reply.task = None
        if reply.held is not None:
            self._forget_head()
        if self._reply is reply and reply.held is None:  # the task ended without an answer
            self._answering = None
            self._reply = None  # breaks a reference cycle that would live long
            self.transport.close()

    def on_response_complete(self) -> None:
        """Close after an answer if the client is still sending, or closed its sending side."""
        self._asgi_answers = False
        super().on_response_complete()
        if self._holds:
            self._let_go()
        unread = bool(self._head_bytes or self._surplus_bytes)
        if unread or self._look_timer is not None:
            self._close_answered(unread=unread)
        else:
            self._unset_keepalive_if_required()  # `sweep` closes idle connections
            self._idle_since_s = self.loop.time()
            self._forget_head()

    def _forget_head(self) -> None:
        """Keep nothing of a head while no request runs: an idle connection counts no bytes."""
        self.headers, self.url = [], b""
        self._head_of, self._head, self._known_head = _NOT_READ, RequestHead(), None
        self.scope = self.cycle = None  # type: ignore[assignment]  # as before a first request


def _path(url: bytes) -> str:
    """The path as ASGI gets it: decoded, and without the host that clients of proxies name."""
    path = url.partition(b"?")[0]
    if not path.startswith(b"/") or b"%" in path:
        with suppress(httptools.HttpParserInvalidURLError):
            path = httptools.parse_url(url).path or b""
    return unquote(path.decode("latin-1"))


def _lowered(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower(), value) for name, value in headers]


def _memory_bytes(headers: Headers) -> int:
    return sum(len(name) + len(value) + _HEADER_COST_BYTES for name, value in headers)


def _framing(headers: Headers) -> tuple[bool, bool]:
    """Whether the body comes in chunks, and whether the client waits for 100 Continue.

    Header names must be in lower case. Raises _EnoughError for codings besides chunks.
    """
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and codings != [b"chunked"]:
        raise _EnoughError
    expects = any(n == b"expect" and v.lower() == b"100-continue" for n, v in headers)
    return bool(codings), expects
