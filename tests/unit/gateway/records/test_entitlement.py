"""Weights as the token-pools paper has them, and where its formula needs bounds."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.records.entitlement import (
    CLASSES,
    PROFILES,
    ServiceClass,
    split_baseline,
    weight,
)

PAPER, DEFAULT = PROFILES["paper"], PROFILES["default"]
MEAN_SLO_MS = 15_250.0


@pytest.mark.parametrize(("slo_ms", "published"), [(500, 93.85), (30_000, 20.27), (5_000, 60.40)])
def test_the_paper_s_weights_come_out(slo_ms: int, published: float) -> None:
    assert weight(DEFAULT, "elastic", slo_ms, MEAN_SLO_MS, 0, 0) == pytest.approx(
        published, abs=0.005
    )


def test_the_mean_over_all_three_does_not_give_the_paper_s_weights() -> None:
    mean_ms = (500 + 30_000 + 5_000) / 3
    found = [weight(DEFAULT, "elastic", slo, mean_ms, 0, 0) for slo in (500, 30_000, 5_000)]
    assert found == pytest.approx([92.2, 16.5, 54.2], abs=0.05)


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


def test_without_an_slo_or_a_mean_the_average_is_taken() -> None:
    assert weight(DEFAULT, "elastic", 0, 1000, 0, 0) == pytest.approx(100 / 3)
    assert weight(DEFAULT, "elastic", 1000, 0, 0, 0) == pytest.approx(100 / 3)


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
