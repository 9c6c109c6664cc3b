"""A simulated gateway decides with the gateway's own policies, from estimates."""

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from gateway.settings import parse
from planner.profile import NodeProfile
from simulator.engine.records import Emission, EngineRequest
from simulator.fleet.arrivals import poisson
from simulator.fleet.failures import Outage
from simulator.fleet.traffic import Traffic
from simulator.pipeline.engine_fleet import EngineFleet
from simulator.pipeline.records import Gateway, PipelineOutcome, TenantTraffic
from simulator.pipeline.run import run_pipeline
from simulator.pipeline.tenants import TenantSummary, tenants
from sluice.simulated.gateway import gateway_of, policies_of, tenant_traffic, tenants_of

NODE = NodeProfile(
    name="small",
    gpu="cpu",
    model="m",
    gpus=1,
    w_s=0.01,
    h_s_per_token=1e-7,
    prefill_s_per_token=1e-5,
    chunk_tokens=2048,
    kv_tokens=2**17,
)
POOLS = """
      short: {max_model_len: 4096, max_num_seqs: 8, workers: ["http://a:1", "http://a:2"]}
      long: {max_model_len: 32768, max_num_seqs: 8, workers: ["http://b:1", "http://b:2"]}
"""
ONE = """
      all: {max_model_len: 16384, max_num_seqs: 8, workers: ["http://a:1", "http://a:2"]}
"""
WINDOW = "    boundary: {b_short: 1500, gamma: 1.5}\n"
TENANTS = """
entitlements:
  - {name: gold, tenant: a, model: m, service_class: guaranteed, concurrency: 12}
  - {name: spot, tenant: b, model: m, service_class: %s}
"""


def gateway(pools: str = ONE, *, more: str = "", entitlements: str = "", **given: Any) -> Gateway:
    text = f"version: 1\nmodels:\n  - name: m\n    pools:{pools}{more}{entitlements}"
    config = parse(text, "sluice.yaml", {})
    return gateway_of(config, config.models[0], NODE, counting="paged", **given)


def requests(
    served: Gateway,
    rate: float,
    count: int = 3000,
    *,
    prompts: tuple[int, int] = (50, 800),
    answer: float = 40,
) -> TenantTraffic:
    random = np.random.default_rng(5)
    traffic = Traffic(
        arrival_s=poisson(rate, count, random),
        prompt_tokens=random.integers(*prompts, count),
        output_tokens=1 + random.geometric(1 / answer, count),
    )
    return tenant_traffic(traffic, tenants_of(served.entitlements, None), random)


def run(served: Gateway, sent: TenantTraffic, **more: Any) -> PipelineOutcome:
    return run_pipeline(served, sent, seed=3, **more)


@pytest.mark.parametrize("policy", ["least-loaded", "round-robin", "sticky", "quartz"])
def test_every_policy_serves_everything_within_capacity(policy: str) -> None:
    served = gateway(more=f"    scheduling: {{policy: {policy}}}\n")
    assert policies_of(served)[0] == f"scheduling: all {policy}"
    found = run(served, requests(served, 10.0))
    assert Counter(found.reasons) == {"": 3000}
    assert not np.isnan(found.fleet.end_s).any()
    assert set(found.fleet.worker) == {0, 1}


def test_ranks_are_balanced_by_bfio_and_better_than_round_robin() -> None:
    ranked = ONE.replace('["http://a:1", "http://a:2"]', '[{url: "http://a:1", ranks: 4}]')
    figures = {}
    for policy in ("bfio", "round-robin"):
        served = gateway(ranked.replace("8,", "4,"), more=f"    scheduling: {{policy: {policy}}}\n")
        assert policies_of(served)[0] == f"scheduling: all {policy}"
        found = run(served, requests(served, 24.0, prompts=(50, 6000)))
        figures[policy] = float(np.nanmean(found.fleet.end_s - found.fleet.arrival_s))
    assert figures["bfio"] < figures["round-robin"]


