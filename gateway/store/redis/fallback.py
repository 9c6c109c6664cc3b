"""The share of what Redis counts by which this process decides while Redis is away.

The share of a model is a copy of its token pool. Capacity, limits, baselines and bucket levels are
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
from typing import Final, TypeVar

import msgspec

from gateway.admission.limit_book import Counter, LimitBook, used_of
from gateway.admission.terms import Denial, Grant, Terms
from gateway.admission.token_pool import LEASE_TTL_S, TokenPool
from gateway.records.entitlement import Entitlement
from gateway.records.limit import Holding, Limit, LimitView, Spent
from gateway.store.redis.lease_codec import LimitEncoder, RedisLease

_RATES: Final = ("tokens_per_s", "tokens_per_s_limit")
_WHOLE: Final = ("slots", "kv_bytes", "baseline", "limit", "kv_bytes_limit")
_Shared = TypeVar("_Shared", Terms, Entitlement)


class KnownLimits:
    """Levels as last heard, and the parts of the limits while there are any."""

    def __init__(self) -> None:
        self.encoder = LimitEncoder()
        self._levels = LimitBook()
        """Used of each limit, without reservations, as Redis or the last parts had it."""
        self._refreshed: set[str] = set()
        """Limits that Redis told of since the parts began, through models that reach it."""
        self._share: LimitBook | None = None
        self._sharing: set[object] = set()
        """Models that decide over the parts."""

    def note(self, limits: Sequence[Limit], decided: Grant | Denial, now_s: float) -> None:
        """Take over the levels that Redis reports with a decision."""
        if isinstance(decided, Denial):
            if decided.limit_index >= 0:
                limit = limits[decided.limit_index]
                self._update(limit, now_s, int(decided.used - decided.reserved), int(decided.limit))
            return
        for limit, held, use in zip(limits, decided.held, decided.uses, strict=False):
            # A request counts when it is admitted, tokens and money when they are used.
            spent = use.level - (held.expected if limit.budget else 0)
            self._update(limit, held.slice_s, spent, use.amount)

    def note_views(self, limits: Sequence[Limit], views: Sequence[LimitView], now_s: float) -> None:
        """Take over levels that were read from Redis."""
        for limit, view in zip(limits, views, strict=True):
            self._update(limit, now_s, view.used - view.reserved, limit.amount + view.added)

    def _update(self, limit: Limit, unix_s: float, spent: int, allowed: int) -> None:
        if not limit.window:
            return
        span = self.encoder.spans.at(limit.window, limit.zone, unix_s)
        counter = self._levels.counter(limit.id)
        counter.starts, counter.spent = [span.start_s], [spent]
        counter.added, counter.added_until_s = allowed - limit.amount, span.next_s + span.kept_s
        if limit.warn and spent >= limit.warn:
            counter.warned_s = span.start_s
        self._refreshed.add(limit.id)

    def note_settled(self, held: Sequence[Holding], spent: Spent | None) -> None:
        """Correct them by what a request used."""
        for holding in held:
            counter = self._levels.counters.get(holding.id)
            if counter is not None and counter.starts[-1:] == [holding.slice_s]:
                used = used_of(holding, spent)
                counter.spent[-1] += used - (holding.amount if holding.unit == "requests" else 0)

    def sweep(self, defined: Callable[[str], bool], now_s: float) -> None:
        """Forget limits that nobody defines any more, once their window is over."""
        self.encoder.sweep(defined)
        for book in (self._levels, self._share):
            if book is not None:
                book.sweep(list(book.counters), defined, now_s)
        self._refreshed &= self._levels.counters.keys()

    def begin(self, model: object, leases: Iterable[RedisLease], replicas: int) -> LimitBook:
        """The parts; a model that decides over them holds these leases."""
        if self._share is None:
            self._refreshed.clear()
            self._share = LimitBook(replicas)
            for limit_id, counter in self._levels.counters.items():
                self._share.counters[limit_id] = _scaled(counter, 1 / self._share.parts)
        self._sharing.add(model)
        for redis_lease in leases:
            self._share.hold(redis_lease.record.held)
        return self._share

    def end(self, model: object) -> None:
        """Redis decides for a model again."""
        self._sharing.discard(model)
        if self._share is not None and not self._sharing:
            for limit_id, counter in self._share.counters.items():
                if limit_id not in self._refreshed:
                    self._levels.counters[limit_id] = _scaled(counter, self._share.parts)
            self._share = None


def _scaled(counter: Counter, by: float) -> Counter:
    """A counter's levels times a number; nothing of it is reserved."""
    copy = Counter()
    copy.starts, copy.spent = [*counter.starts], [int(spent * by) for spent in counter.spent]
    copy.warned_s = counter.warned_s
    copy.added, copy.added_until_s = counter.added, counter.added_until_s
    return copy


