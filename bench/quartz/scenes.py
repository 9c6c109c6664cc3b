"""Scenes of bench quartz: several gateways, a heavy client, and faulty workers."""

from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from bench.common.report import Row, at_least, at_most
from bench.quartz.lab import WORKERS, figures, make, run
from bench.quartz.workloads import BURSTY, MIXED, StreamShape, mixed
from simulator.experiments.scheduling import WORKER, Demand, ServedRequest, Trouble

GATEWAYS: Final = 4
RETAINED: Final = 0.8
"""Of one gateway's gain, where prompts are told: the target is for what ships."""
HEAVY_RATE: Final = 11.0
CALM: Final = msgspec.structs.replace(MIXED, rate=6.5)
"""Light enough that three workers can carry it."""
HOT_SHARE: Final = 0.5
LEARNED: Final = 500


def gateway_rows(seeds: range, step: Callable[[], None]) -> list[Row]:
    """Four gateways on the workers of one, each request at one of them by chance."""
    rows = []
    shapes: dict[str, StreamShape] = {"Mixed": MIXED, "Mixed Bursty": BURSTY}
    for workload, shape in shapes.items():
        late: dict[str, list[float]] = {"none": [], "one": [], "four": [], "silent": []}
        tail: dict[str, list[float]] = {name: [] for name in late}
        for seed in seeds:
            demands = mixed(seed, shape)
            variants = {
                "none": [make("FIFO-LL")],
                "one": [make("QUARTZ")],
                "four": [make("QUARTZ") for _ in range(GATEWAYS)],
                "silent": [make("QUARTZ") for _ in range(GATEWAYS)],
            }
            for name, gateways in variants.items():
                told = name != "silent"
                served = run(demands, gateways, seed=seed, tell_prefixes=told)
                found = figures(demands, served)
                late[name].append(found.violations)
                tail[name].append(found.p99_s)
            step()
        for text, values, scale in (("violations, %", late, 100.0), ("P99 TTFT, s", tail, 1.0)):
            none, one, *several = (scale * float(np.mean(v)) for v in values.values())
            for told, value in zip((True, False), several, strict=True):
                kept = (none - value) / (none - one)
                how = "told of one another's prompts" if told else "each knowing its own prompts"
                note = f"FIFO-LL {none:.3g}, one {one:.3g}, four {value:.3g}"
                metric = f"{workload}, 4 gateways, {how}: gain of one kept, {text}"
                rows.append(
                    at_least(metric, kept, RETAINED, note)
                    if told
                    else Row(metric=metric, measured=kept, note=note)
                )
    return rows


def heavy_rows(seeds: range, step: Callable[[], None]) -> list[Row]:
    """One more client at 11 requests a second, which is more than the workers can serve."""
    alone = msgspec.structs.replace(MIXED, rate=6.0)
    beside = msgspec.structs.replace(alone, heavy=HEAVY_RATE)
    rows = []
    for policy in ("FIFO-LL", "TokenFair", "No Fairness", "QUARTZ"):
        before: list[float] = []
        after: list[float] = []
        for seed in seeds:
            for shape, values in ((alone, before), (beside, after)):
                demands = mixed(seed, shape)
                values.append(_others_late(demands, run(demands, [make(policy)])))
        step()
        more = 100 * float(np.mean(after) - np.mean(before))
        metric = f"Heavy client, {policy}: the others' violations, points more"
        note = f"from {100 * np.mean(before):.1f} to {100 * np.mean(after):.1f} %"
        rows.append(
            at_most(metric, more, 20.0, note)
            if policy == "QUARTZ"
            else Row(metric=metric, measured=more, note=note)
        )
    return rows


def _others_late(demands: list[Demand], served: ServedRequest) -> float:
    others = np.array([d.client != "heavy" for d in demands])
    late = served.ttft_s > np.array([d.slo_s for d in demands])
    return float(late[others].mean())


def trouble_rows(seeds: range, step: Callable[[], None]) -> list[Row]:
    """A worker that stalls, restarts, comes back with a cold cache, or is half as fast."""
    rows = []
    for what, text, lasts_s in (
        ("stall", "stalls for 20 s", 20.0),
        ("restart", "is away for 20 s", 20.0),
        ("cold", "loses its cache", 0.0),
    ):
        lost, tails, shares = 0, [], []
        for seed in seeds:
            demands = mixed(seed, CALM)
            at_s = demands[1000].arrival_s
            trouble = Trouble(at_s=at_s, worker=1, what=what, lasts_s=lasts_s)  # type: ignore[arg-type]
            served = run(demands, [make("QUARTZ")], seed=seed, troubles=(trouble,))
            lost += served.lost + int(np.isnan(served.ttft_s).sum())
            after = np.array([d.arrival_s for d in demands]) > at_s + lasts_s + 60.0
            tails.append(float(np.quantile(served.ttft_s[after], 0.99)))
            counts = np.bincount(served.worker[after], minlength=WORKERS)
            shares.append(float(counts.max() / counts.sum()))
        step()
        name = f"A worker {text}"
        rows += [
            at_most(f"{name}: requests lost", lost, 0),
            at_most(
                f"{name}: share of the busiest worker, from a minute after",
                max(shares),
                HOT_SHARE,
                f"P99 TTFT then {np.mean(tails):.2f} s",
            ),
        ]
    return [*rows, _slow_row(seeds), *_calm_rows(seeds)]


def _calm_rows(seeds: range) -> list[Row]:
    tails = []
    for seed in seeds:
        demands = mixed(seed, CALM)
        tails.append(figures(demands, run(demands, [make("QUARTZ")], seed=seed)).p99_s)
    note = f"the same load, {CALM.rate:g} requests/s, without trouble"
    return [Row(metric="No trouble: P99 TTFT, s", measured=float(np.mean(tails)), note=note)]


def _slow_row(seeds: range) -> Row:
    """How much slower a worker at half speed is taken to be, after 500 requests."""
    slow = msgspec.structs.replace(
        WORKER,
        w_s=2 * WORKER.w_s,
        h_s=2 * WORKER.h_s,
        prefill_s_per_token=2 * WORKER.prefill_s_per_token,
    )
    ratios, shares = [], []
    for seed in seeds:
        demands = mixed(seed, CALM)[:LEARNED]
        gateway = make("QUARTZ")
        served = run(demands, [gateway], seed=seed, profiles=[slow] + [WORKER] * (WORKERS - 1))
        predictor = gateway.predictor
        if predictor is None:
            raise RuntimeError("QUARTZ has a predictor")
        others = np.mean([predictor.slowness(w) for w in range(1, WORKERS)])
        ratios.append(float(predictor.slowness(0) / others))
        shares.append(float((served.worker[-LEARNED // 2 :] == 0).mean()))
    worst = min(ratios)
    return Row(
        metric=f"A worker at half speed, after {LEARNED} requests: taken to be slower by",
        measured=float(np.mean(ratios)),
        target="1.6 to 2.4 in every run",
        holds=worst >= 1.6 and max(ratios) <= 2.4,
        note=f"least {worst:.2f}; it then gets {100 * np.mean(shares):.0f} % of the requests",
    )
