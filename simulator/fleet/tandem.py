"""A pool in phases without the gateway: what prefill ends, decode gets; nothing feeds back.

So prefill is run to its end first, and decode on the arrivals that follow from it. Links are never
full: each hand-over takes its own time.
"""

from collections.abc import Callable

import msgspec
import numpy as np

from simulator.fleet.fleet import simulate
from simulator.fleet.outcome import FleetOutcome
from simulator.fleet.spec import FleetSpec, PoolSpec
from simulator.fleet.traffic import Traffic


def simulate_pool(
    spec: FleetSpec,
    traffic: Traffic,
    *,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> FleetOutcome:
    """Run a fleet of one pool, in phases if it has a prefill side.

    In phases, `start_s` is decode's, and requests keep the order in which they came.
    """
    (pool,) = spec.pools
    prefill = pool.prefill
    if prefill is None:
        return simulate(spec, traffic, seed=seed, progress=progress)
    side = PoolSpec(name=pool.name, instances=prefill.instances, profile=prefill.profile)
    prompts = msgspec.structs.replace(traffic, output_tokens=np.ones_like(traffic.output_tokens))
    first = simulate(
        msgspec.structs.replace(spec, pools=(side,)), prompts, seed=seed, progress=progress
    )
    ready_s = first.first_s + prefill.transfer_s_per_token * traffic.prompt_tokens
    order = np.argsort(ready_s, kind="stable")
    handed = Traffic(
        arrival_s=ready_s[order],
        prompt_tokens=traffic.prompt_tokens[order],
        output_tokens=traffic.output_tokens[order],
    )
    second = simulate(spec, handed, seed=seed)
    back = np.argsort(order)
    columns = (
        *("start_s", "first_s", "end_s", "prompt_tokens", "output_tokens", "compressed"),
        *("planned", "pool", "worker", "status"),
    )
    found = {name: getattr(second, name)[back] for name in columns}
    return msgspec.structs.replace(second, arrival_s=traffic.arrival_s, **found)
