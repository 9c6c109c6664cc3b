"""Duration of a plan: the sweep over B x gamma, and its preparation."""

import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Final, cast

import numpy as np

from bench.common.report import Row
from planner.goals import Goals
from planner.profile import PAPER_A100
from planner.search import Mode, sweep
from planner.workload.library import SHIPPED
from planner.workload.moments import GAMMAS, boundaries_of, prepare
from planner.workload.workload import Workload, from_lengths

RATE: Final = 1000.0
WINDOW: Final = 65_536
TRACE_REQUESTS: Final = 28_185
_RUNS: Final = 200
_TRACE_RUNS: Final = 40


def timing(pairs: Workload | None) -> list[Row]:
    """Medians on this machine, warm; the trace is made up where none is given."""
    rows = []
    for shipped in SHIPPED.values():
        rows += _rows(shipped.workload, shipped.compressible, _RUNS)
    trace = pairs or made_up_trace()
    return rows + _rows(trace, 1.0, _TRACE_RUNS)


def made_up_trace() -> Workload:
    """As many requests as the Azure 2023 traces have, log-normal, seeded."""
    random = np.random.default_rng(7)
    prompts = np.ceil(np.clip(random.lognormal(6.8, 1.0, TRACE_REQUESTS), 1, 16_000))
    answers = np.ceil(np.clip(random.lognormal(4.6, 0.9, TRACE_REQUESTS), 1, 2000))
    return from_lengths(prompts, answers, name="made-up trace")


def _rows(workload: Workload, compressible: float, runs: int) -> list[Row]:
    boundaries = boundaries_of(workload, WINDOW)
    sums = prepare(workload, boundaries=boundaries)
    taken = _milliseconds(
        lambda: prepare(workload, boundaries=boundaries_of(workload, WINDOW)), runs
    )
    rows = [_row(f"timing, {workload.name}: preparation, ms", taken)]
    goals = Goals(rate_per_s=RATE)
    cells = len(boundaries) * len(GAMMAS)
    for mode in ("exact", "mix", "corrected", "paged"):
        taken = _milliseconds(
            lambda mode=mode: sweep(  # type: ignore[misc]
                cast("Mode", mode),
                goals,
                short=(sums, PAPER_A100),
                long=(sums, PAPER_A100),
                window_tokens=WINDOW,
                compressible=compressible,
            ),
            runs,
        )
        metric = f"timing, {workload.name}: {mode} sweep of {cells} cells, ms"
        rows.append(_row(metric, taken))
    return rows


def _row(metric: str, taken: list[float]) -> Row:
    middle = median(taken)
    return Row(metric, middle, f"median of {len(taken)}; best {min(taken):.3f}")


def _milliseconds(work: Callable[[], object], runs: int) -> list[float]:
    """Of each run, after one that is thrown away."""
    work()
    collecting = gc.isenabled()
    gc.disable()
    try:
        taken = []
        for _ in range(runs):
            started_s = time.perf_counter()
            work()
            taken.append(1000 * (time.perf_counter() - started_s))
    finally:
        if collecting:
            gc.enable()
    return taken
