"""Leases in force: by id, by expiry, and by least weight.

Every change stays fast however many leases there are. Python resizes a growing dictionary all at
once, which with 100,000 ordered entries blocks requests for some 35 ms. So leases are spread over
`SHARDS` small dictionaries, each in order of expiry; comparing their heads finds the first lease
to expire. `LeaseWeights` does the same for weights.
"""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from typing import Final, TypeVar, overload

from gateway.policy.token_pool.terms import LeaseRecord

SHARDS: Final = 32
_T = TypeVar("_T")


class OpenLeases(MutableMapping[str, LeaseRecord]):
    """Leases by id, in order of issue or renewal, which is the order of expiry (one common TTL)."""

    __slots__ = ("_count", "_serial", "_shards")

    def __init__(self) -> None:
        self._shards: tuple[OrderedDict[str, tuple[int, LeaseRecord]], ...] = tuple(
            OrderedDict() for _ in range(SHARDS)
        )
        """Lease id -> (serial of its issue or renewal, lease), ascending by serial."""
        self._count = 0
        self._serial = 0

    def __getitem__(self, lease_id: str) -> LeaseRecord:
        return self._shard(lease_id)[lease_id][1]

    def __setitem__(self, lease_id: str, lease: LeaseRecord) -> None:
        part = self._shard(lease_id)
        known = part.get(lease_id)
        if known is not None:  # the same id again keeps its place
            part[lease_id] = (known[0], lease)
            return
        self.add(lease_id, lease)

    def add(self, lease_id: str, lease: LeaseRecord) -> None:
        """Add a lease whose id is not there yet."""
        self._serial += 1
        self._count += 1
        self._shards[hash(lease_id) % SHARDS][lease_id] = (self._serial, lease)

    def __delitem__(self, lease_id: str) -> None:
        del self._shard(lease_id)[lease_id]
        self._count -= 1

    def __iter__(self) -> Iterator[str]:
        for part in self._shards:
            yield from part

    def __len__(self) -> int:
        return self._count

    def __contains__(self, lease_id: object) -> bool:
        return isinstance(lease_id, str) and lease_id in self._shard(lease_id)

    @overload
    def get(self, key: str, /) -> LeaseRecord | None: ...
    @overload
    def get(self, key: str, /, default: LeaseRecord | _T) -> LeaseRecord | _T: ...
    def get(self, key: str, /, default: LeaseRecord | _T | None = None) -> LeaseRecord | _T | None:
        """See Mapping; called on every admission, where the id is usually absent."""
        found = self._shards[hash(key) % SHARDS].get(key)
        return default if found is None else found[1]

    def take(self, lease_id: str) -> LeaseRecord | None:
        """Remove and return a lease; None when absent."""
        found = self._shards[hash(lease_id) % SHARDS].pop(lease_id, None)
        if found is None:
            return None
        self._count -= 1
        return found[1]

    def renewed(self, lease_id: str) -> None:
        """Move a renewed lease to the end: it now expires last."""
        part = self._shard(lease_id)
        self._serial += 1
        part[lease_id] = (self._serial, part[lease_id][1])
        part.move_to_end(lease_id)

    def first(self) -> LeaseRecord | None:
        """The lease that expires first."""
        heads = [next(iter(part.values())) for part in self._shards if part]
        return min(heads, key=_serial_of)[1] if heads else None

    @property
    def longest_shard(self) -> int:
        """Entries of the longest part: at most these are resized at once."""
        return max(map(len, self._shards))

    def _shard(self, lease_id: str) -> OrderedDict[str, tuple[int, LeaseRecord]]:
        return self._shards[hash(lease_id) % SHARDS]  # a string caches its hash


def _serial_of(entry: tuple[int, LeaseRecord]) -> int:
    return entry[0]


MAX_RUN: Final = 512
"""Most weights in a part; a part that grows beyond is halved."""


class LeaseWeights:
    """A sorted multiset of a pool's lease weights; the least is known at any time.

    Equal weights are counted; distinct ones are kept in short ascending lists, so that adding and
    discarding take a few microseconds and never sort everything. A heap with lazy deletion would
    be shorter, but has to be rebuilt, which with 100,000 leases blocks requests for 0.1 s.
    """

    __slots__ = ("_counts", "_first", "_runs")

    def __init__(self) -> None:
        self._counts: dict[float, int] = {}
        self._runs: list[list[float]] = []
        """Each distinct weight once, ascending; no part is empty."""
        self._first: list[float] = []
        """The first weight of each part."""

    def __len__(self) -> int:
        return sum(self._counts.values())

    def __iter__(self) -> Iterator[float]:
        """Ascending, with repetitions."""
        for part in self._runs:
            for weight in part:
                for _ in range(self._counts[weight]):
                    yield weight

    @property
    def longest_run(self) -> int:
        """Weights in the longest part: one change moves at most these."""
        return max(map(len, self._runs), default=0)

    def add(self, weight: float) -> None:
        """Add the weight of a new lease."""
        count = self._counts.get(weight, 0)
        self._counts[weight] = count + 1
        if not count:
            self._enter(weight)

    def discard(self, weight: float) -> None:
        """Remove one lease's weight; nothing happens when it is absent."""
        count = self._counts.get(weight, 0)
        if count > 1:
            self._counts[weight] = count - 1
        elif count:
            del self._counts[weight]
            self._leave(weight)

    def lowest(self) -> float:
        """The least weight; 0 when there is none."""
        return self._first[0] if self._first else 0.0

    def _enter(self, weight: float) -> None:
        parts, first = self._runs, self._first
        if not parts:
            parts.append([weight])
            first.append(weight)
            return
        at = bisect_right(first, weight) - 1
        if at < 0:
            at = 0
            first[0] = weight
        part = parts[at]
        insort(part, weight)
        if len(part) > MAX_RUN:
            half = len(part) // 2
            parts.insert(at + 1, part[half:])
            first.insert(at + 1, part[half])
            del part[half:]

    def _leave(self, weight: float) -> None:
        at = bisect_right(self._first, weight) - 1
        part = self._runs[at]
        place = bisect_left(part, weight)
        del part[place]
        if not part:
            del self._runs[at], self._first[at]
        elif not place:
            self._first[at] = part[0]
