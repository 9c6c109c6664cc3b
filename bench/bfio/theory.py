"""Figure 1's idle time, Theorems 1 and 2, and Definition 2's kinds of drift, in simulation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from bench.bfio.table import GROUP, burst
from bench.common.report import Advance, Bar, Row, at_least, at_most, between
from planner.readers.traces import read_workload
from simulator.barrier.group import simulate_group
from simulator.barrier.lookahead import Oracle
from simulator.barrier.policies import BfIo, Fcfs
from simulator.barrier.records import BarrierSpec, BarrierWork
from simulator.barrier.summary import summarise
from simulator.barrier.work import DRIFTS, of_lengths, of_theorem

LONGEST_PROMPT: Final = 1000
WORKERS: Final = 16
SLOTS: Final = (9, 18, 36, 72, 144, 288)
OTHER_WORKERS: Final = (4, 8, 32)
_SLOPE_TO: Final = 144
_STEPS_SKIPPED: Final = 400
_ROUNDS: Final = 14
_SEED: Final = 0
_EQUAL_OUTPUT: Final = 100
_EQUAL_ROUNDS: Final = 8
_EQUAL_SLOTS: Final = (18, 72)
_IDLE_WORKERS: Final = 32
_PUBLISHED_IDLE: Final = 0.40


def rows(bar: Bar) -> list[Row]:
    """Idle time; (a) FCFS's constant, (b) BF-IO's bound, (c) how their ratio grows; drifts."""
    runs = 1 + len(_EQUAL_SLOTS) + len(SLOTS) + len(OTHER_WORKERS) + len(DRIFTS)
    step = bar("theorems", runs)
    found = [*_idle(step), *_equal_outputs(step)]
    ratios = []
    for workers, slots in [(WORKERS, b) for b in SLOTS] + [(g, 72) for g in OTHER_WORKERS]:
        plain, ours = imbalances(workers, slots)
        step()
        at = f"Theorem 2, G={workers}, B={slots}"
        scale = workers * np.sqrt(slots * np.log(workers))
        if workers == WORKERS:
            ratios.append(plain / ours)
            metric = f"{at}: FCFS over G sqrt(B ln G)"
            found.append(between(metric, float(plain / scale), 270, 370))
        share = ours / ((workers - 1) * LONGEST_PROMPT)
        metric = f"{at}: BF-IO over (G - 1) s_max"
        found.append(at_most(metric, share, 1.0, note=f"FCFS over BF-IO: {plain / ours:.2f}"))
    return [*found, *_growth(ratios), *_drifts(step)]


def _idle(step: Advance) -> list[Row]:
    """Figure 1: the share of a step that 32 GPUs wait for the fullest; its trace is not public."""
    group = BarrierSpec(workers=_IDLE_WORKERS)
    plain, ours = (
        summarise(simulate_group(group, burst(_SEED), policy)) for policy in (Fcfs(), BfIo())
    )
    step()
    at = f"Figure 1, G={_IDLE_WORKERS}: share of time idle at the barrier"
    note = f"FCFS {plain.idle_share:.3f}, BF-IO {ours.idle_share:.3f}"
    return [
        Row(f"{at}, FCFS", published=_PUBLISHED_IDLE, measured=plain.idle_share),
        at_least(f"{at}, FCFS over BF-IO", plain.idle_share / ours.idle_share, 2.0, note),
    ]


def _equal_outputs(step: Advance) -> list[Row]:
    """Theorem 1: where all answers are equally long, each round is one partition of prompts."""
    found = []
    for slots in _EQUAL_SLOTS:
        batch = WORKERS * slots
        random = np.random.default_rng(_SEED)
        work = of_lengths(
            random.integers(1, LONGEST_PROMPT + 1, _EQUAL_ROUNDS * batch).astype(np.float64),
            np.full(_EQUAL_ROUNDS * batch, _EQUAL_OUTPUT),
        )
        group = BarrierSpec(workers=WORKERS, slots=slots, reveal=batch)
        plain, ours = (
            summarise(simulate_group(group, work, policy), _STEPS_SKIPPED).imbalance
            for policy in (Fcfs(), BfIo())
        )
        step()
        metric = f"Theorem 1, G={WORKERS}, B={slots}: BF-IO over (G - 1) s_max"
        share = ours / ((WORKERS - 1) * LONGEST_PROMPT)
        found.append(at_most(metric, share, 1.0, note=f"FCFS over BF-IO: {plain / ours:.1f}"))
    return found


def imbalances(workers: int, slots: int) -> tuple[float, float]:
    """FCFS's and BF-IO's (H = 0) mean imbalance on the theorem's workload, in tokens."""
    reveal = max(128, workers * slots // 25)
    group = BarrierSpec(workers=workers, slots=slots, reveal=reveal)
    random = np.random.default_rng(_SEED)
    work = of_theorem(_ROUNDS * workers * slots, random, longest=LONGEST_PROMPT)
    plain, ours = (
        summarise(simulate_group(group, work, policy), _STEPS_SKIPPED).imbalance
        for policy in (Fcfs(), BfIo())
    )
    return plain, ours


def _growth(ratios: Sequence[float]) -> list[Row]:
    few = [i for i, slots in enumerate(SLOTS) if slots <= _SLOPE_TO]
    x, y = np.log([SLOTS[i] for i in few]), np.log([ratios[i] for i in few])
    slope = float(np.polyfit(x, y, 1)[0])
    listed = " ".join(f"{ratio:.1f}" for ratio in ratios)
    return [
        between(f"Theorem 2: log-log slope of the ratio in B, to B={_SLOPE_TO}", slope, 0.5, 0.8),
        at_least(
            f"Theorem 2: least rise of the ratio from one B to the next, G={WORKERS}",
            float(np.diff(ratios).min()),
            0.0,
            note=f"ratios {listed} at B = {', '.join(map(str, SLOTS))}",
        ),
    ]


def _drifts(step: Advance) -> list[Row]:
    found = []
    for name, drift in DRIFTS.items():
        group = BarrierSpec(drift=drift)
        plain, ours = (
            summarise(simulate_group(group, burst(_SEED), policy)) for policy in (Fcfs(), BfIo())
        )
        step()
        gain = 100 * (ours.throughput / plain.throughput - 1)
        metric = f"Theorem 3, {name}: FCFS's imbalance over BF-IO's"
        note = f"throughput {gain:+.1f} %"
        found.append(at_least(metric, plain.imbalance / ours.imbalance, 2.0, note))
    return found


# -- the group on real lengths: Azure 2023 and Mooncake traces, in their order, by --data


FILES: Final = {
    "Azure conversation": "AzureLLMInferenceTrace_conv.csv",
    "Azure code": "AzureLLMInferenceTrace_code.csv",
    "Mooncake conversation": "mooncake_conversation_trace.jsonl",
}
_WARM_UP: Final = 800
_WARM_UP_SHARE: Final = 0.2
"""Of the steps, where the trace is too short for the other."""


def trace_rows(data: Path | None, bar: Bar) -> list[Row]:
    """BF-IO against FCFS on each trace that is there."""
    found = []
    step = bar("traces", 5 * len(FILES) if data else 0)
    for name, file in FILES.items():
        if data is None or not (data / file).is_file():
            row = Row(name, "not measured", f"needs --data with {file}")
            found.append(row)
            continue
        found += _trace(name, read(data / file), step)
    return found


def read(file: Path) -> BarrierWork:
    """Both lengths of every request."""
    pairs = read_workload(file.read_text("utf-8"), name=file.name).pairs
    if pairs is None:
        raise ValueError(f"{file} has no lengths")
    return of_lengths(np.asarray(pairs.prompts), np.asarray(pairs.answers))


def _trace(name: str, work: BarrierWork, step: Advance) -> list[Row]:
    plain_run = simulate_group(GROUP, work, Fcfs())
    step()
    skip = min(_WARM_UP, round(_WARM_UP_SHARE * len(plain_run.dt_s)))
    plain = summarise(plain_run, skip)
    mean = float(work.output_tokens.mean())
    horizon = max(1, round(0.04 * mean))
    found = []
    for label, policy in {
        "H=0": BfIo(),
        "H=0, age guard of 200": BfIo(maxage=200),
        f"H={horizon}, .04 of the mean output": BfIo(horizon, ahead=Oracle()),
        "H=80": BfIo(80, ahead=Oracle()),
    }.items():
        ours = summarise(simulate_group(GROUP, work, policy), skip)
        step()
        gain = 100 * (ours.throughput / plain.throughput - 1)
        metric = f"{name}, {label}: throughput over FCFS, %"
        factor = f"imbalance {plain.imbalance / ours.imbalance:.1f} times less"
        note = f"{factor}; {ours.steps} steps, mean output {mean:.0f}"
        row = Row(metric, gain, note)
        found.append(at_least(metric, gain, 0.0, note) if label.startswith("H=0") else row)
    return found
