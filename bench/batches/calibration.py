"""`python -m bench batches`: are promises kept? In virtual time, on day-long live demand.

First runs teach what a gateway would have learned of earlier batches. Then batches ask for windows
between a quarter of an hour and a day; who is refused comes back with the earliest window that was
named, which its p95 just holds. Of these promises 92 to 99 % must be kept, and at most 10 % of the
refusals may be of windows that one could have kept who knew all that came. A gateway of three days
(young) is told apart, for its promises have to be wide.
"""

from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from bench.batches.demand import FIRST_HOUR, SCENARIOS, Scenario, hourly
from bench.batches.runner import Batch, BatchRun
from bench.common.report import Report, Row, at_least, at_most, bars, between, scaled
from bench.quartz.lab import processes
from gateway.batches.promise import HOUR_S, RATIOS, Profile
from gateway.settings import parse
from planner.profile import NodeProfile
from simulator.fleet.traffic import Floats, Ints, Random, Traffic
from simulator.pipeline.records import with_tenants
from sluice.simulated.gateway import gateway_of

RUNS: Final = scaled(90, 10)
TEACHING: Final = 20
BATCHES: Final = 3
"""Of a run, in 16 hours."""
HISTORY_DAYS: Final = 28
YOUNG_DAYS: Final = 3
SLOTS: Final = 12
PEAK: Final = 9.5
"""Live sequences in a weekday's highest hour."""
LIVE_TOKENS, ITEM_TOKENS = 700, 500
"""Of an answer, mean."""
LIVE_S, ITEM_S = 25.0, 18.0
"""What both take with the leftovers in use."""
OFF: Final = 0.06
"""Spread of a batch's mean answer about what is expected of it, as a logarithm."""
WINDOWS_S: Final = (900.0, 86_400.0)
NEEDS_S: Final = (3600.0, 36_000.0)
"""What is asked for, and needed of the day's mean leftovers: evenly over the logarithm."""
PLOT: Final = Path("docs/images/batches.png")
NODE: Final = NodeProfile(
    name="small",
    gpu="cpu",
    model="m",
    gpus=1,
    w_s=0.03,
    h_s_per_token=1e-6,
    prefill_s_per_token=1e-5,
    chunk_tokens=2048,
    kv_tokens=2**17,
)
FILE: Final = """
version: 1
models:
  - name: m
    pools:
      all: {max_model_len: 16384, max_num_seqs: 6, workers: ["http://a:1", "http://a:2"]}
    admission: {reclaim: cancel}
entitlements:
  - {name: live, tenant: a, model: m, service_class: guaranteed, concurrency: 12}
  - {name: batch, tenant: b, model: m, service_class: spot}
  - {name: urgent, tenant: b, model: m, service_class: elastic}
"""

Task = tuple[Scenario, int, Profile]
"""Which demand, a seed, and what was learned of earlier batches."""
Found = tuple[list[Batch], Profile]


