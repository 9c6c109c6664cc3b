"""`sluice plan --verify`: planned beside simulated, yes or no."""

import functools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from matplotlib.image import imread
from typer.testing import Result

from planner.goals import Goals
from planner.plan import make_plan
from planner.profile import profile_for
from planner.records import FleetPlan, PlanResult, Question
from planner.workload.library import SHIPPED
from planner.workload.synthetic import synthetic
from sluice.plan.verify import Verification, verification_json, verify
from tests.running import sluice

AZURE = ("--workload", "azure", "--rate", "100", "--b-short", "4096")
FIGURES = ("utilisation", "wait_p99_s", "ttft_p99_s", "tpot_p99_s")


def run(*args: str) -> Result:
    return sluice("plan", *AZURE, *args, COLUMNS="120")


@functools.cache
def planned(*, gamma: float = 1.0, **more: Any) -> PlanResult:
    goals = Goals(rate_per_s=100.0, ttft_s=0.5)
    return make_plan(
        Question(
            workload=SHIPPED["azure"].workload,
            goals=goals,
            mode="corrected",
            b_short=(4096,),
            gamma=gamma,
            compressible=1.0,
            **more,
        )
    )


def with_nodes(found: PlanResult, short: int) -> PlanResult:
    """The same plan with another short pool."""
    pools = (msgspec.structs.replace(found.chosen.pools[0], serving_nodes=short),)
    chosen = msgspec.structs.replace(found.chosen, pools=(*pools, *found.chosen.pools[1:]))
    return msgspec.structs.replace(found, chosen=chosen)


@functools.cache
def long_enough() -> Verification:
    return verify(planned(), most_requests=60_000)


def test_a_corrected_fleet_holds_and_is_as_planned() -> None:
    checked = long_enough()
    assert checked.holds
    assert checked.counting == "slots"
    assert checked.slots_used == tuple(pool.utilisation for pool in checked.verdict.pools)
    for plan_of, seen in zip(checked.planned, checked.verdict.pools, strict=True):
        assert seen.name == plan_of.name
        assert seen.utilisation == pytest.approx(plan_of.utilisation, rel=0.15)
        assert seen.ttft_p99_s == pytest.approx(plan_of.ttft_p99_s, rel=0.15)


def test_a_fleet_with_too_few_nodes_does_not_hold() -> None:
    found = planned()
    assert found.chosen.pools[0].nodes == 4
    checked = verify(with_nodes(found, 2), most_requests=60_000)
    assert not checked.holds
    body = verification_json(checked)
    assert not body["pools"]["short"]["holds"]
    assert any("overloaded" in fault for fault in body["pools"]["short"]["faults"])
    assert body["pools"]["long"]["holds"]


def test_the_largest_cut_of_the_plan_is_the_simulation_s() -> None:
    # Of Azure's band up to 8,192 tokens, half of a prompt is not enough for the upper part.
    wide = verify(planned(gamma=2.0), most_requests=20_000)
    narrow = verify(planned(gamma=2.0, max_cut=0.5), most_requests=20_000)
    for checked in (wide, narrow):
        rate = checked.planned[1].rate_per_s
        long = checked.verdict.pools[1]
        assert long.requests == pytest.approx(0.8 * rate * long.duration_s, rel=0.35, abs=30)
    assert narrow.verdict.pools[1].requests > 10 * wide.verdict.pools[1].requests


def test_yes_for_people_and_for_machines(tmp_path: Path) -> None:
    args = ("--mode", "corrected", "--gamma", "1", "--verify", "--verify-requests", "20000")
    shown = run(*args, "--plot", str(tmp_path))
    assert shown.exit_code == 0, shown.output
    assert "verified: yes" in shown.stdout
    assert "planned" in shown.stdout
    assert imread(tmp_path / "plan-verified.png").shape[1] > 400
    body = json.loads(run(*args, "--json").stdout)
    assert body["verified"] is True
    for pool in body["verification"]["pools"].values():
        for figure in FIGURES:
            assert set(pool[figure]) == {"planned", "simulated"}
        assert pool["ttft_p99_s"]["simulated"] > 0


