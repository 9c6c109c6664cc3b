"""BF-IO's solver: assigns waiting requests to the workers of a barrier-synchronised group.

"A Universal Load Balancing Principle and Its Application to Large Language Model Serving",
section 4, (IO): fill the free slots so that G x max - sum of the workers' loads, summed over
the look-ahead window, is least. The solver fills one slot at a time greedily and then improves
by exchanging items; exact solving gains nothing end to end. The published principle lets
requests that fill no gap wait without end, so here requests that waited `maxage` go first.

numpy takes some 20 MB and .1 s to import, so this module is imported only if a pool uses it.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

_sum = np.add.reduce
_max = np.maximum.reduce
_min = np.minimum.reduce


def matrix_of(load: ArrayLike, growth: ArrayLike | None) -> tuple[Floats, Floats]:
    """A copy of the load as (G, H+1), and the growth over it."""
    matrix = np.array(load, dtype=np.float64, order="C")
    if matrix.ndim == 1:
        matrix = matrix[:, None]
    steps = matrix.shape[1]
    if growth is None:
        return matrix, np.arange(steps, dtype=np.float64)
    return matrix, np.asarray(growth, dtype=np.float64)


def imbalance(load: Floats) -> float:
    """G x max - sum, over all steps of a load matrix."""
    return float(len(load) * _sum(_max(load, axis=0)) - _sum(load, axis=None))


class WorkerLoads:
    """The workers' loads while slots are filled."""

    __slots__ = ("caps", "free", "grown", "load", "most", "rank", "slots", "weight")

    def __init__(
        self, load: ArrayLike, cap: ArrayLike, growth: ArrayLike | None, most: int
    ) -> None:
        self.load, self.grown = matrix_of(load, growth)
        self.free = [int(c) for c in np.asarray(cap)]
        # Slots beyond the number of items make no difference.
        self.caps = [min(c, most) for c in self.free]
        self.slots = sum(self.caps)
        self.most: Floats = _max(self.load, axis=0)
        caps = np.array(self.caps, dtype=np.float64)
        # Workers without a slot rank as infinitely loaded: they are never the neediest.
        self.rank: Floats = np.where(caps > 0, _sum(self.load, axis=1), np.inf)
        self.weight: Floats = np.maximum(caps, 1.0)

    def place(self, worker: int, size: float) -> None:
        """Add an item and take a slot."""
        row = self.load[worker]
        row += size + self.grown
        np.maximum(self.most, row, out=self.most)
        self.caps[worker] -= 1
        self.free[worker] -= 1
        self.slots -= 1
        left = self.caps[worker]
        self.rank[worker] = _sum(row) if left else np.inf
        self.weight[worker] = max(left, 1)

    def neediest(self) -> int:
        """The worker with the most room below the fullest, per free slot."""
        return int(((_sum(self.most) - self.rank) / self.weight).argmax())

    def others(self, worker: int) -> Floats:
        """The maximum load of the other workers at each step."""
        row = self.load[worker].copy()
        self.load[worker] = -np.inf
        most: Floats = _max(self.load, axis=0)
        self.load[worker] = row
        return most

    def room(self, worker: int) -> Floats:
        """Tokens that fit below the other workers' maximum at each step."""
        row = self.load[worker]
        attains = row >= self.most
        fullest = np.where(attains, self.others(worker), self.most) if attains.any() else self.most
        room: Floats = fullest - row
        return room


Pool = list[tuple[float, int]]
"""Waiting items, each with its size before it, sorted. Plain floats: comparing numpy's scalars one
by one is several times slower."""


def _around(pool: Pool, target: float) -> list[int]:
    """Indexes of the largest size below `target` and of the least at or above it."""
    right = bisect_left(pool, (target, -1))
    places = [right] if right < len(pool) else []
    return [bisect_left(pool, (pool[right - 1][0], -1), 0, right), *places] if right else places


IMPROVED_UP_TO: Final = 16
"""Most items assigned at once for which an improving pass is worth its time."""


