"""BF-IO as a gateway can run it: no starvation, no oracle, requests arriving over time."""

from typing import Final

import numpy as np

from bench.bfio.table import (
    GROUP,
    SEEDS,
    burst,
    by_class,
    by_kaplan_meier,
    mean_of,
    summary,
)
from bench.common.report import Advance, Bar, Row, at_least, at_most
from simulator.barrier.group import Policy, simulate_group
from simulator.barrier.lookahead import Oracle
from simulator.barrier.policies import BfIo, Fcfs, Jsq, LeastKv, RoundRobinPolicy
from simulator.barrier.records import BarrierSpec
from simulator.barrier.summary import Summary, longest_service, summarise
from simulator.barrier.survival_forecast import horizon_steps
from simulator.barrier.work import OUTPUT_MEAN, poisson

AGES: Final = (500, 200)
DEPTHS: Final = (0, 1, 2, 4, 8, 16, 64)
_GAIN: Final = 11.0
_MAXAGE: Final = 200
RHO: Final = 0.95
_LATENCY_SHARE: Final = 0.75


def rows(bar: Bar) -> list[Row]:
    """The age guard, look-ahead by survival, queues at the workers, open arrivals."""
    step = bar("online", len(AGES) * len(SEEDS) + 4 + len(DEPTHS) + 6 * len(SEEDS))
    return [*_guarded(step), *_learned(step), *_depths(step), *_open(step)]


def _gain(found: Summary, seed: int) -> float:
    return 100 * (found.throughput / summary("FCFS", seed).throughput - 1)


def _guarded(step: Advance) -> list[Row]:
    free = max(summary("BF-IO H=0", seed).longest_wait_steps for seed in SEEDS)
    plain = max(summary("FCFS", seed).longest_wait_steps for seed in SEEDS)
    found = [Row("no age guard: longest wait, steps", free, f"FCFS: {plain}")]
    for maxage in AGES:
        waits, bounds, gains, factors = [], [], [], []
        for seed in SEEDS:
            run = simulate_group(GROUP, burst(seed), BfIo(maxage=maxage))
            ours = summarise(run)
            waits.append(ours.longest_wait_steps)
            bounds.append(maxage + longest_service(run))
            gains.append(_gain(ours, seed))
            factors.append(summary("FCFS", seed).imbalance / ours.imbalance)
            step()
        at = f"age guard of {maxage} steps"
        note = f"imbalance {np.mean(factors):.1f} times less"
        found += [
            at_most(f"{at}: longest wait, steps", max(waits), min(bounds), "guard and one service"),
            at_least(f"{at}: least throughput gain over FCFS, %", min(gains), _GAIN, note),
        ]
    return found


def _learned(step: Advance) -> list[Row]:
    """Part of the oracle's gain over H = 0, at one H, that survival curves keep."""
    seed, far = SEEDS[0], 20
    none, oracle = summary("BF-IO H=0", seed), summary("BF-IO H=20", seed)
    found = [_kept(f"H={far}, memoryless", none, oracle, by_kaplan_meier(burst(seed), far))]
    step()
    near = horizon_steps(OUTPUT_MEAN)
    work, kinds = by_class(seed)
    none, oracle = (
        summarise(simulate_group(GROUP, work, policy))
        for policy in (BfIo(), BfIo(near, ahead=Oracle()))
    )
    step()
    for text, told in (("not told apart", None), ("told apart", kinds)):
        learned = by_kaplan_meier(work, near, told)
        found.append(_kept(f"H={near}, four classes {text}", none, oracle, learned))
        step()
    return found


def _kept(at: str, none: Summary, oracle: Summary, learned: Summary) -> Row:
    part = (none.imbalance - learned.imbalance) / (none.imbalance - oracle.imbalance)
    more = 100 * (learned.throughput / none.throughput - 1)
    most = 100 * (oracle.throughput / none.throughput - 1)
    return Row(
        f"look-ahead by survival, {at}: part of the oracle's lower imbalance",
        part,
        f"throughput over H=0: {more:+.2f} %, the oracle's {most:+.2f} %",
    )


def _depths(step: Advance) -> list[Row]:
    """What queues at the workers cost: requests in them were bound too early."""
    found = []
    for depth in DEPTHS:
        group = BarrierSpec(depth=depth)
        ours = summarise(simulate_group(group, burst(SEEDS[0]), BfIo(maxage=500)))
        metric = f"queues of {depth} at each worker: throughput gain over FCFS, %"
        note = f"imbalance {ours.imbalance / 1e4:.2f}e4"
        found.append(Row(metric, _gain(ours, SEEDS[0]), note))
        step()
    return found


def _open(step: Advance) -> list[Row]:
    """Poisson arrivals at RHO of BF-IO's saturated throughput: FCFS's own is below that."""
    variants: dict[str, tuple[type[Policy], int | None]] = {
        "instant, round robin": (RoundRobinPolicy, None),
        "instant, JSQ": (Jsq, None),
        "instant, least KV": (LeastKv, None),
        "central, FCFS": (Fcfs, 0),
        "central, least KV": (LeastKv, 0),
    }
    found: dict[str, list[Summary]] = {name: [] for name in (*variants, "central, BF-IO")}
    for seed in SEEDS:
        work = burst(seed)
        full = summary("BF-IO H=0", seed).throughput
        rate = RHO * full / float(work.output_tokens.mean())
        work = poisson(work, rate, np.random.default_rng([seed, 1]))
        for name, (make, depth) in variants.items():
            run = simulate_group(BarrierSpec(depth=depth), work, make(), drain=True)
            found[name].append(summarise(run))
            step()
        guarded = BfIo(maxage=_MAXAGE)
        found["central, BF-IO"].append(summarise(simulate_group(GROUP, work, guarded, drain=True)))
        step()
    rows = []
    for name, of_seeds in found.items():
        wait = f"p99 wait {1000 * mean_of(of_seeds, 'wait_p99_s'):.0f} ms"
        note = f"{wait}, p99 TPOT {1000 * mean_of(of_seeds, 'tpot_p99_s'):.1f} ms"
        metric = f"arrivals at {RHO:g}, {name}: mean latency, s"
        rows.append(Row(metric, mean_of(of_seeds, "latency_s"), note))
    ours, plain = found["central, BF-IO"], found["instant, JSQ"]
    share = mean_of(ours, "latency_s") / mean_of(plain, "latency_s")
    metric = f"arrivals at {RHO:g}: mean latency, central BF-IO over instant JSQ"
    return [*rows, at_most(metric, share, _LATENCY_SHARE)]
