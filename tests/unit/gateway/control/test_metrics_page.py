"""The /metrics page: prometheus-client writes it while requests proceed; what its gauges read."""

import asyncio
from dataclasses import replace
from math import inf

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as LibraryHistogram
from prometheus_client.parser import text_string_to_metric_families

from gateway.control.metrics_page import (
    Family,
    MetricsPage,
    PoolSnapshot,
    StoreCounts,
    counted,
    gauge,
    text_of,
    write,
)
from gateway.fleet.model_runtime import ModelCompression
from gateway.metrics import Counter, Histogram, Metrics
from gateway.ports import AccountView, PoolView
from gateway.records.decision import CompressionSection
from gateway.routing.boundary_watch import BoundaryWatch
from gateway.routing.routing import CompressionRules
from tests.builders import served_model

HARD = 'a "quoted" \\ name\nof two lines'
POOL = PoolView(
    slots=24,
    inflight=3,
    kv_capacity_bytes=4096,
    kv_bytes=1024,
    idle_dedicated=0,
    service_s=5.0,
    desired_replicas=2,
)


def account(state: str) -> AccountView:
    return AccountView(
        name="chat",
        state=state,
        inflight=(2, 1),
        kv_bytes=1024,
        level_tokens=90.5,
        depth_tokens=100.0,
        debt=0.25,
        burst=0.5,
        weight=33.0,
        debited=10,
        refunded=4,
        used=6,
    )


def lines_of(page: MetricsPage) -> list[str]:
    return text_of(page.collect()).decode().splitlines()


def page(*accounts: AccountView) -> list[str]:
    figures = PoolSnapshot(model="m", pools=(("short", POOL),), accounts=accounts)
    return lines_of(
        MetricsPage(Metrics(), [], lambda: 0, lambda: 0.0, token_pools=lambda: [figures])
    )


def test_labels_and_values_survive_the_text() -> None:
    counter = Counter("c", HARD, ("x",), unit=10)
    counter.add("1", by=35)
    rows = [((HARD, "1"), 5e9), (("m", "2"), -inf)]
    text = text_of([gauge("g", "text", ("model", "a"), rows), counted(counter)]).decode()
    shown, found = text_string_to_metric_families(text)
    assert [((s.labels["model"], s.labels["a"]), s.value) for s in shown.samples] == rows
    assert (found.type, found.documentation) == ("counter", HARD)
    assert [(s.name, s.labels, s.value) for s in found.samples] == [("c_total", {"x": "1"}, 3.5)]


def test_a_histogram_is_the_library_s_own() -> None:
    registry = CollectorRegistry()
    bounds = (0.1, 1.0, 5.0)
    theirs = LibraryHistogram("h", "text", ["pool", "a"], buckets=bounds, registry=registry)
    own = Histogram("h", "text", ("pool", "a"), bounds)
    for value in (0.05, 0.1, 0.7, 9.0):
        theirs.labels("p", "1").observe(value)
        own.observe(value, "p", "1")
    expected = [
        line for line in generate_latest(registry).decode().splitlines() if "_created" not in line
    ]
    assert text_of([counted(own)]).decode().splitlines() == expected


async def test_requests_proceed_while_a_large_page_is_written() -> None:
    large = Family("g", "text", ("worker",), [((f"worker-{n}",), n) for n in range(20_000)])
    writing = asyncio.create_task(write([large]))
    turns = 0
    while not writing.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 3
    assert await writing == text_of([large])


def test_pools_and_entitlements_of_a_managed_model_are_shown_by_name() -> None:
    shown = [line for line in page(account("bound")) if 'model="m"' in line]
    assert shown == [
        'sluice_pool_slots{model="m",pool="short"} 24.0',
        'sluice_pool_leased{model="m",pool="short"} 3.0',
        'sluice_pool_kv_bytes{model="m",pool="short"} 1024.0',
        'sluice_pool_kv_capacity_bytes{model="m",pool="short"} 4096.0',
        'sluice_pool_desired_replicas{model="m",pool="short"} 2.0',
        'sluice_entitlement_inflight{entitlement="chat",model="m"} 3.0',
        'sluice_entitlement_bound{entitlement="chat",model="m"} 1.0',
        'sluice_entitlement_debt{entitlement="chat",model="m"} 0.25',
        'sluice_entitlement_burst{entitlement="chat",model="m"} 0.5',
        'sluice_entitlement_priority{entitlement="chat",model="m"} 33.0',
    ]


@pytest.mark.parametrize(
    ("state", "values"),
    [("pending", ["0.0"]), ("degraded", ["0.0"]), ("suspended", []), ("expired", [])],
)
def test_an_entitlement_that_claims_no_capacity_misses_none(state: str, values: list[str]) -> None:
    found = [line for line in page(account(state)) if line.startswith("sluice_entitlement_bound{")]
    assert [line.split()[-1] for line in found] == values


def test_what_went_wrong_with_a_shared_store_is_counted() -> None:
    counts = StoreCounts(alone=3, failures=5, dropped=1)
    shown = MetricsPage(Metrics(), [], lambda: 0, lambda: 0.0, store_counts=lambda: counts)
    for name, times in (("alone", 3.0), ("failures", 5.0), ("dropped", 1.0)):
        assert f"sluice_store_{name}_total {times}" in lines_of(shown)
    assert "sluice_store_alone_total 0.0" in page()


def test_gamma_and_the_success_of_compression_are_shown() -> None:
    compression = ModelCompression(rules=CompressionRules(gamma=1.4))
    served = replace(served_model(), compression=compression)
    shown = MetricsPage(Metrics(), [served], lambda: 0, lambda: 0.0)
    before = lines_of(shown)
    assert 'sluice_gamma{model="m"} 1.4' in before
    assert not any(line.startswith("sluice_compression_success_ratio{") for line in before)
    for reason in ("observed", "observed", "tools", "observed"):
        compression.settled(CompressionSection(not_compressed=reason))
    assert 'sluice_compression_success_ratio{model="m"} 0.75' in lines_of(shown)


def test_boundaries_and_the_distance_from_the_plan_are_shown() -> None:
    watch = BoundaryWatch(2, ((1000, 0.5), (8000, 1.0)))
    served = replace(served_model(), watch=watch)
    shown = MetricsPage(Metrics(), [served], lambda: 0, lambda: 0.0)
    assert not any(line.startswith("sluice_length_drift{") for line in lines_of(shown))
    assert watch.drift is not None
    for _ in range(500):
        watch.drift.add(500)
    watch.shares = (0.02,)
    served.move_boundaries((7000,))
    served.fleet.pools[0].beyond_window_tokens = 9003
    lines = lines_of(shown)
    assert 'sluice_boundary_tokens{model="m",pool="short"} 7000.0' in lines
    assert 'sluice_pool_beyond_window_tokens{model="m",pool="short"} 9003.0' in lines
    assert 'sluice_pool_beyond_window_tokens{model="m",pool="long"} 0.0' in lines
    assert 'sluice_boundary_error_ratio{model="m",pool="short"} 0.02' in lines
    assert 'sluice_length_drift{model="m"} 0.5' in lines
    assert sum(line.startswith("sluice_boundary_tokens{") for line in lines) == 1
