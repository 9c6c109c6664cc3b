"""What a model's token pool counts: leases in force, usage by entitlement and by pool of workers.

Plain mutable state of `gateway.policy.token_pool.token_pool.TokenPool`; only this package and
admission change it. All times are Unix seconds of one clock (the store's). Sequences, bytes and
tokens are whole.

Every change of the leases stays fast however many there are. Python resizes a growing dictionary
all at once, which with 100,000 ordered entries blocks requests for some 35 ms. So leases are spread
over `SHARDS` small dictionaries, each in order of expiry; comparing their heads finds the first
lease to expire. `LeaseWeights` does the same for weights.
"""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from typing import Final, TypeVar, overload

from gateway.policy.entitlements.entitlement import Entitlement
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


class RecentDenials:
    """Tenants that a pool refused recently, each with the weight of its latest refusal.

    Each tenant counts once; otherwise one tenant's retries would lengthen everybody's wait.
    """

    __slots__ = ("_ascending", "weights")

    def __init__(self) -> None:
        self.weights: dict[str, float] = {}
        """By tenant."""
        self._ascending: list[float] = []

    def __len__(self) -> int:
        return len(self.weights)

    def note(self, tenant: str, weight: float, most: int) -> None:
        """Record a refused tenant; beyond `most` tenants no new one is added."""
        self.forget(tenant)
        if len(self.weights) < most:
            self.weights[tenant] = weight
            insort(self._ascending, weight)

    def forget(self, tenant: str) -> None:
        """Remove a tenant, if it is counted."""
        weight = self.weights.pop(tenant, None)
        if weight is not None:
            del self._ascending[bisect_left(self._ascending, weight)]

    def others_above(self, tenant: str, weight: float) -> int:
        """Number of other tenants whose refused request had at least this weight."""
        count = len(self._ascending) - bisect_left(self._ascending, weight)
        return count - (self.weights.get(tenant, -1.0) >= weight)


FIRST_SERVICE_S = 5.0
"""Mean service time assumed before any request was served."""


class Journal:
    """Changes since it was last emptied, for a reader that keeps a copy of the token pool."""

    __slots__ = ("accounts", "leases")

    def __init__(self) -> None:
        self.accounts: set[str] = set()
        """Names of changed accounts; a name without an account was removed."""
        self.leases: set[str] = set()
        """Ids of changed leases; an id without a lease has ended."""


class Account:
    """Usage, bucket, debt and ledger of one entitlement."""

    __slots__ = (
        "borrowed",
        "borrowed_s",
        "burst",
        "debited",
        "debt",
        "denied",
        "denied_kv_seconds",
        "denied_seconds",
        "epoch",
        "floor_tokens",
        "inflight",
        "inflight_seconds",
        "kv_bytes",
        "kv_seconds",
        "level",
        "level_s",
        "mean_cost",
        "most",
        "promised",
        "promised_s",
        "refunded",
        "served",
        "since_s",
        "spilled",
        "terms",
        "total",
        "used",
        "waiters",
        "waiters_s",
        "weight",
    )

    def __init__(self, terms: Entitlement, pools: int) -> None:
        self.terms = terms
        self.epoch = -1
        """Epoch of the terms that `weight`, `most`, `floor_tokens` derive from; -1: recompute."""
        self.weight = 0.0
        """w_e; read it through `admission.weight_now`."""
        self.most = 0
        """r_e; read it through `admission.most_sequences`."""
        self.floor_tokens = 0.0
        """Least depth of its bucket; read the depth through `admission.depth_tokens`."""
        self.inflight = [0] * pools
        """Sequences holding a lease, by pool."""
        self.spilled = [0] * pools
        """Part of `inflight` that requested another pool."""
        self.total = 0
        self.kv_bytes = 0
        self.level = 0.0
        """Level of its token bucket at `level_s`; a bucket that was never used is full."""
        self.level_s = 0.0
        self.borrowed = 0.0
        """Recent borrowing, drained at (limit - lambda_e)."""
        self.borrowed_s = 0.0
        self.debt = 0.0
        self.burst = 0.0
        self.served = 0
        """Tokens settled in this tick."""
        self.denied = 0
        """Denials by a pool in this tick that a higher weight could have avoided."""
        self.denied_seconds = 0.0
        """Slot-seconds that these would have used at the pool's mean service time."""
        self.denied_kv_seconds = 0.0
        """Byte-seconds of KV cache likewise."""
        self.promised = 0.0
        """Tokens promised to earlier refusals by Retry-After, drained at lambda_e."""
        self.promised_s = 0.0
        self.waiters = 0.0
        """Sequences refused because slots were full, drained as slots come free."""
        self.waiters_s = 0.0
        self.mean_cost = 0.0
        """Moving mean of settled charges, in tokens per sequence; 0 before the first."""
        self.inflight_seconds = 0.0
        """Integral of `total` over this tick, for its time average; `kv_seconds` likewise."""
        self.kv_seconds = 0.0
        self.since_s = 0.0
        """The time up to which the integrals are computed."""
        self.debited = 0
        self.refunded = 0
        self.used = 0
        """Ledger, never reset: debited - refunded = used once nothing is in flight."""

    def own(self, pool: int) -> int:
        """Sequences in flight in a pool that requested it; these count against the baseline."""
        return self.inflight[pool] - self.spilled[pool]


class PoolCounters:
    """Admission's counters for one pool of workers."""

    __slots__ = (
        "denials",
        "denials_last",
        "evictable",
        "idle_dedicated",
        "inflight",
        "kv_bytes",
        "refused_kv_bytes",
        "refused_sequences",
        "refused_tokens",
        "served_tokens",
        "service_s",
        "unreserved",
        "weights",
    )

    def __init__(self) -> None:
        self.inflight = 0
        self.kv_bytes = 0
        self.idle_dedicated = 0
        """Unused baseline of dedicated entitlements, kept free for them."""
        self.unreserved = 0
        """Sequences in flight of non-reserving classes."""
        self.service_s = FIRST_SERVICE_S
        """Moving mean of a lease's lifetime, in seconds."""
        self.weights = LeaseWeights()
        self.evictable: dict[str, LeaseRecord] = {}
        self.denials = RecentDenials()
        """Tenants refused in this tick; `denials_last` has those of the last tick only."""
        self.denials_last = RecentDenials()
        self.refused_sequences = 0
        """Of requests that more workers would have let in, since the start."""
        self.refused_kv_bytes = 0
        self.refused_tokens = 0
        self.served_tokens = 0
        """Settled tokens of its leases, since the start."""
