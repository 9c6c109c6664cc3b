"""Distributions: what is refused, and the arithmetic of the rest."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import PlanError
from planner.workload.distribution import Cdf, cdf_from_json, cdf_from_totals
from tests.unit.planner.lengths import cdfs


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ([[64, 0.5], [128, 0.4], [256, 1.0]], "falls from 0.5 to 0.4"),
        ([[64, 0.5], [128, 1.2]], "share at 128 tokens is 1.2"),
        ([[128, 0.5], [64, 1.0]], "64 tokens follow 128"),
        ([[64, 0.5], [64, 1.0]], "64 tokens follow 64"),
        ([[64, 0.5], [128, 0.9]], "last share is 0.9"),
        ([[64, float("nan")]], "share at 64 tokens is nan"),
        ([[0, 0.5], [128, 1.0]], "not a number of tokens"),
        ([[64.5, 1.0]], "not a number of tokens"),
        ([[64, "1"]], "not a breakpoint"),
        ([[64]], "not a breakpoint"),
        ([], "no breakpoints"),
        ({"points": []}, "not a length distribution"),
        ("text", "not a length distribution"),
    ],
)
def test_what_is_no_distribution_is_refused(document: Any, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        cdf_from_json(document)


@given(cdf=cdfs(), low=st.integers(0, 70_000), more=st.integers(0, 1000))
def test_shares_grow_from_0_to_1(cdf: Cdf, low: int, more: int) -> None:
    assert 0 <= cdf.share(low) <= cdf.share(low + more) <= 1
    assert cdf.share(0) == 0
    assert cdf.share(cdf.longest_tokens) == 1


@given(cdf=cdfs(), share=st.floats(0.001, 1))
def test_quantiles_invert_shares(cdf: Cdf, share: float) -> None:
    assert cdf.share(cdf.quantile(share)) == pytest.approx(share)


@given(cdf=cdfs(), at=st.integers(1, 70_000), asked=st.integers(1, 70_000))
def test_another_breakpoint_changes_nothing(cdf: Cdf, at: int, asked: int) -> None:
    assert cdf.with_breakpoint(at).share(asked) == pytest.approx(cdf.share(asked))


@given(totals=st.lists(st.integers(1, 9000), min_size=1, max_size=60))
def test_an_empirical_distribution_counts(totals: list[int]) -> None:
    cdf = cdf_from_totals(totals, (64, 1024, 4096))
    for mark in (64, 1024, 4096):
        if mark < max(totals):
            assert cdf.share(mark) == sum(t <= mark for t in totals) / len(totals)
    assert cdf.longest_tokens == max(totals)