def test_no_is_exit_code_1() -> None:
    # As published, nothing is left for what stays long; here that is all of the band.
    window = ("--mode", "paper", "--gamma", "2", "--pc", "1")
    args = (*window, "--verify", "--verify-requests", "20000")
    shown = run(*args)
    assert shown.exit_code == 1, shown.output
    assert "verified: no" in shown.stdout
    assert "no window takes" in shown.stdout
    found = run(*args, "--json")
    assert found.exit_code == 1
    assert json.loads(found.stdout)["verified"] is False


def test_paged_engines_are_simulated_for_the_paged_mode() -> None:
    found = msgspec.structs.replace(
        planned(), question=msgspec.structs.replace(planned().question, mode="paged")
    )
    checked = verify(found, most_requests=3000)
    assert checked.counting == "paged"
    # Planned by windows of 16 slots, run with up to 256.
    assert checked.planned[1].slots_per_node == 16
    long = checked.verdict.pools[1]
    assert checked.slots_used[1] == pytest.approx(long.utilisation * 256 / 16)
    none = msgspec.structs.replace(found, chosen=FleetPlan(label="none"))
    with pytest.raises(ValueError, match="none is no fleet"):
        verify(none, most_requests=3000)


def tenants(slo: str = "") -> str:
    gold = f"service_class: guaranteed, concurrency: 400{slo}"
    return f"""\
entitlements:
  - {{name: gold, tenant: a, model: m, {gold}}}
  - {{name: spot, tenant: b, model: m, service_class: spot}}
"""


@functools.cache
def paged() -> PlanResult:
    return make_plan(
        Question(workload=SHIPPED["azure"].workload, goals=Goals(rate_per_s=30.0, ttft_s=0.8))
    )


def test_the_planned_gateway_is_run_with_its_policies_and_tenants() -> None:
    checked = verify(paged(), base=tenants(), model="m", most_requests=4_000)
    gateway = checked.gateway
    assert gateway is not None
    assert gateway.policies == (
        "scheduling: all quartz",
        "admission: by token pool",
        "compression: off",
    )
    assert gateway.covered is not None
    assert [tenant.name for tenant in gateway.tenants] == ["gold", "spot"]
    for tenant in gateway.tenants:
        assert tenant.attainment > 0.99
        assert tenant.ttft.p99_s < 0.8
    assert checked.holds
    body = verification_json(checked)["gateway"]
    assert [t["service_class"] for t in body["tenants"]] == ["guaranteed", "spot"]
    assert body["tenants"][0]["ttft_s"]["p99"] > 0


def test_a_fleet_that_breaks_a_tenant_s_promise_is_not_verified() -> None:
    found = paged()
    tight = tenants(", slo_target_ms: 30")
    checked = verify(found, base=tight, model="m", most_requests=4_000)
    assert checked.verdict.holds
    assert not checked.holds
    gateway = checked.gateway
    assert gateway is not None
    (fault,) = gateway.tenants[0].faults
    assert "within 30 ms, below 99 %" in fault


def test_both_phases_are_simulated_and_the_gateway_before_them() -> None:
    found = make_plan(
        Question(
            workload=synthetic("prompt=1500,answer=250,spread=0.7"),
            goals=Goals(rate_per_s=30.0, ttft_s=2.0, tpot_s=0.04),
            nodes=(profile_for("H100"),),
            most_pools=1,
            phases="auto",
            transfer_bytes_per_s=20e9,
        )
    )
    checked = verify(found, most_requests=4_000)
    assert checked.holds
    assert checked.gateway is not None
    assert "all least-loaded, all/prefill quartz" in checked.gateway.policies[0]
    (planned,), (seen,) = checked.planned, checked.verdict.pools
    assert planned.phases is not None
    assert seen.instances == planned.decode_serving
    assert seen.ttft_p99_s == pytest.approx(planned.ttft_p99_s, rel=0.15)
    less = msgspec.structs.replace(
        planned,
        phases=msgspec.structs.replace(
            planned.phases, prefill_serving=planned.phases.prefill_serving - 2
        ),
        serving_nodes=planned.serving_nodes - 2,
    )
    chosen = msgspec.structs.replace(found.chosen, pools=(less,))
    assert not verify(msgspec.structs.replace(found, chosen=chosen), most_requests=4_000).holds
