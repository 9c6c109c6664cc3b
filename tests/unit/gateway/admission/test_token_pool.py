"""The pool's own bookkeeping: reservations of dedicated baselines, the heap, the journal."""

from typing import Any

import msgspec
import pytest

from gateway.admission import admission, checks, debt
from gateway.admission.terms import Grant
from gateway.admission.token_pool import TokenPool
from gateway.records.entitlement import BURST_WEIGHT, OVERDUE_WEIGHT
from tests.token_pools import NOW_S, admit, denied, entitled, fill, granted, pool


def changed(token_pool: TokenPool, **terms: object) -> None:
    token_pool.change(msgspec.structs.replace(token_pool.terms, **terms))


def test_idle_dedicated_baseline_is_what_is_not_in_use() -> None:
    token_pool = pool(entitled(service_class="dedicated", baseline=3), slots=(8,))
    assert token_pool.pools[0].idle_dedicated == 3
    granted(token_pool, sequences=2)
    assert token_pool.pools[0].idle_dedicated == 1
    granted(token_pool, "b", sequences=2)
    assert token_pool.pools[0].idle_dedicated == 0
    for lease_id in "ab":
        admission.settle(token_pool, lease_id, 1, NOW_S)
    assert token_pool.pools[0].idle_dedicated == 3


def test_only_bound_dedicated_entitlements_reserve() -> None:
    token_pool = pool(
        entitled("x", "dedicated", baseline=1),
        entitled("y", "dedicated", baseline=2),
        entitled("z", "dedicated", baseline=4),
        slots=(8,),
    )
    for bound_until, reserved in ((1, 1), (2, 3), (0, 0), (1 << 53, 7), (2, 3)):
        changed(token_pool, bound_until=(bound_until,))
        assert token_pool.pools[0].idle_dedicated == reserved


def test_changing_class_or_suspending_gives_the_reservation_up() -> None:
    terms = entitled("x", "dedicated", baseline=2, created=1)
    token_pool = pool(terms)
    token_pool.define(msgspec.structs.replace(terms, suspended=True))
    assert token_pool.pools[0].idle_dedicated == 0
    token_pool.define(terms)
    assert token_pool.pools[0].idle_dedicated == 2
    token_pool.define(msgspec.structs.replace(terms, service_class="elastic"))
    assert token_pool.pools[0].idle_dedicated == 0
    assert token_pool.dedicated == set()


def test_an_entitlement_with_requests_in_flight_cannot_be_removed() -> None:
    token_pool = pool(entitled())
    granted(token_pool)
    with pytest.raises(ValueError, match="e has 1 sequences in flight"):
        token_pool.remove("e")
    admission.settle(token_pool, "a", 1, NOW_S)
    token_pool.remove("e")
    token_pool.remove("e")
    assert token_pool.accounts == {}


def test_new_terms_are_weighed_at_once() -> None:
    token_pool = pool(entitled(slo_ms=1000), mean_slo_ms=1000.0)
    before = token_pool.weight_now(token_pool.accounts["e"])
    changed(token_pool, mean_slo_ms=4000.0)
    assert token_pool.weight_now(token_pool.accounts["e"]) > before
    token_pool.define(entitled(slo_ms=100))
    assert token_pool.weight_now(token_pool.accounts["e"]) == pytest.approx(100 / 1.05)


def test_the_surplus_follows_the_capacity_before_the_next_tick() -> None:
    token_pool = pool(tokens_per_s=100.0)
    token_pool.surplus_per_s = 30.0
    for tokens_per_s, left in ((150.0, 80.0), (0.0, 0.0), (100.0, 100.0)):
        changed(token_pool, tokens_per_s=tokens_per_s)
        assert token_pool.surplus_per_s == left


def test_weights_hold_the_leases_in_force_and_no_others() -> None:
    token_pool = pool(entitled(), slots=(4, 4))
    granted(token_pool, "stays")
    for number in range(1000):
        granted(token_pool, f"{number}")
        admission.settle(token_pool, f"{number}", 1, NOW_S)
    assert list(token_pool.pools[0].weights) == [token_pool.leases["stays"].weight]
    assert checks.min_weight(token_pool, 0) == token_pool.leases["stays"].weight


# -- buckets fill with time, hold no more than their depth, and borrow within bounds


