"""Lets pages of other origins call the API from a browser (CORS, as the Fetch standard has it).

A browser first asks with OPTIONS, without a key, and shows a page only the headers that the answer
exposes. Keys are sent as headers, not as cookies, so no answer allows credentials. Admin routes and
the dashboard are no part of it.
"""

from collections.abc import Collection, Sequence
from typing import Final

Headers = Sequence[tuple[bytes, bytes]]

EXPOSED: Final = (
    *("x-request-id", "x-sluice-reason", "x-sluice-estimated-tokens", "x-sluice-model"),
    *("x-sluice-pool", "x-sluice-worker", "x-sluice-spilled", "x-sluice-compressed"),
    *("x-sluice-prefill-worker", "x-sluice-queue-ms", "x-sluice-budget"),
    *("retry-after", "retry-after-ms", "x-should-retry"),
    *("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"),
    *("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"),
)
"""Headers of answers that a page may read."""
_EXPOSED: Final = ", ".join(EXPOSED).encode()
_MAX_ASKED_BYTES: Final = 4096
_KEPT_S: Final = b"600"
"""How long a browser may keep the answer to its question."""


class Cors:
    """The origins that may call, and what answers tell their browsers."""

    def __init__(self, origins: Collection[str] = ()) -> None:
        """`origins` as SCHEME://HOST:PORT in lower case; `*` is every origin."""
        self._any = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def headers(self, asked: Headers, *, preflight: bool = False) -> Headers:
        """Headers of the answer to a request with the headers `asked`, in lower case."""
        origin = next((value for name, value in asked if name == b"origin"), None)
        if origin is None or not (self._any or origin.lower() in self._origins):
            return ()
        allowed = [(b"access-control-allow-origin", b"*" if self._any else origin)]
        if not self._any:
            allowed.append((b"vary", b"origin"))
        if not preflight:
            return (*allowed, (b"access-control-expose-headers", _EXPOSED))
        wished = next((v for n, v in asked if n == b"access-control-request-headers"), b"")
        return (
            *allowed,
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", wished[:_MAX_ASKED_BYTES]),
            (b"access-control-max-age", _KEPT_S),
        )
