"""The tick: debt grows only for who was denied while the pool was full; bursts add up."""

from typing import Any

import pytest

from gateway.admission import admission, debt
from gateway.admission.token_pool import TokenPool
from gateway.records.entitlement import PROFILES
from tests.token_pools import NOW_S, denied, entitled, granted, pool

TICK_S = 5.0


def ticked(token_pool: TokenPool, at: float = NOW_S + TICK_S, elapsed_s: float = TICK_S) -> None:
    """One whole tick."""
    debt.tick(token_pool, list(token_pool.active), elapsed_s, at)
    debt.close(token_pool, elapsed_s, at)


def starved() -> TokenPool:
    """A full pool that refused an elastic entitlement on priority."""
    token_pool = pool(
        entitled(tokens_per_s=100.0, baseline=1),
        entitled("g", "guaranteed", baseline=2),
        slots=(2,),
    )
    granted(token_pool, "g1", "g", sequences=2)
    denied(token_pool)
    return token_pool


def test_who_is_denied_while_the_pool_is_full_comes_to_be_owed() -> None:
    token_pool = starved()
    ticked(token_pool)
    account = token_pool.accounts["e"]
    assert account.debt == pytest.approx(0.3)
    denied(token_pool, "b")
    ticked(token_pool, NOW_S + 10)
    assert account.debt == pytest.approx(0.7 * 0.3 + 0.3)


@pytest.mark.parametrize("broad", [{"sequences": 8}, {"kv_bytes": 700}])
def test_who_asks_for_what_no_full_pool_takes_is_owed_nothing(broad: dict[str, Any]) -> None:
    token_pool = pool(
        entitled(tokens_per_s=100.0, baseline=2),
        entitled("other", baseline=2),
        slots=(8,),
        kv_bytes=(800,),
    )
    granted(token_pool, "o", "other", sequences=2, kv_bytes=200)
    for number in range(12):
        assert denied(token_pool, f"{number}", at=NOW_S + 5 * number, **broad).of_pool
        admission.renew(token_pool, "o", NOW_S + 5 * number)
        ticked(token_pool, NOW_S + 5 * number + 5)
    assert token_pool.accounts["e"].debt == 0
    assert not debt.is_contended(token_pool)


@pytest.mark.parametrize(("profile", "least"), [("default", -0.2), ("paper", 0.3 * -199)])
def test_overservice_turns_to_credit_within_the_profile_s_bound(profile: str, least: float) -> None:
    token_pool = pool(entitled(tokens_per_s=10.0), slots=(8,), profile=PROFILES[profile])
    granted(token_pool)
    admission.settle(token_pool, "a", 10_000, NOW_S)
    ticked(token_pool)
    assert token_pool.accounts["e"].debt == pytest.approx(least)


@pytest.mark.parametrize("service_class", ["dedicated", "guaranteed", "spot", "preemptible"])
def test_only_elastic_entitlements_have_debt(service_class: Any) -> None:
    token_pool = starved()
    token_pool.define(entitled("x", service_class, tokens_per_s=10.0))
    account = token_pool.accounts["x"]
    account.denied, account.debt = 5, 0.4
    token_pool.active.add("x")
    ticked(token_pool)
    assert account.debt == 0


def test_missed_ticks_decay_as_often_as_they_were_due() -> None:
    token_pool = pool(entitled(tokens_per_s=100.0))
    account = token_pool.accounts["e"]
    account.debt, account.burst = 0.8, 0.5
    token_pool.active.add("e")
    ticked(token_pool, NOW_S + 15, elapsed_s=15.0)
    assert [account.debt, account.burst] == pytest.approx([0.8 * 0.7**3, 0.5 * 0.7**3])
