"""Our columns of `bench fleetopt`: exact, mix, corrected, paged."""

import gc
import math
import time
from collections.abc import Callable
from statistics import median
from typing import Final, cast

import msgspec
import numpy as np

from bench.common.report import Row, equals, judged
from bench.common.steps import scaled
from planner.goals import Goals
from planner.plan import make_plan
from planner.profile import PAPER_A100
from planner.records import Question
from planner.search import Mode, sweep
from planner.split import size_ranges
from planner.workload.closed_form import best_boundary
from planner.workload.library import SHIPPED, Shipped
from planner.workload.moments import GAMMAS as ALL_GAMMAS
from planner.workload.moments import Prepared, boundaries_of, prepare
from planner.workload.workload import Workload, from_lengths

RATE: Final = 1000.0
WINDOW: Final = 65_536
GAMMAS: Final = (1.0, 1.5, 2.0)

_NO_BUDGET: Final = 10**9

# Mode -> homogeneous, and both pools at gamma 1, 1.5 and 2.
_Column = dict[Mode, tuple[int, str, str, str]]
_EXPECTED: Final[dict[str, _Column]] = {
    "azure": {
        "exact": (292, "44 + 131", "48 + 45", "49 + 2"),
        "mix": (292, "44 + 131", "78 + 45", "92 + 2"),
        "corrected": (277, "39 + 121", "68 + 41", "80 + 1"),
        "paged": (96, "39 + 60", "", ""),
    },
    "lmsys": {
        "exact": (127, "7 + 76", "7 + 63", "7 + 54"),
        "mix": (127, "7 + 76", "10 + 63", "11 + 54"),
        "corrected": (120, "6 + 70", "8 + 57", "10 + 49"),
        "paged": (44, "8 + 38", "", ""),
    },
    "agent-heavy": {
        "exact": (2517, "232 + 2039", "259 + 1997", "274 + 2017"),
        "mix": (2517, "232 + 2039", "377 + 1769", "495 + 1497"),
        "corrected": (2256, "203 + 1807", "328 + 1562", "429 + 1318"),
        "paged": (1652, "187 + 1467", "", ""),
    },
    "azure-pairs": {
        "exact": (114, "25 + 7", "27 + 3", ""),
        "corrected": (111, "22 + 7", "", ""),
        "paged": (25, "22 + 3", "", ""),
    },
}
_BEST_BOUNDARY: Final = {"azure": 8192, "lmsys": 8192, "agent-heavy": 24_576}
_NOTES: Final[dict[str, str]] = {
    "exact": "the published model without sampling noise",
    "mix": "compressed requests in the mix of the pool that serves them",
    "corrected": "slots and bandwidth alone: before Eq. 8, prefill budget and two nodes at least",
    "paged": "the same, with slots = min(256, .9 KV / time-weighted resident tokens)",
}


def columns(shipped: Shipped, name: str) -> list[Row]:
    """All columns of one workload, its best boundary, and what two pools buy."""
    workload, expected = shipped.workload, _EXPECTED[shipped.workload.name]
    rows = _columns(workload, name, shipped.b_short, shipped.compressible, expected)
    boundary = best_boundary(workload, WINDOW)
    wanted = _BEST_BOUNDARY[workload.name]
    note = "(C - B) f(B) it(B) = integral of it f up to B"
    rows.append(equals(f"closed form, {name}: best boundary at gamma 1", boundary, wanted, note))
    return [*rows, *_planned(workload, name, shipped.b_short, shipped.compressible)]


def pairs_columns(pairs: Workload) -> list[Row]:
    """The same for real pairs of prompt and answer."""
    name = "Azure pairs"
    rows = _columns(pairs, name, 4096, 1.0, _EXPECTED["azure-pairs"])
    return [*rows, *_planned(pairs, name, 4096, 1.0)]


def _columns(
    workload: Workload, name: str, b_short: int, compressible: float, expected: _Column
) -> list[Row]:
    sums = prepare(workload, boundaries=(b_short,), gammas=GAMMAS)
    rows = []
    for mode, wanted in expected.items():
        one, cells = fleet_sizes(sums, mode, compressible)
        rows.append(_row(f"{mode}, {name}: homogeneous", one, wanted[0], _NOTES[mode]))
        for gamma, cell, target in zip(GAMMAS, cells, wanted[1:], strict=True):
            stated = f"p_c {compressible:g}" if gamma > 1 else ""
            rows.append(_row(f"{mode}, {name}: two pools, gamma {gamma:g}", cell, target, stated))
    return rows


def _row(metric: str, measured: int | str, wanted: int | str, note: str) -> Row:
    if wanted == "":
        return Row(metric, measured, note)
    return judged(metric, measured, f"= {wanted}", measured == wanted, note)


