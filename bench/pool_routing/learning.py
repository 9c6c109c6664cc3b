"""How fast the shipped estimator learns bytes per token: the token-budget paper's Table 4.

Streams of prompts whose bytes per token are known, through `LengthEstimator`:
- lengths from the Azure-derived CDF; plain prompts, so that no template hides the ratio;
- bytes per token normal around the category's, NOISE of it wide (documents of bench.common.texts of
  300 to 3,000 tokens differ by 3 to 7 %, JSON by more; the paper does not say what it drew);
- prompts of 128 tokens and more: shorter ones teach the template and not the ratio, so that
  50 observations would not be 50;
- a misroute is a request over 8,192 tokens that estimate and plan send to the short pool.
  Only such requests can be misrouted: they alone are drawn, and weighed by their share.
"""

import random
from bisect import bisect_left
from collections.abc import Iterator
from functools import cache
from typing import Final

import msgspec
import numpy as np

from bench.pool_routing.model import AZURE, BOUNDARY, MAX_SHARE, MIN_SHARE, WINDOW
from gateway.estimate.estimator import PROFILES, SMALL_PROMPT_TOKENS, LengthEstimator
from gateway.records.endpoint import COMPLETIONS
from gateway.records.estimate import Observation
from gateway.records.request import BodyFacts, Category, Measure
from gateway.routing.routing import PoolShape, Routing, plan_pool

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
