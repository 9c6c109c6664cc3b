"""Plots of `bench fleetopt`: nodes by model, cost over B x gamma, a boundary that moves."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.common.plot import Line, Panel, draw
from bench.fleetopt.boundary import SCENARIO, WITHIN_S
from bench.fleetopt.columns import GAMMAS, fleet_sizes
from planner.goals import Goals
from planner.plan import make_plan
from planner.records import Question
from planner.search import Mode
from planner.workload.library import SHIPPED
from planner.workload.moments import prepare
from simulator.experiments.boundary_auto import run
from sluice.plan.plot import draw as draw_plan

_MODES: Final[tuple[Mode, ...]] = ("exact", "mix", "corrected", "paged")


def plots(folder: Path) -> list[str]:
    """Draw all; their files."""
    files = [draw(folder, "fleetopt-nodes", list(_nodes()), 3)]
    for name, shipped in SHIPPED.items():
        question = Question(
            workload=shipped.workload,
            goals=Goals(rate_per_s=1000.0, ttft_s=5.0),
            compressible=shipped.compressible,
        )
        files += map(str, draw_plan(make_plan(question), folder / f"fleetopt-{name}"))
    return [*files, draw(folder, "boundary-auto", list(_boundary()), 1)]


def _nodes() -> Iterator[Panel]:
    """One pool, and two at each gamma."""
    labels = ["one pool", *(f"gamma {g:g}" for g in GAMMAS)]
    for shipped in SHIPPED.values():
        sums = prepare(shipped.workload, boundaries=(shipped.b_short,), gammas=GAMMAS)
        bars: dict[str, dict[str, list[float]]] = {}
        for mode in _MODES:
            one, cells = fleet_sizes(sums, mode, shipped.compressible)
            heights = [one, *(sum(map(int, cell.split(" + "))) for cell in cells)]
            bars[mode] = {label: [n] for label, n in zip(labels, heights, strict=True)}
        title = f"{shipped.workload.name}, B = {shipped.b_short:,}: nodes at 1,000 requests/s"
        yield Panel(title=title, bars=bars)


def _boundary() -> Iterator[Panel]:
    """Boundary and preemptions after a step in traffic, with the controller and without."""
    found = {"auto": run(SCENARIO), "fixed": run(SCENARIO, active=False)}
    at = {name: [minute.at_s / 60 for minute in one.minutes] for name, one in found.items()}
    step, end = SCENARIO.step_s / 60, SCENARIO.end_s / 60
    spans = [(step, step + WITHIN_S / 60)]
    yield Panel(
        title="Boundary (tokens); two short nodes, from 20 to 28 requests/s",
        spans=spans,
        xlim=(0, end),
        ylim=(0, None),
        lines=[
            Line(x=at[name], y=[m.boundary for m in one.minutes], label=name, step=True)
            for name, one in found.items()
        ],
    )
    yield Panel(
        title="preemptions for 100 requests",
        xlabel="time (min)",
        spans=spans,
        levels=(1.0,),
        log="ys",
        xlim=(0, end),
        ylim=(0, 150),
        lines=[
            Line(
                x=at[name],
                y=[100 * m.sample.preemptions / max(1.0, m.sample.finished) for m in one.minutes],
                label=name,
            )
            for name, one in found.items()
        ],
    )
