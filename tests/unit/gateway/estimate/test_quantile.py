"""Expected output: quantiles with decay, censoring, fallbacks and bounded memory."""

import random

import pytest

from gateway.estimate.by_tenant import MAX_TENANTS
from gateway.estimate.quantile import (
    MAX_TOKENS,
    PRIOR_TOKENS,
    LengthHistogram,
    OutputLengths,
    bucket_of,
    upper_edge,
)


def filled(lengths: list[int], *, cut: bool = False) -> LengthHistogram:
    histogram = LengthHistogram()
    for length in lengths:
        histogram.add(length, cut=cut)
    return histogram


@pytest.mark.parametrize("tokens", [1, 2, 10, 100, 1000, 12_345, 100_000, MAX_TOKENS])
def test_buckets_are_within_seven_percent(tokens: int) -> None:
    edge = upper_edge(bucket_of(tokens))
    assert tokens <= edge <= tokens * 1.07 + 1
    assert bucket_of(edge) == bucket_of(tokens)


def test_censoring_recovers_the_true_quantile() -> None:
    rng = random.Random(2)
    histogram, naive, lengths = LengthHistogram(), LengthHistogram(), []
    for _ in range(1800):
        length = int(rng.lognormvariate(5, 0.8)) + 1
        patience = int(rng.lognormvariate(5.5, 0.8)) + 1
        lengths.append(length)
        histogram.add(min(length, patience), cut=patience < length)
        naive.add(min(length, patience), cut=False)
    true = sorted(lengths)[int(0.95 * len(lengths))]
    assert 0.85 * true <= histogram.quantile() <= 1.2 * true
    assert naive.quantile() < 0.8 * true


def test_a_tail_that_was_always_cut_is_not_believed_short() -> None:
    histogram = filled([100] * 80)
    for _ in range(20):
        histogram.add(200, cut=True)
    assert histogram.quantile() >= PRIOR_TOKENS


def test_old_answers_fade() -> None:
    histogram = filled([4000] * 2000)
    for _ in range(8000):
        histogram.add(100, cut=False)
    assert histogram.quantile() <= 107


def test_weights_stay_bounded_over_a_long_life() -> None:
    histogram = LengthHistogram()
    for i in range(120_000):
        histogram.add(50 + i % 10, cut=i % 7 == 0)
    assert 50 <= histogram.quantile() <= 70


def test_own_answers_count_from_twenty_whole_ones_on() -> None:
    outputs = OutputLengths()
    assert outputs.expected("chat", "prose", "a") == PRIOR_TOKENS
    for i in range(19):
        outputs.add("chat", "prose", "a", 50, cut=False)
        outputs.add("chat", "prose", "a", 10, cut=True)
        assert outputs.expected("chat", "prose", "a") == PRIOR_TOKENS, i
    outputs.add("chat", "prose", "a", 50, cut=False)
    assert 50 <= outputs.expected("chat", "prose", "a") <= 54
    assert 50 <= outputs.expected("chat", "code", "a") <= 54, "of all its categories"
    assert outputs.expected("chat", "prose", "b") == PRIOR_TOKENS, "one tenant speaks for itself"
    assert outputs.expected("completions", "prose", "a") == PRIOR_TOKENS


def test_a_new_tenant_gets_the_median_of_three_or_more() -> None:
    outputs = OutputLengths()
    for _ in range(100):
        outputs.add("chat", "prose", "short", 20, cut=False)
        outputs.add("chat", "prose", "long", 5000, cut=False)
    assert outputs.expected("chat", "prose", "new") == PRIOR_TOKENS
    for _ in range(100):
        outputs.add("chat", "prose", "middle", 300, cut=False)
    assert outputs.expected("chat", "prose", "short") < 25
    assert outputs.expected("chat", "prose", "long") >= 5000
    assert 300 <= outputs.expected("chat", "prose", "new") <= 321
    assert 300 <= outputs.expected("chat", "code", "new") <= 321
    assert set(outputs.snapshot()) == {"chat", "chat/prose"}


def test_tenants_are_bounded_and_the_least_recent_goes() -> None:
    outputs = OutputLengths()
    for _ in range(30):
        outputs.add("chat", "prose", "kept", 10, cut=False)
    for i in range(2 * MAX_TENANTS):
        outputs.add("chat", "prose", f"t{i}", 2000, cut=False)
        outputs.add("chat", "prose", "kept", 10, cut=False)
    assert len(outputs) == 2 * MAX_TENANTS
    assert outputs.expected("chat", "prose", "kept") <= 11
