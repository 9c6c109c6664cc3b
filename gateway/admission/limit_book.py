"""Counters of all limits of keys, entitlements and tenants, over all models of a process.

A budget counts what was used, in the slice of time in which a request was admitted, and apart from
that what running requests reserve: the most that each may use, by no prediction that a client could
teach. A request is admitted if what it is expected to use fits beside both. So whatever clients do,
a budget is passed by less than the most that one request may use. Budgets that demote instead of
refusing reserve what is expected.

A window is by the calendar of a time zone, or the latest days. It is made of slices, each of which
is counted apart. One by the calendar has one slice. The latest 30 days have 31 slices, of a day
each: a slice counts until all of it is too old, so that no span of 30 days ever sees more than the
amount.

Lua repeats these functions (`limits.lua`). Times are Unix seconds of the store's clock; all amounts
are whole numbers.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

from gateway.admission.terms import AdmissionRequest, Denial, DenialReason
from gateway.records.limit import Holding, Limit, LimitUse, LimitView, Spent

NEVER: Final = -1.0
CALENDAR: Final = ("hour", "day", "week", "month")
MINUTE_S: Final = 60
MINUTE_STEP_S: Final = 2
DAY_S: Final = 86_400
SLICES: Final = 30
"""Slices that the latest days consist of, beside the current one."""

_COUNTED_S: Final = {
    "minute": MINUTE_S + MINUTE_STEP_S,
    "hour": 2 * 3600,
    "day": 2 * DAY_S,
    "week": 8 * DAY_S,
    "month": 32 * DAY_S,
}
_LONGEST_S: Final = 100 * DAY_S


class Span(NamedTuple):
    """The current slice of a window."""

    start_s: float
    """Unix time."""
    next_s: float
    """Start of the next slice."""
    step_s: int
    """Length of all slices; 0 for those of the calendar."""
    kept_s: int
    """How long before the current slice's start another one may have started and still counts."""


class Spans:
    """The current slices of all windows in use, worked out once in each slice."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Span] = {}

    def at(self, window: str, zone: str, now_s: float) -> Span:
        """The slice that holds a time; `now_s` Unix seconds."""
        key = (window, zone)
        span = self._known.get(key)
        if span is None or not span.start_s <= now_s < span.next_s:
            span = self._known[key] = span_of(window, zone, now_s)
        return span


class Counter:
    """What was counted of one limit."""

    __slots__ = ("added", "added_until_s", "reserved", "spent", "starts", "total", "warned_s")

    def __init__(self) -> None:
        self.total = 0
        """Used since the beginning."""
        self.reserved = 0
        """By leases in force, of whatever window; of sequences, those in flight."""
        self.warned_s = NEVER
        """Start of the last slice in which the level that warns was reached."""
        self.added = 0
        """By an administrator, until `added_until_s`."""
        self.added_until_s = 0.0
        self.starts: list[float] = []
        """Slices, ascending, the oldest of which no longer counts; `spent` in each."""
        self.spent: list[int] = []

    def roll(self, span: Span, now_s: float) -> float:
        """Begin the slice of this span, unless a later one began; forget old ones."""
        starts, start_s, early = self.starts, span.start_s, 0
        if starts and starts[-1] > now_s:  # what slices counted that a wrong clock began
            while starts and starts[-1] > now_s:
                starts.pop()
                early += self.spent.pop()
            self.warned_s = min(self.warned_s, start_s)
            self.added_until_s = min(self.added_until_s, span.next_s + span.kept_s)
        if not starts or starts[-1] < start_s:
            starts.append(start_s)
            self.spent.append(0)
        start_s = starts[-1]
        self.spent[-1] += early
        # One that just ended is kept for the settlement of what was admitted in it.
        while len(starts) > 2 and starts[1] < start_s - span.kept_s:
            del starts[0], self.spent[0]
        return start_s

    def level(self, since_s: float) -> int:
        """The sum over the slices from then on."""
        used = 0
        for at in range(len(self.starts) - 1, -1, -1):
            if self.starts[at] < since_s:
                break
            used += self.spent[at]
        return used

    def post(self, slice_s: float, amount: int) -> None:
        """Correct what was counted in a slice; one that is long gone leaves the total only.

        What a slice after the newest counted is in the newest now (see `roll`).
        """
        self.total += amount
        newest = len(self.starts) - 1
        for at in range(newest, -1, -1):
            began_s = self.starts[at]
            if began_s == slice_s or (at == newest and began_s < slice_s):
                self.spent[at] = max(0, self.spent[at] + amount)
                return

    def allowed(self, amount: int, now_s: float) -> int:
        """A limit's amount, with what was added to it."""
        return amount + self.added if now_s < self.added_until_s else amount


class Weighed(NamedTuple):
    """One limit of a request, as it stands before the request."""

    counter: Counter
    asked: int
    amount: int
    spent: int
    """In the window; of sequences, those in flight."""
    start_s: float
    """Of the current slice."""
    since_s: float
    """Start of the first slice that counts."""


