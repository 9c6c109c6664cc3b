"""A prefix index that forgets nothing: the expectation of a router without memory bounds."""

from gateway.scheduling.prefix_index import ExpectedHit
from gateway.scheduling.scheduler import Match, Points


class UnboundedPrefixes:
    """Assumes that every prefix ever sent to a worker is still cached there."""

    __slots__ = ("_full", "_masks", "workers")

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._full = (1 << workers) - 1
        self._masks: dict[int, int] = {}

    def match(self, points: Points, tokens_per_byte: float = 1.0) -> Match:
        """Workers that were sent a prefix: (tokens, mask), longest first."""
        found: list[tuple[int, int]] = []
        seen = 0
        for tokens, digest in reversed(points):
            mask = self._masks.get(digest, 0)
            if mask | seen != seen:
                seen |= mask
                found.append((tokens, seen))
                if seen == self._full:
                    break
        return found

    def insert(self, points: Points, worker: int, tokens_per_byte: float = 1.0) -> ExpectedHit:
        """Record a prompt sent to a worker."""
        for _, digest in points:
            self._masks[digest] = self._masks.get(digest, 0) | 1 << worker
        return ExpectedHit(0, 0, 0)

    def correct(self, worker: int, expected: ExpectedHit, cached_tokens: int) -> None:
        """Ignored: the oracle is not corrected."""

    def forget(self, worker: int) -> None:
        """Drop a restarted worker's prefixes."""
        for digest, mask in self._masks.items():
            self._masks[digest] = mask & ~(1 << worker)
