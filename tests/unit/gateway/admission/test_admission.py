"""The decision as a whole: its order, a known id, observe mode, transfers."""

from typing import Any

import msgspec
import pytest

from gateway.admission import admission, checks
from gateway.admission.admission import believed, beyond_window, charge_tokens, evict
from gateway.admission.token_pool import LEASE_TTL_S, REAP_BATCH, TOMBSTONES, TokenPool
from gateway.records.attempt import Usage
from gateway.records.entitlement import PROFILES, AdmissionProfile
from tests.builders import length_estimate
from tests.token_pools import NOW_S, denied, entitled, granted, pool


def test_a_known_id_gets_its_earlier_decision_and_counts_once() -> None:
    token_pool = pool(entitled(tokens_per_s=100.0), slots=(4, 4))
    first = granted(token_pool, sequences=2)
    again = granted(token_pool, sequences=1, pool=1, estimate_tokens=7)
    assert (again.pool, again.weight, again.funded) == (first.pool, first.weight, first.funded)
    assert (token_pool.accounts["e"].total, token_pool.accounts["e"].debited) == (2, 100)


def test_a_denial_takes_nothing() -> None:
    token_pool = pool(entitled(tokens_per_s=100.0, limit=1, kv_bytes=50))
    granted(token_pool, kv_bytes=50)
    account = token_pool.accounts["e"]
    before = (account.level, account.debited, account.total, account.kv_bytes)
    asked: list[dict[str, Any]] = [{}, {"kv_bytes": 9}, {"estimate_tokens": 1000}]
    for number, more in enumerate(asked):
        denied(token_pool, f"{number}", **more)
    assert (account.level, account.debited, account.total, account.kv_bytes) == before
    assert list(token_pool.leases) == ["a"]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"estimate_tokens": 1001, "sequences": 2, "kv_bytes": 9}, "exceeds_entitlement"),
        ({"estimate_tokens": 1000, "sequences": 2, "kv_bytes": 9}, "concurrency"),
        ({"estimate_tokens": 1000, "kv_bytes": 9}, "tokens"),
        ({"kv_bytes": 9}, "kv"),
        ({}, "priority"),
    ],
)
def test_checks_come_in_their_order(asked: dict[str, Any], reason: str) -> None:
    tight = entitled(tokens_per_s=100.0, tokens_per_s_limit=100.0, limit=2, kv_bytes_limit=10)
    token_pool = pool(tight, entitled("g", "guaranteed", baseline=4))
    granted(token_pool, "a", estimate_tokens=500, kv_bytes=5)
    for number in range(3):
        granted(token_pool, f"g{number}", "g")
    assert denied(token_pool, "b", **asked).reason == reason


@pytest.mark.parametrize("whose", ["model", "entitlement"])
def test_observing_notes_a_denial_and_lets_it_in(whose: str) -> None:
    token_pool = pool(entitled(limit=1, tokens_per_s=100.0, observe=whose == "entitlement"))
    granted(token_pool)
    grant = granted(token_pool, "b", estimate_tokens=950, observe=whose == "model")
    assert grant.would_deny == "concurrency"
    assert token_pool.accounts["e"].total == 2
    assert admission.settle(token_pool, "b", 950, NOW_S)
    assert token_pool.accounts["e"].level == 900


def test_observing_says_as_often_as_enforcing_would_that_the_bucket_is_empty() -> None:
    """What would have been refused would not have been paid for either."""
    token_pool = pool(entitled(tokens_per_s=100.0, tokens_per_s_limit=100.0))
    said = []
    for second in range(20):
        now_s = NOW_S + second
        grant = granted(token_pool, f"{second}", estimate_tokens=300, at=now_s, observe=True)
        admission.settle(token_pool, f"{second}", 300, now_s)
        said.append(grant.would_deny)
    assert said.count("tokens") == 11  # 9 x 300 of 1,000 + 19 x 100
    assert token_pool.accounts["e"].level >= 0


def test_a_forced_transfer_moves_whatever_the_other_pool_holds() -> None:
    token_pool = pool(entitled(), slots=(4, 1))
    granted(token_pool, "a", kv_bytes=7)
    granted(token_pool, "b", pool=1, observe=True)
    assert admission.transfer(token_pool, "a", 1, NOW_S, force=True) is None
    assert [p.inflight for p in token_pool.pools] == [0, 2]
    assert [p.kv_bytes for p in token_pool.pools] == [0, 7]
    assert token_pool.accounts["e"].inflight == [0, 2]


