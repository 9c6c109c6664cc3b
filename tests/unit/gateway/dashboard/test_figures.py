"""Percentiles, the histogram of lengths with its plan, rates, refusals and attainment."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from gateway.dashboard import figures
from gateway.dashboard.recent import Brief
from gateway.dashboard.totals import (
    Rates,
    all_totals,
    answer_totals,
    attainment,
    by_entitlement,
    own_totals,
)
from gateway.metrics import Metrics
from gateway.replicas.calls import ReplicaCalls
from gateway.routing.boundary_watch import BoundaryWatch
from tests.builders import served_model, short_and_long


def brief(**fields: Any) -> Brief:
    given = {"time_unix_s": 100.0, "request_id": "r", "outcome": "ok", "status": 200, "model": "m"}
    return msgspec.convert({**given, **fields}, Brief)


def served(pool: str, prompt: int, answer: int = 0) -> Brief:
    return brief(pool=pool, usage={"prompt_tokens": prompt, "completion_tokens": answer})


def test_percentiles_are_of_the_answers_of_the_last_minute() -> None:
    briefs = [brief(timing={"ttft_s": i / 100, "overhead_ms": float(i)}) for i in range(1, 101)]
    briefs.append(brief(time_unix_s=1.0, timing={"ttft_s": 99.0}))
    briefs.append(brief(outcome="refused", timing={"ttft_s": 99.0}))
    found = figures.times(figures.recent(briefs, 110.0))
    assert found == {
        "ttft_p50_s": 0.51,
        "ttft_p99_s": 1.0,
        "overhead_p50_s": 0.051,
        "overhead_p99_s": 0.1,
        "sampled": 100,
    }


def test_of_nothing_there_are_no_percentiles() -> None:
    assert figures.times([])["ttft_p99_s"] is None


def test_lengths_are_counted_by_pool_around_the_boundary() -> None:
    model = served_model(table=short_and_long())
    boundary = model.routing.pools[0].boundary_tokens
    assert boundary is not None
    briefs = [served("short", 60), served("short", boundary, 0), served("long", boundary, 1)]
    found = figures.lengths(model, [*briefs, brief(pool="short"), served("gone", 5)])
    short, long = (pool["counts"] for pool in found["pools"])
    assert (sum(short), sum(long), short[0]) == (2, 1, 1)
    assert found["boundaries"] == [boundary]
    assert found["edges"][-1] == model.routing.pools[-1].window_tokens
    assert len(short) == len(found["edges"]) + 1
    assert found["planned"] is None


def test_the_plan_s_shares_add_up_and_lie_where_it_says() -> None:
    model = replace(
        served_model(table=short_and_long()),
        watch=BoundaryWatch(2, planned=[(1024, 0.5), (4096, 1.0)]),
    )
    found = figures.lengths(model, [])
    planned, edges = found["planned"], found["edges"]
    assert len(planned) == len(edges) + 1
    assert sum(planned) == pytest.approx(1.0, abs=1e-4)
    up_to_1024 = sum(share for share, edge in zip(planned, edges, strict=False) if edge <= 1024)
    assert up_to_1024 == pytest.approx(0.5, abs=0.03)
    assert sum(planned[edges.index(5793) + 1 :]) == 0


def test_compression_tells_share_kept_and_saved() -> None:
    metrics = Metrics()
    for result, times in (("compressed", 3), ("category", 1), ("timeout", 2)):
        metrics.compressions.add("m", result, by=times)
    briefs = [brief(compression={"compressed": "1000->600", "kept_share": 0.6})] * 2
    found = figures.compression(served_model(), own_totals(metrics), briefs)
    assert found == {
        "enabled": False,
        "compressed": 3,
        "candidates": 6,
        "kept_ratio": pytest.approx(0.6),
        "saved_tokens": 800,
        "recent": 2,
        "not_compressed": {"timeout": 2, "category": 1},
    }


def test_rates_are_the_rise_over_the_last_seconds() -> None:
    metrics, rates = Metrics(), Rates()
    assert rates.at(0.0, own_totals(metrics))["requests_per_s"] is None
    metrics.requests.add("m", "short", "ok", by=30)
    metrics.requests.add("m", "", "refused", by=10)
    metrics.tokens.add("m", "e", "output", by=500)
    metrics.tokens.add("m", "e", "input", by=9_000)
    found = rates.at(5.0, own_totals(metrics))
    assert found == {
        "requests_per_s": 8.0,
        "refused_per_s": 2.0,
        "output_tokens_per_s": 100.0,
        "requests_total": 40,
    }
    rates.at(14.0, own_totals(metrics))
    assert rates.at(20.0, own_totals(metrics))["requests_per_s"] == 0.0, "what is older is gone"


def test_a_replica_that_left_makes_no_negative_rate() -> None:
    rates, both = Rates(), Metrics()
    both.requests.add("m", "short", "ok", by=30)
    rates.at(0.0, own_totals(both))
    assert rates.at(1.0, own_totals(Metrics()))["requests_per_s"] == 0.0


class Peer(ReplicaCalls):
    """Another replica with its own counts, and one that answers in another format."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__()
        answer_totals(self, metrics)

    async def ask(self, topic: str, payload: bytes = b"") -> list[bytes]:
        own = self.answer(topic, payload)
        assert own is not None
        return [own, b"\xc1"]


async def test_totals_are_of_all_replicas() -> None:
    mine, theirs = Metrics(), Metrics()
    for metrics, times in ((mine, 2), (theirs, 3)):
        metrics.admission.add("acme", "denied", "kv", by=times)
        metrics.admission.add("acme", "admitted", "", by=times)
        metrics.kept_share.observe(0.5)
    found = await all_totals(Peer(theirs), mine)
    assert by_entitlement(found) == {"acme": {"kv": 5}}
    assert found.kept == (2.0, 1.0)


def test_attainment_is_told_where_it_is_counted() -> None:
    metrics = Metrics()
    assert attainment(own_totals(metrics)) == {}
    for met, times in (("true", 3), ("false", 1), ("refused", 9)):
        metrics.slo_requests.add("acme", met, by=times)
    metrics.slo_requests.add("rival", "refused")
    assert attainment(own_totals(metrics)) == {"acme": 0.75}
