"""Estimate how much of a prompt each worker of a pool holds in its prefix cache.

The index maps digest -> (bit mask of workers, stamp) in one dictionary with bounded entries.
The mask is above the stamp, so that more workers need no change of the entries.
Engines do not say which prefixes they keep, so a model estimates it and their reports correct it:

- Like an LRU cache, each worker keeps a prefix until as many tokens as its capacity were written
  after the last use. Stamps and capacities count tokens on the pool's one clock: the mean over
  its workers of the prompt tokens expected to miss the cache.
- Capacities are learned from the `cached_tokens` in engines' usage: a missing hit lowers the
  capacity, an unexpected one raises it. An early miss is ignored, because two prompts with the
  same beginning may be computed at the same time. The reports correct for what the clock leaves
  out, such as answers' tokens, uneven load, and old blocks that are used again.
- A worker whose hits are nearly all missing (its cache is off) is expected to keep nothing,
  until its reports show hits again.
- `forget` is for a worker that restarted: its earlier prefixes no longer count.
- `joined` and `left` are for workers that come and go. A new one holds nothing.

Rules:
- `insert` stamps all points of a prompt, so an earlier point is never older than a later one.
- The work of a call is bounded by its arguments: each insert evicts a few of the oldest entries.
- Each replica has its own index. It learns from the prompts that it sends and from gossip of
  replicas on the same Redis (`gateway.scheduling.prefix_gossip`). Without Redis, each of several
  replicas expects fewer hits than there are.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from gateway.scheduling.scheduler import Match

DEFAULT_ENTRIES: Final = 262_144
MIN_ENTRIES: Final = 8_192
_STAMP_BITS: Final = 44
"""Stamps count tokens of the pool's clock: 17 trillion of them."""
_STAMP: Final = (1 << _STAMP_BITS) - 1
_CHUNKS: Final = 32
"""Closed chunks in which entries are kept by age, of about equal size."""

DEFAULT_CAPACITY_TOKENS: Final = 500_000
"""Assumed capacity of a worker's cache until it is learned."""

_STEP: Final = 0.1
"""Largest relative step of a capacity per report."""
_MIN_STEP_TOKENS: Final = 4_096
_EARLY: Final = 1 / 16
"""A miss does not lower the capacity before this share of it was written."""
_REBUILDS: Final = 64
"""Rebuilds of the estimate while one capacity of tokens is written."""
_TAUGHT_BY_TOKENS: Final = 64
"""Fewer expected tokens teach nothing, because engines count in blocks."""
_FAR_LESS: Final = 0.5
"""A hit below this share of the expected tokens counts as a miss."""
_HIT_SHARE_STEP: Final = 0.05
_OFF_BELOW: Final = 0.1
_ON_ABOVE: Final = 0.3
_NEVER: Final = 1 << 62


class ExpectedHit(NamedTuple):
    """Tokens of a prompt that its worker was expected to have cached when it was sent."""

    hit_tokens: int
    """Tokens expected in the cache; 0 if they are believed to be evicted."""
    known_tokens: int
    """Tokens sent to the worker since its start, evicted or not; >= `hit_tokens`."""
    age_tokens: int
    """Tokens written on the pool's clock since the known ones were last used."""


