"""One client's connection: its clocks, its limits, and how it ends. What it says: `protocol`.

- A whole request, head and body, is bounded in time: one sweep looks at all connections now and
  then, so that no request needs a timer. A client that stops reading is cut off after
  `WRITE_STALL_S`.
- A client may close its sending side and wait for the answer. That looks just as if it had left,
  so it is sent what it must ignore: to that the system of one that has left answers with a reset.
- Who is refused while still sending is read on for `LINGER_S` and not listened to: closed at once,
  the kernel would reset the connection, and the refusal would be lost on its way.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from math import inf
from typing import Any, Final, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.errors import BadRequest, Refusal, Unavailable
from gateway.web.http.direct_reply import DirectReply, status_line
from gateway.web.problems import error_body

EVERY_S: Final = 60.0


class RareLog:
    """One kind of warning: at most one line in `EVERY_S`, which says how many it stands for."""

    def __init__(
        self, log: logging.Logger, what: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`what` happened, as a line says it; `clock` in seconds."""
        self._log = log
        self._what = what
        self._clock = clock
        self._silent_since_s = -inf
        self._unsaid = 0

    def note(self, who: str) -> None:
        """It happened, because of `who`."""
        now_s = self._clock()
        if now_s - self._silent_since_s < EVERY_S:
            self._unsaid += 1
            return
        unsaid, self._unsaid, self._silent_since_s = self._unsaid, 0, now_s
        self._log.warning("%s from %s (%d more since the last line)", self._what, who, unsaid)


INBOUND_TIMEOUT_S = 60.0
"""From a request's first byte (or a connection's start) to the end of its body."""
SWEEP_EVERY_S = 2.0
WRITE_STALL_S = 120.0
KEEP_ALIVE_S = 75.0
LINGER_S = 5.0
_FIRST_LOOK_S: Final = 0.01
_LAST_LOOK_S: Final = 1.0
"""From the first to the last the time between two looks doubles."""
_malformed = RareLog(logging.getLogger("sluice.http"), "what is not HTTP/1.1 came")


class ClientConnection(HttpToolsProtocol):
    """uvicorn's connection, bounded. Only `protocol.GatewayProtocol` is made."""

    max_connections = 10_000

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._inbound_since_s: float | None = self.loop.time()
        self._idle_since_s: float | None = None
        self._lingers_since_s: float | None = None
        """It was answered for the last time, before all that it was sending had come."""
        self._stall_timer: asyncio.TimerHandle | None = None
        self._look_timer: asyncio.TimerHandle | None = None
        """Of a client that closed its sending side: is it still there?"""
        self._reply: DirectReply | None = None
        self._answering: asyncio.Task[None] | None = None
        self._asgi_answers = False
        """ASGI has a whole request, and has not answered it."""

    @property
    def answering(self) -> bool:
        """A whole request is here, or was refused, and its answer has not ended."""
        return self._answering is not None or self._asgi_answers

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
                ),
                unread=False,
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel what is answered, and hold nothing any more."""
        for timer in (self._stall_timer, self._look_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        held = None if self._reply is None else self._reply.held
        if held is not None:
            held.cancel()
            self._reply = self._answering = None
        elif self._answering is not None:
            # After its first step, or a request whose client left at once would leave no trace:
            # a task that is cancelled before it began does not begin.
            self.loop.call_soon(self._answering.cancel)
        else:
            self._reply = None  # which knows this connection: a circle that would stay for long

    def eof_received(self) -> bool:  # type: ignore[override]  # as in asyncio
        """Go on answering a client that has said all it will say; whether that is so."""
        if not self.answering:
            return False
        if self._reply is not None:
            self._reply.probe()
        self._look_later(_FIRST_LOOK_S)
        return True

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

    def _look_later(self, after_s: float) -> None:
        self._look_timer = self.loop.call_later(after_s, self._look, after_s)

    def _look(self, waited_s: float) -> None:
        """Has the other side reset the connection? It is not read, so nobody else would say."""
        mine = self.transport.get_extra_info("socket")
        if mine is None or mine.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._look_later(min(2 * waited_s, _LAST_LOOK_S))

    def _refuse_malformed(self) -> None:
        _malformed.note(self.client[0] if self.client else "a local client")
        self._refuse(
            BadRequest("Invalid HTTP request received.", reason="invalid_http_request"),
            unread=True,
        )

    def _refuse(self, refusal: Refusal, *, unread: bool) -> None:
        """Answer without a reply of its own, and close. Never while another answer runs."""
        if self.transport.is_closing():
            return
        if (cycle := cast("RequestResponseCycle | None", self.cycle)) is not None:
            if cycle.response_started and not cycle.response_complete:
                self.transport.abort()
                return
            cycle.waiting_for_100_continue = False  # the body is not wanted any more
            cycle.disconnected = True  # ASGI is told that nobody waits for its answer
            cycle.message_event.set()
        body = error_body(refusal)
        retry = b"retry-after: 1\r\n" if refusal.status == 503 else b""
        self.transport.write(
            b"%bcontent-type: application/json\r\nx-sluice-reason: %b\r\n"
            b"content-length: %d\r\n%bconnection: close\r\n\r\n%b"
            % (status_line(refusal.status), refusal.reason.encode(), len(body), retry, body)
        )
        self._close_answered(unread=unread)

    def _close_answered(self, *, unread: bool) -> None:
        """Close the connection after an answer, and not before the client can have read it.

        `unread`: the client may be sending still.
        """
        transport = self.transport
        if unread and transport.can_write_eof() and not transport.is_closing():
            self._inbound_since_s = self._idle_since_s = None
            self._lingers_since_s = self.loop.time()
            transport.write_eof()
        else:
            transport.close()
