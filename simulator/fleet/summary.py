"""Figures of a simulated fleet: each pool, the whole, and time series for plots."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from simulator.fleet.fleet import FleetSpec, PoolSpec
from simulator.fleet.outcome import (
    BROKEN,
    DONE,
    HORIZON_SERVICES,
    REFUSED_BY_GATE,
    REFUSED_LENGTH,
    UNAVAILABLE,
    WARM_UP,
    FleetOutcome,
    PoolSummary,
    busy_s,
    present,
    tail,
)
from simulator.fleet.statistics import drifts
from simulator.fleet.traffic import Floats


class FleetSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of a run; the pools' figures are after the warm-up."""

    pools: tuple[PoolSummary, ...]
    whole: PoolSummary
    requests: int
    """Requests of the whole run, as are the following counts."""
    served: int
    refused_length: int
    refused: int
    unavailable: int
    broken: int
    retried: int
    spilled: int
    compressed: int
    duration_s: float
    """Seconds to the last arrival."""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One pool over time; arrays of one length."""

    name: str
    at_s: Floats
    """Ends of equal steps from the start to the last arrival."""
    utilisation: Floats
    """Share of its slots in use at that time."""
    waiting: Floats
    """Sequences in its queues at that time."""
    ttft_p50_s: Floats
    """P50 TTFT of arrivals within the step; NaN if there are none."""
    ttft_p99_s: Floats


def summarise(spec: FleetSpec, outcome: FleetOutcome, warm_up: float = WARM_UP) -> FleetSummary:
    """Figures of a run; `warm_up` is the share left out, at least WARM_UP."""
    window_s = outcome.window_s(warm_up)
    pools = tuple(_pool(spec, p, outcome, window_s) for p in range(len(spec.pools)))
    status = outcome.status
    taken = outcome.pool >= 0
    return FleetSummary(
        pools=pools,
        whole=_whole(spec, outcome, window_s),
        requests=len(outcome),
        served=int((status == DONE).sum()),
        refused_length=int((status == REFUSED_LENGTH).sum()),
        refused=int((status == REFUSED_BY_GATE).sum()),
        unavailable=int((status == UNAVAILABLE).sum()),
        broken=int((status == BROKEN).sum()),
        retried=outcome.retried,
        spilled=int((taken & (outcome.pool != outcome.planned)).sum()),
        compressed=int(outcome.compressed.sum()),
        duration_s=float(outcome.arrival_s[-1]),
    )


def series(spec: FleetSpec, outcome: FleetOutcome, steps: int = 200) -> tuple[Series, ...]:
    """Time series of each pool over the whole run, warm-up included."""
    last_s = float(outcome.arrival_s[-1])
    edges = np.linspace(0.0, last_s, steps + 1)
    at_s = edges[1:]
    found = []
    for p, pool in enumerate(spec.pools):
        mine = outcome.pool == p
        start_s, end_s, arrival_s = (
            outcome.start_s[mine],
            outcome.end_s[mine],
            outcome.arrival_s[mine],
        )
        slots = pool.instances * pool.profile.max_num_seqs
        p50, p99 = _by_step(outcome.ttft_s[mine], np.searchsorted(arrival_s, edges))
        found.append(
            Series(
                name=pool.name,
                at_s=at_s,
                utilisation=present(start_s, end_s, at_s) / slots,
                waiting=present(arrival_s, start_s, at_s).astype(np.float64),
                ttft_p50_s=p50,
                ttft_p99_s=p99,
            )
        )
    return tuple(found)


def _pool(
    spec: FleetSpec, p: int, outcome: FleetOutcome, window_s: tuple[float, float]
) -> PoolSummary:
    pool, mine = spec.pools[p], outcome.pool == p
    size = _Size(
        name=pool.name,
        instances=pool.instances,
        slots=pool.profile.max_num_seqs,
        all_slots=_slots(pool),
        all_kv_tokens=_kv_tokens(pool),
        preemptions=outcome.preemptions[p],
    )
    return _figures(size, outcome, mine, window_s)


def _whole(spec: FleetSpec, outcome: FleetOutcome, window_s: tuple[float, float]) -> PoolSummary:
    slots = {pool.profile.max_num_seqs for pool in spec.pools}
    size = _Size(
        name="",
        instances=sum(pool.instances for pool in spec.pools),
        slots=slots.pop() if len(slots) == 1 else 0,
        all_slots=sum(_slots(pool) for pool in spec.pools),
        all_kv_tokens=sum(_kv_tokens(pool) for pool in spec.pools),
        preemptions=sum(outcome.preemptions),
    )
    return _figures(size, outcome, outcome.pool >= 0, window_s)


class _Size(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    instances: int
    slots: int
    all_slots: int
    all_kv_tokens: int
    preemptions: int


def _slots(pool: PoolSpec) -> int:
    return pool.instances * pool.profile.max_num_seqs


def _kv_tokens(pool: PoolSpec) -> int:
    return pool.instances * pool.profile.kv_blocks * pool.profile.block_tokens


def _figures(
    size: _Size, outcome: FleetOutcome, mine: NDArray[np.bool_], window_s: tuple[float, float]
) -> PoolSummary:
    """Times are of requests that arrived within the window, utilisation is of the window itself."""
    low_s, high_s = window_s
    span_s = max(high_s - low_s, 1e-12)
    served = mine & (outcome.status == DONE)
    arrived = served & (outcome.arrival_s >= low_s)
    start_s, end_s = outcome.start_s[mine], outcome.end_s[mine]
    service_s = busy_s(start_s, end_s, window_s)
    tokens = (outcome.prompt_tokens + outcome.output_tokens)[mine]
    ended = (outcome.status[mine] == DONE) & (end_s > low_s) & (end_s <= high_s)
    wait_s = outcome.wait_s[arrived]
    longest_s = float(np.nanmax(end_s - start_s, initial=0.0))
    return PoolSummary(
        name=size.name,
        instances=size.instances,
        slots=size.slots,
        requests=int(arrived.sum()),
        rate_per_s=float(arrived.sum()) / span_s,
        utilisation=float(service_s.sum()) / (span_s * size.all_slots),
        kv_utilisation=float(service_s @ tokens) / (span_s * size.all_kv_tokens),
        running=float(service_s.sum()) / span_s,
        queue=float(busy_s(outcome.arrival_s[mine], start_s, window_s).sum()) / span_s,
        tokens_per_s=float(tokens[ended].sum()) / span_s,
        requests_per_s=float(ended.sum()) / span_s,
        wait=tail(wait_s),
        ttft=tail(outcome.ttft_s[arrived]),
        tpot=tail(outcome.tpot_s[arrived]),
        preemptions=size.preemptions,
        longest_service_s=longest_s,
        drifting=drifts(wait_s[~np.isnan(wait_s)]),
        short_run=high_s < HORIZON_SERVICES * longest_s,
    )


def _by_step(values: Floats, edges: NDArray[np.intp]) -> tuple[Floats, Floats]:
    p50, p99 = np.full(len(edges) - 1, np.nan), np.full(len(edges) - 1, np.nan)
    for step in range(len(edges) - 1):
        inside = values[edges[step] : edges[step + 1]]
        inside = inside[~np.isnan(inside)]
        if len(inside):
            p50[step], p99[step] = np.quantile(inside, (0.5, 0.99))
    return p50, p99
