"""Further effects of two pools: latency at equal node counts; requested against used limits."""

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from planner.profile import NodeProfile
from planner.records import AskedLimits, EqualNodes, FleetPlan, Question
from planner.search import loads_of, pool_loads, size
from planner.sizing import Loads, columns, paged_slots, run_with
from planner.workload.moments import Prepared, prepare
from planner.workload.workload import Workload, from_lengths

_MAX_SHARES: Final = 512


def equal_nodes(
    question: Question, prepared: Prepared, single: FleetPlan, two: FleetPlan
) -> EqualNodes | None:
    """Latency of one pool and of two with the same total nodes, split to equal utilisation.

    None unless the fleet has two pools of the single pool's kind of node.
    """
    if len(two.pools) != 2 or not single.pools:
        return None
    alone = single.pools[0]
    node, total = alone.node, alone.serving_nodes
    if any(pool.node != node for pool in two.pools) or total < 2:
        return None
    b_short = two.boundaries[0]
    shares = np.unique(np.linspace(1, total - 1, min(total - 1, _MAX_SHARES)).round())
    short = _pool(question, prepared, node, b_short, shares.size, long=False)
    long = _pool(question, prepared, node, b_short, shares.size, long=True)
    first, second = run_with(short, node, shares), run_with(long, node, total - shares)
    best = int(np.maximum(first.utilisation, second.utilisation).argmin())
    prefill_s = float(short.chunks_p99[0] + 1) * alone.step_s
    prefill_s += node.prompt_s(float(short.prompt_p99_tokens[0]))
    return EqualNodes(
        nodes=total,
        b_short=b_short,
        one_short_ttft_s=alone.wait_p99_s + prefill_s,
        one_ttft_s=alone.ttft_p99_s,
        one_tpot_s=alone.tpot_p99_s,
        short_nodes=int(shares[best]),
        short_ttft_s=float(first.ttft_p99_s[best]),
        short_tpot_s=float(first.tpot_p99_s[best]),
        long_nodes=int(total - shares[best]),
        long_ttft_s=float(second.ttft_p99_s[best]),
        long_tpot_s=float(second.tpot_p99_s[best]),
    )


def _pool(
    question: Question,
    prepared: Prepared,
    node: NodeProfile,
    b_short: int,
    times: int,
    *,
    long: bool,
) -> Loads:
    """The loads of one pool at a boundary without compression, repeated `times` times."""
    loads = pool_loads(
        prepared,
        "paged",
        node,
        question.window,
        question.goals.rate_per_s,
        question.p_c,
        long=long,
    )
    at = np.full(times, prepared.boundaries.index(b_short) * len(prepared.gammas))
    return columns(loads, at)


def asked_against_used(question: Question, fleet: FleetPlan) -> AskedLimits | None:
    """Compare routing by requested limits with routing by tokens used, at one boundary.

    None if the workload has no requested limits. A request without a limit counts as asking for the
    rest of the window.
    """
    workload = question.workload
    pairs, asked = workload.pairs, workload.asked
    if pairs is None or asked is None or len(fleet.pools) != 2:
        return None
    limited = np.isfinite(asked)
    limits = np.where(limited, asked, question.window - pairs.prompts)
    boundary = fleet.boundaries[0]
    by_asked, by_used = pairs.prompts + limits <= boundary, pairs.totals <= boundary
    mass = pairs.weights
    known = float(mass[limited].sum())
    return AskedLimits(
        asked_mean_tokens=float(limits[limited] @ mass[limited]) / known if known else 0.0,
        used_mean_tokens=float(pairs.answers @ mass),
        unlimited_share=1 - known,
        short_share_asked=float(mass[by_asked].sum()),
        short_share_used=float(mass[by_used].sum()),
        nodes_asked=_nodes_routed(question, fleet, by_asked),
        nodes_used=_nodes_routed(question, fleet, by_used),
    )


def _nodes_routed(question: Question, fleet: FleetPlan, short: NDArray[np.bool_]) -> int | None:
    """Nodes of both pools if `short` requests go to the short pool, the others to the long one."""
    total = 0
    for pool, members in zip(fleet.pools, (short, ~short), strict=True):
        part = _part(question.workload, members)
        if part is None:
            continue
        workload, share = part
        sums = prepare(workload, boundaries=(), chunk_tokens=pool.node.chunk_tokens)
        whole, counted = sums.whole[:, None], sums.prompts_whole[:, None]
        rate = np.array([question.goals.rate_per_s * share])
        slots = (
            paged_slots(whole, pool.node)
            if question.mode == "paged"
            else float(pool.node.window_slots(pool.window_tokens))
        )
        loads = loads_of(sums, whole, counted, rate, slots)
        sized = size(question.mode, loads, pool.node, question.goals)
        nodes = question.goals.installed(sized.nodes)[0]
        if not np.isfinite(nodes):
            return None
        total += int(nodes)
    return total


def _part(workload: Workload, members: NDArray[np.bool_]) -> tuple[Workload, float] | None:
    pairs = workload.pairs
    if pairs is None or not members.any():
        return None
    weights = pairs.weights[members]
    part = from_lengths(pairs.prompts[members], pairs.answers[members], weights=weights)
    return msgspec.structs.replace(part, name=workload.name), float(weights.sum())
