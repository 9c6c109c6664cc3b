"""Move the boundaries between pools by errors, and by unequal pressure.

The first rule is error-driven threshold discovery.

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
  enough requests were seen), the pool was never full, and the larger one was busier. Between the
  two thresholds nothing moves.
- No oscillation: a boundary that was too high, by either rule, is remembered as a ceiling for an
  hour, and for twice as long each time it proves too high again, up to a day. Until then the
  boundary rises to at most 95 % of it.
- A boundary stays within the configured minimum and the pool's window, and strictly between its
  neighbours.

The second rule follows Proposition 1 of FleetOpt: with nodes of one kind, a boundary is best where
both pools are equally busy. It applies where errors ask for no tightening:

- One pool queues and its neighbour idles, in each of five samples: the boundary moves by 10 %
  towards the one that idles, and five new samples are needed for another move.
- Up, it needs errors as rare as for relaxing.

Each gateway replica decides by itself. All read the same engines' preemptions and see equal
samples of rescues and overruns, so they move alike, though not in the same minute.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from gateway.records.record import Record

SAMPLE_S: Final = 60.0
"""Time between two calls of `step`; a window is five samples."""
TIGHTEN_ABOVE: Final = 0.01
TIGHTEN_BY: Final = 0.10
RELAX_BELOW: Final = 0.002
RELAX_BY: Final = 0.02
QUEUES_ABOVE: Final = 0.1
"""A pool queues while more wait than this share of its slots, or find no place in it than this
share of its requests."""
IDLES_BELOW: Final = 0.5
"""A pool idles while its load is below this, and it does not queue."""
NEAR_CEILING: Final = 0.95
"""Share of the remembered ceiling up to which a boundary may rise again."""
CEILING_S: Final = 3600.0
"""How long a new ceiling is remembered."""
LONGEST_CEILING_S: Final = 86_400.0
FULLEST: Final = 0.7
"""No relaxing above this load (share in use): loads vary from minute to minute."""
FEWEST_ERRORS: Final = 3
FEWEST_REQUESTS: Final = 500
"""Requests needed to call a share small: 0.2 % of 500 is one. After an hour, fewer do."""
ALWAYS_COUNTED: Final = 2
"""Rescues and overruns of one tenant that always count."""
_WINDOW_SAMPLES: Final = 5
_MAX_SAMPLES: Final = 60
"""The longest window for relaxing, used in a pool with few requests."""
_DRAINING: Final = 0.95
"""A pool is draining when its load is below this share of its load a minute ago."""


@dataclass(kw_only=True)
class PoolSample:
    """Events of one pool since the previous sample."""

    requests: int = 0
    """Requests that this gateway sent to an engine of the pool."""
    rescues: int = 0
    """Requests that an engine of the pool refused as too long, confirmed by usage."""
    overruns: int = 0
    wrong: dict[str, int] = field(default_factory=dict)
    """Rescues and overruns by tenant; empty if the pool has one tenant or they are unknown."""
    preemptions: float = 0.0
    finished: float = 0.0
    """Requests that the pool's engines finished, from any sender."""
    load: float = 0.0
    """The larger of the pool's shares of slots and of KV cache in use now, 0 to 1."""
    waiting: float = 0.0
    """Sequences that wait for its engines or at them now, as a share of its slots."""
    turned_away: int = 0
    """Requests that belong to it and were refused, or spilled to another, for want of room."""

    @property
    def queues(self) -> bool:
        """Whether more is asked of the pool than it can run."""
        asked = self.requests + self.turned_away
        return self.waiting > QUEUES_ABOVE or self.turned_away > QUEUES_ABOVE * asked

    @property
    def idles(self) -> bool:
        """Whether most of the pool is free."""
        return self.load < IDLES_BELOW and not self.queues


class BoundaryBounds(Record, frozen=True, kw_only=True):
    """One boundary as configured, in tokens: least <= start <= most."""

    pool: str
    start: int
    least: int
    most: int
    """The pool's window."""


class Move(Record, frozen=True, kw_only=True):
    """A step of one boundary, and why."""

    pool: str
    """The pool below it."""
    before: int
    after: int
    reason: str


