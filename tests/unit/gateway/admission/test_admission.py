"""The decision as a whole: its order, what is observed, whose usage is believed, who gives way.

The store differential tells the rest: any history, decided here and by the scripts, is one.
"""

from typing import Any

import msgspec
import pytest

from gateway.admission import admission
from gateway.admission.admission import believed, beyond_window, charge_tokens, evict
from gateway.admission.token_pool import LEASE_TTL_S, REAP_BATCH, TOMBSTONES, TokenPool
from gateway.records.attempt import Usage
from gateway.records.entitlement import PROFILES, AdmissionProfile
from tests.builders import length_estimate
from tests.token_pools import NOW_S, entitled, granted, pool


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


# -- leases that expire


LATE_S = NOW_S + LEASE_TTL_S


def test_admission_reaps_first_and_so_many_at_once() -> None:
    count = REAP_BATCH + 5
    token_pool = pool(entitled(baseline=count), slots=(count,))
    for number in range(count):
        granted(token_pool, f"{number}")
    granted(token_pool, "x", at=LATE_S)
    assert token_pool.pools[0].inflight == 5 + 1
    granted(token_pool, "y", at=LATE_S)
    assert token_pool.pools[0].inflight == 2


def test_only_so_many_expired_leases_are_remembered() -> None:
    token_pool = pool(entitled())
    token_pool.tombstones = {f"old{n}": ("e", 1, "none", ()) for n in range(TOMBSTONES)}
    granted(token_pool)
    admission.reap(token_pool, LATE_S)
    assert len(token_pool.tombstones) == TOMBSTONES
    assert "old0" not in token_pool.tombstones
    assert "a" in token_pool.tombstones


# -- which reported usage is believed, and what usage costs, cached prompts among it


PAPER, DEFAULT = PROFILES["paper"], PROFILES["default"]


@pytest.mark.parametrize(
    ("profile", "prompt", "completion", "cached", "charge"),
    [
        (DEFAULT, 100, 20, 50, 75),
        (PAPER, 100, 20, 50, 120),
        (DEFAULT, 100, 20, 5000, 30),
        (DEFAULT, 101, 0, 101, 11),
    ],
)
def test_cached_prompt_tokens_cost_a_tenth_except_in_the_paper(
    profile: AdmissionProfile, prompt: int, completion: int, cached: int, charge: int
) -> None:
    usage = Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)
    assert charge_tokens(profile, usage) == charge


WINDOW = 8192


def usage(prompt: int, completion: int = 5, cached: int = 0) -> Usage:
    return Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)


@pytest.mark.parametrize(
    "reported",
    [
        usage(0),
        usage(10, cached=999_999),
        usage(10, completion=51),
        usage(8193),
        usage(8150, completion=50),
        usage(10**9),
    ],
    ids=[
        *("no prompt", "cached beyond prompt", "beyond the limit", "beyond the window"),
        *("beyond the window together", "absurd"),
    ],
)
def test_what_cannot_be_true_is_replaced_by_the_gateways_own_count(reported: Usage) -> None:
    found = believed(reported, length_estimate(100, cap=50), WINDOW)
    assert found.source == "counted"
    assert (found.prompt_tokens, found.cached_tokens) == (100, 0)
    assert found.completion_tokens <= 50


@pytest.mark.parametrize("reported", [usage(1), usage(8142, 50), usage(100, 0, cached=100)])
def test_what_can_be_true_is_believed(reported: Usage) -> None:
    assert believed(reported, length_estimate(100, cap=50), WINDOW) is reported


def test_an_engine_that_served_more_than_its_configured_window_is_believed() -> None:
    reported = usage(9_500, 11)
    assert believed(reported, length_estimate(7_900), WINDOW) is reported
    assert beyond_window(reported, 1, WINDOW)
    assert not beyond_window(usage(8_000, 11), 1, WINDOW)


def test_what_is_counted_instead_fits_the_window_together() -> None:
    found = believed(usage(10**9, completion=10**9), length_estimate(8_000), WINDOW)
    assert (found.prompt_tokens, found.completion_tokens) == (8_000, 192)


def test_the_limit_is_of_each_sequence() -> None:
    three: dict[str, Any] = {"input_tokens": 100, "cap": 50, "sequences": 3}
    assert believed(usage(100, 150), length_estimate(**three), WINDOW).source == "engine"
    assert believed(usage(100, 151), length_estimate(**three), WINDOW).source == "counted"


# -- who gives way


def full(*, reclaim_spot: bool) -> TokenPool:
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


@pytest.mark.parametrize(
    ("reclaim_spot", "victims"), [(False, ["p3", "p2", "q1"]), (True, ["p3", "p2", "q1", "s0"])]
)
def test_the_least_weight_goes_first_the_youngest_of_those_and_spot_where_the_model_says_so(
    reclaim_spot: bool, victims: list[str]
) -> None:
    token_pool = full(reclaim_spot=reclaim_spot)
    token_pool.change(msgspec.structs.replace(token_pool.terms, slots=(0, 0)))  # workers are lost
    assert [record.id for record in evict(token_pool, 0, 9)] == victims
