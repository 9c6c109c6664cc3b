"""One tenant's learners: the ratio's average, the fit of fixed tokens, quantiles of answers."""

import random

import pytest

from gateway.estimate.learners import (
    MAX_TENANTS,
    MAX_TOKENS,
    PRIOR_TOKENS,
    LengthHistogram,
    OutputLengths,
    Ratio,
    TwoTermFit,
    bucket_of,
    upper_edge,
)


def fresh(prior: float = 4.0) -> Ratio:
    return Ratio(prior, beta=0.95, gamma=1.0, corrected=True)


def warmed(true: float = 4.5, count: int = 200, seed: int = 1) -> Ratio:
    ratio, rng = fresh(), random.Random(seed)
    for _ in range(count):
        ratio.add(true * rng.lognormvariate(0, 0.04), 1000)
    return ratio


def test_cold_estimates_are_conservative_and_refuse_nothing_plausible() -> None:
    ratio = fresh(4.8)
    assert ratio.conservative == pytest.approx(0.9 * 4.8)
    assert ratio.plausible == 8.0
    for _ in range(19):
        ratio.add(4.8, 1000)
        assert ratio.plausible == 8.0
        assert ratio.conservative <= 4.8 + 1e-9
    ratio.add(4.8, 1000)
    assert ratio.plausible == pytest.approx(1.3 * 4.8), "alike so far is no proof of the next"


@pytest.mark.parametrize("lie", [0.6, 2.2, 9.0, 15.0])
@pytest.mark.parametrize("share", [0.1, 0.2])
def test_a_lying_worker_among_honest_ones_moves_a_ratio_by_one_percent_at_most(
    lie: float, share: float
) -> None:
    rng = random.Random(3)
    ratio, honest = warmed(), warmed()
    worst = 0.0
    for _ in range(3000):
        if rng.random() < share:
            ratio.add(lie, 1000)
        else:
            observed = 4.5 * rng.lognormvariate(0, 0.04)
            ratio.add(observed, 1000)
            honest.add(observed, 1000)
        worst = max(worst, abs(ratio.mean / honest.mean - 1))
    # The two averages forget at different speeds, which alone is worth about 1 %.
    assert abs(ratio.mean / 4.5 - 1) < 0.025
    assert worst < 0.03


@pytest.mark.parametrize("after", [2.0, 3.0, 6.5])
def test_a_true_change_is_followed_within_fifty_observations(after: float) -> None:
    ratio, rng = warmed(), random.Random(4)
    for _ in range(50):
        ratio.add(after * rng.lognormvariate(0, 0.04), 1000)
    assert ratio.mean == pytest.approx(after, rel=0.03)


def taught(t0: float, t1: float, count: int) -> TwoTermFit:
    fit, rng = TwoTermFit((3.0, 4.0), (32.0, 4.0), (512.0, 64.0)), random.Random(1)
    for _ in range(count):
        messages = rng.randint(1, 12)
        fit.add(1, messages, t0 + t1 * messages + rng.gauss(0, 0.5), 1.25)
    return fit


@pytest.mark.parametrize(("t0", "t1"), [(3, 5), (0, 0), (40, 9), (150, 4), (25, 20)])
def test_both_fixed_terms_are_found(t0: float, t1: float) -> None:
    fit = taught(t0, t1, 60)
    assert fit.a == pytest.approx(t0, abs=1.5)
    assert fit.b == pytest.approx(t1, abs=0.4)


@pytest.mark.parametrize("sign", [1, -1])
def test_fixed_terms_stay_within_their_limits(sign: int) -> None:
    fit = taught(sign * 5000, sign * 900, 300)
    assert 0 <= fit.a <= 512
    assert 0 <= fit.b <= 64


def filled(*runs: tuple[int, int], cut: bool = False) -> LengthHistogram:
    """Of (length, how often) in this order."""
    histogram = LengthHistogram()
    for length, times in runs:
        for _ in range(times):
            histogram.add(bucket_of(length), cut=cut)
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
        bucket = bucket_of(min(length, patience))
        histogram.add(bucket, cut=patience < length)
        naive.add(bucket, cut=False)
    true = sorted(lengths)[int(0.95 * len(lengths))]
    assert 0.85 * true <= histogram.quantile() <= 1.2 * true
    assert naive.quantile() < 0.8 * true


def test_a_tail_that_was_always_cut_is_not_believed_short() -> None:
    histogram = filled((100, 80))
    for _ in range(20):
        histogram.add(bucket_of(200), cut=True)
    assert histogram.quantile() >= PRIOR_TOKENS


def test_old_answers_fade_and_weights_stay_bounded_over_a_long_life() -> None:
    assert filled((4000, 2000), (100, 8000)).quantile() <= 107
    assert 50 <= filled((4000, 60_000), (60, 60_000)).quantile() <= 70


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
