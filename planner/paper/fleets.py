"""Mode `paper`: fleets from cells that are each calibrated anew, as published."""

from collections.abc import Sequence

import numpy as np

from planner.paper import samples
from planner.paper.samples import Cell, PoolResult
from planner.profile import HOURS_PER_YEAR, NodeProfile
from planner.records import FleetPlan, PoolPlan, Question


def paper_one(question: Question, label: str) -> FleetPlan:
    """A single pool as the paper sizes it."""
    node, cdf = question.nodes[0], question.workload.as_cdf()
    result = samples.homogeneous(
        cdf,
        question.window,
        node,
        question.goals.rate_per_s,
        question.goals.ttft_s,
        question.workload.input_share,
    )
    pool = _pool("all", question.window, None, node, result, question)
    pools = () if pool is None else (pool,)
    return FleetPlan(label=label, pools=pools, billed_per_node=True)


def paper_pairs(
    question: Question,
    boundaries: Sequence[int],
    gammas: Sequence[float],
    labels: tuple[str, str],
) -> tuple[FleetPlan, FleetPlan, list[list[float]]]:
    """Best fleet at gamma 1, best above it, and $ per hour at every boundary and gamma."""
    node, cdf = question.nodes[0], question.workload.as_cdf()

    def fleet(b_short: int, gamma: float) -> FleetPlan:
        cell = samples.two_pools(
            cdf,
            b_short=b_short,
            gamma=gamma,
            compressible=question.p_c,
            window=question.window,
            profile=node,
            rate=question.goals.rate_per_s,
            slo_s=question.goals.ttft_s,
            input_share=question.workload.input_share,
        )
        return _from_cell(labels[gamma > 1], cell, question, node)

    grid = [[fleet(b, gamma) for gamma in gammas] for b in boundaries]
    plain = [fleet(b, 1.0) for b in boundaries]
    squeezed = [row[i] for i, gamma in enumerate(gammas) if gamma > 1 for row in grid]
    two = min(plain, key=lambda fleet: fleet.weight, default=FleetPlan(label=labels[0]))
    compressed = min(squeezed, key=lambda fleet: fleet.weight, default=FleetPlan(label=labels[1]))
    return two, compressed, [[f.weight / HOURS_PER_YEAR for f in row] for row in grid]


def _from_cell(label: str, cell: Cell | None, question: Question, node: NodeProfile) -> FleetPlan:
    """A published cell as a fleet; nodes are billed as in the papers' tables."""
    if cell is None:
        return FleetPlan(label=label)
    short = _pool("short", cell.b_short, cell.b_short, node, cell.short, question)
    long = _pool("long", question.window, None, node, cell.long, question)
    return FleetPlan(
        label=label,
        pools=tuple(pool for pool in (short, long) if pool is not None),
        gamma=cell.gamma,
        billed_per_node=True,
    )


def _pool(
    name: str,
    window: int,
    boundary: int | None,
    node: NodeProfile,
    result: PoolResult,
    question: Question,
) -> PoolPlan | None:
    """One pool of the paper's model; None if it has no nodes."""
    service = result.service
    if service is None:
        return None
    step_s = service.mean_s / service.iterations
    load = result.utilisation * result.nodes
    return PoolPlan(
        name=name,
        window_tokens=window,
        boundary_tokens=boundary,
        node=node,
        nodes=int(question.goals.installed(np.array([float(result.nodes)]))[0]),
        serving_nodes=result.nodes,
        slots_per_node=service.slots,
        rate_per_s=load * service.node_rate_per_s,
        utilisation=result.utilisation,
        step_s=step_s,
        wait_p99_s=result.wait_p99_s,
        ttft_p99_s=result.ttft_s,
        tpot_p99_s=step_s,
    )
