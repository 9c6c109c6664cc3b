"""`python -m bench quartz loads`: the default scheduler over a grid of loads, beside routers.

Eight workloads, fleets of 4, 16 and 64 workers, loads of .5, .8, 1.0 and 1.2 of the knee, the
same requests for every policy. A cell is one workload, load and fleet; a scene scales with its
fleet. Targets of the default:

- P50, P99 and violations no worse than the best of the others in at least 85 % of the cells:
  within the 95 % interval of the paired difference, or 10 % or 50 ms (violations: 1 point).
- No collapse: hit rate at 1.2 of the knee at least .9 of that at .8.
- A heavy client raises the others' violations by at most 5 points.
- Where tenants have unequal targets, knowing them costs no attainment.

All policies look for prefixes in an index of the gateway's own kind. `SLUICE_BENCH_FLEETS` names
the fleets; with one seed there is no interval, and every difference counts.

`python -m bench quartz knees` finds the knee of a workload and a fleet: the rate that the best of
the policies completes when offered more, by requests that end in the last three quarters of the
arrivals, since caches are cold before. It offers 1.15 times the knee below, and more as long as
nearly all of it is completed. Copy its rows into `_KNEES`.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from bench.common.report import (
    Advance,
    Report,
    Row,
    at_least,
    at_most,
    bars,
    judged,
    scaled,
    tracked,
)
from bench.quartz.lab import WORKERS, LabFigures, figures, interval, make, processes
from bench.quartz.lab import run as simulate
from bench.quartz.workloads import (
    CLIENTS,
    HEAVY,
    StreamShape,
    agents,
    mixed,
    mooncake,
    structured,
)
from simulator.experiments.scheduling import WORKER, Demand

DEFAULT: Final = "QUARTZ"
OTHERS: Final = ("Locality-aware", "cache-aware, bounded", "FIFO-LL", "weighted")
ALONE: Final = "QUARTZ, without the heavy client"
HEAVY_SCENE: Final = "Heavy client"
LOADS: Final = (0.5, 0.8, 1.0, 1.2)
FLEETS: Final = tuple(map(int, os.environ.get("SLUICE_BENCH_FLEETS", "4 16 64").split()))
SEEDS: Final = scaled(5)
_SCENES: Final = (
    *("Chat", "RAG", "Structured", "Mixed", "Mixed Bursty", "Agents", "Mooncake", HEAVY_SCENE),
)
_KNEES: Final[Mapping[int, Mapping[str, float]]] = {
    workers: dict(zip(_SCENES, knees, strict=True))
    for workers, knees in (
        (4, (29.1, 8.0, 30.7, 14.0, 14.0, 7.4, 8.5, 13.7)),
        (16, (112.5, 32.2, 120.5, 53.5, 53.1, 28.7, 34.1, 52.8)),
    )
}
"""Requests a second by workers and workload, as `quartz knees` measured them."""
_TRACED: Final = 12_000
"""Requests of the Mooncake trace."""
_HOLDS_SHARE: Final = 0.85
_OFFERED: Final = 1.15
_NEARLY_ALL: Final = 0.95
_WARM: Final = 0.25

Scene = Callable[[int, float, int, int, Path | None], list[Demand]]
"""From a seed, a rate a second of all workers, workers, requests, and a folder with traces."""


def _of(shape: StreamShape) -> Scene:
    def scene(
        seed: int, rate: float, workers: int, requests: int, data: Path | None
    ) -> list[Demand]:
        heavy = rate / 2 if shape.heavy else 0.0
        scaled_shape = msgspec.structs.replace(
            shape,
            rate=rate - heavy,
            heavy=heavy,
            clients=CLIENTS * workers // 4,
            burst=shape.burst * workers // 4,
        )
        return mixed(seed, scaled_shape, requests // 2 if heavy else requests)

    return scene


SCENES: Final[Mapping[str, Scene]] = {
    "Chat": _of(StreamShape(rag=0.0)),
    "RAG": _of(StreamShape(rag=1.0)),
    "Structured": lambda seed, rate, workers, requests, _: structured(
        seed, rate, requests, CLIENTS * workers // 4
    ),
    "Mixed": _of(StreamShape()),
    "Mixed Bursty": _of(StreamShape(bursts=6.0)),
    "Agents": lambda seed, rate, workers, requests, _: agents(
        seed, rate, requests, CLIENTS * workers // 4
    ),
    "Mooncake": lambda seed, rate, _, requests, data: mooncake(
        seed, rate, data, min(requests, _TRACED)
    ),
    HEAVY_SCENE: _of(StreamShape(heavy=1.0)),
}


def knee(scene: str, workers: int) -> float:
    """Requests a second: as many a worker as of the largest fleet measured that is no larger."""
    measured = max((fleet for fleet in _KNEES if fleet <= workers), default=min(_KNEES))
    return _KNEES[measured][scene] * workers / measured


def requests_of(workers: int) -> int:
    """How many a run has: fewer for each worker of a larger fleet, whose figures vary less."""
    return scaled({4: 3000, 16: 9000}.get(workers, 24_000), 1500)


class LoadCell(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Where runs are compared."""

    scene: str
    workers: int
    load: float