class WorkerCache:
    """The estimate of one worker's cache."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.since = 0
        """Prefixes used up to this stamp are forgotten."""
        self.hit_share = 1.0
        """Smoothed share of the expected tokens that were hits."""
        self.off = False

    def learn(self, expected: ExpectedHit, cached_tokens: int) -> bool:
        """Correct it by the tokens that an engine reported; True if it turned on or off."""
        known, age, capacity = expected.known_tokens, expected.age_tokens, self.capacity_tokens
        if known < _TAUGHT_BY_TOKENS:
            return False
        if cached_tokens >= _FAR_LESS * known:
            if age > capacity:
                step = max(int(_STEP * capacity), _MIN_STEP_TOKENS)
                self.capacity_tokens = min(age, capacity + step)
        elif capacity * _EARLY < age < capacity:
            self.capacity_tokens = max(age, int(capacity * (1 - _STEP)))
        if age > capacity:
            return False
        share = min(1.0, max(0, cached_tokens) / known)
        self.hit_share = (1 - _HIT_SHARE_STEP) * self.hit_share + _HIT_SHARE_STEP * share
        was, self.off = self.off, self.hit_share < (_ON_ABOVE if self.off else _OFF_BELOW)
        return self.off != was


class PrefixIndex:
    """The prefixes of one pool. Lengths of points times `tokens_per_byte` are tokens."""

    def __init__(
        self,
        workers: int,
        *,
        max_entries: int = DEFAULT_ENTRIES,
        capacity_tokens: int = DEFAULT_CAPACITY_TOKENS,
    ) -> None:
        """An index of `workers` (>= 0) with at most `max_entries` (>= 8,192) digests.

        `capacity_tokens` (>= 1) is each worker's initial capacity. Raises ValueError.
        """
        if workers < 0 or max_entries < MIN_ENTRIES or capacity_tokens < 1:
            raise ValueError(
                f"a prefix index has workers, capacity, and {MIN_ENTRIES:,} entries or more"
            )
        self.workers = workers
        """Places for workers, vacant ones included."""
        self._full = (1 << workers) - 1
        """Mask of the present workers."""
        self._present = workers
        self._capacity_tokens = capacity_tokens
        self._caches = [WorkerCache(capacity_tokens) for _ in range(workers)]
        self._entries: dict[int, int] = {}
        """Digest -> mask << _STAMP_BITS | stamp."""
        self._clock = 1.0
        # A chunk is closed after the prompt that fills it, so it may exceed its size by 62
        # digests. At most 34 chunks exist, including the open one.
        self._chunk_entries = max_entries // (_CHUNKS + 3) - 62
        self._chunk: list[int] = []
        self._chunk_stamp = 1
        self._chunks: deque[tuple[int, list[int]]] = deque()
        """(first stamp after it, digests touched in it), oldest first."""
        self._rebuild(0.0)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def capacity_tokens(self) -> Sequence[int]:
        """Each worker's estimated cache capacity, on the pool's clock."""
        return [cache.capacity_tokens for cache in self._caches]

    def _rebuild(self, clock: float) -> None:
        """Recompute which stamps each worker keeps; due when the clock reaches `_rebuild_at`."""
        floors = sorted(
            (_NEVER if cache.off else max(cache.since, int(clock) - cache.capacity_tokens), worker)
            for worker, cache in enumerate(self._caches)
        )
        self._floors = [floor for floor, _ in floors]
        """The stamps up to which workers keep nothing, ascending."""
        self._holders = [0]
        """Masks of the workers with the 0, 1, 2 ... lowest floors."""
        for _, worker in floors:
            self._holders.append(self._holders[-1] | 1 << worker)
        self._newest_floor = self._floors[-1] if self._floors else 0
        """All workers keep prefixes used after this stamp."""
        least = min([cache.capacity_tokens for cache in self._caches], default=0)
        self._rebuild_at = clock + max(1, least // _REBUILDS)

    def match(self, points: Sequence[tuple[int, int]], tokens_per_byte: float = 1.0) -> Match:
        """(tokens, mask of workers that hold at least these), longest first.

        `tokens_per_byte` is the prompt's tokens divided by the last point's length; 1 if points
        are in tokens.
        """
        if not self._entries:
            return ()
        if self._clock >= self._rebuild_at:
            self._rebuild(self._clock)
        get, full = self._entries.get, self._full
        floor = self._newest_floor
        found: list[tuple[int, int]] = []
        seen = 0
        for length, digest in reversed(points):
            value = get(digest)
            if value is None:
                continue
            mask = value >> _STAMP_BITS & full
            stamp = value & _STAMP
            if stamp <= floor:
                mask &= self._holders[bisect_left(self._floors, stamp)]
            if mask | seen != seen:
                seen |= mask
                found.append((int(length * tokens_per_byte), seen))
                if seen == full:
                    break
        return found

    def insert(
        self, points: Sequence[tuple[int, int]], worker: int, tokens_per_byte: float = 1.0
    ) -> ExpectedHit:
        """Note a prompt sent to a worker; returns what it was expected to hold before."""
        if not points:
            return ExpectedHit(0, 0, 0)
        if self._clock >= self._rebuild_at:
            self._rebuild(self._clock)
        entries, full, floor = self._entries, self._full, self._newest_floor
        get, add, chunk_stamp = entries.get, self._chunk.append, self._chunk_stamp
        bit, stamp, since = 1 << worker, int(self._clock), self._caches[worker].since
        fresh = bit << _STAMP_BITS | stamp  # one int object for all new entries
        hit = known = touched = 0  # length held, length once sent, stamp of the latter
        for length, digest in points:
            value = get(digest)
            if value is None:
                entries[digest] = fresh
                add(digest)
                continue
            before, mask = value & _STAMP, value >> _STAMP_BITS & full
            if mask & bit and before > since:
                known, touched = length, before
            if before <= floor:
                mask &= self._holders[bisect_left(self._floors, before)]
            if mask & bit:
                hit = length
            if before < chunk_stamp:
                add(digest)
            mask |= bit
            entries[digest] = fresh if mask == bit else mask << _STAMP_BITS | stamp
        age = int(self._clock) - touched if known else 0
        written = (points[-1][0] - hit) * tokens_per_byte
        self._clock += written / max(1, self._present)
        if len(self._chunk) >= self._chunk_entries:
            self._chunk_stamp = int(self._clock) + 1
            self._clock = float(self._chunk_stamp)
            self._chunks.append((self._chunk_stamp, self._chunk))
            self._chunk = []
        if len(self._chunks) > _CHUNKS:
            self._evict(2 * len(points) + 2)
        return ExpectedHit(int(hit * tokens_per_byte), int(known * tokens_per_byte), age)

    def withdraw(
        self,
        points: Sequence[tuple[int, int]],
        worker: int,
        expected: ExpectedHit,
        tokens_per_byte: float = 1.0,
    ) -> None:
        """Undo an `insert` after the prompt failed before its first token."""
        bit = 1 << worker + _STAMP_BITS
        for length, digest in reversed(points):
            if length * tokens_per_byte <= expected.known_tokens + 1:
                break
            value = self._entries.get(digest, 0)
            if value & bit:
                self._entries[digest] = value ^ bit

    def forget(self, worker: int) -> None:
        """Note that a worker's cache is empty; takes constant time for any number of entries."""
        cache = self._caches[worker]
        cache.since, cache.hit_share, cache.off = int(self._clock), 1.0, False
        self._rebuild_at = 0.0  # of many that are forgotten at once, only one rebuild is due
        self._clock = float(int(self._clock) + 1)

    def joined(self, worker: int) -> None:
        """Note that a new worker took a place, which may be one more than there were."""
        if worker == self.workers:
            known = self.capacity_tokens  # of which it gets the mean
            self.workers += 1
            self._caches.append(
                WorkerCache(sum(known) // len(known) if known else self._capacity_tokens)
            )
            self._rebuild_at = 0.0
        else:
            self.forget(worker)
        self._full |= 1 << worker
        self._present += 1

    def left(self, worker: int) -> None:
        """Note that a worker is gone: it matches nothing any more."""
        self._full &= ~(1 << worker)
        self._present -= 1

    def correct(self, worker: int, expected: ExpectedHit, cached_tokens: int) -> None:
        """Learn from the `cached_tokens` that the engine reported for a prompt.

        Do not call this if it reported none. The prompt's own points stay, because the worker has
        now computed the missing part.
        """
        if self._caches[worker].learn(expected, cached_tokens):
            self._rebuild(self._clock)

    def _evict(self, most: int) -> None:
        """Remove up to `most` digests of the oldest chunk, except those stamped again later."""
        after, chunk = self._chunks[0]
        for _ in range(min(most, len(chunk))):
            digest = chunk.pop()
            if self._entries[digest] & _STAMP < after:
                del self._entries[digest]
        if not chunk:
            self._chunks.popleft()
