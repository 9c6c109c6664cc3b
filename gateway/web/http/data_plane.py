"""The data plane as a raw ASGI callable: reads the body once, hands it to the pipeline.

Every other path goes to the control plane (FastAPI). The client's disconnect cancels the
request's own task: our HTTP protocol calls a hook in the scope when the connection is lost;
under another server a watcher task does the same.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from gateway.errors import (
    InternalError,
    MethodNotAllowed,
    Refusal,
    TooLarge,
    Unavailable,
    UnsupportedMedia,
)
from gateway.policy.request.head import announced_bytes, read_head
from gateway.ports import ClientReply, Lines
from gateway.records.endpoint import ROUTES, Endpoint
from gateway.records.request import OPEN, Incoming, Principal, RequestHead
from gateway.web.http.asgi_reply import AsgiReply
from gateway.web.http.body_bytes import BodyBytes, Share
from gateway.web.http.wrong_keys import WrongKeys

_log = logging.getLogger("sluice.data_plane")

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

DISCONNECT_HOOK = "sluice.disconnect"
"""Scope key: a list of callbacks that the HTTP protocol runs when the connection is lost."""

LARGE_BODY_BYTES = 256 * 1024
"""A body announced larger than this is read only for a known key."""


class Serve(Protocol):
    """What the data plane needs of the pipeline."""

    async def serve(self, incoming: Incoming, reply: ClientReply) -> None:
        """Answer one request."""

    def know(self, key_digest: bytes | None) -> Principal:
        """Who asks. Raises Refusal."""


class Reply(ClientReply, Protocol):
    """A reply of this layer: it may also end the connection."""

    close_connection: bool

    def ended(self) -> None:
        """Whoever answered it has ended, with or without an answer."""


class ClientGone(Exception):
    """The client left before its body was read."""


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
    ) -> None:
        self._pipeline = pipeline
        self._control = control
        self._new_id = new_id
        self.max_body_bytes = max_body_bytes
        self.wrong_keys = wrong_keys or WrongKeys()
        self.bodies = bodies or BodyBytes()
        self.draining = False
        """New requests are refused while the running ones finish."""
        self.last_requests = False
        """While it drains, each connection is served one request more: the port's new ones are
        other replicas'."""
        self.running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request over ASGI (or hand it on)."""
        endpoint = ROUTES.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None:
            await self._control(scope, receive, send)
            return
        head = read_head(scope["headers"])
        reply = AsgiReply(endpoint, send)
        share = self.share(head)
        watch = _Watch()
        watch.begin(scope)
        try:
            try:
                length = announced_bytes(scope["headers"])
                self.check(scope["method"], endpoint, head, length)
                self._pipeline.know(head.key_digest)
                body = await self._read_body(receive, share)
            except Refusal as refusal:
                if refusal.status == 401 and scope.get("client"):
                    await asyncio.sleep(self.wrong_keys.delay_s(scope["client"][0]))
                await self.turn_away(refusal, head, reply)
                return
            except ClientGone:
                return
            watch.body_read(receive)
            await self.answer(endpoint, head, body, reply)
        except asyncio.CancelledError:
            if not watch.fired:
                raise
            watch.absorb()
        finally:
            share.give_back()
            watch.end()

    async def answer(
        self,
        endpoint: Endpoint,
        head: RequestHead,
        body: bytes,
        reply: Reply,
    ) -> None:
        """Answer one request whose body is here; cancelling it is how a client leaves."""
        lease_id = self._new_id()
        incoming = Incoming(
            request_id=head.request_id or lease_id,
            lease_id=lease_id,
            endpoint=endpoint,
            head=head,
            body=body,
            received_s=time.monotonic(),
            received_unix_s=time.time(),
        )
        self.running += 1
        try:
            await self._pipeline.serve(incoming, reply)
        except Exception:  # noqa: BLE001 - the last edge: a bug must not leave a bare 500
            _log.exception("request %s failed inside the gateway", incoming.request_id)
            if reply.started:
                await reply.break_off(_broken())
            else:
                await reply.refuse(_broken(), _id_header(head, lease_id))
        finally:
            self.running -= 1
            reply.ended()

    async def turn_away(self, refusal: Refusal, head: RequestHead, reply: Reply) -> None:
        """Refuse before the body was read whole; the connection cannot be used again."""
        reply.close_connection = True
        try:
            await reply.refuse(refusal, _id_header(head, self._new_id()))
        finally:
            reply.ended()

    def check(self, method: str, endpoint: Endpoint, head: RequestHead, length: int) -> None:
        """Refuse what the head alone rules out; who announces much must show a key first.

        `length` is the body's as announced, 0 where it is not.
        """
        if method != "POST":
            raise MethodNotAllowed(
                f"Use POST for {endpoint.path}.",
                reason="method_not_allowed",
                code="method_not_allowed",
            )
        if self.draining and not self.last_requests:
            raise Unavailable(
                "This gateway is shutting down. Try again: another one will answer.",
                reason="shutting_down",
                code="shutting_down",
                retry_after_s=1.0,
                should_retry=True,
            )
        if not head.plain_body:
            raise UnsupportedMedia(
                "Send the body without content-encoding; the gateway reads plain JSON.",
                reason="unsupported_content_encoding",
                code="unsupported_content_encoding",
            )
        if not (head.form_body if endpoint.multipart else head.json_body):
            kind = "multipart/form-data" if endpoint.multipart else "application/json"
            raise UnsupportedMedia(
                f"Send the body as content-type: {kind}.",
                reason="unsupported_content_type",
                code="unsupported_content_type",
            )
        if length > self.max_body_bytes:
            raise too_large(self.max_body_bytes)
        self.check_size(head, length)

    def check_size(self, head: RequestHead, size: int) -> None:
        """Refuse much of a body, as announced or as it has come, without a key."""
        if size > LARGE_BODY_BYTES:
            self._pipeline.know(head.key_digest)

    def proves(self, head: RequestHead) -> bool:
        """Whether a request has shown a key that is known here; never where none is asked for."""
        try:
            return self._pipeline.know(head.key_digest) is not OPEN
        except Refusal:
            return False

    def share(self, head: RequestHead) -> Share:
        """What a request's body is counted for, once it is known how large it is."""
        try:
            owner = self._pipeline.know(head.key_digest).entitlement
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


