import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.prior import SIZE, Prior, PriorRates
from tests.unit.predictor.made import rows_of, true_s, x_of


def error_of(prior: Prior, seed: int = 99) -> float:
    rows = rows_of(300, seed)
    off = sum(abs(prior.mean_s(row.x) - true_s(row.x)) for row in rows)
    return off / sum(true_s(row.x) for row in rows)


@pytest.mark.parametrize("rate", [800, 2500, 8000, 60_000])
def test_a_wrong_beginning_is_mended_within_some_dozens(rate: int) -> None:
    prior = Prior(PriorRates(prefill_tokens_per_s=rate))
    for row in rows_of(60, 1):
        prior.observe(row.x, row.prefill_s)
    assert error_of(prior) < 0.15
    for row in rows_of(1000, 2):
        prior.observe(row.x, row.prefill_s)
    assert error_of(prior) < 0.08
    assert prior.prefill_tokens_per_s == pytest.approx(8000, rel=0.15)


def test_a_backlog_that_no_gate_holds_back_is_learned() -> None:
    prior = Prior(PriorRates())
    for row in rows_of(600, 5):
        x = x_of(int(row.x[0]), 0, int(row.x[2]) * 4)
        prior.observe(x, 0.03 + (x[1] + x[2]) / 8000)
    far = prior.mean_s(x_of(1000, 0, 20_000, 0))
    assert far == pytest.approx(0.03 + 21_000 / 8000, rel=0.1)


def test_one_strange_prefill_moves_little() -> None:
    prior = Prior(PriorRates())
    for row in rows_of(500, 1):
        prior.observe(row.x, row.prefill_s)
    before = prior.mean_s(x_of())
    prior.observe(x_of(), 500.0)
    assert prior.mean_s(x_of()) < 1.3 * before


observations = st.lists(
    st.tuples(
        st.integers(1, 1 << 20),
        st.integers(0, 1 << 20),
        st.integers(0, 1 << 22),
        st.integers(0, 5000),
        st.floats(1e-4, 1e6),
    ),
    max_size=80,
)


@given(observations)
def test_whatever_is_seen_times_stay_finite_and_above_zero(
    seen: list[tuple[int, int, int, int, float]],
) -> None:
    prior = Prior(PriorRates())
    for prompt, hit, backlog, active, actual_s in seen:
        prior.observe(x_of(prompt, hit, backlog, active), actual_s)
        assert all(math.isfinite(s) and s >= 0 for s in prior.s)
        assert len(prior.s) == SIZE
    assert 0 < prior.mean_s(x_of()) < math.inf
    assert 0 < prior.prefill_tokens_per_s < math.inf
    assert prior.rates.prefill_tokens_per_s >= 1
