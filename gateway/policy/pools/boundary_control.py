"""Moving the boundaries between pools by what goes wrong: error-driven threshold discovery.

The token-budget paper (section 7) names the idea and no figures; section 8 gives the alert that
the first threshold is: more than 1 % preempted over 5 minutes. What goes wrong in a pool is

- preemptions of its engines, for each request they finished;
- rescues: an engine refused a request of this pool as too long;
- overruns: an answer that its client did not limit ended at this pool's window.

The shares of the three are added. Where several tenants use a pool, rescues and overruns of one
count no more than those of all others together (and never fewer than two): a tenant can forge
them. Rules, for each boundary by the pool below it:

- Tighten: -10 % when the share exceeds 1 % over five minutes. While it goes on, each further
  step takes one minute of evidence, after one that is left out (requests of the old boundary
  are still running then), and waits while the pool's backlog falls.
- Relax: +2 % when the share is under 0.2 % over five minutes, or over as many more as it takes
  to see enough requests to tell, an hour at most, and the pool was never full. Between the two
  thresholds nothing moves.
- No oscillation: a boundary that was too much is remembered for an hour, and each time it turns
  out so again for twice as long, up to a day. Until then nothing is tried above 95 % of it.
- Within the configured minimum and the pool's window, and strictly between its neighbours.

Several gateways decide each by itself. They read the same engines' preemptions and see equal
samples of rescues and overruns, so that they move alike, though not in the same minute.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from gateway.records.record import Record

SAMPLE_S: Final = 60.0
"""Time between two calls of `step`; a window is five samples."""
_WINDOW_SAMPLES: Final = 5
_MOST_SAMPLES: Final = 60
"""Of a pool with few requests, to relax."""
_DRAINING: Final = 0.95
"""A pool drains when it is less full than this share of a minute ago."""


class BoundaryRules(Record, frozen=True, kw_only=True):
    """Thresholds and steps; shares of requests."""

    tighten_above: float = 0.01
    tighten_by: float = 0.10
    relax_below: float = 0.002
    relax_by: float = 0.02
    near_ceiling: float = 0.95
    """Share of a boundary that was too much up to which it may rise again."""
    ceiling_s: float = 3600.0
    """How long it is remembered at first."""
    longest_ceiling_s: float = 86_400.0
    fullest: float = 0.7
    """A pool that is fuller takes nothing more: loads vary from minute to minute."""
    fewest_errors: int = 3
    fewest_requests: int = 500
    """To call a share small: 0.2 % of them is one request. An hour does with fewer."""
    always_counted: int = 2
    """Rescues and overruns of one tenant that count whatever the others' are."""


class Sample(Record, frozen=True, kw_only=True):
    """What happened in one pool since the sample before."""

    requests: int = 0
    """That this gateway sent to it."""
    rescues: int = 0
    overruns: int = 0
    wrong: Mapping[str, int] | None = None
    """Rescues and overruns by tenant; None where the pool has one tenant, or none is told."""
    preemptions: float = 0.0
    finished: float = 0.0
    """Requests its engines finished, whoever sent them."""
    load: float = 0.0
    """Share of its slots or of its KV cache in use now, whichever is more."""


class Bounds(Record, frozen=True, kw_only=True):
    """One boundary as configured, in tokens: least <= start <= most."""

    pool: str
    start: int
    least: int
    most: int
    """The pool's window."""


class Move(Record, frozen=True, kw_only=True):
    """A step of one boundary, and why."""

    boundary: int
    """Index: of the pool below it."""
    pool: str
    before: int
    after: int
    share: float
    """Of requests that something went wrong with."""
    reason: str


class BoundaryControl:
    """The boundaries of one model. Pure: called with a sample of each pool every SAMPLE_S."""

    def __init__(
        self,
        bounds: Sequence[Bounds],
        *,
        rules: BoundaryRules | None = None,
        observe: bool = False,
    ) -> None:
        """`observe`: steps are found and not taken."""
        self._rules = rules or BoundaryRules()
        self.observe = observe
        self._all = [_Boundary(b) for b in bounds]

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Tokens, one for each pool but the last."""
        return tuple(one.tokens for one in self._all)

    @property
    def shares(self) -> tuple[float, ...]:
        """What went wrong in each pool's present window, as shares of requests."""
        return tuple(_share(one.window, self._rules) for one in self._all)

    def step(self, now_s: float, samples: Sequence[Sample]) -> list[Move]:
        """Take a sample of each pool but the last; the moves that follow from it."""
        moves = []
        for index, (one, sample) in enumerate(zip(self._all, samples, strict=True)):
            found = one.decide(now_s, sample, self._rules)
            if found is None:
                continue
            after = min(max(found.tokens, self._lowest(index)), self._highest(index))
            if (after < one.tokens) != found.tighten or after == one.tokens:
                continue
            moves.append(
                Move(
                    boundary=index,
                    pool=one.bounds.pool,
                    before=one.tokens,
                    after=after,
                    share=_share(found.window, self._rules),
                    reason=_reason(found.window, self._rules, tighten=found.tighten),
                )
            )
            one.moved(
                None if self.observe else after,
                tighten=found.tighten,
                now_s=now_s,
                rules=self._rules,
            )
        return moves

    def _lowest(self, index: int) -> int:
        least = self._all[index].bounds.least
        return least if index == 0 else max(least, self._all[index - 1].tokens + 1)

    def _highest(self, index: int) -> int:
        most = self._all[index].bounds.most
        if index + 1 == len(self._all):
            return most
        return min(most, self._all[index + 1].tokens - 1)


