"""Runs of bench quartz: a policy on a workload with a seed, and the figures of each."""

import dataclasses
import gc
import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from bench.predictor.run import TRAINING_REQUESTS, rows_of
from bench.quartz.peers import (
    CacheAware,
    Gossip,
    Shifted,
    TokenFair,
    TwoChoices,
    Uncalibrated,
    WeightedScores,
)
from bench.quartz.workloads import HEAVY, MIXED, Workload, workloads
from gateway.fleet.fleet import PoolState
from gateway.scheduling.prefix_index import PrefixIndex
from gateway.scheduling.quartz_score import DEFAULT, QuartzProfile
from gateway.scheduling.schedulers import make_scheduler
from predictor.artifact import PoolSection
from predictor.online import PrefillPredictor
from predictor.train import train
from simulator.engine.engine import Engine, EngineProfile
from simulator.experiments.prefix_oracle import UnboundedPrefixes
from simulator.experiments.scheduling import (
    WORKER,
    Demand,
    ServedRequest,
    SimulatedGateway,
    Trouble,
    serve,
)
from simulator.experiments.scheduling_records import Prefixes
from sluice.children import die_with_parent

WORKERS: Final = 4
_TRAINING_SEED: Final = 100
"""No run that is reported has it."""
SETTLED: Final = 1000
"""Requests after which coverage is counted."""


def _but(**changes: Any) -> QuartzProfile:
    return dataclasses.replace(DEFAULT, **changes)


# Name -> scheduler and its profile.
POLICIES: Final[dict[str, tuple[str, QuartzProfile]]] = {
    "FIFO-LL": ("least-loaded", DEFAULT),
    "Locality-aware": ("sticky", DEFAULT),
    "PointPred": ("quartz", _but(quantile=False)),
    "QUARTZ": ("quartz", DEFAULT),
    "QUARTZ, trained": ("quartz", DEFAULT),
    "Routing-only": ("quartz", _but(order="arrival")),
    "Queueing-only": ("quartz", _but(request_price_s=1e3, locality_price=0.0, locality=False)),
    "No Calibration": ("quartz", DEFAULT),
    "No Fairness": ("quartz", _but(fairness_s_per_kilotoken=0.0)),
    "No Locality Feature": ("quartz", _but(locality=False)),
}


PEERS: Final[dict[str, tuple[Callable[[PoolState, int], Any], bool]]] = {
    "FIFO-P2C": (lambda pool, _: TwoChoices(pool), False),
    "TokenFair": (lambda pool, _: TokenFair(pool), False),
    "cache-aware": (lambda pool, _: CacheAware(pool), True),
    "cache-aware, bounded": (lambda pool, _: CacheAware(pool), False),
    "weighted": (WeightedScores, False),
}
"""Routers that are not in the gateway, and whether their index forgets nothing."""
VARIANTS: Final[dict[str, tuple[str, QuartzProfile]]] = {
    "lambda 0.02": ("quartz", _but(aging=0.02)),
    "lambda 2": ("quartz", _but(aging=2.0)),
    "K 2": ("quartz", _but(compared=2)),
    "K 8": ("quartz", _but(compared=8)),
    "K 32": ("quartz", _but(compared=32)),
    "x3": ("quartz", DEFAULT),
    "/3": ("quartz", DEFAULT),
    "x3 or /3": ("quartz", DEFAULT),
    "QUARTZ, endless index": ("quartz", DEFAULT),
}
"""QUARTZ with other parameters or wrong predictions, likewise."""
_SHIFTED: Final = {"x3": (3.0, 3.0), "/3": (1 / 3, 1 / 3), "x3 or /3": (1 / 3, 3.0)}
"""Policies whose predictions are off by one of two factors."""


class LabFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run, or means of several."""

    p50_s: float
    p95_s: float
    p99_s: float
    violations: float
    """Share of requests whose first token came after their SLO, or not at all."""
    others_violations: float
    """Of the clients but the heavy one."""
    max_wait_s: float
    hit: float
    """Cached share of all prompt tokens."""
    coverage: float
    """Of the prefills after SETTLED requests; NaN where nothing is predicted."""
    jain: float
    """Of the clients' mean ideal over actual TTFT."""
    long_slowdown: float
    """Mean TTFT of long requests over the same alone on a cold worker."""
    tokens_per_s: float
    lost: float


