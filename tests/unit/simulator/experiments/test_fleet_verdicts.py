"""How verdicts on fleets are reached; `bench fleetopt` judges the published ones."""

import msgspec
import pytest

from planner.workload.library import SHIPPED
from simulator.experiments.fleet_verdicts import judge
from simulator.experiments.paper_fleets import OneMore, paged
from simulator.fleet.fleet import FleetSpec, PoolSpec
from simulator.fleet.traffic import CdfLengths
from tests.unit.simulator.fleets import second


def totals(name: str) -> OneMore:
    cdf = SHIPPED[name].workload.cdf
    assert cdf is not None
    return OneMore(CdfLengths(cdf.points))


def test_paged_engines_are_judged_by_the_first_token() -> None:
    spec = paged((9,), boundary=4096)
    found = judge(spec, totals("azure"), rate_per_s=60.0, slo_s=0.5, most_drawn=6000)
    assert found.holds, found


def lengths() -> CdfLengths:
    return CdfLengths([(10, 0.5), (40, 1.0)], 0.5)


def one(instances: int) -> FleetSpec:
    profile = second(w_s=0.01, max_num_seqs=4)
    return FleetSpec(pools=(PoolSpec(name="only", instances=instances, profile=profile),))


def test_each_limit_is_held_against_the_pool() -> None:
    good = judge(one(4), lengths(), rate_per_s=40.0, slo_s=0.5)
    assert good.holds
    slow = judge(one(4), lengths(), rate_per_s=40.0, slo_s=0.5, tpot_slo_s=0.005)
    assert slow.pools[0].faults == ("TPOT P99 0.01 s, above 0.005 s",)
    late = judge(one(4), lengths(), rate_per_s=40.0, slo_s=0.001)
    assert late.pools[0].faults[0].startswith("ttft P99")
    waits = judge(one(4), lengths(), rate_per_s=40.0, slo_s=0.012, criterion="wait")
    assert waits.holds
    full = judge(one(1), lengths(), rate_per_s=80.0, slo_s=0.5)
    assert full.pools[0].faults[0].startswith("overloaded")


def test_what_no_window_takes_is_not_forgotten() -> None:
    narrow = second(w_s=0.01, max_num_seqs=4, max_model_len=20)
    spec = FleetSpec(pools=(PoolSpec(name="only", instances=4, profile=narrow),))
    found = judge(spec, lengths(), rate_per_s=20.0, slo_s=0.5)
    assert found.pools[0].holds
    assert found.refused_share == pytest.approx(1 / 3, abs=0.02)
    assert not found.holds


def test_progress_and_bounds_come_with_a_verdict() -> None:
    told: list[int] = []
    found = judge(
        one(4),
        lengths(),
        rate_per_s=40.0,
        slo_s=0.5,
        progress=lambda name, arrived, *, total: told.append(arrived if name == "only" else total),
    ).pools[0]
    assert told == sorted(told)
    assert len(told) > 5
    assert found.ttft_p99 is not None
    assert found.ttft_p99.holds(found.ttft_p99_s)
    assert not found.short_run
    short = judge(one(4), lengths(), rate_per_s=40.0, slo_s=0.5, most_drawn=50).pools[0]
    assert short.short_run
    assert short.ttft_p99 is None


def test_spilling_fleets_are_not_judged_by_pool() -> None:
    spec = msgspec.structs.replace(one(1), spill_queue=0)
    with pytest.raises(ValueError, match="spill"):
        judge(spec, lengths(), rate_per_s=1.0, slo_s=1.0)
