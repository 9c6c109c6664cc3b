"""Decides for one model while Redis is away, over this process's share of the token pool.

The share is a copy of the model's token pool. Capacity, limits, baselines and bucket levels are
divided by the last known number of replicas; nonzero values stay at least 1. The share starts with
the leases that this process holds, which are already paid for. It tracks everything until Redis is
back; then only its levels are kept. `model` posts what Redis must learn.

While Redis decides, the model's token pool in this process holds no leases; only its buckets are
kept current. Each answer to an admission reports the level, and this process applies its own
corrections before Redis reports them. A bucket that was never reported counts as full. The levels
that a share leaves are kept for the next time, so that a flapping Redis refills no bucket. Of
limits over all models, each answer reports the level as well, and all budgets are read once a
minute (`leases`). All models of the process share the parts of these limits, until Redis decides
again for all of them.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from gateway.admission import debt
from gateway.admission.limit_book import Counter, LimitBook, counted_s, used_of
from gateway.admission.terms import Denial, Grant, LeaseRecord, Terms
from gateway.admission.token_pool import (
    LEASE_TTL_S,
    TokenPool,
)
from gateway.records.entitlement import Entitlement
from gateway.records.limit import Holding, Limit, LimitView, Spent
from gateway.store.redis.lease_codec import LimitEncoder, RedisLease


class _Heard(msgspec.Struct):
    """What was used of a limit, without reservations, as Redis reported it last."""

    limit: Limit
    slice_s: float
    spent: int
    allowed: int


class KnownLimits:
    """Levels as last heard, and the parts of the limits while there are any."""

    def __init__(self) -> None:
        self.encoder = LimitEncoder()
        self._heard: dict[str, _Heard] = {}
        self._known = LimitBook()
        """Levels that the last parts left."""
        self._share: LimitBook | None = None
        self._sharing: set[int] = set()
        """Models that decide over the parts: ids of their `LocalFallback`."""

    def note(self, limits: Sequence[Limit], found: Grant | Denial, now_s: float) -> None:
        """Take over the levels that Redis reports with a decision."""
        if isinstance(found, Denial):
            if found.limit_index >= 0:
                limit = limits[found.limit_index]
                self._update(limit, int(found.used - found.reserved), int(found.limit), now_s)
            return
        for limit, held, use in zip(limits, found.held, found.uses, strict=False):
            # A request counts when it is admitted, tokens and money when they are used.
            spent = use.level - (held.expected if limit.budget else 0)
            self._heard[limit.id] = _Heard(limit, held.slice_s, spent, use.amount)

    def note_views(self, limits: Sequence[Limit], views: Sequence[LimitView], now_s: float) -> None:
        """Take over levels that were read from Redis."""
        for limit, view in zip(limits, views, strict=True):
            self._update(limit, view.used - view.reserved, limit.amount + view.added, now_s)

    def _update(self, limit: Limit, spent: int, allowed: int, now_s: float) -> None:
        if limit.window:
            start_s = self.encoder.spans.at(limit.window, limit.zone, now_s).start_s
            self._heard[limit.id] = _Heard(limit, start_s, spent, allowed)

    def note_settled(self, held: Sequence[Holding], spent: Spent | None) -> None:
        """Correct them by what a request used."""
        for holding in held:
            heard = self._heard.get(holding.id)
            if heard is not None and heard.slice_s == holding.slice_s:
                used = used_of(holding, spent)
                heard.spent += used - (holding.amount if holding.unit == "requests" else 0)

    def sweep(self, defined: Callable[[str], bool], now_s: float) -> None:
        """Forget limits that nobody defines any more, once their window is over."""
        self.encoder.sweep(defined)
        self._heard = {
            limit_id: heard
            for limit_id, heard in self._heard.items()
            if defined(limit_id) or now_s < heard.slice_s + counted_s(heard.limit.window)
        }
        for book in (self._known, self._share):
            if book is not None:
                book.sweep(list(book.counters), defined, now_s)

    def _learn(self, heard: _Heard) -> None:
        limit = heard.limit
        if not limit.window:
            return
        counter = self._known.counter(limit.id)
        span = self.encoder.spans.at(limit.window, limit.zone, heard.slice_s)
        counter.starts, counter.spent = [heard.slice_s], [heard.spent]
        counter.added = heard.allowed - limit.amount
        counter.added_until_s = span.next_s + span.kept_s
        if limit.warn and heard.spent >= limit.warn:
            counter.warned_s = heard.slice_s

    def begin(self, user: int, kept: Iterable[RedisLease], replicas: int) -> LimitBook:
        """The parts; a model that decides over them holds these leases."""
        if self._share is None:
            for heard in self._heard.values():
                self._learn(heard)
            self._heard.clear()
            self._share = LimitBook(replicas)
            for limit_id, counter in self._known.counters.items():
                self._share.counters[limit_id] = _scaled(counter, 1 / max(1, replicas))
        self._sharing.add(user)
        for redis_lease in kept:
            self._share.hold(redis_lease.held)
        return self._share

    def end(self, user: int) -> None:
        """Redis decides for a model again."""
        self._sharing.discard(user)
        if self._share is not None and not self._sharing:
            for limit_id, counter in self._share.counters.items():
                self._known.counters[limit_id] = _scaled(counter, self._share.parts)
            self._share = None


def _scaled(counter: Counter, by: float) -> Counter:
    """A counter's levels times a number; nothing of it is reserved."""
    copy = Counter()
    copy.starts, copy.spent = [*counter.starts], [int(spent * by) for spent in counter.spent]
    copy.warned_s = counter.warned_s
    copy.added, copy.added_until_s = counter.added, counter.added_until_s
    return copy