@cache
def trained() -> PoolSection:
    """A tree trained on another run of Mixed, as `sluice train` makes it; once a process."""
    return train(rows_of(MIXED, WORKER, TRAINING_REQUESTS, _TRAINING_SEED))


def make(
    policy: str,
    workers: int = WORKERS,
    engine: EngineProfile = WORKER,
    seed: int = 0,
    index: Prefixes | None = None,
) -> SimulatedGateway:
    """A fresh gateway with this policy, which has learned nothing but what was trained.

    `index`: QUARTZ's prefixes, where they are not the gateway's own kind.
    """
    slots = engine.max_num_seqs
    pool = PoolState("pool", tuple(f"w{i}" for i in range(workers)), slots)
    if policy in PEERS:
        peer, endless = PEERS[policy]
        theirs = UnboundedPrefixes(workers) if endless else PrefixIndex(workers)
        return SimulatedGateway(pool, peer(pool, seed), theirs)
    name, profile = (POLICIES | VARIANTS)[policy]
    predictor = _predictor(policy, workers, slots)
    scheduler = make_scheduler(
        name,
        pool,
        profile=profile,
        predictor=predictor,
        kv_usage=lambda worker, _: gateway.kv_usage[worker],
    )
    endless = policy == "QUARTZ, endless index"
    own = UnboundedPrefixes(workers) if endless else PrefixIndex(workers)
    prefixes = own if index is None else index
    gateway = SimulatedGateway(pool, scheduler, prefixes, predictor)
    return gateway


def _predictor(policy: str, workers: int, slots: int) -> PrefillPredictor:
    if policy in _SHIFTED:
        return Shifted(*_SHIFTED[policy], workers=workers, slots=slots)
    kind = Uncalibrated if policy == "No Calibration" else PrefillPredictor
    section = trained() if policy == "QUARTZ, trained" else None
    return kind(section, workers=workers, slots=slots)


def run(
    demands: Sequence[Demand],
    gateways: Sequence[SimulatedGateway],
    *,
    seed: int = 0,
    profiles: Sequence[EngineProfile] | None = None,
    troubles: Sequence[Trouble] = (),
    tell_prefixes: bool = True,
    on_engine: Callable[[int, Engine], None] | None = None,
) -> ServedRequest:
    """`serve` on the bench's workers, without the garbage collector: there are no cycles.

    Several gateways exchange notes; `tell_prefixes`: also of which prompts they sent where.
    """
    several = len(gateways) > 1
    gossip = Gossip(gateways, seed, prefixes=tell_prefixes) if several else None
    gc.disable()
    try:
        return serve(
            demands,
            gateways,
            profiles=profiles or [WORKER] * WORKERS,
            troubles=troubles,
            seed=seed,
            gossip=gossip,
            on_engine=on_engine,
        )
    finally:
        gc.enable()


def ideal_s(prompt_tokens: np.ndarray) -> np.ndarray:
    """TTFT of a prompt alone on a worker with nothing cached."""
    steps = np.ceil(prompt_tokens / WORKER.max_num_batched_tokens)
    alone: np.ndarray = steps * WORKER.w_s + prompt_tokens * WORKER.prefill_s_per_token
    return alone


