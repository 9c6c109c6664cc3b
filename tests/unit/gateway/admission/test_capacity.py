"""Who is bound at a capacity, and how many replicas a demand asks for."""

from collections.abc import Iterable
from math import inf
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.capacity import (
    ASSESS_SLICE,
    Capacity,
    Demand,
    EntitlementState,
    ReplicaGoal,
    WorkerShare,
    assess_capacity,
    capacity_of,
    desired_replicas,
)
from gateway.admission.terms import UNLIMITED
from gateway.records.entitlement import Entitlement
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


def test_the_newest_give_way_and_come_back() -> None:
    entitlements = reserving(4)
    for slots, bound_until in ((7, 3), (4, 2), (1, 0), (7, 3), (8, UNLIMITED)):
        state = surveyed(entitlements, (slots,))
        assert state.bound_until == (bound_until,)
        assert state.newest_bound == min(bound_until, 4)
        assert state.unbound == 4 - min(bound_until, 4)


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
    assert (state.unbound, state.newest_bound) == (2, 2)


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


def test_suspended_and_expired_ones_keep_nothing() -> None:
    gone = entitled("x", "guaranteed", baseline=8, created=1, suspended=True)
    over = entitled("y", "guaranteed", baseline=8, created=2, expires_unix_s=NOW_S)
    last = entitled("z", "guaranteed", baseline=8, created=3, expires_unix_s=NOW_S + 5)
    state = surveyed([gone, over, last], (8,))
    assert state.bound_until == (UNLIMITED,)
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
    reserved = sum(e.baseline_of(0) for e in bound)
    assert reserved <= slots
    if len(bound) < len(entitlements):
        assert reserved + entitlements[len(bound)].baseline_of(0) > slots


SHARES = (
    WorkerShare(slots=8, kv_bytes=100, tokens_per_s=10.0, replicas=(1, 4)),
    WorkerShare(slots=2, tokens_per_s=5.0, replicas=(0, 2)),
)


def test_kv_that_nobody_states_is_not_enforced() -> None:
    found = capacity_of(SHARES, [[0], [70, 0]])
    assert (found.kv_bytes, found.total_kv_bytes) == ((100, 0), 0)
    assert capacity_of(SHARES, [[0], []]).total_kv_bytes == 100


@pytest.mark.parametrize(
    ("demand", "worker_kv", "needed"),
    [
        ({"sequences": 6}, 0.0, 6),
        ({"sequences": 6, "kv_bytes": 90}, 0.0, 6),
        ({"sequences": 6, "kv_bytes": 60}, 100.0, 6),
        ({"sequences": 6, "kv_bytes": 90}, 100.0, 7.2),
        ({"sequences": 6, "kv_bytes": 90, "tokens_per_s": 20}, 100.0, 16),
    ],
)
def test_the_resource_that_needs_the_most_workers_counts(
    demand: dict[str, float], worker_kv: float, needed: float
) -> None:
    share = WorkerShare(slots=8, tokens_per_s=10.0)
    assert Demand(**demand).binding_sequences(share, worker_kv) == pytest.approx(needed)


@pytest.mark.parametrize(
    ("demand", "replicas"), [(0, 1), (6.8, 1), (6.9, 2), (13.6, 2), (20.5, 4), (1e9, 4)]
)
def test_replicas_hold_the_demand_with_room_to_spare(demand: float, replicas: int) -> None:
    assert desired_replicas(demand, 8, (1, 4)) == replicas


POOL = WorkerShare(slots=8, replicas=(0, 64), cooldown_s=300.0)


def goals(steps: Iterable[tuple[float, float]], share: WorkerShare = POOL) -> list[int]:
    """Desired replicas after each (when, demand)."""
    goal = ReplicaGoal()
    return [goal.desired(demand, share, now_s) for now_s, demand in steps]


def test_the_first_request_of_an_empty_pool_asks_for_a_worker_at_once() -> None:
    assert goals([(0, 0), (5, 0), (10, 0), (15, 1)]) == [0, 0, 0, 1]


def test_replicas_follow_the_mean_of_half_a_minute_up() -> None:
    step = [(5.0 * n, 10.0 if n < 6 else 40.0) for n in range(13)]
    found = goals(step)
    assert found[:6] == [2] * 6
    assert found == sorted(found)
    assert found[-1] == desired_replicas(40, 8, (0, 64)) == 6
    assert goals([(0, 10), (5, 10), (10, 400)])[-1] < desired_replicas(400, 8, (0, 64))


def test_replicas_go_down_after_a_whole_cooldown_of_less() -> None:
    steps = [(n, 40.0 if n <= 100 else 9.0) for n in range(0, 700, 5)]
    found = {int(at): each for (at, _), each in zip(steps, goals(steps), strict=True)}
    assert {found[n] for n in range(0, 400, 5)} == {6}
    assert found[435] == 2
    short = msgspec.structs.replace(POOL, cooldown_s=20.0)
    assert goals(steps[:32], short)[-1] == 2


def test_demand_that_the_slots_hold_changes_nothing() -> None:
    """40 slots of 48, then 44, 36, 45: the same workers."""
    demands = [40.0, 44.0, 36.0, 45.0] * 60
    assert set(goals((5.0 * n, each) for n, each in enumerate(demands))) == {6}
    grown = [40.0] * 12 + [47.0] * 12
    assert goals((5.0 * n, each) for n, each in enumerate(grown))[-1] == 7


def test_bounds_hold_and_changed_bounds_hold_at_once() -> None:
    goal = ReplicaGoal()
    assert goal.desired(1000, msgspec.structs.replace(POOL, replicas=(1, 4)), 0.0) == 4
    assert goal.desired(1000, msgspec.structs.replace(POOL, replicas=(1, 3)), 5.0) == 3
    assert goal.desired(0, msgspec.structs.replace(POOL, replicas=(5, 9)), 10.0) >= 5


@given(st.lists(st.tuples(st.floats(0.1, 100), st.integers(0, 500)), max_size=50))
def test_the_goal_holds_the_mean_demand_and_never_more_than_the_cooldown_s_highest(
    steps: list[tuple[float, float]],
) -> None:
    now_s, at = 0.0, []
    for passed_s, demand in steps:
        now_s += passed_s
        at.append((now_s, demand))
    for (_, demand), found in zip(at, goals(at), strict=True):
        most = max(each for _, each in at)
        assert found <= desired_replicas(most, 8, (0, 64))
        assert found or not demand
