"""Plots of a plan: cost over B x gamma, lengths with the compression window, simulated figures."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from planner.records import PlanResult
from simulator.experiments.verdict_records import PoolVerdict
from sluice.plan.verify import Verification

_COLOURS = ("#0072B2", "#D55E00", "#009E73")


def draw(plan: PlanResult, folder: Path, checked: Verification | None = None) -> list[Path]:
    """Draw the plots for which there is data; returns their files."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"plan-distribution.png": _distribution(plan)}
    if plan.grid and np.isfinite(np.array(plan.grid)).any():
        figures["plan-cost.png"] = _cost(plan)
    if checked is not None:
        figures["plan-verified.png"] = _verified(checked)
    files = []
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=120)
        files.append(folder / name)
    return files


def _cost(plan: PlanResult) -> Figure:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    cost = np.array(plan.grid)
    shown = np.ma.masked_invalid(cost)
    image = axes.imshow(shown, aspect="auto", origin="lower", cmap="viridis_r")
    axes.set_xticks(range(len(plan.grid_gammas)), [f"{g:g}" for g in plan.grid_gammas])
    axes.set_yticks(range(len(plan.grid_boundaries)), [f"{b:,}" for b in plan.grid_boundaries])
    axes.set(xlabel="gamma", ylabel="boundary (tokens)")
    axes.set_title("Cost of two pools; white: the goals cannot be met")
    row, column = np.unravel_index(int(np.argmin(cost)), cost.shape)
    axes.plot(column, row, "o", color=_COLOURS[1], ms=10, mfc="none", mew=2, label="cheapest")
    axes.legend(loc="upper right")
    figure.colorbar(image, ax=axes, label="$ per hour (nodes where no price is known)")
    return figure


def _verified(checked: Verification) -> Figure:
    figure = Figure(figsize=(9, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [pool.name for pool in checked.planned]
    planned, seen = checked.planned, checked.verdict.pools
    used = [[100 * p.utilisation for p in planned], [100 * u for u in checked.slots_used]]
    first = [[1000 * p.ttft_p99_s for p in pools] for pools in (planned, seen)]
    spans = [_off(pool) for pool in seen]
    _beside(left, names, used)
    _beside(right, names, first)
    at = np.arange(len(names)) + 0.2
    right.errorbar(at, first[1], yerr=np.array(spans).T, fmt="none", color="black", capsize=4)
    right.axhline(1000 * checked.goals.ttft_s, color="black", lw=1, ls="--", label="SLO")
    left.set(ylabel="planned slots in use (%)", ylim=(0, max(102, 1.05 * max(used[1]))))
    right.set(ylabel="P99 time to first token (ms)", yscale="log")
    right.yaxis.set_major_formatter("{x:g}")
    if max(map(max, first)) < 30 * min(map(min, first)):
        right.yaxis.set_minor_formatter("{x:g}")
    for axes in (left, right):
        axes.grid(axis="y", alpha=0.3)
    right.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(f"Planned and simulated: {'holds' if checked.holds else 'does not hold'}")
    return figure


def _beside(axes: Axes, names: list[str], values: list[list[float]]) -> None:
    at = np.arange(len(names))
    for i, label in enumerate(("planned", "simulated")):
        axes.bar(at + 0.4 * i - 0.2, values[i], 0.38, color=_COLOURS[i], label=label)
    axes.set_xticks(at, names)


def _off(pool: PoolVerdict) -> tuple[float, float]:
    """Distance to the 95 % bounds below and above, milliseconds; zeros if there are none."""
    bounds = pool.ttft_p99
    if bounds is None:
        return 0.0, 0.0
    low = min(bounds.value - bounds.low, 0.9 * bounds.value)
    return 1000 * low, 1000 * (bounds.high - bounds.value)


def _distribution(plan: PlanResult) -> Figure:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    cdf = plan.question.workload.as_cdf()
    axes.plot([1, *cdf.tokens], [0.0, *cdf.shares], color=_COLOURS[0], lw=1.5)
    fleet = (
        plan.chosen
        if plan.chosen.boundaries
        else min((plan.two, plan.compressed), key=lambda f: f.weight)
    )
    _boundaries(axes, fleet.boundaries, fleet.gamma if fleet.gamma > 1 else 1.5)
    axes.set_xscale("log", base=2)
    marks = [4**k for k in range(3, 11) if 4**k <= 2 * cdf.tokens[-1]]
    axes.set_xticks(marks, [f"{m // 1024}K" if m >= 1024 else str(m) for m in marks])
    axes.set(xlabel="total tokens", ylabel="share of requests", ylim=(0, 1.02))
    axes.set_title(f"Lengths of {plan.question.workload.name}")
    axes.grid(alpha=0.3)
    if fleet.boundaries:
        axes.legend(loc="lower right")
    return figure


def _boundaries(axes: Axes, boundaries: tuple[int, ...], gamma: float) -> None:
    for b_short in boundaries:
        axes.axvline(b_short, color=_COLOURS[1], lw=1.2, label=f"boundary {b_short:,}")
    if boundaries:
        low = boundaries[0]
        axes.axvspan(low, gamma * low, color=_COLOURS[1], alpha=0.2, label=f"band, gamma {gamma:g}")
