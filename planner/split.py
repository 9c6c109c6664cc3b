"""Split lengths into one to N pools without compression, at least cost.

A pool's cost depends on its range alone, so the best split into k pools is a shortest path:
cost(k, j) = min over i of cost(k - 1, i) + pool(i, j). All ranges are sized at once.
"""

import msgspec
import numpy as np

from planner.goals import Goals
from planner.profile import NodeProfile
from planner.search import Mode, loads_of, price, size
from planner.sizing import Loads, Sized, paged_slots
from planner.workload.moments import Prepared
from planner.workload.workload import Floats


class Ranges(msgspec.Struct, frozen=True, kw_only=True):
    """Pools over every range (low, high] of edges 0, B ..., window; arrays over ranges."""

    edges: tuple[int, ...]
    low: tuple[int, ...]
    """Index of the lower edge."""
    high: tuple[int, ...]
    loads: Loads
    sized: Sized
    cost: Floats
    """$ per hour."""


def size_ranges(
    prepared: Prepared,
    profile: NodeProfile,
    mode: Mode,
    goals: Goals,
    window_tokens: int,
    *,
    only_whole: bool = False,
) -> Ranges:
    """Size every range of lengths as a pool of its own, or only the range of all lengths."""
    p = prepared
    inner = 0 if only_whole else len(p.boundaries)
    edges = (0, *p.boundaries[:inner], window_tokens)
    sums = np.column_stack((np.zeros_like(p.whole), p.below[:, :inner], p.whole))
    counted = np.column_stack(
        (np.zeros_like(p.prompts_whole), p.prompts_below[:, :inner], p.prompts_whole)
    )
    low, high = np.triu_indices(len(edges), 1)
    inside = sums[:, high] - sums[:, low]
    slots: Floats
    if mode == "paged":
        slots = paged_slots(inside, profile)
    else:
        slots = np.array([float(profile.window_slots(edge)) for edge in edges[1:]])[high - 1]
    rate = goals.rate_per_s * inside[0]
    rate = np.where(rate <= 1e-9 * goals.rate_per_s, 0.0, rate)
    loads = loads_of(p, inside, counted[:, high] - counted[:, low], rate, slots)
    sized = size(mode, loads, profile, goals)
    cost = goals.installed(sized.nodes) * price(profile)
    cost[(loads.slots < 1) | (rate <= 0)] = np.inf
    return Ranges(
        edges=edges,
        low=tuple(map(int, low)),
        high=tuple(map(int, high)),
        loads=loads,
        sized=sized,
        cost=cost,
    )


def cheapest_splits(choices: list[Ranges], most_pools: int) -> dict[int, list[tuple[int, int]]]:
    """For each number of pools, the best (choice, range) of every pool, by ascending length.

    `choices` are the kinds of node; all have the same edges. Splits that are not feasible are left
    out.
    """
    first = choices[0]
    costs = np.array([ranges.cost for ranges in choices])
    kind = costs.argmin(axis=0)
    cost = {
        (low, high): (float(costs[kind[i], i]), (int(kind[i]), i))
        for i, (low, high) in enumerate(zip(first.low, first.high, strict=True))
    }
    last = len(first.edges) - 1
    best: dict[tuple[int, int], tuple[float, list[tuple[int, int]]]] = {(0, 0): (0.0, [])}
    for pools in range(1, min(most_pools, last) + 1):
        for high in range(pools, last + 1):
            variants = [
                (best[pools - 1, low][0] + cost[low, high][0], low)
                for low in range(pools - 1, high)
                if (pools - 1, low) in best
            ]
            total, low = min(variants, default=(np.inf, 0))
            if np.isfinite(total):
                before = best[pools - 1, low][1]
                best[pools, high] = (total, [*before, cost[low, high][1]])
    return {k: best[k, last][1] for k in range(1, most_pools + 1) if (k, last) in best}


def whole_range(ranges: Ranges) -> int:
    """Index of the range of all lengths."""
    return len(ranges.edges) - 2
