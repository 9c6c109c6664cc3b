"""`python -m bench quartz-knees`: find each fleet's knee, for `bench quartz-loads`.

The knee of a workload and a fleet is the rate that the best of the compared policies completes
when offered more: requests a second that end in the last three quarters of the arrivals, since
caches are cold before. The offered rate is 1.15 times the knee in `bench.quartz_loads.scenes`,
and is raised as long as nearly all of it is completed. Copy the rows into that module.

`SLUICE_BENCH_FLEETS` and `SLUICE_BENCH_SEEDS` make it shorter.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.progress import Progress

from bench.common.report import Report, Row
from bench.quartz.lab import processes
from bench.quartz.lab import run as simulate
from bench.quartz_loads.run import DEFAULT, OTHERS, asked, make
from bench.quartz_loads.scenes import SCENES, knee, requests
from simulator.experiments.scheduling import WORKER, Demand

FLEETS: Final = (4, 16)
_OFFERED: Final = 1.15
_NEARLY_ALL: Final = 0.95
_WARM: Final = 0.25

Task = tuple[str, int, int, Path | None]
"""Workload, workers, seed, folder with traces."""


def run(data: Path | None = None) -> Report:
    """The knees of all workloads, or of the fleets that the environment names."""
    fleets, seeds = asked(FLEETS)
    places = list(product(fleets, SCENES))
    tasks = [(scene, workers, seed, data) for workers, scene in places for seed in range(seeds)]
    found: dict[tuple[int, str], list[tuple[float, str]]] = {}
    with processes() as pool, Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("knees", total=len(tasks))
        for (scene, workers, _, _), best in zip(tasks, pool.map(measure, tasks), strict=True):
            found.setdefault((workers, scene), []).append(best)
            progress.advance(bar)
    rows = [
        Row(
            metric=f"{scene}, {workers} workers: knee, requests/s",
            measured=round(float(np.mean([rate for rate, _ in best])), 1),
            note=f"{', '.join(sorted({policy for _, policy in best}))}; now {knee(scene, workers)}",
        )
        for (workers, scene), best in found.items()
    ]
    return Report(name="quartz-knees", rows=rows, detail={"seeds": seeds})


def measure(task: Task) -> tuple[float, str]:
    """What the best policy completes of more than that, and which policy it is."""
    scene, workers, seed, data = task
    offered = best = knee(scene, workers)
    policy = ""
    while best > _NEARLY_ALL * offered:
        offered *= _OFFERED
        demands = SCENES[scene](seed, offered, workers, 2 * requests(workers), data)
        best, policy = max(
            (completed_per_s(demands, other, workers, seed), other) for other in (DEFAULT, *OTHERS)
        )
    return best, policy


def completed_per_s(demands: Sequence[Demand], policy: str, workers: int, seed: int) -> float:
    """Requests a second that a policy completes while more arrive."""
    gateway = make(policy, workers, seed)
    end_s = simulate(demands, [gateway], seed=seed, profiles=[WORKER] * workers).end_s
    last_s = demands[-1].arrival_s
    ended = (end_s > _WARM * last_s) & (end_s <= last_s)
    return float(ended.sum()) / ((1 - _WARM) * last_s)
