"""The decision as a whole: its order, a known id, observe mode, transfers."""

from typing import Any

import pytest

from gateway.policy.admission import admission
from tests.token_pools import NOW_S, admit, denied, entitled, granted, pool


def test_a_known_id_gets_its_earlier_decision_and_counts_once() -> None:
    book = pool(entitled(tokens_per_s=100.0), slots=(4, 4))
    first = granted(book, sequences=2)
    again = granted(book, sequences=1, pool=1, estimate_tokens=7)
    assert (again.pool, again.weight, again.funded) == (first.pool, first.weight, first.funded)
    assert (book.accounts["e"].total, book.accounts["e"].debited) == (2, 100)


def test_a_denial_takes_nothing() -> None:
    book = pool(entitled(tokens_per_s=100.0, limit=1, kv_bytes=50))
    granted(book, kv_bytes=50)
    account = book.accounts["e"]
    before = (account.level, account.debited, account.total, account.kv_bytes)
    asked: list[dict[str, Any]] = [{}, {"kv_bytes": 9}, {"estimate_tokens": 1000}]
    for number, more in enumerate(asked):
        denied(book, f"{number}", **more)
    assert (account.level, account.debited, account.total, account.kv_bytes) == before
    assert list(book.leases) == ["a"]


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
    tight = entitled(tokens_per_s=100.0, limit=2, kv_bytes=10)
    book = pool(tight, entitled("g", "guaranteed", baseline=4))
    granted(book, "a", estimate_tokens=500, kv_bytes=5)
    for number in range(3):
        granted(book, f"g{number}", "g")
    assert denied(book, "b", **asked).reason == reason


def test_a_grant_tells_the_limits_that_are_left() -> None:
    book = pool(entitled(tokens_per_s=100.0, limit=3))
    grant = granted(book, sequences=2)
    assert (grant.limit_sequences, grant.inflight_sequences) == (3, 2)
    assert (grant.depth_tokens, grant.level_tokens, grant.rate_tokens_per_s) == (1000, 900, 100)
    assert grant.service_s == 5.0


def test_a_guaranteed_grant_tells_its_pool_s_baseline() -> None:
    book = pool(entitled(service_class="guaranteed", baseline=(3, 1)), slots=(4, 4))
    grant = granted(book)
    assert (grant.limit_sequences, grant.inflight_sequences, grant.protected) == (3, 1, True)


@pytest.mark.parametrize("whose", ["model", "entitlement"])
def test_observing_notes_a_denial_and_lets_it_in(whose: str) -> None:
    book = pool(entitled(limit=1, tokens_per_s=100.0, observe=whose == "entitlement"))
    granted(book)
    grant = granted(book, "b", estimate_tokens=950, observe=whose == "model")
    assert grant.would_deny == "concurrency"
    assert book.accounts["e"].total == 2
    assert admission.settle(book, "b", 950, NOW_S)
    assert book.accounts["e"].level == 900


def test_observing_says_as_often_as_enforcing_would_that_the_bucket_is_empty() -> None:
    """What would have been refused would not have been paid for either."""
    book = pool(entitled(tokens_per_s=100.0))
    said = []
    for second in range(20):
        now_s = NOW_S + second
        grant = granted(book, f"{second}", estimate_tokens=300, at=now_s, observe=True)
        admission.settle(book, f"{second}", 300, now_s)
        said.append(grant.would_deny)
    assert said.count("tokens") == 11  # 9 x 300 of 1,000 + 19 x 100
    assert book.accounts["e"].level >= 0


def test_observing_knows_no_unknown_entitlements() -> None:
    assert denied(pool(), observe=True).reason == "entitlement_unknown"


def test_a_forced_transfer_moves_whatever_the_other_pool_holds() -> None:
    book = pool(entitled(), slots=(4, 1))
    granted(book, "a", kv_bytes=7)
    granted(book, "b", pool=1, observe=True)
    assert admission.transfer(book, "a", 1, NOW_S, force=True) is None
    assert [p.inflight for p in book.pools] == [0, 2]
    assert [p.kv_bytes for p in book.pools] == [0, 7]
    assert book.accounts["e"].inflight == [0, 2]


def test_an_unforced_transfer_goes_only_where_it_would_be_admitted() -> None:
    book = pool(entitled(baseline=(4, 4)), entitled("s", "spot"), slots=(4, 1), headroom=0)
    granted(book, "a", "s")
    granted(book, "b", pool=1)
    denial = admission.transfer(book, "a", 1, NOW_S, force=False)
    assert denial is not None
    assert denial.reason == "priority"
    assert (book.leases["a"].pool, book.pools[0].inflight) == (0, 1)
    assert admission.least_weight(book, 0) == book.leases["a"].weight
    admission.settle(book, "b", 1, NOW_S)
    assert admission.transfer(book, "a", 1, NOW_S, force=False) is None
    assert book.leases["a"].pool == 1


def test_a_transfer_that_is_denied_is_no_refusal_to_remember() -> None:
    """The request goes on where it is: nobody was underserved, nobody has to wait."""
    book = pool(entitled(baseline=(4, 0)), slots=(4, 0))
    granted(book)
    assert admission.transfer(book, "a", 1, NOW_S, force=False) is not None
    assert (book.priority_denials, book.accounts["e"].denied, book.pools[1].denied) == (0, 0, 0)


def test_an_unforced_transfer_keeps_a_guaranteed_baseline_pool_by_pool() -> None:
    book = pool(entitled(service_class="guaranteed", baseline=(2, 1)), slots=(4, 8))
    granted(book, "a")
    granted(book, "b", pool=1)
    denial = admission.transfer(book, "a", 1, NOW_S, force=False)
    assert denial is not None
    assert (denial.reason, denial.limit) == ("concurrency", 1)


def test_transferring_nowhere_or_nothing_is_no_denial() -> None:
    book = pool(entitled(), slots=(4, 4))
    granted(book)
    assert admission.transfer(book, "a", 0, NOW_S, force=False) is None
    assert admission.transfer(book, "gone", 1, NOW_S, force=False) is None
    assert book.pools[0].inflight == 1


def test_admit_gives_the_same_for_the_same_history() -> None:
    def history() -> list[object]:
        book = pool(entitled(tokens_per_s=50.0, limit=3), entitled("s", "spot"), slots=(3,))
        return [admit(book, f"{n}", "es"[n % 2], at=NOW_S + n / 3) for n in range(30)]

    assert history() == history()
