"""Who asks for more than its token rate gets what nobody else uses, and nothing beyond."""

from typing import Any

import pytest

from gateway.admission import admission, checks, debt
from gateway.admission.terms import Grant
from gateway.admission.token_pool import TokenPool
from gateway.records.entitlement import BURST_WEIGHT, PROFILES
from tests.token_pools import NOW_S, admit, denied, entitled, fill, granted, pool


def test_an_entitlement_with_requests_in_flight_cannot_be_removed() -> None:
    token_pool = pool(entitled())
    granted(token_pool)
    with pytest.raises(ValueError, match="e has 1 sequences in flight"):
        token_pool.remove("e")


@pytest.mark.parametrize(("service_class", "rate"), [("elastic", 100.0), ("spot", 0.0)])
def test_short_answers_before_long_ones_take_no_more_than_the_rate(
    service_class: str, rate: float
) -> None:
    """The short ones make the bucket shallow; then it runs over by far more than it holds."""
    greedy = entitled(
        "e",
        service_class,  # type: ignore[arg-type]
        tokens_per_s=rate,
        tokens_per_s_limit=rate,
        limit=16,
    )
    token_pool = pool(greedy, slots=(64,), tokens_per_s=0.0 if rate else 100.0)
    now_s, most_depth = NOW_S, 0.0
    for turn in range(60):
        for number in range(100):
            if isinstance(admit(token_pool, f"s{number}", at=now_s, estimate_tokens=50), Grant):
                admission.settle(token_pool, f"s{number}", 5, now_s)
        long = [f"{turn}.{number}" for number in range(16)]
        for lease_id in long:
            admit(token_pool, lease_id, at=now_s, estimate_tokens=50)
        for lease_id in long:
            admission.resize(token_pool, lease_id, 2_000, 0, now_s + 8)  # as it streams
        for lease_id in long:
            admission.settle(token_pool, lease_id, 2_000, now_s + 8)
        account = token_pool.accounts["e"]
        depth = token_pool.depth_tokens(account) if rate else token_pool.surplus_depth()
        most_depth = max(most_depth, depth)
        now_s += 20
    in_flight = 16 * 2_000  # its limit: what is in flight is not cut off
    assert account.used <= 100 * (now_s - NOW_S) + most_depth + in_flight


GREEDY = entitled("greedy", tokens_per_s=100.0)
PATIENT = entitled("patient", tokens_per_s=100.0)


@pytest.mark.parametrize("service_class", ["dedicated", "elastic", "spot"])
def test_on_an_idle_pool_nobody_is_refused_for_its_rate(service_class: Any) -> None:
    """Ten times its rate, for a minute, and the answers are longer than was reserved."""
    token_pool = pool(entitled("e", service_class, tokens_per_s=100.0, baseline=4), slots=(64,))
    for number in range(600):
        now_s = NOW_S + number / 10
        granted(token_pool, f"{number}", at=now_s)
        if number >= 20:
            admission.settle(token_pool, f"{number - 20}", 150, now_s)
    assert token_pool.accounts["e"].used == 580 * 150


def test_who_is_within_its_rate_passes_bursts_and_has_what_comes_free() -> None:
    token_pool = pool(GREEDY, PATIENT, slots=(8,), headroom=0)
    granted(token_pool, "own", "greedy", estimate_tokens=1000)
    fill(token_pool, "greedy", 7)
    assert checks.min_weight(token_pool, 0) == BURST_WEIGHT
    assert granted(token_pool, "p", "patient").contended
    assert denied(token_pool, "q", "patient").reason == "priority"
    for number in range(4):
        admission.settle(token_pool, f"greedy{number}", 100, NOW_S)
    assert denied(token_pool, "x", "greedy").reason == "tokens"
    fill(token_pool, "patient", 3)
    for tick in (1, 2):  # until nobody was refused for a whole tick
        debt.close(token_pool, 5.0, NOW_S + 5 * tick)
    admission.settle(token_pool, "p", 100, NOW_S)
    granted(token_pool, "y", "greedy", estimate_tokens=1000)


# -- the tick: who is owed, and how much credit overservice gives


TICK_S = 5.0


def ticked(token_pool: TokenPool, at: float = NOW_S + TICK_S, elapsed_s: float = TICK_S) -> None:
    """One whole tick."""
    debt.tick(token_pool, list(token_pool.active), elapsed_s, at)
    debt.close(token_pool, elapsed_s, at)


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
