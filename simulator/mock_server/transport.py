"""Connection control that ASGI lacks: closing and resetting under a response."""

import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_LINGER_NONE = struct.pack("ii", 1, 0)
JSON_TYPE = (b"content-type", b"application/json")
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


async def answer(
    send: Send,
    status: int,
    body: bytes,
    content_type: tuple[bytes, bytes] = JSON_TYPE,
    headers: tuple[tuple[bytes, bytes], ...] = (),
) -> None:
    """A whole response."""
    length = (b"content-length", b"%d" % len(body))
    await start(send, status, [content_type, length, *headers])
    await send({"type": "http.response.body", "body": body})


async def start(send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    """A response's head."""
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def write(send: Send, body: bytes, *, more: bool = True) -> None:
    """A part of a response's body."""
    await send({"type": "http.response.body", "body": body, "more_body": more})


def _transport(send: Send) -> Any:
    """The transport: uvicorn's `send` is a bound method of the object that holds the transport."""
    return send.__self__.transport  # type: ignore[attr-defined]


async def close(receive: Receive, send: Send) -> None:
    """Close the connection after flushing written data."""
    _transport(send).close()
    await _gone(receive)


async def reset(receive: Receive, send: Send) -> None:
    """Reset the connection (TCP RST)."""
    transport = _transport(send)
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NONE)
    transport.abort()
    await _gone(receive)


async def _gone(receive: Receive) -> None:
    """Wait until uvicorn knows the connection is lost: it answers 500 if the app returns before."""
    while (await receive())["type"] != "http.disconnect":
        pass
