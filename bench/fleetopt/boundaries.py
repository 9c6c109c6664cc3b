"""`bench fleetopt boundaries`: boundaries by equal pressure against errors alone, two shifts."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from bench.common.report import Report, Row, above, bars, beside
from bench.quartz.lab import processes
from planner.workload.library import SHIPPED
from simulator.experiments.boundary_pressure import RULES, Rule, Shift
from simulator.experiments.boundary_pressure import run as run_shift

PLOT: Final = Path("docs/images/boundaries.png")
SEEDS: Final = 3
TTFT_S: Final = 5.0
_AZURE: Final = SHIPPED["azure"].workload.as_cdf().points
SHIFTS: Final = (
    Shift(
        name="prompts grow by 60 % in an hour",
        lengths=_AZURE,
        rate_per_s=13.0,
        growth=1.6,
        end_s=5400.0,
        last_s=7200.0,
        short_nodes=2,
        long_nodes=1,
    ),
    Shift(
        name="40 minutes of short prompts",
        lengths=_AZURE,
        rate_per_s=8.0,
        burst_per_s=5.0,
        end_s=4200.0,
        last_s=7200.0,
        short_nodes=1,
        long_nodes=2,
    ),
)

_COLOURS: Final[dict[Rule, str]] = {"fixed": "0.6", "errors": "#0072B2", "pressure": "#D55E00"}
_WORDS: Final[dict[Rule, str]] = {
    "fixed": "boundary fixed",
    "errors": "errors alone",
    "pressure": "errors and pressure",
}


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of one run."""

    within: float
    ttft_p99_s: tuple[float, float]
    moves: int
    boundaries: tuple[int, ...]
    """By minute."""
    ttft_by_minute_s: tuple[float, ...]
    """P99 of the requests that arrived in it."""


def run() -> Report:
    """Every shift under every rule, rows of the middle seed, and the plot."""
    tasks = list(product(range(len(SHIFTS)), RULES, range(SEEDS)))
    found: dict[tuple[int, Rule], list[Run]] = {}
    with bars() as bar, processes() as pool:
        step = bar("runs", len(tasks))
        for (shift, rule, _), one in zip(tasks, pool.map(_one, tasks), strict=True):
            found.setdefault((shift, rule), []).append(one)
            step()
    rows = [row for shift in range(len(SHIFTS)) for row in _rows(shift, found)]
    _plot(found)
    return Report(name="fleetopt boundaries", rows=rows, detail={"seeds": SEEDS})


def _one(task: tuple[int, Rule, int]) -> Run:
    shift, rule, seed = task
    found = run_shift(SHIFTS[shift], rule, seed)
    outcome = found.outcome
    minute = (outcome.arrival_s / 60).astype(int)
    return Run(
        within=found.served_within(TTFT_S),
        ttft_p99_s=(found.ttft_p99_s(0), found.ttft_p99_s(1)),
        moves=found.moves,
        boundaries=tuple(each.boundary for each in found.minutes),
        ttft_by_minute_s=tuple(
            float(np.quantile(outcome.ttft_s[minute == m], 0.99)) for m in range(minute.max() + 1)
        ),
    )


def _rows(shift: int, found: dict[tuple[int, Rule], list[Run]]) -> Iterator[Row]:
    name = SHIFTS[shift].name
    least = {rule: min(run.within for run in found[shift, rule]) for rule in RULES}
    for rule in RULES:
        worst = min(found[shift, rule], key=lambda run: run.within)
        note = (
            f"worst of {SEEDS} seeds; P99 TTFT {worst.ttft_p99_s[0]:.3g} s short, "
            f"{worst.ttft_p99_s[1]:.3g} s long; {worst.moves} moves, it ends at "
            f"{worst.boundaries[-1]}"
        )
        metric = f"{name}, {_WORDS[rule]}: % of first tokens within {TTFT_S:g} s"
        share = round(100 * least[rule], 1)
        if rule == "pressure":
            yield above(metric, share, round(100 * max(least["fixed"], least["errors"]), 1), note)
        else:
            yield beside(metric, share, None, note)


def _plot(found: dict[tuple[int, Rule], list[Run]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(2, len(SHIFTS), sharex=True, sharey="row")
    for (shift, rule), runs in found.items():
        upper, lower = axes[0][shift], axes[1][shift]
        style = {"color": _COLOURS[rule], "label": _WORDS[rule]}
        boundaries = runs[0].boundaries
        upper.step(range(1, len(boundaries) + 1), boundaries, where="post", **style)
        lower.plot(runs[0].ttft_by_minute_s, **style)
        lower.set(yscale="log", xlabel="minutes")
        upper.set_title(SHIFTS[shift].name)
        for axis in (upper, lower):
            axis.axvspan(SHIFTS[shift].start_s / 60, SHIFTS[shift].end_s / 60, color="0.94")
    axes[0][0].set_ylabel("boundary (tokens)")
    axes[1][0].set_ylabel("P99 time to first token (s)")
    axes[0][0].legend(loc="upper left")
    figure.savefig(PLOT, dpi=110)
