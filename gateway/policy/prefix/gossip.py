"""Which prompts were sent where, told to the other replicas that share the workers.

A replica that knows only its own prompts expects a fraction of the hits there are: of four
each would know a quarter. So each tells the others what it sent, and enters what they
tell into its index.

Rules:
- Digests of prompts have a secret seed, so replicas understand one another only if they use
  the same one (`gateway.policy.prefix.digests.use_seed`); a check value says whether they do.
- Of a prompt is told what is new: its points from the last one on that the worker held. Whoever
  heard of the prompts before knows the others, and the one where this prompt leaves them is as
  young again. The same run to the same worker is told once.
- What was sent since the last telling is one chapter: bytes without a break, for lists of numbers
  would take a listener ten times as long to decode. Chapters are numbered, each is in several
  notes, and is heard once.
- At most `MOST_POINTS` points are told at a time, the newest runs first: beyond that the
  others know less, which costs hits and nothing else. Where nobody listens nothing is kept.
"""

import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import inf
from typing import Any, Final, Protocol

from xxhash import xxh3_64_intdigest

from gateway.policy.prefix.digests import seed
from gateway.policy.scheduling.scheduler import Points

MOST_POINTS: Final = 4_000
"""Told at a time: some 64 KB, and 2 ms of each listener's time."""
KEPT_RUNS: Final = 2_000
SLICE_POINTS: Final = 300
"""Heard without a pause: some .3 ms."""
_TELLS: Final = 2
"""So many times each chapter is told: notes replace one another, and one may not be seen."""

_RUN: Final = struct.Struct("<IId")
"""Worker, points, tokens per byte."""
_POINT: Final = struct.Struct("<qq")


def check() -> int:
    """Equal in replicas whose digests compare."""
    return xxh3_64_intdigest(b"sluice prefixes", seed()) >> 1


class Index(Protocol):
    """What of `PrefixIndex` is used."""

    workers: int

    def insert(self, points: Points, worker: int, tokens_per_byte: float) -> object:
        """Note a prompt that was sent to a worker."""


class PrefixNews:
    """One pool's: what this replica sent lately, and what it has heard of the others."""

    __slots__ = ("_heard", "_number", "_runs", "_told", "wanted")

    def __init__(self) -> None:
        self.wanted = False
        """Whether others share the workers; see `listened`."""
        self._runs: dict[tuple[int, bytes], float] = {}
        """Sent since the last telling, oldest first: worker and points -> tokens per byte."""
        self._told: deque[tuple[int, bytes] | None] = deque(maxlen=_TELLS)
        """Numbers and chapters of the last tellings; None where nothing was new."""
        self._number = 0
        self._heard: dict[str, int] = {}
        """The last chapter heard of each replica."""

    def sent(
        self, points: Points, worker: int, tokens_per_byte: float, hit_tokens: int = 0
    ) -> None:
        """A prompt was sent to a worker that held `hit_tokens` of it."""
        if not self.wanted:
            return
        held = bisect_right(points, ((hit_tokens + 1) / tokens_per_byte, inf)) if hit_tokens else 0
        new = points[held - 1 :] if held else points
        run = (worker, struct.pack(f"<{2 * len(new)}q", *chain.from_iterable(new)))
        if run not in self._runs:
            if len(self._runs) >= KEPT_RUNS:
                del self._runs[next(iter(self._runs))]
            self._runs[run] = tokens_per_byte

    def listened(self, *, by_others: bool) -> None:
        """Say whether there is anybody to tell."""
        self.wanted = by_others
        if not by_others:
            self._runs.clear()
            self._told.clear()

    def __len__(self) -> int:
        return len(self._runs)

    def tell(self) -> dict[str, Any]:
        """Plain values for the other replicas."""
        new = None
        if self._runs:
            self._number += 1
            new = (self._number, self._chapter())
            self._runs.clear()
        self._told.append(new)
        return {"check": check(), "chapters": [each for each in self._told if each is not None]}

    def hear(self, states: Mapping[str, Mapping[str, Any]], index: Index) -> Iterator[int]:
        """Enter what the others, by their names, have sent; yields how many runs were new.

        In slices, so that requests can go on between them. A name stands for one replica from its
        start to its end. What is malformed, or was digested with another seed, is ignored.
        """
        self._heard = {name: self._heard.get(name, 0) for name in states}
        here = check()
        for name, state in states.items():
            chapters = state.get("chapters")
            if state.get("check") != here or not isinstance(chapters, list | tuple):
                continue
            for number, chapter in filter(None, map(_read, chapters)):
                if number > self._heard[name]:
                    self._heard[name] = number
                    yield from _enter(chapter, index)

    def _chapter(self) -> bytes:
        """The newest runs, oldest first."""
        left = MOST_POINTS
        parts: list[bytes] = []
        for (worker, points), tokens_per_byte in reversed(self._runs.items()):
            count = len(points) // _POINT.size
            left -= count
            if left < 0:
                break
            parts += (points, _RUN.pack(worker, count, tokens_per_byte))
        return b"".join(reversed(parts))


def _read(chapter: Any) -> tuple[int, bytes] | None:
    """Number and runs, if it is a chapter."""
    if not isinstance(chapter, Sequence) or len(chapter) != 2:
        return None
    number, runs = chapter
    if not isinstance(number, int) or not isinstance(runs, bytes):
        return None
    return number, runs


def _enter(chapter: bytes, index: Index) -> Iterator[int]:
    """Enter its runs, but those that cannot be; how many, a slice at a time."""
    at, size, new, left = 0, len(chapter), 0, SLICE_POINTS
    while at + _RUN.size <= size:
        worker, count, tokens_per_byte = _RUN.unpack_from(chapter, at)
        at += _RUN.size
        end = at + count * _POINT.size
        if end > size:
            break
        if worker < index.workers and count and 0 < tokens_per_byte < 64:
            index.insert(tuple(_POINT.iter_unpack(chapter[at:end])), worker, tokens_per_byte)
            new += 1
        at = end
        left -= count
        if left <= 0:
            yield new
            new, left = 0, SLICE_POINTS
    yield new
