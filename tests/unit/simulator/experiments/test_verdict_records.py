"""A P99 is judged with its interval: met, violated, or too close to tell."""

import pytest

from simulator.experiments.verdict_records import (
    FleetVerdict,
    LatencyGoals,
    PoolVerdict,
    verdict_of,
)
from simulator.fleet.outcome import PoolSummary, Tail
from simulator.fleet.statistics import Interval


def seen(p99: Interval | None, p99_s: float = 0.5) -> PoolVerdict:
    calm = Tail(mean_s=0.01, p50_s=0.01, p90_s=0.01, p99_s=0.02)
    summary = PoolSummary(
        name="all",
        instances=2,
        slots=8,
        requests=1000,
        rate_per_s=10.0,
        utilisation=0.5,
        kv_utilisation=0.5,
        running=8.0,
        queue=0.0,
        tokens_per_s=100.0,
        requests_per_s=10.0,
        wait=calm,
        ttft=Tail(mean_s=0.1, p50_s=0.1, p90_s=0.3, p99_s=p99_s, p99=p99),
        tpot=calm,
        preemptions=0,
        longest_service_s=1.0,
        drifting=False,
        short_run=False,
    )
    return verdict_of(summary, 100.0, LatencyGoals(slo_s=0.5))


@pytest.mark.parametrize(
    ("low", "high", "holds", "undecided"),
    [(0.2, 0.4, True, False), (0.45, 0.6, True, True), (0.51, 0.7, False, False)],
)
def test_a_goal_is_judged_by_the_bounds_of_its_figure(
    *, low: float, high: float, holds: bool, undecided: bool
) -> None:
    value = (low + high) / 2
    pool = seen(Interval(value=value, low=low, high=high), value)
    fleet = FleetVerdict(pools=(pool,), criterion="ttft", slo_s=0.5)
    assert (fleet.holds, fleet.undecided) == (holds, undecided)
    assert bool(pool.doubts) == undecided


@pytest.mark.parametrize(("p99_s", "holds"), [(0.5, True), (0.501, False), (float("nan"), False)])
def test_a_figure_without_bounds_is_judged_by_its_value(*, p99_s: float, holds: bool) -> None:
    pool = seen(None, p99_s)
    assert pool.holds == holds
    assert not pool.doubts
