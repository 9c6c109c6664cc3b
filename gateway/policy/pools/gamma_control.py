"""Move gamma, the width of the compression windows, by what compression achieves there.

FleetOpt plans gamma from the share p_c of prompts that compress and from what that costs; both are
assumptions until traffic shows them. Rules, once a minute, on evidence since the last move:

- Tighten by one step when under half of the prompts in the outermost step fit, or when a
  compressed prompt costs more than `dearest_s` of waiting, refused ones included.
- Relax by one step when over four fifths of them fit and the cost is below half of the limit.
- No oscillation: a gamma that was too wide is remembered for an hour, and for twice as long each
  time it proves too wide again, up to a day.
- Gamma stays within the planner's bounds. The least is above 1, so that evidence keeps coming.

Each gateway replica decides by itself, from its own requests.
"""

from collections.abc import Sequence
from typing import Final

from gateway.policy.pools.compression_watch import BINS, STEP, CompressionWatch, bin_of
from gateway.records.record import Record

MIN_GAMMA: Final = 1.1
"""The least and the largest gamma above 1 that the planner considers."""
MAX_GAMMA: Final = 2.0
_MIN_SAMPLES: Final = 5
_MAX_SAMPLES: Final = 60


class GammaRules(Record, frozen=True, kw_only=True):
    """Thresholds; shares of prompts."""

    tighten_below: float = 0.5
    relax_above: float = 0.8
    fewest: int = 30
    """Prompts needed to judge a share or a cost."""
    dearest_s: float = 0.1
    """Most waiting that a compressed prompt may cost."""
    ceiling_s: float = 3600.0
    longest_ceiling_s: float = 86_400.0


class GammaSample(Record, frozen=True, kw_only=True):
    """Results of the compressor since the previous sample."""

    tried: int = 0
    compressed: int = 0
    seconds: float = 0.0
    tried_at: tuple[int, ...] = (0,) * BINS
    fitted: tuple[int, ...] = (0,) * BINS


class GammaMove(Record, frozen=True, kw_only=True):
    """A step of gamma, and why."""

    before: float
    after: float
    reason: str


class GammaControl:
    """Gamma of one model. Pure: called with a sample every minute."""

    def __init__(
        self, start: float, *, rules: GammaRules | None = None, observe: bool = False
    ) -> None:
        """`start`: as configured, above 1; `observe`: report moves without applying them."""
        self.gamma = start
        self.observe = observe
        self._rules = rules or GammaRules()
        self._least, self._most = min(MIN_GAMMA, start), max(MAX_GAMMA, start)
        self._samples: list[GammaSample] = []
        self._ceiling = 0.0
        self._ceiling_s = 0.0
        self._ceiling_until_s = 0.0

    def step(self, now_s: float, sample: GammaSample) -> GammaMove | None:
        """Take a sample; returns the move that follows, or None."""
        self._samples = [*self._samples[1 - _MAX_SAMPLES :], sample]
        if len(self._samples) < _MIN_SAMPLES:
            return None
        found = self._wanted(now_s)
        if found is None:
            return None
        after, reason = found
        after = round(min(max(after, self._least), self._most), 2)
        if after == self.gamma:
            return None
        move = GammaMove(before=self.gamma, after=after, reason=reason)
        self._samples = []
        if not self.observe:
            if after < self.gamma:
                self._remember(now_s)
            self.gamma = after
        return move

    def _wanted(self, now_s: float) -> tuple[float, str] | None:
        """The gamma that the evidence asks for, and why; None to stay."""
        rules, at = self._rules, bin_of(self.gamma)
        tried = sum(sample.tried for sample in self._samples)
        done = sum(sample.compressed for sample in self._samples)
        waited_s = sum(sample.seconds for sample in self._samples)
        outer = sum(sample.tried_at[at] for sample in self._samples)
        share = sum(sample.fitted[at] for sample in self._samples) / max(outer, 1)
        cost_s = waited_s / max(done, 1)
        lower, higher = 1 + at * STEP, 1 + (bin_of(self.gamma + STEP) + 1) * STEP
        if tried >= rules.fewest and cost_s > rules.dearest_s:
            return lower, f"a compressed prompt costs {1000 * cost_s:.0f} ms of waiting"
        if outer < rules.fewest:
            return None
        why = f"{share:.0%} of {outer} prompts fit in the outermost step"
        if share < rules.tighten_below:
            return lower, why
        cheap = cost_s < rules.dearest_s / 2
        allowed = now_s >= self._ceiling_until_s or higher < self._ceiling - STEP / 2
        return (higher, why) if share > rules.relax_above and cheap and allowed else None

    def _remember(self, now_s: float) -> None:
        """Note that the present gamma was too wide."""
        rules = self._rules
        again = 0 < self._ceiling <= self.gamma + STEP / 2
        longer_s = min(2 * self._ceiling_s, rules.longest_ceiling_s)
        self._ceiling_s = longer_s if again else rules.ceiling_s
        self._ceiling, self._ceiling_until_s = self.gamma, now_s + self._ceiling_s


class GammaSampler:
    """Differences of a watch's totals between two looks."""

    def __init__(self, watch: CompressionWatch) -> None:
        self._watch = watch
        self._last = _totals(watch)

    def sample(self) -> GammaSample:
        """What came since the last look."""
        before, now = self._last, _totals(self._watch)
        self._last = now
        return GammaSample(
            tried=now.tried - before.tried,
            compressed=now.compressed - before.compressed,
            seconds=now.seconds - before.seconds,
            tried_at=_risen(now.tried_at, before.tried_at),
            fitted=_risen(now.fitted, before.fitted),
        )


def _totals(watch: CompressionWatch) -> GammaSample:
    return GammaSample(
        tried=watch.tried,
        compressed=watch.compressed,
        seconds=watch.seconds,
        tried_at=tuple(watch.tried_at),
        fitted=tuple(watch.fitted),
    )


def _risen(now: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(now, before, strict=True))
