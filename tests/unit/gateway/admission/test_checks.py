"""Checks 1 to 6: in force, ever fitting, and within the entitlement's own limits."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission import admission, checks
from gateway.admission.denials import retry_after_s
from gateway.admission.terms import AdmissionRequest, Grant
from gateway.admission.token_pool import RecentDenials, TokenPool
from gateway.records.entitlement import SPILLED_WEIGHT
from tests.token_pools import NOW_S, denied, entitled, fill, granted, pool


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


# -- checks 7 and 8: contention, the overshoot, headroom, dedicated idle baselines, spillover


GUARANTEED = entitled("g", "guaranteed", baseline=(2, 2), slo_ms=1)
DEDICATED = entitled("d", "dedicated", baseline=(2, 0))
ELASTIC = entitled("e", slo_ms=1000, baseline=(4, 4))
TIGHT = entitled("t", slo_ms=100, baseline=(2, 2))
SPOT = entitled("s", "spot")
PREEMPTIBLE = entitled("p", "preemptible")
ALL = (GUARANTEED, ELASTIC, TIGHT, SPOT, PREEMPTIBLE)


def filled(*entitlements_of: str, slots: int = 4, **terms: object) -> TokenPool:
    """A pool whose slots are taken by these entitlements."""
    token_pool = pool(*ALL, slots=(slots, 8), mean_slo_ms=1000.0, headroom=0, **terms)
    for number, name in enumerate(entitlements_of):
        granted(token_pool, f"f{number}", name)
    return token_pool


def test_a_protected_request_always_passes_a_full_pool() -> None:
    token_pool = filled(*"eeee", kv_bytes=(10, 0))
    for lease_id in "ab":
        grant = granted(token_pool, lease_id, "g", kv_bytes=10)
        assert (grant.protected, grant.contended) == (True, True)


def test_a_full_pool_takes_only_more_than_the_least_weight() -> None:
    token_pool = filled(*"eees")
    grant = granted(token_pool, "a", "t")
    assert (grant.contended, grant.protected, grant.spilled) == (True, False, False)
    assert denied(token_pool, "b", "s").reason == "priority"


def test_the_threshold_is_strict_and_counts_its_own_entitlement() -> None:
    """With >= instead nobody would ever be throttled (token-pools paper, section 4.3)."""
    token_pool = pool(msgspec.structs.replace(ELASTIC, limit=9), slots=(4,), mean_slo_ms=1000.0)
    fill(token_pool, "e", 4)
    denial = denied(token_pool, "x")
    assert (denial.reason, denial.limit, denial.used) == ("priority", 4, 4)


def test_outranking_traffic_goes_no_further_than_the_overshoot() -> None:
    token_pool = filled(*"sees")
    granted(token_pool, "a", "t")
    assert denied(token_pool, "b", "t").reason == "priority"


@pytest.mark.parametrize("name", ["s", "p", "x"])
def test_backfill_and_traffic_above_its_baseline_leave_headroom(name: str) -> None:
    token_pool = pool(*ALL, entitled("x", baseline=1), slots=(4,), headroom=2)
    granted(token_pool, "a", name)
    granted(token_pool, "b", name)
    denial = denied(token_pool, "c", name)
    assert (denial.reason, denial.used, denial.limit) == ("priority", 2, 4)


def test_traffic_within_its_baseline_uses_the_headroom() -> None:
    token_pool = pool(*ALL, slots=(4,), headroom=2)
    fill(token_pool, "e", 4)


def test_dedicated_idle_baseline_is_lent_to_nobody() -> None:
    token_pool = pool(DEDICATED, ELASTIC, SPOT, slots=(4,), headroom=0)
    granted(token_pool, "a", "e")
    granted(token_pool, "b", "e")
    assert denied(token_pool, "c", "s").reason == "priority"
    for lease_id in "de":
        assert granted(token_pool, lease_id, "d").protected
    assert token_pool.pools[0].inflight == 4


def test_guaranteed_idle_baseline_is_lent() -> None:
    token_pool = pool(GUARANTEED, ELASTIC, slots=(4,), headroom=0)
    fill(token_pool, "e", 4)
    assert granted(token_pool, "g", "g").contended


def test_a_pool_s_kv_contends_too() -> None:
    token_pool = pool(GUARANTEED, ELASTIC, TIGHT, slots=(8,), kv_bytes=(800,), mean_slo_ms=1000.0)
    granted(token_pool, "a", "e", kv_bytes=780)
    assert denied(token_pool, "b", "e", kv_bytes=30).reason == "priority"
    assert granted(token_pool, "c", "t", kv_bytes=100).contended
    denial = denied(token_pool, "d", "t", kv_bytes=100)
    assert (denial.reason, denial.of_pool, denial.limit, denial.used) == ("kv", True, 800, 880)
    assert granted(token_pool, "e", "g", kv_bytes=100).protected


def test_a_refusal_for_the_pool_s_kv_counts_as_one_for_its_sake() -> None:
    token_pool = pool(ELASTIC, TIGHT, slots=(8,), kv_bytes=(800,), mean_slo_ms=1000.0)
    granted(token_pool, "a", "e", kv_bytes=800)
    granted(token_pool, "b", "t", kv_bytes=50)
    token_pool.pools[0].service_s = 4.25
    waits = [denied(token_pool, f"{n}", "t", kv_bytes=100).wait_s for n in range(2)]
    assert waits == pytest.approx([0.75, 1.5])
    assert (token_pool.priority_denials, token_pool.accounts["t"].denied) == (2, 2)
    assert (len(token_pool.pools[0].denials.weights), token_pool.pools[0].refused_kv_bytes) == (
        1,
        200,
    )


def test_more_than_a_full_pool_spills_into_an_alternate_s_idle_room() -> None:
    token_pool = filled(*"eeee")
    grant = granted(token_pool, "a", "t", alternates=(1,))
    assert (grant.pool, grant.spilled, grant.weight) == (1, True, SPILLED_WEIGHT)
    assert not grant.protected
    assert checks.min_weight(token_pool, 1) == SPILLED_WEIGHT


def test_as_many_as_the_spill_queue_wait_first() -> None:
    token_pool = filled(*"eees", spill_queue=1)
    assert not granted(token_pool, "a", "t", alternates=(1,)).spilled
    assert granted(token_pool, "b", "t", alternates=(1,)).spilled


def test_spilled_work_leaves_the_alternate_s_headroom_and_reservations() -> None:
    reserved = entitled("d", "dedicated", baseline=(0, 3))
    token_pool = pool(*ALL, reserved, slots=(1, 6), headroom=1)
    granted(token_pool, "f", "e")
    for number in range(2):
        assert granted(token_pool, f"{number}", "t", alternates=(1,)).spilled
    assert denied(token_pool, "x", "e", alternates=(1,)).reason == "priority"
    assert token_pool.pools[1].inflight == 2


def test_a_pool_without_workers_spills_all_and_refuses_nobody() -> None:
    token_pool = pool(*ALL, slots=(0, 4), headroom=0)
    assert granted(token_pool, "a", "g", alternates=(1,)).spilled
    for number in range(3):
        assert granted(token_pool, f"{number}", "s", alternates=(1,)).spilled
    assert granted(token_pool, "x", "s", alternates=(1,)).pool == 0


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


def test_changing_the_class_counts_what_is_in_flight_in_the_new_one() -> None:
    token_pool = pool(ELASTIC, slots=(8,))
    granted(token_pool, "a", "e", sequences=2)
    assert token_pool.pools[0].unreserved == 2
    token_pool.define(msgspec.structs.replace(ELASTIC, service_class="dedicated", created=1))
    assert token_pool.pools[0].unreserved == 0
    token_pool.define(msgspec.structs.replace(ELASTIC, created=1))
    assert token_pool.pools[0].unreserved == 2
    admission.settle(token_pool, "a", 1, NOW_S)
    assert token_pool.pools[0].unreserved == 0


def test_least_weight_forgets_those_that_left() -> None:
    token_pool = filled(*"es")
    assert checks.min_weight(token_pool, 0) == token_pool.leases["f1"].weight
    admission.transfer(token_pool, "f1", 1, NOW_S, force=True)
    assert checks.min_weight(token_pool, 0) == token_pool.leases["f0"].weight
    admission.settle(token_pool, "f0", 1, NOW_S)
    assert checks.min_weight(token_pool, 0) == 0


# -- waits are honest: what was promised before is counted, and nobody is told the same


def test_a_refusal_for_tokens_waits_for_what_is_short() -> None:
    token_pool = pool(entitled(tokens_per_s=100.0, tokens_per_s_limit=100.0))
    granted(token_pool, estimate_tokens=900)
    denial = denied(token_pool, "b", estimate_tokens=400)
    assert denial.reason == "tokens"
    assert denial.wait_s == pytest.approx(3.0)
    assert (denial.limit, denial.used, denial.requested) == (1000, 900, 400)


def test_the_next_one_is_told_to_wait_for_the_one_before_too() -> None:
    token_pool = pool(entitled(tokens_per_s=100.0, tokens_per_s_limit=100.0))
    granted(token_pool, estimate_tokens=1000)
    waits = [denied(token_pool, f"{n}", estimate_tokens=200).wait_s for n in range(4)]
    assert waits == pytest.approx([2, 4, 6, 8])
    assert denied(token_pool, "x", estimate_tokens=200, at=NOW_S + 1).wait_s == pytest.approx(8)


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


def test_a_refusal_for_concurrency_waits_for_one_of_its_own_to_end() -> None:
    token_pool = pool(entitled(limit=2))
    token_pool.pools[0].service_s = 6.0
    granted(token_pool, "a")
    granted(token_pool, "b")
    waits = [denied(token_pool, f"{n}").wait_s for n in range(3)]
    assert waits == pytest.approx([2, 4, 6])
    assert denied(token_pool, "x", at=NOW_S + 3).wait_s == pytest.approx(6)


def test_a_refusal_for_kv_waits_for_its_bytes_to_be_freed() -> None:
    token_pool = pool(entitled(kv_bytes_limit=1000))
    token_pool.pools[0].service_s = 5.0
    granted(token_pool, kv_bytes=800)
    waits = [denied(token_pool, f"{n}", kv_bytes=400).wait_s for n in range(2)]
    assert waits == pytest.approx([200 / 160, 2 * 200 / 160])


def test_a_refusal_on_priority_waits_for_all_of_its_weight_or_more() -> None:
    others = [entitled(f"s{n}", "spot") for n in range(3)]
    low = entitled("p", "preemptible")
    token_pool = pool(entitled("e", baseline=4), *others, low, slots=(4,))
    token_pool.pools[0].service_s = 8.0
    fill(token_pool, "e", 4)
    for number in range(3):
        wait_s = denied(token_pool, f"x{number}", f"s{number}").wait_s
        assert wait_s == pytest.approx(2 * (number + 1))
    assert denied(token_pool, "y", "p").wait_s == pytest.approx(2 * 4)
    assert denied(token_pool, "z", "s0").wait_s == pytest.approx(2 * (1 + 2 + 1))


def test_what_is_told_of_a_full_pool_is_over_once_it_has_passed() -> None:
    token_pool = pool(entitled("e", baseline=4), entitled("s", "spot"), slots=(4,))
    token_pool.pools[0].service_s = 8.0
    fill(token_pool, "e", 4)
    waits = [denied(token_pool, f"x{number}", "s").wait_s for number in range(3)]
    assert waits == pytest.approx([2, 4, 6])
    assert denied(token_pool, "y", "s", at=NOW_S + 6).wait_s == pytest.approx(2)


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
