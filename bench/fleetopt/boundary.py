"""Rows of `bench fleetopt` on `boundary: auto`: whether it settles after a step in traffic.

The gateway's controller on simulated engines that preempt (simulator.experiments.boundary_auto):
Azure's lengths, two short nodes with 262,144 tokens of KV cache each. After 30 minutes the rate
steps up. The run ends within the hour for which the controller remembers a boundary that was
too high.
"""

from typing import Final

import msgspec

from bench.common.report import Row, at_most, without_target
from planner.workload.library import SHIPPED
from simulator.experiments.boundary_auto import BoundaryScenario, Steered, run

SCENARIO: Final = BoundaryScenario(
    lengths=SHIPPED["azure"].workload.as_cdf().points,
    rate_before=20.0,
    rate_after=28.0,
    step_s=1800.0,
    end_s=5400.0,
    short_kv_tokens=262_144,
    slots=256,
)
STEPS: Final = (28.0, 32.0)
"""The first has targets; the second asks for nearly half of the boundary, 10 % at a time."""
SEEDS: Final = 3
WITHIN_S: Final = 900.0


def boundary_rows(seeds: int = SEEDS) -> list[Row]:
    """The worst of so many seeds, for a step of 40 % and of 60 %, and without a controller."""
    rows: list[Row] = []
    for rate in STEPS:
        scenario = msgspec.structs.replace(SCENARIO, rate_after=rate)
        runs = [run(msgspec.structs.replace(scenario, seed=seed)) for seed in range(seeds)]
        name = f"boundary: auto, {scenario.rate_before:g} -> {rate:g} req/s"
        found = _rows(name, scenario, runs)
        rows += found if rate == STEPS[0] else map(without_target, found)
    fixed = run(SCENARIO, active=False)
    share = fixed.share(SCENARIO.step_s + WITHIN_S, SCENARIO.end_s)
    note = f"the boundary stays at {SCENARIO.boundary}"
    return [*rows, Row("boundary: fixed, 20 -> 28 req/s: preemptions a request", share, note)]


def _rows(name: str, scenario: BoundaryScenario, runs: list[Steered]) -> list[Row]:
    ends = ", ".join(str(found.minutes[-1].boundary) for found in runs)
    settled = max(found.settling_s for found in runs) / 60
    after = max(found.share(scenario.step_s + WITHIN_S, scenario.end_s) for found in runs)
    return [
        at_most(
            f"{name}: minutes until it stays within 5 % of its end",
            settled,
            WITHIN_S / 60,
            f"worst of {len(runs)} seeds; it ends at {ends}",
        ),
        at_most(f"{name}: falls after a rise", max(found.turns for found in runs), 0),
        at_most(f"{name}: preemptions a request from then on", after, 0.01),
    ]
