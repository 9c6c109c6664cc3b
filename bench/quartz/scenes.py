"""Scenes of bench quartz beside the paper's tables.

Several gateways, a heavy client, faulty workers, slots and KV caches that limit, wrong predictions,
and the paper's parameters.

Where slots or KV limit: requests with a common beginning on engines of few slots, and answers of
unknown length on engines whose cache fills, so that sequences preempt one another. Nobody knows a
request's output.
"""

from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np

from bench.common.report import Bar, Row, at_least, at_most, judged, scaled
from bench.quartz.lab import WORKERS, LabFigures, figures, make, mean_figures, over, run
from bench.quartz.workloads import (
    BURSTY,
    CHAT_SLO_S,
    MIXED,
    StreamShape,
    Workload,
    demand,
    fresh_segment,
    mixed,
    times_of,
)
from simulator.engine.engine import EngineProfile
from simulator.experiments.scheduling import WORKER, Demand, Trouble

GATEWAYS: Final = 4
RETAINED: Final = 0.8
"""Of one gateway's gain, where prompts are told: the target is for what ships."""
HEAVY_RATE: Final = 11.0
CALM: Final = msgspec.structs.replace(MIXED, rate=6.5)
"""Light enough that three workers can carry it."""
HOT_SHARE: Final = 0.5
LEARNED: Final = 500
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
LONG: Final = 6000
"""Requests where few wait: the first 20, which find empty caches, would be P99 of a third of it."""
_SHAPES: Final = {"Mixed": MIXED, "Mixed Bursty": BURSTY}


def rows(seeds: int, few: int, bar: Bar) -> list[Row]:
    """All scenes."""
    found = [*_gateway_rows(range(seeds), bar), *_heavy_rows(range(few), bar)]
    found += [*_trouble_rows(range(few), bar), *_limit_rows(bar)]
    return [*found, *_shift_rows(range(few), bar), *_parameter_rows(range(few), bar)]


def _of(shape: StreamShape, requests: int = 3000) -> Workload:
    return lambda seed: mixed(seed, shape, requests)


def _gateway_rows(seeds: range, bar: Bar) -> Iterator[Row]:
    """Four gateways on the workers of one, each request at one of them by chance."""
    step = bar("gateways", len(_SHAPES) * len(seeds))
    for workload, shape in _SHAPES.items():
        found: dict[str, list[LabFigures]] = {}
        for seed in seeds:
            demands = mixed(seed, shape)
            for name, policy, count in (
                ("none", "FIFO-LL", 1),
                ("one", "QUARTZ", 1),
                ("four", "QUARTZ", GATEWAYS),
                ("silent", "QUARTZ", GATEWAYS),
            ):
                gateways = [make(policy) for _ in range(count)]
                served = run(demands, gateways, seed=seed, tell_prefixes=name != "silent")
                found.setdefault(name, []).append(figures(demands, served))
            step()
        means = {name: mean_figures(runs) for name, runs in found.items()}
        for text, figure, scale in (
            ("violations, %", "violations", 100.0),
            ("P99 TTFT, s", "p99_s", 1.0),
        ):
            none, one, four, silent = (scale * float(getattr(m, figure)) for m in means.values())
            for how, value in (
                ("told of one another's prompts", four),
                ("each knowing its own prompts", silent),
            ):
                kept = (none - value) / (none - one)
                note = f"FIFO-LL {none:.3g}, one {one:.3g}, four {value:.3g}"
                metric = f"{workload}, 4 gateways, {how}: gain of one kept, {text}"
                told = value is four
                yield at_least(metric, kept, RETAINED, note) if told else Row(metric, kept, note)


def _heavy_rows(seeds: range, bar: Bar) -> Iterator[Row]:
    """One more client at 11 requests a second, which is more than the workers can serve."""
    alone = msgspec.structs.replace(MIXED, rate=6.0)
    beside = msgspec.structs.replace(alone, heavy=HEAVY_RATE)
    step = bar("heavy client", 4)
    for policy in ("FIFO-LL", "TokenFair", "No Fairness", "QUARTZ"):
        before, after = (
            100 * over(policy, _of(shape), seeds).others_violations for shape in (alone, beside)
        )
        step()
        metric = f"Heavy client, {policy}: the others' violations, points more"
        note = f"from {before:.1f} to {after:.1f} %"
        more = after - before
        yield at_most(metric, more, 20.0, note) if policy == "QUARTZ" else Row(metric, more, note)


