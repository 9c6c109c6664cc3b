"""Waits are honest: what was promised before is counted, and nobody is told the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission import admission
from gateway.admission.denials import retry_after_s
from gateway.admission.terms import AdmissionRequest, Grant
from gateway.admission.token_pool import RecentDenials
from tests.token_pools import NOW_S, denied, entitled, granted, pool


def test_a_refusal_for_tokens_waits_for_what_is_short() -> None:
    token_pool = pool(entitled(tokens_per_s=100.0, tokens_per_s_limit=100.0))
    granted(token_pool, estimate_tokens=900)
    denial = denied(token_pool, "b", estimate_tokens=400)
    assert denial.reason == "tokens"
    assert denial.wait_s == pytest.approx(3.0)
    assert (denial.limit, denial.used, denial.requested) == (1000, 900, 400)


def test_the_next_one_is_told_to_wait_for_the_one_before_too() -> None:
    token_pool = pool(entitled(tokens_per_s=100.0, tokens_per_s_limit=100.0))
    granted(token_pool, estimate_tokens=1000)
    waits = [denied(token_pool, f"{n}", estimate_tokens=200).wait_s for n in range(4)]
    assert waits == pytest.approx([2, 4, 6, 8])
    assert denied(token_pool, "x", estimate_tokens=200, at=NOW_S + 1).wait_s == pytest.approx(8)


def test_promises_drain_and_are_never_more_than_what_is_told() -> None:
    token_pool = pool(entitled(tokens_per_s=10.0, tokens_per_s_limit=10.0))
    granted(token_pool, estimate_tokens=100)
    for number in range(500):
        denied(token_pool, f"{number}", estimate_tokens=100)
    assert token_pool.accounts["e"].promised == 600
    granted(token_pool, "y", estimate_tokens=100, at=NOW_S + 61)
    assert denied(token_pool, "z", estimate_tokens=100, at=NOW_S + 61).wait_s == pytest.approx(10)


@pytest.mark.parametrize("times", [1.5, 2, 3, 5])
def test_two_retries_complete_a_burst(times: float) -> None:
    """Everybody comes back once told, twice at most, as the official client does."""
    token_pool = pool(entitled(tokens_per_s=100.0, tokens_per_s_limit=100.0), slots=(10_000,))
    burst = [(0.0, f"{n}", 0) for n in range(int(times * 10))]
    served = 0
    while burst:
        burst.sort()
        at_s, name, tries = burst.pop(0)
        found = admission.admit(
            token_pool,
            AdmissionRequest(lease_id=name, entitlement="e", pool=0, estimate_tokens=100),
            NOW_S + at_s,
            observe=False,
        )
        if isinstance(found, Grant):
            served += 1
            admission.settle(token_pool, name, 100, NOW_S + at_s)
        elif tries < 2:
            burst.append((at_s + retry_after_s(found.wait_s, 0.0), name, tries + 1))
    assert served == int(times * 10)


def test_a_refusal_for_concurrency_waits_for_one_of_its_own_to_end() -> None:
    token_pool = pool(entitled(limit=2))
    token_pool.pools[0].service_s = 6.0
    granted(token_pool, "a")
    granted(token_pool, "b")
    waits = [denied(token_pool, f"{n}").wait_s for n in range(3)]
    assert waits == pytest.approx([2, 4, 6])
    assert denied(token_pool, "x", at=NOW_S + 3).wait_s == pytest.approx(6)


def test_a_refusal_for_kv_waits_for_its_bytes_to_be_freed() -> None:
    token_pool = pool(entitled(kv_bytes_limit=1000))
    token_pool.pools[0].service_s = 5.0
    granted(token_pool, kv_bytes=800)
    waits = [denied(token_pool, f"{n}", kv_bytes=400).wait_s for n in range(2)]
    assert waits == pytest.approx([200 / 160, 2 * 200 / 160])


def test_a_refusal_on_priority_waits_for_all_of_its_weight_or_more() -> None:
    others = [entitled(f"s{n}", "spot") for n in range(3)]
    low = entitled("p", "preemptible")
    token_pool = pool(entitled("e", baseline=4), *others, low, slots=(4,))
    token_pool.pools[0].service_s = 8.0
    for number in range(4):
        granted(token_pool, f"{number}")
    for number in range(3):
        wait_s = denied(token_pool, f"x{number}", f"s{number}").wait_s
        assert wait_s == pytest.approx(2 * (number + 1))
    assert denied(token_pool, "y", "p").wait_s == pytest.approx(2 * 4)
    assert denied(token_pool, "z", "s0").wait_s == pytest.approx(2 * (1 + 2 + 1))


def test_what_is_told_of_a_full_pool_is_over_once_it_has_passed() -> None:
    token_pool = pool(entitled("e", baseline=4), entitled("s", "spot"), slots=(4,))
    token_pool.pools[0].service_s = 8.0
    for number in range(4):
        granted(token_pool, f"{number}")
    waits = [denied(token_pool, f"x{number}", "s").wait_s for number in range(3)]
    assert waits == pytest.approx([2, 4, 6])
    assert denied(token_pool, "y", "s", at=NOW_S + 6).wait_s == pytest.approx(2)


@pytest.mark.parametrize("attempts", [1, 100, 1_000])
def test_however_often_one_tenant_asks_it_counts_once_for_another(attempts: int) -> None:
    token_pool = pool(
        entitled("e", baseline=4),
        entitled("s", "spot", tenant="many"),
        entitled("t", "spot", tenant="many"),
        entitled("o", "spot"),
        slots=(4,),
    )
    for number in range(4):
        granted(token_pool, f"{number}")
    for number in range(attempts):
        for who in "st":
            denied(token_pool, f"{who}{number}", who)
    assert denied(token_pool, "x", "o").wait_s == pytest.approx(5 / 4 * 2)


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0.01, 1000))),
    st.floats(0.01, 1000),
)
def test_those_above_are_the_latest_of_each_other_tenant(
    refused: list[tuple[str, float]], weight: float
) -> None:
    known = RecentDenials()
    for tenant, w in refused:
        known.note(tenant, w, 5)
    latest: dict[str, float] = {}
    for tenant, w in refused:
        latest.pop(tenant, None)
        if len(latest) < 5:
            latest[tenant] = w
    assert known.weights == latest
    above = [t for t, w in latest.items() if w >= weight and t != "a"]
    assert known.others_above("a", weight) == len(above)


@given(st.floats(-1e6, 1e9), st.floats(0, 1))
def test_what_is_told_is_whole_seconds_from_1_to_60(wait_s: float, jitter: float) -> None:
    reported = retry_after_s(wait_s, jitter)
    assert isinstance(reported, int)
    assert 1 <= reported <= 60