def request_ids() -> Callable[[], str]:
    """A source of unique request ids: a random start per process, then a count."""
    prefix = "req-" + secrets.token_hex(6)
    count = 0

    def new_id() -> str:
        nonlocal count
        count += 1
        return f"{prefix}-{count:x}"

    return new_id


def _id_header(head: RequestHead, made_id: str) -> Lines:
    return b"x-request-id: %b\r\n" % (head.request_id or made_id).encode()


def _broken() -> InternalError:
    return InternalError(
        "The gateway failed on this request; its log has the request id and the cause.",
        reason="internal_error",
        code="internal_error",
    )


def too_large(limit: int) -> TooLarge:
    """The refusal of a body over the limit."""
    return TooLarge(f"The request body is larger than {limit} bytes, this gateway's limit.")


class _Watch:
    """Cancels the request's own task when its client leaves, and only that."""

    __slots__ = ("_hooks", "_task", "_watcher", "fired")

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._hooks: list[Callable[[], None]] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.fired = False

    def begin(self, scope: Scope) -> None:
        self._hooks = scope.get(DISCONNECT_HOOK)
        if self._hooks is not None:
            self._hooks.append(self.fire)

    def body_read(self, receive: Receive) -> None:
        if self._hooks is None:
            self._watcher = asyncio.ensure_future(self._wait(receive))

    async def _wait(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.fire()

    def fire(self) -> None:
        if self._task is not None and not self.fired:
            self.fired = True
            self._task.cancel()

    def absorb(self) -> None:
        """Count our own cancellation as handled."""
        if self._task is not None:
            self._task.uncancel()

    def end(self) -> None:
        self._task = None
        if self._hooks is not None:
            self._hooks.clear()
        if self._watcher is not None:
            self._watcher.cancel()
