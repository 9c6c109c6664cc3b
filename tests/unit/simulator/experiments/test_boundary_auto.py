"""The gateway's controller on simulated engines that preempt, and how boundaries are moved."""

from collections.abc import Sequence
from functools import cache

import msgspec
import pytest

from bench.fleetopt.simulated import SCENARIO, WITHIN_S
from simulator.experiments.boundary_auto import Steered, run
from simulator.fleet.fleet import FleetSpec, PoolObservation, PoolSpec, simulate
from tests.unit.simulator.fleets import requests, second


@cache
def stepped(*, active: bool) -> Steered:
    """A quarter of an hour of calm, then 40 % more requests for 25 minutes."""
    scenario = msgspec.structs.replace(SCENARIO, step_s=900.0, end_s=2400.0, seed=1)
    return run(scenario, active=active)


def test_it_settles_within_15_minutes_of_a_step_and_preemptions_end() -> None:
    found = stepped(active=True)
    assert found.settling_s <= WITHIN_S
    assert found.turns == 0
    assert found.share(900.0 + WITHIN_S, 2400.0) <= 0.01
    assert found.minutes[-1].boundary < 0.8 * SCENARIO.boundary


def test_without_it_every_other_request_is_preempted() -> None:
    found = stepped(active=False)
    assert found.moves == ()
    assert found.share(900.0 + WITHIN_S, 2400.0) > 0.5


class Lower:
    """Moves the boundary once, and notes what it was shown."""

    every_s = 10.0

    def __init__(self) -> None:
        self.seen: list[tuple[float, Sequence[PoolObservation]]] = []

    def step(self, now_s: float, pools: Sequence[PoolObservation]) -> Sequence[int] | None:
        self.seen.append((now_s, pools))
        return (50,) if now_s == 20.0 else None


def two_pools(gamma: float = 1.0) -> FleetSpec:
    short = PoolSpec(name="short", instances=1, profile=second(), boundary_tokens=200)
    long = PoolSpec(name="long", instances=1, profile=second(max_model_len=1 << 21))
    profile = msgspec.structs.replace(long.profile, kv_blocks=1 << 18)
    long = msgspec.structs.replace(long, profile=profile)
    return FleetSpec(pools=(short, long), gamma=gamma)


def test_what_arrives_after_a_move_is_planned_by_the_new_boundary() -> None:
    traffic = requests(*((5.0 * n, 100, 1) for n in range(8)))
    steer = Lower()
    outcome = simulate(two_pools(), traffic, steer=steer)
    assert outcome.pool.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert outcome.planned.tolist() == outcome.pool.tolist()
    assert [now_s for now_s, _ in steer.seen] == [10.0, 20.0, 30.0]
    short, long = steer.seen[-1][1]
    assert (short.sent, short.finished, long.sent) == (4, 4, 2)
    assert short.slots_used == 0.0


def test_boundaries_are_not_moved_under_compression() -> None:
    with pytest.raises(ValueError, match="gamma"):
        simulate(two_pools(gamma=1.5), requests((0.0, 1, 1)), steer=Lower())