@pytest.mark.parametrize(
    ("terms", "largest", "depth"),
    [
        ({"tokens_per_s": 100.0, "limit": 3}, 0, 1000),
        ({"tokens_per_s": 100.0, "limit": 30}, 0, 1500),
        ({"tokens_per_s": 100.0}, 0, 1000),
        ({"tokens_per_s": 100.0, "limit": 3}, 4096, 4096),
        ({"service_class": "guaranteed", "tokens_per_s": 10.0, "baseline": (5, 7)}, 0, 600),
        ({"tokens_per_s": 1.0}, 0, 400),
    ],
)
def test_depth_is_ten_seconds_the_sequences_cost_or_the_largest_request(
    terms: dict[str, object], largest: int, depth: float
) -> None:
    token_pool = pool(entitled(**terms), slots=(4, 4), largest_tokens=largest)  # type: ignore[arg-type]
    token_pool.accounts["e"].mean_cost = 50.0
    assert token_pool.depth_tokens(token_pool.accounts["e"]) == depth


def test_the_first_settlement_is_the_mean_cost_and_later_ones_move_it() -> None:
    token_pool = pool(entitled(), slots=(8,))
    for lease_id, used in (("a", 200), ("b", 100)):
        granted(token_pool, lease_id)
        admission.settle(token_pool, lease_id, used, NOW_S)
    assert token_pool.accounts["e"].mean_cost == pytest.approx(190)


def test_what_was_used_beyond_the_reserve_is_owed_in_full() -> None:
    token_pool = pool(entitled(tokens_per_s=100.0, tokens_per_s_limit=100.0))
    granted(token_pool)
    admission.settle(token_pool, "a", 50_000, NOW_S)
    account = token_pool.accounts["e"]
    assert account.level == -49_000
    assert (account.debited, account.refunded, account.used) == (50_000, 0, 50_000)
    assert denied(token_pool, "b", at=NOW_S + 490).reason == "tokens"
    assert granted(token_pool, "b", at=NOW_S + 491).level_tokens == 0


@pytest.mark.parametrize(("service_class", "rate"), [("elastic", 100.0), ("spot", 0.0)])
def test_short_answers_before_long_ones_take_no_more_than_the_rate(
    service_class: str, rate: float
) -> None:
    """The short ones make the bucket shallow; then it runs over by far more than it holds."""
    greedy = entitled(
        "e",
        service_class,  # type: ignore[arg-type]
        tokens_per_s=rate,
        tokens_per_s_limit=rate,
        limit=16,
    )
    token_pool = pool(greedy, slots=(64,), tokens_per_s=0.0 if rate else 100.0)
    now_s, most_depth = NOW_S, 0.0
    for turn in range(60):
        for number in range(100):
            if isinstance(admit(token_pool, f"s{number}", at=now_s, estimate_tokens=50), Grant):
                admission.settle(token_pool, f"s{number}", 5, now_s)
        long = [f"{turn}.{number}" for number in range(16)]
        for lease_id in long:
            admit(token_pool, lease_id, at=now_s, estimate_tokens=50)
        for lease_id in long:
            admission.resize(token_pool, lease_id, 2_000, 0, now_s + 8)  # as it streams
        for lease_id in long:
            admission.settle(token_pool, lease_id, 2_000, now_s + 8)
        account = token_pool.accounts["e"]
        depth = token_pool.depth_tokens(account) if rate else token_pool.surplus_depth()
        most_depth = max(most_depth, depth)
        now_s += 20
    in_flight = 16 * 2_000  # its limit: what is in flight is not cut off
    assert account.used <= 100 * (now_s - NOW_S) + most_depth + in_flight


def test_who_owes_pays_before_it_borrows() -> None:
    token_pool = pool(entitled(tokens_per_s=10.0), slots=(8,), tokens_per_s=100.0)
    granted(token_pool)
    admission.settle(token_pool, "a", 130, NOW_S)
    assert denied(token_pool, "b", estimate_tokens=20, at=NOW_S + 2).reason == "tokens"
    assert granted(token_pool, "b", estimate_tokens=20, at=NOW_S + 3).funded == "surplus"


def test_the_depth_follows_the_cost_of_a_sequence_however_many_a_request_has() -> None:
    depths = []
    for sequences in (1, 64):
        token_pool = pool(entitled(tokens_per_s=1.0, limit=64), slots=(65,), largest_tokens=50_000)
        granted(token_pool, sequences=sequences)
        admission.settle(token_pool, "a", 1_000 * sequences, NOW_S)
        depths.append(token_pool.depth_tokens(token_pool.accounts["e"]))
    assert depths[0] == depths[1] == 64_000


