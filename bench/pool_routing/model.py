"""The fleet arithmetic of token-budget pool routing (arXiv:2604.09613, CC BY 4.0), as published.

Rules:
- t_iter = W + H * slots, every slot taken; mu = slots / (E[iterations] * t_iter) of an instance.
- iterations = ceil(L_in / 512) + L_out; L is uniform between breakpoints of the workload's CDF;
  L_out / L is normal, clipped to [.02, .95]; lengths are not rounded to whole tokens.
- instances = ceil(rate * head / mu), with another head for each kind of pool.
- an engine has KV blocks / blocks of its window slots, at most 128, as the paper counts them.
"""

import math
import random
from bisect import bisect_left
from collections.abc import Iterator
from functools import cache
from statistics import NormalDist
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from gateway.estimate.estimator import PROFILES, SMALL_PROMPT_TOKENS, LengthEstimator
from gateway.records.endpoint import COMPLETIONS
from gateway.records.estimate import Observation
from gateway.records.request import BodyFacts, Category, Measure
from gateway.routing.routing import PoolShape, Routing, plan_pool

BASE_S: Final = 0.008
"""W: seconds of an iteration without sequences."""
PER_SLOT_S: Final = 0.00065
"""H: seconds that each sequence adds."""
CHUNK_TOKENS: Final = 512
BLOCK_TOKENS: Final = 16
BLOCKS: Final = 65_536
MAX_SLOTS: Final = 128
WINDOW: Final = 65_536
BOUNDARY: Final = 8192
RATE: Final = 1000.0
"""Requests per second."""
HEAD_ONE: Final = 1.08
HEAD_SHORT: Final = 1.05
HEAD_LONG: Final = 1.02
MIN_SHARE: Final = 0.02
MAX_SHARE: Final = 0.95
HOURS_PER_YEAR: Final = 8760

_NODES = 1000
"""Equally likely output shares that the normal is integrated over."""


class CdfWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """A CDF as [tokens, share up to them], linear between, and how totals split."""

    name: str
    breakpoints: tuple[tuple[int, float], ...]
    output_mean: float
    output_std: float

    @property
    def longest(self) -> int:
        """The last breakpoint."""
        return self.breakpoints[-1][0]

    def cdf(self, tokens: float) -> float:
        """Share of requests of at most so many tokens."""
        return float(np.interp(tokens, *self._columns()))

    def share(self, low: float, high: float) -> float:
        """Of all requests, those with low < L <= high."""
        return self.cdf(high) - self.cdf(low)

    def mean_tokens(self, low: float, high: float) -> float:
        """Mean L of requests in the range."""
        inside = [float(t) for t, _ in self.breakpoints if low < t < high]
        edges = np.array([low, *inside, min(high, self.longest)])
        mass = np.diff(np.interp(edges, *self._columns()))
        return float((mass * (edges[1:] + edges[:-1]) / 2).sum() / mass.sum())

    def mean_output_share(self) -> float:
        """Mean of the clipped normal, in closed form."""
        normal, unit = NormalDist(self.output_mean, self.output_std), NormalDist()
        a = (MIN_SHARE - self.output_mean) / self.output_std
        b = (MAX_SHARE - self.output_mean) / self.output_std
        below, above = normal.cdf(MIN_SHARE), 1 - normal.cdf(MAX_SHARE)
        inside = self.output_mean * (1 - below - above)
        inside += self.output_std * (unit.pdf(a) - unit.pdf(b))
        return MIN_SHARE * below + inside + MAX_SHARE * above

    def mean_chunks(self, low: float, high: float) -> float:
        """E[ceil(L_in / 512)] in the range: the sum over k of P(L_in > 512 k)."""
        inputs = 1 - output_shares(self.output_mean, self.output_std)
        k = np.arange(math.ceil(self.longest / CHUNK_TOKENS))
        over = np.clip(CHUNK_TOKENS * k[None, :] / inputs[:, None], low, high)
        up_to = np.interp(over, *self._columns())
        inside = (self.cdf(high) - up_to) / self.share(low, high)
        return float(inside.sum(axis=1).mean())

    def iterations(self, low: float, high: float) -> float:
        """Mean iterations of requests in the range."""
        output = self.mean_output_share() * self.mean_tokens(low, high)
        return self.mean_chunks(low, high) + output

    def _columns(self) -> tuple[list[float], list[float]]:
        tokens, shares = zip(*self.breakpoints, strict=True)
        return [0.0, *tokens], [0.0, *shares]


