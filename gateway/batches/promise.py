"""When a batch will have ended: a fluid run of the gateway's own rules over drawn weeks.

Batches run on leftovers: the slots that live requests leave free, less the headroom. Open batches
of a model go in the order of their promises, earliest first, and unpromised ones last.

Live demand is forecast by hour: from the same hour of earlier days and weeks, and from how the
last hours differed from theirs. How wrong that is, is taken from the profile itself: the same
forecast is made from each earlier hour, and its errors, as paths over the following hours, are what
is drawn. With little history a share of the draws has wide errors instead. The work of a batch is
as uncertain as finished batches showed it to be, until its own items have been measured.

A p95 is the ceil(.95 (n + 1))th of n draws. Pure: times are arguments, in Unix seconds. The draws
are the same in every call, so more work or less capacity never gives an earlier finish.
"""

from collections.abc import Sequence
from math import ceil, exp, inf
from statistics import median
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from gateway.records.record import Document, Record

HOUR_S: Final = 3600
DAY: Final = 24
WEEK: Final = 7 * DAY
KEPT_HOURS: Final = 5 * WEEK
AHEAD: Final = WEEK
"""Hours of a drawn path; later hours are like its mean."""
DRAWS: Final = 400
RATIOS: Final = 64
"""Ended batches that a profile remembers."""
NAMED_S: Final = 60
NAMED_MARGIN: Final = 1.005
"""The earliest window is named in whole minutes and a little longer, for it is asked for later."""
_WIDE: Final = 0.5
"""Standard deviation of the logarithm of live demand about which nothing is known."""
_UNKNOWN_WORK: Final = 0.5
"""The same of a batch's work, before any batch has ended."""
_ITEMS: Final = 50
"""Measured items that weigh as much as what was planned."""
_ITEM_SPREAD: Final = 1.0
"""Standard deviation of an item's work, as a share of the mean."""
_LEAST_DOUBT: Final = 0.03
_SHORT, _LONG = 0.7, 0.98
"""What is left after an hour of the last hour's difference, and of the last day's."""

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


