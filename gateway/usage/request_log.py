"""Decision records: kept in a ring for look-ups and written as JSONL off the request path.

Each record is encoded once, at once, for both uses. Keeping the record for the writer would
scatter some twenty small objects per request over memory, and a thread that encodes a batch
would hold the interpreter for milliseconds.

Records in the ring stay for minutes and are rarely looked up. If each were a separate object, a
new record would reuse the oldest one's memory, which is no longer in the processor's cache. So up
to `MAX_IN_PIECE` records are collected and then joined into one piece (bytes and an array), and
the next records reuse the memory that was just freed. Clients choose request ids and may repeat
them, so an index finds the newest record of an id, and of each tenant with that id, however many
others have it.

A timer hands the lines to one writer thread (`gateway.usage.writing`). Replicas on one host append
batches to the same file: lines stay whole, and in order within a replica.
"""

import logging
from array import array
from collections import deque
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from gateway.metrics import Metrics
from gateway.ports import RecordSink
from gateway.records.decision import DecisionRecord
from gateway.usage.writing import LineWriter, append

MAX_IN_PIECE: Final = 64
_PIECES: Final = 32
"""Fewest pieces in a full ring, so that dropping one loses a small part."""


class _Piece(NamedTuple):
    keys: "array[int]"
    """The two keys of each record, in order; see `_keys`."""
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
        self._keys: list[int] = []
        self._lines: list[bytes] = []
        """The newest records, not joined into a piece yet."""
        self._pieces: deque[_Piece] = deque()
        self._dropped = 0
        """Pieces dropped so far."""
        self._newest: dict[int, int] = {}
        """Key -> number of the newest record with it, counted since the start."""

    def __len__(self) -> int:
        return self._most * len(self._pieces) + len(self._lines)

    def append(self, request_id: str, line: bytes, tenant: str | None = None) -> None:
        """Keep a record. Its line must hold no text of the request."""
        number = self._most * (self._dropped + len(self._pieces)) + len(self._lines)
        keys = _keys(request_id, tenant)
        for key in keys:
            self._newest[key] = number
        self._keys += keys
        self._lines.append(line)
        if len(self._lines) >= self._most:
            ends = array("L", accumulate(map(len, self._lines)))
            self._pieces.append(_Piece(array("q", self._keys), ends, b"".join(self._lines)))
            self._keys, self._lines = [], []
            if self._most * (len(self._pieces) - 1) >= self._capacity:
                self._drop()

    def _drop(self) -> None:
        self._dropped += 1
        kept_from = self._most * self._dropped
        for key in self._pieces.popleft().keys:
            if self._newest.get(key, kept_from) < kept_from:
                del self._newest[key]

    def find(self, request_id: str, tenant: str | None = None) -> bytes | None:
        """The newest record of a request, or of the tenant's one; ids are compared by hash."""
        number = self._newest.get(_keys(request_id, tenant)[tenant is not None])
        if number is None:
            return None
        piece, at = divmod(number - self._most * self._dropped, self._most)
        return self._lines[at] if piece == len(self._pieces) else self._pieces[piece].record(at)

    def latest(self, count: int) -> list[msgspec.Raw]:
        """The newest records, newest first."""
        joined = (
            piece.record(at)
            for piece in reversed(self._pieces)
            for at in reversed(range(len(piece.ends)))
        )
        return [msgspec.Raw(line) for line in islice(chain(reversed(self._lines), joined), count)]


def _keys(request_id: str, tenant: str | None) -> tuple[int, int]:
    """Keys of a record in the index: any with this request id, and this tenant's."""
    return hash(request_id), hash((request_id, tenant))


MAX_PENDING = 50_000
MAX_PENDING_PROMPT_BYTES = 64 * 1024 * 1024
"""Most pending bytes with which request bodies are recorded; beyond it, records go without them."""

_log = logging.getLogger("sluice.request_log")
_encode: Final = msgspec.json.Encoder().encode


class RequestLog(LineWriter):
    """Appends decision records to a JSONL file."""

    def __init__(self, path: Path, metrics: Metrics) -> None:
        super().__init__(
            MAX_PENDING,
            metrics.log_dropped,
            _log,
            what="records",
            failure=f"request log {path} cannot be written",
        )
        self._path = path

    def append(self, record: msgspec.Struct) -> None:
        line = b"" if self.full else _encode(record)
        if (
            isinstance(record, DecisionRecord)
            and record.prompt is not None
            and self.pending_bytes + len(line) > MAX_PENDING_PROMPT_BYTES
        ):
            line = _encode(without_prompt(record))
        self.append_line(line)

    def open(self) -> None:
        """Check that the file can be written. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        append(self._path, b"")

    def _write(self, batch: bytes) -> None:
        append(self._path, batch)


def without_prompt(record: DecisionRecord) -> DecisionRecord:
    """A copy of the record without the request's body."""
    return msgspec.structs.replace(record, prompt=None)


class Records:
    """Passes records to the ring, the log and further sinks; encodes once for ring and log."""

    def __init__(self, ring: DecisionRing, log: RequestLog | None, *others: RecordSink) -> None:
        self._ring = ring
        self._log = log
        self._others = others

    def append(self, record: msgspec.Struct) -> None:
        log = self._log
        if not isinstance(record, DecisionRecord):
            if log is not None:
                log.append(record)
        elif record.prompt is None:
            line = _encode(record)
            self._ring.append(record.request_id, line, record.tenant)
            if log is not None:
                log.append_line(line)
        else:  # request text may go to the file only
            line = _encode(without_prompt(record))
            self._ring.append(record.request_id, line, record.tenant)
            if log is not None:
                log.append(record)
        for sink in self._others:
            sink.append(record)
