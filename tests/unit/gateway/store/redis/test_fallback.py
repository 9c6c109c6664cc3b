"""What a process remembers of Redis, and hands its share when Redis goes away."""

import msgspec
import pytest

from gateway.admission import admission
from gateway.admission.terms import AdmissionRequest, Grant
from gateway.admission.token_pool import TokenPool
from gateway.records.lease import Lease
from gateway.records.limit import Holding, Limit, LimitUse
from gateway.store.redis.fallback import (
    KnownLimits,
    note_charge,
    note_decision,
    note_view,
    share_of,
    take_back,
)
from gateway.store.redis.lease_codec import NOTHING, RedisLease
from tests.token_pools import NOW_S, denied, entitled, granted, pool

RATE = 10.0
DEPTH = 100
LATER_S = NOW_S + 1


def known() -> TokenPool:
    """The book of a process whose model is in Redis."""
    return pool(entitled(tokens_per_s=RATE, tokens_per_s_limit=RATE, limit=4), slots=(12,))


def kept_of(token_pool: TokenPool, lease_id: str, found: Grant) -> RedisLease:
    record = token_pool.leases[lease_id]
    lease = Lease(
        id=lease_id,
        model="m",
        entitlement=record.entitlement,
        pool=0,
        cost_tokens=record.estimate_tokens,
        sequences=1,
        issued_unix_s=NOW_S,
        spilled=False,
    )
    return RedisLease(lease, record, gives_way=False)


def level_of(token_pool: TokenPool, at: float = NOW_S) -> float:
    """By how much a share of one decides."""
    share = share_of(token_pool, (), 1, at)
    return share.accounts["e"].level


def test_a_grant_says_what_is_left_and_it_fills_again() -> None:
    redis, token_pool = known(), known()
    note_decision(token_pool, "e", 70, granted(redis, estimate_tokens=70), NOW_S)
    assert level_of(token_pool) == 30
    assert level_of(token_pool, LATER_S) == 30 + RATE


def test_a_refusal_says_what_is_left() -> None:
    redis, token_pool = known(), known()
    granted(redis, estimate_tokens=95)
    note_decision(token_pool, "e", 20, denied(redis, "b", estimate_tokens=20), NOW_S)
    assert level_of(token_pool) == 5


def test_counters_that_were_read_say_what_is_left() -> None:
    redis, token_pool = known(), known()
    granted(redis, estimate_tokens=90)
    note_view(token_pool, redis, LATER_S, NOW_S)
    assert level_of(token_pool) == 10 + RATE


def test_what_leases_cost_on_average_deepens_a_bucket() -> None:
    redis, token_pool = known(), known()
    redis.accounts["e"].mean_cost = 50.0
    granted(redis, estimate_tokens=90)
    note_view(token_pool, redis, NOW_S, NOW_S)
    share = share_of(token_pool, (), 2, NOW_S)
    assert redis.depth_tokens(redis.accounts["e"]) == 4 * 50
    assert share.depth_tokens(share.accounts["e"]) == 4 * 50 / 2


