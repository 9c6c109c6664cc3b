"""The gateway's routing for a simulated fleet, and compression's effect on lengths.

Every request is planned by `gateway.routing.routing` with an exact estimate and its answer's
length as limit, so that prompt + limit is its total. A plan depends on the total alone, so each
distinct total is planned once.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from gateway.errors import ContextLengthExceeded
from gateway.records.estimate import LengthEstimate, Plan
from gateway.routing.routing import Routing, plan_pool
from simulator.fleet.traffic import Ints, Random

REFUSED = -1


class RoutedTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """The pool of each request, and its lengths."""

    pool: Ints
    """Index of the planned pool; REFUSED if no window fits."""
    alternates: Sequence[tuple[int, ...]]
    """Pools that each request may spill into, best first."""
    prompt_tokens: Ints
    """Prompt tokens after compression."""
    compressed: NDArray[np.bool_]


def route(
    routing: Routing,
    prompts: Ints,
    outputs: Ints,
    *,
    gamma: float = 1.0,
    compressible: float = 1.0,
    max_cut: float = 1.0,
    random: Random,
) -> RoutedTraffic:
    """Plan all requests; those a little above a boundary may be compressed below it first.

    The compression window is boundary < L <= int(gamma boundary), gamma >= 1. A share
    `compressible` (p_c) of its requests is compressed: L_in becomes boundary - L_out, if that
    leaves a prompt and removes at most a share `max_cut` of it (FleetOpt, sections 2.3 and 5.1).
    """
    if not gamma >= 1 or not 0 <= compressible <= 1:
        raise ValueError("gamma must be at least 1 and p_c between 0 and 1")
    lucky = random.random(len(prompts)) < compressible if gamma > 1 else None
    shorter, compressed = _compress(routing, prompts, outputs, gamma, max_cut, lucky)
    totals, where = np.unique(shorter + outputs, return_inverse=True)
    plans = [_plan(routing, int(total)) for total in totals]
    pools = np.array([REFUSED if plan is None else plan.pool for plan in plans], dtype=np.int64)
    others = [() if plan is None else plan.alternates for plan in plans]
    return RoutedTraffic(
        pool=pools[where],
        alternates=[others[i] for i in where.tolist()] if any(others) else [()] * len(where),
        prompt_tokens=shorter,
        compressed=compressed,
    )


def _compress(
    routing: Routing,
    prompts: Ints,
    outputs: Ints,
    gamma: float,
    max_cut: float,
    lucky: NDArray[np.bool_] | None,
) -> tuple[Ints, NDArray[np.bool_]]:
    """`lucky` marks requests that can be compressed; None for no compression at all."""
    totals = prompts + outputs
    shorter, done = prompts.copy(), np.zeros(len(prompts), dtype=np.bool_)
    if lucky is None:
        return shorter, done
    for pool in routing.pools[:-1]:
        boundary = pool.boundary_tokens
        if boundary is None:
            continue
        priority_class = (totals > boundary) & (totals <= int(gamma * boundary)) & ~done
        priority_class &= lucky & (outputs < boundary) & (totals - boundary <= max_cut * prompts)
        shorter[priority_class] = boundary - outputs[priority_class]
        done |= priority_class
    return shorter, done


def _plan(routing: Routing, total: int) -> Plan | None:
    estimate = LengthEstimate(
        category="prose",
        text_bytes=0,
        ratio=1.0,
        ratio_conservative=1.0,
        template_tokens=0,
        input_tokens=total - 1,
        input_tokens_total=total - 1,
        input_tokens_lowest=total - 1,
        cap_tokens=1,
        expected_output_tokens=1,
        output_tokens=1,
        fit_tokens=total,
        cost_tokens=total,
        sequences=1,
    )
    try:
        return plan_pool(routing, estimate)
    except ContextLengthExceeded:
        return None
