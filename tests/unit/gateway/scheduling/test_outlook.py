"""What a request may expect, learned from requests with like forecasts."""

import random
from math import inf

from gateway.scheduling.outlook import LEAST, Forecast, Outlook


def learned(seed: int, count: int = 400) -> tuple[Outlook, random.Random]:
    """Times of .5 to 2 times the forecast, which spreads over three orders of magnitude."""
    outlook, rng = Outlook(), random.Random(seed)
    for _ in range(count):
        forecast, ttft_s = drawn(rng)
        outlook.note(forecast, 0.0, ttft_s)
    return outlook, rng


def drawn(rng: random.Random) -> tuple[Forecast, float]:
    wait_s = 10 ** rng.uniform(-1, 2)
    return Forecast(1, wait_s, 0.1), wait_s * rng.uniform(0.5, 2)


def test_of_quotes_at_any_load_as_many_come_true_as_they_say() -> None:
    true = []
    for seed in range(20):
        outlook, rng = learned(seed)
        for _ in range(50):
            forecast, ttft_s = drawn(rng)
            said = outlook.expect(forecast)[1]
            assert all(value is not None for value in said)
            true.append([ttft_s <= (value or 0.0) for value in said])
    half, most = (sum(column) / len(true) for column in zip(*true, strict=True))
    assert 0.44 < half < 0.56
    assert 0.92 < most < 0.98


def test_a_longer_queue_than_any_seen_is_quoted_in_proportion() -> None:
    outlook, _ = learned(1)
    (_, near), (_, far) = (outlook.expect(Forecast(1, wait_s, 0.1))[1] for wait_s in (90.0, 900.0))
    assert near is not None
    assert far is not None
    assert 8 < far / near < 12


def test_nothing_is_said_of_what_too_few_were_seen_or_is_given_up() -> None:
    outlook = Outlook()
    forecast = Forecast(0, 1.0, 1.0)
    for _ in range(LEAST - 1):
        outlook.note(forecast, 1.0, None)
    assert outlook.expect(forecast) == ([None, None], [None, None])
    outlook.note(forecast, 1.0, None)
    assert outlook.expect(forecast) == ([1.0, 1.0], [None, None])
    assert outlook.expect(Forecast(1, 1.0, 1.0))[0] == [None, None], "another class"
    for _ in range(3):
        outlook.note(forecast, inf, inf)
    assert outlook.expect(forecast)[0] == [1.0, None]
