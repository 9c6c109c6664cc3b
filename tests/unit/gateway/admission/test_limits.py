"""Checks 1 to 6: in force, ever fitting, and within the entitlement's own limits."""

from typing import Any

import msgspec
import pytest

from gateway.admission import admission
from tests.token_pools import NOW_S, denied, entitled, granted, pool


@pytest.mark.parametrize(
    ("terms", "reason"),
    [
        ({"suspended": True}, "entitlement_suspended"),
        ({"expires_unix_s": NOW_S}, "entitlement_expired"),
        ({"expires_unix_s": NOW_S - 1, "suspended": True}, "entitlement_suspended"),
    ],
)
def test_what_is_not_in_force_enters_nothing(terms: dict[str, Any], reason: str) -> None:
    assert denied(pool(entitled(**terms))).reason == reason


def test_an_entitlement_is_in_force_until_it_expires() -> None:
    token_pool = pool(entitled(expires_unix_s=NOW_S + 10))
    granted(token_pool, "a", at=NOW_S + 9.9)
    assert denied(token_pool, "b", at=NOW_S + 10).reason == "entitlement_expired"


@pytest.mark.parametrize(
    ("created", "reason"), [(3, "entitlement_degraded"), (4, "entitlement_pending")]
)
def test_whom_a_full_pool_does_not_hold_is_degraded_if_it_ever_was_bound(
    created: int, reason: str
) -> None:
    terms = entitled(service_class="guaranteed", baseline=1, created=created)
    other = entitled("o", "guaranteed", baseline=4)
    token_pool = pool(other, terms, bound_until=(2,), ever_bound_until=3)
    granted(token_pool, "o", "o", sequences=4)
    denial = denied(token_pool)
    assert denial.reason == reason
    assert denial.wait_s >= 1
    assert (token_pool.priority_denials, token_pool.accounts["e"].denied) == (0, 0)


@pytest.mark.parametrize(
    ("terms", "asked", "unit", "limit"),
    [
        ({"tokens_per_s": 10.0}, {"estimate_tokens": 101}, "tokens", 100),
        ({"kv_bytes_limit": 50}, {"kv_bytes": 51}, "bytes of KV cache", 50),
        ({"kv_bytes": 50, "kv_bytes_limit": 60}, {"kv_bytes": 61}, "bytes of KV cache", 60),
        ({"limit": 2}, {"sequences": 3}, "sequences", 2),
        ({"service_class": "guaranteed", "baseline": (2, 9)}, {"sequences": 3}, "sequences", 2),
        ({"service_class": "guaranteed", "baseline": (0, 9)}, {}, "sequences", 0),
        ({}, {"sequences": 6}, "sequences", 5),
        ({}, {"kv_bytes": 1001}, "bytes of KV cache", 1000),
        ({}, {"kv_bytes": 2001, "alternates": (1,)}, "bytes of KV cache", 2000),
    ],
)
def test_what_waiting_cannot_help_is_told_so(
    terms: dict[str, Any], asked: dict[str, Any], unit: str, limit: float
) -> None:
    token_pool = pool(entitled(**terms), slots=(4, 4), kv_bytes=(1000, 2000))
    denial = denied(token_pool, **asked)
    assert (denial.reason, denial.unit, denial.limit) == ("exceeds_entitlement", unit, limit)
    assert denial.wait_s == 0
    assert not denial.of_pool


def test_a_request_beyond_the_whole_surplus_never_fits() -> None:
    token_pool = pool(entitled(service_class="spot"), tokens_per_s=100.0)
    assert denied(token_pool, estimate_tokens=1001).reason == "exceeds_entitlement"
    granted(token_pool, estimate_tokens=1000)


def test_a_request_that_only_an_alternate_can_hold_is_no_misfit() -> None:
    token_pool = pool(entitled(), slots=(4, 8), kv_bytes=(1000, 2000))
    assert granted(token_pool, kv_bytes=1500, alternates=(1,)).pool == 1


def test_a_pool_whose_workers_are_away_says_nothing_about_what_fits() -> None:
    granted(pool(entitled(limit=50), slots=(0,)), sequences=40)


def test_concurrency_is_counted_over_all_pools() -> None:
    token_pool = pool(entitled(limit=3), slots=(8, 8))
    granted(token_pool, "a", sequences=2)
    granted(token_pool, "b", pool=1)
    denial = denied(token_pool, "c", pool=1)
    assert (denial.reason, denial.limit, denial.used) == ("concurrency", 3, 3)


def test_without_a_limit_the_capacity_is_one() -> None:
    token_pool = pool(entitled(baseline=(4, 4)), slots=(4, 4))
    for number in range(8):
        granted(token_pool, f"{number}", pool=number % 2)
    assert denied(token_pool, "x").reason == "concurrency"


def test_guaranteed_is_held_to_its_baseline_pool_by_pool() -> None:
    token_pool = pool(entitled(service_class="guaranteed", baseline=(2, 1)), slots=(8, 8))
    granted(token_pool, "a", pool=1)
    denial = denied(token_pool, "b", pool=1)
    assert (denial.reason, denial.limit, denial.used) == ("concurrency", 1, 1)
    granted(token_pool, "c", sequences=2)
    assert denied(token_pool, "d").reason == "concurrency"


def test_guaranteed_does_not_pass_its_baseline_by_spilling() -> None:
    """Its pool is away, and everything goes to the other one."""
    token_pool = pool(entitled(service_class="guaranteed", baseline=(2, 0)), slots=(0, 8))
    for lease_id in "ab":
        assert granted(token_pool, lease_id, alternates=(1,)).spilled
    denial = denied(token_pool, "c", alternates=(1,))
    assert (denial.reason, denial.limit, denial.used) == ("concurrency", 2, 2)


def test_kv_is_counted_over_all_pools_against_the_limit_or_the_baseline() -> None:
    terms = entitled(kv_bytes=100, kv_bytes_limit=200)
    token_pool = pool(terms, slots=(8, 8))
    granted(token_pool, "a", kv_bytes=150)
    denial = denied(token_pool, "b", pool=1, kv_bytes=60)
    assert (denial.reason, denial.limit, denial.used, denial.of_pool) == ("kv", 200, 150, False)
    guaranteed = msgspec.structs.replace(
        terms, service_class="guaranteed", baseline=(4, 4), kv_bytes_limit=0
    )
    token_pool.define(guaranteed)
    assert denied(token_pool, "c", kv_bytes=1).limit == 100


def test_limits_of_its_own_are_no_denials_of_the_pool() -> None:
    token_pool = pool(entitled(limit=1, tokens_per_s=100.0, tokens_per_s_limit=100.0))
    granted(token_pool, "a", estimate_tokens=1000)
    denied(token_pool, "b")
    admission.settle(token_pool, "a", 1000, NOW_S)
    denied(token_pool, "c")
    assert (
        token_pool.priority_denials,
        token_pool.accounts["e"].denied,
        token_pool.pools[0].refused_sequences,
    ) == (0, 0, 0)
