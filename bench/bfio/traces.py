"""The group on real lengths: Azure 2023 and Mooncake traces, in their order, by --data."""

from pathlib import Path
from typing import Final

import numpy as np

from bench.bfio.table import GROUP
from bench.common.report import Advance, Bar, Row, at_least
from planner.readers.traces import read_workload
from simulator.barrier.group import simulate_group
from simulator.barrier.lookahead import Oracle
from simulator.barrier.policies import BfIo, Fcfs
from simulator.barrier.records import BarrierWork
from simulator.barrier.summary import summarise
from simulator.barrier.work import of_lengths

FILES: Final = {
    "Azure conversation": "AzureLLMInferenceTrace_conv.csv",
    "Azure code": "AzureLLMInferenceTrace_code.csv",
    "Mooncake conversation": "mooncake_conversation_trace.jsonl",
}
_WARM_UP: Final = 800
_WARM_UP_SHARE: Final = 0.2
"""Of the steps, where the trace is too short for the other."""


def rows(data: Path | None, bar: Bar) -> list[Row]:
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
