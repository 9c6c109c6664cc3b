import itertools
import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.barrier.output_survival import ENOUGH, OutputSurvival


def geometric(random: Random, mean: float) -> int:
    return max(1, math.ceil(random.expovariate(1 / mean)))


def test_cancelled_answers_bias_nothing() -> None:
    random, survival = Random(2), OutputSurvival(half_life=20_000)
    for _ in range(10_000):
        length, left = geometric(random, 300), geometric(random, 300)
        survival.observe("c", min(length, left), censored=left < length)
    for tokens in (50, 150, 300, 500):
        assert survival.survival("c", tokens) == pytest.approx(math.exp(-tokens / 300), abs=0.03)


def test_old_answers_fade() -> None:
    survival = OutputSurvival(half_life=100)
    for _ in range(1000):
        survival.observe("c", 1000, censored=False)
    for _ in range(700):
        survival.observe("c", 10, censored=False)
    assert survival.survival("c", 100) < 0.02


def test_a_class_with_little_of_its_own_is_answered_for_by_all() -> None:
    survival = OutputSurvival()
    for _ in range(500):
        survival.observe("known", 100, censored=False)
    for _ in range(5):
        survival.observe("new", 5000, censored=False)
    assert survival.survival("new", 1000) < 0.05
    assert survival.survival("never seen", 1000) == survival.survival("new", 1000)
    for _ in range(int(ENOUGH)):
        survival.observe("new", 5000, censored=False)
    assert survival.survival("new", 1000) == 1.0
    assert survival.survival("known", 1000) == 0.0


answers = st.lists(st.tuples(st.integers(-5, 1 << 22), st.booleans()), max_size=120)


@given(answers, st.lists(st.floats(0, 1 << 21), min_size=2, max_size=6))
def test_survival_is_a_share_that_never_rises(
    seen: list[tuple[int, bool]], ages: list[float]
) -> None:
    survival = OutputSurvival(half_life=10)
    for tokens, censored in seen:
        survival.observe("c", tokens, censored=censored)
    shares = [survival.survival("c", age) for age in sorted(ages)]
    assert all(0 <= s <= 1 for s in shares)
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(shares))
