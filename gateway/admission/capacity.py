"""Capacity of the ready workers: which reserves fit, the mean SLO, and the desired replicas.

Admission and autoscaling share this capacity model (token-pools paper). An entitlement is
"bound" in a pool when the pool's capacity holds its reserved baseline.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil, inf
from typing import Final

from gateway.admission.terms import UNLIMITED
from gateway.records.entitlement import Entitlement
from gateway.records.record import Record

ASSESS_SLICE = 1_000
"""Entitlements that `assess_capacity` examines between two yields."""
TARGET_USE = 0.85
"""Share of the capacity in use that the desired replicas aim for."""
RAISE_USE = 0.95
"""Share of the capacity in use beyond which more replicas are desired; the band up to it holds
fluctuations, which would change the desired replicas to and fro."""
MEAN_S = 30.0
"""Seconds over which demand is averaged: single moments are up to twice the mean."""
COOLDOWN_S = 300.0
"""Seconds that demand has to stay lower before fewer replicas are desired, by default."""

NO_PREFILLS: Final[Mapping[int, int]] = {}


class WorkerShare(Record, frozen=True, kw_only=True):
    """The capacity that one worker of a pool adds to its model."""

    slots: int
    """Sequences it runs at once."""
    kv_bytes: int = 0
    """Size of its KV cache; 0 when not configured, then the engine's report counts."""
    tokens_per_s: float = 0.0
    """Input and output; 0 for not enforced."""
    replicas: tuple[int, int] = (1, 1)
    """Fewest and most workers of its pool."""
    cooldown_s: float = COOLDOWN_S
    """Seconds that demand has to stay lower before the pool is desired to have fewer."""


class Capacity(Record, frozen=True, kw_only=True):
    """Total capacity of the ready workers. Tuples are by pool; 0 for not enforced."""

    slots: tuple[int, ...]
    kv_bytes: tuple[int, ...]
    tokens_per_s: float
    pool_tokens_per_s: tuple[float, ...] = ()
    """`tokens_per_s` by pool."""

    @property
    def total_kv_bytes(self) -> int:
        """KV cache of all pools; 0 when a pool with slots does not enforce it."""
        enforced = all(kv or not slots for kv, slots in zip(self.kv_bytes, self.slots, strict=True))
        return sum(self.kv_bytes) if enforced else 0


def capacity_of(
    shares: Sequence[WorkerShare],
    engine_kv_bytes: Sequence[Sequence[int]],
    prefills: Mapping[int, int] = NO_PREFILLS,
) -> Capacity:
    """The capacity of workers; `engine_kv_bytes` has each engine's reported KV cache, by pool.

    A configured size takes precedence over the report; without either, the pool's KV is not
    enforced. `prefills`: pools in phases -> those that compute their prompts, which come last and
    add slots and tokens/s to them. A request's KV is decode's, in which it ends.
    """
    kv = []
    for share, reported in zip(shares, engine_kv_bytes, strict=True):
        whole = sum(reported) if not share.kv_bytes and all(reported) else 0
        kv.append(share.kv_bytes * len(reported) or whole)
    rates = [s.tokens_per_s * len(k) for s, k in zip(shares, engine_kv_bytes, strict=True)]
    slots = [s.slots * len(k) for s, k in zip(shares, engine_kv_bytes, strict=True)]
    for pool, prefill in prefills.items():
        if slots[pool]:  # a prompt alone answers nobody
            slots[pool] += slots[prefill]
            rates[pool] += rates[prefill]
    routed = len(shares) - len(prefills)
    return Capacity(
        slots=tuple(slots[:routed]),
        kv_bytes=tuple(kv[:routed]),
        tokens_per_s=sum(rates[:routed]),
        pool_tokens_per_s=tuple(rates[:routed]),
    )


def max_capacity(
    shares: Sequence[WorkerShare], prefills: Mapping[int, int] = NO_PREFILLS
) -> Capacity:
    """The capacity at the most replicas, from configured sizes alone."""
    # Each range has a 0, a size that nobody reported; files may state any number of replicas.
    return capacity_of(shares, [range(share.replicas[1]) for share in shares], prefills)


class EntitlementState(Record, frozen=True, kw_only=True):
    """Which entitlements of a model a capacity holds. Tuples are by pool."""

    bound_until: tuple[int, ...]
    """`created` of the newest reserving entitlement that fits a pool with all older ones."""
    newest_bound: int
    """`created` of the newest one that fits wherever it reserves; 0 for none."""
    unbound: int
    """Reserving entitlements in force that do not fit in at least one of their pools."""
    mean_slo_ms: float
    """Mean over entitlements that state an SLO, without unbound ones; 0 when none does."""
    next_expiry_unix_s: float
    """When the next entitlement expires, which makes this outdated; infinity for never."""