def assign(
    load: ArrayLike,
    cap: ArrayLike,
    sizes: Sequence[float],
    waits: Sequence[float],
    *,
    maxage: float | None,
    passes: int | None = None,
    growth: ArrayLike | None = None,
) -> list[tuple[int, int]]:
    """Fill min(items, free slots) slots; returns (index of the item, worker), each item once.

    `load`: tokens resident on each worker, shape (G,) for H = 0, or (G, H+1): now and in the
    next H steps; without the waiting items. `cap`: free slots of each worker, >= 0.
    `sizes`: the tokens that each waiting item adds at once; `waits`: how long it has waited, in
    any unit. The items' order breaks ties. `maxage`, in the unit of `waits`: items that waited
    this long are placed before all others, oldest first; None for never. `passes`: improving
    passes; None for one up to IMPROVED_UP_TO items, else none. `growth`: tokens an active item
    has grown after h steps, shape (H+1,); None for h.

    Deterministic; equal workers are taken by index. With one item and H = 0 it is least-KV.
    On the items not forced by age, the objective is never worse than FCFS's (Algorithm 2).
    """
    group = WorkerLoads(load, cap, growth, len(sizes))
    count = min(len(sizes), group.slots)
    if count <= 0:
        return []
    old = [] if maxage is None else [i for i, wait in enumerate(waits) if wait >= maxage]
    forced = sorted(old, key=waits.__getitem__, reverse=True)[:count]
    placed = _lpt(group, sizes, forced)
    if len(forced) == count:
        return placed
    out = set(forced)
    rest = [i for i in range(len(sizes)) if i not in out]
    if passes is None:
        passes = 1 if count <= IMPROVED_UP_TO else 0
    count -= len(forced)
    if len(group.caps) == 1:  # nothing to balance
        return placed + [(item, 0) for item in rest[:count]]
    load, free = group.load.copy(), list(group.free)
    # When all items fit, longest first levels better than slot by slot.
    if len(rest) > group.slots:
        chosen = _fill(group, sorted((float(sizes[i]), i) for i in rest), count, passes)
    else:
        chosen = _lpt(group, sizes, rest)
    pairs = list(zip(rest, fcfs(free, len(chosen)), strict=False))
    for item, worker in pairs:
        load[worker] += sizes[item] + group.grown
    return placed + (pairs if imbalance(load) < imbalance(group.load) else chosen)


def fcfs(cap: ArrayLike, count: int) -> list[int]:
    """The workers that Algorithm 2 gives the next `count` items: most free slots, by index."""
    caps = np.asarray(cap, dtype=np.int64)
    # Only slots within `count` of the largest cap can be among the first `count`.
    caps = np.maximum(caps - max(int(caps.max(initial=0)) - count, 0), 0)
    worker = np.repeat(np.arange(len(caps)), caps)
    # A worker's slots are taken when it has c, c - 1, ... 1 left.
    left = caps[worker] - (np.arange(len(worker)) - (np.cumsum(caps) - caps)[worker])
    order = np.argsort(-left, kind="stable")[:count]
    return [int(w) for w in worker[order]]


def _lpt(group: WorkerLoads, sizes: Sequence[float], items: Sequence[int]) -> list[tuple[int, int]]:
    """Longest first, each where it raises the window's maximum least; ties: least loaded."""
    placed = []
    for item in sorted(items, key=lambda i: -sizes[i]):
        size = float(sizes[item])
        over: Any = _sum(np.maximum(group.load + (size + group.grown - group.most), 0.0), axis=1)
        over[group.rank == np.inf] = np.inf
        worker = int(np.where(over <= over.min(), group.rank, np.inf).argmin())
        group.place(worker, size)
        placed.append((item, worker))
    return placed


def _fill(group: WorkerLoads, pool: Pool, count: int, passes: int) -> list[tuple[int, int]]:
    """For more items than slots: repeatedly give the neediest worker the best fitting item."""
    workers = len(group.caps)
    chosen: list[tuple[int, float, int]] = []
    for _ in range(count):
        worker = group.neediest()
        slots, room = group.caps[worker], group.room(worker)
        if slots > 1:
            target = float(_min(room - slots * group.grown)) / slots
            # The nearest; of two as near, the smaller.
            at = min(_around(pool, target), key=lambda at: abs(pool[at][0] - target))
        else:
            at = _best(pool, room - group.grown, workers)
        size, item = pool.pop(at)
        group.place(worker, size)
        chosen.append((item, size, worker))
    for _ in range(passes):
        for index, (item, size, worker) in enumerate(chosen):
            # Exchange the item for the best waiting one if that lowers J.
            row = group.load[worker]
            row -= size + group.grown
            room = group.others(worker) - row - group.grown
            if pool:
                at = _best(pool, room, workers)
                if _cost(pool[at][0], room, workers) < _cost(size, room, workers):
                    new_size, new = pool.pop(at)
                    insort(pool, (size, item))
                    chosen[index] = new, new_size, worker
            row += chosen[index][1] + group.grown
    return [(item, worker) for item, _, worker in chosen]


def _best(pool: Pool, room: Floats, workers: int) -> int:
    """Index in `pool` of the item that adds least to J; `room`: tokens below the other workers.

    J is convex in the item's size, and falls up to the k-th smallest room.
    """
    steps = len(room)
    k = min(steps - 1, steps // workers)
    target = float(_min(room) if k == 0 else np.partition(room, k)[k])
    places = _around(pool, target)
    if len(places) == 1:
        return places[0]
    costs = [_cost(pool[at][0], room, workers) for at in places]
    return places[1] if costs[1] < costs[0] else places[0]


def _cost(size: float, room: Floats, workers: int) -> float:
    """What an item of this size adds to J, up to a constant."""
    return float(workers * _sum(np.maximum(room, size)) - len(room) * size)