Task = tuple[LoadCell, int, tuple[str, ...], Path | None]
"""Cell, seed, policies, folder with traces."""
Found = Mapping[tuple[LoadCell, str], Sequence[LabFigures]]
"""By cell and policy, one entry a seed."""


def run(data: Path | None = None) -> Report:
    """The whole ground, or the part that the environment names."""
    cells = [LoadCell(scene=s, workers=w, load=x) for s, w, x in product(SCENES, FLEETS, LOADS)]
    tasks: list[Task] = [
        (c, seed, (DEFAULT, *OTHERS, *((ALONE,) if c.scene == HEAVY_SCENE else ())), data)
        for c in cells
        for seed in range(SEEDS)
    ]
    found: dict[tuple[LoadCell, str], list[LabFigures]] = {}
    with bars() as bar, processes() as pool:
        step = bar("cells", len(tasks))
        for (cell, _, policies, _), values in zip(tasks, pool.map(run_task, tasks), strict=True):
            for policy, seen in zip(policies, values, strict=True):
                found.setdefault((cell, policy), []).append(seen)
            step()
        told = target_rows(range(SEEDS), bar("targets", VARIANTS * SEEDS))
    detail: dict[str, object] = {"seeds": SEEDS, "rows": _table(found)}
    return Report(name="quartz loads", rows=[*rows(found), *told], detail=detail)


def run_task(task: Task) -> list[LabFigures]:
    """Each policy, which has learned nothing before, on the same requests."""
    cell, seed, policies, data = task
    rate = knee(cell.scene, cell.workers) * cell.load
    demands = SCENES[cell.scene](seed, rate, cell.workers, requests_of(cell.workers), data)
    found = []
    for policy in policies:
        asked = [d for d in demands if d.client != HEAVY] if policy == ALONE else demands
        gateway = make(DEFAULT if policy == ALONE else policy, cell.workers, seed=seed)
        served = simulate(asked, [gateway], seed=seed, profiles=[WORKER] * cell.workers)
        if served.lost:  # all workers are well
            raise RuntimeError(f"{served.lost} requests were lost")
        found.append(figures(asked, served))
    return found


# -- what is asked


