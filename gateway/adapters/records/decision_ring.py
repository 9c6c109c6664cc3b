"""The last decision records, as JSON, for look-ups.

Records stay for minutes and are rarely looked up. If each were a separate object, a new record
would reuse the oldest one's memory, which is no longer in the processor's cache. So up to
MAX_IN_PIECE records are collected and then joined into one piece (bytes and two arrays), and
the next records reuse the memory that was just freed.
"""

from array import array
from collections import deque
from collections.abc import Iterator
from itertools import accumulate, islice
from typing import Final, NamedTuple

import msgspec

MAX_IN_PIECE: Final = 64
_PIECES: Final = 32
"""Fewest pieces in a full ring, so that dropping one loses a small part."""


class _Piece(NamedTuple):
    hashes: "array[int]"
    """Hashes of the request ids, in order."""
    ends: "array[int]"
    """Where each record ends in `data`."""
    data: bytes

    def record(self, at: int) -> bytes:
        return self.data[self.ends[at - 1] if at else 0 : self.ends[at]]


class DecisionRing:
    """The last `capacity` records by request id, and at most one piece more."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._most = max(1, min(MAX_IN_PIECE, capacity // _PIECES))
        self._ids: list[str] = []
        self._lines: list[bytes] = []
        """The newest records, not joined into a piece yet."""
        self._pieces: deque[_Piece] = deque()

    def __len__(self) -> int:
        return self._most * len(self._pieces) + len(self._lines)

    def append(self, request_id: str, line: bytes) -> None:
        """Keep a record. Its line must hold no text of the request."""
        self._ids.append(request_id)
        self._lines.append(line)
        if len(self._lines) >= self._most:
            self._seal()

    def find(self, request_id: str) -> bytes | None:
        """The record of a request; the newest one if several have the id."""
        return next(self.matching(request_id), None)

    def matching(self, request_id: str) -> Iterator[bytes]:
        """The records of all requests with an id, newest first; clients may repeat an id."""
        for known, line in zip(reversed(self._ids), reversed(self._lines), strict=True):
            if known == request_id:
                yield line
        wanted = hash(request_id)
        for piece in reversed(self._pieces):
            if wanted in piece.hashes:
                for at in reversed(range(len(piece.hashes))):
                    if piece.hashes[at] == wanted:
                        yield piece.record(at)

    def latest(self, count: int) -> list[msgspec.Raw]:
        """The newest records, newest first."""
        return [msgspec.Raw(line) for line in islice(self._newest_first(), count)]

    def _newest_first(self) -> Iterator[bytes]:
        yield from reversed(self._lines)
        for piece in reversed(self._pieces):
            for at in reversed(range(len(piece.ends))):
                yield piece.record(at)

    def _seal(self) -> None:
        lines = self._lines
        hashes, ends = array("q", map(hash, self._ids)), array("L", accumulate(map(len, lines)))
        self._pieces.append(_Piece(hashes, ends, b"".join(lines)))
        self._ids, self._lines = [], []
        if self._most * (len(self._pieces) - 1) >= self._capacity:
            self._pieces.popleft()