class LimitBook:
    """The counters by limit. Each operation is one atomic step: none awaits."""

    def __init__(self, parts: int = 1) -> None:
        """`parts`: processes over which every limit is divided while they cannot be reached."""
        self.parts = max(1, parts)
        self.counters: dict[str, Counter] = {}
        self.changed: set[str] | None = None
        """Limits changed since a reader took the set; None without one."""
        self.spans = Spans()
        self.ahead_s = 0.0
        """Of the calendar before the store's clock, which never jumps."""

    def time_s(self, now_s: float) -> float:
        """The calendar's time. All other methods take this."""
        return now_s + self.ahead_s

    def counter(self, limit_id: str) -> Counter:
        """A limit's counter, made when it is first asked for."""
        counter = self.counters.get(limit_id)
        if counter is None:
            counter = self.counters[limit_id] = Counter()
        return counter

    def weigh(
        self, request: AdmissionRequest, now_s: float, service_s: float
    ) -> tuple[list[Weighed], Denial | None, bool]:
        """Each limit, the denial by one of them, and whether one gives the request leftovers only.

        It is the first one's, unless a later one could never hold the request (reason
        `exceeds_entitlement`). The result is valid until anything else changes. `service_s`: the
        mean time of a request, after which those in flight give back what they reserve.
        """
        weighed: list[Weighed] = []
        over: Denial | None = None
        never = demoted = False
        for limit in request.limits:
            counter = self.counter(limit.id)
            asked, whole = request.wants(limit), counter.allowed(limit.amount, now_s)
            amount = whole if self.parts == 1 else max(1, whole // self.parts)
            level = spent = counter.reserved
            start_s = since_s = resets_s = 0.0
            if limit.window:
                span = self.spans.at(limit.window, limit.zone, now_s)
                start_s = counter.roll(span, now_s)
                since_s = start_s - span.kept_s
                spent = counter.level(since_s)
                level += spent
                if level + asked > amount:
                    resets_s = _resets_s(counter, span, start_s, spent + asked - amount)
            if not asked or level + asked <= amount or never:
                pass
            elif limit.spot:
                demoted = True
            else:
                # What an administrator took away comes back with the next window.
                never = asked > max(whole, limit.amount)
                reason: DenialReason = "key_requests"
                wait_s = resets_s - now_s
                if never:
                    reason, wait_s = "exceeds_entitlement", 0.0
                elif limit.unit == "sequences":
                    reason, wait_s = "key_concurrency", service_s / max(1, level)
                elif limit.budget:
                    reason = "budget"
                    # What only reservations use up may be given back: worth waiting for.
                    if spent + asked <= amount:
                        reason = "budget_reserved"
                        wait_s = service_s / max(1, counter.reserved // max(1, asked))
                if over is None or never:
                    over = Denial(
                        reason=reason,
                        wait_s=wait_s,
                        limit=amount,
                        used=level,
                        requested=asked,
                        unit=limit.unit,
                        limit_index=len(weighed),
                        reserved=counter.reserved,
                        resets_unix_s=resets_s,
                    )
            weighed.append(Weighed(counter, asked, amount, spent, start_s, since_s))
        return weighed, over, demoted

    def reserve(
        self, request: AdmissionRequest, weighed: Sequence[Weighed]
    ) -> tuple[tuple[Holding, ...], tuple[LimitUse, ...]]:
        """Take what a request may use of its limits, whether or not it fits."""
        held: list[Holding] = []
        uses: list[LimitUse] = []
        for limit, use in zip(request.limits, weighed, strict=True):
            counter, level, amount = use.counter, use.spent + use.asked, request.reserves(limit)
            if limit.unit == "requests":
                counter.post(use.start_s, amount)
            else:
                counter.reserved += amount
            crossed = 0 < limit.warn <= level and counter.warned_s < use.since_s
            if crossed:
                counter.warned_s = use.start_s
            held.append(Holding(limit.id, limit.unit, use.start_s, amount, use.asked))
            uses.append(LimitUse(level, use.amount, crossed))
            self._note(limit.id)
        return tuple(held), tuple(uses)

    def settle(self, held: Sequence[Holding], spent: Spent | None) -> None:
        """End reservations and count what was used; None gives everything back."""
        for holding in held:
            self._release(holding, used_of(holding, spent))

    def lapse(self, held: Sequence[Holding]) -> None:
        """End the reservations of a lease that expired: what was expected counts as used."""
        for holding in held:
            self._release(holding, holding.expected)

    def _release(self, holding: Holding, used: int) -> None:
        if holding.unit == "requests":
            used -= holding.amount  # counted when it was admitted
        else:
            counter = self.counter(holding.id)
            counter.reserved = max(0, counter.reserved - holding.amount)
        self._post(holding, used)

    def correct(self, held: Sequence[Holding], spent: Spent | None) -> None:
        """Replace what lapsed reservations counted by what was used."""
        for holding in held:
            self._post(holding, used_of(holding, spent) - holding.expected)

    def _post(self, holding: Holding, used: int) -> None:
        self._note(holding.id)
        if used and holding.unit != "sequences":
            self.counter(holding.id).post(holding.slice_s, used)

    def hold(self, held: Sequence[Holding]) -> None:
        """Count the leases of a former process as in force."""
        for holding in held:
            if holding.unit != "requests":
                self.counter(holding.id).reserved += holding.amount

    def add(self, limit: Limit, amount: int, now_s: float) -> LimitView:
        """Add to a limit's amount, until its window ends; of the latest days, for as many."""
        counter = self.counter(limit.id)
        span = self.spans.at(limit.window, limit.zone, now_s)
        before = counter.added if now_s < counter.added_until_s else 0
        counter.added = before + amount
        counter.added_until_s = span.next_s + span.kept_s
        self._note(limit.id)
        return self.view(limit, now_s)

    def view(self, limit: Limit, now_s: float) -> LimitView:
        """A limit's counters now."""
        counter = self.counter(limit.id)
        used, total, resets_s = counter.reserved, 0, 0.0
        if limit.window:
            span = self.spans.at(limit.window, limit.zone, now_s)
            start_s = counter.roll(span, now_s)
            used += counter.level(start_s - span.kept_s)
            total = counter.total + counter.reserved
            resets_s = _resets_s(counter, span, start_s, 1)
        return LimitView(
            id=limit.id,
            used=used,
            reserved=counter.reserved,
            added=counter.allowed(0, now_s),
            resets_unix_s=resets_s,
            total=total,
        )

    def sweep(self, ids: Iterable[str], defined: Callable[[str], bool], now_s: float) -> None:
        """Drop those of the counters that are over, and whose limit nobody defines any more."""
        for limit_id in ids:
            counter = self.counters.get(limit_id)
            window = limit_id.rpartition(":")[2]
            if counter is None or defined(limit_id) or counter.reserved:
                continue
            # While anything counts, more than the total would miss it.
            kept_s, slices = counted_s(window), zip(counter.starts, counter.spent, strict=True)
            counts = any(spent and now_s < start_s + kept_s for start_s, spent in slices)
            if counts or now_s < counter.added_until_s:
                continue
            del self.counters[limit_id]
            self._note(limit_id)

    def _note(self, limit_id: str) -> None:
        if self.changed is not None:
            self.changed.add(limit_id)


def used_of(holding: Holding, spent: Spent | None) -> int:
    """What a request used of a limit in the end; nothing where all is given back."""
    if spent is None:
        return 0
    if holding.unit == "tokens":
        return spent.tokens
    return spent.money if holding.unit == "money" else holding.amount


def _resets_s(counter: Counter, span: Span, start_s: float, amount: int) -> float:
    """When so much is free again: by the calendar at the next window, else as slices age.

    0 for nothing: then reservations alone take the room, and nobody knows when they end.
    """
    if amount <= 0:
        return 0.0
    if not span.step_s:
        return span.next_s
    freed = 0
    for began_s, spent in zip(counter.starts, counter.spent, strict=True):
        if began_s < start_s - span.kept_s:
            continue
        freed += spent
        if freed >= amount:
            return began_s + span.kept_s + span.step_s
    return start_s + span.kept_s + span.step_s


# -- windows


def span_of(window: str, zone: str, unix_s: float) -> Span:
    """The slice of a window that holds a time."""
    if window not in CALENDAR:
        step_s, kept_s = MINUTE_STEP_S, MINUTE_S
        if window != "minute":
            kept_s = days_of(window) * DAY_S
            step_s = kept_s // SLICES
        start_s = float(int(unix_s // step_s) * step_s)
        return Span(start_s, start_s + step_s, step_s, kept_s)
    of = UTC if zone == "UTC" else ZoneInfo(zone)  # which the library keeps
    here = datetime.fromtimestamp(unix_s, of)
    if window == "hour":
        # Counted back from now: an hour that clocks repeat is an hour of its own.
        start_s = float(int(unix_s) - here.minute * 60 - here.second)
        return Span(start_s, start_s + 3600.0, 0, 0)
    first = last = here.date()
    if window == "day":
        last = first + timedelta(days=1)
    elif window == "week":
        first -= timedelta(days=first.weekday())
        last = first + timedelta(days=7)
    else:
        first = first.replace(day=1)
        last = (first + timedelta(days=32)).replace(day=1)
    return Span(_midnight(first, of), _midnight(last, of), 0, 0)


def days_of(window: str) -> int:
    """The number of a window such as `30d`."""
    return int(window.removesuffix("d"))


def counted_s(window: str) -> int:
    """How long after its start a slice of a window counts at most, whatever clocks are set to."""
    return _COUNTED_S.get(window, _LONGEST_S)


def _midnight(day: date, zone: tzinfo) -> float:
    """When a day begins: of two midnights the first; where clocks skip it, when they do."""
    return datetime(day.year, day.month, day.day, tzinfo=zone).timestamp()
