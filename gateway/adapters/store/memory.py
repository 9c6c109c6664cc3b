"""The embedded lease ledger: in memory, one process.

It gives pool in-flight and exactly-once settlement; it enforces no limits yet. Invariants
(token-pools.md): a pool's in-flight is the sum of its leases' sequences, never negative;
admit and settle are idempotent by lease id; nothing is left when all are settled.
"""

from collections.abc import Callable, Mapping

import msgspec

from gateway.domain import Ask, Lease
from gateway.policy import fleet
from gateway.policy.served import ServedModel
from gateway.ports import Settlement


class MemoryLeases:
    """LeaseStore over plain dicts; every call is atomic because none awaits."""

    def __init__(self, models: Mapping[str, ServedModel], clock: Callable[[], float]) -> None:
        """`models` by name (not by alias); `clock` monotonic, in seconds."""
        self._models = models
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        self.settled_total = 0
        self.refunded_total = 0

    @property
    def active(self) -> int:
        """Leases in force."""
        return len(self._leases)

    async def admit(self, ask: Ask) -> Lease:
        """See LeaseStore. Spills to the first alternate that is not overloaded."""
        known = self._leases.get(ask.lease_id)
        if known is not None:
            return known
        served = self._models[ask.model]
        pool = self._choose(served, ask)
        lease = Lease(
            id=ask.lease_id,
            model=ask.model,
            entitlement=ask.entitlement,
            pool=pool,
            spilled=pool != ask.pool,
            cost_tokens=ask.cost_tokens,
            sequences=ask.sequences,
        )
        self._leases[ask.lease_id] = lease
        served.pools[pool].inflight += ask.sequences
        return lease

    async def transfer(self, lease: Lease, pool: int) -> Lease:
        """See LeaseStore."""
        held = self._leases.get(lease.id)
        if held is None or held.pool == pool:
            return lease
        pools = self._models[lease.model].pools
        pools[held.pool].inflight -= held.sequences
        pools[pool].inflight += held.sequences
        moved = msgspec.structs.replace(held, pool=pool)
        self._leases[lease.id] = moved
        return moved

    def settle(self, lease: Lease, settlement: Settlement) -> None:
        """See LeaseStore."""
        held = self._leases.pop(lease.id, None)
        if held is None:
            return
        self._models[held.model].pools[held.pool].inflight -= held.sequences
        if settlement.usage is None:
            self.refunded_total += 1
        else:
            self.settled_total += 1

    def _choose(self, served: ServedModel, ask: Ask) -> int:
        """The asked pool, or the first alternate with room when it is overloaded."""
        now_s = self._clock()
        if not fleet.overloaded(served.pools[ask.pool], served.spill_queue, now_s):
            return ask.pool
        for pool in ask.alternates:
            if not fleet.overloaded(served.pools[pool], served.spill_queue, now_s):
                return pool
        return ask.pool
