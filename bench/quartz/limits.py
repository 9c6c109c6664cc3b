"""What limits a worker besides prefill, and predictions that are wrong: scenes of bench quartz.

Requests with a common beginning on engines of few slots, and answers of unknown length on engines
whose KV cache fills, so that sequences preempt one another. Nobody knows a request's output.
"""

from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from bench.common.report import Row, at_most
from bench.quartz.lab import WORKERS, figures, make, run
from bench.quartz.workloads import (
    BURSTY,
    CHAT_SLO_S,
    MIXED,
    StreamShape,
    demand,
    fresh_segment,
    mixed,
    times_of,
)
from simulator.engine.engine import EngineProfile
from simulator.experiments.scheduling import WORKER, Demand

WORSE: Final = 1.1
"""QUARTZ's P99 is at most so many times FIFO-LL's."""
LARGE: Final = 32
"""Workers of the fleet in which K matters."""
FEW_SLOTS: Final = msgspec.structs.replace(WORKER, name="few slots", max_num_seqs=4)
LITTLE_KV: Final = msgspec.structs.replace(
    WORKER,
    name="little KV",
    kv_blocks=24_000 // WORKER.block_tokens,
    prefix_cache_tokens=24_000,
    max_model_len=16_000,
)
_POLICIES: Final = ("FIFO-LL", "Locality-aware", "QUARTZ")
LONG: Final = 6000
"""Requests where few wait: the first 20, which find empty caches, would be P99 of a third of it."""


def shared(
    seed: int,
    rate: float,
    *,
    stream: bool,
    prefixes: int = 1,
    bursts: float = 0.0,
    requests: int = 2000,
) -> list[Demand]:
    """Prompts of 5,500 tokens that begin with one of few prefixes, and short answers."""
    random = np.random.default_rng([seed, 19])
    shape = StreamShape(rate=rate, bursts=bursts, burst=32)
    out: list[Demand] = []
    for now_s in times_of(shape, random, requests):
        beginning = (800 + int(random.integers(prefixes)), 5500)
        segments = (beginning, fresh_segment(len(out), random.lognormal(4.0, 0.5)))
        output = int(np.clip(random.lognormal(np.log(60), 0.6), 8, 1024))
        client = f"client-{random.integers(32)}"
        asked = demand(now_s, client, segments, output, shape, CHAT_SLO_S, "shared")
        out.append(msgspec.structs.replace(asked, stream=stream, expected_output_tokens=72))
    return out


def unknown_lengths(seed: int, rate: float, requests: int = 1200) -> list[Demand]:
    """Short prompts whose answers are of 8 to 8,000 tokens, 350 on average."""
    random = np.random.default_rng([seed, 23])
    shape = StreamShape(rate=rate)
    out: list[Demand] = []
    for now_s in times_of(shape, random, requests):
        segments = ((5, 250), fresh_segment(len(out), random.lognormal(np.log(800), 0.6)))
        output = int(np.clip(random.lognormal(np.log(150), 1.3), 8, 8000))
        client = f"client-{random.integers(28)}"
        asked = demand(now_s, client, segments, output, shape, CHAT_SLO_S, "unknown")
        out.append(msgspec.structs.replace(asked, expected_output_tokens=350))
    return out


_SCENES: Final[dict[str, tuple[EngineProfile, int, Callable[[int], list[Demand]]]]] = {
    "Shared prompt, 4 slots": (
        FEW_SLOTS,
        6,
        lambda seed: shared(seed, 5.0, stream=True, requests=LONG),
    ),
    "Shared prompt, 4 slots, not streamed": (
        FEW_SLOTS,
        6,
        lambda seed: shared(seed, 5.0, stream=False, requests=LONG),
    ),
    "Shared prompt, 4 slots, not streamed, near the knee": (
        FEW_SLOTS,
        4,
        lambda seed: shared(seed, 8.0, stream=False),
    ),
    "Eight shared prompts, 4 slots, not streamed": (
        FEW_SLOTS,
        4,
        lambda seed: shared(seed, 7.0, stream=False, prefixes=8),
    ),
    "Shared prompt, 4 slots, bursts of 32, not streamed": (
        FEW_SLOTS,
        4,
        lambda seed: shared(seed, 4.0, stream=False, bursts=4.0),
    ),
    "Preempting engines, 3/s": (LITTLE_KV, 6, lambda seed: unknown_lengths(seed, 3.0)),
    "Preempting engines, 3.5/s": (LITTLE_KV, 6, lambda seed: unknown_lengths(seed, 3.5)),
    "Preempting engines, 4/s": (LITTLE_KV, 6, lambda seed: unknown_lengths(seed, 4.0)),
}
"""Engine, seeds, requests."""
SCENES: Final = len(_SCENES)


