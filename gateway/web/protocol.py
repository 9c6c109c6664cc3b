"""uvicorn's httptools protocol with what a public gateway needs on top.

- The data plane's requests are answered without ASGI: the body is collected here, one task
  runs the pipeline, the answer is written straight to the transport. All other requests
  (control plane, HTTP/1.0, upgrades) go through uvicorn's ASGI as ever. A request pipelined
  behind a direct answer is not processed; the connection closes after that answer.
- A lost connection runs the hooks its requests left in the scope, so a client that goes away
  cancels its own request at once (no watcher task per request).
- Heads are bounded in bytes, and a whole request, head and body, in time: one sweep looks at
  all connections now and then, so that no request needs a timer. What is not HTTP gets an
  OpenAI-shaped 400.
- A head that comes again on a connection is recognised (`known_head`), not parsed.
- A client that stops reading is cut off after `WRITE_STALL_S`.
- Who is refused while still sending is read on for `LINGER_S` and not listened to: closed at once,
  the kernel would reset the connection, and the refusal would be lost on its way.
"""

import asyncio
import os
import socket
from collections.abc import Coroutine
from hmac import compare_digest
from itertools import chain
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.domain import ENDPOINTS, Endpoint, RequestHead
from gateway.errors import BadRequest, Refusal, Unavailable
from gateway.policy.head import read_head
from gateway.web.data_plane import DISCONNECT_HOOK, LARGE_BODY_BYTES, DataPlane, too_large
from gateway.web.direct import DirectReply
from gateway.web.known_head import KnownHead, learn
from gateway.web.problems import error_body
from gateway.web.status import status_line

INBOUND_TIMEOUT_S = 60.0
"""From a request's first byte (or a connection's start) to the end of its body."""
SWEEP_EVERY_S = 2.0
WRITE_STALL_S = 120.0
KEEP_ALIVE_S = 75.0
LINGER_S = 5.0
_LENGTH_NAME = len(b"content-length")
_NOT_READ = b"\n"
"""What no headers are: a name is never empty."""
_PATHS = {endpoint.path.encode(): endpoint for endpoint in ENDPOINTS.values()}


class HeadTooLarge(Refusal):
    """431: more header bytes than the gateway reads."""

    status = 431