class _Reserves:
    """Reserves added oldest first; a pool that cannot hold one is closed to all newer ones."""

    def __init__(self, capacity: Capacity) -> None:
        pools = len(capacity.slots)
        self.capacity = capacity
        self.sequences = [0] * pools
        self.bound_until = [UNLIMITED] * pools
        self._kv_bytes = [0.0] * pools
        self._tokens_per_s = [0.0] * pools

    def add(self, e: Entitlement) -> bool:
        """Reserve in each pool where it fits; True when it fits in all pools of its baseline.

        KV and token rate have to fit in the model's total or, after workers were lost, each
        pool's part of them has to fit in that pool.
        """
        whole, total = self.capacity, sum(e.baseline)
        kv_bytes, tokens_per_s = whole.total_kv_bytes, whole.tokens_per_s
        rates = whole.pool_tokens_per_s
        fits_over_all = (not kv_bytes or sum(self._kv_bytes) + e.kv_bytes <= kv_bytes) and (
            not tokens_per_s or sum(self._tokens_per_s) + e.tokens_per_s <= tokens_per_s
        )
        everywhere = True
        for pool, baseline in enumerate(e.baseline[: len(self.sequences)]):
            if not baseline:
                continue
            kv = self._kv_bytes[pool] + e.kv_bytes * baseline / total
            rate = self._tokens_per_s[pool] + e.tokens_per_s * baseline / total
            sequences = self.sequences[pool] + baseline
            fits_here = (not kv_bytes or kv <= whole.kv_bytes[pool]) and (
                not tokens_per_s or (bool(rates) and rate <= rates[pool])
            )
            closed = self.bound_until[pool] != UNLIMITED or sequences > whole.slots[pool]
            if closed or not (fits_over_all or fits_here):
                self.bound_until[pool] = min(self.bound_until[pool], e.created - 1)
                everywhere = False
            else:
                self.sequences[pool] = sequences
                self._kv_bytes[pool], self._tokens_per_s[pool] = kv, rate
        return everywhere


def assess_capacity(
    entitlements: Iterable[Entitlement],
    capacity: Capacity,
    now_s: float,
) -> Iterator[EntitlementState | None]:
    """Bind reserves oldest first; yields None between slices and the EntitlementState at the end.

    `entitlements` come in order of creation. In each pool the first reserving entitlement that
    does not fit and all newer ones stay unbound.
    """
    reserves = _Reserves(capacity)
    newest_bound = unbound = 0
    slo_ms, slo_count = 0, 0
    next_expiry_s = inf
    for number, e in enumerate(entitlements, start=1):
        if number % ASSESS_SLICE == 0:
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
    yield EntitlementState(
        bound_until=tuple(reserves.bound_until),
        newest_bound=newest_bound,
        unbound=unbound,
        mean_slo_ms=slo_ms / slo_count if slo_count else 0.0,
        next_expiry_unix_s=next_expiry_s,
    )


def desired_replicas(
    demand_sequences: float, slots_per_worker: int, replicas: tuple[int, int]
) -> int:
    """Workers needed for a demand at TARGET_USE, within `replicas` (fewest, most).

    The demand is in sequences, whichever resource binds (`Demand.binding_sequences`).
    """
    wanted = ceil(demand_sequences / TARGET_USE / max(1, slots_per_worker))
    return min(max(wanted, replicas[0]), replicas[1])


class Demand(Record, frozen=True, kw_only=True):
    """What a pool is asked for of the three resources that a worker adds."""

    sequences: float
    kv_bytes: float = 0.0
    tokens_per_s: float = 0.0

    def binding_sequences(self, share: WorkerShare, worker_kv_bytes: float) -> float:
        """The slots of as many workers as the resource needs that runs out first.

        `worker_kv_bytes` 0 and a share without a token rate: that resource is not enforced.
        """
        workers = self.sequences / max(1, share.slots)
        if worker_kv_bytes > 0:
            workers = max(workers, self.kv_bytes / worker_kv_bytes)
        if share.tokens_per_s > 0:
            workers = max(workers, self.tokens_per_s / share.tokens_per_s)
        return workers * max(1, share.slots)


NO_DEMAND: Final = Demand(sequences=0.0)


class ReplicaGoal:
    """Desired replicas of one pool: raised with the mean demand, lowered after a cooldown of less.

    They rise when the mean takes more than RAISE_USE of their capacity, or when it needs two more
    of them. They fall to what the highest mean within the cooldown needs.
    """

    def __init__(self) -> None:
        self._replicas = 0
        self._samples: deque[tuple[float, float, float]] = deque()
        """(when, seconds since the one before, demand) within MEAN_S."""
        self._peaks: deque[tuple[float, float]] = deque()
        """(when, mean demand), descending in demand; the last entry is the current mean."""

    def desired(self, demand: float, share: WorkerShare, now_s: float) -> int:
        """Record the current demand, in sequences; returns the desired replicas."""
        passed_s = now_s - self._samples[-1][0] if self._samples else 0.0
        self._samples.append((now_s, passed_s, demand))
        while len(self._samples) > 1 and self._samples[0][0] <= now_s - MEAN_S:
            self._samples.popleft()
        # The mean over MEAN_S, each sample weighted by the time since the one before.
        mean, total_s = demand, sum(seconds for _, seconds, _ in self._samples)
        if total_s:
            mean = sum(seconds * each for _, seconds, each in self._samples) / total_s
        while self._peaks and self._peaks[-1][1] <= mean:
            self._peaks.pop()
        self._peaks.append((now_s, mean))
        while len(self._peaks) > 1 and self._peaks[0][0] <= now_s - share.cooldown_s:
            self._peaks.popleft()
        wanted = desired_replicas(mean, share.slots, share.replicas)
        full = mean > RAISE_USE * self._replicas * share.slots
        if wanted > self._replicas + (not full):
            self._replicas = wanted
        fewest, most = share.replicas
        highest = desired_replicas(self._peaks[0][1], share.slots, share.replicas)
        self._replicas = min(max(min(self._replicas, highest), fewest), most)
        return self._replicas
