"""One real engine: calibrated, planned from its profile, and replayed at half of its capacity."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench.common.report import Row, at_least, at_most
from bench.real_engine.engines import BASE, RealEngine, gateway, sluice

CALIBRATE_S: Final = 120.0
REQUESTS: Final = 1500
"""To replay: in virtual time the 99th percentile of 300 varies by a third either way."""
MIN_S, MAX_S = 60.0, 900.0
"""Shortest and longest replay, seconds."""
SHARE: Final = 0.5
"""Of the capacity that the plan gives the engine."""
TRACE: Final = 400
FIELDS: Final = "prompt=prompt_tokens,answer=completion_tokens"
MIN_ENGINES: Final = 2
"""Engines that every plan has at least: it is made for so many, and one of them is replayed."""
_MAX_RATE, _STEPS = 64.0, 10


def scene(folder: Path, engine: RealEngine) -> Iterator[Row]:
    """Calibrates, plans and replays; nobody else may use the engine."""
    profile, trace = folder / "profile.json", folder / "trace.jsonl"
    longest = engine.window - 128
    found = _calibrated(engine, profile, longest)
    if not profile.exists():
        yield Row(
            "calibrate wrote a profile", str(found.get("problem")), target="a profile", holds=False
        )
        return
    checks = json.loads(profile.read_text("utf-8"))["provenance"]["held_out"]
    close = [check for check in checks if abs(check["off"]) <= 0.1]
    off = ", ".join(f"{check['name']} {check['off']:+.1%}" for check in checks)
    yield at_least(f"held-out figures within 10 %, of {len(checks)}", len(close), 6, off)
    _write_trace(trace, longest)
    capacity = _capacity(trace, profile, engine.window)
    rate = SHARE * capacity
    (pool,) = _plan(trace, profile, MIN_ENGINES * rate, engine.window)["pools"].values()
    planned_s = pool["ttft_p99_s"]
    measured_s = _replayed(trace, engine, rate)
    yield Row("capacity of one engine, requests/s", capacity)
    yield at_most(
        f"P99 TTFT at {SHARE:g} of it: measured against planned, difference",
        abs(measured_s / planned_s - 1),
        0.4,
        f"planned {1000 * planned_s:.0f} ms, measured {1000 * measured_s:.0f} ms, aim 0.2",
    )


def _calibrated(engine: RealEngine, profile: Path, longest: int) -> dict[str, Any]:
    _, found = sluice(
        *("calibrate", "--url", engine.url, "--model", BASE, "-o", profile),
        *("--budget-s", CALIBRATE_S, "--max-prompt", longest),
        *("--most-concurrency", 2 * engine.slots),
    )
    said: dict[str, Any] = found
    return said


def _write_trace(file: Path, longest: int) -> None:
    """Requests with prompts over the whole window."""
    drawn = random.Random(1)
    rows = [
        {
            "prompt_tokens": drawn.randint(64, longest - 64),
            "completion_tokens": drawn.randint(8, 64),
        }
        for _ in range(TRACE)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def _plan(trace: Path, profile: Path, rate: float, window: int) -> dict[str, Any]:
    """A fleet for a rate, whatever the SLO."""
    _, found = sluice(
        *("plan", "--workload", trace, "--rate", rate, "--profile", profile),
        *("--max-model-len", window, "--max-pools", 1, "--slo-ttft-ms", 600_000),
        *("--fields", FIELDS),
    )
    plan: dict[str, Any] = found
    return plan


def _capacity(trace: Path, profile: Path, window: int) -> float:
    """The highest rate of one engine, by bisection: beyond it the plan has one engine more."""
    low, high = 0.0, _MAX_RATE
    for _ in range(_STEPS):
        middle = (low + high) / 2
        fits = _plan(trace, profile, MIN_ENGINES * middle, window)["total_nodes"] <= MIN_ENGINES
        low, high = (middle, high) if fits else (low, middle)
    return low


def _replayed(trace: Path, engine: RealEngine, rate: float) -> float:
    """P99 time to first token through a gateway before the engine."""
    pool = {"max_model_len": engine.window, "max_num_seqs": engine.slots, "workers": [engine.url]}
    duration_s = min(MAX_S, max(MIN_S, REQUESTS / rate))
    with gateway({"models": [{"name": BASE, "pools": {"all": pool}}]}) as url:
        _, found = sluice(
            *("replay", "--url", url, "--workload", trace, "--rate", rate, "--model", BASE),
            *("--duration", duration_s, "--slo-ttft-ms", 600_000, "--arrivals", "poisson"),
            *("--fields", FIELDS),
            timeout_s=duration_s + 300,
        )
    return float(found["all"]["ttft_s"]["p99"])
