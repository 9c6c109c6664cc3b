"""`python -m bench quartz-loads`: the default scheduler over a grid of loads, beside routers.

Eight workloads, fleets of 4, 16 and 64 workers, loads of .5, .8, 1.0 and 1.2 of the knee, the
same requests for every policy. A cell is one workload, load and fleet. Targets of the default:

- P50, P99 and violations no worse than the best of the others in at least 85 % of the cells:
  within the 95 % interval of the paired difference, or 10 % or 50 ms (violations: 1 point).
- No collapse: hit rate at 1.2 of the knee at least .9 of that at .8.
- A heavy client raises the others' violations by at most 5 points.
- Where tenants have unequal targets (`targets`), knowing them costs no attainment.

All policies look for prefixes in an index of the gateway's own kind. `SLUICE_BENCH_FLEETS` and
`SLUICE_BENCH_SEEDS` make it shorter; with one seed there is no interval, and every difference
counts.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import Progress

from bench.common.report import Report, Row, at_least, at_most
from bench.quartz.lab import interval, processes
from bench.quartz.lab import run as simulate
from bench.quartz.peers import CacheAware, WeightedScores
from bench.quartz_loads import targets
from bench.quartz_loads.scenes import (
    FLEETS,
    HEAVY,
    HEAVY_SCENE,
    LOADS,
    SCENES,
    knee,
    requests,
)
from gateway.fleet.fleet import PoolState
from gateway.scheduling.prefix_index import PrefixIndex
from gateway.scheduling.schedulers import make_scheduler
from predictor.online import PrefillPredictor
from simulator.experiments.scheduling import (
    BLOCK_TOKENS,
    WORKER,
    Demand,
    ServedRequest,
    SimulatedGateway,
)

DEFAULT: Final = "quartz"
OTHERS: Final = ("sticky", "cache-aware", "least-loaded", "weighted")
ALONE: Final = "quartz, without the heavy client"
SEEDS: Final = 5
_HOLDS_SHARE: Final = 0.85


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One run. TTFT in seconds, violations and hits in per cent."""

    p50_s: float
    p90_s: float
    p99_s: float
    violations: float
    others_violations: float
    """Of the clients but the heavy one."""
    hits: float
    tokens_per_s: float


