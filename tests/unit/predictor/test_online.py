"""The predictor as a scheduler uses it."""

import math
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor import PoolSection, PrefillPredictor, PriorRates
from predictor.features import features
from predictor.rows import PrefillRow
from predictor.train import train
from tests.unit.predictor.made import rows_of, small_section, x_of

TRAINED = train(rows_of(4000, 1))


def serve(
    predictor: PrefillPredictor, rows: Sequence[PrefillRow]
) -> list[tuple[float, float, float]]:
    """(mean, quantile, actual) of each, learned from in turn."""
    found = []
    for row in rows:
        worker = int(row.worker)
        mean_s, quantile_s, bucket = predictor.predict(worker, row.x)
        predictor.observe(worker, row.x, mean_s, quantile_s, bucket, row.prefill_s)
        found.append((mean_s, quantile_s, row.prefill_s))
    return found


def coverage(found: Sequence[tuple[float, float, float]]) -> float:
    return sum(actual <= quantile for _, quantile, actual in found) / len(found)


def bias(found: Sequence[tuple[float, float, float]]) -> float:
    return sum(mean for mean, *_ in found) / sum(actual for *_, actual in found)


def test_nothing_that_the_gateway_imports_needs_numpy() -> None:
    code = (
        "import sys, predictor, predictor.rows; "
        "print([m for m in ('numpy', 'sklearn', 'asyncio', 'logging') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@given(
    st.integers(0, 30_000),
    st.integers(0, 30_000),
    st.none() | st.integers(1, 4096),
    st.integers(0, 300),
    st.integers(0, 20_000) | st.just(0),
    st.floats(0, 1),
    st.booleans(),
    st.sampled_from(["tree", "prior", "adaptive"]),
)
def test_a_request_is_predicted_as_its_features_are(
    prompt: int, hit: int, cap: int | None, active: int, ahead: int, kv: float, told: bool, of: str
) -> None:
    section = None if of == "prior" else small_section()
    predictor = PrefillPredictor(
        section,
        workers=2,
        calibration="adaptive" if of == "adaptive" else "bucketed",
        slots=20,
    )
    # A speed, a correction and constants of its own.
    for x, took_s in 40 * ((x_of(2000), 0.9), (x_of(2000, active=40), 4.0)):
        predictor.observe(1, x, *predictor.predict(1, x), took_s)
    asked = (prompt, hit, cap, 200, active, ahead, kv, told)
    x = features(*asked)
    assert predictor.predict_request(1, *asked) == (x, *predictor.predict(1, x))


def test_prompts_longer_than_any_trained_on_take_longer() -> None:
    predictor = PrefillPredictor(small_section(), workers=1)
    assert predictor.predict(0, x_of(24_000))[:2] == (3.0, 4.5)
    assert predictor.predict(0, x_of(24_000, 20_000))[:2] == (1.0, 1.5)


@pytest.mark.parametrize("section", [None, TRAINED], ids=["untrained", "trained"])
@pytest.mark.parametrize("calibration", ["bucketed", "adaptive"])
def test_coverage_is_alpha_and_the_mean_is_right(
    section: PoolSection | None, calibration: Any
) -> None:
    predictor = PrefillPredictor(section, workers=4, calibration=calibration)
    found = serve(predictor, rows_of(4000, 2))
    assert 0.93 <= coverage(found[1000:]) <= 0.965
    assert bias(found[1000:]) == pytest.approx(1.0, abs=0.05)
    assert predictor.coverage == pytest.approx(0.95, abs=0.04)


@pytest.mark.parametrize("section", [None, TRAINED], ids=["untrained", "trained"])
@pytest.mark.parametrize("slow", [0.5, 1.4, 3.0])
def test_coverage_recovers_within_1000_requests_of_a_shift(
    section: PoolSection | None, slow: float
) -> None:
    predictor = PrefillPredictor(section, workers=4)
    serve(predictor, rows_of(2000, 3))
    found = serve(predictor, rows_of(3000, 4, slow=slow))
    assert coverage(found[1000:]) >= 0.93
    assert bias(found[1000:]) == pytest.approx(1.0, abs=0.1)


def test_a_cold_start_is_careful_and_soon_right() -> None:
    predictor = PrefillPredictor(workers=4, prior=PriorRates(prefill_tokens_per_s=2000))
    found = serve(predictor, rows_of(400, 7))
    assert coverage(found[:50]) >= 0.9
    assert bias(found[40:100]) == pytest.approx(1.0, abs=0.2)
    assert predictor.prefill_tokens_per_s(0) == pytest.approx(8000, rel=0.3)


