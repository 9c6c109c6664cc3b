"""uvicorn's httptools protocol with what a public gateway needs on top.

- A lost connection runs the hooks its requests left in the scope, so a client that goes away
  cancels its own request at once (no watcher task per request).
- Heads are bounded in bytes, and a whole request, head and body, in time: one sweep looks at
  all connections now and then, so that no request needs a timer. What is not HTTP gets an
  OpenAI-shaped 400.
- A client that stops reading is cut off after `WRITE_STALL_S`.
"""

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.errors import BadRequest, Refusal, Unavailable
from gateway.web.data_plane import DISCONNECT_HOOK
from gateway.web.problems import error_body

INBOUND_TIMEOUT_S = 60.0
"""From a request's first byte (or a connection's start) to the end of its body."""
SWEEP_EVERY_S = 2.0
WRITE_STALL_S = 120.0
_STATUS = {
    400: b"400 Bad Request",
    431: b"431 Request Header Fields Too Large",
    503: b"503 Service Unavailable",
}


class HeadTooLarge(Refusal):
    """431: more header bytes than the gateway reads."""

    status = 431


class GatewayProtocol(HttpToolsProtocol):
    """One client connection."""

    max_head_bytes = 64 * 1024
    max_connections = 10_000

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        """Of the head that is coming in; -1 while a body is."""
        self._head_end = b""
        """Its last bytes, for an end that comes in two pieces."""
        self._inbound_since_s: float | None = self.loop.time()
        self._stall_timer: asyncio.TimerHandle | None = None
        self._hooks: list[list[Any]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuse a connection too many."""
        super().connection_made(cast("asyncio.Transport", transport))
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
        for hooks in self._hooks:
            for hook in list(hooks):
                hook()
        self._hooks.clear()

    def data_received(self, data: bytes) -> None:
        """Bound the head, then parse."""
        if self._head_bytes >= 0:
            known = len(self._head_end)
            seen = self._head_end + data
            end = seen.find(b"\r\n\r\n")
            self._head_bytes += len(data) if end < 0 else max(0, end - known)
            self._head_end = seen[-3:]
            if self._head_bytes > self.max_head_bytes:
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

    def on_message_begin(self) -> None:
        """Give the request's scope its disconnect hook."""
        super().on_message_begin()
        self._inbound_since_s = self.loop.time()
        hooks: list[Any] = []
        cast("dict[str, Any]", self.scope)[DISCONNECT_HOOK] = hooks
        self._hooks = [h for h in self._hooks if h]
        self._hooks.append(hooks)

    def on_headers_complete(self) -> None:
        """The head is in: stop its count until the next request."""
        self._head_bytes = -1
        self._head_end = b""
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is in: stop its clock, count the next head from zero."""
        self._head_bytes = 0
        self._inbound_since_s = None
        super().on_message_complete()
        if not self.pipeline:
            # A large body paused reading; unless it goes on, a client that leaves is not seen.
            self.flow.resume_reading()

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

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP in the shape clients can read."""
        self._refuse(BadRequest(msg, reason="invalid_http_request"))

    def sweep(self, now_s: float) -> None:
        """Close the connection when its request takes too long to arrive."""
        since_s = self._inbound_since_s
        if since_s is not None and now_s - since_s > INBOUND_TIMEOUT_S:
            self.transport.close()

    def _refuse(self, refusal: Refusal) -> None:
        body = error_body(refusal)
        status = _STATUS.get(refusal.status, _STATUS[400])
        retry = b"retry-after: 1\r\n" if refusal.status == 503 else b""
        self.transport.write(
            b"HTTP/1.1 %s\r\ncontent-type: application/json\r\nx-sluice-reason: %s\r\n"
            b"content-length: %d\r\n%sconnection: close\r\n\r\n%s"
            % (status, refusal.reason.encode(), len(body), retry, body)
        )
        self.transport.close()
