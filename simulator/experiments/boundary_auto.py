"""The gateway's boundary controller on preempting engines, before and after a step in traffic.

The gateway's own controller (`gateway.routing.boundary_control`) steers a simulated fleet of
a short and a long pool whose engines allocate KV by block as sequences grow. Estimates are exact,
so preemptions are the only problem. From `step_s` on the rate is higher: the short pool's KV
cache no longer holds all requests routed to it.
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

from gateway.routing.boundary_control import (
    SAMPLE_S,
    BoundaryBounds,
    BoundaryControl,
    Move,
    PoolSample,
)
from simulator.engine.profiles import EngineProfile
from simulator.fleet.fleet import FleetSpec, PoolObservation, PoolSpec, simulate
from simulator.fleet.outcome import FleetOutcome
from simulator.fleet.traffic import Breakpoints, CdfLengths, Traffic

SETTLED_WITHIN: float = 0.05
"""A boundary has settled once it stays within this share of its final value."""


class BoundaryScenario(msgspec.Struct, frozen=True, kw_only=True):
    """One run: two pools, and a step in the rate."""

    lengths: Breakpoints
    rate_before: float = 10.0
    rate_after: float = 18.0
    step_s: float = 1800.0
    end_s: float = 9000.0
    boundary: int = 8192
    least: int = 1024
    window: int = 16_384
    short_nodes: int = 2
    long_nodes: int = 8
    short_kv_tokens: int = 131_072
    slots: int = 128
    seed: int = 0


class Minute(msgspec.Struct, frozen=True, kw_only=True):
    """The short pool at the end of one minute."""

    at_s: float
    boundary: int
    sample: PoolSample


class Steered(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run."""

    scenario: BoundaryScenario
    minutes: tuple[Minute, ...]
    moves: tuple[tuple[float, Move], ...]
    outcome: FleetOutcome

    @property
    def settling_s(self) -> float:
        """Seconds from the step until the boundary stays near its end (SETTLED_WITHIN)."""
        last = self.minutes[-1].boundary
        away = [m.at_s for m in self.minutes if abs(m.boundary / last - 1) > SETTLED_WITHIN]
        return max([self.scenario.step_s, *away]) - self.scenario.step_s

    @property
    def turns(self) -> int:
        """How often the boundary turned down again after rising, since the step."""
        downs = [m.after < m.before for at_s, m in self.moves if at_s > self.scenario.step_s]
        return sum(b and not a for a, b in pairwise(downs))

    def share(self, start_s: float, end_s: float) -> float:
        """Preemptions per request that the short pool finished in this time."""
        inside = [m.sample for m in self.minutes if start_s < m.at_s <= end_s]
        return sum(s.preemptions for s in inside) / max(1.0, sum(s.finished for s in inside))


class ControlSteer:
    """The gateway's periodic control step, in virtual time."""

    every_s = SAMPLE_S

    def __init__(self, control: BoundaryControl, *, active: bool, pressure: bool = False) -> None:
        """Without `pressure` the control does not see what waits, and errors alone move it."""
        self._control = control
        self._active = active
        self._pressure = pressure
        self._before = [(0, 0, 0)] * 2
        self.minutes: list[Minute] = []
        self.moves: list[tuple[float, Move]] = []

    def step(self, now_s: float, pools: Sequence[PoolObservation]) -> Sequence[int] | None:
        samples = [self._sample(place, pool) for place, pool in enumerate(pools)]
        moves = self._control.step(now_s, samples) if self._active else []
        self.moves += [(now_s, move) for move in moves]
        boundary = self._control.boundaries[0]
        self.minutes.append(Minute(at_s=now_s, boundary=boundary, sample=samples[0]))
        return self._control.boundaries if moves else None

    def _sample(self, place: int, pool: PoolObservation) -> PoolSample:
        now = (pool.sent, pool.finished, pool.preemptions)
        sent, finished, preempted = (b - a for a, b in zip(self._before[place], now, strict=True))
        self._before[place] = now
        return PoolSample(
            requests=sent,
            finished=finished,
            preemptions=preempted,
            load=max(pool.slots_used, pool.kv_used),
            waiting=pool.waiting if self._pressure else 0.0,
        )


def run(scenario: BoundaryScenario, *, active: bool = True) -> Steered:
    """Simulate; without `active` the boundary is fixed."""
    bounds = BoundaryBounds(
        pool="short", start=scenario.boundary, least=scenario.least, most=scenario.window
    )
    steer = ControlSteer(BoundaryControl([bounds]), active=active)
    outcome = simulate(_fleet(scenario), _traffic(scenario), seed=scenario.seed, steer=steer)
    return Steered(
        scenario=scenario,
        minutes=tuple(steer.minutes),
        moves=tuple(steer.moves),
        outcome=outcome,
    )


def _fleet(scenario: BoundaryScenario) -> FleetSpec:
    def engine(window: int, kv_tokens: int) -> EngineProfile:
        return EngineProfile(
            name="paged",
            timing="kv",
            kv_blocks=kv_tokens // 16,
            max_model_len=window,
            max_num_seqs=scenario.slots,
            prefix_cache_tokens=0,
        )

    short = PoolSpec(
        name="short",
        instances=scenario.short_nodes,
        profile=engine(scenario.window, scenario.short_kv_tokens),
        boundary_tokens=scenario.boundary,
    )
    long = PoolSpec(name="long", instances=scenario.long_nodes, profile=engine(65_536, 2**20))
    return FleetSpec(pools=(short, long), dispatch="least-loaded")


def _traffic(scenario: BoundaryScenario) -> Traffic:
    random = np.random.default_rng(scenario.seed)
    before = random.poisson(scenario.rate_before * scenario.step_s)
    after = random.poisson(scenario.rate_after * (scenario.end_s - scenario.step_s))
    times = np.concatenate(
        (
            random.uniform(0.0, scenario.step_s, before),
            random.uniform(scenario.step_s, scenario.end_s, after),
        )
    )
    prompts, outputs = CdfLengths(scenario.lengths).sample(len(times), random)
    return Traffic(arrival_s=np.sort(times), prompt_tokens=prompts, output_tokens=outputs)
