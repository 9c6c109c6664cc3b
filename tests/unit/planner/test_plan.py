"""Whole plans: what is chosen, what stands beside it, what is refused."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import PlanError
from planner.goals import Goals
from planner.plan import make_plan
from planner.profile import PAPER_A100
from planner.records import PlanResult, Question
from planner.search import Mode
from planner.workload.distribution import Cdf
from planner.workload.library import SHIPPED
from planner.workload.workload import by_category, from_cdf, from_lengths
from tests.unit.planner.lengths import cdfs, made_up_trace


def plan_of(name: str, *, rate: float = 1000.0, ttft_s: float = 0.5, **given: Any) -> PlanResult:
    shipped = SHIPPED[name]
    return make_plan(
        Question(
            workload=shipped.workload,
            goals=Goals(rate_per_s=rate, ttft_s=ttft_s),
            compressible=shipped.compressible,
            **given,
        )
    )


def test_the_paper_s_search_finds_the_paper_s_fleets() -> None:
    azure = plan_of("azure", mode="paper")
    assert azure.chosen.boundaries == (4096,)
    assert (azure.chosen.gamma, azure.chosen.nodes, azure.one_by_slots.nodes) == (2.0, 50, 284)
    assert azure.savings == pytest.approx(0.824, abs=5e-4)
    # Table 3: 968 thousand dollars, a node billed as a GPU.
    assert round(azure.chosen.usd_per_year / 1000) == 968
    fixed = plan_of("agent-heavy", mode="paper", b_short=(8192,), gamma=1.5)
    assert [pool.nodes for pool in fixed.chosen.pools] == [255, 1981]


def test_paged_quotes_savings_against_one_paged_pool() -> None:
    plan = plan_of("azure")
    assert plan.baseline == plan.one_paged.label
    assert plan.savings == pytest.approx(1 - plan.chosen.nodes / plan.one_paged.nodes)
    assert plan.one_by_slots.nodes > 2 * plan.one_paged.nodes


def test_one_pool_is_the_answer_where_pools_buy_nothing() -> None:
    plan = plan_of("azure", gamma=1.0, ttft_s=5.0)
    assert plan.one_paged.nodes == 96
    assert plan.two.nodes >= 96
    assert plan.chosen is plan.one_paged
    assert "pools would buy no nodes here" in plan.notes[0]


@pytest.mark.parametrize("name", ["azure", "agent-heavy"])
def test_nothing_is_compressed_where_nobody_knows_what_can_be(name: str) -> None:
    shipped = SHIPPED[name]
    question = Question(
        workload=shipped.workload, goals=Goals(rate_per_s=100.0, ttft_s=5.0), mode="corrected"
    )
    plan = make_plan(question)
    assert plan.chosen.gamma == 1
    assert plan.compressed not in plan.alternatives
    assert any("no compression is planned: p_c" in note for note in plan.notes)
    known = make_plan(msgspec.structs.replace(question, compressible=1.0))
    assert known.chosen.gamma > 1
    assert known.chosen.nodes < plan.chosen.nodes


def test_the_published_model_may_leave_no_long_pool_and_says_so() -> None:
    plan = plan_of("azure", mode="exact", rate=100.0)
    assert [pool.name for pool in plan.chosen.pools] == ["short"]
    assert plan.notes[0].startswith("two, compressed: 6 nodes, 80.0 % below")
    assert any("no pool is left" in note for note in plan.notes)


def test_a_fleet_that_was_asked_for_may_cost_more() -> None:
    plan = plan_of("lmsys", b_short=(1536, 8192), ttft_s=5.0)
    assert plan.savings is not None
    assert plan.savings < 0
    assert "% above one pool, paged" in plan.notes[0]


def test_co_design_is_never_worse_than_retrofit() -> None:
    for name in SHIPPED:
        plan = plan_of(name, mode="corrected", ttft_s=30.0)
        assert plan.codesign_nodes is not None
        assert plan.retrofit_nodes is not None
        assert plan.codesign_nodes <= plan.retrofit_nodes


def test_up_to_n_pools_are_tried() -> None:
    plan = plan_of("lmsys", mode="corrected", ttft_s=5.0, gamma=1.0, most_pools=4)
    assert [len(fleet.pools) for fleet in plan.splits] == [3, 4]
    assert plan.chosen.nodes == min(
        fleet.nodes for fleet in (plan.one_by_slots, plan.two, *plan.splits)
    )


def test_each_pool_takes_the_cheapest_node() -> None:
    cheap = msgspec.structs.replace(PAPER_A100, name="cheap", usd_per_gpu_hour=1.0)
    kinds = plan_of("azure", nodes=(PAPER_A100, cheap))
    assert {pool.node.name for pool in kinds.chosen.pools} == {"cheap"}
    fixed = plan_of("azure", short_node=cheap, long_node=PAPER_A100, b_short=(4096,))
    assert [pool.node.name for pool in fixed.chosen.pools] == ["cheap", PAPER_A100.name]
    assert fixed.chosen.usd_per_year == pytest.approx(
        8760 * sum(p.nodes * p.node.usd_per_node_hour for p in fixed.chosen.pools)
    )


def test_equal_nodes_isolate_the_short_pool() -> None:
    equal = plan_of("agent-heavy", ttft_s=30.0, b_short=(8192,), gamma=1.0).equal_nodes
    assert equal is not None
    assert equal.short_nodes + equal.long_nodes == equal.nodes
    assert equal.short_tpot_s < equal.one_tpot_s < equal.long_tpot_s
    assert equal.one_short_ttft_s < equal.one_ttft_s


def test_asked_limits_are_set_beside_used_answers() -> None:
    trace = made_up_trace()
    assert trace.pairs is not None
    asked = np.where(np.arange(4000) % 2 == 0, 8000.0, np.nan)
    asked = np.maximum(asked, trace.pairs.answers)
    question = Question(
        workload=msgspec.structs.replace(trace, asked=asked),
        goals=Goals(rate_per_s=300.0, ttft_s=5.0),
        b_short=(4096,),
        gamma=1.0,
    )
    found = make_plan(question)
    assert found.asked is not None
    assert found.asked.unlimited_share == pytest.approx(0.5)
    assert found.asked.short_share_asked == 0.0
    assert found.asked.short_share_used == pytest.approx(trace.share(4096))
    assert found.asked.nodes_used == found.two.nodes


def test_code_is_not_compressed() -> None:
    prompts, answers = [1800.0] * 100, [100.0] * 100
    kinds = ("prose", "code") * 50
    mixed = from_lengths([*prompts, 400.0], [*answers, 100.0], categories=(*kinds, "prose"))
    goals = Goals(rate_per_s=100.0)

    def long_rate(compressible: dict[str, float]) -> float:
        question = Question(
            workload=by_category(mixed, compressible),
            goals=goals,
            mode="corrected",
            b_short=(1024,),
            gamma=2.0,
            compressible=1.0,
        )
        return make_plan(question).chosen.pools[1].rate_per_s

    assert long_rate({"prose": 1.0}) == pytest.approx(100 * 50 / 101)
    assert long_rate({"prose": 0.5, "code": 0.5}) == pytest.approx(100 * 50 / 101)
    assert long_rate({}) == pytest.approx(100 * 100 / 101)


@settings(max_examples=25, deadline=None)
@given(
    cdf=cdfs(),
    rate=st.floats(1, 3000),
    more=st.floats(1, 4),
    mode=st.sampled_from(("exact", "mix", "corrected", "paged")),
)
def test_cost_grows_with_the_rate(cdf: Cdf, rate: float, more: float, mode: Mode) -> None:
    few, many = (
        make_plan(
            Question(
                workload=from_cdf(cdf),
                goals=Goals(rate_per_s=r, ttft_s=20.0),
                mode=mode,
                window_tokens=65_536,
            )
        )
        for r in (rate, rate * more)
    )
    assert few.chosen.weight <= many.chosen.weight * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(cdf=cdfs(), rate=st.floats(1, 3000))
def test_nothing_beats_the_chosen_fleet(cdf: Cdf, rate: float) -> None:
    question = Question(workload=from_cdf(cdf), goals=Goals(rate_per_s=rate, ttft_s=20.0))
    plan = make_plan(question)
    others = (plan.one_paged, plan.two, plan.compressed, *plan.splits)
    assert plan.chosen.weight <= min(fleet.weight for fleet in others) * (1 + 1e-9)
    assert sum(p.rate_per_s for p in plan.chosen.pools) == pytest.approx(rate)
    assert plan.savings is not None
    assert plan.savings >= -1e-9


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"gamma": 0.5}, "gamma is 0.5"),
        ({"compressible": 1.5}, "p_c is 1.5"),
        ({"b_short": (70_000,)}, "no request lies on one side"),
        ({"b_short": (8192, 4096)}, "not ascending"),
        ({"b_short": (4096, 8192), "mode": "paper"}, "more than one boundary"),
        ({"window_tokens": 8192}, "exceed the window"),
        ({"window_tokens": 2**21}, "less than one window"),
    ],
)
def test_questions_that_make_no_sense_are_refused(wrong: dict[str, Any], problem: str) -> None:
    question = Question(workload=SHIPPED["lmsys"].workload, goals=Goals(rate_per_s=1.0))
    with pytest.raises(PlanError, match=problem):
        make_plan(msgspec.structs.replace(question, **wrong))