def test_an_unforced_transfer_goes_only_where_it_would_be_admitted() -> None:
    token_pool = pool(entitled(baseline=(4, 4)), entitled("s", "spot"), slots=(4, 1), headroom=0)
    granted(token_pool, "a", "s")
    granted(token_pool, "b", pool=1)
    denial = admission.transfer(token_pool, "a", 1, NOW_S, force=False)
    assert denial is not None
    assert denial.reason == "priority"
    assert (token_pool.leases["a"].pool, token_pool.pools[0].inflight) == (0, 1)
    assert checks.min_weight(token_pool, 0) == token_pool.leases["a"].weight
    admission.settle(token_pool, "b", 1, NOW_S)
    assert admission.transfer(token_pool, "a", 1, NOW_S, force=False) is None
    assert token_pool.leases["a"].pool == 1


def test_a_transfer_that_is_denied_is_no_refusal_to_remember() -> None:
    """The request goes on where it is: nobody was underserved, nobody has to wait."""
    token_pool = pool(entitled(baseline=(4, 0)), slots=(4, 0))
    granted(token_pool)
    assert admission.transfer(token_pool, "a", 1, NOW_S, force=False) is not None
    assert (
        token_pool.priority_denials,
        token_pool.accounts["e"].denied,
        token_pool.pools[1].refused_sequences,
    ) == (0, 0, 0)


def test_an_unforced_transfer_keeps_a_guaranteed_baseline_pool_by_pool() -> None:
    token_pool = pool(entitled(service_class="guaranteed", baseline=(2, 1)), slots=(4, 8))
    granted(token_pool, "a")
    granted(token_pool, "b", pool=1)
    denial = admission.transfer(token_pool, "a", 1, NOW_S, force=False)
    assert denial is not None
    assert (denial.reason, denial.limit) == ("concurrency", 1)


# -- a lease ends once: settled, refunded or expired; late usage replaces an estimate once


LATE_S = NOW_S + LEASE_TTL_S


def test_settling_gives_back_what_the_grant_took() -> None:
    token_pool = pool(entitled(tokens_per_s=100.0), slots=(8,))
    granted(token_pool, sequences=3, kv_bytes=500, estimate_tokens=400)
    assert admission.settle(token_pool, "a", 250, NOW_S)
    account = token_pool.accounts["e"]
    assert (account.total, account.kv_bytes, account.inflight) == (0, 0, [0])
    assert (account.debited, account.refunded, account.used, account.served) == (400, 150, 250, 250)
    assert account.level == 750
    assert (token_pool.pools[0].inflight, token_pool.pools[0].kv_bytes, token_pool.settled) == (
        0,
        0,
        1,
    )


def test_a_full_refund_teaches_nothing() -> None:
    token_pool = pool(entitled(tokens_per_s=100.0))
    granted(token_pool)
    admission.settle(token_pool, "a", None, NOW_S + 3)
    account = token_pool.accounts["e"]
    assert (account.level, account.served, account.mean_cost) == (1000, 0, 0)
    assert (account.debited, account.refunded, account.used) == (100, 100, 0)
    assert (token_pool.refunds, token_pool.settled, token_pool.pools[0].service_s) == (1, 0, 5.0)


def test_service_time_is_a_moving_mean_of_leases_lives() -> None:
    token_pool = pool(entitled())
    granted(token_pool)
    admission.settle(token_pool, "a", 100, NOW_S + 15)
    assert token_pool.pools[0].service_s == pytest.approx(6.0)


def test_a_lease_expires_after_its_time_and_is_charged_its_estimate() -> None:
    token_pool = pool(entitled(tokens_per_s=10.0))
    granted(token_pool)
    assert admission.reap(token_pool, LATE_S - 0.1) == 0
    assert admission.reap(token_pool, LATE_S) == 1
    account = token_pool.accounts["e"]
    assert (account.total, account.used, account.served) == (0, 100, 100)
    assert token_pool.pools[0].inflight == 0


