"""`python -m bench quartz shadow`: what the shadow says of QUARTZ, and what a switch brings.

Four mock engines, each with a prefix cache of 160,000 tokens, serve chat in turns and retrieval at
half of what they can do. First the gateway binds least-loaded, and QUARTZ predicts in its shadow;
then the same requests meet fresh engines behind `policy: quartz`. Asked of the shadow: after 1,000
requests, .93 to .96 of the prefills take at most their predicted .95 quantile, and the would-be
gain is within 25 % of the measured one.

The would-be gain is the mean prefill predicted on the worker that was chosen less that on the
worker that QUARTZ would have chosen, of each request by itself: caches and loads are those that
least-loaded made. The measured gain is between the two runs.
"""

import asyncio
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import msgspec
import orjson

from bench.common.fleet import MODEL
from bench.common.raw_client import TimedAnswer, TimedLoad, lag_s
from bench.common.report import Report, Row, between, equals, quantile, scaled
from bench.quartz.live import KNEE_PER_S, SPEED, engines_of, mixed

REQUESTS: Final = scaled(2000, 1200)
SETTLED: Final = 1000
"""Requests after which coverage is counted."""
LOAD: Final = 0.5
"""Of the rate that the engines complete under the best policy."""
COVERAGE: Final = (0.93, 0.96)
GAIN_ERROR: Final = 0.25
"""Of the measured gain."""
_SERIES: Final = f'sluice_predictor_coverage{{model="{MODEL}",pool="short"}}'


class ShadowRun(msgspec.Struct, frozen=True, kw_only=True):
    """One policy under the workload."""

    answers: list[TimedAnswer]
    records: list[dict[str, Any]]
    """Decision records, by arrival."""
    coverage: float
    """The gateway's metric at the end."""
    lag_s: float
    """How late the engines were at most (P99)."""


def run() -> Report:
    """Both policies, on the same requests."""
    before, after = measure("least-loaded"), measure("quartz")
    return Report(name="quartz shadow", rows=list(rows_of(before, after)))


def measure(policy: str) -> ShadowRun:
    """One run with engines and a gateway of its own."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "requests.jsonl"
        config = {"request_log": {"path": str(log)}}
        with engines_of(folder, policy, SPEED, config=config) as fleet:
            load = TimedLoad([fleet.url])
            asyncio.run(load.open_loop(mixed(0, LOAD * KNEE_PER_S, REQUESTS, SPEED)))
            fleet.wait_until_idle()
            coverage = fleet.metrics()[_SERIES]
            late_s = lag_s([engine.metrics() for engine in fleet.engines])
            fleet.kill_replica(fleet.replicas[0], signal.SIGTERM)  # which writes the log's end
        records = [orjson.loads(line) for line in log.read_bytes().splitlines()]
    records.sort(key=lambda record: record["time_unix_s"])
    return ShadowRun(answers=load.seen, records=records, coverage=coverage, lag_s=late_s)


def rows_of(before: ShadowRun, after: ShadowRun) -> Iterator[Row]:
    """The shadow's accuracy, and its advice beside what the switch brought."""
    sections = [record["scheduling"] for record in before.records]
    judged = [s for s in sections[SETTLED:] if "prefill_s" in s and "predicted_prefill_q_s" in s]
    within = [s["prefill_s"] <= s["predicted_prefill_q_s"] for s in judged]
    metric = f"coverage of shadow predictions after {SETTLED:,} requests"
    note = f"of {len(within):,}; the metric at the end {before.coverage:.3f}"
    yield between(metric, sum(within) / len(within), *COVERAGE, note)
    wide = median(s["predicted_prefill_q_s"] / s["prefill_s"] for s in judged)
    late = f"engines at most {1000 * before.lag_s:.0f} ms late"
    yield Row("predicted quantile over the actual prefill, median", wide, late)
    advised = [r for r in before.records if "would_prefill_s" in r.get("scheduling", {})]
    elsewhere = [r["scheduling"]["would_bind"] != r["worker"] for r in advised]
    share = 100 * sum(elsewhere) / len(elsewhere)
    yield Row("requests that quartz would have bound elsewhere, %", share)
    plans = [r["scheduling"] for r in advised]
    would_s = fmean(s["predicted_prefill_s"] - s["would_prefill_s"] for s in plans)
    first_s, then_s = _mean_s(before.answers), _mean_s(after.answers)
    yield Row("would-be gain in mean TTFT, ms", 1000 * would_s)
    metric = "gain in mean TTFT after the switch, ms"
    yield Row(metric, 1000 * (first_s - then_s), f"{1000 * first_s:.0f} to {1000 * then_s:.0f}")
    metric, note = "would-be gain over the measured one", "the rest is what a switch does to caches"
    yield between(metric, would_s / (first_s - then_s), 1 - GAIN_ERROR, 1 + GAIN_ERROR, note)
    for name, found in (("least-loaded", before), ("quartz", after)):
        times = [a.first_s for a in found.answers if a.first_s is not None]
        missed = sum(a.first_s is None or a.first_s > a.ask.slo_s for a in found.answers)
        note = f"violations {100 * missed / len(found.answers):.1f} %"
        yield Row(f"{name}: P99 TTFT, s", quantile(times, 0.99), note)
        failed = sum(not a.whole for a in found.answers)
        yield equals(f"{name}: requests failed", failed, 0)


def _mean_s(answers: Sequence[TimedAnswer]) -> float:
    return fmean(a.first_s for a in answers if a.first_s is not None)
