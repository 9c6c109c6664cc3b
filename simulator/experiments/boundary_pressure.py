"""Two shifts of traffic under which one pool queues while the other idles.

The boundary stays, moves by errors alone, or by errors and unequal pressure
(`gateway.routing.boundary_control`). The fleet and its engines do not change.
"""

from collections.abc import Sequence
from typing import Final, Literal

import msgspec
import numpy as np

from gateway.routing.boundary_control import BoundaryBounds, BoundaryControl
from simulator.engine.profiles import EngineProfile
from simulator.experiments.boundary_auto import ControlSteer, Minute
from simulator.fleet.fleet import FleetSpec, PoolSpec, simulate
from simulator.fleet.outcome import FleetOutcome
from simulator.fleet.traffic import Breakpoints, CdfLengths, Traffic

Rule = Literal["fixed", "errors", "pressure"]
RULES: Final[tuple[Rule, ...]] = ("fixed", "errors", "pressure")
_SHORT_PROMPTS: Final[Breakpoints] = ((512, 0.3), (4096, 1.0))
_WINDOW: Final = 16_384
_LONG_WINDOW: Final = 65_536
_KV_TOKENS: Final = 2**20


class Shift(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic that shifts, and the two pools that serve it."""

    name: str
    lengths: Breakpoints
    rate_per_s: float
    growth: float = 1.0
    """Prompts are so much longer from `end_s` on, evenly growing from `start_s`."""
    burst_per_s: float = 0.0
    """Further requests from `start_s` to `end_s`, all shorter than the boundary."""
    start_s: float = 1800.0
    end_s: float
    last_s: float
    """End of the traffic."""
    short_nodes: int
    long_nodes: int
    slots: int = 64
    """Of each node."""
    boundary: int = 4096


class Shifted(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run."""

    minutes: tuple[Minute, ...]
    moves: int
    outcome: FleetOutcome

    def served_within(self, ttft_s: float) -> float:
        """Share of all requests whose first token came within so many seconds."""
        return float((self.outcome.ttft_s <= ttft_s).mean())

    def ttft_p99_s(self, pool: int) -> float:
        """Of the requests that this pool served."""
        return float(np.nanquantile(self.outcome.ttft_s[self.outcome.pool == pool], 0.99))


def run(shift: Shift, rule: Rule, seed: int = 0) -> Shifted:
    """Simulate one shift under one rule; a seed draws the same traffic for each rule."""
    start = shift.boundary
    bounds = BoundaryBounds(pool="short", start=start, least=start // 2, most=_WINDOW)
    steer = ControlSteer(
        BoundaryControl([bounds]), active=rule != "fixed", pressure=rule == "pressure"
    )
    outcome = simulate(_fleet(shift), _traffic(shift, seed), seed=seed, steer=steer)
    return Shifted(minutes=tuple(steer.minutes), moves=len(steer.moves), outcome=outcome)


def _fleet(shift: Shift) -> FleetSpec:
    def pool(name: str, nodes: int, window: int, boundary: int | None = None) -> PoolSpec:
        profile = EngineProfile(
            name="paged",
            timing="kv",
            kv_blocks=_KV_TOKENS // 16,
            max_model_len=window,
            max_num_seqs=shift.slots,
            prefix_cache_tokens=0,
        )
        return PoolSpec(name=name, instances=nodes, profile=profile, boundary_tokens=boundary)

    short = pool("short", shift.short_nodes, _WINDOW, shift.boundary)
    long = pool("long", shift.long_nodes, _LONG_WINDOW)
    return FleetSpec(pools=(short, long), dispatch="least-loaded")


def _traffic(shift: Shift, seed: int) -> Traffic:
    random = np.random.default_rng(seed)
    times, prompts, outputs = [], [], []
    kinds: Sequence[tuple[Breakpoints, float, float, float]] = (
        (shift.lengths, shift.rate_per_s, 0.0, shift.last_s),
        (_SHORT_PROMPTS, shift.burst_per_s, shift.start_s, shift.end_s),
    )
    for lengths, rate_per_s, start_s, end_s in kinds:
        count = random.poisson(rate_per_s * (end_s - start_s))
        prompt, output = CdfLengths(lengths).sample(count, random)
        times.append(random.uniform(start_s, end_s, count))
        prompts.append(prompt)
        outputs.append(output)
    order = np.argsort(arrival_s := np.concatenate(times))
    grown = np.clip((arrival_s - shift.start_s) / (shift.end_s - shift.start_s), 0.0, 1.0)
    longer = np.concatenate(prompts) * (1 + (shift.growth - 1) * grown)
    answers = np.concatenate(outputs)
    fitting = np.minimum(longer.astype(np.int64), _LONG_WINDOW - answers)
    return Traffic(
        arrival_s=arrival_s[order],
        prompt_tokens=np.maximum(1, fitting)[order],
        output_tokens=answers[order],
    )
