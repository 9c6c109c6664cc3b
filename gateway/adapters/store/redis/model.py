"""The leases of one managed model: in Redis, and in this process while Redis is away.

Redis decides while the link is up. Otherwise `fail_mode` applies: `closed` refuses with 503,
`local_share` decides over this process's share of the token pool. Everything that Redis must
learn is posted in order (see `link`): Redis adopts a lease that was taken locally before it is
settled, and an admission whose answer was lost is given back.
"""

import asyncio
from typing import Any

import msgspec

from gateway.adapters.store.memory.leases import lease_of
from gateway.adapters.store.redis import bucket_levels
from gateway.adapters.store.redis.lease_codec import ALONE, Kept, admit_argument, decision, moved
from gateway.adapters.store.redis.link import Away
from gateway.adapters.store.redis.scripts import argument, grouped
from gateway.adapters.store.redis.token_pools import Process, RedisPools
from gateway.errors import Refusal, Unavailable
from gateway.policy.admission.admission import Denial, Grant
from gateway.policy.admission.charging import charge_tokens
from gateway.policy.admission.denials import refusal_of
from gateway.policy.model_runtime import ModelRuntime
from gateway.policy.token_pool.token_pool import TokenPool
from gateway.ports import Settlement
from gateway.records.lease import Ask, Lease


