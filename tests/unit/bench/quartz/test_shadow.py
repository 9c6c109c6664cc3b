"""Figures of bench quartz shadow."""

from typing import Any

import pytest

from bench.common.report import Row
from bench.common.timed_load import TimedAnswer, TimedRequest
from bench.quartz.shadow import SETTLED, ShadowRun, rows_of


def answers(first_s: float) -> list[TimedAnswer]:
    ask = TimedRequest(at_s=0.0, client="c", body=b"", slo_s=0.5)
    return [TimedAnswer(ask=ask, status=200, first_s=first_s, whole=True) for _ in range(10)]


def record(number: int, *, within: bool) -> dict[str, Any]:
    scheduling = {
        "predicted_prefill_s": 0.4,
        "predicted_prefill_q_s": 1.0,
        "prefill_s": 0.5 if within else 2.0,
        "would_bind": "b" if number % 4 else "a",
        "would_prefill_s": 0.3 if number % 4 else 0.4,
    }
    return {"worker": "a", "scheduling": scheduling}


def found(covered: float) -> dict[str, Row]:
    """Rows of a shadow that covers nothing at first, and later this share."""
    later = 200
    records = [record(n, within=False) for n in range(SETTLED)]
    records += [record(n, within=n < covered * later) for n in range(later)]
    before = ShadowRun(answers=answers(0.6), records=records, coverage=covered, lag_s=0.001)
    after = ShadowRun(answers=answers(0.45), records=[], coverage=0.95, lag_s=0.001)
    return {row.metric: row for row in rows_of(before, after)}


@pytest.mark.parametrize(("covered", "holds"), [(0.92, False), (0.95, True), (0.97, False)])
def test_coverage_counts_after_the_first_thousand(covered: float, *, holds: bool) -> None:
    row = found(covered)["coverage of shadow predictions after 1,000 requests"]
    assert row.measured == pytest.approx(covered)
    assert row.holds == holds


def test_what_was_advised_stands_beside_what_the_switch_brought() -> None:
    rows = found(0.95)
    assert rows["requests that quartz would have bound elsewhere, %"].measured == 75.0
    assert rows["would-be gain in mean TTFT, ms"].measured == pytest.approx(75.0)
    assert rows["gain in mean TTFT after the switch, ms"].measured == pytest.approx(150.0)
    ratio = rows["would-be gain over the measured one"]
    assert ratio.measured == pytest.approx(0.5)
    assert ratio.holds is False
    assert rows["least-loaded: P99 TTFT, s"].note == "violations 100.0 %"
