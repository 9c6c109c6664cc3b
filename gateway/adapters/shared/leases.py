"""The lease store of a worker process: the parent's, one for all workers.

Every decision is the parent's own `MemoryLeases`, so limits are as exact as those of one process,
for models that are managed and for those that only spill over. While there is plenty of room the
parent decides in advance, by pledges (`pledges`). What is posted (settlements, resizes, leases
taken of a pledge) takes effect in the order it was said, before whatever this worker asks next.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from gateway.adapters.shared.decisions import DENIED, ask_told, denial_of, lease_of, used_of
from gateway.adapters.shared.link import Link
from gateway.adapters.shared.pledges import RECALL, Purse
from gateway.adapters.shared.untold import Untold
from gateway.adapters.shared.wire import Op
from gateway.domain import Ask, Lease
from gateway.errors import Refusal, StateFailure, Unavailable
from gateway.policy.denials import refusal_of
from gateway.policy.entitlements import Entitlement
from gateway.policy.pool_terms import Terms
from gateway.policy.served import ServedModel
from gateway.ports import AccountView, PoolView, Settlement

_accounts: Final = msgspec.msgpack.Decoder(list[AccountView]).decode
_pools: Final = msgspec.msgpack.Decoder(list[PoolView]).decode


class SharedLeases:
    """LeaseStore, TokenPools and Upkeep over the parent."""

    def __init__(
        self,
        link: Link,
        models: Mapping[str, ServedModel],
        *,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`models` by name (not by alias); `jitter` gives [0, 1)."""
        self._link = link
        self._models = models
        self._jitter = jitter
        self._held: dict[str, Lease] = {}
        self._purse = Purse()
        self._untold = Untold(link, time.time)
        link.hears(Op.PLEDGE, self._purse.put)
        link.on(RECALL, self._recalled)
        self.settled_total = 0
        self.refunded_total = 0

    @property
    def active(self) -> int:
        """Leases in force in this process."""
        return len(self._held)

    @property
    def up(self) -> bool:
        """Whether the parent is there."""
        return self._link.up

    # -- LeaseStore

    async def admit(self, ask: Ask) -> Lease:
        """See LeaseStore."""
        known = self._held.get(ask.lease_id)
        if known is not None:
            return known
        pledged = self._purse.admit(ask) if self._link.up else None
        if pledged is not None:
            pledge, lease = pledged
            self._untold.take(pledge, ask, lease.issued_unix_s)
            return self._hold(lease)
        asked = self._link.begin(Op.ADMIT, *ask_told(ask))
        try:
            answer = await asked
        except StateFailure:
            raise _unavailable() from None
        except asyncio.CancelledError:
            # It is, or will be, taken; what is said now is heard after it.
            if ask.lease_id not in self._held:
                self._link.post(Op.SETTLE, ask.lease_id, ask.model, 0.0, None)
            raise
        if len(answer) == DENIED:
            raise refusal_of(denial_of(answer), ask.entitlement, self._jitter())
        known = self._held.get(ask.lease_id)
        if known is not None:  # asked twice at the same time
            return known
        return self._hold(lease_of(ask, answer))

    async def transfer(self, lease: Lease, pool: int, *, force: bool = True) -> Lease:
        """See LeaseStore."""
        held = self._held.get(lease.id)
        if held is None or held.pool == pool:
            return held or lease
        self._untold.speak_of(lease.id)
        try:
            denied = await self._link.begin(Op.TRANSFER, lease.id, pool, force)
        except StateFailure:
            raise _unavailable() from None
        if denied is not None:
            raise refusal_of(denial_of(denied), lease.entitlement, self._jitter())
        held = self._held.get(lease.id)
        if held is None:  # settled meanwhile
            return lease
        pools = self._models[lease.model].pools
        pools[held.pool].inflight -= held.sequences
        pools[pool].inflight += held.sequences
        moved = self._held[lease.id] = msgspec.structs.replace(held, pool=pool)
        return moved

    def resize(self, lease: Lease, cost_tokens: int, kv_bytes: int) -> None:
        """See LeaseStore."""
        self._untold.speak_of(lease.id)
        self._link.post(Op.RESIZE, lease.id, lease.model, cost_tokens, kv_bytes)

    def settle(self, lease: Lease, settlement: Settlement) -> None:
        """See LeaseStore."""
        usage = settlement.usage
        held = self._held.pop(lease.id, None)
        if held is not None:
            self._models[held.model].pools[held.pool].inflight -= held.sequences
            if usage is None:
                self.refunded_total += 1
            else:
                self.settled_total += 1
        told = (lease.id, lease.model, settlement.unix_s, used_of(settlement))
        # Where it makes room that others may want at once, the parent hears of it at once.
        urgent = _tight(lease) or self._purse.scarce(lease.model)
        if not urgent and self._purse.plenty(lease):
            # Whoever might be refused for it has it called back.
            if not self._untold.end(lease, settlement):
                self._untold.settle(told)
            return
        self._untold.speak_of(lease.id)
        if urgent:
            self._link.post(Op.SETTLE, *told)
        else:
            self._link.post_lazily(Op.SETTLE, *told)

    async def reclaim(self, lease: Lease) -> None:
        """See LeaseStore."""
        self._untold.speak_of(lease.id)
        try:
            await self._link.begin(Op.RECLAIM, lease.id)
        except StateFailure:
            return

    def on_evict(self, evict: Callable[[str], None]) -> None:
        """See LeaseStore."""

        def told(lease_id: str) -> None:
            if lease_id in self._held:
                evict(lease_id)

        self._link.evict = told

    # -- TokenPools

    async def define(self, terms: Entitlement) -> None:
        """See TokenPools."""
        await self._link.call("define", terms)

    async def remove(self, model: str, name: str) -> bool:
        """See TokenPools."""
        return bool(await self._link.call("remove", (model, name)))

    async def view(self, model: str, names: Sequence[str]) -> list[AccountView]:
        """See TokenPools."""
        self._untold.tell_all()
        return _accounts(await self._link.call("view", (model, names)))

    async def pools(self, model: str) -> list[PoolView]:
        """See TokenPools. With the replicas that demand asks for."""
        self._untold.tell_all()
        return _pools(await self._link.call("pools", model))

    # -- Upkeep

    async def change(self, model: str, terms: Terms) -> None:
        """See Upkeep."""
        await self._link.call("change", (model, terms))

    async def renew(self) -> None:
        """See Upkeep."""
        self._untold.tell_all()
        self._link.post(Op.RENEW)

    async def tick(self) -> None:
        """See Upkeep."""
        await self._link.call("tick")

    # -- inside

    def _recalled(self, model: bytes) -> bytes:
        self._untold.tell_all()
        return self._purse.recalled(model)

    def _hold(self, lease: Lease) -> Lease:
        self._held[lease.id] = lease
        self._models[lease.model].pools[lease.pool].inflight += lease.sequences
        return lease


def _tight(lease: Lease) -> bool:
    """Whether its pool was full, or its entitlement had used most of what it may."""
    limits = lease.limits
    if limits is None:
        return False
    return (
        lease.contended
        or 4 * limits.sequences_free < limits.sequences
        or 4 * limits.tokens_free < limits.tokens
    )


def _unavailable() -> Refusal:
    return Unavailable(
        "This gateway is shutting down. Try again: another one will answer.",
        reason="state_unavailable",
        code="state_unavailable",
        retry_after_s=1.0,
        should_retry=True,
    )
