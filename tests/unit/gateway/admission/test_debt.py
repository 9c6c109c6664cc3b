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


def starved(profile: str = "default", **terms: Any) -> TokenPool:
    """A full pool that refused an elastic entitlement on priority."""
    token_pool = pool(
        entitled(tokens_per_s=100.0, baseline=1, **terms),
        entitled("g", "guaranteed", baseline=2),
        slots=(2,),
        profile=PROFILES[profile],
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


def crowded(**terms: Any) -> TokenPool:
    """A pool of eight slots, in full use by another tenant, whose requests take 2 s."""
    token_pool = pool(
        entitled(**terms),
        entitled("other", "guaranteed", baseline=8),
        slots=(8,),
        kv_bytes=(8_000,),
    )
    granted(token_pool, "o", "other", sequences=8, kv_bytes=8_000)
    token_pool.pools[0].service_s = 2.0
    return token_pool


@pytest.mark.parametrize(
    ("terms", "denials", "share"),
    [
        ({"baseline": 4}, 2, 2 * 2.0 / (4 * TICK_S)),
        ({"baseline": 4}, 10, 1.0),
        ({"kv_bytes": 1_000}, 1, 500 * 2.0 / (1_000 * TICK_S)),
        ({"kv_bytes": 1_000}, 100, 1.0),
    ],
    ids=["some-slots", "all-slots", "some-kv", "all-kv"],
)
def test_denied_seconds_over_those_of_the_baseline_are_owed(
    terms: dict[str, Any], denials: int, share: float
) -> None:
    token_pool = crowded(**terms)
    for number in range(denials):
        denied(token_pool, f"{number}", kv_bytes=500)
    ticked(token_pool)
    assert token_pool.accounts["e"].debt == pytest.approx(0.3 * share)
    admission.renew(token_pool, "o", NOW_S + 5)
    ticked(token_pool, NOW_S + 10)
    assert token_pool.accounts["e"].debt == pytest.approx(0.7 * 0.3 * share), "denied once only"


def test_only_the_part_of_the_baseline_that_was_not_had_is_owed() -> None:
    token_pool = pool(
        entitled(baseline=4),
        entitled("other", "guaranteed", baseline=5),
        slots=(8,),
    )
    granted(token_pool, "a", sequences=3)
    granted(token_pool, "o", "other", sequences=5)
    for number in range(50):
        denied(token_pool, f"b{number}")
    ticked(token_pool)
    assert token_pool.accounts["e"].debt == pytest.approx(0.3 * 1 / 4)


@pytest.mark.parametrize("terms", [{"baseline": 1}, {"kv_bytes": 100, "kv_bytes_limit": 900}])
def test_more_slots_or_kv_than_the_baseline_are_credit(terms: dict[str, Any]) -> None:
    token_pool = pool(entitled(**terms), slots=(8,))
    granted(token_pool, sequences=2, kv_bytes=200)
    ticked(token_pool)
    assert token_pool.accounts["e"].debt == -0.2


def test_who_states_tokens_and_slots_is_owed_tokens() -> None:
    token_pool = pool(
        entitled(tokens_per_s=100.0, baseline=2), entitled("g", "guaranteed", baseline=2)
    )
    granted(token_pool, "a")
    admission.settle(token_pool, "a", 250, NOW_S)
    granted(token_pool, "b", sequences=2)
    granted(token_pool, "g", "g", sequences=2)
    denied(token_pool, "c")
    ticked(token_pool)
    assert token_pool.accounts["e"].debt == pytest.approx(0.3 * 0.5)


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


def test_an_idle_entitlement_is_owed_nothing() -> None:
    token_pool = starved()
    token_pool.define(entitled("idle", tokens_per_s=100.0))
    token_pool.active.add("idle")
    ticked(token_pool)
    assert token_pool.accounts["idle"].debt == 0


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


def test_debt_lifts_the_weight_at_once() -> None:
    token_pool = starved(slo_ms=1000)
    before = token_pool.weight_now(token_pool.accounts["e"])
    ticked(token_pool)
    assert token_pool.weight_now(token_pool.accounts["e"]) == pytest.approx(before * 2.2)


def test_missed_ticks_decay_as_often_as_they_were_due() -> None:
    token_pool = pool(entitled(tokens_per_s=100.0))
    account = token_pool.accounts["e"]
    account.debt, account.burst = 0.8, 0.5
    token_pool.active.add("e")
    ticked(token_pool, NOW_S + 15, elapsed_s=15.0)
    assert [account.debt, account.burst] == pytest.approx([0.8 * 0.7**3, 0.5 * 0.7**3])


def test_sequences_and_kv_are_averaged_over_the_tick() -> None:
    """Half of the tick 3 sequences over a baseline of 1, and KV likewise: .5 above each."""
    token_pool = pool(entitled(baseline=1, kv_bytes=100, kv_bytes_limit=900), slots=(8,))
    granted(token_pool, sequences=3, kv_bytes=300)
    admission.settle(token_pool, "a", 1, NOW_S + 2.5)
    ticked(token_pool)
    assert token_pool.accounts["e"].burst == pytest.approx(0.3 * (0.5 + 0.5))


def test_what_is_still_in_flight_counts_up_to_the_tick_and_not_twice() -> None:
    token_pool = pool(entitled(baseline=1), slots=(8,))
    granted(token_pool, sequences=2)
    ticked(token_pool)
    assert token_pool.accounts["e"].burst == pytest.approx(0.3)
    ticked(token_pool, NOW_S + 10)
    assert token_pool.accounts["e"].burst == pytest.approx(0.3 * 0.7 + 0.3)


def test_those_with_nothing_left_to_forget_are_not_looked_at_again() -> None:
    token_pool = pool(entitled("gone"), entitled("busy"), entitled("owed", tokens_per_s=1.0))
    granted(token_pool, "a", "busy")
    token_pool.accounts["owed"].debt = 0.5
    token_pool.active |= {"gone", "busy", "owed"}
    token_pool.remove("gone")
    token_pool.active.add("gone")
    ticked(token_pool)
    assert token_pool.active == {"busy", "owed"}


def test_the_pool_is_contended_when_full_or_when_it_refused_anybody() -> None:
    token_pool = pool(entitled(), entitled("s", "spot"), slots=(2, 9))
    assert not debt.is_contended(token_pool)
    granted(token_pool, "a")
    denied(token_pool, "b", "s")
    assert debt.is_contended(token_pool)
    ticked(token_pool)
    assert not debt.is_contended(token_pool)
    granted(token_pool, "c", sequences=2, observe=True)
    assert debt.is_contended(token_pool)


def test_the_surplus_refills_at_what_was_not_used_without_it() -> None:
    token_pool = pool(entitled("g", "guaranteed", baseline=4), slots=(8,), tokens_per_s=100.0)
    granted(token_pool, entitlement="g")
    admission.settle(token_pool, "a", 300, NOW_S)
    ticked(token_pool)
    assert token_pool.surplus_per_s == pytest.approx(40)
    ticked(token_pool, NOW_S + 10)
    assert (token_pool.surplus_per_s, token_pool.surplus) == (100, 1000)