def test_late_usage_replaces_the_estimate_once_and_touches_no_counter() -> None:
    token_pool = pool(entitled(tokens_per_s=100.0), slots=(8,))
    granted(token_pool)
    admission.reap(token_pool, LATE_S)
    granted(token_pool, "b", at=LATE_S)
    for _ in range(2):
        assert not admission.settle(token_pool, "a", 30, LATE_S)
    account = token_pool.accounts["e"]
    assert (account.total, account.used) == (1, 30)
    assert account.debited - account.refunded == account.used + 100


def test_late_usage_of_a_removed_entitlement_is_nobody_s() -> None:
    token_pool = pool(entitled())
    granted(token_pool)
    admission.reap(token_pool, LATE_S)
    token_pool.remove("e")
    assert not admission.settle(token_pool, "a", 30, LATE_S)


def test_renewing_keeps_a_lease_and_its_place_in_the_order_of_expiry() -> None:
    token_pool = pool(entitled(), slots=(8,))
    granted(token_pool, "a")
    granted(token_pool, "b", at=NOW_S + 1)
    assert admission.renew(token_pool, "a", NOW_S + 10)
    assert not admission.renew(token_pool, "gone", NOW_S + 10)
    assert admission.reap(token_pool, LATE_S + 1) == 1
    assert list(token_pool.leases) == ["a"]
    assert admission.reap(token_pool, LATE_S + 10) == 1


def test_admission_reaps_first_and_so_many_at_once() -> None:
    count = REAP_BATCH + 5
    token_pool = pool(entitled(baseline=count), slots=(count,))
    for number in range(count):
        granted(token_pool, f"{number}")
    granted(token_pool, "x", at=LATE_S)
    assert token_pool.pools[0].inflight == 5 + 1
    granted(token_pool, "y", at=LATE_S)
    assert token_pool.pools[0].inflight == 2


def test_only_so_many_expired_leases_are_remembered() -> None:
    token_pool = pool(entitled())
    token_pool.tombstones = {f"old{n}": ("e", 1, "none", ()) for n in range(TOMBSTONES)}
    granted(token_pool)
    admission.reap(token_pool, LATE_S)
    assert len(token_pool.tombstones) == TOMBSTONES
    assert "old0" not in token_pool.tombstones
    assert "a" in token_pool.tombstones


def test_resizing_down_gives_back_and_up_takes_more() -> None:
    token_pool = pool(entitled(tokens_per_s=100.0))
    granted(token_pool, estimate_tokens=400, kv_bytes=40)
    admission.resize(token_pool, "a", 150, 15, NOW_S)
    account = token_pool.accounts["e"]
    assert (account.level, account.kv_bytes, token_pool.pools[0].kv_bytes) == (850, 15, 15)
    admission.resize(token_pool, "a", 2000, 200, NOW_S)
    assert (account.level, account.kv_bytes) == (-1000, 200)
    admission.settle(token_pool, "a", 2000, NOW_S)
    assert (account.debited, account.refunded, account.used) == (2250, 250, 2000)


# -- which reported usage is believed, and what usage costs, cached prompts among it


PAPER, DEFAULT = PROFILES["paper"], PROFILES["default"]


@pytest.mark.parametrize(
    ("profile", "prompt", "completion", "cached", "charge"),
    [
        (DEFAULT, 100, 20, 50, 75),
        (PAPER, 100, 20, 50, 120),
        (DEFAULT, 100, 20, 5000, 30),
        (DEFAULT, 101, 0, 101, 11),
    ],
)
def test_cached_prompt_tokens_cost_a_tenth_except_in_the_paper(
    profile: AdmissionProfile, prompt: int, completion: int, cached: int, charge: int
) -> None:
    usage = Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)
    assert charge_tokens(profile, usage) == charge


WINDOW = 8192


def usage(prompt: int, completion: int = 5, cached: int = 0) -> Usage:
    return Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)


@pytest.mark.parametrize(
    "reported",
    [
        usage(0),
        usage(10, cached=999_999),
        usage(10, completion=51),
        usage(8193),
        usage(8150, completion=50),
        usage(10**9),
    ],
    ids=[
        *("no prompt", "cached beyond prompt", "beyond the limit", "beyond the window"),
        *("beyond the window together", "absurd"),
    ],
)
def test_what_cannot_be_true_is_replaced_by_the_gateways_own_count(reported: Usage) -> None:
    found = believed(reported, length_estimate(100, cap=50), WINDOW)
    assert found.source == "counted"
    assert (found.prompt_tokens, found.cached_tokens) == (100, 0)
    assert found.completion_tokens <= 50


