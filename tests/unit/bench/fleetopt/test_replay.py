"""The documented sequence and the bench that runs it are the same."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.fleetopt import replay as bench
from simulator.engine.profiles import EngineProfile

PAGE = (Path(__file__).parents[4] / "docs/plan/from-log-to-fleet.md").read_text(encoding="utf-8")


def found(p99_s: float | None, *, holds: bool, lag_s: float = 0.01, late_s: float = 0.0) -> Any:
    return {
        "all": {"ttft_s": {"p99": p99_s}},
        "holds": holds,
        "mock_lag_p99_s": lag_s,
        "late_p99_s": late_s,
        "chunks_per_s": 500.0,
        "requests": 1000,
        "rate_per_s": 12.0,
        "failed": 0,
    }


def test_the_page_has_the_bench_s_engine_and_figures() -> None:
    written = re.search(r"^(\{\"name\": \"mock-node\".*\})$", PAGE, re.MULTILINE)
    assert written
    assert json.loads(written[1]) == bench.NODE
    EngineProfile(**bench.NODE["engine"])
    assert f"--workload {bench.TRAFFIC} --rate {bench.LOG_RATE} --duration 60" in PAGE
    assert PAGE.count(f"--rate {bench.RATE:g} ") == 3
    assert PAGE.count(f"--slo-ttft-ms {bench.SLO_MS}") == 3


@pytest.mark.parametrize(
    "seen",
    [
        found(1.6, holds=False),
        found(0.9, holds=True, lag_s=0.2),
        found(None, holds=False),
    ],
    ids=["violated", "void", "failed requests"],
)
def test_a_planned_fleet_that_does_not_hold_or_was_not_measured_fails(seen: Any) -> None:
    assert not all(row.holds for row in bench._judged("a", seen, holds=True))
