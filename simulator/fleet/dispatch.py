"""Choose an instance of a pool for a request: the gateway's policies, and baselines.

A dispatcher keeps one pool's load as the gateway sees it: requests sent and not finished.
`gateway.fleet.fleet` says which instances are available. Add policies to `DISPATCHERS`.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Final

from gateway.fleet import fleet
from gateway.fleet.fleet import PoolState
from gateway.scheduling.baselines import least_loaded
from simulator.fleet.traffic import Random


class Dispatcher:
    """Callers report the end of every request that `pick` placed once, through `finish`."""

    __slots__ = ("_pool", "_random", "_tokens")

    def __init__(self, pool: PoolState, tokens: Sequence[int], random: Random) -> None:
        """`tokens`: reserved by request; `random`: the pool's own generator."""
        self._pool = pool
        self._tokens = tokens
        self._random = Draws(random)

    def pick(self, request: int, now_s: float) -> int:
        """The instance for a request, counted at once; -1 if none is available."""
        raise NotImplementedError

    def finish(self, worker: int, request: int) -> None:
        """A request left its instance."""

    def refresh(self) -> None:
        """Instances failed or came back; `gateway.fleet.fleet` has their state."""


class LeastLoadedDispatch(Dispatcher):
    """The gateway's own policy: least share of reserved tokens plus share of sequences."""

    def pick(self, request: int, now_s: float) -> int:
        choice = fleet.available(self._pool, now_s)
        if not choice:
            return -1
        worker = choice[0] if len(choice) == 1 else least_loaded(self._pool, choice)[0]
        fleet.start(self._pool, worker, 1, self._tokens[request])
        return worker

    def finish(self, worker: int, request: int) -> None:
        fleet.finish(self._pool, worker, 1, self._tokens[request])


class ShortestQueue(Dispatcher):
    """Join the shortest queue: fewest sequences sent and not finished; ties in turn.

    A test checks that it chooses as `least_loaded` does if requests have no tokens. It takes
    O(log n): instances are kept in order, grouped by load.
    """

    __slots__ = ("_alone", "_cursor", "_levels", "_load", "_lowest", "_present")

    def __init__(self, pool: PoolState, tokens: Sequence[int], random: Random) -> None:
        super().__init__(pool, tokens, random)
        self._load = [0] * len(pool.workers)
        self._cursor = 0
        self._levels: list[list[int]] = []
        self._lowest = 0
        self.refresh()

    def pick(self, request: int, now_s: float) -> int:
        levels, lowest = self._levels, self._lowest
        if lowest >= len(levels):
            return -1
        level = levels[lowest]
        position = 0
        if not self._alone:
            position = self._cursor % len(level)
            self._cursor += 1
        worker = level.pop(position)
        self._load[worker] = lowest + 1
        if lowest + 1 == len(levels):
            levels.append([])
        insort(levels[lowest + 1], worker)
        if not level:
            self._lowest = lowest + 1
        return worker

    def finish(self, worker: int, request: int) -> None:
        load = self._load[worker]
        self._load[worker] = load - 1
        if not self._present[worker]:
            return
        level = self._levels[load]
        del level[bisect_left(level, worker)]
        insort(self._levels[load - 1], worker)
        self._lowest = min(self._lowest, load - 1)

    def refresh(self) -> None:
        present = fleet.available(self._pool, 0.0)
        self._alone = len(present) == 1
        self._present = [False] * len(self._load)
        self._levels = [[] for _ in range(max(self._load) + 1)]
        for worker in present:
            self._present[worker] = True
            self._levels[self._load[worker]].append(worker)
        empty = len(self._levels)
        self._lowest = next((i for i, level in enumerate(self._levels) if level), empty)


class RoundRobinDispatch(Dispatcher):
    """Instances in turn, whatever the load."""

    _next = 0

    def pick(self, request: int, now_s: float) -> int:
        present = fleet.available(self._pool, now_s)
        if not present:
            return -1
        worker = present[self._next % len(present)]
        self._next += 1
        return worker


class TwoChoices(Dispatcher):
    """The less loaded, by sequences, of two random instances; the first drawn wins ties."""

    def pick(self, request: int, now_s: float) -> int:
        present, active = fleet.available(self._pool, now_s), self._pool.active
        if not present:
            return -1
        worker = present[self._random.below(len(present))]
        if len(present) > 1:
            # Draw the second from the remaining instances.
            other = present[self._random.below(len(present) - 1)]
            if other == worker:
                other = present[-1]
            if active[other] < active[worker]:
                worker = other
        fleet.start(self._pool, worker, 1, 0)
        return worker

    def finish(self, worker: int, request: int) -> None:
        fleet.finish(self._pool, worker, 1, 0)


class AtRandom(Dispatcher):
    """A random instance."""

    def pick(self, request: int, now_s: float) -> int:
        present = fleet.available(self._pool, now_s)
        return present[self._random.below(len(present))] if present else -1


class Draws:
    """Uniform whole numbers, drawn from the generator in batches."""

    _MANY: Final = 4096

    def __init__(self, random: Random) -> None:
        self._random = random
        self._drawn: list[float] = []

    def below(self, bound: int) -> int:
        """0 ... bound - 1."""
        if not self._drawn:
            self._drawn = self._random.random(self._MANY).tolist()
        return int(self._drawn.pop() * bound)


DISPATCHERS: Final[dict[str, type[Dispatcher]]] = {
    "least-loaded": LeastLoadedDispatch,
    "jsq": ShortestQueue,
    "p2c": TwoChoices,
    "round-robin": RoundRobinDispatch,
    "random": AtRandom,
}
