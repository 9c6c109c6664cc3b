"""Who is bound at a capacity, and how many replicas a demand asks for."""

from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.admission.capacity import (
    ASSESS_SLICE,
    Capacity,
    EntitlementState,
    ReplicaGoal,
    WorkerShare,
    assess_capacity,
    capacity_of,
    demand_sequences,
    desired_replicas,
    max_capacity,
)
from gateway.policy.entitlements.entitlement import Entitlement
from gateway.policy.token_pool.terms import UNLIMITED
from tests.token_pools import NOW_S, entitled


def surveyed(
    entitlements: list[Entitlement],
    slots: tuple[int, ...],
    kv_bytes: tuple[int, ...] = (),
    tokens_per_s: float = 0.0,
) -> EntitlementState:
    kv = kv_bytes or (0,) * len(slots)
    capacity = Capacity(slots=slots, kv_bytes=kv, tokens_per_s=tokens_per_s)
    (*pauses, state) = assess_capacity(entitlements, capacity, NOW_S)
    assert pauses == [None] * (len(entitlements) // ASSESS_SLICE)
    assert state is not None
    return state


def reserving(count: int, baseline: tuple[int, ...] = (2,), **terms: Any) -> list[Entitlement]:
    classes = ("guaranteed", "dedicated")
    return [
        entitled(f"e{n}", classes[n % 2], baseline=baseline, created=n, **terms)  # type: ignore[arg-type]
        for n in range(1, count + 1)
    ]


def test_all_are_bound_while_all_fit() -> None:
    state = surveyed(reserving(4), (8,))
    assert (state.bound_until, state.unbound, state.newest_bound) == ((UNLIMITED,), 0, 4)
    assert state.reserved == (8,)


def test_the_newest_give_way_and_come_back() -> None:
    entitlements = reserving(4)
    for slots, bound_until in ((7, 3), (4, 2), (1, 0), (7, 3), (8, UNLIMITED)):
        state = surveyed(entitlements, (slots,))
        assert state.bound_until == (bound_until,)
        assert state.newest_bound == min(bound_until, 4)
        assert state.unbound == 4 - min(bound_until, 4)
        assert state.reserved == (2 * min(bound_until, 4),)


def test_a_newer_small_one_does_not_pass_an_older_large_one() -> None:
    large = entitled("large", "guaranteed", baseline=9, created=2)
    small = entitled("small", "guaranteed", baseline=1, created=3)
    assert surveyed([*reserving(1), large, small], (8,)).bound_until == (1,)


@pytest.mark.parametrize(
    ("terms", "capacity"),
    [
        ({"kv_bytes": 100}, {"kv_bytes": (350,)}),
        ({"tokens_per_s": 10.0}, {"tokens_per_s": 35.0}),
    ],
)
def test_kv_and_token_rate_bind_as_slots_do(
    terms: dict[str, Any], capacity: dict[str, Any]
) -> None:
    assert surveyed(reserving(4, **terms), (99,), **capacity).bound_until == (3,)
    assert surveyed(reserving(4, **terms), (99,)).bound_until == (UNLIMITED,)


def test_each_pool_binds_by_itself() -> None:
    state = surveyed(reserving(4, (1, 2)), (99, 5))
    assert state.bound_until == (UNLIMITED, 2)
    assert (state.reserved, state.unbound, state.newest_bound) == ((4, 4), 2, 2)


def test_a_lost_pool_does_not_take_the_reserve_of_another() -> None:
    """The token rate and the KV that are left are those of the other pool's workers."""
    shares = [
        WorkerShare(slots=n, kv_bytes=100 * n, tokens_per_s=10.0 * n, replicas=(1, 1))
        for n in (6, 4)
    ]
    entitlements = reserving(2, (3, 2), kv_bytes=500, tokens_per_s=50.0)
    for workers, bound_until in (
        ([[0], [0]], (UNLIMITED, UNLIMITED)),
        ([[], [0]], (0, UNLIMITED)),
        ([[0], []], (UNLIMITED, 0)),
    ):
        (*_, state) = assess_capacity(entitlements, capacity_of(shares, workers), NOW_S)
        assert state is not None
        assert state.bound_until == bound_until


def test_those_that_reserve_nothing_are_always_bound() -> None:
    many = [entitled(f"s{n}", "spot", baseline=50, created=n) for n in range(1, 9)]
    assert surveyed(many, (1,)).bound_until == (UNLIMITED,)


def test_suspended_and_expired_ones_keep_nothing() -> None:
    gone = entitled("x", "guaranteed", baseline=8, created=1, suspended=True)
    over = entitled("y", "guaranteed", baseline=8, created=2, expires_unix_s=NOW_S)
    last = entitled("z", "guaranteed", baseline=8, created=3, expires_unix_s=NOW_S + 5)
    state = surveyed([gone, over, last], (8,))
    assert (state.bound_until, state.reserved) == ((UNLIMITED,), (8,))
    assert state.next_expiry_unix_s == NOW_S + 5
    assert surveyed([gone, over], (8,)).next_expiry_unix_s == inf


def test_the_mean_slo_is_over_bound_entitlements_that_state_one() -> None:
    entitlements = [
        entitled("a", "guaranteed", baseline=4, slo_ms=1000, created=1),
        entitled("b", slo_ms=4000, created=2),
        entitled("c", created=3),
        entitled("d", "guaranteed", baseline=4, slo_ms=90_000, created=4),
    ]
    assert surveyed(entitlements, (4,)).mean_slo_ms == 2500
    assert surveyed(entitlements[2:3], (4,)).mean_slo_ms == 0


@given(
    baselines=st.lists(st.integers(0, 5), max_size=20),
    slots=st.integers(0, 40),
)
def test_what_is_reserved_always_fits(baselines: list[int], slots: int) -> None:
    entitlements = [
        entitled(f"{n}", "guaranteed", baseline=baseline, created=n)
        for n, baseline in enumerate(baselines, start=1)
    ]
    state = surveyed(entitlements, (slots,))
    bound = [e for e in entitlements if e.created <= state.bound_until[0]]
    assert state.reserved == (sum(e.baseline_of(0) for e in bound),)
    assert state.reserved[0] <= slots
    if len(bound) < len(entitlements):
        assert state.reserved[0] + entitlements[len(bound)].baseline_of(0) > slots


def test_a_long_list_is_surveyed_in_slices() -> None:
    surveyed(reserving(3 * ASSESS_SLICE + 1, (0,)), (1,))


SHARES = (
    WorkerShare(slots=8, kv_bytes=100, tokens_per_s=10.0, replicas=(1, 4)),
    WorkerShare(slots=2, tokens_per_s=5.0, replicas=(0, 2)),
)


def test_capacity_is_what_the_workers_add_up_to() -> None:
    found = capacity_of(SHARES, [[0, 0], [70]])
    rates = (20.0, 5.0)
    assert found == Capacity(
        slots=(16, 2), kv_bytes=(200, 70), tokens_per_s=25.0, pool_tokens_per_s=rates
    )
    assert found.total_kv_bytes == 270


def test_kv_that_nobody_states_is_not_enforced() -> None:
    found = capacity_of(SHARES, [[0], [70, 0]])
    assert (found.kv_bytes, found.total_kv_bytes) == ((100, 0), 0)
    assert capacity_of(SHARES, [[0], []]).total_kv_bytes == 100


def test_the_most_capacity_is_that_of_the_most_replicas() -> None:
    found = max_capacity(SHARES)
    assert (found.slots, found.kv_bytes, found.tokens_per_s) == ((32, 4), (400, 0), 50.0)


def test_demand_is_reserved_admitted_and_denied() -> None:
    assert demand_sequences(8, 3, 0, 5.0, 5.0) == 11
    assert demand_sequences(8, 3, 10, 4.0, 5.0) == 19  # two a second for four seconds each
    assert demand_sequences(0, 0, 0, 5.0, 0.0) == 0


@pytest.mark.parametrize(
    ("demand", "replicas"), [(0, 1), (6.8, 1), (6.9, 2), (13.6, 2), (20.5, 4), (1e9, 4)]
)
def test_replicas_hold_the_demand_with_room_to_spare(demand: float, replicas: int) -> None:
    assert desired_replicas(demand, 8, (1, 4)) == replicas


def test_replicas_go_up_at_once_and_down_after_a_whole_cooldown() -> None:
    goal = ReplicaGoal(cooldown_s=300.0)
    asked = [(0, 2, 2), (5, 6, 6), (10, 3, 6), (200, 4, 6), (304, 1, 6), (305, 1, 4)]
    asked += [(499, 1, 4), (500, 1, 1), (501, 9, 9)]
    for now_s, wanted, expected in asked:
        assert goal.desired(wanted, now_s) == expected, now_s


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 9)), max_size=50))
def test_the_goal_is_the_most_of_the_last_cooldown(steps: list[tuple[float, int]]) -> None:
    goal, now_s = ReplicaGoal(cooldown_s=120.0), 0.0
    asked: list[tuple[float, int]] = []
    for passed_s, wanted in steps:
        now_s += passed_s
        asked.append((now_s, wanted))
        recent = [w for at, w in asked if at > now_s - 120.0]
        assert goal.desired(wanted, now_s) == max(recent)
