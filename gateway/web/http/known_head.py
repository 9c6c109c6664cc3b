"""A request's head that a connection sends again and again: recognised, not parsed.

Clients that keep a connection send the same head each time, but for the length of the body. Of
one that came twice the bytes are kept, and a request that begins with the very same bytes needs
no parser: to take 2 KB apart and to be told of each header costs more than to look at them.
Whatever differs goes to the parser, which then decides alone.
"""

import re
from collections.abc import Sequence
from hmac import compare_digest
from typing import Final

MOST_HEAD_BYTES: Final = 4096
"""Longer heads are not kept: a connection holds one for as long as it lives."""
_MOST_DIGITS: Final = 7
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)[ \t]*(?=\r\n)", re.IGNORECASE)
_UNUSUAL: Final = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"connection"})


class KnownHead:
    """A head up to the length of its body, and from there on."""

    __slots__ = ("_after", "_before")

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after

    def body_of(self, data: bytes) -> tuple[int, int] | None:
        """Where the body begins in `data`, and how long it is said to be; None: another head."""
        begin, after = len(self._before), self._after
        end = data.find(b"\r", begin, begin + _MOST_DIGITS + 1)
        # A key is among the bytes compared: in constant time.
        if end < 0 or not compare_digest(data[:begin], self._before):
            return None
        body_at = end + len(after)
        length = data[begin:end]
        if not length.isdigit() or not compare_digest(data[end:body_at], after):
            return None
        return body_at, int(length)


def learn(data: bytes, headers: Sequence[tuple[bytes, bytes]]) -> KnownHead | None:
    """The head that `data` begins with, which a parser has accepted.

    `headers` are what it found there, but for content-length. None where another head could be
    meant by the same bytes, where more than the body's length varies, or what follows depends on
    more than the head.
    """
    end = data.find(b"\r\n\r\n", 0, MOST_HEAD_BYTES) + 4
    told = {(name.lower(), value.lower()) for name, value in headers}
    told.discard((b"connection", b"keep-alive"))
    if end < 4 or not _UNUSUAL.isdisjoint(name for name, _ in told):
        return None
    head = data[:end]
    lengths = list(_LENGTH.finditer(head))
    lines = len(headers) + 3  # the request's own, content-length, and the empty one
    if len(lengths) != 1 or not head.count(b"\n") == head.count(b"\r") == lines:
        return None
    if head.count(b"\r\n") != lines:
        return None
    begin, end = lengths[0].span(1)
    return KnownHead(head[:begin], head[end:])
