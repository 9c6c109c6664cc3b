"""The sweep over B x gamma, and each pool's load at every cell."""

from typing import Final, Literal

import msgspec
import numpy as np

from planner.goals import Goals
from planner.profile import NodeProfile
from planner.sizing import Loads, Sized, paged_slots, size_full, size_running
from planner.workload.moments import MASS, ROWS, Prepared
from planner.workload.workload import Floats

Mode = Literal["paper", "exact", "mix", "corrected", "paged"]
"""`mix` is `exact`, but each compressed request counts in the pool that serves it."""

_TAIL: Final = 0.99
_ROUNDING: Final = 1e-9
_MIN_RATE: Final = 0.01
"""Requests per second below which a long pool gets no node (exact)."""


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """Both pools at every boundary and gamma; arrays are (B, gamma)."""

    prepared: Prepared
    short: Sized
    long: Sized
    short_loads: Loads
    long_loads: Loads
    cost: Floats
    """$ per hour; infinite if the goals cannot be met."""


def loads_of(
    prepared: Prepared, sums: Floats, counted: Floats, rate: Floats, slots: Floats | float
) -> Loads:
    """Loads of pools; `counted` are requests by prompt length, cumulative over the levels."""
    # A difference of prefix sums leaves rounding errors where there are no requests.
    sums = np.where(sums[MASS] > _ROUNDING, np.maximum(sums, 0.0), 0.0)
    total = sums[MASS]
    below = (counted < _TAIL * total - 1e-15).sum(axis=0)
    prompt = np.asarray(prepared.levels[np.minimum(below, prepared.levels.size - 1)])
    return Loads(
        sums=sums,
        rate_per_s=np.maximum(rate, 0.0),
        prompt_p99_tokens=prompt,
        chunks_p99=np.ceil(prompt / prepared.chunk_tokens - 1e-9),
        slots=np.broadcast_to(np.asarray(slots, dtype=np.float64), total.shape),
    )


def pool_loads(
    prepared: Prepared,
    mode: Mode,
    profile: NodeProfile,
    window_tokens: int,
    rate: float,
    compressible: float,
    *,
    long: bool,
) -> Loads:
    """Loads of the short or the long pool at every boundary and gamma, flattened."""
    p = prepared
    wide = (slice(None), slice(None), None)
    shape = p.reached.shape[1:]
    whole, all_counted = p.whole[:, None, None], p.prompts_whole[:, None, None]
    if mode == "exact":
        # Compressed requests count in the rate but in no mix, as published.
        share = p.below[MASS][:, None]
        share = share + compressible * (p.reached[MASS] - share)
        sums = whole - p.reached if long else p.below[wide]
        counted = all_counted - p.prompts_reached if long else p.prompts_below[wide]
    else:
        sums = p.below[wide] + compressible * (p.before if long else p.after)
        counted = p.prompts_below[wide] + compressible * (
            p.prompts_before if long else p.prompts_after
        )
        if long:
            sums, counted = whole - sums, all_counted - counted
        share = p.below[MASS][:, None] + compressible * p.before[MASS]
    flat = np.broadcast_to(sums, (ROWS, *shape)).reshape(ROWS, -1)
    counted = np.broadcast_to(counted, (p.levels.size, *shape)).reshape(p.levels.size, -1)
    rates = (rate * ((1 - share) if long else share)).ravel()
    rates = np.where(rates <= (_MIN_RATE if mode == "exact" else _ROUNDING * rate), 0.0, rates)
    slots: Floats | float
    if mode == "paged":
        slots = paged_slots(flat, profile)
    elif long:
        slots = float(profile.window_slots(window_tokens))
    else:
        slots = np.repeat([float(profile.window_slots(b)) for b in p.boundaries], shape[1])
    return loads_of(p, flat, counted, rates, slots)


def sweep(
    mode: Mode,
    goals: Goals,
    *,
    short: tuple[Prepared, NodeProfile],
    long: tuple[Prepared, NodeProfile],
    window_tokens: int,
    compressible: float = 1.0,
) -> Grid:
    """Size both pools at every boundary and gamma, each on its own kind of node."""
    rate = goals.rate_per_s
    first = pool_loads(*_order(short, mode), window_tokens, rate, compressible, long=False)
    second = pool_loads(*_order(long, mode), window_tokens, rate, compressible, long=True)
    shorts = size(mode, first, short[1], goals)
    longs = size(mode, second, long[1], goals)
    if mode in {"corrected", "paged"}:
        # Compression may fail: requests above the boundary keep a pool that can hold them.
        nodes = np.where(second.rate_per_s > 0, longs.nodes, float(goals.least_nodes))
        longs = msgspec.structs.replace(longs, nodes=nodes)
    cost = goals.installed(shorts.nodes) * price(short[1])
    cost = cost + goals.installed(longs.nodes) * price(long[1])
    # Not feasible: no lengths left to calibrate with, or a window larger than the KV cache.
    lost = (second.rate_per_s > 0) & (second.sums[MASS] <= _ROUNDING)
    cost[lost | (first.slots < 1) | (second.slots < 1)] = np.inf
    return Grid(
        prepared=short[0],
        short=shorts,
        long=longs,
        short_loads=first,
        long_loads=second,
        cost=cost.reshape(short[0].reached.shape[1:]),
    )


def size(mode: Mode, loads: Loads, profile: NodeProfile, goals: Goals) -> Sized:
    """Size pools by the mode's model of an iteration."""
    return (size_full if mode in {"exact", "mix"} else size_running)(loads, profile, goals)


def price(profile: NodeProfile) -> float:
    """$ per node-hour; 1 if no price is known, so that nodes are counted."""
    return profile.usd_per_node_hour or 1.0


def _order(pool: tuple[Prepared, NodeProfile], mode: Mode) -> tuple[Prepared, Mode, NodeProfile]:
    return pool[0], mode, pool[1]