def limit_rows(step: Callable[[], None]) -> list[Row]:
    """Where slots or KV are what limits a worker; P99 to the first token, as the engine has it."""
    rows = []
    for name, (engine, seeds, demands_of) in _SCENES.items():
        found = {policy: _p99_s(policy, engine, seeds, demands_of) for policy in _POLICIES}
        step()
        least, others = found["FIFO-LL"], dict(found)
        ours = others.pop("QUARTZ")
        note = f"{ours:.2f} s; " + ", ".join(f"{k} {v:.2f}" for k, v in others.items())
        rows.append(at_most(f"{name}: P99 TTFT over FIFO-LL's", ours / least, WORSE, note))
    return rows


def _p99_s(
    policy: str, engine: EngineProfile, seeds: int, demands_of: Callable[[int], list[Demand]]
) -> float:
    tails = []
    for seed in range(seeds):
        gateway = make(policy, engine=engine)
        served = run(demands_of(seed), [gateway], seed=seed, profiles=[engine] * WORKERS)
        tails.append(float(np.quantile(served.ttft_s, 0.99)))
    return float(np.mean(tails))


def shift_rows(seeds: range, step: Callable[[], None]) -> list[Row]:
    """All predictions wrong, for good: QUARTZ without a fallback against FIFO with least-loaded."""
    rows = []
    for workload, shape in (("Mixed", MIXED), ("Mixed Bursty", BURSTY)):
        tails: dict[str, list[float]] = {}
        covered: dict[str, list[float]] = {}
        for seed in seeds:
            demands = mixed(seed, shape)
            for policy in ("FIFO-LL", "QUARTZ", "x3", "/3", "x3 or /3"):
                gateway = make(policy)
                served = run(demands, [gateway], seed=seed)
                tails.setdefault(policy, []).append(float(np.quantile(served.ttft_s, 0.99)))
                within = float(np.nanmean(served.within)) if policy != "FIFO-LL" else 0.0
                covered.setdefault(policy, []).append(within)
        step()
        least, true = np.mean(tails["FIFO-LL"]), np.mean(tails["QUARTZ"])
        for policy in ("x3", "/3", "x3 or /3"):
            ours = float(np.mean(tails[policy]))
            note = (
                f"{ours:.2f} s, FIFO-LL {least:.2f}, right predictions {true:.2f}; "
                f"coverage {np.mean(covered[policy]):.2f}"
            )
            metric = f"{workload}, predictions {policy}: P99 TTFT over FIFO-LL's"
            rows.append(at_most(metric, ours / float(least), WORSE, note))
    return rows


def parameter_rows(seeds: range, step: Callable[[], None]) -> list[Row]:
    """Lambda and K beside the paper's."""
    rows = []
    for workload, shape in (("Mixed", MIXED), ("Mixed Bursty", BURSTY)):
        for policy in ("lambda 0.02", "lambda 0.1", "QUARTZ", "lambda 2", "No Request Price"):
            name = "lambda 0.5, the default" if policy == "QUARTZ" else policy
            rows.append(_figures_row(f"{workload}, {name}", policy, WORKERS, shape, seeds))
            step()
    rate = 10.0 * LARGE / WORKERS
    large = msgspec.structs.replace(MIXED, rate=rate, clients=28 * LARGE // WORKERS)
    for policy in ("K 2", "K 4", "K 8", "QUARTZ", "K 32"):
        name = "K 16, the default" if policy == "QUARTZ" else policy
        metric = f"Mixed, {LARGE} workers, {name}"
        rows.append(_figures_row(metric, policy, LARGE, large, seeds[:2]))
        step()
    return rows


PARAMETERS: Final = 15


def _figures_row(metric: str, policy: str, workers: int, shape: StreamShape, seeds: range) -> Row:
    tails, late, waits, hits = [], [], [], []
    requests = 750 * workers
    for seed in seeds:
        demands = mixed(seed, shape, requests)
        served = run(demands, [make(policy, workers)], seed=seed, profiles=[WORKER] * workers)
        found = figures(demands, served)
        tails.append(found.p99_s)
        late.append(found.violations)
        waits.append(found.max_wait_s)
        hits.append(found.hit)
    note = (
        f"violations {100 * np.mean(late):.2f} %, max wait {np.mean(waits):.2f} s, "
        f"{100 * np.mean(hits):.1f} % cached"
    )
    return Row(metric=f"{metric}: P99 TTFT, s", measured=float(np.mean(tails)), note=note)