def output_shares(mean: float, std: float) -> NDArray[np.float64]:
    """Equally likely values of the clipped normal, in order."""
    normal = NormalDist(mean, std)
    drawn = [normal.inv_cdf((i + 0.5) / _NODES) for i in range(_NODES)]
    return np.asarray(np.clip(drawn, MIN_SHARE, MAX_SHARE), dtype=np.float64)


# The paper's CDFs are unpublished. These were fitted until its throughputs and fleet sizes at
# a boundary of 8,192 came out; splits as published.
AZURE: Final = CdfWorkload(
    name="Azure",
    breakpoints=(
        (256, 0.10),
        (512, 0.35),
        (1024, 0.75),
        (2048, 0.80),
        (4096, 0.89),
        (8192, 0.915),
        (16_384, 0.951),
        (32_768, 0.99),
        (65_536, 1.0),
    ),
    output_mean=0.10,
    output_std=0.05,
)
LMSYS: Final = CdfWorkload(
    name="LMSYS",
    breakpoints=(
        (32, 0.05),
        (64, 0.20),
        (128, 0.35),
        (256, 0.70),
        (512, 0.88),
        (1024, 0.98),
        (2048, 0.995),
        (4096, 0.9985),
        (8192, 0.9994),
        (16_384, 0.9999),
        (32_768, 1.0),
    ),
    output_mean=0.75,
    output_std=0.10,
)


