"""Node counts: our columns' figures, closed forms, and what must hold of any fleet."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.fleetopt.columns import GAMMAS, fleet_sizes
from planner.errors import PlanError
from planner.goals import Goals, check_goals
from planner.profile import PAPER_A100
from planner.search import Mode, sweep
from planner.split import Ranges, cheapest_splits, size_ranges, whole_range
from planner.workload.distribution import Cdf
from planner.workload.library import SHIPPED
from planner.workload.moments import MASS, PROMPT, STEP_TOKENS, STEPS, boundaries_of, prepare
from planner.workload.workload import from_cdf
from tests.unit.planner.lengths import cdfs, made_up_trace

WINDOW = 65_536
MODES: tuple[Mode, ...] = ("exact", "mix", "corrected", "paged")


@pytest.mark.parametrize(
    ("name", "mode", "one", "cells"),
    [
        ("azure", "exact", 292, ["44 + 131", "48 + 45", "49 + 2"]),
        ("azure", "mix", 292, ["44 + 131", "78 + 45", "92 + 2"]),
        ("azure", "corrected", 277, ["39 + 121", "68 + 41", "80 + 1"]),
        ("lmsys", "exact", 127, ["7 + 76", "7 + 63", "7 + 54"]),
        ("lmsys", "mix", 127, ["7 + 76", "10 + 63", "11 + 54"]),
        ("lmsys", "corrected", 120, ["6 + 70", "8 + 57", "10 + 49"]),
        ("agent-heavy", "exact", 2517, ["232 + 2039", "259 + 1997", "274 + 2017"]),
        ("agent-heavy", "mix", 2517, ["232 + 2039", "377 + 1769", "495 + 1497"]),
        ("agent-heavy", "corrected", 2256, ["203 + 1807", "328 + 1562", "429 + 1318"]),
    ],
)
def test_columns(name: str, mode: Mode, one: int, cells: list[str]) -> None:
    shipped = SHIPPED[name]
    sums = prepare(shipped.workload, boundaries=(shipped.b_short,), gammas=GAMMAS)
    assert fleet_sizes(sums, mode, shipped.compressible) == (one, cells)


@pytest.mark.parametrize(
    ("name", "one", "two"),
    [("azure", 96, "39 + 60"), ("lmsys", 44, "8 + 38"), ("agent-heavy", 1652, "187 + 1467")],
)
def test_paged_columns(name: str, one: int, two: str) -> None:
    shipped = SHIPPED[name]
    sums = prepare(shipped.workload, boundaries=(shipped.b_short,), gammas=GAMMAS)
    found, cells = fleet_sizes(sums, "paged", shipped.compressible)
    assert (found, cells[0]) == (one, two)


def one_pool(goals: Goals, mode: Mode, cdf: Cdf) -> tuple[Ranges, float]:
    sums = prepare(from_cdf(cdf), boundaries=())
    ranges = size_ranges(sums, PAPER_A100, mode, goals, WINDOW)
    return ranges, float(ranges.sized.nodes[0])


@settings(max_examples=60, deadline=None)
@given(cdf=cdfs(), rate=st.floats(0.1, 2000), more=st.floats(1, 3), mode=st.sampled_from(MODES))
def test_nodes_grow_with_the_rate(cdf: Cdf, rate: float, more: float, mode: Mode) -> None:
    _, few = one_pool(Goals(rate_per_s=rate, ttft_s=30.0), mode, cdf)
    _, many = one_pool(Goals(rate_per_s=rate * more, ttft_s=30.0), mode, cdf)
    assert few <= many


@settings(max_examples=60, deadline=None)
@given(cdf=cdfs(), rate=st.floats(0.1, 2000), tpot_s=st.floats(0.02, 0.2))
def test_running_pools_stay_above_every_lower_bound(cdf: Cdf, rate: float, tpot_s: float) -> None:
    goals = Goals(rate_per_s=rate, ttft_s=5.0, tpot_s=tpot_s)
    for mode in ("corrected", "paged"):
        ranges, nodes = one_pool(goals, mode, cdf)
        sums, w = ranges.loads.sums[:, 0], PAPER_A100.w_s
        bandwidth = rate * PAPER_A100.h_s_per_token * sums[STEP_TOKENS] / sums[MASS]
        slots = rate * w * sums[STEPS] / sums[MASS] / ranges.loads.slots[0]
        prompts = rate * w * sums[PROMPT] / sums[MASS] / PAPER_A100.max_num_batched_tokens
        assert nodes >= bandwidth + max(slots, prompts) / goals.utilisation - 1e-6
        assert nodes >= bandwidth / goals.stretch - 1e-6
        assert ranges.sized.ttft_p99_s[0] <= goals.ttft_s
        assert ranges.sized.tpot_p99_s[0] <= tpot_s * (1 + 1e-9)
        assert ranges.sized.utilisation[0] <= goals.utilisation + 1e-9


def test_the_iteration_is_the_fixed_point_of_its_own_occupancy() -> None:
    goals = Goals(rate_per_s=300.0, ttft_s=5.0)
    ranges = size_ranges(
        prepare(made_up_trace(), boundaries=()), PAPER_A100, "paged", goals, WINDOW
    )
    step, nodes = ranges.sized.step_s[0], ranges.sized.nodes[0]
    resident = 300.0 / nodes * ranges.loads.sums[STEP_TOKENS, 0] * step
    assert step == pytest.approx(PAPER_A100.w_s + PAPER_A100.h_s_per_token * resident)


def test_a_tighter_slo_takes_more_nodes_and_an_impossible_one_none() -> None:
    cdf = SHIPPED["azure"].workload.cdf
    assert cdf is not None
    counts = [
        one_pool(Goals(rate_per_s=1000.0, ttft_s=slo_s), "paged", cdf)[1]
        for slo_s in (math.inf, 0.5, 0.2, 0.1)
    ]
    assert counts == sorted(counts)
    assert counts[1] > counts[0]
    # 14 iterations of 8 ms are over 100 ms, however many nodes there are.
    assert counts[-1] == math.inf


def test_prompt_arithmetic_costs_nodes_and_time() -> None:
    slow = msgspec.structs.replace(PAPER_A100, prefill_s_per_token=5e-5)
    goals = Goals(rate_per_s=300.0, ttft_s=5.0)
    sums = prepare(made_up_trace(), boundaries=())
    free, paid = (
        size_ranges(sums, node, "paged", goals, WINDOW).sized for node in (PAPER_A100, slow)
    )
    assert paid.nodes[0] > free.nodes[0]
    assert paid.ttft_p99_s[0] - free.ttft_p99_s[0] > 1000 * 5e-5


@settings(max_examples=40, deadline=None)
@given(cdf=cdfs(), rate=st.floats(1, 1000), mode=st.sampled_from(("corrected", "paged")))
def test_compression_only_moves_work(cdf: Cdf, rate: float, mode: Mode) -> None:
    """Theorem 2: the long pool never grows with gamma, so sizing for it never costs more."""
    workload = from_cdf(cdf)
    boundaries = boundaries_of(workload, WINDOW)
    sums = prepare(workload, boundaries=boundaries)
    goals = Goals(rate_per_s=rate, ttft_s=math.inf)
    pool = (sums, PAPER_A100)
    grid = sweep(mode, goals, short=pool, long=pool, window_tokens=WINDOW)
    shape = grid.cost.shape
    tail = grid.long.unrounded.reshape(shape)
    assert (np.diff(grid.short_loads.rate_per_s.reshape(shape), axis=1) >= -1e-9 * rate).all()
    if mode == "corrected":
        assert (np.diff(tail, axis=1) <= 1e-9 * (1 + tail[:, 1:])).all()


@settings(max_examples=40, deadline=None)
@given(cdf=cdfs(), rate=st.floats(1, 1000), mode=st.sampled_from(MODES))
def test_splits_are_the_cheapest_of_all(cdf: Cdf, rate: float, mode: Mode) -> None:
    workload = from_cdf(cdf)
    boundaries = boundaries_of(workload, WINDOW)
    sums = prepare(workload, boundaries=boundaries, gammas=(1.0,))
    goals = Goals(rate_per_s=rate, ttft_s=math.inf)
    ranges = size_ranges(sums, PAPER_A100, mode, goals, WINDOW)
    found = cheapest_splits([ranges], 2)
    whole = ranges.cost[whole_range(ranges)]
    assert sum(ranges.cost[index] for _, index in found[1]) == whole
    at = {(lo, hi): i for i, (lo, hi) in enumerate(zip(ranges.low, ranges.high, strict=True))}
    last = len(ranges.edges) - 1
    pairs = [ranges.cost[at[0, k]] + ranges.cost[at[k, last]] for k in range(1, last)]
    if pairs and np.isfinite(min(pairs)):
        assert sum(ranges.cost[index] for _, index in found[2]) == pytest.approx(min(pairs))


def test_two_pools_of_the_sweep_are_those_of_the_split() -> None:
    shipped = SHIPPED["azure"]
    boundaries = boundaries_of(shipped.workload, WINDOW)
    sums = prepare(shipped.workload, boundaries=boundaries)
    goals = Goals(rate_per_s=1000.0, ttft_s=5.0)
    pool = (sums, PAPER_A100)
    grid = sweep("paged", goals, short=pool, long=pool, window_tokens=WINDOW)
    ranges = size_ranges(sums, PAPER_A100, "paged", goals, WINDOW)
    best = cheapest_splits([ranges], 2)[2]
    assert grid.cost[:, 0].min() == sum(ranges.cost[index] for _, index in best)


def test_spares_and_availability_add_nodes() -> None:
    goals = Goals(rate_per_s=1.0, spare_nodes=1, availability=0.9)
    assert goals.installed(np.array([9.0, 10.0, 0.0])).tolist() == [11.0, 13.0, 0.0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate_per_s": 0.0},
        {"rate_per_s": math.inf},
        {"rate_per_s": math.nan},
        {"rate_per_s": 1.0, "ttft_s": 0.0},
        {"rate_per_s": 1.0, "tpot_s": -1.0},
        {"rate_per_s": 1.0, "utilisation": 1.0},
        {"rate_per_s": 1.0, "availability": 0.0},
        {"rate_per_s": 1.0, "spare_nodes": -1},
    ],
)
def test_goals_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(PlanError):
        Goals(**wrong)  # type: ignore[arg-type]


def test_an_slo_below_an_iteration_is_refused() -> None:
    check_goals(PAPER_A100, Goals(rate_per_s=1.0, ttft_s=0.017, tpot_s=0.0081))
    with pytest.raises(PlanError, match="TTFT SLO of 16 ms"):
        check_goals(PAPER_A100, Goals(rate_per_s=1.0, ttft_s=0.016))
    with pytest.raises(PlanError, match="TPOT SLO of 8 ms"):
        check_goals(PAPER_A100, Goals(rate_per_s=1.0, tpot_s=0.008))
