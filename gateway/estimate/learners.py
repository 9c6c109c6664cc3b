"""What learns one figure of one tenant from reported usage, and the tables of those by tenant.

Bytes per token (`Ratio`), of one category of texts: a bias-corrected mean and its spread.
- mean: EMA of c_obs with decay beta, divided by the weights' own EMA, so that the first
  observation replaces the prior instead of being averaged with it. (Uncorrected, a 4.0
  start leaves text of 2.0 bytes/token 7.6 % off after 50 observations.)
- Each observation weighs tokens / (tokens + HALF_WEIGHT_TOKENS): an error of the template
  fit or of rounding is a large share of a short prompt and a negligible one of a long prompt.
- spread: a standard deviation (token-budget paper, eq. 5), estimated as 1.25 times the EMA of
  |c_obs - c| with c the mean before the update; outliers move it less than an EMA of squares.
  (Algorithm 1, and so the uncorrected profile, omits the 1.25: twice as many requests near a
  boundary then go to the smaller pool although they do not fit.) It starts at COLD_SPREAD of
  the mean and fades to the observed spread within COLD_OBSERVATIONS.
- Once warm, an observation beyond 5 spreads and a quarter of the mean is an outlier. It moves
  the mean no more than an observation 3 % off would, so a lying worker cannot steer a ratio.
  When outliers on one side become the majority, the traffic has changed: the average restarts
  from them (about 20 observations after a full change).

Fixed tokens (`TwoTermFit`), of a chat template or of media: two coefficients by recursive least
squares. For templates y = t0 x prompts + t1 x messages; for media y = a x parts + b x guessed
tokens.
- The fit is a Kalman filter with a random walk. Each observation has its noise variance, so
  small prompts teach much and long ones next to nothing.
- A residual beyond 4 standard deviations is weighed down (Huber). When such residuals on one
  side become the majority, the filter resets its covariance and follows them.

Answers' lengths (`LengthHistogram`): .95 quantiles of completion tokens.
- Lengths are counted in logarithmic buckets (ratio 1.07) up to 2^20 tokens; a quantile is the
  upper edge of its bucket.
- Old answers fade: weights decay with a memory of 2,000 observations.
- A cut answer (client left, limit reached) is a lower bound of its length: a censored
  observation of the Kaplan-Meier estimator.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, Generic, TypeVar

from gateway.records.estimate import PartState

TAUGHT: Final = 20
"""Observations after which a tenant's own learner is used."""
AGREEING: Final = 3
"""Tenants that a median needs: the third cannot move it out of the range of the other two."""
VOTERS: Final = 64
"""Most tenants that a median is taken over."""
MAX_TENANTS: Final = 1024
_EVERY: Final = 16
"""Observations between two computations of the median."""


class Part:
    """A learned figure whose sums can leave the process and return (`gateway.estimate.merge`)."""

    __slots__ = ("epoch", "observations")

    def __init__(self) -> None:
        self.epoch = 0
        """How often it was restarted."""
        self.observations = 0

    def learned(self) -> PartState:
        """Its sums now."""
        return PartState(epoch=self.epoch, n=self.observations, sums=self.sums())

    def sums(self) -> dict[str, float]:
        """All that it averages over; they decay alike, so they may be averaged over replicas."""
        raise NotImplementedError

    def accepts(self, state: PartState) -> bool:
        """Whether sums from outside are valid for this part."""
        raise NotImplementedError

    def adopt(self, state: PartState) -> None:
        """Continue from these sums, which it must accept."""
        raise NotImplementedError


P = TypeVar("P", bound=Part)


