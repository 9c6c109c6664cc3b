"""What the ready workers can promise: who is bound, the average SLO, and how many are needed.

One capacity model for both questions of the token-pools paper: what may enter, and how many
replicas should run.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from math import ceil, inf

from gateway.policy.entitlements.entitlement import Entitlement
from gateway.policy.token_pool.terms import UNLIMITED
from gateway.records.record import Record

SURVEY_SLICE = 1_000
"""Entitlements looked at between two pauses."""
TARGET_USE = 0.85
"""Share of the slots that the desired replicas leave in use."""
COOLDOWN_S = 300.0
"""How long demand has to be lower before fewer replicas are desired."""


class WorkerShare(Record, frozen=True, kw_only=True):
    """What one worker of a pool adds to its model's capacity."""

    slots: int
    """Sequences it runs at once."""
    kv_bytes: int = 0
    """Of its KV cache; 0 where the configuration does not say: its engine may."""
    tokens_per_s: float = 0.0
    """Input and output; 0 for not enforced."""
    replicas: tuple[int, int] = (1, 1)
    """Fewest and most workers of its pool."""


class Capacity(Record, frozen=True, kw_only=True):
    """What the ready workers hold together. Tuples are by pool; 0 for not enforced."""

    slots: tuple[int, ...]
    kv_bytes: tuple[int, ...]
    tokens_per_s: float
    pool_tokens_per_s: tuple[float, ...] = ()
    """The same by pool."""

    @property
    def total_kv_bytes(self) -> int:
        """Over all pools; 0 where one of those with slots does not enforce it."""
        enforced = all(kv or not slots for kv, slots in zip(self.kv_bytes, self.slots, strict=True))
        return sum(self.kv_bytes) if enforced else 0


def capacity_of(
    shares: Sequence[WorkerShare], engine_kv_bytes: Sequence[Sequence[int]]
) -> Capacity:
    """The capacity of some workers: of each pool, what its engines said of their KV caches.

    What the share states counts; where neither says, the pool's KV is not enforced.
    """
    kv = []
    for share, told in zip(shares, engine_kv_bytes, strict=True):
        each = [share.kv_bytes or said for said in told]
        kv.append(sum(each) if all(each) else 0)
    rates = [s.tokens_per_s * len(k) for s, k in zip(shares, engine_kv_bytes, strict=True)]
    return Capacity(
        slots=tuple(s.slots * len(k) for s, k in zip(shares, engine_kv_bytes, strict=True)),
        kv_bytes=tuple(kv),
        tokens_per_s=sum(rates),
        pool_tokens_per_s=tuple(rates),
    )


def most_capacity(shares: Sequence[WorkerShare]) -> Capacity:
    """The capacity of the most replicas."""
    return capacity_of(shares, [[0] * share.replicas[1] for share in shares])


class Standing(Record, frozen=True, kw_only=True):
    """What a capacity means for a model's entitlements. Tuples are by pool."""

    bound_until: tuple[int, ...]
    """`created` of the newest reserving entitlement that fits a pool with all older ones."""
    newest_bound: int
    """`created` of the newest one that fits wherever it reserves; 0 for none."""
    unbound: int
    """Reserving entitlements in force that do not fit somewhere."""
    mean_slo_ms: float
    """Over entitlements that state one, but for those that do not fit; 0 when none does."""
    reserved: tuple[int, ...]
    """Sequences that bound entitlements reserve."""
    next_expiry_unix_s: float
    """When the next entitlement expires and this no longer holds; infinity for never."""


