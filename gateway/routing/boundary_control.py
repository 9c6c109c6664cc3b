"""Move the boundaries between pools by the rate of errors (error-driven threshold discovery).

The token-budget paper (section 7) names the idea without figures; the first threshold is the
alert in its section 8: more than 1 % preempted over 5 minutes. The errors of a pool are

- preemptions of its engines, per request that they finished;
- rescues: an engine refused a request of this pool as too long;
- overruns: an answer that its client did not limit ended at this pool's window.

The shares of the three are added. Because a tenant can forge rescues and overruns, those of one
tenant in a shared pool count no more than those of all others together (but at least two count).
Rules for each boundary, by the errors of the pool below it:

- Tighten: -10 % when the share exceeds 1 % over five minutes. While it stays above, each further
  step skips one minute (requests of the old boundary are still running), takes one minute of
  evidence, and waits while the pool's load falls.
- Relax: +2 % when the share is under 0.2 % over five minutes (extended, up to an hour, until
  enough requests were seen) and the pool was never full. Between the two thresholds nothing moves.
- No oscillation: a boundary that was too high is remembered as a ceiling for an hour, and for
  twice as long each time it proves too high again, up to a day. Until then the boundary rises to
  at most 95 % of it.
- A boundary stays within the configured minimum and the pool's window, and strictly between its
  neighbours.

Each gateway replica decides by itself. All read the same engines' preemptions and see equal
samples of rescues and overruns, so they move alike, though not in the same minute.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from gateway.records.record import Record

SAMPLE_S: Final = 60.0
"""Time between two calls of `step`; a window is five samples."""
_WINDOW_SAMPLES: Final = 5
_MAX_SAMPLES: Final = 60
"""The longest window for relaxing, used in a pool with few requests."""
_DRAINING: Final = 0.95
"""A pool is draining when its load is below this share of its load a minute ago."""


class BoundaryRules(Record, frozen=True, kw_only=True):
    """Thresholds and steps; shares of requests."""

    tighten_above: float = 0.01
    tighten_by: float = 0.10
    relax_below: float = 0.002
    relax_by: float = 0.02
    near_ceiling: float = 0.95
    """Share of the remembered ceiling up to which a boundary may rise again."""
    ceiling_s: float = 3600.0
    """How long a new ceiling is remembered."""
    longest_ceiling_s: float = 86_400.0
    fullest: float = 0.7
    """No relaxing above this load (share in use): loads vary from minute to minute."""
    fewest_errors: int = 3
    fewest_requests: int = 500
    """Requests needed to call a share small: 0.2 % of 500 is one. After an hour, fewer do."""
    always_counted: int = 2
    """Rescues and overruns of one tenant that always count."""


class PoolSample(Record, frozen=True, kw_only=True):
    """Events of one pool since the previous sample."""

    requests: int = 0
    """Requests that this gateway sent to the pool."""
    rescues: int = 0
    overruns: int = 0
    wrong: Mapping[str, int] | None = None
    """Rescues and overruns by tenant; None if the pool has one tenant or they are unknown."""
    preemptions: float = 0.0
    finished: float = 0.0
    """Requests that the pool's engines finished, from any sender."""
    load: float = 0.0
    """The larger of the pool's shares of slots and of KV cache in use now, 0 to 1."""


class BoundaryBounds(Record, frozen=True, kw_only=True):
    """One boundary as configured, in tokens: least <= start <= most."""

    pool: str
    start: int
    least: int
    most: int
    """The pool's window."""


class Move(Record, frozen=True, kw_only=True):
    """A step of one boundary, and why."""

    boundary: int
    """Index of the boundary, which is that of the pool below it."""
    pool: str
    before: int
    after: int
    share: float
    """Errors as a share of requests."""
    reason: str


class BoundaryControl:
    """The boundaries of one model. Pure: called with a sample of each pool every SAMPLE_S."""

    def __init__(self, bounds: Sequence[BoundaryBounds], *, observe: bool = False) -> None:
        """`observe`: report the moves without applying them."""
        self._rules = BoundaryRules()
        self.observe = observe
        self._all = [_Boundary(b) for b in bounds]

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The boundaries in tokens, one for each pool but the last."""
        return tuple(one.tokens for one in self._all)

    @property
    def shares(self) -> tuple[float, ...]:
        """Errors in each pool's present window, as shares of requests."""
        return tuple(_share(one.window, self._rules) for one in self._all)

    def step(self, now_s: float, samples: Sequence[PoolSample]) -> list[Move]:
        """Take a sample of each pool but the last; returns the moves that follow."""
        moves = []
        for index, (one, sample) in enumerate(zip(self._all, samples, strict=True)):
            found = one.decide(now_s, sample, self._rules)
            if found is None:
                continue
            least, most = one.bounds.least, one.bounds.most
            if index > 0:
                least = max(least, self._all[index - 1].tokens + 1)
            if index + 1 < len(self._all):
                most = min(most, self._all[index + 1].tokens - 1)
            after = min(max(found.tokens, least), most)
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


