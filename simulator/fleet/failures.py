"""Outages of instances."""

from collections.abc import Sequence
from math import inf

import msgspec

from simulator.fleet.spec import FleetSpec
from simulator.fleet.traffic import Random


class Outage(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that is away from `down_s` until `up_s` (infinite: for good)."""

    pool: int
    worker: int
    down_s: float
    up_s: float = inf


def outages(
    spec: FleetSpec, horizon_s: float, *, mtbf_s: float, repair_s: float, random: Random
) -> list[Outage]:
    """Independent failures: up and down times exponential, means in seconds, both > 0."""
    if not (mtbf_s > 0 and repair_s > 0):
        raise ValueError("time between failures and repair time must be above 0")
    found = []
    for p, pool in enumerate(spec.pools):
        for worker in range(pool.instances):
            down_s = random.exponential(mtbf_s)
            while down_s < horizon_s:
                up_s = down_s + random.exponential(repair_s)
                found.append(Outage(pool=p, worker=worker, down_s=down_s, up_s=up_s))
                down_s = up_s + random.exponential(mtbf_s)
    return found


def changes_of(failures: Sequence[Outage]) -> list[tuple[float, int, int, bool]]:
    """(time, pool, worker, up) in order; at the same time, repairs precede failures."""
    downs = [(o.down_s, o.pool, o.worker, False) for o in failures]
    ups = [(o.up_s, o.pool, o.worker, True) for o in failures if o.up_s < inf]
    return sorted([*downs, *ups], key=lambda c: (c[0], not c[3], c[1], c[2]))