class _Reserves:
    """What is reserved, oldest first; a pool that does not hold one is closed to newer ones."""

    def __init__(self, capacity: Capacity) -> None:
        pools = len(capacity.slots)
        self.capacity = capacity
        self.sequences = [0] * pools
        self.bound_until = [UNLIMITED] * pools
        self._kv_bytes = [0.0] * pools
        self._tokens_per_s = [0.0] * pools

    def add(self, e: Entitlement) -> bool:
        """Reserve where it fits; whether that is wherever it has a baseline.

        KV and token rate have to fit over all pools or, where some were lost, by each pool's part.
        """
        total = sum(e.baseline)
        fits_over_all = self._fits_over_all(e)
        everywhere = True
        for pool, baseline in enumerate(e.baseline[: len(self.sequences)]):
            if not baseline:
                continue
            kv, rate = e.kv_bytes * baseline / total, e.tokens_per_s * baseline / total
            fits = (
                self.bound_until[pool] == UNLIMITED
                and self.sequences[pool] + baseline <= self.capacity.slots[pool]
                and (fits_over_all or self._fits_pool(pool, kv, rate))
            )
            if fits:
                self.sequences[pool] += baseline
                self._kv_bytes[pool] += kv
                self._tokens_per_s[pool] += rate
            else:
                self.bound_until[pool] = min(self.bound_until[pool], e.created - 1)
                everywhere = False
        return everywhere

    def _fits_over_all(self, e: Entitlement) -> bool:
        kv_bytes, rate = self.capacity.total_kv_bytes, self.capacity.tokens_per_s
        return (not kv_bytes or sum(self._kv_bytes) + e.kv_bytes <= kv_bytes) and (
            not rate or sum(self._tokens_per_s) + e.tokens_per_s <= rate
        )

    def _fits_pool(self, pool: int, kv_bytes: float, tokens_per_s: float) -> bool:
        capacity = self.capacity
        if capacity.total_kv_bytes and self._kv_bytes[pool] + kv_bytes > capacity.kv_bytes[pool]:
            return False
        if not capacity.tokens_per_s:
            return True
        rates = capacity.pool_tokens_per_s
        return bool(rates) and self._tokens_per_s[pool] + tokens_per_s <= rates[pool]


def survey(
    entitlements: Iterable[Entitlement],
    capacity: Capacity,
    now_s: float,
) -> Iterator[Standing | None]:
    """Who fits, oldest first; yields None between slices and the Standing at the end.

    `entitlements` in order of creation. In each pool the first reserving one that does not fit,
    and all newer ones, are not bound.
    """
    reserves = _Reserves(capacity)
    newest_bound = unbound = 0
    slo_ms, slo_count = 0, 0
    next_expiry_s = inf
    for number, e in enumerate(entitlements, start=1):
        if number % SURVEY_SLICE == 0:
            yield None
        if e.suspended or 0 < e.expires_unix_s <= now_s:
            continue
        if 0 < e.expires_unix_s < next_expiry_s:
            next_expiry_s = e.expires_unix_s
        if e.reserves:
            if not reserves.add(e):
                unbound += 1
                continue
            newest_bound = e.created
        if e.slo_ms:
            slo_ms += e.slo_ms
            slo_count += 1
    yield Standing(
        bound_until=tuple(reserves.bound_until),
        newest_bound=newest_bound,
        unbound=unbound,
        mean_slo_ms=slo_ms / slo_count if slo_count else 0.0,
        reserved=tuple(reserves.sequences),
        next_expiry_unix_s=next_expiry_s,
    )


def desired_replicas(
    demand_sequences: float, slots_per_worker: int, replicas: tuple[int, int]
) -> int:
    """Workers that a demand asks for, within the bounds."""
    wanted = ceil(demand_sequences / TARGET_USE / max(1, slots_per_worker))
    return min(max(wanted, replicas[0]), replicas[1])


def demand_sequences(
    reserved: int, unreserved: int, denied: int, service_s: float, elapsed_s: float
) -> float:
    """What a pool's workers are asked to run: reserved, admitted beyond that, and denied.

    Denied demand by Little's law: denials per second times the mean service time.
    """
    return reserved + unreserved + denied / max(1e-3, elapsed_s) * service_s


class ReplicaGoal:
    """Desired replicas of one pool: up at once, down once a whole cooldown asked for less."""

    def __init__(self, cooldown_s: float = COOLDOWN_S) -> None:
        self._cooldown_s = cooldown_s
        self._peaks: deque[tuple[float, int]] = deque()
        """(when, wanted), each less than those before: the latest is what is wanted now."""

    def wanted(self, replicas: int, now_s: float) -> int:
        """Note what demand asks for now; the most that it asked for within the cooldown."""
        while self._peaks and self._peaks[-1][1] <= replicas:
            self._peaks.pop()
        self._peaks.append((now_s, replicas))
        while self._peaks[0][0] <= now_s - self._cooldown_s:
            self._peaks.popleft()
        return self._peaks[0][1]