def fleet_sizes(sums: Prepared, mode: Mode, compressible: float) -> tuple[int, list[str]]:
    """Nodes of one pool, and of two at every gamma of the only boundary; no floor of two nodes.

    `exact` and `mix` hold waits to 500 ms, as published; the others are sized by slots and
    bandwidth alone.
    """
    published = mode in {"exact", "mix"}
    goals = Goals(rate_per_s=RATE, ttft_s=0.5 if published else math.inf, least_nodes=1)
    profile = msgspec.structs.replace(PAPER_A100, max_num_batched_tokens=_NO_BUDGET)
    node = (sums, profile)
    one = size_ranges(sums, profile, mode, goals, WINDOW, only_whole=True).sized.nodes[0]
    grid = sweep(
        mode, goals, short=node, long=node, window_tokens=WINDOW, compressible=compressible
    )
    cells = [
        f"{short:g} + {long:g}"
        for short, long in zip(grid.short.nodes, grid.long.nodes, strict=True)
    ]
    return int(one), cells


def _planned(workload: Workload, name: str, b_short: int, compressible: float) -> list[Row]:
    """What `sluice plan` answers: Eq. 8 with prefill in it, two nodes at least, all boundaries."""
    rows = []
    for mode in ("corrected", "paged"):
        for slo_s in (0.5, 5.0):
            question = Question(
                workload=workload,
                goals=Goals(rate_per_s=RATE, ttft_s=slo_s),
                mode=mode,
                compressible=compressible,
                most_pools=2,
            )
            plan = make_plan(question)
            one = plan.one_paged if mode == "paged" else plan.one_by_slots
            best = min((plan.two, plan.compressed), key=lambda fleet: fleet.weight)
            rows.append(
                Row(
                    f"plan, {mode}, {name}: P99 TTFT {1000 * slo_s:g} ms",
                    f"{one.nodes or 'none'}; {plan.two.nodes or 'none'}; {best.nodes or 'none'}",
                    f"one pool; two; compressed with p_c {compressible:g}, at "
                    f"B {best.boundaries[0] if best.boundaries else 0}, gamma {best.gamma:g}",
                )
            )
    return [*rows, *_beyond_cost(workload, name, b_short)]


def _beyond_cost(workload: Workload, name: str, b_short: int) -> list[Row]:
    """Times of one pool and of two at equal numbers of nodes, capacity sizing, paged."""
    goals = Goals(rate_per_s=RATE, ttft_s=60.0)
    question = Question(workload=workload, goals=goals, b_short=(b_short,), gamma=1.0)
    equal = make_plan(question).equal_nodes
    if equal is None:
        return []
    pairs = (
        ("short requests' P99 TTFT", equal.one_short_ttft_s, equal.short_ttft_s),
        ("long requests' P99 TTFT", equal.one_ttft_s, equal.long_ttft_s),
        ("short requests' P99 TPOT", equal.one_tpot_s, equal.short_tpot_s),
        ("long requests' P99 TPOT", equal.one_tpot_s, equal.long_tpot_s),
    )
    return [
        Row(
            f"paged, {name}: {what}, two pools, ms",
            1000 * two if np.isfinite(two) else "without end",
            ratio=two / one if np.isfinite(two) else None,
            note=f"at {equal.nodes} nodes either way; one pool {1000 * one:.4g} ms",
        )
        for what, one, two in pairs
    ]


# -- how long a plan takes: the sweep over B x gamma, and its preparation

TRACE_REQUESTS: Final = 28_185
_RUNS: Final = scaled(200, 5)
_TRACE_RUNS: Final = scaled(40, 3)


def timing(pairs: Workload | None) -> list[Row]:
    """Medians on this machine, warm; the trace is made up where none is given."""
    rows = []
    for shipped in SHIPPED.values():
        rows += _timed(shipped.workload, shipped.compressible, _RUNS)
    trace = pairs or made_up_trace()
    return rows + _timed(trace, 1.0, _TRACE_RUNS)


def made_up_trace() -> Workload:
    """As many requests as the Azure 2023 traces have, log-normal, seeded."""
    random = np.random.default_rng(7)
    prompts = np.ceil(np.clip(random.lognormal(6.8, 1.0, TRACE_REQUESTS), 1, 16_000))
    answers = np.ceil(np.clip(random.lognormal(4.6, 0.9, TRACE_REQUESTS), 1, 2000))
    return from_lengths(prompts, answers, name="made-up trace")


def _timed(workload: Workload, compressible: float, runs: int) -> list[Row]:
    boundaries = boundaries_of(workload, WINDOW)
    sums = prepare(workload, boundaries=boundaries)
    taken = _milliseconds(
        lambda: prepare(workload, boundaries=boundaries_of(workload, WINDOW)), runs
    )
    rows = [_of_runs(f"timing, {workload.name}: preparation, ms", taken)]
    goals = Goals(rate_per_s=RATE)
    cells = len(boundaries) * len(ALL_GAMMAS)
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
        rows.append(_of_runs(metric, taken))
    return rows


def _of_runs(metric: str, taken: list[float]) -> Row:
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