class RedisModel(RedisPools):
    """A model whose token pool is in Redis."""

    def __init__(self, served: ModelRuntime, book: TokenPool, process: Process) -> None:
        """`book`: the model's terms and entitlements, with the known bucket levels."""
        super().__init__(book, process)
        self.served = served
        self.alone_total = 0
        """Leases taken without Redis."""
        self._giving_way = 0

    @property
    def may_be_evicted(self) -> bool:
        """Whether any lease of this process is evictable."""
        return self._giving_way > 0

    async def admit(self, ask: Ask) -> Lease:
        """See LeaseStore."""
        known = self.kept.get(ask.lease_id)
        if known is not None:
            return known.lease
        packed = admit_argument(ask, self._process.owner, observe=self._observes)
        for _ in range(2):
            if not self.link.up:
                break
            try:
                answer = await self._called("admit", packed, ask.lease_id)
            except Away:
                continue
            found, gives_way, issued_s = decision(answer)
            bucket_levels.told(self.book, ask.entitlement, ask.cost_tokens, found, self._now_s())
            return self._taken(ask, found, ask.lease_id, issued_s, gives_way=gives_way)
        return self._admit_alone(ask)

    async def transfer(self, lease: Lease, pool: int, *, force: bool) -> Lease:
        """See LeaseStore."""
        kept = self.kept.get(lease.id)
        if kept is None or kept.lease.pool == pool:
            return lease if kept is None else kept.lease
        packed = grouped("transfer", lease_id=kept.key, pool=pool, force=force)
        denied, gives_way = None, kept.gives_way
        try:
            denied, gives_way = moved(await self.link.call("transfer", packed))
        except Away:
            refused = None if force else self._refused_alone(kept, pool)
            # Redis may have moved it already; the decision made here counts.
            place = pool if refused is None else kept.lease.pool
            self.link.post(
                "transfer", grouped("transfer", lease_id=kept.key, pool=place, force=True)
            )
            if refused is not None:
                raise refused from None
        if denied is not None:
            raise refusal_of(denied, lease.entitlement, self._process.jitter())
        return self._moved(lease, kept, pool, gives_way=gives_way)

    def resize(self, lease: Lease, cost_tokens: int, kv_bytes: int) -> None:
        """See LeaseStore."""
        kept = self.kept.get(lease.id)
        if kept is None:
            return
        bucket_levels.paid(self.book, kept, cost_tokens, self._now_s())
        kept.estimate_tokens, kept.kv_bytes = cost_tokens, kv_bytes
        packed = grouped(
            "resize", lease_id=kept.key, estimate_tokens=cost_tokens, kv_bytes=kv_bytes
        )
        if kept.resizing is not None and not kept.resizing.sent:
            kept.resizing.argument = packed
        else:
            kept.resizing = self.link.post("resize", packed)
        self._alone.resized(lease.id, cost_tokens, kv_bytes)

    def settle(self, lease: Lease, settlement: Settlement) -> bool:
        """See LeaseStore; returns whether the lease was in force here."""
        charge = self._charge(settlement)
        kept = self.kept.pop(lease.id, None)
        if kept is None:
            # Another gateway's lease, or one from before this gateway restarted.
            for key in (lease.id, lease.id + ALONE):
                self._release(key, charge)
            return False
        self.served.fleet.pools[kept.lease.pool].inflight -= kept.lease.sequences
        self._giving_way -= kept.gives_way
        bucket_levels.paid(self.book, kept, charge or 0, self._now_s())
        self._release(kept.key, charge)
        self._alone.settled(lease.id, charge)
        return True

    async def reclaim(self, lease: Lease) -> None:
        """See LeaseStore."""
        kept = self.kept.get(lease.id)
        if kept is None:
            return
        packed = argument(lease_id=kept.key, sequences=lease.sequences, owner=self._process.owner)
        try:
            self._tell(await self.link.call("evict", packed))
        except Away:
            for lease_id in self._alone.victims(lease):
                self.evict(lease_id)

    # -- inside

    @property
    def _observes(self) -> bool:
        return self.served.routing.observe or self.served.admission.observe

    async def _called(self, name: str, packed: bytes, lease_id: str) -> Any:
        """Make a call that takes a lease; the lease is given back if the answer is lost."""
        op = self.link.begin(name, packed)
        assert op.done is not None  # noqa: S101 - a call has one
        try:
            return await op.done
        except (Away, asyncio.CancelledError):
            if op.sent and lease_id not in self.kept:
                self._release(lease_id, None)
            raise

    def _taken(
        self, ask: Ask, found: Grant | Denial, key: str, issued_s: float, *, gives_way: bool
    ) -> Lease:
        if isinstance(found, Denial):
            raise refusal_of(found, ask.entitlement, self._process.jitter())
        known = self.kept.get(ask.lease_id)
        if known is not None:  # admitted twice at the same time
            return known.lease
        lease = lease_of(ask, found, issued_s)
        self.kept[lease.id] = Kept(lease, key, funded=found.funded, gives_way=gives_way)
        self._giving_way += gives_way
        self.served.fleet.pools[lease.pool].inflight += lease.sequences
        return lease

    def _admit_alone(self, ask: Ask) -> Lease:
        if self._process.fail_mode == "closed":
            raise _unavailable()
        share = self._alone.begin(self.kept.values(), self.replicas)
        found, gives_way = self._alone.admit(share, ask, observe=self._observes)
        key = ask.lease_id + ALONE
        lease = self._taken(ask, found, key, self._now_s(), gives_way=gives_way)
        self.alone_total += 1
        self.link.post("adopt", self._adoption([self.kept[lease.id].record()]))
        return lease

    def _refused_alone(self, kept: Kept, pool: int) -> Refusal | None:
        """Why a lease may not move while Redis is away."""
        if self._process.fail_mode == "closed":
            return _unavailable()
        share = self._alone.begin(self.kept.values(), self.replicas)
        denied = self._alone.refused(share, kept.lease.id, pool)
        if denied is None:
            return None
        return refusal_of(denied, kept.lease.entitlement, self._process.jitter())

    def _moved(self, lease: Lease, kept: Kept, pool: int, *, gives_way: bool) -> Lease:
        if self.kept.get(lease.id) is not kept:  # settled meanwhile
            return lease
        pools = self.served.fleet.pools
        pools[kept.lease.pool].inflight -= kept.lease.sequences
        pools[pool].inflight += kept.lease.sequences
        kept.lease = msgspec.structs.replace(kept.lease, pool=pool)
        self._alone.moved(lease.id, pool)
        self._giving_way += gives_way - kept.gives_way
        kept.gives_way = gives_way
        return kept.lease

    def _charge(self, settlement: Settlement) -> int | None:
        usage = settlement.usage
        if usage is None:
            return None
        profile = self.book.terms.profile
        return charge_tokens(
            profile, usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
        )

    def _release(self, key: str, charge: int | None) -> None:
        charged: Any = False if charge is None else charge
        timely = self.link.up
        self.link.post("settle", grouped("settle", lease_id=key, charge=charged, timely=timely))


def _unavailable() -> Unavailable:
    return Unavailable(
        "The gateway cannot admit requests at the moment: its shared state does not answer.",
        reason="state_unavailable",
        code="state_unavailable",
        retry_after_s=1.0,
        should_retry=True,
    )
