"""Buckets fill with time, hold no more than their depth, and borrow within bounds."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission import admission
from gateway.admission.terms import AdmissionRequest, Grant
from gateway.records.entitlement import OVERDUE_WEIGHT
from tests.token_pools import NOW_S, admit, denied, entitled, granted, pool


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


def test_a_clock_that_steps_back_takes_nothing_away() -> None:
    token_pool = pool(entitled(tokens_per_s=100.0))
    granted(token_pool, "a", estimate_tokens=900)
    grant = granted(token_pool, "b", estimate_tokens=50, at=NOW_S - 3)
    assert grant.level_tokens == 50
    assert granted(token_pool, "c", estimate_tokens=50, at=NOW_S).level_tokens == 0


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


def test_settling_gives_borrowed_tokens_back_to_the_surplus() -> None:
    token_pool = pool(entitled(service_class="spot"), slots=(8,), tokens_per_s=100.0)
    granted(token_pool, estimate_tokens=600)
    admission.settle(token_pool, "a", 100, NOW_S)
    assert token_pool.surplus == 900
    assert token_pool.own_served == 0


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


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 400), st.integers(0, 400), st.floats(0, 5)), max_size=40
    )
)
def test_debits_less_refunds_are_what_was_used(steps: list[tuple[int, int, float]]) -> None:
    token_pool = pool(entitled(tokens_per_s=50.0), slots=(100,), tokens_per_s=80.0)
    now_s = NOW_S
    for number, (estimate, used, passed_s) in enumerate(steps):
        now_s += passed_s
        lease_id = f"{number}"
        found = admission.admit(
            token_pool,
            AdmissionRequest(lease_id=lease_id, entitlement="e", pool=0, estimate_tokens=estimate),
            now_s,
            observe=False,
        )
        if isinstance(found, Grant):
            admission.resize(token_pool, lease_id, estimate + used // 3, 0, now_s)
            admission.settle(token_pool, lease_id, used if number % 3 else None, now_s)
    account = token_pool.accounts["e"]
    assert account.debited - account.refunded == account.used
    assert account.level <= token_pool.depth_tokens(account)
    assert token_pool.surplus <= token_pool.surplus_depth()


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
