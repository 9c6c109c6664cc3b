"""The /metrics page shows what admission counts, as it was when last looked at."""

from dataclasses import replace

import pytest

from gateway.control.exposition import text_of
from gateway.control.metrics_page import MetricsPage, PoolSnapshot, StoreCounts
from gateway.fleet.model_runtime import ModelCompression
from gateway.metrics import Metrics
from gateway.ports import AccountView, PoolView
from gateway.records.decision import CompressionSection
from gateway.routing.boundary_watch import BoundaryWatch
from gateway.routing.routing_table import CompressionRules
from tests.builders import served_model

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


def page(*accounts: AccountView) -> list[str]:
    figures = PoolSnapshot(model="m", pools=(("short", POOL),), accounts=accounts)
    shown = MetricsPage(Metrics(), [], lambda: 0, lambda: 0.0, token_pools=lambda: [figures])
    return text_of(shown.collect()).decode().splitlines()


def test_a_managed_model_s_pools_are_shown_by_name() -> None:
    lines = page()
    assert 'sluice_pool_slots{model="m",pool="short"} 24.0' in lines
    assert 'sluice_pool_leased{model="m",pool="short"} 3.0' in lines
    assert 'sluice_pool_kv_bytes{model="m",pool="short"} 1024.0' in lines
    assert 'sluice_pool_kv_capacity_bytes{model="m",pool="short"} 4096.0' in lines
    assert 'sluice_pool_desired_replicas{model="m",pool="short"} 2.0' in lines


def test_an_entitlement_s_counters_are_shown_over_all_pools() -> None:
    lines = page(account("bound"))
    assert 'sluice_entitlement_inflight{entitlement="chat",model="m"} 3.0' in lines
    assert 'sluice_entitlement_debt{entitlement="chat",model="m"} 0.25' in lines
    assert 'sluice_entitlement_burst{entitlement="chat",model="m"} 0.5' in lines
    assert 'sluice_entitlement_priority{entitlement="chat",model="m"} 33.0' in lines


@pytest.mark.parametrize(("state", "value"), [("bound", 1), ("pending", 0), ("degraded", 0)])
def test_an_entitlement_that_claims_capacity_has_it_or_not(state: str, value: int) -> None:
    assert f'sluice_entitlement_bound{{entitlement="chat",model="m"}} {value}.0' in page(
        account(state)
    )


@pytest.mark.parametrize("state", ["suspended", "expired"])
def test_an_entitlement_that_claims_none_misses_none(state: str) -> None:
    lines = page(account(state))
    assert [line for line in lines if line.startswith("sluice_entitlement_bound{")] == []
    assert 'sluice_entitlement_inflight{entitlement="chat",model="m"} 3.0' in lines


def test_what_went_wrong_with_a_shared_store_is_counted() -> None:
    counts = StoreCounts(alone=3, failures=5, dropped=1)
    shown = MetricsPage(Metrics(), [], lambda: 0, lambda: 0.0, store_counts=lambda: counts)
    lines = text_of(shown.collect()).decode().splitlines()
    assert "sluice_store_alone_total 3.0" in lines
    assert "sluice_store_failures_total 5.0" in lines
    assert "sluice_store_dropped_total 1.0" in lines
    assert "sluice_store_alone_total 0.0" in page()


def test_gamma_and_the_success_of_compression_are_shown() -> None:
    compression = ModelCompression(rules=CompressionRules(gamma=1.4))
    served = replace(served_model(), compression=compression)
    shown = MetricsPage(Metrics(), [served], lambda: 0, lambda: 0.0)
    before = text_of(shown.collect()).decode().splitlines()
    assert 'sluice_gamma{model="m"} 1.4' in before
    assert not any(line.startswith("sluice_compression_success_ratio{") for line in before)
    for reason in ("observed", "observed", "tools", "observed"):
        compression.settled(CompressionSection(not_compressed=reason))
    after = text_of(shown.collect()).decode().splitlines()
    assert 'sluice_compression_success_ratio{model="m"} 0.75' in after


def test_boundaries_and_the_distance_from_the_plan_are_shown() -> None:
    watch = BoundaryWatch(2, ((1000, 0.5), (8000, 1.0)))
    served = replace(served_model(), watch=watch)
    shown = MetricsPage(Metrics(), [served], lambda: 0, lambda: 0.0)
    assert "sluice_length_drift{" not in text_of(shown.collect()).decode()
    assert watch.drift is not None
    for _ in range(500):
        watch.drift.add(500)
    watch.shares = (0.02,)
    served.move_boundaries((7000,))
    served.fleet.pools[0].beyond_window_tokens = 9003
    lines = text_of(shown.collect()).decode().splitlines()
    assert 'sluice_boundary_tokens{model="m",pool="short"} 7000.0' in lines
    assert 'sluice_pool_beyond_window_tokens{model="m",pool="short"} 9003.0' in lines
    assert 'sluice_pool_beyond_window_tokens{model="m",pool="long"} 0.0' in lines
    assert 'sluice_boundary_error_ratio{model="m",pool="short"} 0.02' in lines
    assert 'sluice_length_drift{model="m"} 0.5' in lines
    assert sum(line.startswith("sluice_boundary_tokens{") for line in lines) == 1
