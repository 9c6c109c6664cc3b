"""The data plane's answer over plain ASGI, for servers other than the gateway's own."""

from collections.abc import Awaitable, Callable
from typing import Any

from gateway.errors import Refusal
from gateway.policy.request.header_lines import lines_of, pairs_of
from gateway.ports import Lines
from gateway.records.endpoint import Endpoint
from gateway.web.problems import error_body, error_event, error_headers

Send = Callable[[dict[str, Any]], Awaitable[None]]


class AsgiReply:
    """ClientReply over an ASGI `send`."""

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
        """See ClientReply."""
        self.started = True
        self._events = events
        headers = pairs_of(lines)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        """See ClientReply."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def write_now(self, data: bytes) -> bool:
        """See ClientReply. ASGI must await; `drain`, `write` or `finish` sends the data later."""
        self._held.append(data)
        return False

    async def drain(self) -> None:
        """See ClientReply."""
        if self._held:
            held, self._held = self._held, []
            await self.write(b"".join(held))

    async def finish(self) -> None:
        """See ClientReply."""
        await self.drain()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send(self, status: int, lines: Lines, body: bytes) -> None:
        """See ClientReply."""
        self.started = True
        all_headers = [*pairs_of(lines), (b"content-length", b"%d" % len(body))]
        if self.close_connection:
            all_headers.append((b"connection", b"close"))
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def refuse(self, refusal: Refusal, lines: Lines) -> None:
        """See ClientReply."""
        if self.started:
            await self.break_off(refusal)
            return
        body = error_body(refusal, self._endpoint.dialect)
        await self.send(refusal.status, lines_of(error_headers(refusal)) + lines, body)

    async def break_off(self, refusal: Refusal) -> None:
        """See ClientReply. A server closes the connection of an answer without an end."""
        await self.drain()
        if not self._events:
            return
        await self.write(error_event(refusal, self._endpoint.name, self._endpoint.dialect))
        await self.finish()