class LocalFallback:
    """Holds the share while there is one."""

    def __init__(
        self, token_pool: TokenPool, wall_clock: Callable[[], float], limits: KnownLimits
    ) -> None:
        """`token_pool` tracks the bucket levels; `wall_clock` gives Unix seconds."""
        self._limits = limits
        self._token_pool = token_pool
        self._now_s = wall_clock
        self._replicas = 1
        self.share: TokenPool | None = None

    def begin(self, kept: Iterable[RedisLease], replicas: int) -> TokenPool:
        """Return the present share, or create one for one of `replicas` replicas."""
        if self.share is None:
            self._replicas = replicas
            leases = list(kept)
            limits = self._limits.begin(id(self), leases, replicas)
            self.share = share_of(self._token_pool, leases, replicas, self._now_s(), limits)
        return self.share

    def end(self) -> None:
        """End the share: Redis decides again."""
        if self.share is not None:
            take_back(self._token_pool, self.share, self._replicas)
            self._limits.end(id(self))
            self.share = None

    def define(self, terms: Entitlement) -> None:
        """Apply an entitlement's terms."""
        if self.share is not None:
            self.share.define(_entitlement_share(terms, self._replicas))

    def change(self, terms: Terms) -> None:
        """Apply capacity and rules."""
        if self.share is not None:
            self.share.change(_terms_share(terms, self._replicas))

    def tick(self) -> None:
        """Run the tick if it is due."""
        share, now_s = self.share, self._now_s()
        if share is None:
            return
        elapsed_s = now_s - share.ticked_s
        if elapsed_s >= share.terms.profile.tick_s:
            debt.tick(share, list(share.active), elapsed_s, now_s)
            debt.close(share, elapsed_s, now_s)


def share_of(
    token_pool: TokenPool,
    kept: Iterable[RedisLease],
    replicas: int,
    now_s: float,
    limits: LimitBook | None = None,
) -> TokenPool:
    """One replica's share of a token pool, with the leases that it holds."""
    share = TokenPool(_terms_share(token_pool.terms, replicas), limits)
    share.ticked_s = now_s
    for account in token_pool.accounts.values():
        share.define(_entitlement_share(account.terms, replicas))
    lend(token_pool, share, replicas, now_s)
    for one in kept:
        holder = share.accounts.get(one.lease.entitlement)
        if holder is None or one.lease.pool >= len(share.pools):
            continue
        record = LeaseRecord(
            one.lease.id,
            one.lease.entitlement,
            one.lease.pool,
            one.lease.sequences,
            one.estimate_tokens,
            one.kv_bytes,
            one.lease.weight,
            one.lease.issued_unix_s,
            now_s + LEASE_TTL_S,
            one.funded,
            "",
            one.lease.would_deny,
            spilled=one.lease.spilled,
            held=one.held,
        )
        share.move(holder, record.pool, record.sequences, record.kv_bytes)
        holder.debited += record.estimate_tokens
        share.hold(holder, record)
    return share


