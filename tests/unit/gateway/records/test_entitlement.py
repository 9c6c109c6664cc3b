"""Weights as the paper has them and with their bounds; mean rates; whether a target was kept."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.records.entitlement import (
    CLASSES,
    MAX_SHARE,
    MIN_SHARE,
    PROFILES,
    MeanRate,
    ServiceClass,
    slo_result,
    split_baseline,
    tpot_result,
    weight,
)
from tests.builders import decision

PAPER, DEFAULT = PROFILES["paper"], PROFILES["default"]
MEAN_SLO_MS = 15_250.0


@pytest.mark.parametrize(("slo_ms", "published"), [(500, 93.85), (30_000, 20.27), (5_000, 60.40)])
def test_the_paper_s_weights_come_out(slo_ms: int, published: float) -> None:
    assert weight(DEFAULT, "elastic", slo_ms, MEAN_SLO_MS, 0, 0) == pytest.approx(
        published, abs=0.005
    )


def test_debt_narrows_the_gap_as_published() -> None:
    def gap(copilot_debt: float, synth_debt: float) -> float:
        return weight(DEFAULT, "elastic", 500, MEAN_SLO_MS, 0, copilot_debt) / weight(
            DEFAULT, "elastic", 30_000, MEAN_SLO_MS, 0, synth_debt
        )

    assert gap(0, 0) == pytest.approx(4.63, abs=0.005)
    assert gap(0.607, 0.775) == pytest.approx(3.87, abs=0.01)


@pytest.mark.parametrize("service_class", CLASSES)
@given(
    slo_ms=st.floats(0, 1e7),
    mean_ms=st.floats(0, 1e7),
    burst=st.floats(0, 1e6),
    debt=st.floats(-1, 1),
)
def test_weights_stay_in_their_class_s_band(
    service_class: ServiceClass, slo_ms: float, mean_ms: float, burst: float, debt: float
) -> None:
    low, high = {
        "dedicated": (501, 1000),
        "guaranteed": (501, 1000),
        "elastic": (1.01, 500),
        "spot": (0.101, 1),
        "preemptible": (0, 0.1),
    }[service_class]
    w = weight(DEFAULT, service_class, slo_ms, mean_ms, burst, debt)
    assert w > 0
    assert low <= w <= high


@given(
    slos=st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)),
    bursts=st.tuples(st.floats(0, 100), st.floats(0, 100)),
    debts=st.tuples(st.floats(-0.2, 1), st.floats(-0.2, 1)),
)
def test_no_debt_or_burst_lets_one_class_pass_another(
    slos: tuple[float, float], bursts: tuple[float, float], debts: tuple[float, float]
) -> None:
    order: tuple[ServiceClass, ...] = ("guaranteed", "elastic", "spot", "preemptible")
    for higher, lower in itertools.combinations(order, 2):
        first = weight(DEFAULT, higher, slos[0], 1000, bursts[0], debts[0])
        assert first > weight(DEFAULT, lower, slos[1], 1000, bursts[1], debts[1])


def test_tighter_slos_and_debt_weigh_more_and_bursts_less() -> None:
    base = weight(DEFAULT, "elastic", 1000, 1000, 0.5, 0.2)
    assert weight(DEFAULT, "elastic", 500, 1000, 0.5, 0.2) > base
    assert weight(DEFAULT, "elastic", 1000, 1000, 0.5, 0.4) > base
    assert weight(DEFAULT, "elastic", 1000, 1000, 0.9, 0.2) < base
    published = 100 / 3 / (1 + 1.0 * 0.9) * (1 + 4 * -0.2)
    assert weight(PAPER, "elastic", 1000, 1000, 0.9, -0.2) == pytest.approx(published)


def test_deep_credit_does_not_turn_the_weight_around() -> None:
    """Eq. 1 as printed is negative below -1/4."""
    assert weight(DEFAULT, "elastic", 1000, 1000, 0, -0.9) == pytest.approx(100 / 3 * 0.05)


@pytest.mark.parametrize(
    ("sequences", "slots", "parts"),
    [
        (32, (448, 64), (28, 4)),
        (32, (1, 1), (16, 16)),
        (3, (100, 1), (2, 1)),
        (1, (8, 8), (1, 0)),
        (0, (8, 8), (0, 0)),
        (5, (0, 0), (3, 2)),
        (7, (), ()),
    ],
)
def test_one_number_splits_by_slots(
    sequences: int, slots: tuple[int, ...], parts: tuple[int, ...]
) -> None:
    assert split_baseline(sequences, slots) in {
        parts,
        parts[::-1] if len(set(slots)) == 1 else parts,
    }


@given(
    sequences=st.integers(0, 5000),
    slots=st.lists(st.integers(0, 5000), min_size=1, max_size=5).map(tuple),
)
def test_the_parts_add_up_and_nobody_goes_without(sequences: int, slots: tuple[int, ...]) -> None:
    parts = split_baseline(sequences, slots)
    assert sum(parts) == sequences
    if sequences >= len(slots):
        assert min(parts) >= 1


@pytest.mark.parametrize(
    ("stated", "rate", "share"),
    [
        ((100.0, 300.0), 100.0, 0.5),
        ((100.0, 300.0), 300.0, 1.5),
        ((0.0, 100.0), 0.0, 1.0),
        ((0.0, 100.0), 100.0, 1.0),
        ((1.0, 1e6), 1.0, MIN_SHARE),
        ((1e6, *[1.0] * 101), 1e6, MAX_SHARE),
    ],
)
def test_a_share_is_the_rate_over_the_mean_of_those_that_state_one_within_bounds(
    stated: tuple[float, ...], rate: float, share: float
) -> None:
    rates = MeanRate()
    for each in stated:
        rates.add(each)
    assert (rates.share(rate), rates.count) == (share, sum(each > 0 for each in stated))


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


def judged(
    outcome: str = "ok",
    status: int = 200,
    *,
    ttft_s: float | None = None,
    duration_s: float = 9.0,
    stream: bool = True,
    admitted: bool = True,
    target_ms: int = 500,
) -> str | None:
    timing: dict[str, Any] = {"ttft_s": ttft_s, "duration_s": duration_s}
    record = decision(outcome=outcome, status=status, stream=stream, **timing)
    return slo_result(record, target_ms, admitted=admitted)


@pytest.mark.parametrize(("ttft_s", "met"), [(0.1, "true"), (0.5, "true"), (0.501, "false")])
def test_a_first_token_is_compared_with_the_target(ttft_s: float, met: str) -> None:
    assert judged(ttft_s=ttft_s) == met
    assert judged("disconnected", 499, ttft_s=ttft_s) == met, "who left saw the first token"


def test_without_a_target_or_a_first_token_to_see_nothing_is_judged() -> None:
    assert judged(ttft_s=0.1, target_ms=0) is None
    assert judged(ttft_s=0.1, stream=False) is None
    assert judged("upstream_error", 502, stream=False) is None


@pytest.mark.parametrize("outcome", ["upstream_error", "internal_error", "evicted"])
def test_a_failure_after_admission_breaks_the_target_even_after_a_fast_start(outcome: str) -> None:
    assert judged(outcome, 502) == "false"
    assert judged(outcome, 200, ttft_s=0.01) == "false"


@pytest.mark.parametrize("admitted", [True, False])
@pytest.mark.parametrize("status", [429, 500, 503, 504, 400, 401, 403, 404, 413])
def test_a_refusal_is_apart_before_admission_and_a_failure_after_it(
    status: int, admitted: bool
) -> None:
    """The client's own faults are not judged."""
    fault = status < 500 and status != 429
    expected = None if fault else "false" if admitted else "refused"
    assert judged("refused", status, admitted=admitted) == expected
    assert judged("error", status, ttft_s=0.01) is None


def test_who_leaves_before_the_first_token_is_judged_by_its_wait() -> None:
    assert judged("disconnected", 499, duration_s=0.6) == "false"
    assert judged("disconnected", 499, duration_s=0.4) is None


@pytest.mark.parametrize(
    ("outcome", "tpot_s", "met"),
    [
        ("ok", 0.05, "true"),
        ("ok", 0.051, "false"),
        ("disconnected", 0.04, "true"),
        ("upstream_error", 0.01, "false"),
        ("ok", None, None),
        ("refused", None, None),
    ],
)
def test_a_streams_pace_is_compared_with_its_target(
    outcome: str, tpot_s: float | None, met: str | None
) -> None:
    streamed = decision(outcome=outcome, stream=True, tpot_s=tpot_s)
    assert tpot_result(streamed, 50) == met
    assert tpot_result(streamed, 0) is None
    assert tpot_result(decision(outcome=outcome, stream=False, tpot_s=tpot_s), 50) is None
