"""What this process knows of limits over all models, so that a share of them holds without Redis.

Each answer to an admission reports the level of its limits, and all budgets are read once a minute
(`leases`). When Redis goes away, every limit is divided by the number of replicas, and so is what
was known to be used of it. All models of the process share these parts, until Redis decides again
for all of them.
"""

from collections.abc import Callable, Iterable, Sequence

from gateway.admission.limit_book import Counter, LimitBook, used_of
from gateway.admission.terms import Denial, Grant
from gateway.admission.windows import counted_s
from gateway.records.limit import Holding, Limit, LimitView, Spent
from gateway.store.redis.lease_codec import LimitEncoder, RedisLease


class _Heard:
    """What was used of a limit, without reservations, as Redis reported it last."""

    __slots__ = ("allowed", "limit", "slice_s", "spent")

    def __init__(self, limit: Limit, slice_s: float, spent: int, allowed: int) -> None:
        self.limit = limit
        self.slice_s = slice_s
        self.spent = spent
        self.allowed = allowed


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
