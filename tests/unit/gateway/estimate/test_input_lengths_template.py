"""The two-term fit of fixed tokens."""

import random

import pytest

from gateway.estimate.input_lengths import TwoTermFit


def fresh() -> TwoTermFit:
    return TwoTermFit((3.0, 4.0), (32.0, 4.0), (512.0, 64.0))


def teach(fit: TwoTermFit, t0: float, t1: float, count: int, *, noise: float = 0.5) -> None:
    rng = random.Random(1)
    for _ in range(count):
        messages = rng.randint(1, 12)
        fit.add(1, messages, t0 + t1 * messages + rng.gauss(0, noise), 1 + noise**2)


@pytest.mark.parametrize(("t0", "t1"), [(3, 5), (0, 0), (40, 9), (150, 4), (25, 20)])
def test_both_terms_are_found(t0: float, t1: float) -> None:
    fit = fresh()
    teach(fit, t0, t1, 60)
    assert fit.a == pytest.approx(t0, abs=1.5)
    assert fit.b == pytest.approx(t1, abs=0.4)


def test_terms_stay_within_their_limits() -> None:
    fit = fresh()
    teach(fit, 5000, 900, 300)
    assert fit.a <= 512
    assert fit.b <= 64
    teach(fit, -5000, -900, 300)
    assert fit.a >= 0
    assert fit.b >= 0
