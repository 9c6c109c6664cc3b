"""The embedded lease store: in memory, one process.

A managed model's leases live in its `TokenPool`, which `gateway.policy.admission` decides over;
every call is atomic because none awaits. A model that is not managed has a plain ledger: it
counts and spills over, and refuses nobody. Either way the pools' own in-flight counters
(`PoolState.inflight`) say what this process has in flight.
"""

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Mapping

import msgspec

from gateway.adapters.store.memory_pools import SLICE, MemoryPools, account_view
from gateway.domain import Ask, Lease
from gateway.policy import admission, eviction, fleet
from gateway.policy.admission import Denial, Grant, Request
from gateway.policy.denials import limits_of, refusal_of
from gateway.policy.entitlements import charge_tokens
from gateway.policy.ledger import TokenPool
from gateway.policy.served import ServedModel
from gateway.ports import Settlement

__all__ = ["MemoryLeases", "account_view", "lease_of"]


class MemoryLeases(MemoryPools):
    """LeaseStore, TokenPools and Upkeep over plain objects."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        clock: Callable[[], float],
        books: Mapping[str, TokenPool] | None = None,
        *,
        wall_clock: Callable[[], float] = time.time,
        jitter: Callable[[], float] = random.random,
        owner: str = "",
    ) -> None:
        """`models` by name (not by alias); `books` of those that are managed.

        `clock` monotonic, `wall_clock` Unix time, in seconds; `jitter` gives [0, 1). `owner`
        names this process: leases that a former one left are never renewed.
        """
        self.owner = owner or secrets.token_hex(4)
        super().__init__(books or {}, wall_clock)
        self._models = models
        self._clock = clock
        self._jitter = jitter
        self._leases: dict[str, Lease] = {}
        self._evict: Callable[[str], None] = lambda _: None
        self.settled_total = 0
        self.refunded_total = 0

    @property
    def active(self) -> int:
        """Leases in force."""
        return len(self._leases)

    async def admit(self, ask: Ask) -> Lease:
        """See LeaseStore."""
        known = self._leases.get(ask.lease_id)
        if known is not None:
            return known
        book = self.books.get(ask.model)
        lease = self._counted(ask) if book is None else self._decided(ask, book)
        self._leases[ask.lease_id] = lease
        self._models[ask.model].pools[lease.pool].inflight += ask.sequences
        return lease

    async def transfer(self, lease: Lease, pool: int, *, force: bool = True) -> Lease:
        """See LeaseStore."""
        held = self._leases.get(lease.id)
        if held is None or held.pool == pool:
            return lease
        book = self.books.get(lease.model)
        if book is not None:
            denial = admission.transfer(book, lease.id, pool, self._wall_clock(), force=force)
            if denial is not None:
                raise refusal_of(denial, lease.entitlement, self._jitter())
        pools = self._models[lease.model].pools
        pools[held.pool].inflight -= held.sequences
        pools[pool].inflight += held.sequences
        moved = msgspec.structs.replace(held, pool=pool)
        self._leases[lease.id] = moved
        return moved

    def resize(self, lease: Lease, cost_tokens: int, kv_bytes: int) -> None:
        """See LeaseStore."""
        book = self.books.get(lease.model)
        if book is not None:
            admission.resize(book, lease.id, cost_tokens, kv_bytes, self._wall_clock())

    def settle(self, lease: Lease, settlement: Settlement) -> None:
        """See LeaseStore."""
        held = self._leases.pop(lease.id, None)
        if held is None:
            self._settle_former(lease, settlement)
            return
        self._models[held.model].pools[held.pool].inflight -= held.sequences
        usage = settlement.usage
        if usage is None:
            self.refunded_total += 1
        else:
            self.settled_total += 1
        book = self.books.get(held.model)
        if book is not None:
            self._charge(book, lease.id, settlement)

    async def reclaim(self, lease: Lease) -> None:
        """See LeaseStore."""
        book = self.books.get(lease.model)
        if book is None or lease.id not in book.leases:
            return
        for held in eviction.evict(book, book.leases[lease.id].pool, lease.sequences):
            if held.id in self._leases:
                self._evict(held.id)

    def on_evict(self, evict: Callable[[str], None]) -> None:
        """See LeaseStore."""
        self._evict = evict

    async def renew(self) -> None:
        """See Upkeep."""
        held = list(self._leases.values())
        for start in range(0, len(held), SLICE):
            # Each slice by the time it runs: leases are kept in the order of their expiry.
            now_s = self._wall_clock()
            for lease in held[start : start + SLICE]:
                book = self.books.get(lease.model)
                if book is not None:
                    admission.renew(book, lease.id, now_s)
            await asyncio.sleep(0)

    # -- the two ways in

    def _decided(self, ask: Ask, book: TokenPool) -> Lease:
        request = Request(
            lease_id=ask.lease_id,
            entitlement=ask.entitlement,
            pool=ask.pool,
            alternates=ask.alternates,
            estimate_tokens=ask.cost_tokens,
            kv_bytes=ask.kv_bytes,
            sequences=ask.sequences,
            owner=self.owner,
        )
        served = self._models[ask.model]
        now_s = self._wall_clock()
        found = admission.admit(
            book, request, now_s, observe=served.observe_admission or served.observe
        )
        if isinstance(found, Denial):
            raise refusal_of(found, ask.entitlement, self._jitter())
        return lease_of(ask, found, now_s)

    def _settle_former(self, lease: Lease, settlement: Settlement) -> None:
        """A lease that is no longer held here: a former process's, expired, or settled before."""
        book = self.books.get(lease.model)
        if book is not None:
            self._charge(book, lease.id, settlement)

    def _charge(self, book: TokenPool, lease_id: str, settlement: Settlement) -> None:
        usage, charge = settlement.usage, None
        if usage is not None:
            charge = charge_tokens(
                book.terms.profile,
                usage.prompt_tokens,
                usage.completion_tokens,
                usage.cached_tokens,
            )
        admission.settle(book, lease_id, charge, settlement.unix_s or self._wall_clock())

    def _counted(self, ask: Ask) -> Lease:
        served = self._models[ask.model]
        pool = self._choose(served, ask)
        return Lease(
            id=ask.lease_id,
            model=ask.model,
            entitlement=ask.entitlement,
            pool=pool,
            spilled=pool != ask.pool,
            cost_tokens=ask.cost_tokens,
            sequences=ask.sequences,
            kv_bytes=ask.kv_bytes,
        )

    def _choose(self, served: ServedModel, ask: Ask) -> int:
        """The asked pool, or the first alternate with room when it is overloaded."""
        now_s = self._clock()
        if not fleet.overloaded(served.pools[ask.pool], served.spill_queue, now_s):
            return ask.pool
        for pool in ask.alternates:
            if not fleet.overloaded(served.pools[pool], served.spill_queue, now_s):
                return pool
        return ask.pool


def lease_of(ask: Ask, grant: Grant, issued_unix_s: float = 0.0) -> Lease:
    """The lease that a grant gives."""
    return Lease(
        id=ask.lease_id,
        model=ask.model,
        entitlement=ask.entitlement,
        pool=grant.pool,
        spilled=grant.spilled,
        cost_tokens=ask.cost_tokens,
        sequences=ask.sequences,
        kv_bytes=ask.kv_bytes,
        weight=grant.weight,
        contended=grant.contended,
        protected=grant.protected,
        would_deny=grant.would_deny,
        limits=limits_of(grant),
        issued_unix_s=issued_unix_s,
    )
