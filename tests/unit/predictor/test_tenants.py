"""No tenant steers what is predicted for another."""

from math import exp, log

from hypothesis import example, given, settings
from hypothesis import strategies as st

from predictor import PrefillPredictor
from predictor.tenants import CALIBRATION_PULL, MAX_TENANTS, SPEED_PULL, Tenants
from tests.unit.predictor.made import small_section, x_of

WORKERS = 3
LENGTHS = (1, 500, 2000, 9000)


def predictions(predictor: PrefillPredictor) -> list[tuple[float, float]]:
    return [
        predictor.predict(worker, x_of(length))[:2]
        for worker in range(WORKERS)
        for length in LENGTHS
    ]


def teach(predictor: PrefillPredictor, client: str, worker: int, length: int, times: float) -> None:
    x = x_of(length)
    mean_s, quantile_s, bucket = predictor.predict(worker, x)
    predictor.observe(worker, x, mean_s, quantile_s, bucket, mean_s * times, client)


def both_known() -> PrefillPredictor:
    predictor = PrefillPredictor(small_section(), workers=WORKERS)
    for client in ("attacker", "honest"):
        teach(predictor, client, 0, 2000, 1.0)
    return predictor


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.integers(0, WORKERS - 1),
            st.sampled_from(LENGTHS),
            st.floats(1e-3, 1e3),
            st.integers(1, 300),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_no_tenant_moves_anothers_prediction_by_more_than_its_bound(
    attack: list[tuple[int, int, float, int]],
) -> None:
    predictor = both_known()
    before = predictions(predictor)
    for worker, length, times, count in attack:
        for _ in range(count):
            teach(predictor, "attacker", worker, length, times)
    # What it had moved before may be on the other side of its bound.
    mean_most = 2 * SPEED_PULL + 1e-9
    quantile_most = mean_most + 4 * CALIBRATION_PULL
    for then, now in zip(before, predictions(predictor), strict=True):
        assert abs(log(now[0] / then[0])) <= mean_most
        assert abs(log(now[1] / then[1])) <= quantile_most


REPLICAS = 3


def told(replicas: list[PrefillPredictor]) -> None:
    states = {str(number): replica.state() for number, replica in enumerate(replicas)}
    for number, replica in enumerate(replicas):
        replica.merge({name: state for name, state in states.items() if name != str(number)})


@settings(deadline=None, max_examples=15)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, REPLICAS - 1), min_size=1, max_size=REPLICAS, unique=True),
            st.integers(0, WORKERS - 1),
            st.sampled_from(LENGTHS),
            st.sampled_from([1e-3, 0.5, 2.0, 1e3]),
            st.integers(50, 150),
        ),
        min_size=1,
        max_size=6,
    )
)
@example([([0, 1, 2], 1, 2000, 1e3, 150)] * 3)
def test_several_gateways_hold_a_tenant_to_one_bound(
    attack: list[tuple[list[int], int, int, float, int]],
) -> None:
    replicas = [both_known() for _ in range(REPLICAS)]
    for _ in range(20):  # what they have learned so far becomes one
        told(replicas)
    before = [predictions(replica) for replica in replicas]
    for which, worker, length, times, count in attack:
        for number in which:
            for _ in range(count):
                teach(replicas[number], "attacker", worker, length, times)
        told(replicas)
    mean_most = 2 * SPEED_PULL + 1e-2
    quantile_most = mean_most + 4 * CALIBRATION_PULL
    for replica, known in zip(replicas, before, strict=True):
        for then, now in zip(known, predictions(replica), strict=True):
            assert abs(log(now[0] / then[0])) <= mean_most
            assert abs(log(now[1] / then[1])) <= quantile_most


def test_a_tenant_that_is_alone_at_one_gateway_is_held_there_too() -> None:
    shared, apart = both_known(), PrefillPredictor(small_section(), workers=WORKERS)
    teach(apart, "attacker", 0, 2000, 1.0)
    told([shared, apart])
    for _ in range(2000):
        teach(apart, "attacker", 1, 2000, 20.0)
    told([shared, apart])
    assert shared.slowness(1) <= exp(SPEED_PULL) + 1e-2
    assert apart.slowness(1) <= exp(SPEED_PULL) + 1e-2


def test_others_pull_back_what_one_pulls() -> None:
    predictor = both_known()
    for _ in range(3000):
        teach(predictor, "attacker", 1, 2000, 20.0)
        x = x_of(2000)
        mean_s, quantile_s, bucket = predictor.predict(1, x)
        predictor.observe(1, x, mean_s, quantile_s, bucket, 1.0, "honest")
    assert 0.9 <= predictor.predict(1, x_of(2000))[0] <= 1.1


def test_a_tenant_alone_is_followed() -> None:
    predictor = PrefillPredictor(small_section(), workers=WORKERS)
    x = x_of(2000)
    for _ in range(2000):
        mean_s, quantile_s, bucket = predictor.predict(1, x)
        predictor.observe(1, x, mean_s, quantile_s, bucket, 5.0, "alone")
    assert predictor.slowness(1) > exp(SPEED_PULL) * 2


def test_so_many_tenants_are_told_apart() -> None:
    tenants = Tenants()
    found = [tenants.of(str(number)) for number in range(MAX_TENANTS + 2)]
    assert found[-1] is found[-2] is not None
    assert found[-3] is not found[-1]
