"""`bench phases`: prompts and answers on the same engines or apart, in virtual time.

Gateways are built from files, as `sluice serve` builds them, before engine models. Together is
chunked prefill: a prompt's chunks of up to 2,048 tokens lengthen the iterations of the answers
beside them. Assumed: constants of a node are those of either phase, links are never full.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from math import ceil
from multiprocessing import get_context
from statistics import median
from typing import Final, NamedTuple, TypeVar

import numpy as np

from bench.common.report import Report, Row, above, at_least, scaled, spread, tracked
from gateway.settings import parse
from planner.catalogue import gpu_named, model_named
from planner.goals import Goals
from planner.plan import make_plan
from planner.profile import roofline
from planner.records import Question
from planner.workload.workload import from_lengths
from simulator.fleet.arrivals import poisson
from simulator.fleet.traffic import Traffic
from simulator.pipeline.run import run_pipeline
from sluice.children import die_with_parent
from sluice.simulated.gateway import gateway_of, tenant_traffic, tenants_of

SEEDS: Final = (1, 2, 3)
WINDOW: Final = 32768
LINK_BYTES_PER_S: Final = 50e9
"""400 Gbit/s."""
NODE: Final = roofline(gpu_named("h100"), model_named("llama-3-70b"), gpus=8)
NODES: Final = 8
RANKS: Final = 4
RUN_S: Final = 100.0
"""At least; a fifth of it is not counted."""
CLEAR: Final = 1.5
"""A goal missed by this factor with one seed is missed."""
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


class Load(NamedTuple):
    """Lognormal prompts up to 16,000 tokens, geometric answers up to 8,000."""

    name: str
    prompt_tokens: float
    deviation_tokens: float
    answer_tokens: float


PROMPTS: Final = Load("prompt-heavy", 4000, 3000, 150)
ANSWERS: Final = Load("answer-heavy", 600, 500, 500)


class Cell(NamedTuple):
    """A load, its rate and its goals, P99s in seconds."""

    load: Load
    rate_per_s: float
    ttft_s: float
    tpot_s: float

    @property
    def name(self) -> str:
        """For a row."""
        goals = f"{self.ttft_s:g} s, {1000 * self.tpot_s:g} ms"
        return f"{self.load.name} {self.rate_per_s:g}/s, P99 TTFT and TPOT {goals}"


class Fleet(NamedTuple):
    """Engines; `prefill` 0: all compute prompts and answers."""

    prefill: int
    decode: int
    policy: str = ""
    """Of both phases; "": the defaults."""
    ranks: int = 1
    """Of each decode engine."""

    @property
    def nodes(self) -> int:
        """All, a rank counting as one."""
        return self.prefill + self.decode * self.ranks

    @property
    def name(self) -> str:
        """For a row."""
        return f"{self.prefill} + {self.decode * self.ranks}" if self.prefill else "together"


class Figures(NamedTuple):
    """Of one run, after the warm-up."""

    ttft_s: float
    """P99."""
    tpot_s: float
    """P99 over requests of the mean time between tokens."""
    tokens_per_s: float
    """Answered within the run."""
    attained: float
    """Share of the requests that were served within both goals."""


class Trial(NamedTuple):
    """One run."""

    cell: Cell
    fleet: Fleet
    seed: int

    @property
    def requests(self) -> int:
        """Enough for a P99, and for answers of P99 length to come and go."""
        return scaled(max(3000, round(RUN_S * self.cell.rate_per_s)), 300)


def run() -> Report:
    """All rows; SLUICE_BENCH_SHARE shortens runs, not their number."""
    with ProcessPoolExecutor(
        os.cpu_count(), mp_context=get_context("spawn"), initializer=die_with_parent
    ) as pool:
        rows = [*_splits(pool), *_policies(pool)]
        chosen = _over(pool, planned_and_best, CELLS, "plans and sweeps")
    return Report(name="phases", rows=[*rows, *_planned(chosen)])


def _over(
    pool: ProcessPoolExecutor, work: Callable[[_Task], _Result], tasks: Sequence[_Task], what: str
) -> list[_Result]:
    return list(tracked(pool.map(work, tasks), what, len(tasks)))


# -- one run


def trial(asked: Trial) -> Figures:
    """Run a fleet on a load."""
    cell, fleet = asked.cell, asked.fleet
    config = parse(_file(fleet), "bench.yaml", {})
    gateway = gateway_of(config, config.models[0], NODE, counting="paged")
    random = np.random.default_rng(asked.seed)
    traffic = _traffic(cell, asked.requests, random)
    sent = tenant_traffic(traffic, tenants_of(gateway.entitlements, None), random)
    outcome = run_pipeline(gateway, sent, seed=asked.seed).fleet
    low_s, high_s = outcome.window_s()
    settled = outcome.arrival_s >= low_s
    ttft_s, tpot_s = outcome.ttft_s[settled], outcome.tpot_s[settled]
    ended = (outcome.end_s > low_s) & (outcome.end_s <= high_s)
    # A request that was lost has no time: it is within no goal, and beyond any P99.
    within = (ttft_s <= cell.ttft_s) & ~(tpot_s > cell.tpot_s)
    return Figures(
        ttft_s=np.inf if np.isnan(ttft_s).mean() > 0.001 else float(np.nanquantile(ttft_s, 0.99)),
        tpot_s=float(np.nanquantile(tpot_s, 0.99)),
        tokens_per_s=float(outcome.output_tokens[ended].sum()) / (high_s - low_s),
        attained=float(within.mean()),
    )


def _file(fleet: Fleet) -> str:
    policy = f", scheduling: {{policy: {fleet.policy}}}" if fleet.policy else ""

    def engines(kind: str, count: int, ranks: int = 1) -> str:
        urls = ", ".join(f'{{url: "http://{kind}{i}:1", ranks: {ranks}}}' for i in range(count))
        return f"max_num_seqs: {NODE.max_num_seqs}, workers: [{urls}]{policy}"

    pool = engines("d", fleet.decode, fleet.ranks)
    if fleet.prefill:
        transfer = f"{{kind: vllm, bytes_per_second: {LINK_BYTES_PER_S:g}}}"
        prefill = engines("p", fleet.prefill)
        pool = f"prefill: {{{prefill}}}, decode: {{{pool}}}, transfer: {transfer}"
    return (
        "version: 1\nmodels:\n- name: m\n"
        f"  kv_bytes_per_token: {NODE.kv_bytes_per_token}\n"
        f"  pools: {{all: {{max_model_len: {WINDOW}, {pool}}}}}\n"
    )


def _traffic(cell: Cell, requests: int, random: np.random.Generator) -> Traffic:
    load = cell.load
    variance = np.log(1 + (load.deviation_tokens / load.prompt_tokens) ** 2)
    middle = np.log(load.prompt_tokens) - variance / 2
    prompts = random.lognormal(middle, np.sqrt(variance), requests).clip(16, 16000)
    answers = np.minimum(random.geometric(1 / load.answer_tokens, requests), 8000)
    return Traffic(
        arrival_s=poisson(cell.rate_per_s, requests, random),
        prompt_tokens=prompts.astype(np.int64),
        output_tokens=answers.astype(np.int64),
    )


# -- the same number of engines, together or apart

EQUAL: Final = (
    (Cell(PROMPTS, 20, 1.0, 0.015), (0, 3, 4, 5, 6)),
    (Cell(ANSWERS, 100, 0.25, 0.015), (0, 2, 3, 4, 5)),
)
"""With so many of the nodes for prompts."""


def _splits(pool: ProcessPoolExecutor) -> Iterator[Row]:
    cases = [(cell, Fleet(n, NODES - n)) for cell, prefill in EQUAL for n in prefill]
    for (cell, fleet), seeds in _by_seed(pool, cases, "equal nodes"):
        yield _row(f"{cell.name}, {NODES} nodes {fleet.name}", seeds)


def _by_seed(
    pool: ProcessPoolExecutor, cases: Sequence[tuple[Cell, Fleet]], what: str
) -> Iterator[tuple[tuple[Cell, Fleet], list[Figures]]]:
    tasks = [Trial(cell, fleet, seed) for cell, fleet in cases for seed in SEEDS]
    figures = _over(pool, trial, tasks, what)
    for place, case in enumerate(cases):
        yield case, figures[place * len(SEEDS) : (place + 1) * len(SEEDS)]


def _row(metric: str, seeds: Sequence[Figures]) -> Row:
    ttft_s, tpot_s, tokens_per_s, attained = map(median, zip(*seeds, strict=True))
    note = f"P99 TTFT {ttft_s:.3g} s, P99 TPOT {1000 * tpot_s:.3g} ms, {tokens_per_s:,.0f} tokens/s"
    shares = spread([100 * f.attained for f in seeds])
    return Row(f"{metric}: SLO attainment, %", 100 * attained, f"{note}; {shares}")


# -- the policies of each phase

BALANCED: Final = ((Cell(PROMPTS, 24, 1.5, 0.015), 5), (Cell(ANSWERS, 150, 0.3, 0.02), 5))
"""With so many prefill engines, before one decode engine of four ranks."""


def _policies(pool: ProcessPoolExecutor) -> Iterator[Row]:
    cases = [
        (cell, Fleet(prefill, 1, policy, ranks=RANKS))
        for cell, prefill in BALANCED
        for policy in ("", "round-robin")
    ]
    by_case = list(_by_seed(pool, cases, "policies"))
    for ((cell, fleet), ours), (_, plain) in zip(by_case[::2], by_case[1::2], strict=True):
        at = f"{cell.name}, {fleet.prefill} + 1 x {fleet.ranks} ranks"
        yield _row(f"{at}, round robin by phase", plain)
        yield _row(f"{at}, QUARTZ and BF-IO by phase", ours)
        for field, name in (("ttft_s", "TTFT"), ("tpot_s", "TPOT")):
            lower = [
                100 * (1 - getattr(a, field) / getattr(b, field))
                for a, b in zip(ours, plain, strict=True)
            ]
            yield above(f"{at}: P99 {name} lower by, %", median(lower), 0, spread(lower))


# -- the planner's choice against a sweep

CELLS: Final = (
    Cell(PROMPTS, 10, 1.0, 0.015),
    Cell(PROMPTS, 10, 1.5, 0.040),
    Cell(PROMPTS, 20, 1.0, 0.015),
    Cell(PROMPTS, 20, 1.5, 0.040),
    Cell(PROMPTS, 30, 2.0, 0.020),
    Cell(ANSWERS, 40, 0.3, 0.011),
    Cell(ANSWERS, 40, 0.3, 0.020),
    Cell(ANSWERS, 80, 0.3, 0.012),
    Cell(ANSWERS, 80, 0.5, 0.020),
    Cell(ANSWERS, 120, 0.3, 0.015),
)


class Chosen(NamedTuple):
    """Fleets for one cell; None: none holds the goals."""

    planned: Fleet | None
    together: Fleet | None
    apart: Fleet | None


def planned_and_best(cell: Cell) -> Chosen:
    """What the planner chooses, and the smallest fleets that hold in simulated runs."""
    holds = cache(partial(_holds, cell))
    fewest, most = ceil(cell.rate_per_s * NODE.prompt_s(cell.load.prompt_tokens)), 4 * NODES
    together = _least(lambda n: holds(Fleet(0, n)), fewest, most)
    apart = None
    prefill = _least(lambda n: holds(Fleet(n, most)), fewest, fewest + NODES)
    if prefill is not None:
        decode = _least(lambda n: holds(Fleet(prefill, n)), 1, most)
        apart = None if decode is None else Fleet(prefill, decode)
        # One more that computes prompts may spare two that decode.
        while apart and apart.decode > 2 and holds(Fleet(apart.prefill + 1, apart.decode - 2)):
            apart = Fleet(apart.prefill + 1, apart.decode - 2)
    return Chosen(_plan(cell), None if together is None else Fleet(0, together), apart)


def _least(holds: Callable[[int], bool], low: int, high: int) -> int | None:
    """The least number that holds, if more never hurt; doubling, then halving."""
    step, top = 1, low
    while not holds(top):
        if top == high:
            return None
        low, top, step = top + 1, min(high, top + step), 2 * step
    while low < top:
        middle = (low + top) // 2
        low, top = (low, middle) if holds(middle) else (middle + 1, top)
    return top


def _holds(cell: Cell, fleet: Fleet) -> bool:
    seeds: list[Figures] = []
    for seed in SEEDS:
        seeds.append(trial(Trial(cell, fleet, seed)))
        if max(seeds[-1].ttft_s / cell.ttft_s, seeds[-1].tpot_s / cell.tpot_s) > CLEAR:
            return False
    ttft_s, tpot_s = median(f.ttft_s for f in seeds), median(f.tpot_s for f in seeds)
    return bool(ttft_s <= cell.ttft_s and tpot_s <= cell.tpot_s)


def _plan(cell: Cell) -> Fleet | None:
    sample = _traffic(cell, 20_000, np.random.default_rng(0))
    lengths = sample.prompt_tokens.astype(float), sample.output_tokens.astype(float)
    question = Question(
        workload=from_lengths(*lengths, name=cell.load.name),
        goals=Goals(
            rate_per_s=cell.rate_per_s, ttft_s=cell.ttft_s, tpot_s=cell.tpot_s, least_nodes=1
        ),
        nodes=(NODE,),
        window_tokens=WINDOW,
        most_pools=1,
        phases="auto",
        transfer_bytes_per_s=LINK_BYTES_PER_S,
    )
    pools = make_plan(question).chosen.pools
    if not pools:
        return None
    phases = pools[0].phases
    return Fleet(0 if phases is None else phases.prefill_serving, pools[0].decode_serving)


def _planned(cells: Sequence[Chosen]) -> Iterator[Row]:
    near = 0
    for cell, chosen in zip(CELLS, cells, strict=True):
        swept = [fleet.nodes for fleet in (chosen.together, chosen.apart) if fleet]
        planned = chosen.planned
        near += planned is not None and bool(swept) and abs(planned.nodes - min(swept)) <= 1
        note = f"sweep: together {_nodes(chosen.together)}, apart {_nodes(chosen.apart)}"
        yield Row(f"{cell.name}: nodes planned", _nodes(planned), note)
    text = "cells where the plan is within a node of the sweep's best"
    yield at_least(text, near, 9, f"of {len(CELLS)}")


def _nodes(fleet: Fleet | None) -> str:
    return "none" if fleet is None else f"{fleet.nodes} ({fleet.name})"
