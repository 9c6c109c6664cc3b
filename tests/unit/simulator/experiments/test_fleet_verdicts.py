"""Verdicts on published and corrected fleets (FleetOpt, Table 3), and how they are reached."""

import msgspec
import pytest

from planner.workload.library import SHIPPED
from simulator.experiments.fleet_verdicts import FleetVerdict, judge
from simulator.experiments.paper_fleets import OneMore, by_slots, paged
from simulator.fleet.fleet import FleetSpec, PoolSpec
from simulator.fleet.traffic import CdfLengths
from tests.unit.simulator.fleets import second

DRAWN = 150_000
"""150 s: short of ten services, long enough to see a queue run away."""


def totals(name: str) -> OneMore:
    cdf = SHIPPED[name].workload.cdf
    assert cdf is not None
    return OneMore(CdfLengths(cdf.points))


def published(name: str, fleet: tuple[int, int], gamma: float, most_drawn: int) -> FleetVerdict:
    spec = by_slots(fleet, boundary=SHIPPED[name].b_short, gamma=gamma)
    return judge(
        spec,
        totals(name),
        rate_per_s=1000.0,
        slo_s=0.5,
        criterion="wait",
        most_drawn=most_drawn,
    )


@pytest.mark.parametrize(
    ("name", "fleet", "gamma"),
    [("azure", (48, 2), 2.0), ("azure", (47, 45), 1.5), ("lmsys", (7, 52), 2.0)],
)
def test_the_published_compressing_fleets_are_rejected(
    name: str, fleet: tuple[int, int], gamma: float
) -> None:
    found = published(name, fleet, gamma, DRAWN)
    short, long = found.pools
    assert not found.holds
    assert not short.holds
    assert short.drifting
    assert short.wait_p99_s > 10
    assert long.holds


@pytest.mark.parametrize(
    ("name", "fleet", "gamma"),
    [("azure", (43, 131), 1.0), ("lmsys", (11, 54), 2.0), ("lmsys", (10, 63), 1.5)],
)
def test_the_corrected_fleets_and_plain_routing_are_accepted(
    name: str, fleet: tuple[int, int], gamma: float
) -> None:
    found = published(name, fleet, gamma, 2 * DRAWN)
    assert found.holds, found
    assert all(pool.utilisation < 0.95 for pool in found.pools)


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


def test_a_run_lasts_ten_services_and_has_requests_enough() -> None:
    found = judge(one(4), lengths(), rate_per_s=40.0, slo_s=0.5).pools[0]
    assert found.requests >= 0.8 * 20_000 * 0.98
    assert found.duration_s >= 10 * 20 * 0.01


def test_a_pool_that_nothing_reaches_holds() -> None:
    narrow = second(w_s=0.01, max_num_seqs=4, max_model_len=40)
    pools = (
        PoolSpec(name="short", instances=4, profile=narrow, boundary_tokens=40),
        PoolSpec(name="long", instances=1, profile=second(w_s=0.01)),
    )
    found = judge(FleetSpec(pools=pools), lengths(), rate_per_s=40.0, slo_s=0.5, most_drawn=30_000)
    assert found.holds
    assert found.pools[1].requests == 0


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
