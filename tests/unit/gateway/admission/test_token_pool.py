"""The pool's own bookkeeping: reservations of dedicated baselines, the heap, the journal."""

import msgspec
import pytest

from gateway.admission import admission, checks
from gateway.admission.token_pool import TokenPool
from tests.token_pools import NOW_S, entitled, granted, pool


def changed(token_pool: TokenPool, **terms: object) -> None:
    token_pool.change(msgspec.structs.replace(token_pool.terms, **terms))


def test_idle_dedicated_baseline_is_what_is_not_in_use() -> None:
    token_pool = pool(entitled(service_class="dedicated", baseline=3), slots=(8,))
    assert token_pool.pools[0].idle_dedicated == 3
    granted(token_pool, sequences=2)
    assert token_pool.pools[0].idle_dedicated == 1
    granted(token_pool, "b", sequences=2)
    assert token_pool.pools[0].idle_dedicated == 0
    for lease_id in "ab":
        admission.settle(token_pool, lease_id, 1, NOW_S)
    assert token_pool.pools[0].idle_dedicated == 3


def test_only_bound_dedicated_entitlements_reserve() -> None:
    token_pool = pool(
        entitled("x", "dedicated", baseline=1),
        entitled("y", "dedicated", baseline=2),
        entitled("z", "dedicated", baseline=4),
        slots=(8,),
    )
    for bound_until, reserved in ((1, 1), (2, 3), (0, 0), (1 << 53, 7), (2, 3)):
        changed(token_pool, bound_until=(bound_until,))
        assert token_pool.pools[0].idle_dedicated == reserved


def test_changing_class_or_suspending_gives_the_reservation_up() -> None:
    terms = entitled("x", "dedicated", baseline=2, created=1)
    token_pool = pool(terms)
    token_pool.define(msgspec.structs.replace(terms, suspended=True))
    assert token_pool.pools[0].idle_dedicated == 0
    token_pool.define(terms)
    assert token_pool.pools[0].idle_dedicated == 2
    token_pool.define(msgspec.structs.replace(terms, service_class="elastic"))
    assert token_pool.pools[0].idle_dedicated == 0
    assert token_pool.dedicated == set()


def test_an_entitlement_with_requests_in_flight_cannot_be_removed() -> None:
    token_pool = pool(entitled())
    granted(token_pool)
    with pytest.raises(ValueError, match="e has 1 sequences in flight"):
        token_pool.remove("e")
    admission.settle(token_pool, "a", 1, NOW_S)
    token_pool.remove("e")
    token_pool.remove("e")
    assert token_pool.accounts == {}


def test_new_terms_are_weighed_at_once() -> None:
    token_pool = pool(entitled(slo_ms=1000), mean_slo_ms=1000.0)
    before = token_pool.weight_now(token_pool.accounts["e"])
    changed(token_pool, mean_slo_ms=4000.0)
    assert token_pool.weight_now(token_pool.accounts["e"]) > before
    token_pool.define(entitled(slo_ms=100))
    assert token_pool.weight_now(token_pool.accounts["e"]) == pytest.approx(100 / 1.05)


def test_the_surplus_follows_the_capacity_before_the_next_tick() -> None:
    token_pool = pool(tokens_per_s=100.0)
    token_pool.surplus_per_s = 30.0
    for tokens_per_s, left in ((150.0, 80.0), (0.0, 0.0), (100.0, 100.0)):
        changed(token_pool, tokens_per_s=tokens_per_s)
        assert token_pool.surplus_per_s == left


def test_weights_hold_the_leases_in_force_and_no_others() -> None:
    token_pool = pool(entitled(), slots=(4, 4))
    granted(token_pool, "stays")
    for number in range(1000):
        granted(token_pool, f"{number}")
        admission.settle(token_pool, f"{number}", 1, NOW_S)
    assert list(token_pool.pools[0].weights) == [token_pool.leases["stays"].weight]
    assert checks.min_weight(token_pool, 0) == token_pool.leases["stays"].weight