class ByTenant(Generic[P]):
    """The learners of one figure, by tenant.

    - A tenant's requests teach only that tenant's learner. After TAUGHT observations this learner
      alone estimates the tenant's requests: no other tenant influences them.
    - A newer tenant gets the median over the recently taught tenants with TAUGHT observations
      each, at most VOTERS of them. A single tenant, whatever it sends, can move the median no
      further than to another tenant's neighbouring figure.
    - With fewer than AGREEING such tenants a single one could set the median. Then a new tenant
      gets its own learner's figures so far, or the configured start.
    - Memory is bounded: the MAX_TENANTS most recently taught tenants are kept.
    """

    __slots__ = ("_agree", "_agreed", "_common", "_held", "_lessons", "_make", "_start")

    def __init__(self, make: Callable[[], P], agree: Callable[[P, Sequence[P]], None]) -> None:
        """`make` gives a new learner; `agree` sets its first argument to the others' median."""
        self._make = make
        self._agree = agree
        self._start = make()
        self._common = make()
        self._agreed = False
        self._lessons = 0
        """Observations since the median was last computed."""
        self._held: dict[str, P] = {}
        """Tenant -> learner, the most recently taught last."""

    def of(self, tenant: str) -> P:
        """The learner that estimates a tenant's requests. Read-only: teach that of `taught`."""
        return self.own(tenant) or self.agreed() or self.begun(tenant)

    def begun(self, tenant: str) -> P:
        """A tenant's own learner, however little it was taught; its lessons build on it."""
        return self._held.get(tenant, self._start)

    def own(self, tenant: str) -> P | None:
        """A tenant's own learner, if it was taught enough."""
        own = self._held.get(tenant)
        return own if own is not None and own.observations >= TAUGHT else None

    def agreed(self) -> P | None:
        """The median of the tenants' learners, if enough tenants were taught."""
        if self._lessons >= _EVERY:
            self._lessons = 0
            voters = [own for _, own in self.latest() if own.observations >= TAUGHT]
            self._agreed = len(voters) >= AGREEING
            if self._agreed:
                self._agree(self._common, voters)
        return self._common if self._agreed else None

    def taught(self, tenant: str, lessons: int = 1) -> P:
        """A tenant's learner, to be taught that many observations; made if the tenant is new."""
        self._lessons += lessons
        held = self._held
        learner = held.pop(tenant, None)
        if learner is None:
            learner = self._make()
            if len(held) >= MAX_TENANTS:
                del held[next(iter(held))]
        held[tenant] = learner
        return learner

    def part(self, tenant: str) -> P:
        """A tenant's learner, to adopt sums from the store or from other replicas."""
        return self.taught(tenant, _EVERY)

    def latest(self, count: int = VOTERS) -> Iterator[tuple[str, P]]:
        """At most `count` pairs (tenant, learner), the most recently taught first."""
        return islice(reversed(self._held.items()), count)

    def __len__(self) -> int:
        return len(self._held)


def median(values: Sequence[float]) -> float:
    """The middle value; for an even number of values the mean of the two in the middle."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


class SidedOutliers:
    """The side of recent outliers: an EMA of -1, 0, +1; beyond MAJORITY the traffic has changed."""

    MAJORITY: Final = 0.6
    __slots__ = ("balance",)
    _DECAY = 0.95

    def __init__(self) -> None:
        self.balance = 0.0

    def add(self, side: int) -> bool:
        """Take one observation's side (0: no outlier); True if the traffic has changed."""
        self.balance = self._DECAY * self.balance + (1 - self._DECAY) * side
        if abs(self.balance) < self.MAJORITY:
            return False
        self.balance = 0.0
        return True


COLD_SPREAD: Final = 0.10
COLD_OBSERVATIONS: Final = 10
LOWEST_RATIO: Final = 0.5
HIGHEST_RATIO: Final = 16.0
HALF_WEIGHT_TOKENS: Final = 1000
COLD_HIGHEST_RATIO: Final = 8.0
"""Bytes per token assumed when a cold estimate must not refuse what may fit."""
MIN_DOUBT: Final = 0.1
"""Least spread, as a share of the mean, assumed when refusing a prompt without an engine."""