@pytest.mark.parametrize("reported", [usage(1), usage(8142, 50), usage(100, 0, cached=100)])
def test_what_can_be_true_is_believed(reported: Usage) -> None:
    assert believed(reported, length_estimate(100, cap=50), WINDOW) is reported


def test_an_engine_that_served_more_than_its_configured_window_is_believed() -> None:
    reported = usage(9_500, 11)
    assert believed(reported, length_estimate(7_900), WINDOW) is reported
    assert beyond_window(reported, 1, WINDOW)
    assert not beyond_window(usage(8_000, 11), 1, WINDOW)


def test_what_is_counted_instead_fits_the_window_together() -> None:
    found = believed(usage(10**9, completion=10**9), length_estimate(8_000), WINDOW)
    assert (found.prompt_tokens, found.completion_tokens) == (8_000, 192)


def test_the_limit_is_of_each_sequence() -> None:
    three: dict[str, Any] = {"input_tokens": 100, "cap": 50, "sequences": 3}
    assert believed(usage(100, 150), length_estimate(**three), WINDOW).source == "engine"
    assert believed(usage(100, 151), length_estimate(**three), WINDOW).source == "counted"


# -- who gives way: the least weight first, then the youngest; nobody is asked twice


def full(*, reclaim_spot: bool = False) -> TokenPool:
    """Two slots each of spot and preemptible work, none free, and a protected request."""
    token_pool = pool(
        entitled("g", "guaranteed", baseline=2),
        entitled("s", "spot"),
        entitled("p", "preemptible", slo_ms=9000),
        entitled("q", "preemptible", slo_ms=10),
        slots=(4, 4),
        headroom=0,
        mean_slo_ms=1000.0,
        reclaim_spot=reclaim_spot,
    )
    for number, name in enumerate("sqpp"):
        granted(token_pool, f"{name}{number}", name, at=NOW_S + number)
    granted(token_pool, "g", "g", at=NOW_S + 9)
    return token_pool


def names(token_pool: TokenPool, pool: int = 0) -> list[str]:
    """Victims once the pool's workers are lost."""
    token_pool.change(msgspec.structs.replace(token_pool.terms, slots=(0, 0)))
    return [record.id for record in evict(token_pool, pool, 9)]


def test_the_least_weight_goes_first_and_the_youngest_of_those() -> None:
    assert names(full()) == ["p3", "p2", "q1"]


def test_spot_goes_only_where_the_model_says_so() -> None:
    assert names(full(reclaim_spot=True)) == ["p3", "p2", "q1", "s0"]


@pytest.mark.parametrize(("reclaim_spot", "asked"), [(False, []), (True, ["x"])])
def test_spilled_work_gives_way_as_spot_does(reclaim_spot: bool, asked: list[str]) -> None:
    token_pool = pool(
        entitled(),
        entitled("g", "guaranteed", baseline=(1, 8)),
        slots=(1, 8),
        headroom=0,
        reclaim_spot=reclaim_spot,
    )
    granted(token_pool, "f", "g")
    assert granted(token_pool, "x", alternates=(1,)).spilled
    assert names(token_pool, 1) == asked


def test_nobody_is_asked_twice() -> None:
    token_pool = full()
    assert [record.id for record in evict(token_pool, 0, 1)] == ["p3"]
    assert evict(token_pool, 0, 1) == []
    granted(token_pool, "g2", "g", at=NOW_S + 9)
    assert [record.id for record in evict(token_pool, 0, 1)] == ["p2"]


def test_a_victim_keeps_its_lease_until_it_has_ended() -> None:
    token_pool = full()
    (record,) = evict(token_pool, 0, 1)
    assert record.evicted
    assert token_pool.pools[0].inflight == 5
    admission.settle(token_pool, record.id, 1, NOW_S + 10)
    assert token_pool.pools[0].inflight == 4
    assert record.id not in token_pool.pools[0].evictable
