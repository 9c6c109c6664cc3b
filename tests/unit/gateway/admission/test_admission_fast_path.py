"""Who plainly comes in: never anybody whom the checks would treat otherwise."""

from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from gateway.admission import admission
from gateway.admission.admission import fast_admit
from gateway.admission.decision import AdmissionRequest, Placement
from gateway.admission.token_pool import TokenPool, average, weight_now
from gateway.records.entitlement import ServiceClass
from tests.token_pools import NOW_S, entitled, granted, pool

CLASSES = st.sampled_from(["dedicated", "guaranteed", "elastic", "spot", "preemptible"])


def ready(token_pool: TokenPool, request: AdmissionRequest, now_s: float) -> bool:
    """As admission asks: with what is derived of the account up to date."""
    account = token_pool.accounts[request.entitlement]
    average(account, now_s)
    weight_now(token_pool, account)
    return fast_admit(token_pool, account, request, now_s)


@st.composite
def books(draw: st.DrawFn) -> tuple[TokenPool, TokenPool, AdmissionRequest, float]:
    """A pool in use, twice, and who asks: figures close to each other, so that limits are met."""
    few = st.integers(0, 4)
    kv = st.sampled_from([0, 0, 150, 400])
    terms: dict[str, Any] = {
        "service_class": draw(CLASSES),
        "baseline": tuple(draw(st.lists(few, max_size=2))),
        "limit": draw(few),
        "tokens_per_s": draw(st.sampled_from([20.0, 10.0, 20.0, 0.0])),
        "kv_bytes": draw(kv),
        "kv_bytes_limit": draw(kv),
        "created": draw(st.integers(0, 2)),
        "suspended": draw(st.sampled_from([False] * 9 + [True])),
        "expires_unix_s": draw(st.sampled_from([0.0, 0.0, NOW_S, NOW_S + 5])),
    }
    other: dict[str, Any] = {
        "service_class": draw(CLASSES),
        "baseline": (1, 1),
        "tokens_per_s": 50.0,
    }
    figures: dict[str, Any] = {
        "slots": tuple(draw(st.lists(st.integers(0, 9), min_size=2, max_size=2))),
        "kv_bytes": tuple(draw(st.lists(kv, max_size=2))),
        "bound_until": tuple(draw(st.lists(st.integers(0, 3), max_size=2))),
        "headroom": draw(st.integers(0, 2)),
        "tokens_per_s": draw(st.sampled_from([0.0, 100.0])),
    }
    token_pool, same = (
        pool(entitled(**terms), entitled("other", **other), **figures) for _ in range(2)
    )
    for number in range(draw(st.integers(0, 5))):
        request, observe = draw(asks(f"before-{number}")), draw(st.booleans())
        deeper = draw(st.sampled_from([0.0, 200.0]))  # as if the bucket had been deeper
        charge = draw(st.none() | st.integers(0, 300))
        for each in (token_pool, same):
            admission.admit(each, request, NOW_S, observe=observe)
            each.accounts["e"].level += deeper
            if charge is not None:
                admission.settle(each, request.lease_id, charge, NOW_S)
    now_s = NOW_S + draw(st.sampled_from([0.0, 0.5, 4.0, 20.0]))
    return token_pool, same, draw(asks("new", "e")), now_s


@st.composite
def asks(draw: st.DrawFn, lease_id: str, name: str = "") -> AdmissionRequest:
    return AdmissionRequest(
        lease_id=lease_id,
        entitlement=name or draw(st.sampled_from(["e", "other"])),
        pool=draw(st.integers(0, 1)),
        estimate_tokens=draw(st.sampled_from([0, 1, 50, 100, 101, 200])),
        kv_bytes=draw(st.sampled_from([0, 50, 100, 101])),
        sequences=draw(st.sampled_from([1, 1, 1, 2])),
    )


@given(books())
def test_all_checks_say_the_same_and_leave_the_same(
    found: tuple[TokenPool, TokenPool, AdmissionRequest, float],
) -> None:
    token_pool, checked, request, now_s = found
    account = checked.accounts[request.entitlement]
    average(account, now_s)
    w = weight_now(checked, account)
    decided = admission._decide(checked, account, request, w, now_s)
    if ready(token_pool, request, now_s):
        event("comes in")
        assert decided == (Placement(request.pool), "own", w)
    else:  # then the checks are asked, and find all as it was
        event("asked")
        assert admission._decide(token_pool, token_pool.accounts["e"], request, w, now_s) == decided
    seen = token_pool.accounts["e"]
    assert (seen.level, seen.level_s) == (account.level, account.level_s)


def asking(**asked: Any) -> AdmissionRequest:
    known: dict[str, Any] = {"pool": 0, "estimate_tokens": 10, **asked}
    return AdmissionRequest(lease_id="x", entitlement="e", **known)


PLAIN: dict[str, Any] = {"tokens_per_s": 10.0, "baseline": (4, 4)}


@pytest.mark.parametrize("service_class", ["dedicated", "guaranteed", "elastic", "spot"])
def test_an_entitlement_with_a_rate_in_a_pool_with_room_comes_in(
    service_class: ServiceClass,
) -> None:
    token_pool = pool(entitled(service_class=service_class, **PLAIN), slots=(8, 8))
    if service_class == "dedicated":  # its own idle baseline is looked at by the checks
        token_pool.pools[0].idle_dedicated = 0
    assert ready(token_pool, asking(), NOW_S)


@pytest.mark.parametrize(
    ("terms", "asked"),
    [
        ({"tokens_per_s": 0.0}, {}),
        ({"suspended": True}, {}),
        ({"expires_unix_s": NOW_S}, {}),
        ({"service_class": "guaranteed", "created": 9}, {}),
        ({"service_class": "guaranteed", "baseline": (0, 9)}, {}),
        ({"service_class": "guaranteed", "baseline": ()}, {}),
        ({"kv_bytes_limit": 50}, {"kv_bytes": 51}),
        ({}, {"kv_bytes": 1001}),
        ({}, {"sequences": 2}),
        ({}, {"estimate_tokens": 101}),
    ],
)
def test_whom_a_check_has_to_look_at_does_not(terms: dict[str, Any], asked: dict[str, Any]) -> None:
    token_pool = pool(
        entitled(**PLAIN | terms), slots=(8, 8), kv_bytes=(1000, 2000), bound_until=(2,)
    )
    assert not ready(token_pool, asking(**asked), NOW_S)


def test_the_headroom_and_the_limit_are_the_last_places() -> None:
    token_pool = pool(entitled(limit=3, **PLAIN), slots=(3, 8), headroom=1)
    for number in range(2):
        assert ready(token_pool, asking(), NOW_S)
        granted(token_pool, f"{number}", estimate_tokens=10)
    assert not ready(token_pool, asking(), NOW_S)
    assert ready(token_pool, asking(pool=1), NOW_S)
    granted(token_pool, "2", pool=1, estimate_tokens=10)
    assert not ready(token_pool, asking(pool=1), NOW_S)
