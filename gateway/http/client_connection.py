"""One client connection: its clocks, its limits, and how it ends. `protocol` parses its data.

- Receiving a request is bounded in time. One periodic sweep checks all connections, so requests
  need no timers. A client that stops reading is cut off after `WRITE_STALL_S`.
- What a request holds before it is answered is counted in `bodies`, which may have it dropped.
- When there are `max_connections`, those give way on which the data plane serves nothing and never
  did: silent ones, half requests, refused keys. They are chosen from the address that has most.
- A client may close its sending side and wait for the answer, which looks as if it had left. The
  gateway then sends bytes that a client must ignore; if the client has left, its system replies
  with a reset.
- After a refusal, the data of a client that is still sending is read and ignored for `LINGER_S`.
  If the connection closed at once, the kernel would reset it and the refusal would be lost.
"""

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from heapq import nlargest
from io import BytesIO
from math import inf
from operator import itemgetter
from typing import Any, Final, TypeVar, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.errors import BadRequest, Refusal, Unavailable
from gateway.http.body_bytes import BodyBytes
from gateway.http.data_plane import DirectReply, closing
from gateway.http.wrong_keys import network
from gateway.ports import Lines
from gateway.records.endpoint import Endpoint

EVERY_S: Final = 60.0
T = TypeVar("T")


