"""Workloads and figures of bench quartz."""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bench.quartz.lab import PEERS, POLICIES, LabFigures, figures, make, paired, run
from bench.quartz.peers import CacheAware, TokenFair
from bench.quartz.workloads import MIXED, REQUESTS, mixed, mooncake, workloads
from gateway.fleet.fleet import PoolState
from gateway.scheduling.scheduler import Job
from simulator.experiments.scheduling import BLOCK_TOKENS, WORKER


@pytest.mark.parametrize("name", list(workloads()))
def test_a_workload_is_servable_repeats_by_seed_and_differs_between_seeds(name: str) -> None:
    make_it = workloads()[name]
    demands = make_it(1)
    assert len(demands) == REQUESTS
    assert demands == make_it(1)
    assert demands != make_it(2)
    times = [d.arrival_s for d in demands]
    assert times == sorted(times)
    for d in demands:
        assert len(d.blocks) == d.prompt_tokens // BLOCK_TOKENS
        assert 1 <= d.prompt_tokens < WORKER.max_model_len
        assert d.output_tokens >= 1


def test_agents_prompts_grow_and_four_fifths_were_seen_before() -> None:
    seen: set[int] = set()
    held = total = 0
    for demand in workloads()["Agents"](0):
        known = next((i for i, b in enumerate(demand.blocks) if b not in seen), len(demand.blocks))
        held += known
        total += len(demand.blocks)
        seen.update(demand.blocks)
    assert 0.75 < held / total < 0.95


def test_a_heavy_client_comes_on_top() -> None:
    alone = mixed(0, MIXED, 300)
    beside = mixed(0, msgspec.structs.replace(MIXED, heavy=11.0), 300)
    assert sum(d.client != "heavy" for d in beside) == len(alone)
    rate = sum(d.client == "heavy" for d in beside) / beside[-1].arrival_s
    assert rate == pytest.approx(11.0, rel=0.1)


def test_a_trace_is_read_where_there_is_one(tmp_path: Path) -> None:
    row = '{"timestamp": 0, "input_length": 1500, "output_length": 7, "hash_ids": [1, 2, 3]}\n'
    (tmp_path / "mooncake_conversation_trace.jsonl").write_text(row * 30, "utf-8")
    demands = mooncake(0, 5.0, tmp_path, requests=20)
    assert {(d.prompt_tokens, d.output_tokens) for d in demands} == {(375, 7)}
    assert len({d.blocks for d in demands}) == 1


@pytest.mark.parametrize("policy", [*POLICIES, *PEERS])
def test_every_policy_serves_a_short_stream(policy: str) -> None:
    demands = mixed(3, MIXED, 120)
    found = figures(demands, run(demands, [make(policy)], seed=3))
    assert found.lost == 0
    assert 0 < found.p95_s <= found.p99_s
    assert 0 <= found.violations <= 1
    assert 0 < found.jain <= 1
    assert math.isnan(found.coverage)  # counted after the first 1,000


def test_the_paired_interval_is_students() -> None:
    def with_p99(p99_s: float) -> LabFigures:
        values = dict.fromkeys(LabFigures.__struct_fields__, 0.0) | {"p99_s": p99_s, "lost": 0}
        return msgspec.convert(values, LabFigures)

    results = {
        ("w", "a"): [with_p99(v) for v in (1.0, 2.0, 3.0)],
        ("w", "b"): [with_p99(v) for v in (2.0, 2.5, 5.0)],
    }
    middle, low, high = paired(results, "w", "a", "b", "p99_s")
    assert middle == pytest.approx(-3.5 / 3)
    half = 4.303 * float(np.std([-1.0, -0.5, -2.0], ddof=1)) / math.sqrt(3)
    assert (low, high) == pytest.approx((middle - half, middle + half))


def test_the_cache_aware_model_follows_matches_trees_and_balance() -> None:
    pool = PoolState("pool", ("a", "b", "c"), 256)
    router = CacheAware(pool)

    def sent(hit: int, mask: int) -> int:
        match = ((hit, mask),) if hit else ()
        job = Job(owner=None, prompt_tokens=1000, output_tokens=1, arrived_s=0.0, match=match)
        router.submit(job, 0.0)
        return job.worker

    assert sent(600, 0b100) == 2
    assert sent(400, 0b100) == 0  # below the threshold: the smallest tree
    assert sent(0, 0) == 1
    assert sent(0, 0) == 2  # 400 tokens there, 1,000 at the others
    pool.active[:] = [3, 40, 5]
    assert sent(900, 0b010) == 0


def in_order(scheduler: TokenFair, jobs: list[Job]) -> list[Job]:
    """All jobs as they are sent, each answered in turn."""
    order = [sent for job in jobs for sent in scheduler.submit(job, 0.0)]
    for job in order:
        order += scheduler.first_token(job, 1.0)
    return order


def jobs_of(count: int, tokens: int, client: str, share: float = 1.0) -> list[Job]:
    return [Job(None, tokens, 1, 0.0, client=client, share=share) for _ in range(count)]


def test_token_fair_gives_equal_tokens_to_clients_of_unequal_requests() -> None:
    scheduler = TokenFair(PoolState("pool", ("a",), 256))
    jobs = [*jobs_of(20, 8000, "long"), *jobs_of(80, 2000, "short")]
    tokens = {"long": 0, "short": 0}
    for job in in_order(scheduler, jobs)[:50]:
        tokens[job.client] += job.prompt_tokens
    assert abs(tokens["long"] - tokens["short"]) <= 16_000


def test_token_fair_gives_more_to_a_larger_share() -> None:
    scheduler = TokenFair(PoolState("pool", ("a",), 256))
    jobs = [*jobs_of(60, 3000, "a", 3.0), *jobs_of(60, 3000, "b", 1.0)]
    first = [job.client for job in in_order(scheduler, jobs)[:40]]
    assert 27 <= first.count("a") <= 33


def test_gateways_hear_of_one_another_through_the_shipped_notes() -> None:
    demands = mixed(0, MIXED)[:600]
    hits = {}
    for told in (True, False):
        gateways = [make("QUARTZ") for _ in range(4)]
        served = run(demands, gateways, tell_prefixes=told)
        assert served.lost == 0
        assert all(gateway.scheduler.replicas == 4 for gateway in gateways)
        assert all(gateway.prefix_gossip.has_listeners for gateway in gateways)
        hits[told] = served.cached_tokens.sum()
    assert hits[True] > 1.1 * hits[False]