_OUTLIER_SPREADS = 5.0
_OUTLIER_SHARE = 0.25
_DAMPED_SHARE = 0.03
_SLACK = 1 + 1e-6  # for rounding
# Standard deviation by the mean and by the median absolute deviation of a normal distribution.
_STANDARD = 1.2533
_STANDARD_OF_MEDIAN = 1.4826


class Ratio(Part):
    """One tenant's ratio in one category, as plain floats that can be merged by weight."""

    __slots__ = (
        *("_beta", "_corrected", "_gamma", "_outlier_total", "_outlier_weight", "_outliers"),
        *("_prior", "conservative", "mean", "plausible", "spread", "spread_total"),
        *("spread_weight", "total", "weight"),
    )

    def __init__(self, prior: float, *, beta: float, gamma: float, corrected: bool) -> None:
        super().__init__()
        self._beta = beta
        self._gamma = gamma
        self._corrected = corrected
        self._prior = prior
        self.plausible = COLD_HIGHEST_RATIO
        self._restart()
        if not corrected:
            # The paper's EMA: starts at its prior with full weight, and with no spread.
            self.total, self.weight, self.spread_weight = prior, 1.0, 1.0
        self._refresh()

    def _restart(self) -> None:
        self.total = self.weight = self.spread_total = self.spread_weight = 0.0
        self._outlier_total = self._outlier_weight = 0.0
        self._outliers = SidedOutliers()

    def add(self, observed: float, tokens: float) -> None:
        """Take one observation within [LOWEST_RATIO, HIGHEST_RATIO] of a prompt's length."""
        beta, off = self._beta, observed - self.mean
        weight = tokens / (tokens + HALF_WEIGHT_TOKENS)
        warm = self.observations >= TAUGHT
        usual = max(_OUTLIER_SPREADS * self.spread, _OUTLIER_SHARE * self.mean)
        if not self._corrected:
            self._blend(observed, 1.0)
            self._blend_spread(abs(observed - self.total))
        elif not warm or abs(off) <= usual:
            if warm:
                self._outliers.add(0)
            if self.weight:
                self._blend_spread(abs(off))
            self._blend(observed, weight)
        else:
            self._outlier_total = beta * self._outlier_total + (1 - beta) * weight * observed
            self._outlier_weight = beta * self._outlier_weight + (1 - beta) * weight
            if self._outliers.add(1 if off > 0 else -1):
                total, weight = self._outlier_total, self._outlier_weight
                self._restart()
                self.total, self.weight = total, weight
                self.observations = 0
                self.epoch += 1
            else:
                step = min(_DAMPED_SHARE * self.mean, 3 * self.spread)
                # An outlier that claims a long prompt must not weigh more than others.
                self._blend(self.mean + (step if off > 0 else -step), min(weight, self.weight))
        self.observations += 1
        self._refresh()

    def _blend(self, observed: float, weight: float) -> None:
        beta = self._beta
        self.total = beta * self.total + (1 - beta) * weight * observed
        self.weight = beta * self.weight + (1 - beta) * weight

    def _blend_spread(self, off: float) -> None:
        beta = self._beta
        self.spread_total = beta * self.spread_total + (1 - beta) * off
        self.spread_weight = beta * self.spread_weight + (1 - beta)

    def _refresh(self) -> None:
        """Compute derived figures while learning, so that estimating only reads them."""
        self.mean = self.total / self.weight if self.weight else self._prior
        spread = self.spread_total / self.spread_weight if self.spread_weight else 0.0
        if self._corrected:
            cold = max(0.0, 1 - self.observations / COLD_OBSERVATIONS)
            spread = max(_STANDARD * spread, COLD_SPREAD * cold * self.mean)
        self._derive(spread)

    def agree(self, others: Sequence["Ratio"]) -> None:
        """Set this ratio to the median of the others'. Refusing stays as careful as when cold.

        The spread is that of the others' means, and at least the median of their spreads.
        """
        self.mean = median([other.mean for other in others])
        apart = _STANDARD_OF_MEDIAN * median([abs(other.mean - self.mean) for other in others])
        self.observations = TAUGHT
        self._derive(max(apart, median([other.spread for other in others])))
        self.plausible = max(self.plausible, COLD_HIGHEST_RATIO)

    def _derive(self, spread: float) -> None:
        self.spread = spread
        self.conservative = max(self.mean - self._gamma * spread, LOWEST_RATIO)
        self.plausible = (
            COLD_HIGHEST_RATIO
            if self.observations < TAUGHT
            # The next prompt may differ from all earlier ones.
            else self.mean + 3 * max(spread, MIN_DOUBT * self.mean)
        )

    def state(self) -> dict[str, Any]:
        """Mean, spread and count, and the sums they come from."""
        return {
            "mean": self.mean,
            "sigma": self.spread,
            "n": self.observations,
            "conservative": self.conservative,
            **self.sums(),
        }

    def sums(self) -> dict[str, float]:
        return {
            "total": self.total,
            "weight": self.weight,
            "spread_total": self.spread_total,
            "spread_weight": self.spread_weight,
        }

    def accepts(self, state: PartState) -> bool:
        """See Part: a mean within the allowed range, and weights of at most 1."""
        sums = state.sums
        total, weight = sums.get("total", 0.0), sums.get("weight", 0.0)
        spread_weight = sums.get("spread_weight", -1.0)
        return (
            0 < weight <= _SLACK
            and 0 <= spread_weight <= _SLACK
            and LOWEST_RATIO * weight <= total * _SLACK
            and total <= HIGHEST_RATIO * weight * _SLACK
            and 0 <= sums.get("spread_total", -1.0) <= HIGHEST_RATIO * spread_weight
        )

    def adopt(self, state: PartState) -> None:
        sums = state.sums
        if state.epoch != self.epoch:
            self._restart()
            self.epoch = state.epoch
        self.total, self.weight = sums["total"], sums["weight"]
        self.spread_total, self.spread_weight = sums["spread_total"], sums["spread_weight"]
        self.observations = state.n
        self._refresh()