@pytest.mark.parametrize("section", [None, TRAINED], ids=["untrained", "trained"])
def test_a_slow_worker_s_rate_is_known_within_400_requests(section: PoolSection | None) -> None:
    predictor = PrefillPredictor(section, workers=4)
    serve(predictor, rows_of(1000, 8))
    serve(predictor, rows_of(400, 9, slow=2.0, slow_worker="2"))
    slow, other = predictor.prefill_tokens_per_s(2), predictor.prefill_tokens_per_s(1)
    assert other / slow == pytest.approx(2.0, rel=0.3)
    assert predictor.slowness(2) / predictor.slowness(1) == pytest.approx(other / slow)
    predictor.forget(2)
    assert predictor.slowness(2) == 1.0


@pytest.mark.parametrize("actual_s", [math.nan, math.inf, -1.0, 1e9])
def test_times_that_no_clock_measured_are_ignored(actual_s: float) -> None:
    predictor = PrefillPredictor(workers=1)
    before = predictor.state()
    mean_s, quantile_s, bucket = predictor.predict(0, x_of())
    predictor.observe(0, x_of(), mean_s, quantile_s, bucket, actual_s)
    assert predictor.state() == before
    assert predictor.coverage is None


requests = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(0, 1 << 20),
        st.integers(0, 1 << 20),
        st.integers(0, 1 << 22),
        st.integers(0, 5000),
        st.floats(0, 1e5),
    ),
    max_size=60,
)


@given(requests, st.sampled_from([None, TRAINED]))
def test_predictions_are_finite_and_above_zero_whatever_was_seen(
    seen: list[tuple[int, int, int, int, int, float]], section: PoolSection | None
) -> None:
    predictor = PrefillPredictor(section, workers=2, slots=5)
    for worker, prompt, hit, backlog, active, actual_s in seen:
        x = x_of(prompt, hit, backlog, active)
        mean_s, quantile_s, bucket = predictor.predict(worker, x)
        assert 0 < mean_s < math.inf
        assert 0 < quantile_s < math.inf
        predictor.observe(worker, x, mean_s, quantile_s, bucket, actual_s)
    assert predictor.prefill_tokens_per_s(0) > 0


@pytest.mark.parametrize("section", [None, TRAINED], ids=["untrained", "trained"])
def test_processes_that_merge_are_calibrated_as_one(section: PoolSection | None) -> None:
    four = [PrefillPredictor(section, workers=4) for _ in range(4)]
    rows = rows_of(6000, 10, slow=2.0)
    found = []
    for start in range(0, len(rows), 40):
        for number, row in enumerate(rows[start : start + 40]):
            found += serve(four[(number * 7 + start) % 4], [row])
        states = {str(i): p.state() for i, p in enumerate(four)}
        for i, predictor in enumerate(four):
            predictor.merge({name: s for name, s in states.items() if name != str(i)})
    assert coverage(found[1500:]) == pytest.approx(0.95, abs=0.02)
    means = [predictor.predict(0, x_of())[0] for predictor in four]
    assert max(means) / min(means) < 1.3


def test_a_process_that_joins_predicts_as_the_others_do() -> None:
    known, newcomer = (PrefillPredictor(workers=4) for _ in range(2))
    serve(known, rows_of(2000, 11, slow=3.0))
    newcomer.merge({"a": known.state()})
    for worker in range(4):
        old, new = (p.predict(worker, x_of(3000, 0, 500)) for p in (known, newcomer))
        assert new == pytest.approx(old, rel=0.01)


@pytest.mark.parametrize("section", [None, small_section()])
def test_the_slow_start_of_a_worker_that_joins_is_forgotten_and_no_other_s(
    section: PoolSection | None,
) -> None:
    predictor, x = PrefillPredictor(section, workers=2), x_of(3000, 0, 0)

    def answer(worker: int, slowness: float) -> None:
        mean_s, quantile_s, bucket = predictor.predict(worker, x)
        usual_s = predictor.predict(0, x)[0]
        predictor.observe(worker, x, mean_s, quantile_s, bucket, slowness * usual_s)

    for number in range(400):
        answer(number % 2, 1.0)
    before = predictor.predict(0, x)
    predictor.join(2)
    assert predictor.slowness(2) == 1.0
    for _ in range(40):
        answer(2, 20.0)
    assert predictor.slowness(2) > 2 * predictor.slowness(0)
    assert predictor.predict(0, x) == pytest.approx(before)
    for number in range(200):
        answer(number % 2, 1.0)
    assert predictor.slowness(2) == pytest.approx(predictor.slowness(0), rel=0.1)
    for _ in range(400):
        answer(2, 4.0)
    for number in range(200):
        answer(number % 2, 1.0)
    assert predictor.slowness(2) > 2 * predictor.slowness(0)


@pytest.mark.parametrize(
    "state", [{}, {"calibration": 1}, {"speeds": []}, {"prior": {"s": [1]}}, 7]
)
def test_states_that_are_none_change_nothing(state: Any) -> None:
    predictor = PrefillPredictor(workers=2)
    before = predictor.state()
    predictor.merge({"a": state})
    assert predictor.state() == before
