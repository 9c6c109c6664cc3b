"""Recognises a head that a connection sends repeatedly, instead of parsing it.

Clients that keep a connection open send the same head each time, except for the length of the
body. The bytes of a head that came twice are kept; a request that begins with the same bytes is
not parsed, because comparing 2 KB costs less than parsing them with a callback per header. Any
other head goes to the parser.
"""

import re
from collections.abc import Sequence
from hmac import compare_digest
from typing import Final

MAX_HEAD_BYTES: Final = 4096
"""Longer heads are not kept, because a connection keeps its head until it closes."""
_MAX_DIGITS: Final = 7
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)[ \t]*(?=\r\n)", re.IGNORECASE)
_UNUSUAL: Final = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"connection"})


class KnownHead:
    """The bytes of a head before and after the digits of its content-length."""

    __slots__ = ("_after", "_before")

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after

    def body_of(self, data: bytes) -> tuple[int, int] | None:
        """(offset of the body in `data`, its announced length); None for another head."""
        begin, after = len(self._before), self._after
        end = data.find(b"\r", begin, begin + _MAX_DIGITS + 1)
        # The bytes contain a key, so the comparison takes constant time.
        if end < 0 or not compare_digest(data[:begin], self._before):
            return None
        body_at = end + len(after)
        length = data[begin:end]
        if not length.isdigit() or not compare_digest(data[end:body_at], after):
            return None
        return body_at, int(length)


def learn(data: bytes, headers: Sequence[tuple[bytes, bytes]]) -> KnownHead | None:
    """The head at the start of `data`, which the parser has accepted.

    `headers` are its headers except content-length. None if the bytes are ambiguous, if more than
    the body's length may vary, or if the meaning of the following bytes depends on more than the
    head.
    """
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES) + 4
    reported = {(name.lower(), value.lower()) for name, value in headers}
    reported.discard((b"connection", b"keep-alive"))
    if end < 4 or not _UNUSUAL.isdisjoint(name for name, _ in reported):
        return None
    head = data[:end]
    lengths = list(_LENGTH.finditer(head))
    lines = len(headers) + 3  # plus the request line, content-length and the empty line
    ends = (head.count(b"\n"), head.count(b"\r"), head.count(b"\r\n"))
    if len(lengths) != 1 or ends != (lines, lines, lines):
        return None
    begin, end = lengths[0].span(1)
    return KnownHead(head[:begin], head[end:])
