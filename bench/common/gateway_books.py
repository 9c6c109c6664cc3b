"""Compare a gateway's request log and /metrics with the counts of its clients."""

import time
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Final

import msgspec

from bench.common.fleet import read_metrics
from gateway.records.decision import (
    NO_ADMISSION,
    NO_COMPRESSION,
    NO_TIMING,
    AdmissionSection,
    CompressionSection,
    TimingSection,
)

REQUESTS: Final = "sluice_requests_total"
_READ_BYTES: Final = 4 * 1024 * 1024


class Try(msgspec.Struct, frozen=True, gc=False):
    """One attempt at an engine."""

    worker: str = ""
    result: str = ""


class Line(msgspec.Struct, frozen=True, gc=False):
    """What is read of a line of the request log. Notes on entitlements have no outcome."""

    request_id: str = ""
    time_unix_s: float = 0.0
    outcome: str = ""
    status: int | str = 0
    """Text in notes on entitlements."""
    model: str = ""
    pool: str = ""
    endpoint: str = ""
    entitlement: str = ""
    reason: str = ""
    attempts: tuple[Try, ...] = ()
    admission: AdmissionSection = NO_ADMISSION
    compression: CompressionSection = NO_COMPRESSION
    timing: TimingSection = NO_TIMING


class LogReader:
    """Reads a request log from where it stopped last; may free what was read."""

    def __init__(self, path: Path, *, forget: bool = False) -> None:
        """`forget`: what was read leaves the disk, where the file system can do that."""
        self._path = path
        self._forget = forget
        self._at = 0
        self._decode = msgspec.json.Decoder(Line).decode

    @property
    def read_bytes(self) -> int:
        """So far."""
        return self._at

    def new(self) -> list[Line]:
        """Requests that ended since; a line that is not whole yet waits."""
        found: list[Line] = []
        while part := self._part():
            found += [line for line in map(self._decode, part.splitlines()) if line.outcome]
        return found

    def _part(self) -> bytes:
        if not self._path.exists():
            return b""
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read(_READ_BYTES)
        whole = data[: data.rfind(b"\n") + 1]
        if self._forget and whole:
            # But its last byte, by which whoever appends sees that the line is whole.
            free(self._path, max(0, self._at - 1), len(whole) - 1)
        self._at += len(whole)
        return whole


def free(path: Path, start: int, length: int) -> None:
    """Give a range of a file back to the disk; its length stays. Nothing where that fails.

    Whoever appends to the file goes on at its end.
    """
    import ctypes

    keep_size, punch_hole = 1, 2
    with path.open("r+b") as file:
        libc = ctypes.CDLL(None)
        sizes = (ctypes.c_int64(start), ctypes.c_int64(length))
        libc.fallocate(file.fileno(), keep_size | punch_hole, *sizes)


def outcomes(page: dict[str, float]) -> Counter[str]:
    """Requests on a /metrics page by outcome."""
    found: Counter[str] = Counter()
    for series, value in page.items():
        if series.startswith(REQUESTS):
            found[label(series, "outcome")] += int(value)
    return found


def label(series: str, name: str) -> str:
    """The value of a label in a series' name; empty without it."""
    _, found, rest = series.partition(f'{name}="')
    return rest.partition('"')[0] if found else ""


def gauge(page: dict[str, float], name: str) -> float:
    """The sum of a family's series."""
    return sum(value for series, value in page.items() if series.partition("{")[0] == name)


def held(page: dict[str, float]) -> float:
    """Leases in force by the gateway, and sequences leased by the store's own books."""
    return page.get('sluice_leases{state="active"}', 0.0) + gauge(page, "sluice_pool_leased")


def idle_page(url: str, limit_s: float = 10.0) -> dict[str, float]:
    """The /metrics page once no lease is held, or after the limit."""
    end_s = time.monotonic() + limit_s
    while True:
        page = read_metrics(url)
        if not held(page) or time.monotonic() > end_s:
            return page
        time.sleep(0.1)


def most_at_once(lines: Iterable[Line], from_unix_s: float = -inf, to_unix_s: float = inf) -> int:
    """The most leases that were held at the same time, within a span."""
    changes = []
    for line in lines:
        lease = line.admission
        if lease.admitted_unix_s is not None and lease.settled_unix_s is not None:
            # A Redis that hung says of its first leases that they are of when it stopped.
            begin_s = max(lease.admitted_unix_s, line.time_unix_s, from_unix_s)
            end_s = min(lease.settled_unix_s, to_unix_s)
            if begin_s < end_s:
                changes += [(begin_s, 1), (end_s, -1)]
    return max(accumulate(change for _, change in sorted(changes)), default=0)
