"""A lease ends once: settled, refunded or expired; late usage replaces an estimate once."""

import pytest

from gateway.admission import admission
from gateway.admission.token_pool import LEASE_TTL_S, REAP_BATCH, TOMBSTONES
from tests.token_pools import NOW_S, entitled, granted, pool

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


def test_late_news_that_nothing_was_used_refunds_the_estimate() -> None:
    token_pool = pool(entitled())
    granted(token_pool)
    admission.reap(token_pool, LATE_S)
    admission.settle(token_pool, "a", None, LATE_S)
    account = token_pool.accounts["e"]
    assert (account.debited, account.refunded, account.used) == (100, 100, 0)


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
