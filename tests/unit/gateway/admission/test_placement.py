"""Checks 7 and 8: contention, the overshoot, headroom, dedicated idle baselines, spillover."""

import msgspec
import pytest

from gateway.admission import admission, checks
from gateway.admission.token_pool import TokenPool
from gateway.records.entitlement import SPILLED_WEIGHT
from tests.token_pools import NOW_S, denied, entitled, granted, pool

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
    for number in range(4):
        granted(token_pool, f"{number}")
    denial = denied(token_pool, "x")
    assert (denial.reason, denial.limit, denial.used) == ("priority", 4, 4)


def test_outranking_traffic_goes_no_further_than_the_overshoot() -> None:
    token_pool = filled(*"sees")
    granted(token_pool, "a", "t")
    assert denied(token_pool, "b", "t").reason == "priority"


def test_debt_lifts_the_underserved_over_the_threshold() -> None:
    token_pool = filled(*"ttee", slots=4)
    token_pool.accounts["e"].debt = 0.4
    token_pool.accounts["e"].epoch = -1
    granted(token_pool, "x", "e")


@pytest.mark.parametrize("name", ["s", "p", "x"])
def test_backfill_and_traffic_above_its_baseline_leave_headroom(name: str) -> None:
    token_pool = pool(*ALL, entitled("x", baseline=1), slots=(4,), headroom=2)
    granted(token_pool, "a", name)
    granted(token_pool, "b", name)
    denial = denied(token_pool, "c", name)
    assert (denial.reason, denial.used, denial.limit) == ("priority", 2, 4)


def test_traffic_within_its_baseline_uses_the_headroom() -> None:
    token_pool = pool(*ALL, slots=(4,), headroom=2)
    for number in range(4):
        granted(token_pool, f"{number}", "e")


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
    for number in range(4):
        granted(token_pool, f"{number}", "e")
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