def share_of(
    token_pool: TokenPool,
    leases: Iterable[RedisLease],
    replicas: int,
    now_s: float,
    limits: LimitBook | None = None,
) -> TokenPool:
    """One replica's share of a token pool, with its part of each bucket and the leases it holds."""
    parts = max(1, replicas)
    share = TokenPool(part_of(token_pool.terms, replicas), limits)
    share.ticked_s = share.surplus_s = now_s
    share.surplus = token_pool.surplus_level(now_s) / parts
    share.surplus_per_s = token_pool.surplus_per_s / parts
    for whole in token_pool.accounts.values():
        account = share.define(part_of(whole.terms, replicas))
        account.level = whole.own_level(token_pool.depth_tokens(whole), now_s) / parts
        account.level_s = now_s
        account.mean_cost = whole.mean_cost
        # This process's own borrowing; it does not know the other replicas'.
        account.borrowed, account.borrowed_s = whole.borrowed, whole.borrowed_s
    for redis_lease in leases:
        record = msgspec.structs.replace(
            redis_lease.record, id=redis_lease.lease.id, expires_s=now_s + LEASE_TTL_S, owner=""
        )
        holder = share.accounts.get(record.entitlement)
        if holder is not None and record.pool < len(share.pools):
            share.move(holder, record.pool, record.sequences, record.kv_bytes)
            holder.debited += record.estimate_tokens
            share.hold(holder, record)
    return share


def part_of(whole: _Shared, replicas: int) -> _Shared:
    """Capacity or limits for one of `replicas` replicas. The largest request still fits."""
    parts = max(1, replicas)

    def part(n: int) -> int:
        return max(1, n // parts) if n > 0 else 0

    fields: dict[str, object] = {}
    for field in whole.__struct_fields__:
        value = getattr(whole, field)
        if field in _RATES:
            fields[field] = value / parts
        elif field in _WHOLE:
            fields[field] = tuple(map(part, value)) if isinstance(value, tuple) else part(value)
    return msgspec.structs.replace(whole, **fields)


def take_back(token_pool: TokenPool, share: TokenPool, replicas: int) -> None:
    """Keep the levels that a share leaves; buckets that it never used keep their reported level."""
    parts = max(1, replicas)
    token_pool.surplus, token_pool.surplus_s = share.surplus * parts, share.surplus_s
    for name, account in share.accounts.items():
        whole = token_pool.accounts.get(name)
        if whole is not None and account.debited:
            whole.level, whole.level_s = account.level * parts, account.level_s
            whole.borrowed, whole.borrowed_s = account.borrowed, account.borrowed_s


def note_decision(
    token_pool: TokenPool, name: str, tokens: int, decided: Grant | Denial, now_s: float
) -> None:
    """Apply Redis's decision on a request of `tokens` tokens."""
    account = token_pool.accounts.get(name)
    if account is None:
        return
    if isinstance(decided, Denial):
        if decided.reason == "tokens" and account.terms.tokens_per_s > 0:
            account.level, account.level_s = decided.limit - decided.used, now_s
        return
    if account.terms.tokens_per_s > 0 and decided.funded != "none":
        account.level, account.level_s = decided.level_tokens, now_s
    if decided.funded == "surplus":
        token_pool.pay(account, "surplus", tokens, now_s)


def note_charge(token_pool: TokenPool, redis_lease: RedisLease, tokens: int, now_s: float) -> None:
    """Apply a lease's corrected or final cost."""
    record = redis_lease.record
    account = token_pool.accounts.get(record.entitlement)
    if account is not None:
        token_pool.pay(account, record.funded, tokens - record.estimate_tokens, now_s)


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
