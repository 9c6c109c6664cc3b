"""`python -m bench caches`: what QUARTZ would gain if engines told what their caches hold.

Three prefix indexes before the same engines, whose LRU prefix cache is known, in virtual time:

- learned: the shipped one. It knows what it sent, and estimates what was evicted since by
  capacities that it learns from the engines' `cached_tokens`.
- notices: the same, but each engine tells at once which of these prefixes it evicts.
- perfect: the engines' true contents, to a block, and what is bound to them.

An engine's KV cache has room for the requests that run at the knee, and beside them for a share of
the working set: the tokens of blocks that were used and will be used again, averaged over time.
Idle blocks may fill all that running requests leave, as in vLLM. So growing answers evict prefixes,
and QUARTZ's price of KV pressure is at work.

The knee of a workload and a cache is the rate that the learned index completes when more is
offered (`knees`); copy it into `_KNEES`.
"""

from collections.abc import Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from bench.caches.indexes import NoticedIndex, PerfectIndex
from bench.common.report import Report, Row, scaled, tracked
from bench.quartz.lab import WORKERS, LabFigures, figures, interval, make
from bench.quartz.lab import run as simulate
from bench.quartz.loads import SCENES, knee
from bench.quartz.workloads import StreamShape, mixed
from simulator.engine.engine import Engine, EngineProfile
from simulator.experiments.scheduling import BLOCK_TOKENS, WORKER, Demand, ServedRequest
from simulator.experiments.scheduling_records import Prefixes

SEEDS: Final = scaled(3)
REQUESTS: Final = scaled(3000, 1000)
INDEXES: Final = ("learned", "notices", "perfect")
SHARES: Final = (1.0, 0.5, 0.25)
"""Of the working set, cached beside the running requests."""
LOADS: Final = (0.8, 1.1)
GATEWAYS: Final = (1, 4)
_TALKS: Final = StreamShape(rag=0.0, clients=400, turns=8.0)
_KNEES: Final = {
    "Agents": (6.7, 4.2, 3.0),
    "Mooncake": (7.2, 6.5, 6.1),
    "Multi-turn": (22.6, 22.0, 21.5),
}
"""Requests a second for each of SHARES."""
_MAX_TOKENS: Final = 40_000
"""No request of these workloads is longer."""
_TOKEN_S: Final = 0.035
"""About what a token of an answer takes."""
_OFFERED: Final = 1.15
_WARM: Final = 0.25
"""Of the arrivals, in which nothing is counted towards a knee."""
_POINTS: Final = 3.0
_SHORTER: Final = 0.05
"""Gains in hits and in P99 that would be worth a protocol with every engine."""


CacheCell = tuple[str, float, float, int]
"""Workload, share, load, gateways."""


def demands_of(scene: str, seed: int, rate: float, data: Path | None) -> list[Demand]:
    """The requests of a workload at a rate a second."""
    if scene == "Multi-turn":
        return mixed(seed, msgspec.structs.replace(_TALKS, rate=rate), REQUESTS)
    return SCENES[scene](seed, rate, WORKERS, REQUESTS, data)


def engine_of(scene: str, share: float, data: Path | None) -> EngineProfile:
    """The engine whose KV cache holds the running requests and a share of the working set."""
    running, live = _needed(scene, data)
    tokens = max(_MAX_TOKENS, (running + share * live) / WORKERS)
    return msgspec.structs.replace(
        WORKER,
        kv_blocks=int(tokens) // BLOCK_TOKENS,
        prefix_cache_tokens=None,
        max_model_len=_MAX_TOKENS - BLOCK_TOKENS,
    )


@cache
def _needed(scene: str, data: Path | None) -> tuple[float, float]:
    return tokens_of(demands_of(scene, 0, _wide_knee(scene), data))


def _wide_knee(scene: str) -> float:
    """The knee of `bench quartz loads`, whose caches are wide."""
    return knee("Chat" if scene == "Multi-turn" else scene, WORKERS)


def tokens_of(demands: Sequence[Demand]) -> tuple[float, float]:
    """Tokens of the requests that run at a time, and of the working set; means over time."""
    span_s = demands[-1].arrival_s - demands[0].arrival_s
    running = sum(
        (d.prompt_tokens + d.output_tokens / 2) * d.output_tokens * _TOKEN_S for d in demands
    )
    last = {block: d.arrival_s for d in demands for block in d.blocks}
    first = {block: d.arrival_s for d in reversed(demands) for block in d.blocks}
    live = BLOCK_TOKENS * (sum(last.values()) - sum(first.values()))
    return running / span_s, live / span_s