_HUBER = 4.0
Pair = tuple[float, float]


class TwoTermFit(Part):
    """Coefficients (a, b) of y = a u + b v, clamped to [0, limit]."""

    __slots__ = ("_limits", "_outliers", "_p", "_start", "_walk", "a", "b")

    def __init__(self, prior: Pair, deviation: Pair, limits: Pair) -> None:
        """`deviation` is the prior's standard deviation, by coefficient."""
        super().__init__()
        self.a, self.b = prior
        self._limits: Final = limits
        self._start: Final = (deviation[0] ** 2, 0.0, deviation[1] ** 2)
        # The walk's variance reaches the prior's in 10,000 observations.
        self._walk: Final = (self._start[0] * 1e-4, self._start[2] * 1e-4)
        self._p = self._start
        self._outliers = SidedOutliers()

    def value(self, u: float, v: float) -> float:
        """The fitted a u + b v."""
        return self.a * u + self.b * v

    def add(self, u: float, v: float, y: float, variance: float) -> None:
        """Learn from y = a u + b v + noise of the given variance."""
        paa, pab, pbb = self._p
        paa = min(paa + self._walk[0], self._start[0])
        pbb = min(pbb + self._walk[1], self._start[2])
        gu, gv = paa * u + pab * v, pab * u + pbb * v
        total = gu * u + gv * v + variance
        residual = y - self.a * u - self.b * v
        z = residual / total**0.5
        self.observations += 1
        if self._outliers.add(0 if abs(z) <= _HUBER else 1 if z > 0 else -1):
            self._p = self._start
            return
        if abs(z) > _HUBER:
            residual *= _HUBER / abs(z)
        ka, kb = gu / total, gv / total
        self.a = min(max(self.a + ka * residual, 0.0), self._limits[0])
        self.b = min(max(self.b + kb * residual, 0.0), self._limits[1])
        self._p = (paa - ka * gu, pab - ka * gv, pbb - kb * gv)

    def agree(self, others: Sequence["TwoTermFit"]) -> None:
        """Set the coefficients to the medians of the others'."""
        self.a = median([other.a for other in others])
        self.b = median([other.b for other in others])

    def sums(self) -> dict[str, float]:
        """See Part: the coefficients and their covariance, which average like sums."""
        paa, pab, pbb = self._p
        return {"a": self.a, "b": self.b, "paa": paa, "pab": pab, "pbb": pbb}

    def accepts(self, state: PartState) -> bool:
        """See Part: coefficients within their limits, and a valid covariance."""
        sums = state.sums
        if sums.keys() != {"a", "b", "paa", "pab", "pbb"}:
            return False
        paa, pab, pbb = sums["paa"], sums["pab"], sums["pbb"]
        return (
            0 <= sums["a"] <= self._limits[0]
            and 0 <= sums["b"] <= self._limits[1]
            and 0 <= paa <= self._start[0] * _SLACK
            and 0 <= pbb <= self._start[2] * _SLACK
            and pab * pab <= paa * pbb * _SLACK + 1e-12
        )

    def adopt(self, state: PartState) -> None:
        sums = state.sums
        self.a, self.b = sums["a"], sums["b"]
        self._p = (sums["paa"], sums["pab"], sums["pbb"])
        self.observations = state.n