class Profile(Document, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of a model's live demand and of its batches."""

    id: str = ""
    """The model's name."""
    first_hour: int = 0
    """Hours since 1970 of the first value."""
    hours: tuple[float, ...] = ()
    """Mean live sequences in each hour; negative: not known."""
    ratios: tuple[float, ...] = ()
    """Logarithm of measured over planned work, of the last ended batches."""
    left_slot_s: float = 0.0
    """What the means of hours left while batches waited, lately."""
    used_slot_s: float = 0.0
    """What batches used then."""
    seconds: tuple[float, float] = (0.0005, 0.03)
    """Of a slot, for a token of a prompt and of an answer."""

    @property
    def used_share(self) -> float:
        """Share of an hour's mean leftovers that batches use."""
        share = (self.used_slot_s + 0.9 * HOUR_S) / (self.left_slot_s + HOUR_S)
        return min(1.2, max(0.3, share))


class Work(Record, frozen=True, kw_only=True):
    """What is left of a batch."""

    slot_s: float
    """Slot-seconds expected."""
    doubt: float
    """Standard deviation of the logarithm of that."""
    by_unix_s: float | None = None
    """When it is promised; None: unpromised, and after all that are."""


class Decision(NamedTuple):
    """When a batch would end, in seconds from now, and the shortest window that holds its p95."""

    p50_s: float
    p95_s: float
    promised: bool
    """Whether its window holds it, and no other promise breaks."""
    earliest_s: float
    """inf where there are no leftovers."""


def work(
    profile: Profile,
    planned_slot_s: float,
    *,
    items: int,
    done: int = 0,
    used_slot_s: float = 0.0,
    by_unix_s: float | None = None,
) -> Work:
    """The work left of a batch of which `done` items took `used_slot_s`."""
    ratios, weigh = profile.ratios, 1 + len(profile.ratios)
    middle = median(ratios) if ratios else 0.0
    mean = middle * len(ratios) / weigh
    # By the median deviation: one odd batch must not widen the promises of all that follow.
    spread = 1.4826 * median([abs(r - middle) for r in ratios]) if ratios else 0.0
    spread2 = (len(ratios) * spread**2 + _UNKNOWN_WORK**2 / weigh) / weigh
    each = planned_slot_s / max(items, 1) * exp(mean)
    each = (each * _ITEMS + used_slot_s) / (_ITEMS + done)
    doubt = (1 / (1 / spread2 + done / _ITEM_SPREAD**2)) ** 0.5
    left = max(0, items - done)
    return Work(slot_s=each * left, doubt=max(doubt, _LEAST_DOUBT), by_unix_s=by_unix_s)


class FreeSlots:
    """Drawn weeks of free slots from now on."""

    def __init__(self, demand: "Demand", slots: float, live: float, now_unix_s: float) -> None:
        """`demand`: of this hour. `slots`: less the headroom. `live`: mean of this hour so far."""
        free = np.maximum(0.0, slots - demand.drawn(live, now_unix_s)) * demand.used_share
        to_hour_s = HOUR_S - now_unix_s % HOUR_S
        self.now_unix_s = now_unix_s
        self._edges_s = to_hour_s + HOUR_S * np.arange(-1.0, AHEAD)
        self._edges_s[0] = 0.0
        self._free = free
        self._done = np.zeros((DRAWS, AHEAD + 1))
        np.cumsum(free * np.diff(self._edges_s), axis=1, out=self._done[:, 1:])

    def finish_s(self, slot_s: Floats) -> Floats:
        """When so much work is done in each draw, in seconds from now."""
        at = np.clip((self._done < slot_s[:, None]).sum(axis=1) - 1, 0, AHEAD)
        draws = np.arange(DRAWS)
        rate = np.where(
            at < AHEAD,
            self._free[draws, np.minimum(at, AHEAD - 1)],
            self._done[:, -1] / self._edges_s[-1],
        )
        rest = slot_s - self._done[draws, at]
        with np.errstate(divide="ignore", invalid="ignore"):
            more_s = np.where(rest > 0, rest / rate, 0.0)
        return np.asarray(self._edges_s[at] + more_s)

    def decide(self, batch: Work, others: Sequence[Work]) -> Decision:
        """What is promised of a batch with these others open."""
        now, by = self.now_unix_s, batch.by_unix_s or inf
        own = _drawn_work(batch, 1)
        ordered = sorted(others, key=lambda other: other.by_unix_s or inf)
        before = np.zeros(DRAWS)
        ends: list[tuple[float, float]] = []
        """(p50, p95) of the batch after none, one, ... of the others."""
        p95_with: list[float] = []
        """p95 of each of the others with the batch before it."""
        for other in ordered:
            ends.append(_quantiles(self.finish_s(before + own)))
            before = before + _drawn_work(other, int(other.by_unix_s or 0))
            p95_with.append(_quantiles(self.finish_s(before + own))[1])
        ends.append(_quantiles(self.finish_s(before + own)))
        dues = [(other.by_unix_s or inf) - now for other in ordered]

        def place(due_s: float) -> int:
            return sum(due <= due_s for due in dues)

        def holds(due_s: float) -> bool:
            at = place(due_s)
            later = zip(p95_with[at:], dues[at:], strict=True)
            return ends[at][1] <= due_s and all(p95 <= due for p95, due in later)

        named = [
            NAMED_S * ceil(NAMED_MARGIN * start / NAMED_S)
            for (_, p95), due in zip(ends, (0.0, *dues), strict=True)
            if (start := max(p95, due)) < inf
        ]
        earliest_s = min(filter(holds, named), default=inf)
        p50, p95 = ends[place(by - now)] if by < inf else ends[-1]
        return Decision(p50, p95, by < inf and holds(by - now), earliest_s)

    def ends(self, batch: Work, others: Sequence[Work]) -> tuple[float, float]:
        """p50 and p95 of the end of an open batch, in seconds from now."""
        whole = _drawn_work(batch, 1)
        for other in others:
            if (other.by_unix_s or inf) < (batch.by_unix_s or inf):
                whole = whole + _drawn_work(other, int(other.by_unix_s or 0))
        return _quantiles(self.finish_s(whole))


def with_hour(profile: Profile, hour: int, live: float) -> Profile:
    """A profile that knows an hour's mean; what others counted of it is added to."""
    hours = list(profile.hours)
    first = profile.first_hour if hours else hour
    if hour < first:
        return profile
    hours += [-1.0] * (hour - first + 1 - len(hours))
    hours[hour - first] = max(0.0, hours[hour - first]) + live
    drop = max(0, len(hours) - KEPT_HOURS)
    return msgspec.structs.replace(profile, first_hour=first + drop, hours=tuple(hours[drop:]))


def _quantiles(values: Floats) -> tuple[float, float]:
    ordered = np.sort(values)
    return float(ordered[ceil(0.5 * (DRAWS + 1)) - 1]), float(ordered[ceil(0.95 * (DRAWS + 1)) - 1])


def _drawn_work(batch: Work, seed: int) -> Floats:
    random = np.random.default_rng(seed)
    return np.asarray(batch.slot_s * np.exp(batch.doubt * random.standard_normal(DRAWS)))


# -- live demand


class Demand:
    """Live demand as a profile forecasts it from one hour on. Costly: keep it for that hour."""

    def __init__(self, profile: Profile, hour: int) -> None:
        """`hour`: since 1970."""
        self.hour, self.used_share = hour, profile.used_share
        count = max(0, hour - profile.first_hour) if profile.hours else 0
        values = np.array(profile.hours[:count], dtype=np.float64)
        known = np.full(count, np.nan)
        known[: len(values)] = np.where(values < 0, np.nan, values)
        self._known = known[-KEPT_HOURS:]
        hours = np.arange(len(self._known))
        self._steps = np.log((self._known + 1) / (_baseline(self._known, hours, hours) + 1))
        """How each hour differed from what was expected just before it."""
        self._errors = self._drawn_errors()

    def drawn(self, live: float, now_unix_s: float) -> Floats:
        """Live sequences by draw, in this hour and the AHEAD - 1 after it.

        `live`: their mean in this hour so far.
        """
        passed = now_unix_s % HOUR_S / HOUR_S
        expected = self._forecast(np.array([len(self._known)]), live, passed)
        return np.asarray(np.maximum(0.0, (expected + 1) * np.exp(self._errors) - 1))

    def _drawn_errors(self) -> Floats:
        random = np.random.default_rng(0)
        known, n = self._known, len(self._known)
        by_day = random.standard_normal((DRAWS, AHEAD // DAY)).repeat(DAY, axis=1)
        errors = _WIDE * (by_day + random.standard_normal((DRAWS, 1))) / 2**0.5
        chosen, seen = random.random(DRAWS), random.random(DRAWS)
        origins = np.arange(max(DAY, min(n // 2, 2 * WEEK)), n - 5)  # that knew about as much
        alike = origins[(n - origins + 3) % DAY <= 6]  # of about this time of the day
        origins = alike if len(alike) >= 14 else origins
        if len(origins):
            hours = origins[:, None] + np.arange(AHEAD)
            came = np.where(hours < n, known[np.minimum(hours, n - 1)], np.nan)
            missed = np.log((came + 1) / (self._forecast(origins) + 1))
            for path in missed:  # where nothing is known the error before it stays
                last = np.maximum.accumulate(np.where(np.isnan(path), 0, np.arange(AHEAD)))
                path[:] = np.nan_to_num(path[last])
            days = np.count_nonzero(~np.isnan(known)) / DAY
            drawn = missed[(chosen * len(origins)).astype(np.int64)]
            errors = np.where((seen > 1 / (1 + days**1.5 / 2))[:, None], drawn, errors)
        return np.asarray(errors)

    def _forecast(self, origins: Ints, live: float | None = None, passed: float = 0.0) -> Floats:
        """Expected live sequences in AHEAD hours from each origin."""
        ahead = np.arange(AHEAD)
        hours = origins[:, None] + ahead
        base = _baseline(self._known, np.repeat(origins, AHEAD), hours.ravel()).reshape(hours.shape)
        whole = self._known[~np.isnan(self._known)]
        base[np.isnan(base)] = whole.mean() if len(whole) else live or 0.0
        steps = np.nan_to_num(np.concatenate([np.zeros(DAY), self._steps]))
        last_day = steps[origins[:, None] + np.arange(DAY)]
        long, short = last_day.mean(axis=1)[:, None], last_day[:, -1:]
        if live is not None:
            short = short + passed * (np.log((live + 1) / (base[:, :1] + 1)) - short)
        differs = long * _LONG**ahead + (short - long) * _SHORT**ahead
        return np.asarray((base + 1) * np.exp(differs) - 1)


def _baseline(known: Floats, origin: Ints, hours: Ints) -> Floats:
    """The mean of the same hours before `origin`: of the week and, weighing less, of the day.

    NaN where none is known.
    """
    total, weight = np.zeros(len(hours)), np.zeros(len(hours))
    for back, most, weighs in ((WEEK, 4, 1.0), (DAY, 7, 0.2)):
        for k in range(1, most + 1 + AHEAD // back):
            at = hours - back * k
            usable = (at >= 0) & (at < origin)
            values = known[np.where(usable, at, 0)] if len(known) else total
            usable &= ~np.isnan(values)
            total += np.where(usable, weighs * values, 0.0)
            weight += weighs * usable
    return np.where(weight > 0, total / np.maximum(weight, 1e-9), np.nan)
