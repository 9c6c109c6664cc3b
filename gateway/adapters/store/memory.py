"""The embedded lease store: in memory, one process.

A managed model's leases live in its `TokenPool`, which `gateway.policy.admission` decides over;
every call is atomic because none awaits. A model that is not managed has a plain ledger: it
counts and spills over, and refuses nobody. Either way the pools' own in-flight counters
(`PoolState.inflight`) say what this process has in flight.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from gateway.domain import Ask, Lease
from gateway.policy import admission, eviction, fleet
from gateway.policy.admission import Denial, Grant, Request
from gateway.policy.denials import limits_of, refusal_of
from gateway.policy.entitlements import Entitlement, charge_tokens
from gateway.policy.ledger import Account, TokenPool
from gateway.policy.served import ServedModel
from gateway.ports import AccountView, PoolView, Settlement


class MemoryLeases:
    """LeaseStore and TokenPools over plain objects."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        clock: Callable[[], float],
        books: Mapping[str, TokenPool] | None = None,
        *,
        wall_clock: Callable[[], float] = time.time,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`models` by name (not by alias); `books` of those that are managed.

        `clock` monotonic, `wall_clock` Unix time, in seconds; `jitter` gives [0, 1).
        """
        self.books = dict(books or {})
        self._models = models
        self._clock = clock
        self._wall_clock = wall_clock
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
            return
        self._models[held.model].pools[held.pool].inflight -= held.sequences
        usage = settlement.usage
        if usage is None:
            self.refunded_total += 1
        else:
            self.settled_total += 1
        book = self.books.get(held.model)
        if book is None:
            return
        charge = (
            None
            if usage is None
            else charge_tokens(
                book.terms.profile,
                usage.prompt_tokens,
                usage.completion_tokens,
                usage.cached_tokens,
            )
        )
        admission.settle(book, lease.id, charge, self._wall_clock())

    async def reclaim(self, lease: Lease) -> None:
        """See LeaseStore."""
        book = self.books.get(lease.model)
        if book is None or lease.id not in book.leases:
            return
        for held in eviction.evict(book, book.leases[lease.id].pool, lease.sequences):
            self._evict(held.id)

    def on_evict(self, evict: Callable[[str], None]) -> None:
        """See LeaseStore."""
        self._evict = evict

    # -- TokenPools

    async def define(self, terms: Entitlement) -> None:
        """See TokenPools."""
        self.books[terms.model].define(terms)

    async def remove(self, model: str, name: str) -> bool:
        """See TokenPools."""
        book = self.books[model]
        account = book.accounts.get(name)
        if account is not None and account.total:
            return False
        book.remove(name)
        return True

    async def view(self, model: str, names: Sequence[str]) -> list[AccountView]:
        """See TokenPools."""
        book = self.books[model]
        now_s = self._wall_clock()
        return [
            account_view(book, account, now_s)
            for account in map(book.accounts.get, names)
            if account is not None
        ]

    async def pools(self, model: str) -> list[PoolView]:
        """See TokenPools."""
        book = self.books[model]
        return [
            PoolView(
                slots=book.terms.slots[index],
                inflight=pool.inflight,
                kv_capacity_bytes=book.terms.kv_of(index),
                kv_bytes=pool.kv_bytes,
                idle_dedicated=pool.idle_dedicated,
                service_s=pool.service_s,
                desired_replicas=0,
            )
            for index, pool in enumerate(book.pools)
        ]

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
        )
        observe = self._models[ask.model].observe
        found = admission.admit(book, request, self._wall_clock(), observe=observe)
        if isinstance(found, Denial):
            raise refusal_of(found, ask.entitlement, self._jitter())
        return lease_of(ask, found)

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


def lease_of(ask: Ask, grant: Grant) -> Lease:
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
    )


def account_view(book: TokenPool, account: Account, now_s: float) -> AccountView:
    """An account's counters, its bucket as it stood at its last change."""
    terms = account.terms
    state = "bound"
    if terms.suspended:
        state = "suspended"
    elif 0 < terms.expires_unix_s <= now_s:
        state = "expired"
    elif not book.bound(terms):
        state = "degraded" if terms.created <= book.terms.ever_bound_until else "pending"
    return AccountView(
        name=terms.name,
        state=state,
        inflight=tuple(account.inflight),
        kv_bytes=account.kv_bytes,
        level_tokens=account.level,
        depth_tokens=admission.depth_tokens(book, account),
        debt=account.debt,
        burst=account.burst,
        weight=admission.weight_now(book, account),
        debited=account.debited,
        refunded=account.refunded,
        used=account.used,
    )
