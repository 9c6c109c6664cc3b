"""Estimate which prefixes each worker of a pool still has cached, by when they were last used.

- Like an LRU cache, a worker keeps a prefix until as many tokens as its capacity were written
  after the last use. Stamps and capacities count tokens on the pool's clock
  (`gateway.scheduling.prefix_index`).
- Capacities are learned from engines' reports: a missing hit lowers the capacity, an unexpected
  one raises it. An early miss is ignored, because two prompts with the same beginning may be
  computed at the same time. The reports correct for what the clock leaves out, such as answers'
  tokens, uneven load, and old blocks that are used again.
- A worker whose hits are nearly all missing (its cache is off) is expected to keep nothing,
  until its reports show hits again.
"""

from bisect import bisect_left
from typing import Final, NamedTuple

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


class CacheEstimate:
    """The workers' cache estimate. All keep prefixes used after stamp `newest_floor`.

    Valid after a `rebuild`, until the clock reaches `rebuild_at`.
    """

    __slots__ = (
        "_floors",
        "_hit_share",
        "_holders",
        "_off",
        "capacity_tokens",
        "newest_floor",
        "rebuild_at",
        "since",
    )

    def __init__(self, workers: int, capacity_tokens: int) -> None:
        self.capacity_tokens = [capacity_tokens] * workers
        """Estimated capacity, by worker."""
        self.since = [0] * workers
        """Prefixes used up to this stamp are forgotten, by worker."""
        self._hit_share = [1.0] * workers
        """Smoothed share of the expected tokens that were hits, by worker."""
        self._off = [False] * workers
        self.rebuild(0.0)

    def grow(self, capacity_tokens: int) -> None:
        """Add a worker, with the mean capacity of the others if there are any."""
        known = self.capacity_tokens
        known.append(sum(known) // len(known) if known else capacity_tokens)
        self.since.append(0)
        self._hit_share.append(1.0)
        self._off.append(False)
        self.rebuild_at = 0.0

    def holding(self, stamp: int) -> int:
        """Bit mask of the workers that keep a prefix last used at `stamp`."""
        return self._holders[bisect_left(self._floors, stamp)]

    def rebuild(self, clock: float) -> None:
        """Recompute which stamps each worker keeps; due when the clock reaches `rebuild_at`."""
        floors = sorted(
            (_NEVER if off else max(since, int(clock) - capacity), worker)
            for worker, (off, since, capacity) in enumerate(
                zip(self._off, self.since, self.capacity_tokens, strict=True)
            )
        )
        self._floors = [floor for floor, _ in floors]
        """The stamps up to which workers keep nothing, ascending."""
        self._holders = [0]
        """Masks of the workers with the 0, 1, 2 ... lowest floors."""
        for _, worker in floors:
            self._holders.append(self._holders[-1] | 1 << worker)
        self.newest_floor = self._floors[-1] if self._floors else 0
        self.rebuild_at = clock + max(1, min(self.capacity_tokens, default=0) // _REBUILDS)

    def forget(self, worker: int, clock: float) -> None:
        """Note that a worker's cache is empty now; of many, only one rebuild is due."""
        self.since[worker] = int(clock)
        self._hit_share[worker] = 1.0
        self._off[worker] = False
        self.rebuild_at = 0.0

    def learn(self, worker: int, expected: ExpectedHit, cached_tokens: int, clock: float) -> None:
        """Correct the estimate by the `cached_tokens` that an engine reported for a prompt."""
        known, age = expected.known_tokens, expected.age_tokens
        if known < _TAUGHT_BY_TOKENS:
            return
        capacity = self.capacity_tokens[worker]
        if cached_tokens >= _FAR_LESS * known:
            if age > capacity:
                step = max(int(_STEP * capacity), _MIN_STEP_TOKENS)
                self.capacity_tokens[worker] = min(age, capacity + step)
        elif capacity * _EARLY < age < capacity:
            self.capacity_tokens[worker] = max(age, int(capacity * (1 - _STEP)))
        if age <= capacity:
            share = min(1.0, max(0, cached_tokens) / known)
            kept = self._hit_share[worker] = (1 - _HIT_SHARE_STEP) * self._hit_share[
                worker
            ] + _HIT_SHARE_STEP * share
            off = kept < (_ON_ABOVE if self._off[worker] else _OFF_BELOW)
            if off != self._off[worker]:
                self._off[worker] = off
                self.rebuild(clock)
