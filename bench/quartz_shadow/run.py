"""`python -m bench quartz-shadow`: what the shadow says of QUARTZ, and what a switch brings.

Four mock engines, each with a prefix cache of 160,000 tokens, serve chat in turns and retrieval at
half of what they can do. First the gateway binds least-loaded, and QUARTZ predicts in its shadow;
then the same requests meet fresh engines behind `policy: quartz`. Asked of the shadow: after 1,000
requests, .93 to .96 of the prefills take at most their predicted .95 quantile, and the would-be
gain is within 25 % of the measured one.

The would-be gain is the mean prefill predicted on the worker that was chosen less that on the
worker that QUARTZ would have chosen, of each request by itself: caches and loads are those that
least-loaded made. The measured gain is between the two runs. `SLUICE_BENCH_REQUESTS` makes it
shorter.
"""

import asyncio
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import msgspec
import orjson

from bench.common.fleet import MODEL, Fleet
from bench.common.report import Report, Row, equals
from bench.quartz_live.load import TimedAnswer, TimedLoad, mixed, write_profile
from bench.quartz_live.run import ENGINE, KNEE_PER_S, SPEED, WORKERS
from bench.token_pools.records import quantile

REQUESTS: Final = int(os.environ.get("SLUICE_BENCH_REQUESTS", "2000"))
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
    return Report(name="quartz-shadow", rows=rows_of(before, after))


def measure(policy: str) -> ShadowRun:
    """One run with engines and a gateway of its own."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "requests.jsonl"
        profile = write_profile(Path(folder), ENGINE)
        fleet = Fleet(
            short=WORKERS,
            long=0,
            short_window=ENGINE.max_model_len,
            mock=("--profile-file", str(profile), "--speed", str(SPEED)),
            model={"scheduling": {"policy": policy}},
            config={"request_log": {"path": str(log)}},
        )
        with fleet:
            load = TimedLoad([fleet.url])
            asyncio.run(load.open_loop(mixed(0, LOAD * KNEE_PER_S, REQUESTS, SPEED)))
            fleet.wait_until_idle()
            coverage = fleet.metrics()[_SERIES]
            lags = [v for e in fleet.engines for k, v in e.metrics().items() if _is_lag(k)]
            fleet.kill_replica(fleet.replicas[0], signal.SIGTERM)  # which writes the log's end
        records = [orjson.loads(line) for line in log.read_bytes().splitlines()]
    records.sort(key=lambda record: record["time_unix_s"])
    return ShadowRun(answers=load.seen, records=records, coverage=coverage, lag_s=max(lags))


def _is_lag(series: str) -> bool:
    return series.startswith("mock_lag_p99_seconds")


def rows_of(before: ShadowRun, after: ShadowRun) -> list[Row]:
    """The shadow's accuracy, and its advice beside what the switch brought."""
    sections = [record["scheduling"] for record in before.records]
    judged = [s for s in sections[SETTLED:] if "prefill_s" in s and "predicted_prefill_q_s" in s]
    within = [s["prefill_s"] <= s["predicted_prefill_q_s"] for s in judged]
    low, high = COVERAGE
    share = sum(within) / len(within)
    wide = median(s["predicted_prefill_q_s"] / s["prefill_s"] for s in judged)
    return [
        Row(
            metric=f"coverage of shadow predictions after {SETTLED:,} requests",
            measured=share,
            target=f"in [{low:g}, {high:g}]",
            holds=low <= share <= high,
            note=f"of {len(within):,}; the metric at the end {before.coverage:.3f}",
        ),
        Row(
            metric="predicted quantile over the actual prefill, median",
            measured=wide,
            note=f"engines at most {1000 * before.lag_s:.0f} ms late",
        ),
        *_gain_rows(before, after),
        *(
            equals(f"{name}: requests failed", sum(not a.whole for a in found.answers), 0)
            for name, found in (("least-loaded", before), ("quartz", after))
        ),
    ]


def _gain_rows(before: ShadowRun, after: ShadowRun) -> list[Row]:
    advised = [r for r in before.records if "would_prefill_s" in r.get("scheduling", {})]
    elsewhere = [r["scheduling"]["would_bind"] != r["worker"] for r in advised]
    would_s = fmean(would_be_gain_s(r["scheduling"]) for r in advised)
    measured_s = _mean_s(before.answers) - _mean_s(after.answers)
    rows = [
        Row(
            metric="requests that quartz would have bound elsewhere, %",
            measured=100 * sum(elsewhere) / len(elsewhere),
        ),
        Row(metric="would-be gain in mean TTFT, ms", measured=1000 * would_s),
        Row(
            metric="gain in mean TTFT after the switch, ms",
            measured=1000 * measured_s,
            note=f"{1000 * _mean_s(before.answers):.0f} to {1000 * _mean_s(after.answers):.0f}",
        ),
        Row(
            metric="would-be gain over the measured one",
            measured=would_s / measured_s,
            target=f"in [{1 - GAIN_ERROR:g}, {1 + GAIN_ERROR:g}]",
            holds=abs(would_s / measured_s - 1) <= GAIN_ERROR,
            note="the rest is what a switch does to caches and loads",
        ),
    ]
    for name, found in (("least-loaded", before), ("quartz", after)):
        first_s = [a.first_s for a in found.answers if a.first_s is not None]
        late = sum(a.first_s is None or a.first_s > a.ask.slo_s for a in found.answers)
        rows.append(
            Row(
                metric=f"{name}: P99 TTFT, s",
                measured=quantile(first_s, 0.99),
                note=f"violations {100 * late / len(found.answers):.1f} %",
            )
        )
    return rows


def would_be_gain_s(scheduling: dict[str, Any]) -> float:
    """By how much QUARTZ's worker was predicted to be sooner; negative: it would pay later."""
    return float(scheduling["predicted_prefill_s"] - scheduling["would_prefill_s"])


def _mean_s(answers: Sequence[TimedAnswer]) -> float:
    return fmean(a.first_s for a in answers if a.first_s is not None)
