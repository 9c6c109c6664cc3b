"""Recent decisions, each read once; percentiles, lengths, rates, refusals and attainment."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from gateway.dashboard import figures
from gateway.dashboard.figures import (
    FIRST,
    KEPT,
    MAX_NEW,
    Brief,
    Rates,
    RecentDecisions,
    all_totals,
    answer_totals,
    by_entitlement,
    own_totals,
)
from gateway.metrics import Metrics
from gateway.records.decision import CompressionSection, DecisionRecord, UsageSection
from gateway.replicas.calls import ReplicaCalls
from gateway.routing.boundary_watch import BoundaryWatch
from gateway.usage.request_log import DecisionRing
from tests.builders import decision, served_model, short_and_long
from tests.control import Replies


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
    assert rates.at(21.0, own_totals(Metrics()))["requests_per_s"] == 0.0, "a replica left"


async def test_totals_are_of_all_replicas() -> None:
    mine, theirs = Metrics(), Metrics()
    for metrics, times in ((mine, 2), (theirs, 3)):
        metrics.admission.add("acme", "denied", "kv", by=times)
        metrics.admission.add("acme", "admitted", "", by=times)
    peers = Replies(lambda topic, asked: [peers.answer(topic, asked) or b"", b"\xc1"])
    answer_totals(peers, theirs)
    found = await all_totals(peers, mine)
    assert by_entitlement(found) == ({"acme": {"kv": 5}}, {})


def line(number: int, **fields: object) -> bytes:
    given = {"outcome": "ok", "status": 200, "endpoint": "chat", **fields}
    record = {"schema": 2, "time_unix_s": float(number), "request_id": f"r-{number}", **given}
    return msgspec.json.encode(msgspec.convert(record, DecisionRecord))


def ring_of(count: int) -> DecisionRing:
    ring = DecisionRing(10_000)
    for number in range(count):
        ring.append(f"r-{number}", line(number))
    return ring


def ids(recent: RecentDecisions) -> list[str]:
    return [brief.request_id for brief in recent.briefs]


async def test_each_decision_is_read_once_and_the_newest_come_first() -> None:
    ring = ring_of(3)
    recent = RecentDecisions(ring.latest, ReplicaCalls())
    for _ in range(2):
        await recent.look()
        assert ids(recent) == ["r-2", "r-1", "r-0"]
    ring.append("r-3", line(3))
    await recent.look()
    assert ids(recent) == ["r-3", "r-2", "r-1", "r-0"]


async def test_one_look_reads_so_many_and_no_more() -> None:
    ring = ring_of(3 * FIRST)
    recent = RecentDecisions(ring.latest, ReplicaCalls())
    await recent.look()
    assert len(recent.briefs) == FIRST
    for number in range(3 * FIRST, 3 * FIRST + 2 * MAX_NEW):
        ring.append(f"r-{number}", line(number))
    await recent.look()
    assert len(recent.briefs) == FIRST + MAX_NEW


async def test_it_never_holds_more_than_its_bound() -> None:
    ring = ring_of(1)
    recent = RecentDecisions(ring.latest, ReplicaCalls())
    for number in range(1, 2 * KEPT + 3 * MAX_NEW):
        ring.append(f"r-{number}", line(number))
        if number % MAX_NEW == 0:
            await recent.look()
    assert len(recent.briefs) == KEPT
    assert len(recent._ids) <= 2 * KEPT + MAX_NEW


async def test_decisions_of_other_replicas_are_there_once_and_in_order() -> None:
    theirs = b"[" + b",".join([line(9), line(1)]) + b"]"
    later = b"[" + b",".join([line(11), line(9), line(1)]) + b"]"
    answers = iter([theirs, later, b"other version"])
    recent = RecentDecisions(ring_of(3).latest, Replies(lambda *_: [next(answers)]))
    for _ in range(3):
        await recent.look()
    assert ids(recent) == ["r-11", "r-9", "r-2", "r-1", "r-0"]


def test_a_search_finds_names_and_codes() -> None:
    record = msgspec.json.decode(
        line(7, entitlement="Acme-Prod", outcome="refused", status=429, reason="priority"),
        type=Brief,
    )
    for text in ("r-7", "acme", "refused", "429", "prior"):
        assert record.matches(text), text
    for text in ("beta", "spilled", "compressed"):
        assert not record.matches(text), text


def test_a_compressed_prompt_counts_with_its_original_length() -> None:
    record = msgspec.json.decode(
        line(
            1,
            usage=UsageSection(prompt_tokens=600, completion_tokens=100),
            compression=CompressionSection(compressed="1000->600", kept_share=0.6),
        ),
        type=Brief,
    )
    assert record.total_tokens == 1100
    assert record.matches("compressed")
    refused = msgspec.json.decode(line(2, outcome="refused"), type=Brief)
    assert refused.total_tokens is None


def test_whether_the_plan_fits_is_told_by_demand() -> None:
    model = served_model()
    assert figures.plan(model) == {"again": False, "hours": 0, "busiest": None}
    for at_s in (3600.0, 3601.0, 7300.0):
        model.demand.add(decision(time_unix_s=at_s, prompt_tokens=9))
    model.demand.add(decision(time_unix_s=3602.0, outcome="refused", status=429))
    assert figures.plan(model) == {"again": False, "hours": 2, "busiest": [3600, 3, 1]}