QUANTILE: Final = 0.95
PRIOR_TOKENS: Final = 1024
MAX_TOKENS: Final = 2**20
MEMORY: Final = 2000

_RATIO = 1.07
_PER_LOG = 1 / math.log(_RATIO)
_GROWTH = 1 / (1 - 1 / MEMORY)
_RESCALE = 1e12
_STALE = 1e-6
"""Rescaling drops weights below this."""


def bucket_of(tokens: int) -> int:
    """Index of the bucket that holds `tokens`."""
    return int(math.log(tokens) * _PER_LOG) if tokens > 1 else 0


def upper_edge(bucket: int) -> int:
    """Largest count that falls into `bucket` (at least 1)."""
    return max(1, math.ceil(_RATIO ** (bucket + 1)) - 1)


_KEYS = frozenset(f"{kind}{n}" for kind in "wc" for n in range(bucket_of(MAX_TOKENS) + 1))


class LengthHistogram(Part):
    """Decaying counts of whole and of cut answers by length, and their cached quantile.

    To decay, the weight of each new observation grows; old weights stay until rescaled.
    `observations` counts whole answers.
    """

    __slots__ = ("_cut", "_pending", "_quantile", "_unit", "_whole")

    def __init__(self) -> None:
        super().__init__()
        self._whole: dict[int, float] = {}
        self._cut: dict[int, float] = {}
        self._unit = 1.0
        self._pending = 0
        self._quantile = 0

    def add(self, bucket: int, *, cut: bool) -> None:
        """Count one answer by its length's bucket; `cut`: it could have been longer."""
        counts = self._cut if cut else self._whole
        counts[bucket] = counts.get(bucket, 0.0) + self._unit
        self.observations += not cut
        self._unit *= _GROWTH
        if self._unit > _RESCALE:
            for counts in (self._whole, self._cut):
                for key, weight in list(counts.items()):
                    counts[key] = weight / self._unit
                    if counts[key] < _STALE:
                        del counts[key]
            self._unit = 1.0
        self._pending += 1

    def quantile(self) -> int:
        """The QUANTILE of lengths, recomputed after every few observations."""
        due = not self._quantile or self._pending * 16 >= min(self.observations, 800)
        if not self._pending or not due:
            return self._quantile
        self._pending = 0
        whole, cut = self._whole, self._cut
        buckets = sorted(whole.keys() | cut.keys())
        at_risk = sum(whole.values(), 0.0) + sum(cut.values(), 0.0)
        survival = 1.0
        for bucket in buckets:
            ended = whole.get(bucket, 0.0)
            survival *= 1 - ended / at_risk if ended < at_risk else 0.0
            if survival <= 1 - QUANTILE + 1e-9:
                self._quantile = upper_edge(bucket)
                return self._quantile
            at_risk -= ended + cut.get(bucket, 0.0)
            if at_risk <= 0:
                break
        # The longest answers were all cut, so their full length is unknown.
        self._quantile = max(upper_edge(buckets[-1]), PRIOR_TOKENS)
        return self._quantile

    def agree(self, others: Sequence["LengthHistogram"]) -> None:
        """Set the quantile to the median of the others'."""
        self.observations = TAUGHT
        self._quantile = round(median([other.quantile() for other in others]))

    def sums(self) -> dict[str, float]:
        """See Part: weights by bucket, of whole (w) and of cut (c) answers."""
        unit = self._unit
        sums = {f"w{bucket}": weight / unit for bucket, weight in self._whole.items()}
        sums.update((f"c{bucket}", weight / unit) for bucket, weight in self._cut.items())
        return sums

    def accepts(self, state: PartState) -> bool:
        """See Part: weights within bounds, of existing buckets."""
        weights = state.sums.values()
        return state.sums.keys() <= _KEYS and min(weights) >= 0 and max(weights) <= MEMORY + 1

    def adopt(self, state: PartState) -> None:
        weights = {key: weight for key, weight in state.sums.items() if weight > _STALE}
        self._whole = {int(key[1:]): weight for key, weight in weights.items() if key[0] == "w"}
        self._cut = {int(key[1:]): weight for key, weight in weights.items() if key[0] == "c"}
        self._unit = 1.0
        self.observations = state.n if self._whole else 0
        self._quantile = 0
        self._pending = 1 if weights else 0


