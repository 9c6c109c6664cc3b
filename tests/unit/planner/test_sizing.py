"""Node counts: our columns' figures, closed forms, and what must hold of any fleet."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import PlanError
from planner.goals import Goals, check_goals
from planner.profile import PAPER_A100
from planner.search import Mode, sweep
from planner.split import Ranges, cheapest_splits, size_ranges, whole_range
from planner.workload.distribution import Cdf
from planner.workload.library import SHIPPED
from planner.workload.moments import MASS, PROMPT, STEP_TOKENS, STEPS, boundaries_of, prepare
from planner.workload.workload import from_cdf
from tests.unit.planner.lengths import cdfs

WINDOW = 65_536
MODES: tuple[Mode, ...] = ("exact", "mix", "corrected", "paged")


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
