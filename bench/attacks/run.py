"""Structure-aware hostile clients over raw sockets.

Targets: no 5xx, no traceback, no crash, no lease left, memory back at its start. Aim: `/health`
never slow. `SLUICE_BENCH_SEED` draws other cases.
"""

import asyncio
import os

from bench.attacks.attacker import Outcomes, attack
from bench.attacks.cases import FAMILIES, stream_of_cases
from bench.attacks.target import HealthWatch, Target
from bench.common.report import Report, Row, at_most, equals
from bench.common.steps import scaled

CASES = scaled(200_000)
_WARM_UP = 10_000
"""Cases, a third of all at most: allocator and caches fill before memory is first read."""
_MAX_GROWTH_MIB = 50.0


def run() -> Report:
    """All families at full size."""
    seed = int(os.environ.get("SLUICE_BENCH_SEED", "1"))
    return Report(name="attacks", rows=rows(cases=CASES, seed=seed))


def rows(*, cases: int, seed: int) -> list[Row]:
    """Attack one gateway with everything on, by `cases` cases drawn with `seed`."""
    with Target() as target:
        outcomes = Outcomes()
        attacks = stream_of_cases(seed)
        warm_up = min(_WARM_UP, cases // 3)
        asyncio.run(attack(target.port, attacks, warm_up, outcomes))
        before_mib = target.settled_rss_mib()
        with HealthWatch(target) as watch:
            asyncio.run(attack(target.port, attacks, cases - warm_up, outcomes))
        after_mib = target.settled_rss_mib()
        return [
            *_answers(outcomes, cases),
            equals("gateway processes that died", target.deaths(), 0),
            equals("tracebacks in its log", target.tracebacks(), 0, target.first_traceback()),
            equals("leases left", target.leases(), 0),
            equals("requests left at the engines", target.running_at_engines(), 0),
            at_most(
                "memory after, MiB over before",
                after_mib - before_mib,
                _MAX_GROWTH_MIB,
                f"{before_mib:.0f} -> {after_mib:.0f} MiB",
            ),
            Row(
                "/health, slowest answer, s",
                watch.slowest_s,
                f"aim: .1; of {watch.probes}; p99 {watch.p99_s:.4f} s; an engine's beside "
                f"it: slowest {watch.control_slowest_s:.4f} s",
            ),
        ]


def _answers(outcomes: Outcomes, cases: int) -> list[Row]:
    statuses = ", ".join(f"{k} {v:,}" for k, v in sorted(outcomes.statuses.items()))
    counts = ", ".join(f"{name} {outcomes.families[name]:,}" for name in FAMILIES)
    return [
        equals("cases", sum(outcomes.families.values()), cases, counts),
        equals("answers of 5xx", outcomes.server_errors, 0, "; ".join(outcomes.examples)),
        equals(
            "whole requests without an answer", outcomes.unanswered, 0, "; ".join(outcomes.silent)
        ),
        Row("answers", sum(outcomes.statuses.values()), statuses),
    ]
