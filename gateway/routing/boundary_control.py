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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.records.record import Record

SAMPLE_S: Final = 60.0
"""Time between two calls of `step`; a window is five samples."""
TIGHTEN_ABOVE: Final = 0.01
TIGHTEN_BY: Final = 0.10
RELAX_BELOW: Final = 0.002
RELAX_BY: Final = 0.02
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
        """Take a sample of each pool but the last; returns the moves that follow."""
        moves = []
        for index, (boundary, sample) in enumerate(zip(self._all, samples, strict=True)):
            wanted, window = boundary.decide(now_s, sample)
            if not window:
                continue
            least, most = boundary.bounds.least, boundary.bounds.most
            if index > 0:
                least = max(least, self._all[index - 1].tokens + 1)
            if index + 1 < len(self._all):
                most = min(most, self._all[index + 1].tokens - 1)
            tighten, after = wanted < boundary.tokens, min(max(wanted, least), most)
            if (after < boundary.tokens) != tighten or after == boundary.tokens:
                continue
            preempted, rescued, overrun = (100 * part for part in _parts(window))
            limit = f"above {100 * TIGHTEN_ABOVE:g}" if tighten else f"under {100 * RELAX_BELOW:g}"
            moves.append(
                Move(
                    pool=boundary.bounds.pool,
                    before=boundary.tokens,
                    after=after,
                    reason=f"{preempted:.2g} % preempted, {rescued:.2g} % rescued, "
                    f"{overrun:.2g} % overrun in {len(window)} min, {limit} %",
                )
            )
            boundary.moved(None if self.observe else after, now_s)
        return moves


class _Boundary:
    """One boundary: its position, the samples since its last move, and its ceiling."""

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
    def window(self) -> list[PoolSample]:
        """The samples of the last five minutes, or since the last move."""
        return self._samples[-_WINDOW_SAMPLES:]

    def decide(self, now_s: float, sample: PoolSample) -> tuple[int, list[PoolSample]]:
        """Take one more sample; returns where to move, and the samples that say so; [] for none."""
        draining, self._load = sample.load < _DRAINING * self._load, sample.load
        if self._skip:
            self._skip = False
            return self.tokens, []
        self._samples = [*self._samples[1 - _MAX_SAMPLES :], sample]
        window = self.window
        errors = sum(s.preemptions + s.rescues + s.overruns for s in window) - _forged(window)
        wrong = sum(_parts(window)) > TIGHTEN_ABOVE and errors >= FEWEST_ERRORS
        if wrong and (len(window) == _WINDOW_SAMPLES or (self._urgent and not draining)):
            return math.floor(self.tokens * (1 - TIGHTEN_BY)), window
        self._urgent = wrong and self._urgent
        higher = math.ceil(self.tokens * (1 + RELAX_BY))
        if now_s < self._ceiling_until_s and higher > NEAR_CEILING * self._ceiling:
            return self.tokens, []
        for count in range(_WINDOW_SAMPLES, len(self._samples) + 1):
            window = self._samples[-count:]
            requests = sum(s.requests for s in window)
            if requests >= FEWEST_REQUESTS or (requests and count == _MAX_SAMPLES):
                calm = sum(_parts(window)) < RELAX_BELOW and max(s.load for s in window) <= FULLEST
                return higher, window if calm else []
        return self.tokens, []

    def moved(self, tokens: int | None, now_s: float) -> None:
        """Note a move to `tokens` (None: only observed); the evidence starts afresh."""
        self._samples = []
        if tokens is None:
            return
        tighten = tokens < self.tokens
        if tighten:
            if not self._urgent:
                again = self.tokens >= (1 - TIGHTEN_BY) * self._ceiling > 0
                longer_s = min(2 * self._ceiling_s, LONGEST_CEILING_S)
                self._ceiling_s = longer_s if again else CEILING_S
            self._ceiling, self._ceiling_until_s = self.tokens, now_s + self._ceiling_s
        self._skip = self._urgent = tighten
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
