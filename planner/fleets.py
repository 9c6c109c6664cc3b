"""Turn sized pools into fleets: names, windows, whole numbers of nodes."""

from collections.abc import Sequence

import numpy as np

from planner.goals import Goals
from planner.profile import NodeProfile
from planner.records import FleetPlan, PoolPlan, Question
from planner.search import Grid
from planner.sizing import Loads, Sized
from planner.split import Ranges
from planner.workload.moments import Prepared


def pool_names(count: int) -> tuple[str, ...]:
    """Names by number of pools: all; short, long; short, middle, long; and so on."""
    if count == 1:
        return ("all",)
    middles = ("middle",) if count == 3 else tuple(f"middle-{i + 1}" for i in range(count - 2))
    return ("short", *middles, "long")


def pool_of(
    name: str,
    window: int,
    boundary: int | None,
    node: NodeProfile,
    loads: Loads,
    sized: Sized,
    index: int,
    goals: Goals,
) -> PoolPlan | None:
    """One pool of the arrays; None if it gets no requests or is not feasible."""
    serving = float(sized.nodes[index])
    if serving <= 0 or not np.isfinite(serving):
        return None
    return PoolPlan(
        name=name,
        window_tokens=window,
        boundary_tokens=boundary,
        node=node,
        nodes=int(goals.installed(sized.nodes[index : index + 1])[0]),
        serving_nodes=int(serving),
        slots_per_node=int(loads.slots[index]),
        rate_per_s=float(loads.rate_per_s[index]),
        utilisation=float(sized.utilisation[index]),
        step_s=float(sized.step_s[index]),
        wait_p99_s=float(sized.wait_p99_s[index]),
        ttft_p99_s=float(sized.ttft_p99_s[index]),
        tpot_p99_s=float(sized.tpot_p99_s[index]),
    )


def from_ranges(
    label: str,
    choices: Sequence[Ranges],
    nodes: Sequence[NodeProfile],
    picked: list[tuple[int, int]],
    goals: Goals,
) -> FleetPlan:
    """Build a fleet from a split of `cheapest_splits`."""
    pools = []
    for name, (kind, index) in zip(pool_names(len(picked)), picked, strict=True):
        ranges = choices[kind]
        upper = ranges.edges[ranges.high[index]]
        last = upper == ranges.edges[-1]
        pool = pool_of(
            name,
            upper,
            None if last else upper,
            nodes[kind],
            ranges.loads,
            ranges.sized,
            index,
            goals,
        )
        if pool is None:
            return FleetPlan(label=label)
        pools.append(pool)
    return FleetPlan(label=label, pools=tuple(pools))


def from_grid(
    label: str,
    grid: Grid,
    cell: tuple[int, int],
    question: Question,
    nodes: tuple[NodeProfile, NodeProfile],
) -> FleetPlan:
    """Build a fleet from one cell of a sweep; a long pool without requests is left out."""
    prepared: Prepared = grid.prepared
    if not np.isfinite(grid.cost[cell]):
        return FleetPlan(label=label, gamma=prepared.gammas[cell[1]])
    index = cell[0] * len(prepared.gammas) + cell[1]
    b_short, goals = prepared.boundaries[cell[0]], question.goals
    short = pool_of("short", b_short, b_short, nodes[0], grid.short_loads, grid.short, index, goals)
    long = pool_of(
        "long", question.window, None, nodes[1], grid.long_loads, grid.long, index, goals
    )
    return FleetPlan(
        label=label,
        pools=tuple(pool for pool in (short, long) if pool is not None),
        gamma=prepared.gammas[cell[1]],
    )
