"""What the checks promise: the paper's threshold, reserves, and waits that are honest.

The store differential tells the rest of them.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission import admission
from gateway.admission.denials import retry_after_s
from gateway.admission.terms import AdmissionRequest, Grant
from gateway.admission.token_pool import RecentDenials
from tests.token_pools import NOW_S, denied, entitled, fill, granted, pool


def test_the_threshold_is_strict_and_counts_its_own_entitlement() -> None:
    """With >= instead nobody would ever be throttled (token-pools paper, section 4.3)."""
    elastic = entitled(slo_ms=1000, baseline=4, limit=9)
    token_pool = pool(elastic, slots=(4,), mean_slo_ms=1000.0)
    fill(token_pool, "e", 4)
    denial = denied(token_pool, "x")
    assert (denial.reason, denial.limit, denial.used) == ("priority", 4, 4)


@pytest.mark.parametrize(
    ("terms", "limit"), [({"kv_bytes_limit": 50}, 50), ({"kv_bytes": 50, "kv_bytes_limit": 60}, 60)]
)
def test_more_kv_than_an_entitlement_may_ever_hold_is_told_so(
    terms: dict[str, Any], limit: int
) -> None:
    denial = denied(pool(entitled(**terms)), kv_bytes=61)
    assert (denial.reason, denial.unit) == ("exceeds_entitlement", "bytes of KV cache")
    assert (denial.limit, denial.wait_s, denial.of_pool) == (limit, 0, False)


def test_guaranteed_is_held_to_its_baseline_pool_by_pool() -> None:
    token_pool = pool(entitled(service_class="guaranteed", baseline=(2, 1)), slots=(8, 8))
    granted(token_pool, "a", pool=1)
    denial = denied(token_pool, "b", pool=1)
    assert (denial.reason, denial.limit, denial.used) == ("concurrency", 1, 1)


# -- waits are honest: what was promised before is counted, and nobody is told the same


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


@pytest.mark.parametrize("attempts", [1, 100, 1_000])
def test_however_often_one_tenant_asks_it_counts_once_for_another(attempts: int) -> None:
    token_pool = pool(
        entitled("e", baseline=4),
        entitled("s", "spot", tenant="many"),
        entitled("t", "spot", tenant="many"),
        entitled("o", "spot"),
        slots=(4,),
    )
    fill(token_pool, "e", 4)
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
