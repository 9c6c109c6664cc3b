"""The solver alone: its distance from the optimum, and its CPU time."""

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from bench.common.report import Row, at_most
from gateway.scheduling.rank_solver import Floats, assign, fcfs, imbalance

INSTANCES: Final = 50
_WORKERS: Final = 64
_WAITING: Final = 128
_TIMED: Final = 150
_BEST_OF: Final = 3
_GAP: Final = 0.1
Make = Callable[[int, int], tuple[Floats, list[int], list[float]]]
Instance = tuple[Floats, list[int], list[float], list[float]]


def rows() -> list[Row]:
    """Gap to the exact optimum; milliseconds."""
    return [*_gaps(), *_timing()]


def _gaps() -> list[Row]:
    found = []
    for horizon in (0, 4):
        both = [_against(small_instance(seed, horizon)) for seed in range(INSTANCES)]
        ours, best, plain = np.array(both).T
        at = f"solver, {INSTANCES} small instances, H={horizon}"
        gap = float((ours / best - 1).mean())
        found.append(at_most(f"{at}: mean gap to exact", gap, _GAP))
        found.append(at_most(f"{at}: worse than FIFO", int((ours > plain + 1e-6).sum()), 0))
        both = [_against(tight_instance(seed, horizon)) for seed in range(INSTANCES)]
        ours, best, _ = np.array(both).T
        gap = float(ours.sum() / best.sum() - 1)
        metric = f"{at}, optimum near 0: gap of the sums"
        found.append(at_most(metric, gap, _GAP))
    return found


def _against(given: tuple[Floats, list[int], list[float]]) -> tuple[float, float, float]:
    load, cap, sizes = given
    pairs = assign(load, cap, sizes, [0.0] * len(sizes), maxage=None)
    plain = list(enumerate(fcfs(cap, len(sizes))))
    return (
        objective(load, sizes, pairs),
        least_objective(load, cap, sizes),
        objective(load, sizes, plain),
    )


def _timing() -> list[Row]:
    found = []
    for horizon in (0, 20):
        for slots in (1, 8, 32, 64):
            taken = []
            random = np.random.default_rng([horizon, slots])
            for _ in range(_TIMED):
                given = instance(random, slots, horizon)
                taken.append(min(_milliseconds(given) for _ in range(_BEST_OF)))
            at = f"solver, G={_WORKERS}, R={_WAITING}, U={slots}, H={horizon}"
            median, p95 = np.quantile(taken, (0.5, 0.95))
            for name, value in (("median", median), ("p95", p95)):
                metric = f"{at}: {name}, ms of processor"
                found.append(Row(metric, float(value)))
    return found


def instance(random: np.random.Generator, slots: int, horizon: int) -> Instance:
    """A large group in mid-run: loads 5 % uneven, some of each worker's requests leaving."""
    leaving = 1 - random.uniform(0, 0.008, (_WORKERS, horizon))
    now = random.normal(80_000, 4000, (_WORKERS, 1))
    load = now * np.cumprod(np.concatenate((np.ones((_WORKERS, 1)), leaving), axis=1), axis=1)
    cap = np.bincount(random.integers(0, _WORKERS, slots), minlength=_WORKERS).tolist()
    sizes = np.clip(np.rint(random.lognormal(6.3, 0.95, _WAITING)), 1, 16_000).tolist()
    return load, cap, sizes, [float(w) for w in range(_WAITING, 0, -1)]


def _milliseconds(given: Instance) -> float:
    load, cap, sizes, waits = given
    start = time.process_time()
    assign(load, cap, sizes, waits, maxage=500.0)
    return 1000 * (time.process_time() - start)


# -- (IO) solved exactly by HiGHS: a reference, too slow for anything else


def objective(load: Floats, sizes: Sequence[float], pairs: Sequence[tuple[int, int]]) -> float:
    """J: the predicted imbalance over the window, in tokens, after placing these pairs."""
    after = np.array(load, dtype=np.float64).reshape(len(load), -1)
    for item, worker in pairs:
        after[worker] += sizes[item] + np.arange(after.shape[1])
    return imbalance(after)


def least_objective(load: Floats, cap: Sequence[int], sizes: Sequence[float]) -> float:
    """The least J over all assignments that fill min(items, slots) slots; load is (G, H+1)."""
    workers, steps = load.shape
    items = len(sizes)
    grown = np.arange(steps, dtype=np.float64)
    x, variables = items * workers, items * workers + steps
    cost = np.zeros(variables)
    cost[x:] = workers
    cost[:x] = -np.repeat([steps * s + grown.sum() for s in sizes], workers)
    rows: list[Floats] = []
    low: list[float] = []
    high: list[float] = []

    def constrain(row: Floats, least: float, most: float) -> None:
        rows.append(row)
        low.append(least)
        high.append(most)

    for item in range(items):
        row = np.zeros(variables)
        row[item * workers : (item + 1) * workers] = 1
        constrain(row, 0, 1)
    for worker in range(workers):
        row = np.zeros(variables)
        row[worker:x:workers] = 1
        constrain(row, 0, cap[worker])
    row = np.zeros(variables)
    row[:x] = 1
    constrain(row, min(items, sum(cap)), np.inf)
    for worker in range(workers):
        for h in range(steps):
            row = np.zeros(variables)
            row[x + h] = 1
            row[worker:x:workers] = [-(s + grown[h]) for s in sizes]
            constrain(row, float(load[worker, h]), np.inf)
    # The first x variables are 0 or 1, the others at least 0.
    found = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), low, high),
        integrality=np.concatenate((np.ones(x), np.zeros(steps))),
        bounds=Bounds(np.zeros(variables), np.concatenate((np.ones(x), np.full(steps, np.inf)))),
        options={"mip_rel_gap": 0.0},
    )
    if found.status != 0:
        raise RuntimeError(f"HiGHS found no optimum: {found.message}")
    return float(found.fun) - float(load.sum())


def small_instance(seed: int, horizon: int) -> tuple[Floats, list[int], list[float]]:
    """Eight workers 5 % uneven, up to eight free slots, twice as many prompts and a few."""
    random = np.random.default_rng([seed, horizon])
    slots = int(random.integers(1, 9))
    return _instance(random, (8, slots, 2 * slots + 6), (80_000, 4000), horizon)


def tight_instance(seed: int, horizon: int) -> tuple[Floats, list[int], list[float]]:
    """Few and very uneven workers: the optimum is often next to nothing, or all must go."""
    random = np.random.default_rng([seed, horizon])
    workers, slots, items = (int(random.integers(a, b)) for a, b in ((3, 7), (1, 7), (4, 13)))
    return _instance(random, (workers, slots, items), (8000, 1500), horizon)


def _instance(
    random: np.random.Generator,
    shape: tuple[int, int, int],
    load: tuple[float, float],
    horizon: int,
) -> tuple[Floats, list[int], list[float]]:
    workers, slots, items = shape
    leaving = 1 - random.uniform(0, 0.02, (workers, horizon))
    now = random.normal(*load, (workers, 1))
    ahead = now * np.cumprod(np.concatenate((np.ones((workers, 1)), leaving), axis=1), axis=1)
    cap = np.bincount(random.integers(0, workers, slots), minlength=workers)
    sizes = np.clip(np.rint(random.lognormal(6.3, 0.95, items)), 1, 16_000)
    return ahead, cap.tolist(), sizes.tolist()
