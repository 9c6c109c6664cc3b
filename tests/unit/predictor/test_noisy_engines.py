"""Engines on a CPU: prefills are tiny, noisy, slow at first, or wait for a slot of the engine.

Calibrated quantiles are to hold for .95 of the prefills without being many times too wide.
"""

from collections.abc import Callable
from random import Random
from statistics import median

import pytest

from predictor import PrefillPredictor
from tests.unit.predictor.made import x_of

REQUESTS = 1200
SLOTS = 6

Engine = Callable[[Random, int, int, int], float]
"""(randomness, number of the request, uncached tokens, active sequences) -> seconds."""


def below_the_loop_s_resolution(random: Random, number: int, uncached: int, active: int) -> float:
    """A third of a millisecond, seen by an event loop that is up to 1 ms late."""
    return (3e-4 + uncached * 1e-6) * random.lognormvariate(0, 0.6) + 1e-3 * random.random()


def fast_but_noisy(random: Random, number: int, uncached: int, active: int) -> float:
    """2 ms and some, with a stall of 150 ms for one in fifty."""
    stall_s = 0.15 if random.random() < 0.02 else 0.0
    return (0.002 + uncached * 2e-5) * random.lognormvariate(0, 0.6) + stall_s


def compiling_at_first(random: Random, number: int, uncached: int, active: int) -> float:
    """Four seconds each while kernels are compiled, then two hundred times as fast."""
    compiling_s = 4.0 if number < 40 else 0.0
    return (0.01 + uncached / 3000) * random.lognormvariate(0, 0.4) + compiling_s


def slow_processor(random: Random, number: int, uncached: int, active: int) -> float:
    """400 tokens/s, behind a step of up to 60 ms for each sequence that is answered."""
    step_s = 0.06 * active * random.random()
    return (0.03 + uncached / 400 + step_s) * random.lognormvariate(0, 0.4)


def full_slots(random: Random, number: int, uncached: int, active: int) -> float:
    """Beyond its slots a request waits for another's answer to end."""
    wait_s = random.expovariate(0.5) * (active + 1 - SLOTS) / 2 if active >= SLOTS else 0.0
    return (0.03 + uncached / 800) * random.lognormvariate(0, 0.3) + wait_s


@pytest.mark.parametrize(
    "engine",
    [
        below_the_loop_s_resolution,
        fast_but_noisy,
        compiling_at_first,
        slow_processor,
        full_slots,
    ],
)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_quantiles_hold_and_are_not_too_wide(engine: Engine, seed: int) -> None:
    random = Random(seed)
    predictor = PrefillPredictor(workers=2, slots=SLOTS)
    within, wide = [], []
    for number in range(REQUESTS):
        prompt = int(random.lognormvariate(4.5, 1.0)) + 8
        x = x_of(prompt, int(prompt * random.choice((0, 0, 0.3, 0.8))), 0, random.randrange(9))
        actual_s, worker = engine(random, number, int(x[1]), int(x[3])), random.randrange(2)
        mean_s, quantile_s, bucket = predictor.predict(worker, x)
        predictor.observe(worker, x, mean_s, quantile_s, bucket, actual_s)
        within.append(actual_s <= quantile_s)
        wide.append(quantile_s / actual_s)
    assert 0.90 <= sum(within) / REQUESTS <= 0.98
    assert 0.90 <= sum(within[-400:]) / 400 <= 0.98
    assert median(wide) <= 4.0
    assert median(wide[100:400]) <= 4.0