def _terms_share(terms: Terms, replicas: int) -> Terms:
    """Capacity for one of `replicas` replicas. The largest request still fits."""
    return msgspec.structs.replace(
        terms,
        slots=tuple(_part(n, replicas) for n in terms.slots),
        kv_bytes=tuple(_part(n, replicas) for n in terms.kv_bytes),
        tokens_per_s=terms.tokens_per_s / max(1, replicas),
    )


def _entitlement_share(terms: Entitlement, replicas: int) -> Entitlement:
    """An entitlement's limits for one of `replicas` replicas."""
    return msgspec.structs.replace(
        terms,
        baseline=tuple(_part(n, replicas) for n in terms.baseline),
        limit=_part(terms.limit, replicas),
        tokens_per_s=terms.tokens_per_s / max(1, replicas),
        tokens_per_s_limit=terms.tokens_per_s_limit / max(1, replicas),
        kv_bytes=_part(terms.kv_bytes, replicas),
        kv_bytes_limit=_part(terms.kv_bytes_limit, replicas),
    )


def _part(whole: int, replicas: int) -> int:
    return max(1, whole // max(1, replicas)) if whole > 0 else 0


def note_decision(
    token_pool: TokenPool, name: str, tokens: int, found: Grant | Denial, now_s: float
) -> None:
    """Apply Redis's decision on a request of `tokens` tokens."""
    account = token_pool.accounts.get(name)
    if account is None:
        return
    if isinstance(found, Denial):
        if found.reason == "tokens" and account.terms.tokens_per_s > 0:
            account.level, account.level_s = found.limit - found.used, now_s
        return
    if account.terms.tokens_per_s > 0 and found.funded != "none":
        account.level, account.level_s = found.level_tokens, now_s
    if found.funded == "surplus":
        token_pool.pay(account, "surplus", tokens, now_s)


def note_charge(token_pool: TokenPool, redis_lease: RedisLease, tokens: int, now_s: float) -> None:
    """Apply a lease's corrected or final cost."""
    account = token_pool.accounts.get(redis_lease.lease.entitlement)
    if account is not None:
        token_pool.pay(account, redis_lease.funded, tokens - redis_lease.estimate_tokens, now_s)


def note_view(token_pool: TokenPool, view: TokenPool, server_s: float, now_s: float) -> None:
    """Apply counters that were read from Redis, whose time is at least `server_s`."""
    token_pool.surplus, token_pool.surplus_s = view.surplus_level(server_s), now_s
    token_pool.surplus_per_s = view.surplus_per_s
    for name, theirs in view.accounts.items():
        account = token_pool.accounts.get(name)
        if account is not None and theirs.level_s > 0:
            account.level = theirs.own_level(view.depth_tokens(theirs), server_s)
            account.level_s = now_s
            account.mean_cost = theirs.mean_cost


def lend(token_pool: TokenPool, share: TokenPool, replicas: int, now_s: float) -> None:
    """Give a new local share its part of every bucket."""
    parts = max(1, replicas)
    share.surplus, share.surplus_s = token_pool.surplus_level(now_s) / parts, now_s
    share.surplus_per_s = token_pool.surplus_per_s / parts
    for name, account in share.accounts.items():
        whole = token_pool.accounts[name]
        account.level = whole.own_level(token_pool.depth_tokens(whole), now_s) / parts
        account.level_s = now_s
        account.mean_cost = whole.mean_cost
        # This process's own borrowing; it does not know the other replicas'.
        account.borrowed, account.borrowed_s = whole.borrowed, whole.borrowed_s


def take_back(token_pool: TokenPool, share: TokenPool, replicas: int) -> None:
    """Keep the levels that a share leaves; buckets that it never used keep their reported level."""
    parts = max(1, replicas)
    token_pool.surplus, token_pool.surplus_s = share.surplus * parts, share.surplus_s
    for name, account in share.accounts.items():
        whole = token_pool.accounts.get(name)
        if whole is not None and account.debited:
            whole.level, whole.level_s = account.level * parts, account.level_s
            whole.borrowed, whole.borrowed_s = account.borrowed, account.borrowed_s
