"""(IO) solved exactly by HiGHS: a reference for the solver, too slow for anything else."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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
    return _least(cost, LinearConstraint(np.array(rows), low, high), x) - float(load.sum())


def _least(cost: Floats, constraints: LinearConstraint, binary: int) -> float:
    """The optimum; the first `binary` variables are 0 or 1, the others at least 0."""
    others = len(cost) - binary
    found = milp(
        cost,
        constraints=constraints,
        integrality=np.concatenate((np.ones(binary), np.zeros(others))),
        bounds=Bounds(
            np.zeros(len(cost)), np.concatenate((np.ones(binary), np.full(others, np.inf)))
        ),
        options={"mip_rel_gap": 0.0},
    )
    if found.status != 0:
        raise RuntimeError(f"HiGHS found no optimum: {found.message}")
    return float(found.fun)


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