class RareLog:
    """A warning logged at most once in `EVERY_S`, with the number of suppressed ones."""

    def __init__(
        self, log: logging.Logger, what: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`what` happened is the text of the line; `clock` in seconds."""
        self._log = log
        self._what = what
        self._clock = clock
        self._silent_since_s = -inf
        self._unsaid = 0

    def note(self, who: str) -> None:
        """Log or count one event caused by `who`."""
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
LINGER_S = 5.0
TLS_BUFFER_BYTES: Final = 65_536
_FIRST_LOOK_S: Final = 0.01
_LAST_LOOK_S: Final = 1.0
"""The interval of checks doubles from the first to the last."""
_malformed = RareLog(logging.getLogger("sluice.http"), "malformed HTTP/1.1 request")


class ClientConnection(HttpToolsProtocol):
    """uvicorn's connection with bounds. Base class of `protocol.GatewayProtocol` only."""

    max_connections = 10_000
    keep_alive_s = 75.0
    bodies = BodyBytes()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        """Received bytes of the incoming head; -1 while a body is coming in."""
        self._half = b""
        """First read of a request with a known head whose body is incomplete."""
        self._endpoint: Endpoint | None = None
        """Endpoint of the incoming request, if it is answered without ASGI."""
        self._body: bytes | BytesIO = b""
        self._holds = False
        """Whether `bodies` counts bytes for this connection without a known key."""
        self._inbound_since_s: float | None = self.loop.time()
        self._idle_since_s: float | None = None
        self._lingers_since_s: float | None = None
        """When the last answer was written, while the client may still be sending."""
        self._stall_timer: asyncio.TimerHandle | None = None
        self._look_timer: asyncio.TimerHandle | None = None
        self._reply: DirectReply | None = None
        self._answering: asyncio.Task[None] | None = None
        self._asgi_answers = False
        """ASGI has a whole request and has not answered it."""
        self._served = False
        """Whether the data plane answered a request other than by refusing its key."""
        self._old = False
        """Whether the last request of the data plane was of HTTP/1.0."""
        self._extra: Lines = b""
        """Header lines for the answer, as the incoming request asks for them."""

    @property
    def answering(self) -> bool:
        """Whether a request that is complete, or refused, still waits for the end of its answer."""
        return self._answering is not None or self._asgi_answers

    @property
    def unserved_since_s(self) -> float | None:
        """Since when it waits, if the data plane serves nothing here and never did; else None."""
        running = self._answering is not None and (self._reply is None or self._reply.held is None)
        if self._served or running:
            return None
        return self._lingers_since_s or self._idle_since_s or self._inbound_since_s or 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Have others give way beyond `max_connections`, or refuse this connection."""
        super().connection_made(cast("asyncio.Transport", transport))
        # uvloop buffers writes until the end of the loop iteration; an answer must not wait for
        # its own settlement and for other requests' work. With TLS, a limit of 0 pauses for ever.
        encrypted = self.scheme == "https"
        self.transport.set_write_buffer_limits(high=TLS_BUFFER_BYTES if encrypted else 0)
        if len(self.connections) <= self.max_connections:
            return
        waiting = (
            (network(other.client[0]) if other.client else "", since_s, other)
            for other in cast("set[ClientConnection]", self.connections)
            if other is not self and (since_s := other.unserved_since_s) is not None
        )
        # Several at once, so that an attacker pays for the search with as many connections.
        leaving = giving_way(waiting, max(1, self.max_connections // 64))
        for other in leaving:
            other.give_way()
        if not leaving:
            self._refuse(_no_room(), unread=False)

    def give_way(self) -> None:
        """Make room for another connection: this one has `unserved_since_s`."""
        self.connections.discard(self)
        if self._inbound_since_s is None:
            self.transport.close()
        else:
            self._refuse(_no_room(), unread=True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the running answer and release everything held."""
        if self._reply is not None and self._answering is None:
            self._reply.give_back()
        for timer in (self._stall_timer, self._look_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        held = None if self._reply is None else self._reply.held
        if held is not None:
            held.cancel()
            self._reply = self._answering = None
        elif self._answering is not None:
            # Cancel after the task's first step: a task cancelled before it starts never runs,
            # and the request would leave no trace.
            self.loop.call_soon(self._answering.cancel)
        else:
            self._reply = None  # breaks a reference cycle that would live long
        self._let_go()

    def eof_received(self) -> bool:  # type: ignore[override]  # as in asyncio
        """Keep answering a client that closed its sending side; returns whether an answer runs."""
        # TLS has no half-closed connections, and HTTP/1.0 no bytes that a client ignores.
        old = self._old and self._reply is not None
        if not self.answering or self.scheme == "https" or old:
            return False
        if self._reply is not None:
            self._reply.probe()
        self._look_timer = self.loop.call_later(_FIRST_LOOK_S, self._look, _FIRST_LOOK_S)
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
        """Close the connection if its request takes too long to arrive, or none comes."""
        if self._inbound_since_s is not None and now_s - self._inbound_since_s > INBOUND_TIMEOUT_S:
            if self._head_bytes or self._half:
                self._refuse(
                    Refusal(
                        f"The request did not arrive within {INBOUND_TIMEOUT_S:g} seconds. "
                        "Send it faster, or make it smaller.",
                        reason="request_timeout",
                    ),
                    unread=True,
                )
            else:
                self.transport.close()
        for since_s, limit_s in (
            (self._idle_since_s, self.keep_alive_s),
            (self._lingers_since_s, LINGER_S),
        ):
            if since_s is not None and now_s - since_s > limit_s:
                self.transport.close()

    def _look(self, waited_s: float) -> None:
        """Abort if the client reset the connection; nothing else notices, as it is not read."""
        mine = self.transport.get_extra_info("socket")
        if mine is None or mine.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            wait_s = min(2 * waited_s, _LAST_LOOK_S)
            self._look_timer = self.loop.call_later(wait_s, self._look, wait_s)

    def drop(self) -> None:
        """Refuse the request that comes in: all of them hold too much."""
        self._holds = False  # `bodies` forgot it: telling it again would drop others inside this
        self._refuse(
            Unavailable(
                "Unfinished requests hold too many bytes in this gateway. Try again.",
                reason="too_much_unsent",
                retry_after_s=1.0,
            ),
            unread=True,
        )

    def _hold(self, size: int) -> None:
        self._holds = size > 0
        self.bodies.hold(self.drop, size)

    def _let_go(self) -> None:
        """Release everything held for the incoming request."""
        self._body = self._half = b""
        self._endpoint = None
        if self._holds:
            self._hold(0)

    def _refuse_malformed(self) -> None:
        _malformed.note(self.client[0] if self.client else "a local client")
        self._refuse(
            BadRequest("Invalid HTTP request received.", reason="invalid_http_request"),
            unread=True,
        )

    def _refuse(self, refusal: Refusal, *, unread: bool) -> None:
        """Write a refusal without a reply object, and close. Aborts if an answer has started."""
        self._let_go()
        if self.transport.is_closing():
            return
        if (cycle := cast("RequestResponseCycle | None", self.cycle)) is not None:
            if cycle.response_started and not cycle.response_complete:
                self.transport.abort()
                return
            cycle.waiting_for_100_continue = False  # the body is no longer wanted
            cycle.disconnected = True  # ASGI learns that the client is gone
            cycle.message_event.set()
        self.transport.write(closing(refusal, self._extra))
        self._close_answered(unread=unread)

    def _close_answered(self, *, unread: bool) -> None:
        """Close the connection after an answer, but not before the client can read it.

        `unread`: the client may still be sending.
        """
        transport = self.transport
        if unread and transport.can_write_eof() and not transport.is_closing():
            self._inbound_since_s = self._idle_since_s = None
            self._lingers_since_s = self.loop.time()
            transport.write_eof()
        else:
            transport.close()


def _no_room() -> Unavailable:
    """The refusal of a connection beyond `max_connections`."""
    return Unavailable(
        "This gateway has all the connections it may hold. Try again shortly.",
        reason="too_many_connections",
        retry_after_s=1.0,
    )


def giving_way(waiting: Iterable[tuple[str, float, T]], count: int) -> list[T]:
    """At most `count` of `waiting`: (address, waiting since, which).

    Each is the oldest one of the address that holds most of what is left.
    """
    held, ranked = Counter[str](), list[tuple[int, T]]()
    for address, _, which in sorted(waiting, key=itemgetter(1), reverse=True):
        held[address] += 1  # how many that address has when this one is its oldest
        ranked.append((held[address], which))
    return [which for _, which in nlargest(count, reversed(ranked), key=itemgetter(0))]
