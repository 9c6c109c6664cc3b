"""Gossip between replicas that share workers: which prompts each replica sent where.

A replica that knows only its own prompts misses most hits: one of four replicas knows a quarter
of them. So each replica publishes what it sent, and enters the others' prompts into its index.

Rules:
- Digests have a secret seed, and replicas need the same one
  (`gateway.scheduling.prefix_index.use_seed`). A check value in each note shows
  whether they have.
- Only the new part of a prompt is published (a run): its points from the last one that the worker
  already held. Listeners know the earlier points from earlier prompts; the first point of the run
  refreshes where this prompt leaves them. The same run to the same worker is published once.
- The runs since the last note form one chapter, packed as bytes, because a listener would
  take ten times as long to decode lists of numbers. Chapters are numbered; each is in several
  notes, and a listener enters it once.
- What an engine says that it evicted is a run of one point without tokens.
- A chapter has at most `MAX_POINTS` points, the newest runs first. Dropped runs only cost the
  others some hits. Without listeners nothing is kept.
"""

import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import inf
from typing import Any, Final

from xxhash import xxh3_64_intdigest

from gateway.scheduling.prefix_index import PrefixIndex, seed
from gateway.scheduling.scheduler import Points

MAX_POINTS: Final = 4_000
"""Points in one chapter: some 64 KB, and 2 ms of each listener's time."""
MAX_RUNS: Final = 2_000
SLICE_POINTS: Final = 300
"""Points entered without a pause: some .3 ms."""
_REPEATS: Final = 2
"""Notes with the same chapter: each replaces the last one, which a listener may miss."""

_RUN: Final = struct.Struct("<IId")
"""Worker, number of points, tokens per byte."""
_POINT: Final = struct.Struct("<qq")


def check() -> int:
    """A value that is equal in replicas with the same seed."""
    return xxh3_64_intdigest(b"sluice prefixes", seed()) >> 1


class PrefixGossip:
    """Gossip of one pool: the runs this replica sent, and the chapters it heard from others."""

    def __init__(self) -> None:
        self.has_listeners = False
        """Whether other replicas share the workers; see `listened`."""
        self._runs: dict[tuple[int, bytes], float] = {}
        """Runs since the last note, oldest first: (worker, points) -> tokens per byte."""
        self._sent: deque[tuple[int, bytes] | None] = deque(maxlen=_REPEATS)
        """(number, chapter) of the last notes; None for a note without new runs."""
        self._number = 0
        self._received: dict[str, int] = {}
        """Replica -> number of the last chapter entered."""

    def sent(
        self, points: Points, worker: int, tokens_per_byte: float, hit_tokens: int = 0
    ) -> None:
        """Note a prompt sent to a worker that already held `hit_tokens` of it."""
        if not self.has_listeners:
            return
        held = bisect_right(points, ((hit_tokens + 1) / tokens_per_byte, inf)) if hit_tokens else 0
        new = points[held - 1 :] if held else points
        run = (worker, struct.pack(f"<{2 * len(new)}q", *chain.from_iterable(new)))
        self._runs.pop(run, None)  # it may have been evicted since
        if len(self._runs) >= MAX_RUNS:
            del self._runs[next(iter(self._runs))]
        self._runs[run] = tokens_per_byte

    def evicted(self, digest: int, worker: int) -> None:
        """Note that a worker holds a prefix no more."""
        if self.has_listeners:
            run = (worker, _POINT.pack(0, digest))
            self._runs.pop(run, None)  # it may have been sent since
            if len(self._runs) < MAX_RUNS:
                self._runs[run] = 0.0

    def listened(self, *, by_others: bool) -> None:
        """Set whether other replicas listen; without any, nothing is kept."""
        self.has_listeners = by_others
        if not by_others:
            self._runs.clear()
            self._sent.clear()

    def __len__(self) -> int:
        return len(self._runs)

    def chapters(self) -> dict[str, Any]:
        """The next note to the other replicas, as plain values."""
        new = None
        if self._runs:
            left = MAX_POINTS
            parts: list[bytes] = []
            for (worker, points), tokens_per_byte in reversed(self._runs.items()):
                count = len(points) // _POINT.size
                left -= count
                if left < 0:
                    break
                parts += (points, _RUN.pack(worker, count, tokens_per_byte))
            self._number += 1
            new = (self._number, b"".join(reversed(parts)))  # the oldest run first
            self._runs.clear()
        self._sent.append(new)
        return {"check": check(), "chapters": [each for each in self._sent if each is not None]}

    def receive(
        self,
        states: Mapping[str, Mapping[str, Any]],
        index: PrefixIndex,
        places: Mapping[str, Mapping[int, int]] | None = None,
    ) -> Iterator[int]:
        """Enter the notes of other replicas, by name; yields the number of new runs per slice.

        `places`: place there -> place here, for each replica that lists the workers in another
        order; a worker without place is unknown here. Slices let requests proceed in between. A
        name stands for one replica from its start to its end. Malformed notes and those with
        another seed are ignored.
        """
        self._received = {name: self._received.get(name, 0) for name in states}
        here = check()
        for name, state in states.items():
            chapters = state.get("chapters")
            if state.get("check") != here or not isinstance(chapters, list | tuple):
                continue
            for entry in chapters:
                if not isinstance(entry, Sequence) or len(entry) != 2:
                    continue
                number, chapter = entry
                if not isinstance(number, int) or not isinstance(chapter, bytes):
                    continue
                if number > self._received[name]:
                    self._received[name] = number
                    yield from _enter(chapter, index, (places or {}).get(name))


def _enter(chapter: bytes, index: PrefixIndex, places: Mapping[int, int] | None) -> Iterator[int]:
    """Enter a chapter's valid runs in slices; yields the number of runs entered per slice."""
    at, size, new, left = 0, len(chapter), 0, SLICE_POINTS
    while at + _RUN.size <= size:
        worker, count, tokens_per_byte = _RUN.unpack_from(chapter, at)
        at += _RUN.size
        end = at + count * _POINT.size
        if end > size:
            break
        place = worker if places is None else places.get(worker, -1)
        if 0 <= place < index.workers and count and 0 <= tokens_per_byte < 64:
            points = tuple(_POINT.iter_unpack(chapter[at:end]))
            if tokens_per_byte:
                index.insert(points, place, tokens_per_byte)
            else:
                index.evict(place, points[0][1])
            new += 1
        at = end
        left -= count
        if left <= 0:
            yield new
            new, left = 0, SLICE_POINTS
    yield new