class Miss(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of a cell in which another policy is better."""

    field: str
    other: str
    mine: float
    theirs: float


_ALLOWED: Final = {"p50_s": 0.05, "p99_s": 0.05, "violations": 0.01}
"""By so much the default may be worse than the best; seconds, or a share."""


def misses(found: Found, cell: LoadCell) -> list[Miss]:
    """Where the default is worse than the best of the others, beyond what is allowed."""
    out = []
    for field, allowed in _ALLOWED.items():
        mine = _values(found, cell, DEFAULT, field)
        best = min(OTHERS, key=lambda other: float(_values(found, cell, other, field).mean()))
        theirs = _values(found, cell, best, field)
        worse = float(mine.mean() - theirs.mean())
        share = 0.1 * float(theirs.mean()) if field != "violations" else 0.0
        by_chance = len(mine) > 1 and interval(mine - theirs)[0] <= 0
        if not (worse <= max(allowed, share) or by_chance):  # NaN is a miss
            miss = Miss(field=field, other=best, mine=mine.mean(), theirs=theirs.mean())
            out.append(miss)
    return out


def rows(found: Found) -> list[Row]:
    """The floors, then a row a cell."""
    cells = sorted({cell for cell, _ in found})
    missed = {cell: misses(found, cell) for cell in cells}
    hold = sum(not m for m in missed.values())
    listed = [at_least("cells that hold, share", hold / len(cells), _HOLDS_SHARE)]
    for scene, workers in sorted({(c.scene, c.workers) for c in cells}):
        near, far = (
            _mean(found, LoadCell(scene=scene, workers=workers, load=x), DEFAULT, "hit")
            for x in (0.8, 1.2)
        )
        metric = f"{scene}, {workers} workers: hits at 1.2 over hits at .8 of the knee"
        listed.append(at_least(metric, far / near, 0.9, f"{100 * near:.1f} -> {100 * far:.1f} %"))
    for cell in sorted(cell for cell, policy in found if policy == ALONE):
        beside, alone = (
            100 * _mean(found, cell, policy, "others_violations") for policy in (DEFAULT, ALONE)
        )
        metric = f"{cell.workers} workers, {cell.load:g} of the knee: a heavy client adds, points"
        note = f"others' violations {alone:.1f} -> {beside:.1f} %"
        listed.append(at_most(metric, beside - alone, 5.0, note))
    for cell in cells:
        p50, p99, late, hits = (
            _mean(found, cell, DEFAULT, f) for f in ("p50_s", "p99_s", "violations", "hit")
        )
        text = f"{cell.scene}, {cell.workers} workers, {cell.load:g} of the knee"
        shown = f"P50 {p50:.2f} s, P99 {p99:.2f} s, {late:.1%} late, {hits:.1%} hits"
        note = "; ".join(f"{m.field} {m.mine:.3g}, {m.other} {m.theirs:.3g}" for m in missed[cell])
        listed.append(Row(text, shown, note or "holds"))
    return listed


def _values(found: Found, cell: LoadCell, policy: str, field: str) -> np.ndarray:
    return np.array([getattr(value, field) for value in found[cell, policy]])


def _mean(found: Found, cell: LoadCell, policy: str, field: str) -> float:
    return float(_values(found, cell, policy, field).mean())


def _table(found: Found) -> list[dict[str, object]]:
    """All figures, means over the seeds, for machines."""
    names = LabFigures.__struct_fields__
    return [
        {
            **msgspec.structs.asdict(cell),
            "policy": policy,
            **{name: _mean(found, cell, policy, name) for name in names},
        }
        for cell, policy in sorted(found)
    ]


# -- tenants with unequal targets: every second client expects its first token within TIGHT_S, the
# others within PATIENT_S; both runs of a pair see the same requests

TIGHT_S: Final = (0.5, 2.0)
PATIENT_S: Final = 30.0
_TARGET_SCENES: Final = ("Mixed", "Mixed Bursty")
_TARGET_REQUESTS: Final = 1500
VARIANTS: Final = len(_TARGET_SCENES) * len(TIGHT_S) * len(LOADS[1:])
"""Pairs that `rows` runs for each seed."""
_MAX_HARM: Final = 1.0
"""Points of attainment."""


class TargetFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Attainment of one run, in per cent."""

    all: float
    tight: float
    patient: float


def experiment(scene: str, load: float, tight_s: float, seed: int, *, told: bool) -> TargetFigures:
    """`told`: the scheduler knows the targets."""
    drawn = SCENES[scene](seed, knee(scene, WORKERS) * load, WORKERS, _TARGET_REQUESTS, None)
    demands = [_with_target(demand, tight_s, told=told) for demand in drawn]
    served = simulate(demands, [make("QUARTZ")], seed=seed)
    targets_s = np.array([demand.slo_s for demand in demands])
    met = 100.0 * (served.ttft_s <= targets_s)
    tight = targets_s < PATIENT_S
    return TargetFigures(
        all=float(met.mean()), tight=float(met[tight].mean()), patient=float(met[~tight].mean())
    )


def _with_target(demand: Demand, tight_s: float, *, told: bool) -> Demand:
    tight = int(demand.client.removeprefix("client-")) % 2
    slo_s = tight_s if tight else PATIENT_S
    return msgspec.structs.replace(demand, slo_s=slo_s, told_slo_s=slo_s if told else 0.0)


def target_rows(seeds: Iterable[int], step: Advance) -> list[Row]:
    """One row for each workload, target and load."""
    seeds, out = list(seeds), []
    for scene, tight_s, load in product(_TARGET_SCENES, TIGHT_S, LOADS[1:]):
        pairs = []
        for seed in seeds:
            pairs.append(
                [experiment(scene, load, tight_s, seed, told=told) for told in (True, False)]
            )
            step()
        gain = np.array([told.all - untold.all for told, untold in pairs])
        low, high = interval(gain)
        shown = ", ".join(
            "{} {:.1f} -> {:.1f} %".format(
                field,
                *(np.mean([getattr(pair[of], field) for pair in pairs]) for of in (1, 0)),
            )
            for field in ("all", "tight", "patient")
        )
        metric = f"{scene}, targets {tight_s:g} and 30 s, load {load:g}"
        harm = float(gain.mean())
        out.append(
            judged(
                f"{metric}: attainment by knowing targets, points",
                harm,
                f">= -{_MAX_HARM:g}",
                harm >= -_MAX_HARM,
                f"{low:+.1f} to {high:+.1f}; {shown}",
            )
        )
    return out


# -- knees

KneeTask = tuple[str, int, int, Path | None]
"""Workload, workers, seed, folder with traces."""


def knees(data: Path | None = None) -> Report:
    """The knees of all workloads, in the fleets that are measured."""
    tasks = [(s, w, seed, data) for w in FLEETS for s in SCENES for seed in range(SEEDS)]
    found: dict[tuple[int, str], list[tuple[float, str]]] = {}
    with processes() as pool:
        measured = tracked(pool.map(measured_knee, tasks), "knees", len(tasks))
        for (scene, workers, _, _), best in zip(tasks, measured, strict=True):
            found.setdefault((workers, scene), []).append(best)
    listed = [
        Row(
            f"{scene}, {workers} workers: knee, requests/s",
            round(float(np.mean([rate for rate, _ in best])), 1),
            f"{', '.join(sorted({policy for _, policy in best}))}; now {knee(scene, workers)}",
        )
        for (workers, scene), best in found.items()
    ]
    return Report(name="quartz knees", rows=listed, detail={"seeds": SEEDS})


def measured_knee(task: KneeTask) -> tuple[float, str]:
    """What the best policy completes of more than that, and which policy it is."""
    scene, workers, seed, data = task
    offered = best = knee(scene, workers)
    policy = ""
    while best > _NEARLY_ALL * offered:
        offered *= _OFFERED
        demands = SCENES[scene](seed, offered, workers, 2 * requests_of(workers), data)
        best, policy = max(
            (completed_per_s(demands, other, workers, seed), other) for other in (DEFAULT, *OTHERS)
        )
    return best, policy


def completed_per_s(demands: Sequence[Demand], policy: str, workers: int, seed: int) -> float:
    """Requests a second that a policy completes while more arrive."""
    gateway = make(policy, workers, seed=seed)
    end_s = simulate(demands, [gateway], seed=seed, profiles=[WORKER] * workers).end_s
    last_s = demands[-1].arrival_s
    ended = (end_s > _WARM * last_s) & (end_s <= last_s)
    return float(ended.sum()) / ((1 - _WARM) * last_s)