def figures(demands: Sequence[Demand], served: ServedRequest) -> LabFigures:
    """What is reported of a run."""
    ttft_s = served.ttft_s
    slo_s = np.array([d.slo_s for d in demands])
    prompts = np.array([d.prompt_tokens for d in demands])
    outputs = sum(d.output_tokens for d in demands)
    clients = np.array([d.client for d in demands])
    late = ~(ttft_s <= slo_s)  # without a first token, too
    speed = ideal_s(prompts) / ttft_s
    mean = np.array([speed[clients == c].mean() for c in np.unique(clients)])
    long = slo_s > slo_s.min()
    within = served.within[SETTLED:]
    span_s = np.nanmax(served.end_s) - demands[0].arrival_s
    return LabFigures(
        p50_s=float(np.quantile(ttft_s, 0.5)),
        p95_s=float(np.quantile(ttft_s, 0.95)),
        p99_s=float(np.quantile(ttft_s, 0.99)),
        violations=float(late.mean()),
        others_violations=float(late[clients != HEAVY].mean()),
        max_wait_s=float(served.wait_s.max()),
        hit=float(served.cached_tokens.sum() / prompts.sum()),
        coverage=float(np.nanmean(within)) if np.isfinite(within).any() else math.nan,
        jain=float(mean.sum() ** 2 / (len(mean) * (mean**2).sum())),
        long_slowdown=float((1 / speed[long]).mean()) if long.any() else math.nan,
        tokens_per_s=float((prompts.sum() + outputs) / span_s),
        lost=served.lost,
    )


def mean_figures(found: Sequence[LabFigures]) -> LabFigures:
    """Each figure's mean."""
    names = LabFigures.__struct_fields__
    return LabFigures(**{n: float(np.mean([getattr(f, n) for f in found])) for n in names})


def over(
    policy: str,
    demands_of: Workload,
    seeds: Iterable[int],
    *,
    workers: int = WORKERS,
    engine: EngineProfile = WORKER,
) -> LabFigures:
    """Means of a policy over the seeds."""
    found = []
    for seed in seeds:
        demands = demands_of(seed)
        gateway = make(policy, workers, engine, seed)
        served = run(demands, [gateway], seed=seed, profiles=[engine] * workers)
        found.append(figures(demands, served))
    return mean_figures(found)


Task = tuple[str, int, tuple[str, ...], Path | None]
"""Workload, seed, policies, traces."""
Results = dict[tuple[str, str], list[LabFigures]]
"""(workload, policy) -> one entry a seed, in order."""


def run_task(task: Task) -> tuple[Task, list[LabFigures]]:
    """All policies of a task, on the same requests."""
    workload, seed, policies, data = task
    demands = workloads(data)[workload](seed)
    found = [figures(demands, run(demands, [make(p)], seed=seed)) for p in policies]
    return task, found


def processes() -> ProcessPoolExecutor:
    """A fresh process for each core."""
    return ProcessPoolExecutor(
        os.cpu_count(), mp_context=get_context("spawn"), initializer=die_with_parent
    )


def run_all(tasks: Iterable[Task], done: Callable[[], None]) -> Results:
    """All tasks, a process a core; `done` is called for each."""
    results: Results = {}
    found: dict[Task, list[LabFigures]] = {}
    listed = list(tasks)
    with processes() as pool:
        for task, values in pool.map(run_task, listed):
            found[task] = values
            done()
    for task in listed:
        for policy, value in zip(task[2], found[task], strict=True):
            results.setdefault((task[0], policy), []).append(value)
    return results


def mean_of(results: Results, workload: str, policy: str, field: str) -> float:
    """A figure's mean over the seeds."""
    return float(np.mean([getattr(f, field) for f in results[workload, policy]]))


def paired(
    results: Results, workload: str, policy: str, other: str, field: str
) -> tuple[float, float, float]:
    """Mean of the paired difference policy - other, and its 95 % interval (Student's t)."""
    a = np.array([getattr(f, field) for f in results[workload, policy]])
    b = np.array([getattr(f, field) for f in results[workload, other]])
    return float((a - b).mean()), *interval(a - b)


def interval(differences: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of the mean of paired differences (Student's t); unbounded for one."""
    n = len(differences)
    if n < 2:
        return -math.inf, math.inf
    # Two-sided .975 quantiles of t for n - 1 degrees of freedom, n = 2 ... 12.
    t = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)[
        min(n, 12) - 2
    ]
    half = t * float(differences.std(ddof=1)) / math.sqrt(n)
    middle = float(differences.mean())
    return middle - half, middle + half