@pytest.mark.parametrize("left", [-150, 0, 70, 100])
def test_what_a_lease_costs_is_known_at_once_and_shares_add_up_to_what_is_left(left: int) -> None:
    redis, token_pool = known(), known()
    grant = granted(redis, estimate_tokens=60)
    note_decision(token_pool, "e", 60, grant, NOW_S)
    note_charge(token_pool, kept_of(redis, "a", grant), DEPTH - left, NOW_S)
    assert share_of(token_pool, (), 4, NOW_S).accounts["e"].level == left / 4


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_what_a_share_used_is_missing_in_the_next(replicas: int) -> None:
    token_pool = known()
    share = share_of(token_pool, (), replicas, NOW_S)
    ask = AdmissionRequest(lease_id="a", entitlement="e", pool=0, estimate_tokens=DEPTH // replicas)
    assert isinstance(admission.admit(share, ask, NOW_S, observe=False), Grant)
    take_back(token_pool, share, replicas)
    assert share_of(token_pool, (), replicas, NOW_S).accounts["e"].level < 1
    later = share_of(token_pool, (), replicas, LATER_S)
    assert later.accounts["e"].level == pytest.approx(RATE / replicas, abs=1)


def test_a_lease_that_the_surplus_paid_is_paid_back_there() -> None:
    terms = entitled(tokens_per_s=RATE, tokens_per_s_limit=2 * RATE)
    redis = pool(terms, tokens_per_s=100.0)
    token_pool = pool(terms, tokens_per_s=100.0)
    own = granted(redis, "a", estimate_tokens=60)
    lent = granted(redis, "b", estimate_tokens=60)
    assert (own.funded, lent.funded) == ("own", "surplus")
    note_decision(token_pool, "e", 60, own, NOW_S)
    note_decision(token_pool, "e", 60, lent, NOW_S)
    assert token_pool.surplus_level(NOW_S) == 1000 - 60
    assert token_pool.accounts["e"].borrowed == 60
    share = share_of(token_pool, [kept_of(redis, "b", lent)], 2, NOW_S)
    assert (share.surplus, share.accounts["e"].level) == ((1000 - 60) / 2, 40 / 2)
    admission.settle(share, "b", 0, NOW_S)
    assert (share.surplus, share.accounts["e"].level) == (500, 40 / 2)
    take_back(token_pool, share, 2)
    assert (token_pool.surplus_level(NOW_S), token_pool.accounts["e"].borrowed) == (1000, 0)


def test_the_surplus_is_as_it_was_read() -> None:
    redis, token_pool = pool(tokens_per_s=100.0), pool(tokens_per_s=100.0)
    redis.surplus, redis.surplus_s, redis.surplus_per_s = 200.0, NOW_S, 50.0
    note_view(token_pool, redis, LATER_S, NOW_S)
    share = share_of(token_pool, (), 2, NOW_S)
    assert (share.surplus, share.surplus_per_s) == (250 / 2, 25)


DAY_S = 86_400
LIMITS = [
    Limit(id=name, scope="tenant", name="t", unit="tokens", amount=1_000, window="day")
    for name in ("tenant:stays:tokens:day", "tenant:goes:tokens:day")
]


def told(known_limits: KnownLimits, used: int = 70) -> None:
    """A request holds 10 tokens of each limit, of which so many are used."""
    held = tuple(Holding(limit.id, "tokens", NOW_S, 10) for limit in LIMITS)
    uses = tuple(LimitUse(used, 1_000, False) for _ in LIMITS)
    found = msgspec.structs.replace(granted(pool(entitled())), held=held, uses=uses)
    known_limits.note(LIMITS, found, NOW_S)


def test_a_limit_that_nobody_defines_is_forgotten_once_its_window_is_over() -> None:
    found = KnownLimits()
    found.encoder.asked(LIMITS, NOTHING, NOW_S, "hash")
    stays, goes = (limit.id for limit in LIMITS)
    told(found)
    for days, known in ((1, {stays, goes}), (3, {stays})):
        found.sweep(stays.__eq__, NOW_S + days * DAY_S)
        assert set(found.begin("m", (), 1).counters) == known
        found.end("m")
    assert set(found.encoder._encoded) == {stays}


def test_what_redis_told_one_model_counts_more_than_what_another_decided_meanwhile() -> None:
    found = KnownLimits()
    told(found)
    share = found.begin("away", (), 2)
    assert [counter.spent for counter in share.counters.values()] == [[35], [35]]
    share.counter(LIMITS[0].id).spent = [50]
    share.counter(LIMITS[1].id).spent = [50]
    told(found, 80)
    found.end("away")
    assert [c.spent for c in found.begin("m", (), 1).counters.values()] == [[80], [80]]