class BoundaryControl:
    """The boundaries of one model. Pure: called with a sample of each pool every SAMPLE_S."""

    def __init__(self, bounds: Sequence[BoundaryBounds], *, observe: bool = False) -> None:
        """`observe`: report the moves without applying them."""
        self.observe = observe
        self._all = [_Boundary(b) for b in bounds]

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The boundaries in tokens, one for each pool but the last."""
        return tuple(boundary.tokens for boundary in self._all)

    @property
    def shares(self) -> tuple[float, ...]:
        """Errors in each pool's present window, as shares of requests."""
        return tuple(sum(_parts(boundary.window)) for boundary in self._all)

    def step(self, now_s: float, samples: Sequence[PoolSample]) -> list[Move]:
        """Take a sample of each pool; returns the moves that follow."""
        moves = []
        pairs = zip(self._all, pairwise(samples), strict=True)
        for index, (boundary, (smaller, larger)) in enumerate(pairs):
            wanted = boundary.decide(now_s, smaller, larger)
            if wanted is None:
                continue
            least, most = boundary.bounds.least, boundary.bounds.most
            if index > 0:
                least = max(least, self._all[index - 1].tokens + 1)
            if index + 1 < len(self._all):
                most = min(most, self._all[index + 1].tokens - 1)
            tighten, after = wanted.tokens < boundary.tokens, min(max(wanted.tokens, least), most)
            if (after < boundary.tokens) != tighten or after == boundary.tokens:
                continue
            name = boundary.bounds.pool
            moves.append(Move(pool=name, before=boundary.tokens, after=after, reason=wanted.reason))
            boundary.moved(wanted, None if self.observe else after, now_s)
        return moves


class _Wanted(NamedTuple):
    """Where a rule wants a boundary."""

    tokens: int
    reason: str
    urgent: bool = False
    """Whether errors ask for it, and the next step need not wait for five samples."""