def slots_of(window: int) -> int:
    """Sequences of an engine: its KV blocks over those of a whole window."""
    return min(MAX_SLOTS, BLOCKS // math.ceil(window / BLOCK_TOKENS))


def iteration_s(slots: int) -> float:
    """Seconds of an iteration with every slot taken."""
    return BASE_S + PER_SLOT_S * slots


def throughput(traffic: CdfWorkload, slots: int, low: float, high: float) -> float:
    """Requests per second of an instance that serves the range; infinite where it is empty."""
    if traffic.share(low, high) <= 0:
        return math.inf
    return slots / (traffic.iterations(low, high) * iteration_s(slots))


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """One workload with one boundary: throughputs of an instance, and what they come to."""

    rate: float
    alpha: float
    """Share of requests up to the boundary."""
    short_slots: int
    mu_one: float
    """Of a fleet with a single, homogeneous pool."""
    mu_short: float
    mu_long: float

    @property
    def one(self) -> int:
        """Instances of the single pool."""
        return math.ceil(self.rate * HEAD_ONE / self.mu_one)

    @property
    def short(self) -> int:
        """Instances of the short pool."""
        return math.ceil(self.alpha * self.rate * HEAD_SHORT / self.mu_short)

    @property
    def long(self) -> int:
        """Instances of the long pool."""
        return math.ceil((1 - self.alpha) * self.rate * HEAD_LONG / self.mu_long)

    @property
    def total(self) -> int:
        """Instances of both pools."""
        return self.short + self.long

    @property
    def savings(self) -> float:
        """Share of the single pool's instances that two pools do without."""
        return 1 - self.total / self.one

    @property
    def rho(self) -> float:
        """Throughput of the short pool over the single pool's."""
        return self.mu_short / self.mu_one

    @property
    def closed_form(self) -> float:
        """Savings by equation 7, which gives the long pool the single pool's throughput."""
        return closed_form(self.alpha, self.rho)

    @property
    def corrected(self) -> tuple[float, float]:
        """Short and long instances by equation 8, without heads and not rounded."""
        short = self.alpha * self.rate / self.mu_short
        return short, (1 - self.alpha) * self.rate / self.mu_long

    @property
    def savings_at_equal_heads(self) -> float:
        """Savings when no pool gets more headroom than another; not rounded."""
        return 1 - sum(self.corrected) * self.mu_one / self.rate


def closed_form(alpha: float, rho: float) -> float:
    """Equation 7."""
    return alpha * (1 - 1 / rho)


def size(traffic: CdfWorkload, boundary: int = BOUNDARY, rate: float = RATE) -> Sizing:
    """Both fleets of a workload."""
    slots = slots_of(boundary)
    return Sizing(
        rate=rate,
        alpha=traffic.share(0, boundary),
        short_slots=slots,
        mu_one=throughput(traffic, slots_of(WINDOW), 0, WINDOW),
        mu_short=throughput(traffic, slots, 0, boundary),
        mu_long=throughput(traffic, slots_of(WINDOW), boundary, WINDOW),
    )


def yearly_dollars(gpus: float, dollars_per_gpu_hour: float) -> float:
    """Of GPUs that are rented all year."""
    return gpus * dollars_per_gpu_hour * HOURS_PER_YEAR


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """What a sequence's KV cache is made of, on one GPU."""

    layers: int
    kv_heads: int
    """Held by one GPU; where there are fewer than GPUs, each GPU holds one."""
    head_size: int
    bytes_per_value: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Equation 1 for one token: keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.bytes_per_value


def slots_in(memory: float, weights: float, architecture: Architecture, window: int) -> int:
    """Equation 2: sequences whose whole window fits the bytes that weights leave, never < 0."""
    room = max(0.0, memory - weights)
    return int(room // (architecture.kv_bytes_per_token * window))


# -- how fast the shipped estimator learns bytes per token: the token-budget paper's Table 4


NOISE: Final = 0.05
AT: Final = 50
"""Observations of a category."""
RUNS: Final = 100
LONG_PER_RUN: Final = 50

_TOKENS, _SHARES = zip((0, 0.0), *AZURE.breakpoints, strict=True)
_ROUTING: Final = Routing(
    pools=(
        PoolShape(name="short", window_tokens=BOUNDARY, boundary_tokens=BOUNDARY),
        PoolShape(name="long", window_tokens=WINDOW, boundary_tokens=None),
    )
)


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A category of Table 4: its true ratio and what was published."""

    label: str
    category: Category
    ratio: float
    learned: float
    error: float
    misroutes: float


# Figures of Table 4, arXiv:2604.09613, CC BY 4.0.
CATEGORIES: Final = (
    Known(label="prose", category="prose", ratio=4.48, learned=4.41, error=0.016, misroutes=0.003),
    Known(label="code", category="code", ratio=3.52, learned=3.47, error=0.014, misroutes=0.002),
    Known(label="CJK", category="cjk", ratio=2.01, learned=2.08, error=0.035, misroutes=0.008),
    Known(label="mixed", category="mixed", ratio=3.81, learned=3.74, error=0.018, misroutes=0.004),
)
STATIC_MISROUTES: Final = 0.041


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """What one profile made of one category over many runs, after AT observations."""

    error: float
    """Mean of |learned / true - 1|."""
    worst: float
    """The same, exceeded by one run in twenty."""
    as_published: float
    """Share of runs that were as close as published, or closer."""
    misroutes: float


def learn(known: Known, profile: str, noise: float = NOISE) -> Learned:
    """Many seeded runs of one category."""
    found, misrouted = [], 0
    for run in range(RUNS):
        rng = random.Random(f"{known.label} {run}")
        estimator = LengthEstimator(PROFILES[profile])
        for observation in observations(known, rng, AT, noise):
            estimator.learn(observation)
        found.append(ratio_of(estimator, known))
        misrouted += count_misroutes(estimator, known, rng, LONG_PER_RUN, noise)
    off = np.abs(np.array(found) / known.ratio - 1)
    return Learned(
        error=float(off.mean()),
        worst=float(np.quantile(off, 0.95)),
        as_published=float((off <= abs(known.learned / known.ratio - 1)).mean()),
        misroutes=misrouted / (RUNS * LONG_PER_RUN) * AZURE.share(BOUNDARY, WINDOW),
    )


def static_misroutes(known: Known) -> float:
    """Misroutes of an estimator that stays at 4.0 bytes per token."""
    estimator = LengthEstimator(PROFILES["paper"])
    drawn = RUNS * LONG_PER_RUN
    rng = random.Random(f"{known.label} static")
    wrong = count_misroutes(estimator, known, rng, drawn, NOISE)
    return wrong / drawn * AZURE.share(BOUNDARY, WINDOW)


def learned_ratio(known: Known, profile: str, count: int) -> float:
    """The learned ratio after `count` observations without noise."""
    estimator = LengthEstimator(PROFILES[profile])
    for observation in observations(known, random.Random(f"{known.label} 0"), count, 0.0):
        estimator.learn(observation)
    return ratio_of(estimator, known)


def expected_ema(known: Known, count: int, start: float = 4.0, decay: float = 0.95) -> float:
    """E of an EMA that starts at `start` with full weight: c + (start - c) * decay^n."""
    return known.ratio + (start - known.ratio) * decay**count


def ratio_of(estimator: LengthEstimator, known: Known) -> float:
    """The learned mean."""
    return float(estimator.snapshot()["categories"][known.category]["mean"])


def observations(
    known: Known, rng: random.Random, count: int, noise: float
) -> Iterator[Observation]:
    """What a stream of one category teaches."""
    for _ in range(count):
        prompt, answer = lengths(rng, 0, WINDOW)
        while prompt < SMALL_PROMPT_TOKENS:
            prompt, answer = lengths(rng, 0, WINDOW)
        yield Observation(
            endpoint=COMPLETIONS.name,
            tenant="bench",
            measure=_measure(known, prompt, rng, noise),
            prompt_tokens=prompt,
            completion_tokens=answer,
            sequences=1,
            output_censored=False,
        )


def count_misroutes(
    estimator: LengthEstimator, known: Known, rng: random.Random, count: int, noise: float
) -> int:
    """Of `count` requests over the boundary, those that are planned short."""
    wrong = 0
    for _ in range(count):
        prompt, answer = lengths(rng, BOUNDARY, WINDOW)
        measure = _measure(known, prompt, rng, noise)
        facts = BodyFacts(model="m", measure=measure, cap_tokens=answer)
        estimate = estimator.estimate(COMPLETIONS, facts, "bench")
        wrong += plan_pool(_ROUTING, estimate, "prompt").pool == 0
    return wrong


def lengths(rng: random.Random, low: int, high: int) -> tuple[int, int]:
    """Prompt and answer of a request of the Azure-derived workload, low < total <= high."""
    drawn = rng.uniform(_share_up_to(low), _share_up_to(high))
    i = bisect_left(_SHARES, drawn, 1, len(_SHARES) - 1)
    part = (drawn - _SHARES[i - 1]) / (_SHARES[i] - _SHARES[i - 1])
    total = max(low + 1, 2, round(_TOKENS[i - 1] + part * (_TOKENS[i] - _TOKENS[i - 1])))
    share = min(max(rng.gauss(AZURE.output_mean, AZURE.output_std), MIN_SHARE), MAX_SHARE)
    answer = max(1, round(total * share))
    return total - answer, answer


@cache
def _share_up_to(tokens: int) -> float:
    return AZURE.cdf(tokens)


def _measure(known: Known, prompt: int, rng: random.Random, noise: float) -> Measure:
    """The measure of a plain prompt of so many tokens."""
    ratio = known.ratio * (1 + noise * min(max(rng.gauss(0, 1), -3.0), 3.0))
    size = max(1, round(prompt * ratio))
    return Measure(text_bytes=size, longest_text_bytes=size, category=known.category)
