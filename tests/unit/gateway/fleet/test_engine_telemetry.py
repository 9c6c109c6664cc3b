"""Readings of engines: stale ones are not told, restarts are noticed, preemptions add up."""

import pytest

from gateway.fleet import engine_telemetry as tv
from gateway.fleet.engine_telemetry import EngineSample, TelemetryView, record
from gateway.fleet.fleet import PoolState


def test_a_reading_is_told_while_it_is_fresh() -> None:
    view = TelemetryView(2)
    assert tv.kv_usage(view, 0, 100.0) is None
    record(view, 0, EngineSample(kv_usage=0.4, waiting=3), 100.0)
    assert tv.kv_usage(view, 0, 105.0) == 0.4
    assert tv.kv_usage(view, 0, 105.1) is None
    assert tv.kv_usage(view, 0, 109.0, stale_s=10) == 0.4
    assert tv.kv_usage(view, 1, 100.0) is None


def test_what_an_engine_does_not_tell_is_none() -> None:
    view = TelemetryView(1)
    record(view, 0, EngineSample(running=1), 0.0)
    assert tv.kv_usage(view, 0, 0.0) is None


@pytest.mark.parametrize(
    ("before", "after", "restarted"),
    [
        (EngineSample(prompt_tokens_total=10), EngineSample(prompt_tokens_total=9), True),
        (EngineSample(prompt_tokens_total=10), EngineSample(prompt_tokens_total=10), False),
        (EngineSample(started_unix_s=100), EngineSample(started_unix_s=200), True),
        (EngineSample(started_unix_s=100), EngineSample(started_unix_s=100.5), False),
        (EngineSample(running=5), EngineSample(running=0), False),
        (EngineSample(prompt_tokens_total=10), EngineSample(), False),
    ],
)
def test_a_restart_is_a_counter_that_fell_or_another_start(
    before: EngineSample, after: EngineSample, restarted: bool
) -> None:
    view = TelemetryView(1)
    assert not record(view, 0, before, 0.0)
    assert record(view, 0, after, 1.0) is restarted
    assert view.restarts == [int(restarted)]


def test_preemptions_are_counted_from_the_first_reading_and_over_restarts() -> None:
    view = TelemetryView(2)
    record(view, 0, EngineSample(preemptions_total=100), 0.0)
    assert view.preemptions == 0
    record(view, 0, EngineSample(preemptions_total=103), 1.0)
    record(view, 1, EngineSample(preemptions_total=7), 1.0)
    record(view, 1, EngineSample(preemptions_total=8), 2.0)
    assert view.preemptions == 4
    record(view, 0, EngineSample(preemptions_total=2), 3.0)
    assert view.preemptions == 6


def test_tokens_held_are_known_where_size_and_usage_are() -> None:
    pool, view = PoolState("p", ["w"], 8), TelemetryView(1)
    assert tv.held_tokens(pool, view, 0, 0.0) is None
    record(view, 0, EngineSample(kv_usage=0.5), 0.0)
    assert tv.held_tokens(pool, view, 0, 1.0) is None
    pool.kv_tokens[0] = 8000
    assert tv.held_tokens(pool, view, 0, 1.0) == 4000
    assert tv.held_tokens(pool, view, 0, 60.0) is None
