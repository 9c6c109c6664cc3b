"""A model's pools and workers as the admin routes and the dashboard show them."""

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.policy.fleet import fleet, members
from gateway.policy.model_runtime import ModelRuntime
from gateway.ports import PoolView


def describe_fleet(
    served: ModelRuntime, counted: Sequence[PoolView], now_s: float
) -> dict[str, Any]:
    """Pools and workers of a model: windows, load, health and admission's counters."""
    pools = []
    for index, (shape, pool) in enumerate(
        zip(served.routing.pools, served.fleet.pools, strict=True)
    ):
        sound = set(fleet.available(pool, now_s))
        workers = [
            {
                "id": worker,
                "in_rotation": i in sound,
                "up": pool.up[i],
                "not_ready": pool.why_down[i] or None,
                "remark": pool.remarks.get(i),
                "draining": pool.draining[i] or pool.leaving[i],
                "ejected_for_s": max(0.0, pool.ejected_until_s[i] - now_s),
                "active_sequences": pool.active[i],
                "reserved_tokens": pool.tokens[i],
            }
            for i, worker in members.present(pool)
        ]
        pools.append(
            {
                "name": pool.name,
                "max_model_len": shape.window_tokens,
                "beyond_window_tokens": pool.beyond_window_tokens,
                "b_short": shape.boundary_tokens,
                "max_num_seqs": pool.slots_per_worker,
                "inflight": pool.inflight,
                "ready_slots": fleet.ready_slots(pool, now_s),
                "admission": msgspec.structs.asdict(counted[index]) if counted else None,
                "workers": workers,
            }
        )
    return {
        "model": served.name,
        "mode": "observe" if served.routing.observe else "enforce",
        "adapters": served.adapters,
        "pools": pools,
    }
