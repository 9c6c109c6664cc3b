"""Who asks for more than its token rate or KV gets what nobody else uses, and nothing beyond.

The pools state no rate, so there is no bucket of it: free slots and KV decide.
"""

from typing import Any

import pytest

from gateway.admission import admission, checks, debt
from gateway.admission.terms import Grant
from gateway.admission.token_pool import TokenPool
from gateway.records.entitlement import BURST_WEIGHT
from tests.token_pools import NOW_S, admit, denied, entitled, granted, pool

GREEDY = entitled("greedy", tokens_per_s=100.0)
PATIENT = entitled("patient", tokens_per_s=100.0)
SPOT = entitled("spot", "spot")
FIRM = entitled("firm", "guaranteed", baseline=2)


def fill(token_pool: TokenPool, name: str, count: int, **asked: Any) -> None:
    for number in range(count):
        granted(token_pool, f"{name}{number}", name, **asked)


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


def test_beyond_the_rate_the_headroom_stays_free() -> None:
    token_pool = pool(GREEDY, slots=(8,))
    granted(token_pool, "own", "greedy", estimate_tokens=1000)
    fill(token_pool, "greedy", 6)
    denial = denied(token_pool, "x", "greedy")
    assert (denial.reason, denial.wait_s, denial.limit) == ("tokens", 1, 1000)


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


def test_reserves_come_before_bursts_and_spot_after() -> None:
    token_pool = pool(FIRM, GREEDY, SPOT, slots=(8,), headroom=0)
    granted(token_pool, "own", "greedy", estimate_tokens=1000)
    fill(token_pool, "spot", 6)
    granted(token_pool, "last", "greedy")
    assert denied(token_pool, "s", "spot").reason == "priority"
    assert granted(token_pool, "over", "greedy").contended  # outranks spot, up to the overshoot
    assert denied(token_pool, "x", "greedy").reason == "tokens"
    assert granted(token_pool, "f", "firm").protected


def test_a_dedicated_reserve_that_nobody_else_may_use_is_used_beyond_the_rate() -> None:
    dedicated = entitled("d", "dedicated", baseline=2, tokens_per_s=10.0)
    token_pool = pool(dedicated, entitled(baseline=2), slots=(4,), headroom=0)
    fill(token_pool, "e", 2)
    granted(token_pool, "own", "d", estimate_tokens=100)
    assert granted(token_pool, "beyond", "d", estimate_tokens=100).protected


@pytest.mark.parametrize("rate", [10.0, 0.0])
def test_a_limit_of_the_rate_binds_on_an_idle_pool_too(rate: float) -> None:
    limited = entitled(tokens_per_s=rate, tokens_per_s_limit=20.0)
    token_pool = pool(limited, slots=(64,))
    spent, refused = 0, 0
    for number in range(600):
        now_s = NOW_S + number / 10
        if isinstance(admit(token_pool, f"{number}", at=now_s, estimate_tokens=20), Grant):
            admission.settle(token_pool, f"{number}", 20, now_s)
            spent += 20
        else:
            refused += 1
    assert 60 * 20 <= spent <= 60 * 20 + 10 * 20
    assert refused


def test_a_refusal_for_that_limit_waits_until_it_has_drained() -> None:
    token_pool = pool(entitled(tokens_per_s_limit=20.0), slots=(64,))
    granted(token_pool, estimate_tokens=200)
    denial = denied(token_pool, "b", estimate_tokens=40)
    assert (denial.wait_s, denial.limit, denial.used) == (2, 200, 200)
    granted(token_pool, "c", estimate_tokens=40, at=NOW_S + 2)


def test_kv_beyond_the_baseline_is_used_while_the_pool_has_it() -> None:
    token_pool = pool(entitled(kv_bytes=100), FIRM, slots=(8,), kv_bytes=(1000,))
    granted(token_pool, "a", kv_bytes=600)
    granted(token_pool, "b", kv_bytes=400)
    assert denied(token_pool, "c", kv_bytes=1).of_pool
    assert granted(token_pool, "f", "firm", kv_bytes=100).protected


@pytest.mark.parametrize(
    ("terms", "rate", "counts"),
    [
        ({"tokens_per_s": 100.0}, 100.0, True),
        ({"tokens_per_s": 100.0, "tokens_per_s_limit": 100.0}, 100.0, False),
        ({"service_class": "guaranteed", "tokens_per_s": 100.0, "baseline": 8}, 100.0, False),
        ({"service_class": "spot"}, 100.0, True),
        ({"limit": 1}, 0.0, False),
    ],
)
def test_a_refusal_that_more_workers_would_avoid_counts_as_demand(
    terms: dict[str, Any], rate: float, counts: bool
) -> None:
    token_pool = pool(entitled(**terms), slots=(8,), tokens_per_s=rate)
    token_pool.surplus = 1000.0
    while isinstance(admit(token_pool, f"{len(token_pool.leases)}", estimate_tokens=500), Grant):
        pass
    state = token_pool.pools[0]
    assert (state.refused_sequences, state.refused_tokens) == ((1, 500) if counts else (0, 0))
