"""The data plane as a raw ASGI callable: reads the body once, hands it to the pipeline.

Every other path goes to the control plane (FastAPI). The client's disconnect cancels the
request's own task: our HTTP protocol calls a hook in the scope when the connection is lost;
under another server a watcher task does the same.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from gateway.domain import ENDPOINTS, Endpoint, Incoming
from gateway.errors import (
    InternalError,
    MethodNotAllowed,
    Refusal,
    TooLarge,
    Unavailable,
    UnsupportedMedia,
)
from gateway.ports import ClientReply, Headers
from gateway.web.problems import error_body, error_event, error_headers

_log = logging.getLogger("sluice.data_plane")

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

DISCONNECT_HOOK = "sluice.disconnect"
"""Scope key: a list of callbacks that the HTTP protocol runs when the connection is lost."""

MAX_REQUEST_ID = 128


class Serve(Protocol):
    """What the data plane needs of the pipeline."""

    async def serve(self, incoming: Incoming, reply: ClientReply) -> None:
        """Answer one request."""


class ClientGone(Exception):
    """The client left before its body was read."""


class DataPlane:
    """ASGI application: endpoints of `gateway.domain.ENDPOINTS`, all else to `control`."""

    def __init__(
        self,
        pipeline: Serve,
        control: App,
        *,
        new_id: Callable[[], str],
        max_body_bytes: int,
    ) -> None:
        self._pipeline = pipeline
        self._control = control
        self._new_id = new_id
        self._max_body_bytes = max_body_bytes
        self.draining = False
        """New requests are refused while the running ones finish."""
        self.running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (or hand it on)."""
        endpoint = ENDPOINTS.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None:
            await self._control(scope, receive, send)
            return
        self.running += 1
        try:
            await self._serve(endpoint, scope, receive, send)
        finally:
            self.running -= 1

    async def _serve(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        lease_id = self._new_id()
        request_id = _own_request_id(headers) or lease_id
        reply = AsgiReply(endpoint, send)
        watch = _Watch()
        watch.begin(scope)
        try:
            try:
                self._check(scope, headers)
                body = await self._read_body(headers, receive)
                watch.body_read(scope, receive)
                incoming = Incoming(
                    request_id=request_id,
                    lease_id=lease_id,
                    endpoint=endpoint,
                    headers=headers,
                    body=body,
                    received_s=time.monotonic(),
                    received_unix_s=time.time(),
                )
            except Refusal as refusal:
                reply.close_connection = True
                await reply.refuse(refusal, [(b"x-request-id", request_id.encode())])
                return
            except ClientGone:
                return
            await self._pipeline.serve(incoming, reply)
        except Exception:  # noqa: BLE001 - the last edge: a bug must not leave a bare 500
            _log.exception("request %s failed inside the gateway", request_id)
            await reply.fail(_broken())
        except asyncio.CancelledError:
            if not watch.fired:
                raise
            watch.absorb()
        finally:
            watch.end()

    def _check(self, scope: Scope, headers: Headers) -> None:
        if scope["method"] != "POST":
            raise MethodNotAllowed(
                f"Use POST for {scope['path']}.",
                reason="method_not_allowed",
                code="method_not_allowed",
            )
        if self.draining:
            raise Unavailable(
                "This gateway is shutting down. Try again: another one will answer.",
                reason="shutting_down",
                code="shutting_down",
                retry_after_s=1.0,
                should_retry=True,
            )
        for name, value in headers:
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise UnsupportedMedia(
                    "Send the body without content-encoding; the gateway reads plain JSON.",
                    reason="unsupported_content_encoding",
                    code="unsupported_content_encoding",
                )
            if name == b"content-type" and b"json" not in value.lower():
                raise UnsupportedMedia(
                    "Send the body as content-type: application/json.",
                    reason="unsupported_content_type",
                    code="unsupported_content_type",
                )

    async def _read_body(self, headers: Headers, receive: Receive) -> bytes:
        limit = self._max_body_bytes
        for name, value in headers:
            if name == b"content-length" and value.isdigit() and int(value) > limit:
                raise _too_large(limit)
        return await _read_all(receive, limit)


def _own_request_id(headers: Headers) -> str | None:
    """The client's x-request-id when it is short, printable and without spaces."""
    for name, value in headers:
        if name == b"x-request-id" and 0 < len(value) <= MAX_REQUEST_ID:
            text = value.decode("latin-1")
            if text.isascii() and text.isprintable() and " " not in text:
                return text
    return None


async def _read_all(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body"):
            return part if len(parts) == 1 else b"".join(parts)


def _broken() -> InternalError:
    return InternalError(
        "The gateway failed on this request; its log has the request id and the cause.",
        reason="internal_error",
        code="internal_error",
    )


def _too_large(limit: int) -> TooLarge:
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

    def body_read(self, scope: Scope, receive: Receive) -> None:
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


class AsgiReply:
    """ClientReply over an ASGI `send`."""

    __slots__ = ("_endpoint", "_send", "close_connection", "started")

    def __init__(self, endpoint: Endpoint, send: Send) -> None:
        self._endpoint = endpoint
        self._send = send
        self.started = False
        self.close_connection = False

    async def start(self, status: int, headers: Headers) -> None:
        """See ClientReply."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        """See ClientReply."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self) -> None:
        """See ClientReply."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        """See ClientReply."""
        self.started = True
        all_headers = [*headers, (b"content-length", b"%d" % len(body))]
        if self.close_connection:
            all_headers.append((b"connection", b"close"))
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def refuse(self, refusal: Refusal, headers: Headers) -> None:
        """See ClientReply."""
        body = error_body(refusal, self._endpoint.dialect)
        await self.send(refusal.status, [*error_headers(refusal), *headers], body)

    async def fail(self, refusal: Refusal) -> None:
        """Refuse, or break off what has started."""
        if self.started:
            await self.break_off(refusal)
        else:
            await self.refuse(refusal, [])

    async def break_off(self, refusal: Refusal) -> None:
        """See ClientReply."""
        await self.write(error_event(refusal, self._endpoint.name, self._endpoint.dialect))
        await self.finish()
