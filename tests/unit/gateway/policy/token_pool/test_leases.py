"""A lease ends once: settled, refunded or expired; late usage replaces an estimate once."""

import pytest

from gateway.policy.admission import admission
from gateway.policy.token_pool.token_pool import LEASE_TTL_S, REAPED_AT_ONCE, TOMBSTONES
from tests.token_pools import NOW_S, entitled, granted, pool

LATE_S = NOW_S + LEASE_TTL_S


def test_settling_gives_back_what_the_grant_took() -> None:
    book = pool(entitled(tokens_per_s=100.0), slots=(8,))
    granted(book, sequences=3, kv_bytes=500, estimate_tokens=400)
    assert admission.settle(book, "a", 250, NOW_S)
    account = book.accounts["e"]
    assert (account.total, account.kv_bytes, account.inflight) == (0, 0, [0])
    assert (account.debited, account.refunded, account.used, account.served) == (400, 150, 250, 250)
    assert account.level == 750
    assert (book.pools[0].inflight, book.pools[0].kv_bytes, book.settled) == (0, 0, 1)


def test_a_full_refund_teaches_nothing() -> None:
    book = pool(entitled(tokens_per_s=100.0))
    granted(book)
    admission.settle(book, "a", None, NOW_S + 3)
    account = book.accounts["e"]
    assert (account.level, account.served, account.mean_cost) == (1000, 0, 0)
    assert (account.debited, account.refunded, account.used) == (100, 100, 0)
    assert (book.refunds, book.settled, book.pools[0].service_s) == (1, 0, 5.0)


def test_settling_twice_counts_once() -> None:
    book = pool(entitled())
    granted(book)
    assert admission.settle(book, "a", 100, NOW_S)
    assert not admission.settle(book, "a", 100, NOW_S)
    assert not admission.settle(book, "never", 100, NOW_S)
    assert (book.accounts["e"].used, book.accounts["e"].total) == (100, 0)


def test_service_time_is_a_moving_mean_of_leases_lives() -> None:
    book = pool(entitled())
    granted(book)
    admission.settle(book, "a", 100, NOW_S + 15)
    assert book.pools[0].service_s == pytest.approx(6.0)


def test_a_lease_expires_after_its_time_and_is_charged_its_estimate() -> None:
    book = pool(entitled(tokens_per_s=10.0))
    granted(book)
    assert admission.reap(book, LATE_S - 0.1) == 0
    assert admission.reap(book, LATE_S) == 1
    account = book.accounts["e"]
    assert (account.total, account.used, account.served) == (0, 100, 100)
    assert book.pools[0].inflight == 0


def test_late_usage_replaces_the_estimate_once_and_touches_no_counter() -> None:
    book = pool(entitled(tokens_per_s=100.0), slots=(8,))
    granted(book)
    admission.reap(book, LATE_S)
    granted(book, "b", at=LATE_S)
    for _ in range(2):
        assert not admission.settle(book, "a", 30, LATE_S)
    account = book.accounts["e"]
    assert (account.total, account.used) == (1, 30)
    assert account.debited - account.refunded == account.used + 100


def test_late_news_that_nothing_was_used_refunds_the_estimate() -> None:
    book = pool(entitled())
    granted(book)
    admission.reap(book, LATE_S)
    admission.settle(book, "a", None, LATE_S)
    account = book.accounts["e"]
    assert (account.debited, account.refunded, account.used) == (100, 100, 0)


def test_late_usage_of_a_removed_entitlement_is_nobody_s() -> None:
    book = pool(entitled())
    granted(book)
    admission.reap(book, LATE_S)
    book.remove("e")
    assert not admission.settle(book, "a", 30, LATE_S)


def test_renewing_keeps_a_lease_and_its_place_in_the_order_of_expiry() -> None:
    book = pool(entitled(), slots=(8,))
    granted(book, "a")
    granted(book, "b", at=NOW_S + 1)
    assert admission.renew(book, "a", NOW_S + 10)
    assert not admission.renew(book, "gone", NOW_S + 10)
    assert admission.reap(book, LATE_S + 1) == 1
    assert list(book.leases) == ["a"]
    assert admission.reap(book, LATE_S + 10) == 1


def test_admission_reaps_first_and_so_many_at_once() -> None:
    count = REAPED_AT_ONCE + 5
    book = pool(entitled(baseline=count), slots=(count,))
    for number in range(count):
        granted(book, f"{number}")
    granted(book, "x", at=LATE_S)
    assert book.pools[0].inflight == 5 + 1
    granted(book, "y", at=LATE_S)
    assert book.pools[0].inflight == 2


def test_only_so_many_expired_leases_are_remembered() -> None:
    book = pool(entitled())
    book.tombstones = {f"old{n}": ("e", 1, "none") for n in range(TOMBSTONES)}
    granted(book)
    admission.reap(book, LATE_S)
    assert len(book.tombstones) == TOMBSTONES
    assert "old0" not in book.tombstones
    assert "a" in book.tombstones


def test_resizing_down_gives_back_and_up_takes_more() -> None:
    book = pool(entitled(tokens_per_s=100.0))
    granted(book, estimate_tokens=400, kv_bytes=40)
    admission.resize(book, "a", 150, 15, NOW_S)
    account = book.accounts["e"]
    assert (account.level, account.kv_bytes, book.pools[0].kv_bytes) == (850, 15, 15)
    admission.resize(book, "a", 2000, 200, NOW_S)
    assert (account.level, account.kv_bytes) == (-1000, 200)
    admission.settle(book, "a", 2000, NOW_S)
    assert (account.debited, account.refunded, account.used) == (2250, 250, 2000)


def test_a_lease_that_is_gone_is_not_resized() -> None:
    assert not admission.resize(pool(entitled()), "a", 5, 5, NOW_S)