@pytest.mark.parametrize("service_class", ["dedicated", "elastic", "spot"])
def test_these_classes_borrow_what_the_pool_has_left(service_class: str) -> None:
    borrower = entitled(service_class=service_class, tokens_per_s=10.0)  # type: ignore[arg-type]
    token_pool = pool(borrower, slots=(8,), tokens_per_s=100.0)
    assert granted(token_pool, "a", estimate_tokens=100).funded == "own"
    assert granted(token_pool, "b", estimate_tokens=100).funded == "surplus"
    assert token_pool.surplus == 900


@pytest.mark.parametrize("service_class", ["guaranteed", "preemptible"])
def test_these_do_not(service_class: str) -> None:
    terms = entitled(
        service_class=service_class,  # type: ignore[arg-type]
        tokens_per_s=10.0,
        baseline=8,
    )
    token_pool = pool(terms, slots=(8,), tokens_per_s=100.0)
    granted(token_pool, "a", estimate_tokens=100)
    assert denied(token_pool, "b").reason == "tokens"


def test_borrowing_has_a_limit_of_its_own_that_drains() -> None:
    terms = entitled(tokens_per_s=10.0, tokens_per_s_limit=20.0)
    token_pool = pool(terms, slots=(8,), tokens_per_s=100.0)
    granted(token_pool, "a", estimate_tokens=100)
    assert granted(token_pool, "b", estimate_tokens=80).funded == "surplus"
    assert denied(token_pool, "c", estimate_tokens=30).reason == "tokens"
    assert granted(token_pool, "d", estimate_tokens=30, at=NOW_S + 1).funded == "surplus"


def test_what_no_bucket_pays_for_is_taken_from_the_surplus_s_refill() -> None:
    token_pool = pool(entitled("p", "preemptible"), entitled("e", tokens_per_s=9.0), slots=(8,))
    for lease_id, name in (("a", "p"), ("b", "e")):
        granted(token_pool, lease_id, name, estimate_tokens=50)
        admission.settle(token_pool, lease_id, 40, NOW_S)
    assert token_pool.own_served == 80


def test_the_surplus_holds_the_largest_request_at_least() -> None:
    assert pool(tokens_per_s=10.0, largest_tokens=4096).surplus_depth() == 4096
    assert pool(tokens_per_s=1000.0, largest_tokens=4096).surplus_depth() == 10_000
    assert pool(largest_tokens=4096).surplus_depth() == 0


@pytest.mark.parametrize(
    ("debt", "inflight", "terms", "overdue"),
    [
        (0.95, 0, {"baseline": 2}, True),
        (0.85, 0, {"baseline": 2}, False),
        (0.95, 1, {"baseline": 2}, False),
        (0.95, 0, {}, False),
    ],
)
def test_who_is_owed_much_and_has_nothing_in_flight_comes_first_of_its_class(
    debt: float, inflight: int, terms: dict[str, int], *, overdue: bool
) -> None:
    token_pool = pool(entitled("e", "elastic", slo_ms=60_000, tokens_per_s=1.0, **terms))
    token_pool.terms = msgspec.structs.replace(token_pool.terms, mean_slo_ms=1_000.0)
    account = token_pool.accounts["e"]
    account.debt, account.total = debt, inflight
    assert (token_pool.weight_now(account) == OVERDUE_WEIGHT) is overdue


# -- who asks for more than its token rate or KV gets what nobody else uses, and nothing beyond


GREEDY = entitled("greedy", tokens_per_s=100.0)
PATIENT = entitled("patient", tokens_per_s=100.0)
SPOT = entitled("spot", "spot")
FIRM = entitled("firm", "guaranteed", baseline=2)


@pytest.mark.parametrize("service_class", ["dedicated", "elastic", "spot"])
def test_on_an_idle_pool_nobody_is_refused_for_its_rate(service_class: Any) -> None:
    """Ten times its rate, for a minute, and the answers are longer than was reserved."""
    token_pool = pool(entitled("e", service_class, tokens_per_s=100.0, baseline=4), slots=(64,))
    for number in range(600):
        now_s = NOW_S + number / 10
        granted(token_pool, f"{number}", at=now_s)
        if number >= 20:
            admission.settle(token_pool, f"{number - 20}", 150, now_s)
    assert token_pool.accounts["e"].used == 580 * 150


def test_beyond_the_rate_the_headroom_stays_free() -> None:
    token_pool = pool(GREEDY, slots=(8,))
    granted(token_pool, "own", "greedy", estimate_tokens=1000)
    fill(token_pool, "greedy", 6)
    denial = denied(token_pool, "x", "greedy")
    assert (denial.reason, denial.wait_s, denial.limit) == ("tokens", 1, 1000)


