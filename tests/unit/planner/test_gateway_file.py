"""The fleet as sluice.yaml: the gateway reads it."""

import pytest

from gateway.settings import Config, parse, remarks
from planner.gateway_file import assign_workers, gateway_file
from planner.goals import Goals
from planner.plan import make_plan
from planner.profile import profile_for
from planner.records import PlanResult, Question
from planner.workload.library import SHIPPED
from planner.workload.synthetic import synthetic
from sluice.hash_key import hashed_key

KEYS = {"SLUICE_ADMIN_KEY": "sk-admin", "SLUICE_KEY_HASH": hashed_key("sk-everybody")}


def plan_of(**given: object) -> PlanResult:
    question = Question(
        workload=SHIPPED["azure"].workload, goals=Goals(rate_per_s=50.0, ttft_s=2.0)
    )
    fields = {name: getattr(question, name) for name in question.__struct_fields__}
    return make_plan(Question(**{**fields, **given}))


def config_of(plan: PlanResult, *workers: str) -> Config:
    return parse(gateway_file(plan, assign_workers(plan, workers)), "plan.yaml", KEYS)


def test_two_pools() -> None:
    plan = plan_of(b_short=(4096,), gamma=1.5, max_cut=0.5, compressible=1.0)
    model = config_of(plan).models[0]
    assert model.boundary.b_short == (4096,)
    assert model.boundary.gamma == 1.5
    assert (model.compression.enabled, model.compression.when) == (True, "any")
    assert not model.compression.only_when_busy
    assert model.kv_bytes_per_token == 327_680
    for pool in plan.chosen.pools:
        assert len(model.pools[pool.name].workers) == pool.nodes
        assert model.pools[pool.name].max_num_seqs == pool.slots_per_node
    assert model.pools["short"].max_model_len == 8192
    assert model.pools["long"].max_model_len == 65_536


def test_everything_is_on_and_nothing_is_to_be_noted() -> None:
    plan = plan_of(b_short=(4096,), gamma=1.5, compressible=1.0)
    config = config_of(plan)
    (model,) = config.models
    assert model.policies() == ("quartz", "quartz")
    assert (model.boundary.auto, model.observes_boundary) == (True, True)
    assert [pool.kv_cache_gib for pool in model.pools.values()] == [320.0, 320.0]
    assert str(config.request_log.path) == "sluice-requests.jsonl"
    (everybody,) = config.entitlements
    assert everybody.concurrency == model.slots
    assert everybody.mode == "observe"
    assert remarks(config) == []


def test_one_pool_and_three() -> None:
    one = plan_of(gamma=1.0, most_pools=1)
    assert list(config_of(one).models[0].pools) == [pool.name for pool in one.chosen.pools]
    three = config_of(plan_of(b_short=(1024, 4096))).models[0]
    assert list(three.pools) == ["short", "middle", "long"]
    assert three.boundaries == (1024, 4096)


@pytest.mark.parametrize("quote", ["http://a:1/'x", "http://b:1/$x"])
def test_workers_are_dealt_out_and_quoted(quote: str) -> None:
    plan = plan_of(b_short=(4096,), gamma=1.0)
    short = plan.chosen.pools[0].nodes
    bare = [f"http://10.0.0.{i}:8000" for i in range(short + 1)]
    dealt = assign_workers(plan, ["long=http://10.1.0.1:8000", *bare])
    assert dealt["short"] == bare[:short]
    assert dealt["long"] == ["http://10.1.0.1:8000", bare[-1]]
    model = config_of(plan, "long=http://10.1.0.1:8000", *bare).models[0]
    assert [worker.url for worker in model.pools["long"].workers] == dealt["long"]
    assert model.pools["short"].workers[0].url == bare[0]
    quoted = parse(gateway_file(plan, {"short": [quote]}), "plan.yaml", KEYS).models[0]
    assert [worker.url for worker in quoted.pools["short"].workers] == [quote]


def test_the_planned_lengths_come_with_it() -> None:
    for given in ({"b_short": (4096,), "gamma": 1.0}, {"gamma": 1.0, "most_pools": 1}):
        plan = plan_of(**given)
        points = config_of(plan).models[0].boundary.planned
        assert points is not None
        assert 20 <= len(points) <= 60
        assert points[-1][1] == 1.0
        for tokens, share in points:
            assert share == pytest.approx(plan.question.workload.share(tokens), abs=1e-4)


PHASES = {
    "nodes": (profile_for("H100"),),
    "workload": synthetic("prompt=1500,answer=250,spread=0.7"),
    "goals": Goals(rate_per_s=30.0, ttft_s=2.0, tpot_s=0.04),
    "transfer_bytes_per_s": 20e9,
    "most_pools": 1,
}


def test_a_pool_in_phases_as_settings_read_it() -> None:
    plan = plan_of(**PHASES, phases="auto")
    (planned,) = plan.chosen.pools
    assert planned.phases is not None
    config = config_of(plan, "all/prefill=http://10.0.0.1:8000", "http://10.0.0.2:8000")
    (model,) = config.models
    pool = model.pools["all"]
    assert pool.prefill is not None
    assert pool.decode is not None
    assert pool.transfer is not None
    urls = [worker.url for worker in pool.prefill.workers]
    assert urls == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    assert len(pool.decode.workers) == planned.decode_nodes
    assert pool.prefill.max_num_seqs == planned.phases.prefill_slots
    assert pool.decode.max_num_seqs == planned.slots_per_node
    assert (pool.transfer.kind, pool.transfer.bytes_per_second) == ("vllm", 20e9)
    assert pool.transfer.skip_below_tokens == planned.phases.skip_below_tokens
    whole = parse(gateway_file(plan), "plan.yaml", KEYS)
    assert whole.entitlements[0].concurrency == whole.models[0].slots
    assert remarks(whole) == []


def test_a_file_goes_into_phases_and_back() -> None:
    before = """
version: 1
models:
- name: m
  pools:
    all:
      max_model_len: 4096
      max_num_seqs: 8
      flow_headers: true
      workers: [{url: "http://a:1", ranks: 2}]
"""
    apart, together = (plan_of(**PHASES, phases=phases) for phases in ("always", "never"))
    text = gateway_file(apart, {"all/prefill": ["http://b:1"]}, before, "m")
    pool = parse(text, "plan.yaml", KEYS).models[0].pools["all"]
    assert pool.prefill is not None
    assert pool.decode is not None
    assert [w.url for w in pool.prefill.workers] == ["http://b:1"]
    assert [(w.url, w.ranks) for w in pool.decode.workers] == [("http://a:1", 2)]
    assert (pool.prefill.flow_headers, pool.decode.flow_headers) == (True, True)
    sglang = text.replace("kind: vllm", "kind: sglang")
    assert "kind: sglang" in gateway_file(apart, None, sglang, "m")
    again = parse(gateway_file(together, None, text, "m"), "plan.yaml", KEYS).models[0].pools["all"]
    assert (again.prefill, again.max_model_len, again.flow_headers) == (None, 65_536, True)
    assert [w.url for w in again.workers] == ["http://a:1", "http://b:1"]
