"""Who gives way: the least weight first, then the youngest; nobody is asked twice."""

import msgspec
import pytest

from gateway.admission import admission
from gateway.admission.admission import evict
from gateway.admission.token_pool import TokenPool
from tests.token_pools import NOW_S, entitled, granted, pool


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
