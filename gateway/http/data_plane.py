"""The data plane: checks a request by its head and passes it with its body to the pipeline.

The gateway's HTTP protocol calls it directly. It is an ASGI application, too, for other servers,
for tests in one process, and for HEAD and OPTIONS. Paths that are not its own go to the control
plane (FastAPI).
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, Protocol

from gateway.errors import (
    KeysAwaited,
    Refusal,
    TooLarge,
    Unavailable,
)
from gateway.http.body_bytes import BodyBytes, Share
from gateway.http.problems import error_body, error_event, error_headers
from gateway.http.wrong_keys import WrongKeys
from gateway.payload.head import announced_bytes, lines_of, pairs_of, read_head
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


class Serve(Protocol):
    """The part of the pipeline that the data plane uses."""

    async def serve(self, incoming: Incoming, reply: ClientReply) -> None:
        """Answer one request."""

    def know(self, head: RequestHead) -> Principal:
        """The principal of the presented key. Raises Refusal."""


class Reply(ClientReply, Protocol):
    """A reply that can also end the connection."""

    close_connection: bool

    def ended(self) -> None:
        """Called when the answering task ends, with or without an answer."""


class ClientGone(Exception):
    """The client left before its body was read."""


class AsgiReply:
    """The data plane's answer over plain ASGI, for servers other than the gateway's own."""

    __slots__ = ("_endpoint", "_events", "_held", "_send", "close_connection", "started")

    def __init__(self, endpoint: Endpoint, send: Send) -> None:
        self._endpoint = endpoint
        self._send = send
        self._events = True
        self._held: list[bytes] = []
        self.started = False
        self.close_connection = False

    def ended(self) -> None:
        """See Reply. The ASGI server notices by itself."""

    async def start(self, status: int, lines: Lines, *, events: bool = True) -> None:
        self.started = True
        self._events = events
        headers = pairs_of(lines)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def write_now(self, data: bytes) -> bool:
        """See ClientReply. ASGI must await; `drain`, `write` or `finish` sends the data later."""
        self._held.append(data)
        return False

    async def drain(self) -> None:
        if self._held:
            held, self._held = self._held, []
            await self.write(b"".join(held))

    async def finish(self) -> None:
        await self.drain()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send(self, status: int, lines: Lines, body: bytes) -> None:
        self.started = True
        all_headers = [*pairs_of(lines), (b"content-length", b"%d" % len(body))]
        if self.close_connection:
            all_headers.append((b"connection", b"close"))
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def refuse(self, refusal: Refusal, lines: Lines) -> None:
        if self.started:
            await self.break_off(refusal)
            return
        body = error_body(refusal, self._endpoint.dialect)
        await self.send(refusal.status, lines_of(error_headers(refusal)) + lines, body)

    async def break_off(self, refusal: Refusal) -> None:
        await self.drain()
        if not self._events:
            return
        await self.write(error_event(refusal, self._endpoint.name, self._endpoint.dialect))
        await self.finish()


class DataPlane:
    """ASGI application: endpoints of `gateway.records.endpoint.ROUTES`, all else to `control`."""

    def __init__(
        self,
        pipeline: Serve,
        control: App,
        *,
        new_id: Callable[[], str],
        max_body_bytes: int,
        wrong_keys: WrongKeys | None = None,
        bodies: BodyBytes | None = None,
        trace: Callable[[bytes], Trace] | None = None,
    ) -> None:
        """`trace` finds a request's place in a trace by the headers that are forwarded."""
        self._pipeline = pipeline
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
        """Serve one request over ASGI, or pass it to the control plane."""
        path = str(scope.get("path", ""))
        endpoint = endpoint_of(path) if scope["type"] == "http" else None
        if endpoint is None:
            if scope.get("method") == "HEAD":  # to which uvicorn sends no body
                scope = scope | {"method": "GET"}
            if path.rstrip("/") in _SLASHED:
                scope = scope | {"path": path.rstrip("/")}
            await self._control(scope, receive, send)
            return
        if scope["method"] == "OPTIONS":
            await AsgiReply(endpoint, send).send(204, b"allow: POST, OPTIONS\r\n", b"")
            return
        head = read_head(scope["headers"])
        reply, share = AsgiReply(endpoint, send), self.share(head)
        try:
            self.check(scope["method"], endpoint, head, announced_bytes(scope["headers"]))
            self._pipeline.know(head)
        except Refusal as refusal:
            if refusal.status == 401 and scope.get("client"):
                await asyncio.sleep(self.wrong_keys.delay_s(scope["client"][0]))
            await self.turn_away(refusal, head, reply)
            return
        try:
            body = await self._read_body(receive, share)
            answering = asyncio.ensure_future(self.answer(endpoint, head, body, reply))
            leaving = asyncio.ensure_future(_client_left(receive))
            try:
                await asyncio.wait([answering, leaving], return_when="FIRST_COMPLETED")
            finally:
                leaving.cancel()
                answering.cancel()
            with suppress(asyncio.CancelledError):
                await answering
        except Refusal as refusal:
            await self.turn_away(refusal, head, reply)
        except ClientGone:
            return
        finally:
            share.give_back()

    async def answer(
        self,
        endpoint: Endpoint,
        head: RequestHead,
        body: bytes,
        reply: Reply,
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
            await self._pipeline.serve(incoming, reply)
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

    async def turn_away(self, refusal: Refusal, head: RequestHead, reply: Reply) -> None:
        """Refuse before the whole body was read; the connection cannot be reused."""
        reply.close_connection = True
        try:
            await reply.refuse(refusal, _id_header(head, self._new_id()))
        finally:
            reply.ended()

    def check(self, method: str, endpoint: Endpoint, head: RequestHead, length: int) -> None:
        """Refuse requests by their head alone, such as large bodies without a known key.

        `length` is the announced body length in bytes, -1 for a body in chunks. Raises Refusal.
        """
        if method != "POST":
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
            self._pipeline.know(head)
        elif size < 0:
            with suppress(KeysAwaited):
                self._pipeline.know(head)

    def proves(self, head: RequestHead) -> bool:
        """Whether a request shows a known key; always false on an open gateway."""
        try:
            return self._pipeline.know(head) is not OPEN
        except Refusal:
            return False

    def share(self, head: RequestHead) -> Share:
        """The share that counts this request's body, for the tenant of its key."""
        try:
            owner = self._pipeline.know(head).tenant
        except Refusal:
            owner = ""
        return Share(self.bodies, owner)

    async def _read_body(self, receive: Receive, share: Share) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientGone
            body += message.get("body", b"")
            if len(body) > self.max_body_bytes:
                raise too_large(self.max_body_bytes)
            share.cover(len(body))
            if not message.get("more_body"):
                return bytes(body)


def endpoint_of(path: str) -> Endpoint | None:
    """The endpoint at a path; clients add a slash, or double one, where their base URL ends."""
    return ROUTES.get(path) or ROUTES.get("/" + "/".join(filter(None, path[:256].split("/"))))


def request_ids() -> Callable[[], str]:
    """A source of unique request ids: a random prefix per process, then a count."""
    prefix = "req-" + secrets.token_hex(6)
    count = 0

    def new_id() -> str:
        nonlocal count
        count += 1
        return f"{prefix}-{count:x}"

    return new_id


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


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