def _trouble_rows(seeds: range, bar: Bar) -> Iterator[Row]:
    """A worker that stalls, restarts, comes back with a cold cache, or is half as fast."""
    step = bar("trouble", 3)
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
        yield at_most(f"{name}: requests lost", lost, 0)
        metric = f"{name}: share of the busiest worker, from a minute after"
        yield at_most(metric, max(shares), HOT_SHARE, f"P99 TTFT then {np.mean(tails):.2f} s")
    yield _slow_row(seeds)
    note = f"the same load, {CALM.rate:g} requests/s, without trouble"
    yield Row("No trouble: P99 TTFT, s", over("QUARTZ", _of(CALM), seeds).p99_s, note)


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
        assert predictor is not None
        others = np.mean([predictor.slowness(w) for w in range(1, WORKERS)])
        ratios.append(float(predictor.slowness(0) / others))
        shares.append(float((served.worker[-LEARNED // 2 :] == 0).mean()))
    return judged(
        f"A worker at half speed, after {LEARNED} requests: taken to be slower by",
        float(np.mean(ratios)),
        "1.6 to 2.4 in every run",
        min(ratios) >= 1.6 and max(ratios) <= 2.4,
        f"least {min(ratios):.2f}; it then gets {100 * np.mean(shares):.0f} % of the requests",
    )


# -- slots and KV


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


_ALIKE: Final = "Shared prompt, 4 slots"
_LIMITS: Final[dict[str, tuple[EngineProfile, int, Workload]]] = {
    _ALIKE: (FEW_SLOTS, 6, lambda s: shared(s, 5.0, stream=True, requests=LONG)),
    f"{_ALIKE}, not streamed": (
        *(FEW_SLOTS, 6),
        lambda s: shared(s, 5.0, stream=False, requests=LONG),
    ),
    f"{_ALIKE}, not streamed, near the knee": (
        *(FEW_SLOTS, 4),
        lambda s: shared(s, 8.0, stream=False),
    ),
    "Eight shared prompts, 4 slots, not streamed": (
        *(FEW_SLOTS, 4),
        lambda s: shared(s, 7.0, stream=False, prefixes=8),
    ),
    f"{_ALIKE}, bursts of 32, not streamed": (
        *(FEW_SLOTS, 4),
        lambda s: shared(s, 4.0, stream=False, bursts=4.0),
    ),
    "Preempting engines, 3/s": (LITTLE_KV, 6, lambda s: unknown_lengths(s, 3.0)),
    "Preempting engines, 3.5/s": (LITTLE_KV, 6, lambda s: unknown_lengths(s, 3.5)),
    "Preempting engines, 4/s": (LITTLE_KV, 6, lambda s: unknown_lengths(s, 4.0)),
}
"""Engine, seeds, requests."""


def _limit_rows(bar: Bar) -> Iterator[Row]:
    """Where slots or KV are what limits a worker; P99 to the first token, as the engine has it."""
    step = bar("slots and KV", len(_LIMITS))
    for name, (engine, seeds, demands_of) in _LIMITS.items():
        least, sticky, ours = (
            over(policy, demands_of, range(scaled(seeds)), engine=engine).p99_s
            for policy in ("FIFO-LL", "Locality-aware", "QUARTZ")
        )
        step()
        note = f"{ours:.2f} s; FIFO-LL {least:.2f}, Locality-aware {sticky:.2f}"
        yield at_most(f"{name}: P99 TTFT over FIFO-LL's", ours / least, WORSE, note)


def _shift_rows(seeds: range, bar: Bar) -> Iterator[Row]:
    """All predictions wrong, for good: QUARTZ without a fallback against FIFO with least-loaded."""
    step = bar("wrong predictions", len(_SHAPES))
    for workload, shape in _SHAPES.items():
        least, true = (over(policy, _of(shape), seeds).p99_s for policy in ("FIFO-LL", "QUARTZ"))
        for policy in ("x3", "/3", "x3 or /3"):
            ours = over(policy, _of(shape), seeds)
            note = (
                f"{ours.p99_s:.2f} s, FIFO-LL {least:.2f}, right predictions {true:.2f}; "
                f"coverage {ours.coverage:.2f}"
            )
            metric = f"{workload}, predictions {policy}: P99 TTFT over FIFO-LL's"
            yield at_most(metric, ours.p99_s / least, WORSE, note)
        step()


def _parameter_rows(seeds: range, bar: Bar) -> Iterator[Row]:
    """Lambda and K beside the paper's."""
    aging = {"lambda 0.5, the default": "QUARTZ", **{n: n for n in ("lambda 0.02", "lambda 2")}}
    compared = {"K 16, the default": "QUARTZ", **{n: n for n in ("K 2", "K 8", "K 32")}}
    rate = MIXED.rate * LARGE / WORKERS
    large = msgspec.structs.replace(MIXED, rate=rate, clients=28 * LARGE // WORKERS)
    cases = [(w, n, p, WORKERS, s, seeds) for w, s in _SHAPES.items() for n, p in aging.items()]
    cases += [
        (f"Mixed, {LARGE} workers", name, policy, LARGE, large, seeds[:2])
        for name, policy in compared.items()
    ]
    step = bar("parameters", len(cases))
    for where, name, policy, workers, shape, runs in cases:
        found = over(policy, _of(shape, 750 * workers), runs, workers=workers)
        step()
        note = (
            f"violations {100 * found.violations:.2f} %, max wait {found.max_wait_s:.2f} s, "
            f"{100 * found.hit:.1f} % cached"
        )
        yield Row(f"{where}, {name}: P99 TTFT, s", found.p99_s, note)
