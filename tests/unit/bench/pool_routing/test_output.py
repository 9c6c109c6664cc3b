"""The requests that the benches send, and how they read what came back; no processes."""

import orjson
import pytest

from bench.common import texts
from bench.pool_routing import accuracy, output
from bench.pool_routing.output import CAP, Length, LengthTrace, simulate


def test_the_mixed_load_is_what_it_says() -> None:
    asks = list(accuracy.mixed(200))
    assert asks == list(accuracy.mixed(200))
    assert {ask.kind for ask in asks} == set(texts.KINDS)
    assert sum(ask.stream for ask in asks) / len(asks) == pytest.approx(0.3, abs=0.1)
    for ask in asks:
        body = orjson.loads(ask.body)
        assert body["max_tokens"] == ask.cap_tokens >= body["mock_output_tokens"] >= 1


def test_a_habitual_cap_does_not_empty_the_short_pool() -> None:
    trace = LengthTrace("short", "prose", [Length(1000, 100)] * 50 + [Length(20_000, 100)] * 50)
    found = simulate(trace)
    assert (found.short, found.truly_short, found.would_refuse) == (50, 50, 0)
    assert CAP > output.BOUNDARY
    assert simulate(trace, output_mode="cap").short == 0
