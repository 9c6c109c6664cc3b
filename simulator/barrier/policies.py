"""Policies of a barrier-synchronised group: the paper's baselines and BF-IO.

FCFS is Algorithm 2 of "A Universal Load Balancing Principle": the oldest request goes to the
worker with most free slots. JSQ picks the worker with the fewest requests. With workers of one
size they differ only in ties: FCFS takes the lowest index, JSQ any of them.
"""

from collections.abc import Callable, Sequence

import numpy as np

from gateway.scheduling.rank_solver import assign, fcfs
from simulator.barrier.lookahead import LookAhead
from simulator.barrier.records import Floats, Ints, Pairs
from simulator.barrier.state import BarrierGroup


class Fcfs:
    """The oldest request goes to the worker with most room."""

    def choose(self, group: BarrierGroup, pool: Sequence[int]) -> Pairs:
        return list(enumerate(fcfs(group.room, len(pool))))


class _Seen:
    """Loads as a rule sees them, including the choices made earlier in the same step."""

    __slots__ = ("counts", "kv", "room")

    def __init__(self, group: BarrierGroup) -> None:
        self.room: Ints = group.room.copy()
        self.counts: Ints = group.active + group.queued
        self.kv: Floats = group.load + group.queued_load


def _one_by_one(group: BarrierGroup, pool: Sequence[int], pick: Callable[[_Seen], int]) -> Pairs:
    """Requests in order of arrival, each to the worker that a rule picks."""
    seen = _Seen(group)
    pairs = []
    for place in range(min(len(pool), int(seen.room.sum()))):
        worker = pick(seen)
        seen.room[worker] -= 1
        seen.counts[worker] += 1
        seen.kv[worker] += group.sizes[pool[place]]
        pairs.append((place, worker))
    return pairs


class Jsq:
    """The worker with the fewest requests, active and queued; ties at random."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)

    def choose(self, group: BarrierGroup, pool: Sequence[int]) -> Pairs:
        return _one_by_one(group, pool, self._pick)

    def _pick(self, seen: _Seen) -> int:
        counts = np.where(seen.room > 0, seen.counts, np.iinfo(np.int64).max)
        return int(self._random.choice(np.flatnonzero(counts == counts.min())))


class LeastKv:
    """The worker with the fewest tokens, resident and queued."""

    def choose(self, group: BarrierGroup, pool: Sequence[int]) -> Pairs:
        return _one_by_one(
            group, pool, lambda seen: int(np.where(seen.room > 0, seen.kv, np.inf).argmin())
        )


class RoundRobinPolicy:
    """Workers in turn, skipping full ones."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, group: BarrierGroup, pool: Sequence[int]) -> Pairs:
        return _one_by_one(group, pool, self._pick)

    def _pick(self, seen: _Seen) -> int:
        open_to = np.flatnonzero(seen.room > 0)
        found = int(open_to[open_to.searchsorted(self._next) % len(open_to)])
        self._next = (found + 1) % len(seen.room)
        return found


class PowerOfD:
    """The fewest requests among d random workers with room."""

    def __init__(self, d: int = 2, seed: int = 0) -> None:
        if d < 1:
            raise ValueError("power of d draws at least one worker")
        self._d = d
        self._random = np.random.default_rng(seed)

    def choose(self, group: BarrierGroup, pool: Sequence[int]) -> Pairs:
        return _one_by_one(group, pool, self._pick)

    def _pick(self, seen: _Seen) -> int:
        open_to = np.flatnonzero(seen.room > 0)
        drawn = self._random.choice(open_to, min(self._d, len(open_to)), replace=False)
        return int(drawn[seen.counts[drawn].argmin()])


class BfIo:
    """The gateway's solver, H steps ahead; `maxage` in steps, None for the published principle."""

    def __init__(
        self,
        horizon: int = 0,
        *,
        maxage: float | None = None,
        ahead: LookAhead | None = None,
    ) -> None:
        if horizon and ahead is None:
            raise ValueError("to look ahead needs something that predicts")
        self._horizon = horizon
        self._maxage = maxage
        self._ahead = ahead

    def choose(self, group: BarrierGroup, pool: Sequence[int]) -> Pairs:
        grown = group.grown(self._horizon)
        if self._ahead is None:
            load = group.load[:, None]
        else:
            load = self._ahead.load(group, self._horizon, grown)
        return assign(
            load + group.queued_load[:, None],
            group.room,
            [group.sizes[request] for request in pool],
            (group.step - group.revealed[pool]).tolist(),
            maxage=self._maxage,
            growth=grown,
        )