def day(task: Task) -> Found:
    """A day with batches, and the time until they have ended, after weeks of history."""
    scenario, seed, learned = task
    random = np.random.default_rng(seed)
    hours = 24 * (HISTORY_DAYS + int(random.integers(7)))
    live = hourly(scenario, hours // 24 + 3, PEAK, random)
    past = live[:hours] + np.sqrt(2 * live[:hours] * LIVE_S / HOUR_S) * random.normal(0, 1, hours)
    first = hours - 24 * YOUNG_DAYS if scenario == "young" else 0
    profile = msgspec.structs.replace(
        learned,
        first_hour=FIRST_HOUR + first,
        hours=tuple(np.maximum(0.0, past[first:]).tolist()),
    )
    counts = random.poisson(live[hours:] / LIVE_S * HOUR_S)
    arrivals = np.sort(np.repeat(np.arange(len(counts)), counts) + random.random(counts.sum()))
    n = len(arrivals)
    batches, outputs = _batches(live[hours:], n, random)
    more = len(outputs)
    traffic = Traffic(
        arrival_s=HOUR_S * np.concatenate([arrivals, np.full(more, arrivals[-1])]),
        prompt_tokens=random.integers(100, 1500, n + more),
        output_tokens=np.concatenate([_answers(LIVE_TOKENS, n, random), outputs]),
    )
    requests = with_tenants(
        traffic,
        (1.0,),
        random,
        entitlement=np.repeat([0, 1], [n, more]),
        asked=np.repeat([4096.0, 1500.0], [n, more]),
    )
    config = parse(FILE, "sluice.yaml", {})
    gateway = gateway_of(config, config.models[0], NODE, counting="paged")
    start_unix_s = float(HOUR_S) * (FIRST_HOUR + hours)
    run = BatchRun(gateway, requests, batches, profile, start_unix_s, live=n)
    run.all((), None)
    for batch in batches:
        run.judge(batch)
    return batches, run.profile


def _batches(live: Floats, first: int, random: Random) -> tuple[list[Batch], Ints]:
    batches, outputs = [], []
    mean_left = float(np.maximum(0.0, SLOTS - 1 - live[:24]).mean())
    for at_s in np.sort(random.uniform(1800, 16 * HOUR_S, BATCHES)).tolist():
        need_s, window_s = (np.exp(random.uniform(*np.log(of))) for of in (NEEDS_S, WINDOWS_S))
        items = max(5, round(mean_left * need_s / ITEM_S))
        planned_slot_s = items * ITEM_S
        mean = ITEM_TOKENS * np.exp(random.normal(0, OFF))
        outputs.append(np.minimum(_answers(mean, items, random), 1500))
        about = {"at_s": at_s, "window_s": float(window_s), "first": first, "items": items}
        batches.append(Batch(**about, planned_slot_s=planned_slot_s))
        first += items
    return batches, np.concatenate(outputs)


def _answers(mean: float, count: int, random: Random) -> Ints:
    drawn = random.lognormal(log(mean) - 0.5 * 0.6**2, 0.6, count)
    return np.clip(np.rint(drawn), 1, 4000).astype(np.int64)


def taught(learned: Profile, found: Found) -> Profile:
    """What a gateway knows after these batches, too."""
    batches, profile = found
    ratios = [log(batch.used_slot_s / batch.planned_slot_s) for batch in batches]
    return Profile(
        ratios=(*learned.ratios, *ratios)[-RATIOS:],
        left_slot_s=learned.left_slot_s + profile.left_slot_s,
        used_slot_s=learned.used_slot_s + profile.used_slot_s,
    )


def run() -> Report:
    """All runs, the rows of them together and by scenario, and the diagram."""
    with bars() as bar, processes() as pool:
        step = bar("runs", TEACHING + RUNS)
        learned = Profile()
        teaching = [(SCENARIOS[i % 4], 900 + i, Profile()) for i in range(TEACHING)]
        for found in pool.map(day, teaching):
            learned = taught(learned, found)
            step()
        kinds = [SCENARIOS[i % len(SCENARIOS)] for i in range(RUNS)]
        by_kind: dict[Scenario, list[Batch]] = {kind: [] for kind in SCENARIOS}
        tasks = [(kind, seed, learned) for seed, kind in enumerate(kinds)]
        for kind, found in zip(kinds, pool.map(day, tasks), strict=True):
            by_kind[kind] += found[0]
            step()
    _plot(by_kind)
    rows = _rows([batch for kind in SCENARIOS[:-1] for batch in by_kind[kind]])
    for kind, batches in by_kind.items():
        tight = [b for b in batches if b.refused]
        note = f"{sum(b.oracle_keeps for b in tight)} of {len(tight)} refusals an oracle had kept"
        kept = round(sum(b.kept for b in tight) / max(1, len(tight)), 3)
        rows.append(Row(f"{kind}: kept at p95", kept, note))
    return Report(name="batches", rows=rows, detail={"runs": RUNS})


def _rows(batches: Sequence[Batch]) -> list[Row]:
    def share(of: Sequence[bool]) -> float:
        return round(float(np.mean(of)), 3)

    tight, loose = ([b for b in batches if b.refused is at] for at in (True, False))
    kept, easy = (share([b.kept for b in some]) for some in (tight, loose))
    unjust = share([b.oracle_keeps for b in tight])
    wasted = sum(b.wasted_slot_s for b in batches) / sum(b.used_slot_s for b in batches)
    longer = float(np.median([b.p95_s / b.took_s for b in tight]))
    return [
        at_least("batches", len(batches), min(200, RUNS * 4 // 5 * BATCHES)),
        between("promises at p95 that were kept", kept, 0.92, 0.99, f"{len(tight)} promises"),
        at_least("promises of longer windows that were kept", easy, 0.92, f"{len(loose)}"),
        at_most("refusals of windows that an oracle had kept", unjust, 0.10, f"{len(tight)}"),
        Row("batches that took no longer than p50", share([b.took_s <= b.p50_s for b in batches])),
        Row("p95 over the time taken, median", round(longer, 2)),
        Row("slot-seconds of batches lost by evictions", round(wasted, 3)),
    ]


def _plot(by_kind: dict[Scenario, list[Batch]]) -> None:
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4.4))
    ends: list[Any] = [0.2, 40]
    axis.plot(ends, ends, color="0.6", linewidth=1)
    for kind, batches in by_kind.items():
        tight = [b for b in batches if b.refused]
        told, took = ([v / HOUR_S for v in vs] for vs in zip(*_points(tight), strict=True))
        axis.scatter(told, took, s=14, label=kind)
    axis.set(xlabel="promised at p95, hours", ylabel="taken, hours", xscale="log", yscale="log")
    axis.set_title("Promises kept are below the line")
    axis.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(PLOT, dpi=110)
    plt.close(figure)


def _points(batches: Sequence[Batch]) -> list[tuple[float, float]]:
    return [(batch.by_s - batch.at_s, batch.took_s) for batch in batches] or [(HOUR_S, HOUR_S)]
