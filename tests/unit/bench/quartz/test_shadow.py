"""Figures of bench quartz shadow."""

from typing import Any

import pytest

from bench.common.raw_client import TimedAnswer, TimedRequest
from bench.quartz.live import SETTLED, ShadowRun, shadow_rows


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


def test_coverage_counts_after_the_first_thousand_and_advice_beside_what_the_switch_brought() -> (
    None
):
    records = [record(n, within=False) for n in range(SETTLED)]
    records += [record(n, within=n < 190) for n in range(200)]
    before = ShadowRun(answers=answers(0.6), records=records, coverage=0.95, lag_s=0.001)
    after = ShadowRun(answers=answers(0.45), records=[], coverage=0.95, lag_s=0.001)
    rows = {row.metric: row for row in shadow_rows(before, after)}
    covered = rows["coverage of shadow predictions after 1,000 requests"]
    assert covered.measured == pytest.approx(0.95)
    assert covered.holds is True
    assert rows["requests that quartz would have bound elsewhere, %"].measured == 75.0
    assert rows["would-be gain in mean TTFT, ms"].measured == pytest.approx(75.0)
    assert rows["gain in mean TTFT after the switch, ms"].measured == pytest.approx(150.0)
    ratio = rows["would-be gain over the measured one"]
    assert ratio.measured == pytest.approx(0.5)
    assert ratio.holds is False
    assert rows["least-loaded: P99 TTFT, s"].note == "violations 100.0 %"
