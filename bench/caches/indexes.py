"""What a gateway may know of its engines' prefix caches, beside the shipped index."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Final

from gateway.scheduling.prefix_index import ExpectedHit, PrefixIndex
from gateway.scheduling.scheduler import Match, Points
from simulator.engine.engine import Engine
from simulator.experiments.scheduling import BLOCK_TOKENS, Demand

_ENDLESS_TOKENS: Final = 1 << 40
_STAMP_BITS: Final = 44
"""As in the entries of the shipped index."""


class _PendingPrompts:
    """Digests of the prompts that are bound to each worker and have no first token yet."""

    def __init__(self, workers: int) -> None:
        self.digests = [Counter[int]() for _ in range(workers)]
        self._open: dict[int, tuple[int, Sequence[int]]] = {}
        self._numbers = count(1)

    def bound(self, worker: int, digests: Sequence[int]) -> ExpectedHit:
        """Begin one; what is returned ends it."""
        number = next(self._numbers)
        self._open[number] = (worker, digests)
        self.digests[worker].update(digests)
        return ExpectedHit(0, number, 0)

    def done(self, expected: ExpectedHit) -> None:
        """End one: its first token is there."""
        worker, digests = self._open.pop(expected.known_tokens)
        left = self.digests[worker]
        for digest in digests:
            left[digest] -= 1
            if not left[digest]:
                del left[digest]


class NoticedIndex(PrefixIndex):
    """The shipped index, where engines tell which of its prefixes they evict.

    No prefix is forgotten for its age, and none that a pending prompt is about to compute again.
    """

    def __init__(self, workers: int) -> None:
        super().__init__(workers, capacity_tokens=_ENDLESS_TOKENS)
        self._pending = _PendingPrompts(workers)

    def insert(
        self,
        points: Sequence[tuple[int, int]],
        worker: int,
        tokens_per_byte: float | None = None,
    ) -> ExpectedHit:
        """Record a prompt of this gateway, or with `tokens_per_byte` one that another told of."""
        expected = super().insert(points, worker, tokens_per_byte or 1.0)
        if tokens_per_byte is not None:
            return expected
        number = self._pending.bound(worker, [digest for _, digest in points])
        return ExpectedHit(expected.hit_tokens, number.known_tokens, 0)

    def correct(self, worker: int, expected: ExpectedHit, cached_tokens: int) -> None:
        """The prompt is computed; there is no capacity to learn."""
        self._pending.done(expected)

    def evicted(self, worker: int, digest: int) -> None:
        """Forget one prefix at one worker."""
        bit = 1 << worker + _STAMP_BITS
        value = self._entries.get(digest, 0)
        if value & bit and digest not in self._pending.digests[worker]:
            self._entries[digest] = value ^ bit


class PerfectIndex:
    """What the engines hold at this moment, and what is bound to them; of all gateways."""

    def __init__(self, workers: int, demands: Iterable[Demand]) -> None:
        self.workers = workers
        self.engines: dict[int, Engine] = {}
        self._blocks = {d.blocks[-1]: d.blocks for d in demands if d.blocks}
        self._pending = _PendingPrompts(workers)

    def match(self, points: Points, tokens_per_byte: float = 1.0) -> Match:
        """Longest first, to a block."""
        blocks = self._blocks[points[-1][1]]
        held: dict[int, int] = {}
        for worker, engine in self.engines.items():
            cache, pending = engine.prefix_cache, self._pending.digests[worker]
            missing = (i for i, b in enumerate(blocks) if b not in cache and b not in pending)
            if there := next(missing, len(blocks)):
                held[there] = held.get(there, 0) | 1 << worker
        found, mask = [], 0
        for there in sorted(held, reverse=True):
            mask |= held[there]
            found.append((there * BLOCK_TOKENS, mask))
        return found

    def insert(self, points: Points, worker: int, tokens_per_byte: float = 1.0) -> ExpectedHit:
        """Record a prompt until it is computed."""
        return self._pending.bound(worker, self._blocks[points[-1][1]] if points else ())

    def correct(self, worker: int, expected: ExpectedHit, cached_tokens: int) -> None:
        """The prompt is computed."""
        self._pending.done(expected)

    def forget(self, worker: int) -> None:
        """No worker restarts here."""
