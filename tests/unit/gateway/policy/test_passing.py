"""Leases entered as a sum change what a grant and a settlement each would have changed."""

import pytest

from gateway.policy import admission
from gateway.policy.ledger import TokenPool
from gateway.policy.passing import enter
from tests.token_pools import NOW_S, entitled, pool, request

LIFE_S = 0.5


def book(rate: float, level: float = 1_000.0) -> TokenPool:
    found = pool(entitled(limit=400, tokens_per_s=rate), slots=(800,), largest_tokens=4_000)
    found.accounts["e"].level, found.accounts["e"].level_s = level, NOW_S
    return found


def counted(found: TokenPool) -> dict[str, float]:
    account = found.accounts["e"]
    return {
        "total": account.total,
        "debited": account.debited,
        "refunded": account.refunded,
        "used": account.used,
        "level": account.level,
        "mean_cost": account.mean_cost,
        "served": account.served,
        "inflight_seconds": account.inflight_seconds,
        "kv_seconds": account.kv_seconds,
        "service_s": found.pools[0].service_s,
        "own_served": found.own_served,
        "settled": found.settled,
        "refunds": found.refunds,
    }


@pytest.mark.parametrize(("rate", "level"), [(0.0, 0.0), (40.0, 1_000.0), (40.0, 250.0)])
def test_one_sum_is_as_much_as_each_lease(rate: float, level: float) -> None:
    """Where the bucket holds all that was reserved, and where it does not."""
    each, summed = book(rate, level), book(rate, level)
    used = (100, 130, 60, None, 99)
    for number, tokens in enumerate(used):
        asked = request(f"{number}", kv_bytes=7)
        admission.admit(each, asked, NOW_S, observe=False, decided=True)
        admission.settle(each, f"{number}", tokens, NOW_S + LIFE_S)
        each.accounts["e"].since_s = NOW_S  # the next one lives at the same time
    leases = [(100, 1, 7, LIFE_S, None if n is None else (n, 0, 0)) for n in used]
    assert enter(summed, "e", 0, leases, NOW_S + LIFE_S) == 4
    assert counted(summed) == pytest.approx(counted(each))
    assert summed.active == each.active == {"e"}


def test_of_an_entitlement_that_is_no_more_nothing_is_entered() -> None:
    found = book(0.0)
    assert enter(found, "gone", 0, [(1, 1, 0, 0.0, None)], NOW_S) is None
    assert (found.settled, found.refunds) == (0, 0)


def test_leases_that_were_refunded_alone_take_nothing_from_the_bucket() -> None:
    found = book(40.0)
    assert enter(found, "e", 0, [(100, 1, 7, LIFE_S, None)] * 2, NOW_S) == 0
    account = found.accounts["e"]
    assert (account.level, account.debited, account.refunded) == (1_000.0, 200, 200)
    assert found.refunds == 2
