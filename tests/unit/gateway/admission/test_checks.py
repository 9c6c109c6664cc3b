"""What the checks promise: the paper's threshold, reserves, and waits that are honest.

The store differential tells the rest of them.
"""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission import admission
from gateway.admission.denials import retry_after_s
from gateway.admission.terms import AdmissionRequest, Grant
from gateway.admission.token_pool import RecentDenials
from gateway.records.entitlement import SPILLED_WEIGHT
from tests.token_pools import NOW_S, denied, entitled, fill, granted, pool


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


# -- contention, headroom, dedicated idle baselines, reserves that were lost


GUARANTEED = entitled("g", "guaranteed", baseline=(2, 2), slo_ms=1)
ELASTIC = entitled("e", slo_ms=1000, baseline=(4, 4))
SPOT = entitled("s", "spot")


def test_the_threshold_is_strict_and_counts_its_own_entitlement() -> None:
    """With >= instead nobody would ever be throttled (token-pools paper, section 4.3)."""
    token_pool = pool(msgspec.structs.replace(ELASTIC, limit=9), slots=(4,), mean_slo_ms=1000.0)
    fill(token_pool, "e", 4)
    denial = denied(token_pool, "x")
    assert (denial.reason, denial.limit, denial.used) == ("priority", 4, 4)


@pytest.mark.parametrize("name", ["s", "p", "x"])
def test_backfill_and_traffic_above_its_baseline_leave_headroom(name: str) -> None:
    backfill = (SPOT, entitled("p", "preemptible"), entitled("x", baseline=1))
    token_pool = pool(*backfill, slots=(4,), headroom=2)
    granted(token_pool, "a", name)
    granted(token_pool, "b", name)
    denial = denied(token_pool, "c", name)
    assert (denial.reason, denial.used, denial.limit) == ("priority", 2, 4)


def test_dedicated_idle_baseline_is_lent_to_nobody() -> None:
    token_pool = pool(entitled("d", "dedicated", baseline=2), ELASTIC, SPOT, slots=(4,), headroom=0)
    granted(token_pool, "a", "e")
    granted(token_pool, "b", "e")
    assert denied(token_pool, "c", "s").reason == "priority"
    for lease_id in "de":
        assert granted(token_pool, lease_id, "d").protected
    assert token_pool.pools[0].inflight == 4


LOST = {"slots": (0, 4), "bound_until": (0, 1 << 53)}
"""The first pool has no worker; the other holds all the reserves that there are in it."""


def test_a_reserve_in_a_lost_pool_is_served_in_the_place_of_lower_classes() -> None:
    reserves = entitled("g", "guaranteed", baseline=(3, 1))
    token_pool = pool(reserves, SPOT, **LOST, headroom=0)
    for number in range(4):
        granted(token_pool, f"s{number}", "s", pool=1)
    for number in range(3):
        grant = granted(token_pool, f"g{number}", "g", alternates=(1,))
        assert (grant.pool, grant.spilled, grant.weight) == (1, True, SPILLED_WEIGHT)
    # What spilled in does not use what is reserved there.
    assert granted(token_pool, "own", "g", pool=1).protected
    assert denied(token_pool, "x", "g", alternates=(1,)).reason == "concurrency"


def test_who_has_no_reserve_today_takes_what_is_free_and_the_place_of_lower_classes() -> None:
    newer = entitled("n", "guaranteed", baseline=4)
    token_pool = pool(GUARANTEED, newer, SPOT, slots=(4,), bound_until=(1,), headroom=1)
    for number in range(2):
        granted(token_pool, f"n{number}", "n")
    granted(token_pool, "s0", "s")
    assert granted(token_pool, "n2", "n").contended is False  # spot is there: no headroom is kept
    assert granted(token_pool, "n3", "n").contended
    for lease_id in ("g0", "g1"):  # who has one always enters
        assert granted(token_pool, lease_id, "g").protected


def test_who_has_no_reserve_today_does_not_crowd_those_who_have() -> None:
    newer = entitled("n", "guaranteed", baseline=4)
    token_pool = pool(GUARANTEED, newer, slots=(4,), bound_until=(1,), headroom=1)
    for number in range(3):
        granted(token_pool, f"n{number}", "n")
    denial = denied(token_pool, "x", "n")
    assert (denial.reason, denial.of_pool) == ("entitlement_degraded", False)


# -- waits are honest: what was promised before is counted, and nobody is told the same


def test_promises_drain_and_are_never_more_than_what_is_told() -> None:
    token_pool = pool(entitled(tokens_per_s=10.0, tokens_per_s_limit=10.0))
    granted(token_pool, estimate_tokens=100)
    for number in range(500):
        denied(token_pool, f"{number}", estimate_tokens=100)
    assert token_pool.accounts["e"].promised == 600
    granted(token_pool, "y", estimate_tokens=100, at=NOW_S + 61)
    assert denied(token_pool, "z", estimate_tokens=100, at=NOW_S + 61).wait_s == pytest.approx(10)


@pytest.mark.parametrize("times", [1.5, 2, 3, 5])
def test_two_retries_complete_a_burst(times: float) -> None:
    """Everybody comes back once told, twice at most, as the official client does."""
    token_pool = pool(entitled(tokens_per_s=100.0, tokens_per_s_limit=100.0), slots=(10_000,))
    burst = [(0.0, f"{n}", 0) for n in range(int(times * 10))]
    served = 0
    while burst:
        burst.sort()
        at_s, name, tries = burst.pop(0)
        found = admission.admit(
            token_pool,
            AdmissionRequest(lease_id=name, entitlement="e", pool=0, estimate_tokens=100),
            NOW_S + at_s,
            observe=False,
        )
        if isinstance(found, Grant):
            served += 1
            admission.settle(token_pool, name, 100, NOW_S + at_s)
        elif tries < 2:
            burst.append((at_s + retry_after_s(found.wait_s, 0.0), name, tries + 1))
    assert served == int(times * 10)


@pytest.mark.parametrize("attempts", [1, 100, 1_000])
def test_however_often_one_tenant_asks_it_counts_once_for_another(attempts: int) -> None:
    token_pool = pool(
        entitled("e", baseline=4),
        entitled("s", "spot", tenant="many"),
        entitled("t", "spot", tenant="many"),
        entitled("o", "spot"),
        slots=(4,),
    )
    fill(token_pool, "e", 4)
    for number in range(attempts):
        for who in "st":
            denied(token_pool, f"{who}{number}", who)
    assert denied(token_pool, "x", "o").wait_s == pytest.approx(5 / 4 * 2)


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0.01, 1000))),
    st.floats(0.01, 1000),
)
def test_those_above_are_the_latest_of_each_other_tenant(
    refused: list[tuple[str, float]], weight: float
) -> None:
    known = RecentDenials()
    for tenant, w in refused:
        known.note(tenant, w, 5)
    latest: dict[str, float] = {}
    for tenant, w in refused:
        latest.pop(tenant, None)
        if len(latest) < 5:
            latest[tenant] = w
    assert known.weights == latest
    above = [t for t, w in latest.items() if w >= weight and t != "a"]
    assert known.others_above("a", weight) == len(above)
