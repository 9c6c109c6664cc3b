"""What the fleet costs, whether it serves or not: the hours of every worker that is there.

Workers that are down, draining or leaving cost as much as others. Where several replicas serve the
same fleet, each counts its part, so that the parts of all add up to the bill.
"""

from collections.abc import Iterable
from typing import NamedTuple

from gateway.fleet.fleet import PoolState


class PoolBill(NamedTuple):
    """Of one pool, for some stretch of time."""

    model: str
    pool: str
    worker_s: float
    """Time of all its workers."""
    cost_nano: int


class FleetBill:
    """Of the pools that have a price by the hour."""

    def __init__(self, pools: Iterable[tuple[str, PoolState]]) -> None:
        """`pools`: (model, pool)."""
        self._pools: list[tuple[str, PoolState]] = []
        self._at_s: float | None = None
        self._rest_nano: list[float] = []
        """By pool: below one nano-unit, for the next bill."""
        self.follow(pools)

    def follow(self, pools: Iterable[tuple[str, PoolState]]) -> None:
        """Count these pools from now on; what is left of the others is dropped."""
        rests = {id(p): rest for (_, p), rest in zip(self._pools, self._rest_nano, strict=True)}
        self._pools = [(model, pool) for model, pool in pools if pool.slot_clock is not None]
        self._rest_nano = [rests.get(id(pool), 0.0) for _, pool in self._pools]

    def due(self, now_s: float, replicas: int) -> list[PoolBill]:
        """The bill of each pool since the last call; the first call begins to count."""
        at_s, self._at_s = self._at_s, now_s
        if at_s is None or now_s <= at_s:
            return []
        bills = []
        for i, (model, pool) in enumerate(self._pools):
            clock = pool.slot_clock
            if clock is None:
                continue
            worker_s = (now_s - at_s) * sum(pool.present) / max(replicas, 1)
            exact_nano = worker_s * clock.nano_per_s + self._rest_nano[i]
            cost_nano = int(exact_nano)
            self._rest_nano[i] = exact_nano - cost_nano
            bills.append(PoolBill(model, pool.name, worker_s, cost_nano))
        return bills