class _Found(Record, frozen=True, kw_only=True):
    tighten: bool
    tokens: int
    window: tuple[PoolSample, ...]
    """The samples that it follows from."""


class _Boundary:
    """One boundary: its position, the samples since its last move, and its ceiling."""

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

    def __init__(self, bounds: BoundaryBounds) -> None:
        self.bounds = bounds
        self.tokens = bounds.start
        self._samples: list[PoolSample] = []
        self._ceiling = 0
        """The last boundary that was too high, in tokens; 0 for none yet."""
        self._ceiling_s = 0.0
        self._ceiling_until_s = 0.0
        self._urgent = False
        self._skip = False
        self._load = 0.0

    @property
    def window(self) -> tuple[PoolSample, ...]:
        """The samples of the last five minutes, or since the last move."""
        return tuple(self._samples[-_WINDOW_SAMPLES:])

    def decide(self, now_s: float, sample: PoolSample, rules: BoundaryRules) -> _Found | None:
        """Take one more sample; returns the move that follows, or None."""
        draining, self._load = sample.load < _DRAINING * self._load, sample.load
        if self._skip:
            self._skip = False
            return None
        self._samples = [*self._samples[1 - _MAX_SAMPLES :], sample]
        window = self.window
        whole = len(window) == _WINDOW_SAMPLES
        errors = sum(s.preemptions + s.rescues + s.overruns for s in window)
        errors -= _forged(window, rules)
        wrong = _share(window, rules) > rules.tighten_above and errors >= rules.fewest_errors
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
        """Note a move to `tokens` (None: only observed); the evidence starts afresh."""
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

    def _calm(self, rules: BoundaryRules) -> tuple[PoolSample, ...]:
        """The samples that show that the boundary may rise; () if they do not."""
        for count in range(_WINDOW_SAMPLES, len(self._samples) + 1):
            window = tuple(self._samples[-count:])
            requests = sum(s.requests for s in window)
            if requests >= rules.fewest_requests or (requests and count == _MAX_SAMPLES):
                fullest = max(s.load for s in window)
                small = _share(window, rules) < rules.relax_below
                return window if small and fullest <= rules.fullest else ()
        return ()


def _forged(window: Sequence[PoolSample], rules: BoundaryRules) -> int:
    """Rescues and overruns that do not count: those of one tenant beyond all others' total."""
    wrong: Counter[str] = Counter()
    for sample in window:
        wrong.update(sample.wrong or {})
    if not wrong:
        return 0
    most = max(wrong.values())
    return max(0, most - max(wrong.total() - most, rules.always_counted))


def _parts(window: Sequence[PoolSample], rules: BoundaryRules) -> tuple[float, float, float]:
    """Preemptions per finished request, and shares of requests rescued and overrun."""
    finished = sum(s.finished for s in window)
    requests = sum(s.requests for s in window)
    # Engines that preempt without finishing anything are overloaded, not idle.
    preempted = sum(s.preemptions for s in window) / max(1.0, finished)
    rescues, overruns = sum(s.rescues for s in window), sum(s.overruns for s in window)
    if not requests or not rescues + overruns:
        return preempted, 0.0, 0.0
    counted = max(0.0, 1 - _forged(window, rules) / (rescues + overruns))
    return preempted, counted * rescues / requests, counted * overruns / requests


def _share(window: Sequence[PoolSample], rules: BoundaryRules) -> float:
    return sum(_parts(window, rules))


def _reason(window: Sequence[PoolSample], rules: BoundaryRules, *, tighten: bool) -> str:
    preempted, rescued, overrun = (100 * part for part in _parts(window, rules))
    limit = rules.tighten_above if tighten else rules.relax_below
    return (
        f"{preempted:.2g} % preempted, {rescued:.2g} % rescued, {overrun:.2g} % overrun in "
        f"{len(window)} min, {'above' if tighten else 'under'} {100 * limit:g} %"
    )
