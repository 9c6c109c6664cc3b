"""The leases of one managed model: in Redis, and in this process while Redis is away.

Redis decides while the link is up. Otherwise `fail_mode` applies: `closed` refuses with 503,
`local_share` decides over this process's share of the token pool. Everything that Redis must
learn is posted in order (see `link`): Redis adopts a lease that was taken locally before it is
settled, and an admission whose answer was lost is given back.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.admission import admission
from gateway.admission.admission import spent_by
from gateway.admission.denials import refusal_of
from gateway.admission.terms import AdmissionRequest, Denial, Grant
from gateway.admission.token_pool import TokenPool
from gateway.errors import Refusal, Unavailable
from gateway.fleet.model_runtime import ModelRuntime
from gateway.ports import Settlement
from gateway.records.lease import Lease
from gateway.records.limit import Limit, LimitUse, LimitView, Spent
from gateway.store.memory_leases import charge_of, lease_of, warn
from gateway.store.redis import fallback
from gateway.store.redis.lease_codec import (
    LOCAL_SUFFIX,
    NOTHING,
    RedisLease,
    admit_argument,
    decision,
    moved,
)
from gateway.store.redis.link import Op, RedisAway
from gateway.store.redis.scripts import argument, grouped
from gateway.store.redis.token_pools import Process, RedisPools


class RedisModel(RedisPools):
    """A model whose token pool is in Redis."""

    def __init__(
        self,
        name: str,
        models: Mapping[str, ModelRuntime],
        token_pool: TokenPool,
        process: Process,
    ) -> None:
        """`models` as they are served now, by name.

        `token_pool`: the model's terms and entitlements, with the known bucket levels.
        """
        super().__init__(token_pool, process)
        self._name = name
        self._models = models
        self.alone_total = 0
        """Leases taken without Redis."""
        self._giving_way = 0
        self.on_warning: Callable[[Limit, LimitUse], None] = lambda _limit, _use: None

    @property
    def may_be_evicted(self) -> bool:
        """Whether any lease of this process is evictable."""
        return self._giving_way > 0

    async def admit(self, ask: AdmissionRequest) -> Lease:
        known = self.leases.get(ask.lease_id)
        if known is not None:
            return known.lease
        asked = None
        if ask.limits:
            asked = self._encoded(ask.limits, ask)
        packed = admit_argument(ask, self._process.owner, asked, observe=self._observes)
        for _ in range(2):
            if not self.link.up:
                break
            try:
                answer = await self._called("admit", packed, ask.lease_id)
            except RedisAway:
                continue
            found, gives_way, issued_s = decision(answer)
            fallback.note_decision(
                self.token_pool, ask.entitlement, ask.estimate_tokens, found, self._now_s()
            )
            if ask.limits:
                self._process.limits.note(ask.limits, found, self._now_s())
            lease = self._taken(ask, found, ask.lease_id, issued_s, gives_way=gives_way)
            self.leases[lease.id].epoch = self._epoch
            return lease
        if self._process.fail_mode == "closed":
            raise _unavailable()
        share = self._fallback.begin(self.leases.values(), self.replicas)
        found = admission.admit(share, ask, self._now_s(), observe=self._observes)
        record = share.leases.get(ask.lease_id)
        gives_way = record is not None and record.id in share.pools[record.pool].evictable
        key = ask.lease_id + LOCAL_SUFFIX
        lease = self._taken(ask, found, key, self._now_s(), gives_way=gives_way)
        self.alone_total += 1
        self.link.post("adopt", self._adoption([self.leases[lease.id].record(self.limits_key)]))
        return lease

    async def transfer(self, lease: Lease, pool: int, *, force: bool) -> Lease:
        redis_lease = self.leases.get(lease.id)
        if redis_lease is None or redis_lease.lease.pool == pool:
            return lease if redis_lease is None else redis_lease.lease
        packed = grouped("transfer", lease_id=redis_lease.key, pool=pool, force=force)
        denied, gives_way = None, redis_lease.gives_way
        try:
            denied, gives_way = moved(await self.link.call("transfer", packed))
        except RedisAway:
            refused = None if force else self._refused_alone(redis_lease, pool)
            # Redis may have moved it already; the decision made here counts.
            place = pool if refused is None else redis_lease.lease.pool
            self.link.post(
                "transfer", grouped("transfer", lease_id=redis_lease.key, pool=place, force=True)
            )
            if refused is not None:
                raise refused from None
        if denied is not None:
            raise refusal_of(denied, lease.entitlement, self._process.jitter())
        if self.leases.get(lease.id) is not redis_lease:  # settled meanwhile
            return lease
        pools = redis_lease.pools
        pools[redis_lease.lease.pool].inflight -= redis_lease.lease.sequences
        pools[pool].inflight += redis_lease.lease.sequences
        redis_lease.lease = msgspec.structs.replace(redis_lease.lease, pool=pool)
        if (share := self._fallback.share) is not None:
            admission.transfer(share, lease.id, pool, self._now_s(), force=True)
        self._giving_way += gives_way - redis_lease.gives_way
        redis_lease.gives_way = gives_way
        return redis_lease.lease

    def resize(self, lease: Lease, cost_tokens: int, kv_bytes: int) -> None:
        redis_lease = self.leases.get(lease.id)
        if redis_lease is None:
            return
        fallback.note_charge(self.token_pool, redis_lease, cost_tokens, self._now_s())
        redis_lease.estimate_tokens, redis_lease.kv_bytes = cost_tokens, kv_bytes
        packed = grouped(
            "resize", lease_id=redis_lease.key, estimate_tokens=cost_tokens, kv_bytes=kv_bytes
        )
        if redis_lease.resizing is not None and not redis_lease.resizing.sent:
            redis_lease.resizing.argument = packed
        else:
            redis_lease.resizing = self.link.post("resize", packed)
        if (share := self._fallback.share) is not None:
            admission.resize(share, lease.id, cost_tokens, kv_bytes, self._now_s())

    def settle(self, lease: Lease, settlement: Settlement, *, heard: bool) -> Op | None:
        """See LeaseStore; None where the lease was not in force here."""
        charge = charge_of(self.token_pool.terms.profile, settlement)
        spent = spent_by(settlement.usage, settlement.money, dispatched=settlement.dispatched)
        redis_lease = self.leases.pop(lease.id, None)
        if redis_lease is None:
            # Another gateway's lease, or one from before this gateway restarted.
            for key in (lease.id, lease.id + LOCAL_SUFFIX):
                self._release(key, charge, spent)
            return None
        redis_lease.pools[redis_lease.lease.pool].inflight -= redis_lease.lease.sequences
        self._giving_way -= redis_lease.gives_way
        fallback.note_charge(self.token_pool, redis_lease, charge or 0, self._now_s())
        if redis_lease.held:
            self._process.limits.note_settled(redis_lease.held, spent)
        else:
            spent = None
        heard = heard and redis_lease.nearly_full
        posted = self._release(redis_lease.key, charge, spent, heard=heard)
        if (share := self._fallback.share) is not None:
            admission.settle(share, lease.id, charge, self._now_s(), spent)
        return posted

    async def reclaim(self, lease: Lease) -> None:
        redis_lease = self.leases.get(lease.id)
        if redis_lease is None:
            return
        packed = argument(
            lease_id=redis_lease.key, sequences=lease.sequences, owner=self._process.owner
        )
        try:
            self._send(await self.link.call("evict", packed))
        except RedisAway:
            share = self._fallback.share
            record = None if share is None else share.leases.get(lease.id)
            if share is not None and record is not None:
                for victim in admission.evict(share, record.pool, lease.sequences):
                    self.evict(victim.id)

    async def budgets(self, limits: Sequence[Limit], added: int = 0) -> list[LimitView]:
        """Counters of limits; `added` to the first one. Raises RedisAway."""
        asked = self._encoded(limits, NOTHING)
        answer = await self.link.call("budget", argument(asked=asked, added=added))
        return [
            LimitView(
                id=limit.id,
                used=used,
                reserved=reserved,
                added=more,
                resets_unix_s=float(resets_s),
                total=total,
            )
            for limit, (used, reserved, more, resets_s, total) in zip(
                limits, msgspec.msgpack.decode(answer), strict=True
            )
        ]

    # -- inside

    @property
    def _observes(self) -> bool:
        served = self._models[self._name]
        return served.routing.observe or served.admission.observe

    async def _called(self, name: str, packed: bytes, lease_id: str) -> Any:
        """Make a call that takes a lease; the lease is given back if the answer is lost."""
        op = self.link.begin(name, packed)
        assert op.done is not None  # noqa: S101 - a call has one
        try:
            return await op.done
        except (RedisAway, asyncio.CancelledError):
            if op.sent and lease_id not in self.leases:
                self._release(lease_id, None)
            raise

    def _taken(
        self,
        ask: AdmissionRequest,
        found: Grant | Denial,
        key: str,
        issued_s: float,
        *,
        gives_way: bool,
    ) -> Lease:
        if isinstance(found, Denial):
            raise refusal_of(found, ask.entitlement, self._process.jitter(), ask.limits)
        known = self.leases.get(ask.lease_id)
        if known is not None:  # admitted twice at the same time
            return known.lease
        lease = lease_of(ask, found, issued_s)
        pools = ask.pools or self._models[self._name].fleet.pools
        pools[lease.pool].inflight += lease.sequences
        self.leases[lease.id] = RedisLease(
            lease,
            key,
            funded=found.funded,
            gives_way=gives_way,
            held=found.held,
            pools=pools,
        )
        self._giving_way += gives_way
        if lease.uses:
            warn(lease, self.on_warning)
        return lease

    def _refused_alone(self, redis_lease: RedisLease, pool: int) -> Refusal | None:
        """Why a lease may not move while Redis is away."""
        if self._process.fail_mode == "closed":
            return _unavailable()
        share = self._fallback.begin(self.leases.values(), self.replicas)
        lease_id = redis_lease.lease.id
        denied = admission.transfer(share, lease_id, pool, self._now_s(), force=False)
        if denied is None:
            return None
        return refusal_of(denied, redis_lease.lease.entitlement, self._process.jitter())

    def _encoded(self, limits: Sequence[Limit], wanted: AdmissionRequest) -> list[Any]:
        encoder = self._process.limits.encoder
        return encoder.asked(limits, wanted, self._now_s(), self.limits_key)

    def _release(
        self, key: str, charge: int | None, spent: Spent | None = None, *, heard: bool = False
    ) -> Op:
        charged: Any = False if charge is None else charge
        packed = grouped("settle", lease_id=key, charge=charged, timely=self.link.up, spent=spent)
        return self.link.post("settle", packed, heard=heard)


def _unavailable() -> Unavailable:
    return Unavailable(
        "The gateway cannot admit requests at the moment: its shared state does not answer.",
        reason="state_unavailable",
        retry_after_s=1.0,
        should_retry=True,
    )