class GatewayProtocol(HttpToolsProtocol):
    """One client connection."""

    max_head_bytes = 64 * 1024
    max_connections = 10_000
    data_plane: DataPlane | None = None
    """Answers its endpoints without ASGI; None sends everything through ASGI."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        """Of the head that is coming in; -1 while a body is."""
        self._head_end = b""
        """Its last bytes, for an end that comes in two pieces."""
        self._inbound_since_s: float | None = self.loop.time()
        self._idle_since_s: float | None = None
        self._lingers_since_s: float | None = None
        """It was answered for the last time, before all that it was sending had come."""
        self._stall_timer: asyncio.TimerHandle | None = None
        self._hooks: list[list[Any]] = []
        self._endpoint: Endpoint | None = None
        """Of the request that is coming in, when it is answered without ASGI."""
        self._announced = b""
        """Its content-length, "" without: in `headers` it would make every head another one."""
        self._head = RequestHead()
        self._head_of = _NOT_READ
        """The headers that `_head` was read from, names and values line by line."""
        self._again = False
        """The last head was the one before it."""
        self._known: KnownHead | None = None
        """`_head` as it is sent, once it came twice; of a request to `_known_endpoint`."""
        self._known_endpoint: Endpoint | None = None
        self._half = b""
        """A request with a known head whose body is still coming."""
        self._pieces: list[bytes] = []
        self._size = 0
        self._reply: DirectReply | None = None
        self._answering: asyncio.Task[None] | None = None

    # Connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuse a connection too many."""
        super().connection_made(cast("asyncio.Transport", transport))
        # uvloop keeps what fits its buffer until the end of the loop's turn; an answer must
        # not wait for its own settlement and for other requests' work.
        self.transport.set_write_buffer_limits(high=0)
        if len(self.connections) > self.max_connections:
            self._refuse(
                Unavailable(
                    "This gateway has all the connections it may hold. Try again shortly.",
                    reason="too_many_connections",
                    code="too_many_connections",
                )
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the requests of this connection that their client is gone."""
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        super().connection_lost(exc)
        if self._answering is not None:
            # After its first step, or a request whose client left at once would leave no trace:
            # a task that is cancelled before it began does not begin.
            self.loop.call_soon(self._answering.cancel)
        for hooks in self._hooks:
            for hook in list(hooks):
                hook()
        self._hooks.clear()

    def data_received(self, data: bytes) -> None:
        """Bound the head, then parse."""
        if self._lingers_since_s is not None:
            return
        begins = self._answering is None and not self._head_bytes
        if begins and self._known is not None:
            if self._half:
                data, self._half = self._half + data, b""
                if self._take_known(self._known, data, half=False):
                    return
            elif self._take_known(self._known, data, half=True):
                return
        if self._head_bytes >= 0 and not self._head_fits(data):
            self._refuse(
                HeadTooLarge(
                    f"The request's headers are larger than {self.max_head_bytes} bytes. "
                    "Send fewer or shorter headers.",
                    reason="headers_too_large",
                    code="headers_too_large",
                )
            )
            return
        super().data_received(data)
        if begins and self._again and self._known is None:
            taken = self._endpoint is not None or self._answering is not None
            self._known = learn(data, self.headers) if taken else None

    def shutdown(self) -> None:
        """Uvicorn stops: end now when idle, after the answer when not."""
        if self._answering is None:
            super().shutdown()
        elif self._reply is not None:
            self._reply.close_connection = True

    def pause_writing(self) -> None:
        """Start the clock on a client that does not read."""
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(WRITE_STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def sweep(self, now_s: float) -> None:
        """Close the connection when its request takes too long to arrive, or none comes."""
        for since_s, limit_s in (
            (self._inbound_since_s, INBOUND_TIMEOUT_S),
            (self._idle_since_s, KEEP_ALIVE_S),
            (self._lingers_since_s, LINGER_S),
        ):
            if since_s is not None and now_s - since_s > limit_s:
                self.transport.close()

    @property
    def idle_since_s(self) -> float | None:
        """When its last answer ended, while nothing else has come; None otherwise."""
        return self._idle_since_s if self._inbound_since_s is None else None

    def give_away(self) -> socket.socket | None:
        """Let go of an idle connection without ending it: its socket, for another process.

        None when anything has come in, or is still to be written.
        """
        mine = self.transport.get_extra_info("socket")
        if self.idle_since_s is None or self.transport.get_write_buffer_size() or mine is None:
            return None
        self.transport.pause_reading()
        taken = socket.socket(fileno=os.dup(mine.fileno()))
        self.transport.close()
        return taken

    # Parser callbacks

    def on_message_begin(self) -> None:
        """Start a request's clock. What ASGI needs is made later, if it is needed."""
        self.url = b""
        self.headers = []
        self._announced = b""
        if self._answering is None:  # what is pipelined behind an answer is not waited for
            self._inbound_since_s = self.loop.time()
        self._idle_since_s = None

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note a header as it was sent: most connections send the same ones again and again."""
        if len(name) == _LENGTH_NAME and name.lower() == b"content-length":
            self._announced = value
        else:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Choose: the data plane's own way, or ASGI for everything else."""
        self._head_bytes = -1
        self._head_end = b""
        endpoint = self._direct_endpoint()
        if endpoint is not None and self.data_plane is not None:
            self._endpoint = endpoint
            self._pieces = []
            self._size = 0
            self._open(endpoint, self.data_plane)
        else:
            self._to_asgi()

    def on_body(self, body: bytes) -> None:
        """Collect a direct request's body, up to the limit."""
        endpoint = self._endpoint
        if endpoint is None:
            if self._answering is None:
                super().on_body(body)
            return
        self._size += len(body)
        self._pieces.append(body)
        if self.data_plane is not None and self._size > self.data_plane.max_body_bytes:
            self._turn_away(too_large(self.data_plane.max_body_bytes), self.data_plane)

    def on_message_complete(self) -> None:
        """The request is in: stop its clock, answer it, count the next head from zero."""
        self._head_bytes = 0
        self._inbound_since_s = None
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is None:
            if self._answering is None:
                super().on_message_complete()
                # A client that leaves is seen only while its connection is read.
                self.flow.resume_reading()
            return
        pieces, self._pieces = self._pieces, []
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        reply = self._reply
        if self.data_plane is not None and reply is not None:
            self._run(reply, self.data_plane.answer(endpoint, self._head, body, reply))

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP in the shape clients can read."""
        self._refuse(BadRequest(msg, reason="invalid_http_request"))

    # The data plane without ASGI

    def _direct_endpoint(self) -> Endpoint | None:
        if self._answering is not None:
            # Pipelining: the answer that runs will be this connection's last.
            if self._reply is not None:
                self._reply.close_connection = True
            return None
        endpoint = _PATHS.get(self.url.partition(b"?")[0])
        cycle = cast("RequestResponseCycle | None", self.cycle)
        asgi_busy = cycle is not None and not cycle.response_complete
        if endpoint is None or asgi_busy or self.parser.get_http_version() != "1.1":
            return None
        return None if self.parser.should_upgrade() else endpoint

    def _open(self, endpoint: Endpoint, data_plane: DataPlane) -> None:
        # Neither holds a line break. A key is among them: compared in constant time.
        sent = b"\n".join(chain.from_iterable(self.headers))
        self._again = compare_digest(sent, self._head_of) and endpoint is self._known_endpoint
        if not self._again:
            self._head_of = sent
            self._known = None
            self._known_endpoint = endpoint
            lowered = _lowered(self.headers)
            self._head = read_head(lowered)
            self.expect_100_continue = _expects(lowered)
        head, announced = self._head, self._announced
        length = int(announced) if announced.isdigit() else 0
        self._reply = reply = DirectReply(endpoint, self)
        reply.close_connection = not self.parser.should_keep_alive()
        try:
            data_plane.check(self.parser.get_method().decode("ascii"), endpoint, head, length)
        except Refusal as refusal:
            self._turn_away(refusal, data_plane)
        else:
            if self.expect_100_continue:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _take_known(self, known: KnownHead, data: bytes, *, half: bool) -> bool:
        """Answer a whole request with the known head, or wait for the second half of one.

        False for anything else: that is the parser's, to which `data` is all new.
        """
        plane, endpoint = self.data_plane, self._known_endpoint
        if plane is None or endpoint is None or plane.draining:
            return False
        found = known.body_of(data)
        if found is None or found[1] > min(LARGE_BODY_BYTES, plane.max_body_bytes):
            return False
        body_at, size = found
        missing = body_at + size - len(data)
        if missing > 0 and half:
            self._half = data
            self._idle_since_s = None
            self._inbound_since_s = self.loop.time()
            return True
        if missing:
            return False
        self._inbound_since_s = self._idle_since_s = None
        self._reply = reply = DirectReply(endpoint, self)
        self._run(reply, plane.answer(endpoint, self._head, data[body_at:], reply))
        return True

    def _turn_away(self, refusal: Refusal, data_plane: DataPlane) -> None:
        self._endpoint = None
        self._pieces = []
        if self._reply is not None:
            self._run(self._reply, data_plane.turn_away(refusal, self._head, self._reply))

    def _run(self, reply: DirectReply, answer: Coroutine[Any, Any, None]) -> None:
        self._answering = reply.task = task = self.loop.create_task(answer)
        self.tasks.add(task)

    def finished(self) -> None:
        """See direct.Connection. The next request may come before this one's task has ended."""
        reply, self._reply = self._reply, None
        self._answering = None
        self._idle_since_s = self.loop.time()
        self.server_state.total_requests += 1
        if reply is None or reply.close_connection:
            self._close_answered()

    def ended(self, reply: DirectReply) -> None:
        """See direct.Connection. Its task tells so itself: a callback would be a turn more."""
        if reply.task is not None:
            self.tasks.discard(reply.task)
            reply.task = None
        if self._reply is reply:  # it ended without an answer
            self._answering = None
            self._reply = None  # which knows this connection: a circle that would stay for long
            self.transport.close()

    # The rest

    def _to_asgi(self) -> None:
        if self._answering is not None:
            return  # pipelined behind a direct answer: not processed, the connection closes
        url, headers = self.url, _lowered(self.headers)
        if self._announced:
            headers.append((b"content-length", self._announced))
        super().on_message_begin()
        self.url, self.headers = url, headers
        self._head_of = _NOT_READ
        self._known = None
        self.expect_100_continue = _expects(headers)
        hooks: list[Any] = []
        scope = cast("dict[str, Any]", self.scope)
        scope["headers"] = headers
        scope[DISCONNECT_HOOK] = hooks
        self._hooks = [h for h in self._hooks if h]
        self._hooks.append(hooks)
        super().on_headers_complete()

    def _head_fits(self, data: bytes) -> bool:
        if self._head_bytes + len(data) <= self.max_head_bytes and not self._head_end:
            self._head_bytes += len(data)  # even if it were all head
            self._head_end = data[-3:]
            return True
        known = len(self._head_end)
        seen = self._head_end + data
        end = seen.find(b"\r\n\r\n")
        self._head_bytes += len(data) if end < 0 else max(0, end - known)
        self._head_end = seen[-3:]
        return self._head_bytes <= self.max_head_bytes

    def _refuse(self, refusal: Refusal) -> None:
        body = error_body(refusal)
        retry = b"retry-after: 1\r\n" if refusal.status == 503 else b""
        self.transport.write(
            b"%bcontent-type: application/json\r\nx-sluice-reason: %b\r\n"
            b"content-length: %d\r\n%bconnection: close\r\n\r\n%b"
            % (status_line(refusal.status), refusal.reason.encode(), len(body), retry, body)
        )
        self._close_answered()

    def _close_answered(self) -> None:
        """Close the connection after an answer, and not before the client can have read it."""
        transport = self.transport
        if self._head_bytes and transport.can_write_eof() and not transport.is_closing():
            self._lingers_since_s = self.loop.time()
            transport.write_eof()
        else:
            transport.close()


def _lowered(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower(), value) for name, value in headers]


def _expects(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether the client waits for a word before it sends its body; of lowered headers."""
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in headers)
