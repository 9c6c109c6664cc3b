"""What each worker of a pool is taken to keep in its prefix cache, by when it was touched.

- A worker keeps what was touched while fewer than its capacity of tokens were written since, as
  an LRU cache does. Stamps and capacities are of one clock for the pool (`prefix_index`).
- A capacity is learned from what engines report: a hit that did not come lowers it, one that
  was no longer expected raises it. An early miss says nothing: two prompts with one beginning
  may be computed side by side. Reports make up for what the clock leaves out, such as answers'
  tokens, uneven load, and old blocks that are used again.
- A worker that keeps next to nothing of what is expected (its cache is off) is expected to
  keep nothing, until its reports say otherwise.
"""

from bisect import bisect_left
from typing import Final, NamedTuple

DEFAULT_CAPACITY_TOKENS: Final = 500_000
"""Of a worker's cache, until it is learned."""

_STEP: Final = 0.1
"""How fast a capacity follows what is seen."""
_LEAST_STEP_TOKENS: Final = 4_096
_EARLY: Final = 1 / 16
"""Of the capacity: a miss before so much was written does not lower it."""
_REBUILDS: Final = 64
"""So many times while a capacity is written, what workers keep is computed anew."""
_TAUGHT_BY_TOKENS: Final = 64
"""Fewer expected tokens teach nothing: engines count in blocks."""
_FAR_LESS: Final = 0.5
"""A hit below this share of what was expected did not come."""
_KEPT_STEP: Final = 0.05
_OFF_BELOW: Final = 0.1
_ON_ABOVE: Final = 0.3
_NEVER: Final = 1 << 62


class Expected(NamedTuple):
    """What a worker was expected to hold of a prompt when that was sent to it, in tokens."""

    hit_tokens: int
    """0 when what it had is believed to be gone."""
    known_tokens: int
    """What it was sent since its start, believed to be kept or not; >= the hit."""
    age_tokens: int
    """Written on the pool's clock since that was last touched."""


class Keeping:
    """What the workers keep; `newest_floor` is where all of them keep what was touched after."""

    __slots__ = (
        "_floors",
        "_holders",
        "_kept",
        "_off",
        "capacity_tokens",
        "newest_floor",
        "rebuild_at",
        "since",
    )

    def __init__(self, workers: int, capacity_tokens: int) -> None:
        self.capacity_tokens = [capacity_tokens] * workers
        """Believed, by worker."""
        self.since = [0] * workers
        """What was touched up to this stamp is forgotten, by worker."""
        self._kept = [1.0] * workers
        """Share of what was expected that came, smoothed."""
        self._off = [False] * workers
        self.rebuild(0.0)

    def holding(self, stamp: int) -> int:
        """Mask of the workers that keep what was touched then."""
        return self._holders[bisect_left(self._floors, stamp)]

    def rebuild(self, clock: float) -> None:
        """Compute what is kept now; due when the clock reaches `rebuild_at`."""
        floors = sorted(
            (_NEVER if off else max(since, int(clock) - capacity), worker)
            for worker, (off, since, capacity) in enumerate(
                zip(self._off, self.since, self.capacity_tokens, strict=True)
            )
        )
        self._floors = [floor for floor, _ in floors]
        """Up to which stamp workers keep nothing, ascending."""
        self._holders = [0]
        """Masks of the workers with the lowest 0, 1, 2 ... floors."""
        for _, worker in floors:
            self._holders.append(self._holders[-1] | 1 << worker)
        self.newest_floor = self._floors[-1]
        self.rebuild_at = clock + max(1, min(self.capacity_tokens) // _REBUILDS)

    def forget(self, worker: int, clock: float) -> None:
        """A worker keeps nothing of what was touched until now."""
        self.since[worker] = int(clock)
        self._kept[worker] = 1.0
        self._off[worker] = False
        self.rebuild(clock)

    def learn(self, worker: int, expected: Expected, cached_tokens: int, clock: float) -> None:
        """Compare what was expected with what the engine reported."""
        known, age = expected.known_tokens, expected.age_tokens
        if known < _TAUGHT_BY_TOKENS:
            return
        capacity = self.capacity_tokens[worker]
        if cached_tokens >= _FAR_LESS * known:
            if age > capacity:
                step = max(int(_STEP * capacity), _LEAST_STEP_TOKENS)
                self.capacity_tokens[worker] = min(age, capacity + step)
        elif capacity * _EARLY < age < capacity:
            self.capacity_tokens[worker] = max(age, int(capacity * (1 - _STEP)))
        if age <= capacity:
            share = min(1.0, max(0, cached_tokens) / known)
            kept = self._kept[worker] = (1 - _KEPT_STEP) * self._kept[worker] + _KEPT_STEP * share
            off = kept < (_ON_ABOVE if self._off[worker] else _OFF_BELOW)
            if off != self._off[worker]:
                self._off[worker] = off
                self.rebuild(clock)
