"""The decision as a whole: its order, a known id, observe mode, transfers."""

from typing import Any

import pytest

from gateway.admission import admission, checks
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
