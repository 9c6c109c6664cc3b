"""The /metrics page shows what admission counts, as it was when last looked at."""

import pytest

from gateway.ports import AccountView, PoolView
from gateway.telemetry import Metrics
from gateway.web.metrics import MetricsPage, PoolFigures

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
    figures = PoolFigures(model="m", pools=(("short", POOL),), accounts=accounts)
    shown = MetricsPage(Metrics(), [], lambda: 0, lambda: 0.0, token_pools=lambda: [figures])
    return shown.render().decode().splitlines()


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