def test_who_is_within_its_rate_passes_bursts_and_has_what_comes_free() -> None:
    token_pool = pool(GREEDY, PATIENT, slots=(8,), headroom=0)
    granted(token_pool, "own", "greedy", estimate_tokens=1000)
    fill(token_pool, "greedy", 7)
    assert checks.min_weight(token_pool, 0) == BURST_WEIGHT
    assert granted(token_pool, "p", "patient").contended
    assert denied(token_pool, "q", "patient").reason == "priority"
    for number in range(4):
        admission.settle(token_pool, f"greedy{number}", 100, NOW_S)
    assert denied(token_pool, "x", "greedy").reason == "tokens"
    fill(token_pool, "patient", 3)
    for tick in (1, 2):  # until nobody was refused for a whole tick
        debt.close(token_pool, 5.0, NOW_S + 5 * tick)
    admission.settle(token_pool, "p", 100, NOW_S)
    granted(token_pool, "y", "greedy", estimate_tokens=1000)


def test_reserves_come_before_bursts_and_spot_after() -> None:
    token_pool = pool(FIRM, GREEDY, SPOT, slots=(8,), headroom=0)
    granted(token_pool, "own", "greedy", estimate_tokens=1000)
    fill(token_pool, "spot", 6)
    granted(token_pool, "last", "greedy")
    assert denied(token_pool, "s", "spot").reason == "priority"
    assert granted(token_pool, "over", "greedy").contended  # outranks spot, up to the overshoot
    assert denied(token_pool, "x", "greedy").reason == "tokens"
    assert granted(token_pool, "f", "firm").protected


def test_a_dedicated_reserve_that_nobody_else_may_use_is_used_beyond_the_rate() -> None:
    dedicated = entitled("d", "dedicated", baseline=2, tokens_per_s=10.0)
    token_pool = pool(dedicated, entitled(baseline=2), slots=(4,), headroom=0)
    fill(token_pool, "e", 2)
    granted(token_pool, "own", "d", estimate_tokens=100)
    assert granted(token_pool, "beyond", "d", estimate_tokens=100).protected


@pytest.mark.parametrize("rate", [10.0, 0.0])
def test_a_limit_of_the_rate_binds_on_an_idle_pool_too(rate: float) -> None:
    limited = entitled(tokens_per_s=rate, tokens_per_s_limit=20.0)
    token_pool = pool(limited, slots=(64,))
    spent, refused = 0, 0
    for number in range(600):
        now_s = NOW_S + number / 10
        if isinstance(admit(token_pool, f"{number}", at=now_s, estimate_tokens=20), Grant):
            admission.settle(token_pool, f"{number}", 20, now_s)
            spent += 20
        else:
            refused += 1
    assert 60 * 20 <= spent <= 60 * 20 + 10 * 20
    assert refused


def test_a_refusal_for_that_limit_waits_until_it_has_drained() -> None:
    token_pool = pool(entitled(tokens_per_s_limit=20.0), slots=(64,))
    granted(token_pool, estimate_tokens=200)
    denial = denied(token_pool, "b", estimate_tokens=40)
    assert (denial.wait_s, denial.limit, denial.used) == (2, 200, 200)
    granted(token_pool, "c", estimate_tokens=40, at=NOW_S + 2)


def test_kv_beyond_the_baseline_is_used_while_the_pool_has_it() -> None:
    token_pool = pool(entitled(kv_bytes=100), FIRM, slots=(8,), kv_bytes=(1000,))
    granted(token_pool, "a", kv_bytes=600)
    granted(token_pool, "b", kv_bytes=400)
    assert denied(token_pool, "c", kv_bytes=1).of_pool
    assert granted(token_pool, "f", "firm", kv_bytes=100).protected


@pytest.mark.parametrize(
    ("terms", "rate", "counts"),
    [
        ({"tokens_per_s": 100.0}, 100.0, True),
        ({"tokens_per_s": 100.0, "tokens_per_s_limit": 100.0}, 100.0, False),
        ({"service_class": "guaranteed", "tokens_per_s": 100.0, "baseline": 8}, 100.0, False),
        ({"service_class": "spot"}, 100.0, True),
        ({"limit": 1}, 0.0, False),
    ],
)
def test_a_refusal_that_more_workers_would_avoid_counts_as_demand(
    terms: dict[str, Any], rate: float, counts: bool
) -> None:
    token_pool = pool(entitled(**terms), slots=(8,), tokens_per_s=rate)
    token_pool.surplus = 1000.0
    while isinstance(admit(token_pool, f"{len(token_pool.leases)}", estimate_tokens=500), Grant):
        pass
    state = token_pool.pools[0]
    assert (state.refused_sequences, state.refused_tokens) == ((1, 500) if counts else (0, 0))