def test_pools_are_chosen_from_estimates_and_not_from_the_true_lengths() -> None:
    served = gateway(POOLS, more="    boundary: {b_short: 1500}\n")
    sent = requests(served, 6.0, prompts=(1000, 1900))
    found = run(served, sent)
    true_short = sent.traffic.total_tokens <= 1500
    went_short = found.fleet.planned == 0
    assert went_short.any()
    # What a gateway cannot know: an answer's length, and a prompt's exact tokens.
    assert 0.01 < float((true_short != went_short).mean()) < 0.6
    assert not (went_short & (sent.traffic.total_tokens > 2000)).any()


@pytest.mark.parametrize(("taught", "short"), [(0, 0), (200, 300)])
def test_what_a_gateway_has_learned_counts_from_the_first_request_on(
    taught: int, short: int
) -> None:
    """Eight bytes a token, twice as many as it assumes: untaught, it takes all for long ones."""
    served = gateway(POOLS, more="    boundary: {b_short: 1500}\n")
    sent = requests(served, 1000.0, 300, prompts=(1000, 1010))
    sent = msgspec.structs.replace(sent, text_bytes=8 * sent.traffic.prompt_tokens)
    planned = run(served, sent, taught=range(taught)).fleet.planned
    assert int((planned == 0).sum()) == short


def test_what_a_first_token_lets_through_misses_the_step_that_begins_with_it() -> None:
    first_s: dict[str, float] = {}

    def heard(emission: Emission, at_s: float) -> None:
        first_s.setdefault(emission.id, at_s)
        if emission.id == "a" and "b" not in sent:
            sent.append("b")
            engines.submit((0, 0), EngineRequest(id="b", prompt_tokens=10, output_tokens=1), at_s)

    engines, sent = EngineFleet(gateway(), heard), ["a"]
    engines.submit((0, 0), EngineRequest(id="a", prompt_tokens=10, output_tokens=9), 0.0)
    while "b" not in first_s:
        engines.step(engines.next_s())
    assert first_s["b"] - first_s["a"] == pytest.approx(2 * NODE.w_s, rel=0.1)


def test_a_prompt_in_the_window_is_compressed_as_often_as_the_compressor_can() -> None:
    more = f"{WINDOW}    compression: {{enabled: true, only_when_busy: false}}\n"
    counts = {}
    for share in (0.0, 0.5, 1.0):
        served = gateway(POOLS, more=more, compressible=share)
        sent = requests(served, 6.0, prompts=(1000, 1900))
        found = run(served, sent).fleet
        counts[share] = int(found.compressed.sum())
        cut = found.compressed
        assert (found.prompt_tokens[cut] < sent.traffic.prompt_tokens[cut]).all()
        assert (found.pool[cut] == 0).all()
        assert (found.prompt_tokens[~cut] == sent.traffic.prompt_tokens[~cut]).all()
    assert counts[0.0] == 0
    assert counts[0.5] == pytest.approx(counts[1.0] / 2, rel=0.15)
    assert counts[1.0] > 500


def test_prompts_are_compressed_only_while_the_larger_pool_is_busy() -> None:
    counts = {}
    for rate in (1.0, 40.0):
        served = gateway(POOLS, more=f"{WINDOW}    compression: {{enabled: true}}\n")
        found = run(served, requests(served, rate, count=1500, prompts=(1000, 1900), answer=100))
        counts[rate] = int(found.fleet.compressed.sum())
    assert counts[1.0] < 15
    assert counts[40.0] > 100


def by_name(served: Gateway, found: PipelineOutcome) -> dict[str, TenantSummary]:
    return {one.name: one for one in tenants(served, found, 0.5)}


def test_a_flood_of_spot_work_is_refused_and_the_guaranteed_tenant_keeps_its_service() -> None:
    alone = gateway(entitlements=TENANTS % "spot")
    few = requests(alone, 7.0, count=2000)
    few.entitlement[:] = 0
    calm = by_name(alone, run(alone, few))["gold"]
    served = gateway(entitlements=TENANTS % "spot")
    flood = requests(served, 70.0, count=20_000)
    flood.entitlement[:] = (np.arange(len(flood)) % 10 > 0).astype(np.int64)
    found = by_name(served, run(served, flood))
    assert found["spot"].refused["priority"] > 5000
    assert found["gold"].refused_by_load == 0
    assert found["gold"].faults == ()
    assert found["gold"].ttft.p99_s < 3 * calm.ttft.p99_s