class _Boundary:
    """One boundary: its position, the samples since its last move, and its ceiling."""

    def __init__(self, bounds: BoundaryBounds) -> None:
        self.bounds = bounds
        self.tokens = bounds.start
        self._samples: list[tuple[PoolSample, PoolSample]] = []
        """Of the pools below and above it."""
        self._ceiling = 0
        """The last boundary that was too high, in tokens; 0 for none yet."""
        self._ceiling_s = 0.0
        self._ceiling_until_s = 0.0
        self._urgent = False
        self._skip = False
        self._load = 0.0

    @property
    def window(self) -> list[PoolSample]:
        """Of the pool below, the samples of the last five minutes, or since the last move."""
        return [smaller for smaller, _ in self._samples[-_WINDOW_SAMPLES:]]

    def decide(self, now_s: float, smaller: PoolSample, larger: PoolSample) -> _Wanted | None:
        """Take one more sample of the pools on both sides; returns where to move, None to stay."""
        draining, self._load = smaller.load < _DRAINING * self._load, smaller.load
        if self._skip:
            self._skip = False
            return None
        self._samples = [*self._samples[1 - _MAX_SAMPLES :], (smaller, larger)]
        wanted = self._by_errors(now_s, draining=draining)
        if wanted is not None and wanted.urgent:
            return wanted
        return self._by_pressure(now_s) or wanted

    def _by_pressure(self, now_s: float) -> _Wanted | None:
        """Where equal pressure is sought; None to stay."""
        pairs = self._samples[-_WINDOW_SAMPLES:]
        up = all(larger.queues and smaller.idles for smaller, larger in pairs)
        down = all(smaller.queues and larger.idles for smaller, larger in pairs)
        if len(pairs) < _WINDOW_SAMPLES or not (up or down):
            return None
        full = [larger if up else smaller for smaller, larger in pairs]
        free = [smaller if up else larger for smaller, larger in pairs]
        reason = (
            f"the {'larger' if up else 'smaller'} pool queues for {len(pairs)} min (at least "
            f"{100 * min(s.waiting for s in full):.0f} % of its slots wait, "
            f"{sum(s.turned_away for s in full)} requests found no place), the other idles (at "
            f"most {100 * max(s.load for s in free):.0f} % in use)"
        )
        if down:
            return _Wanted(math.floor(self.tokens * (1 - TIGHTEN_BY)), reason)
        if sum(_parts(free)) >= RELAX_BELOW:
            return None
        higher = math.ceil(self.tokens * (1 + TIGHTEN_BY))
        if now_s < self._ceiling_until_s:
            higher = min(higher, max(self.tokens, math.floor(NEAR_CEILING * self._ceiling)))
        return _Wanted(higher, reason)

    def _by_errors(self, now_s: float, *, draining: bool) -> _Wanted | None:
        """Where errors of the pool below ask for the boundary; None to stay."""
        window = self.window
        errors = sum(s.preemptions + s.rescues + s.overruns for s in window) - _forged(window)
        wrong = sum(_parts(window)) > TIGHTEN_ABOVE and errors >= FEWEST_ERRORS
        if wrong and (len(window) == _WINDOW_SAMPLES or (self._urgent and not draining)):
            reason = f"{_said(window)}, above {100 * TIGHTEN_ABOVE:g} %"
            return _Wanted(math.floor(self.tokens * (1 - TIGHTEN_BY)), reason, urgent=True)
        self._urgent = wrong and self._urgent
        higher = math.ceil(self.tokens * (1 + RELAX_BY))
        if now_s < self._ceiling_until_s and higher > NEAR_CEILING * self._ceiling:
            return None
        for count in range(_WINDOW_SAMPLES, len(self._samples) + 1):
            window = [smaller for smaller, _ in self._samples[-count:]]
            requests = sum(s.requests for s in window)
            if requests >= FEWEST_REQUESTS or (requests and count == _MAX_SAMPLES):
                calm = sum(_parts(window)) < RELAX_BELOW and max(s.load for s in window) <= FULLEST
                busier = sum(larger.load - s.load for s, larger in self._samples[-count:]) > 0
                reason = f"{_said(window)}, under {100 * RELAX_BELOW:g} %"
                return _Wanted(higher, reason) if calm and busier else None
        return None

    def moved(self, wanted: _Wanted, tokens: int | None, now_s: float) -> None:
        """Note a move to `tokens` (None: only observed); the evidence starts afresh."""
        self._samples = []
        if tokens is None:
            return
        if tokens < self.tokens:
            if not self._urgent:
                again = self.tokens >= (1 - TIGHTEN_BY) * self._ceiling > 0
                longer_s = min(2 * self._ceiling_s, LONGEST_CEILING_S)
                self._ceiling_s = longer_s if again else CEILING_S
            self._ceiling, self._ceiling_until_s = self.tokens, now_s + self._ceiling_s
        self._skip = self._urgent = wanted.urgent
        self.tokens = tokens


def _forged(window: Sequence[PoolSample]) -> int:
    """Rescues and overruns that do not count: those of one tenant beyond all others' total."""
    wrong: Counter[str] = Counter()
    for sample in window:
        wrong.update(sample.wrong)
    if not wrong:
        return 0
    most = max(wrong.values())
    return max(0, most - max(wrong.total() - most, ALWAYS_COUNTED))


def _said(window: Sequence[PoolSample]) -> str:
    """Errors in words."""
    preempted, rescued, overrun = (100 * part for part in _parts(window))
    return (
        f"{preempted:.2g} % preempted, {rescued:.2g} % rescued, {overrun:.2g} % overrun "
        f"in {len(window)} min"
    )


def _parts(window: Sequence[PoolSample]) -> tuple[float, float, float]:
    """Preemptions per finished request, and shares of requests rescued and overrun."""
    finished = sum(s.finished for s in window)
    requests = sum(s.requests for s in window)
    # Engines that preempt without finishing anything are overloaded, not idle.
    preempted = sum(s.preemptions for s in window) / max(1.0, finished)
    rescues, overruns = sum(s.rescues for s in window), sum(s.overruns for s in window)
    if not requests or not rescues + overruns:
        return preempted, 0.0, 0.0
    counted = max(0.0, 1 - _forged(window) / (rescues + overruns))
    return preempted, counted * rescues / requests, counted * overruns / requests