class OutputLengths:
    """The expected output q_out of one model, by endpoint and category.

    The tenant's own answers decide: those of the category first, then all of the endpoint. A
    tenant with fewer than TAUGHT whole answers gets the tenants' median, by category, then by
    endpoint, then PRIOR_TOKENS.
    """

    __slots__ = ("_prior_tokens", "levels")

    def __init__(self, *, prior_tokens: int = PRIOR_TOKENS) -> None:
        self._prior_tokens = prior_tokens
        self.levels: dict[str, ByTenant[LengthHistogram]] = {}
        """`endpoint/category`, and `endpoint` for all categories together -> histograms."""

    def expected(self, endpoint: str, category: str, tenant: str) -> int:
        """The .95 quantile, in tokens, of the narrowest level with enough observations."""
        wide = self.levels.get(endpoint)
        if wide is None:
            return self._prior_tokens
        narrow = self.levels.get(f"{endpoint}/{category}", wide)
        histogram = narrow.own(tenant) or wide.own(tenant) or narrow.agreed() or wide.agreed()
        return self._prior_tokens if histogram is None else histogram.quantile()

    def add(self, endpoint: str, category: str, tenant: str, tokens: int, *, cut: bool) -> None:
        """Teach the tenant's histograms of the category and of all categories."""
        bucket = bucket_of(tokens)
        for name in (f"{endpoint}/{category}", endpoint):
            self.level(name).taught(tenant).add(bucket, cut=cut)

    def level(self, name: str) -> ByTenant[LengthHistogram]:
        """The histograms of that name, made if there are none."""
        level = self.levels.get(name)
        if level is None:
            level = self.levels[name] = ByTenant(LengthHistogram, LengthHistogram.agree)
        return level

    def __len__(self) -> int:
        return sum(map(len, self.levels.values()))

    def snapshot(self) -> dict[str, int]:
        """By level, the median over tenants with enough observations."""
        quantiles = {}
        for name, level in sorted(self.levels.items()):
            taught = [own.quantile() for _, own in level.latest() if own.observations >= TAUGHT]
            if taught:
                quantiles[name] = round(median(taught))
        return quantiles