class _Found(Record, frozen=True, kw_only=True):
    tighten: bool
    tokens: int
    window: tuple[Sample, ...]
    """What it follows from."""


class _Boundary:
    """One boundary: where it is, what it saw since it moved, and where it was too high."""

    __slots__ = (
        "_ceiling",
        "_ceiling_s",
        "_ceiling_until_s",
        "_load",
        "_samples",
        "_skip",
        "_urgent",
        "bounds",
        "tokens",
    )

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.tokens = bounds.start
        self._samples: list[Sample] = []
        self._ceiling = 0
        """The last boundary that was too much; 0 for none yet."""
        self._ceiling_s = 0.0
        self._ceiling_until_s = 0.0
        self._urgent = False
        self._skip = False
        self._load = 0.0

    @property
    def window(self) -> tuple[Sample, ...]:
        """The last five minutes, or since it moved."""
        return tuple(self._samples[-_WINDOW_SAMPLES:])

    def decide(self, now_s: float, sample: Sample, rules: BoundaryRules) -> _Found | None:
        """What follows from one sample more; None for nothing."""
        draining, self._load = sample.load < _DRAINING * self._load, sample.load
        if self._skip:
            self._skip = False
            return None
        self._samples = [*self._samples[1 - _MOST_SAMPLES :], sample]
        window = self.window
        whole = len(window) == _WINDOW_SAMPLES
        wrong = (
            _share(window, rules) > rules.tighten_above
            and _errors(window, rules) >= rules.fewest_errors
        )
        if wrong and (whole or (self._urgent and not draining)):
            lower = math.floor(self.tokens * (1 - rules.tighten_by))
            return _Found(tighten=True, tokens=lower, window=window)
        self._urgent = wrong and self._urgent
        calm = self._calm(rules)
        if calm:
            higher = math.ceil(self.tokens * (1 + rules.relax_by))
            if now_s >= self._ceiling_until_s or higher <= rules.near_ceiling * self._ceiling:
                return _Found(tighten=False, tokens=higher, window=calm)
        return None

    def moved(
        self, tokens: int | None, *, tighten: bool, now_s: float, rules: BoundaryRules
    ) -> None:
        """It moved, or would have (`tokens` None): its evidence begins anew."""
        self._samples = []
        if tokens is None:
            return
        if tighten:
            if not self._urgent:
                again = self.tokens >= (1 - rules.tighten_by) * self._ceiling > 0
                longer_s = min(2 * self._ceiling_s, rules.longest_ceiling_s)
                self._ceiling_s = longer_s if again else rules.ceiling_s
            self._ceiling, self._ceiling_until_s = self.tokens, now_s + self._ceiling_s
        self._skip = self._urgent = tighten
        self.tokens = tokens

    def _calm(self, rules: BoundaryRules) -> tuple[Sample, ...]:
        """The minutes that say that it may rise; none while they do not."""
        for count in range(_WINDOW_SAMPLES, len(self._samples) + 1):
            window = tuple(self._samples[-count:])
            requests = sum(s.requests for s in window)
            if requests >= rules.fewest_requests or (requests and count == _MOST_SAMPLES):
                fullest = max(s.load for s in window)
                small = _share(window, rules) < rules.relax_below
                return window if small and fullest <= rules.fullest else ()
        return ()


def _forged(window: Sequence[Sample], rules: BoundaryRules) -> int:
    """Rescues and overruns that do not count: one tenant's beyond all others' together."""
    wrong: Counter[str] = Counter()
    for sample in window:
        wrong.update(sample.wrong or {})
    if not wrong:
        return 0
    most = max(wrong.values())
    return max(0, most - max(wrong.total() - most, rules.always_counted))


def _parts(window: Sequence[Sample], rules: BoundaryRules) -> tuple[float, float, float]:
    """Preemptions a request, and shares rescued and overrun; 0 without requests."""
    finished = sum(s.finished for s in window)
    requests = sum(s.requests for s in window)
    # Engines that preempt and finish nothing are at their worst, not idle.
    preempted = sum(s.preemptions for s in window) / max(1.0, finished)
    rescues, overruns = sum(s.rescues for s in window), sum(s.overruns for s in window)
    if not requests or not rescues + overruns:
        return preempted, 0.0, 0.0
    counted = max(0.0, 1 - _forged(window, rules) / (rescues + overruns))
    return preempted, counted * rescues / requests, counted * overruns / requests


def _share(window: Sequence[Sample], rules: BoundaryRules) -> float:
    return sum(_parts(window, rules))


def _errors(window: Sequence[Sample], rules: BoundaryRules) -> float:
    return sum(s.preemptions + s.rescues + s.overruns for s in window) - _forged(window, rules)


def _reason(window: Sequence[Sample], rules: BoundaryRules, *, tighten: bool) -> str:
    preempted, rescued, overrun = (100 * part for part in _parts(window, rules))
    limit = rules.tighten_above if tighten else rules.relax_below
    return (
        f"{preempted:.2g} % preempted, {rescued:.2g} % rescued, {overrun:.2g} % overrun in "
        f"{len(window)} min, {'above' if tighten else 'under'} {100 * limit:g} %"
    )
