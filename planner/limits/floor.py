"""The capacity that reserved baselines promise, whatever the demand: a floor under every fleet."""

from math import ceil

import msgspec

from planner.records import FleetPlan, PoolPlan, Question, Reserved


def floored(fleet: FleetPlan, question: Question) -> FleetPlan:
    """The fleet with as many more nodes as its reserves need, in the pool where they are cheapest.

    The gateway splits a reserve over pools by their slots, so the fleet's slots count in all. One
    slot more stays free, which is the gateway's default headroom.
    """
    reserved = question.reserved
    if reserved is None or not fleet.pools:
        return fleet
    pools = list(fleet.pools)
    at = min(range(len(pools)), key=lambda i: _price(pools[i]) / pools[i].slots_per_node)
    more = max(_missing_slots(pools, reserved, at), _missing_kv(pools, reserved, at))
    if more <= 0:
        return fleet
    pools[at] = _larger(pools[at], more)
    return msgspec.structs.replace(fleet, pools=tuple(pools), floor_nodes=more)


def _missing_slots(pools: list[PoolPlan], reserved: Reserved, at: int) -> int:
    slots = sum(pool.serving_nodes * pool.slots_per_node for pool in pools)
    return ceil((reserved.sequences + 1 - slots) / pools[at].slots_per_node)


def _missing_kv(pools: list[PoolPlan], reserved: Reserved, at: int) -> int:
    each = pools[at].node
    if not reserved.kv_bytes or not each.kv_bytes_per_token:
        return 0
    held = sum(p.serving_nodes * p.node.kv_tokens * p.node.kv_bytes_per_token for p in pools)
    return ceil((reserved.kv_bytes - held) / (each.kv_tokens * each.kv_bytes_per_token))


def _larger(pool: PoolPlan, more: int) -> PoolPlan:
    """The pool with more nodes; its figures are those of fewer, and so on the safe side."""
    serving = pool.serving_nodes + more
    return msgspec.structs.replace(
        pool,
        nodes=pool.nodes + more,
        serving_nodes=serving,
        utilisation=pool.utilisation * pool.serving_nodes / serving,
    )


def _price(pool: PoolPlan) -> float:
    return pool.node.usd_per_node_hour or 1.0
