"""Pools in phases: closed forms against two queues of engines in tandem, and what must hold."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import PlanError
from planner.goals import Goals
from planner.phases import one_unsized, phased, prefill_node
from planner.plan import make_plan
from planner.profile import profile_for
from planner.records import FleetPlan, PlanResult, PoolPlan, Question
from planner.workload.synthetic import synthetic
from planner.workload.workload import from_lengths
from simulator.fleet.arrivals import poisson
from simulator.fleet.outcome import FleetOutcome
from simulator.fleet.tandem import simulate_pool
from simulator.fleet.traffic import Floats, traffic
from sluice.simulated.fleet import fleet_of_plan, lengths_of

H100 = profile_for("H100")
CHAT = "prompt=1500,answer=250,spread=0.7"


def plan_of(
    spec: str = CHAT,
    rate: float = 30.0,
    tpot_ms: float = 40.0,
    gb_per_s: float = 20.0,
    **given: object,
) -> PlanResult:
    question = Question(
        workload=synthetic(spec),
        goals=Goals(rate_per_s=rate, ttft_s=2.0, tpot_s=tpot_ms / 1000),
        nodes=(H100,),
        most_pools=1,
        phases="auto",
        transfer_bytes_per_s=1e9 * gb_per_s,
    )
    fields = {name: getattr(question, name) for name in question.__struct_fields__}
    return make_plan(Question(**{**fields, **given}))


def pools_of(plan: PlanResult) -> tuple[PoolPlan, PoolPlan]:
    (pool,) = plan.compared
    assert pool.together is not None
    assert pool.apart is not None
    return pool.together, pool.apart


def seen(question: Question, pool: PoolPlan) -> FleetOutcome:
    """The engines of a pool, iteration by iteration; what prefill ends, decode gets later."""
    spec = fleet_of_plan(
        FleetPlan(label="seen", pools=(pool,)),
        counting="paged",
        transfer_bytes_per_s=question.transfer_bytes_per_s,
    )
    random = np.random.default_rng(7)
    at = poisson(question.goals.rate_per_s, 12_000, random)
    return simulate_pool(spec, traffic(lengths_of(question.workload), at, random))


def p99(times_s: Floats) -> float:
    steady = times_s[len(times_s) // 5 :]
    return float(np.quantile(steady[~np.isnan(steady)], 0.99))


@pytest.mark.parametrize(
    ("spec", "rate"),
    [
        (CHAT, 8.0),
        (CHAT, 30.0),
        ("prompt=4000,answer=100,spread=0.5", 8.0),
        ("prompt=300,answer=600,spread=0.7", 40.0),
    ],
)
def test_both_phases_run_as_the_closed_forms_say(spec: str, rate: float) -> None:
    plan = plan_of(spec, rate)
    _, apart = pools_of(plan)
    run = seen(plan.question, apart)
    assert p99(run.ttft_s) == pytest.approx(apart.ttft_p99_s, rel=0.15)
    assert p99(run.ttft_s) <= plan.question.goals.ttft_s
    # The planner's own bound: a node that gets a random share of the requests.
    assert 0.85 * apart.tpot_p99_s <= p99(run.tpot_s) <= 1.02 * apart.tpot_p99_s


def test_together_counts_the_prompts_between_tokens() -> None:
    plan = plan_of()
    together, apart = pools_of(plan)
    alone = plan_of(phases="never").one_paged.pools[0]
    assert together.serving_nodes > alone.serving_nodes > apart.decode_serving
    run = seen(plan.question, together)
    assert p99(run.tpot_s) == pytest.approx(together.tpot_p99_s, rel=0.1)


BASE = plan_of(phases="never").question


def total(rate: float, gb_per_s: float, tpot_ms: float) -> float:
    question = msgspec.structs.replace(
        BASE,
        goals=Goals(rate_per_s=rate, ttft_s=2.0, tpot_s=tpot_ms / 1000),
        transfer_bytes_per_s=1e9 * gb_per_s,
    )
    (pool,) = phased(question, one_unsized(question, "one pool")).pools
    return math.inf if pool.apart is None else pool.apart.nodes


@settings(max_examples=25, deadline=None)
@given(
    rate=st.floats(0.5, 300),
    more=st.floats(1, 3),
    gb_per_s=st.floats(0.2, 100),
    tpot_ms=st.floats(18, 100),
)
def test_more_load_and_a_slower_link_never_take_fewer_nodes(
    rate: float, more: float, gb_per_s: float, tpot_ms: float
) -> None:
    nodes = total(rate, gb_per_s, tpot_ms)
    assert nodes <= total(rate * more, gb_per_s, tpot_ms)
    assert nodes <= total(rate, gb_per_s / more, tpot_ms)


def test_phases_are_chosen_where_they_take_fewer_nodes_and_said_either_way() -> None:
    apart, together = plan_of(), plan_of(rate=8.0)
    assert apart.chosen.label == "one pool, apart"
    assert any("apart wins: 6 prefill + 2 decode against 10" in note for note in apart.notes)
    assert together.chosen.label == "one pool, paged"
    assert any("together wins: 3 against 2 prefill + 2" in note for note in together.notes)
    asked = plan_of(rate=8.0, phases="always")
    assert asked.chosen.label == "one pool, apart"
    assert asked.chosen.nodes == 4


def test_phases_hold_what_one_kind_of_node_cannot() -> None:
    """An iteration that shares its time with prompts is over 16 ms, however many nodes."""
    plan = plan_of(rate=8.0, tpot_ms=16.0)
    (pool,) = plan.compared
    assert pool.together is None
    assert plan.chosen.label == "one pool, apart"
    assert any("together no number meets" in note for note in plan.notes)


def test_caches_leave_less_to_prefill_on_either_side() -> None:
    random = np.random.default_rng(1)
    lengths = (random.lognormal(7.5, 0.7, 3000), random.lognormal(5.5, 0.7, 3000))
    cold, warm = (
        pools_of(plan_of(workload=from_lengths(*lengths, cached_share=share)))
        for share in (None, 0.6)
    )
    assert cold[1].phases is not None
    assert warm[1].phases is not None
    assert warm[1].phases.prefill_nodes < cold[1].phases.prefill_nodes
    assert warm[1].decode_nodes == cold[1].decode_nodes
    assert warm[0].nodes < cold[0].nodes


def test_short_prompts_stay_where_prefill_and_transfer_take_longer_than_they_stall() -> None:
    plan = plan_of()
    _, apart = pools_of(plan)
    assert apart.phases is not None
    tokens = apart.phases.skip_below_tokens
    stalled_s = H100.prompt_s(tokens)
    moved_s = tokens * H100.kv_bytes_per_token / 20e9
    assert 0 < stalled_s < apart.phases.prefill_p99_s + moved_s
    slower = pools_of(plan_of(gb_per_s=5.0))[1].phases
    assert slower is not None
    assert slower.skip_below_tokens >= tokens


def test_a_prefill_node_reads_its_weights_once_for_a_full_iteration() -> None:
    whole = prefill_node(H100).prompt_s(4 * 2048)
    steps_s = 4 * H100.w_s + H100.prompt_s(4 * 2048)
    own_s = H100.h_s_per_token * 2048 * (1 + 2 + 3 + 4)
    assert whole == pytest.approx(steps_s + own_s, rel=0.001)


def test_what_phases_need_is_asked_for() -> None:
    with pytest.raises(PlanError, match="transfer-gb-per-s"):
        plan_of(transfer_bytes_per_s=None)
    with pytest.raises(PlanError, match="mode paged"):
        plan_of(mode="corrected")