def test_preemptible_work_gives_way_in_the_engine() -> None:
    served = gateway(entitlements=TENANTS % "preemptible", more="    spill_queue: 8\n")
    sent = requests(served, 30.0, count=6000, answer=400)
    found = run(served, sent)
    reasons = np.array(found.reasons)
    assert (reasons[sent.entitlement == 1] == "evicted").any()
    assert not (reasons[sent.entitlement == 0] == "evicted").any()
    assert np.isnan(found.fleet.end_s[reasons == "priority"]).all()


def test_an_open_gateway_lets_requests_wait_and_then_gives_up() -> None:
    more = "    scheduling: {policy: quartz, queue_limit: 20, queue_timeout_s: 5}\n"
    served = gateway(more=more)
    found = run(served, requests(served, 200.0, prompts=(4000, 8000)))
    reasons = Counter(found.reasons)
    assert reasons["queue_full"] > 100
    assert reasons[""] > 100
    waited = found.fleet.ttft_s[~np.isnan(found.fleet.ttft_s)]
    assert waited.max() < 60


def test_a_full_pool_spills_into_the_larger_one() -> None:
    served = gateway(POOLS, more="    boundary: {b_short: 1500}\n")
    found = run(served, requests(served, 25.0, prompts=(50, 300), answer=100)).fleet
    assert ((found.planned == 0) & (found.pool == 1)).sum() > 20
    assert Counter(found.status) == {0: 3000}


def test_requests_of_a_failed_engine_are_tried_elsewhere_and_broken_answers_are_not() -> None:
    served = gateway(more="    scheduling: {policy: quartz}\n")
    outage = Outage(pool=0, worker=0, down_s=50.0, up_s=90.0)
    found = run(served, requests(served, 14.0), failures=[outage])
    reasons = Counter(found.reasons)
    assert set(reasons) <= {"", "broken"}
    assert 0 < reasons["broken"] <= 9
    sent_s = found.fleet.arrival_s
    away = (sent_s > 50) & (sent_s < 85)
    assert set(found.fleet.worker[away]) == {1}
    assert 0 in found.fleet.worker[sent_s > 95]


def test_predictions_cover_what_they_promise() -> None:
    served = gateway(more="    scheduling: {policy: quartz}\n")
    found = run(served, requests(served, 16.0, count=6000))
    assert found.covered is not None
    assert 0.9 <= found.covered <= 1.0


def test_clients_come_back_twice_when_they_are_told_to_and_wait_meanwhile() -> None:
    lone = "\nentitlements:\n  - {name: gold, tenant: a, model: m, max_concurrency: 1}\n"
    found = {}
    for retries in (0, 2):
        served = gateway(entitlements=lone)
        sent = requests(served, 1.0, count=600)
        found[retries] = run(served, sent, retries=retries)
    never, twice = found[0], found[2]
    refused = np.array(never.reasons) == "concurrency"
    assert refused.sum() > 100
    lost = np.array(twice.reasons) == "concurrency"
    assert 0 < lost.sum() < refused.sum() / 2
    again = (np.array(twice.first_refusals) != "") & ~lost
    # Told at least a second, and at most a minute at a time.
    assert np.nanmin(twice.fleet.ttft_s[again]) >= 1.0
    assert np.nanmax(twice.fleet.ttft_s[again]) < 130
    assert np.nanmax(twice.fleet.ttft_s[np.array(twice.first_refusals) == ""]) < 1.0


def test_what_no_time_changes_is_not_tried_again() -> None:
    served = gateway()
    found = run(served, requests(served, 5.0, count=50, prompts=(17000, 18000)), retries=2)
    assert Counter(found.reasons) == {"context_length_exceeded": 50}
    assert np.isnan(found.sent_s).all()