class LoadCell(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Where runs are compared."""

    scene: str
    workers: int
    load: float


Task = tuple[LoadCell, int, tuple[str, ...], Path | None]
"""Cell, seed, policies, folder with traces."""
Found = Mapping[tuple[LoadCell, str], Sequence[LoadFigures]]
"""By cell and policy, one entry a seed."""


def run(plot: Path | None = None, data: Path | None = None) -> Report:
    """The whole ground, or the part that the environment names."""
    fleets, seeds = asked(FLEETS)
    cells = [LoadCell(scene=s, workers=w, load=x) for s, w, x in product(SCENES, fleets, LOADS)]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("cells", total=len(cells) * seeds)
        found = run_cells(cells, seeds, data, lambda: progress.advance(task))
        task = progress.add_task("targets", total=targets.VARIANTS * seeds)
        told = targets.rows(range(seeds), lambda: progress.advance(task))
    detail: dict[str, object] = {"seeds": seeds, "rows": table(found)}
    if plot is not None:
        from bench.quartz_loads.plot import draw

        detail["plots"] = [str(file) for file in draw(found, plot)]
    return Report(name="quartz-loads", rows=[*rows(found), *told], detail=detail)


def asked(fleets: Sequence[int]) -> tuple[Sequence[int], int]:
    """Fleets and seeds that the environment names; `fleets` where it names none."""
    named = [int(n) for n in os.environ.get("SLUICE_BENCH_FLEETS", "").split()]
    return named or fleets, int(os.environ.get("SLUICE_BENCH_SEEDS", SEEDS))


def run_cells(
    cells: Iterable[LoadCell], seeds: int, data: Path | None, done: Callable[[], None]
) -> Found:
    """All policies in these cells, a process a core."""
    tasks: list[Task] = [
        (c, seed, (DEFAULT, *OTHERS, *((ALONE,) if c.scene == HEAVY_SCENE else ())), data)
        for c in cells
        for seed in range(seeds)
    ]
    found: dict[tuple[LoadCell, str], list[LoadFigures]] = {}
    with processes() as pool:
        for (cell, _, policies, _), values in zip(tasks, pool.map(run_task, tasks), strict=True):
            for policy, seen in zip(policies, values, strict=True):
                found.setdefault((cell, policy), []).append(seen)
            done()
    return found


def run_task(task: Task) -> list[LoadFigures]:
    """Each policy on the same requests."""
    cell, seed, policies, data = task
    rate = knee(cell.scene, cell.workers) * cell.load
    demands = SCENES[cell.scene](seed, rate, cell.workers, requests(cell.workers), data)
    alone = [d for d in demands if d.client != HEAVY]
    return [
        seen(alone, DEFAULT, cell.workers, seed)
        if policy == ALONE
        else seen(demands, policy, cell.workers, seed)
        for policy in policies
    ]


def seen(demands: Sequence[Demand], policy: str, workers: int, seed: int) -> LoadFigures:
    """Run one policy, which has learned nothing before."""
    gateway = make(policy, workers, seed)
    served = simulate(demands, [gateway], seed=seed, profiles=[WORKER] * workers)
    return figures(demands, served)


def figures(demands: Sequence[Demand], served: ServedRequest) -> LoadFigures:
    """What is compared of a run. RuntimeError where a request was lost: all workers are well."""
    if served.lost:
        raise RuntimeError(f"{served.lost} requests were lost")
    ttft_s = served.ttft_s
    late = ~(ttft_s <= np.array([d.slo_s for d in demands]))  # without a first token, too
    others = np.array([d.client != HEAVY for d in demands])
    prompts = sum(d.prompt_tokens for d in demands)
    span_s = float(np.nanmax(served.end_s)) - demands[0].arrival_s
    return LoadFigures(
        p50_s=float(np.quantile(ttft_s, 0.5)),
        p90_s=float(np.quantile(ttft_s, 0.9)),
        p99_s=float(np.quantile(ttft_s, 0.99)),
        violations=100 * float(late.mean()),
        others_violations=100 * float(late[others].mean()),
        hits=100 * float(served.cached_tokens.sum()) / prompts,
        tokens_per_s=(prompts + sum(d.output_tokens for d in demands)) / span_s,
    )


def make(policy: str, workers: int, seed: int) -> SimulatedGateway:
    """A fresh gateway with this policy."""
    pool = PoolState("pool", tuple(f"w{i}" for i in range(workers)), WORKER.max_num_seqs)
    if policy == "cache-aware":
        return SimulatedGateway(pool, CacheAware(pool), PrefixIndex(workers))
    if policy == "weighted":
        kv_tokens = WORKER.kv_blocks * BLOCK_TOKENS
        return SimulatedGateway(pool, WeightedScores(pool, kv_tokens, seed), PrefixIndex(workers))
    predictor = PrefillPredictor(workers=workers)
    scheduler = make_scheduler(policy, pool, predictor=predictor)
    return SimulatedGateway(pool, scheduler, PrefixIndex(workers), predictor)


# What is asked


class Miss(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of a cell in which another policy is better."""

    field: str
    other: str
    mine: float
    theirs: float


_ALLOWED: Final = {"p50_s": 0.05, "p99_s": 0.05, "violations": 1.0}
"""By so much the default may be worse than the best; seconds, or points."""


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
    listed += _collapse_rows(found)
    listed += _heavy_rows(found)
    for cell in cells:
        text = f"{cell.scene}, {cell.workers} workers, {cell.load:g} of the knee"
        note = "; ".join(f"{m.field} {m.mine:.3g}, {m.other} {m.theirs:.3g}" for m in missed[cell])
        listed.append(Row(metric=text, measured=_shown(found, cell), note=note or "holds"))
    return listed


def _collapse_rows(found: Found) -> list[Row]:
    out = []
    for scene, workers in sorted({(c.scene, c.workers) for c, _ in found}):
        far, near = (
            float(
                _values(
                    found, LoadCell(scene=scene, workers=workers, load=x), DEFAULT, "hits"
                ).mean()
            )
            for x in (1.2, 0.8)
        )
        note = f"{near:.1f} -> {far:.1f} %"
        metric = f"{scene}, {workers} workers: hits at 1.2 over hits at .8 of the knee"
        out.append(at_least(metric, far / near, 0.9, note))
    return out


def _heavy_rows(found: Found) -> list[Row]:
    out = []
    for cell in sorted(cell for cell, policy in found if policy == ALONE):
        beside, alone = (
            float(_values(found, cell, policy, "others_violations").mean())
            for policy in (DEFAULT, ALONE)
        )
        metric = f"{cell.workers} workers, {cell.load:g} of the knee: a heavy client adds, points"
        note = f"others' violations {alone:.1f} -> {beside:.1f} %"
        out.append(at_most(metric, beside - alone, 5.0, note))
    return out


def _values(found: Found, cell: LoadCell, policy: str, field: str) -> np.ndarray:
    return np.array([getattr(value, field) for value in found[cell, policy]])


def _shown(found: Found, cell: LoadCell) -> str:
    p50, p99, late, hits = (
        float(_values(found, cell, DEFAULT, f).mean())
        for f in ("p50_s", "p99_s", "violations", "hits")
    )
    return f"P50 {p50:.2f} s, P99 {p99:.2f} s, {late:.1f} % late, {hits:.1f} % hits"


def table(found: Found) -> list[dict[str, object]]:
    """All figures, means over the seeds, for machines."""
    return [
        {
            **msgspec.structs.asdict(cell),
            "policy": policy,
            **{
                f: float(_values(found, cell, policy, f).mean())
                for f in LoadFigures.__struct_fields__
            },
        }
        for cell, policy in sorted(found)
    ]