def attempt(
    index: str, demands: Sequence[Demand], engine: EngineProfile, gateways: int, seed: int
) -> ServedRequest:
    """One run behind gateways that have learned nothing before."""
    perfect = PerfectIndex(WORKERS, demands)
    noticed = [NoticedIndex(WORKERS) for _ in range(gateways)]
    own: list[Sequence[Prefixes | None]] = [[None] * gateways, noticed, [perfect] * gateways]
    made = [make("QUARTZ", WORKERS, engine, seed, each) for each in own[INDEXES.index(index)]]

    def on_engine(worker: int, engine: Engine) -> None:
        perfect.engines[worker] = engine
        if index == "notices":
            engine.prefix_cache.on_evict = partial(_evicted, noticed, worker)

    return simulate(demands, made, seed=seed, profiles=[engine] * WORKERS, on_engine=on_engine)


def _evicted(indexes: Sequence[NoticedIndex], worker: int, block: int) -> None:
    for each in indexes:
        each.evicted(worker, block)


Found = dict[tuple[CacheCell, str], list[LabFigures]]
"""By cell and index, one entry a seed."""


def run(data: Path | None = None) -> Report:
    """In how many cells knowing more pays, and a row a cell."""
    cells: list[CacheCell] = list(product(_KNEES, SHARES, LOADS, GATEWAYS))
    found: Found = {}
    for cell, seed in tracked(list(product(cells, range(SEEDS))), "cells"):
        scene, share, load, gateways = cell
        rate = load * _KNEES[scene][SHARES.index(share)]
        demands, engine = demands_of(scene, seed, rate, data), engine_of(scene, share, data)
        for index in INDEXES:
            served = attempt(index, demands, engine, gateways, seed)
            found.setdefault((cell, index), []).append(figures(demands, served))
    detail: dict[str, object] = {"seeds": SEEDS, "requests": REQUESTS}
    return Report(name="caches", rows=rows(found), detail=detail)


def rows(found: Found) -> list[Row]:
    """Hits, P99 TTFT and violations by index, means over the seeds, and what perfection gains."""
    out, paying = [], 0
    for cell in dict.fromkeys(cell for cell, _ in found):
        hits, p99s_s, late = (
            {index: np.array([getattr(f, name) for f in found[cell, index]]) for index in INDEXES}
            for name in ("hit", "p99_s", "violations")
        )
        points = 100 * float((hits["perfect"] - hits["learned"]).mean())
        shorter = 1 - float(p99s_s["perfect"].mean() / p99s_s["learned"].mean())
        paying += points >= _POINTS or shorter >= _SHORTER
        low, high = interval(p99s_s["perfect"] - p99s_s["learned"])
        shown = "; ".join(
            f"{100 * hits[i].mean():.1f} %, {p99s_s[i].mean():.2f} s, {100 * late[i].mean():.1f} %"
            for i in INDEXES
        )
        gains = f"{points:+.1f} points, P99 {-100 * shorter:+.0f} % ({low:+.2f} to {high:+.2f} s)"
        scene, share, load, gateways = cell
        text = f"{scene}, cache {share:g}, load {load:g}, {gateways} gateways"
        out.append(Row(text, shown, gains))
    metric = f"cells in which a perfect index gains {_POINTS:g} points or {100 * _SHORTER:g} %"
    return [Row(metric, paying, f"of {len(out)}"), *out]


def knees(data: Path | None = None) -> Report:
    """Requests a second that the learned index completes under overload: the better of two runs."""
    listed = []
    for scene, share in tracked(list(product(_KNEES, SHARES)), "knees"):
        engine = engine_of(scene, share, data)
        offered, best = _wide_knee(scene), 0.0
        for _ in range(2):
            demands = demands_of(scene, 0, _OFFERED * offered, data)
            end_s = attempt("learned", demands, engine, 1, 0).end_s
            last_s = demands[-1].arrival_s
            ended = int(((end_s > _WARM * last_s) & (end_s <= last_s)).sum())
            offered = ended / ((1 - _WARM) * last_s)
            best = max(best, offered)
        note = f"KV cache of {engine.kv_blocks * BLOCK_TOKENS} tokens"
        listed.append(Row(f"{scene}, cache {share:g}: knee, requests/s", round(best, 1), note))
    return Report(name="caches knees", rows=listed)
