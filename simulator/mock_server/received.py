"""The requests that a mock engine received last, for tests that look at what it was sent."""

import base64
from collections import deque
from typing import Any

from simulator.mock_server.transport import Scope


class ReceivedRequests:
    """The last requests received, bounded in number and bytes."""

    def __init__(self, entries: int, size: int) -> None:
        self._entries = entries
        self._size = size
        self._held = 0
        self._ring: deque[tuple[str, str, list[tuple[bytes, bytes]], bytes]] = deque()

    def add(self, scope: Scope, body: bytes) -> None:
        """Store one request; the oldest are dropped."""
        self._ring.append((scope["method"], scope["path"], scope["headers"], body))
        self._held += len(body)
        while len(self._ring) > self._entries or (self._held > self._size and len(self._ring) > 1):
            self._held -= len(self._ring.popleft()[3])

    def last(self, number: int) -> list[dict[str, Any]]:
        """The last `number`, oldest first."""
        return [
            {
                "method": method,
                "path": path,
                "headers": headers_of(headers),
                "body": body.decode("utf-8", "replace"),
                "body_base64": base64.b64encode(body).decode(),
            }
            for method, path, headers, body in list(self._ring)[-number:]
        ]


def headers_of(raw: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers as text, names in lower case."""
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in raw}
