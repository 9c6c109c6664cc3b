"""The mean rate that shares compare with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.records.entitlement import MAX_SHARE, MIN_SHARE, MeanRate


def test_a_share_is_the_rate_over_the_mean_rate() -> None:
    rates = MeanRate()
    for rate in (100.0, 300.0):
        rates.add(rate)
    assert (rates.share(100.0), rates.share(300.0)) == (0.5, 1.5)


def test_who_states_no_rate_has_a_share_of_one_and_does_not_count() -> None:
    rates = MeanRate()
    rates.add(0.0)
    rates.add(100.0)
    assert rates.share(0.0) == 1.0
    assert rates.count == 1


def test_nobody_s_share_is_extreme() -> None:
    rates = MeanRate()
    rates.add(1.0)
    rates.add(1e6)
    assert rates.share(1.0) == MIN_SHARE
    for _ in range(100):
        rates.add(1.0)
    assert rates.share(1e6) == MAX_SHARE


@given(st.lists(st.floats(0, 1e6), max_size=20))
def test_what_is_taken_away_leaves_no_trace(stated: list[float]) -> None:
    rates = MeanRate()
    rates.add(50.0)
    for rate in stated:
        rates.add(rate)
    for rate in stated:
        rates.remove(rate)
    assert rates.count == 1
    assert rates.total_tokens_per_s == pytest.approx(50.0, abs=1e-6)
