"""Verdicts follow from the whole interval: of one seed, or over the seeds if that is wider."""

from typing import Any

import pytest

from gateway.records.proof import Verdict
from sluice.prove.verdict import Counts, Finding, judge, overall

SUBJECT = Finding(kind="entitlement", name="chat", verdict="cannot tell", reason="")


def judged(*lost: float, requests: int = 10_000, **more: Any) -> Finding:
    runs = [
        Counts(requests=requests, simulated=requests, lost={"late in long": each}, **more)
        for each in lost
    ]
    pool = Counts(requests=1, simulated=1, lost={}, slots=8, expected=9.0, peak=11.4)
    return judge(
        SUBJECT, "first token in 0.5 s", runs, limits="concurrency 4", pools={"long": [pool]}
    )


@pytest.mark.parametrize(
    ("lost", "requests", "verdict"),
    [
        ((0, 0, 0), 400, "holds"),
        ((0, 0, 0), 300, "cannot tell"),  # too few to say 99 %
        ((50, 50, 50), 10_000, "holds"),
        ((90, 90, 90), 10_000, "cannot tell"),  # 98.9 to 99.3 %
        ((130, 130, 130), 10_000, "breaks"),
        ((0, 0, 150), 10_000, "cannot tell"),  # the seeds differ
    ],
)
def test_the_interval_decides(lost: tuple[float, ...], requests: int, verdict: Verdict) -> None:
    assert judged(*lost, requests=requests).verdict == verdict


def test_the_reason_names_the_pool_that_is_short_of_slots() -> None:
    reason = judged(880, 880, 880).reason
    assert reason == (
        "first token in 0.5 s for 91.2 % (90.6 to 91.7) of 10,000 requests, 99 % promised; "
        "because long has 8 slots for 11.4 expected in its busiest 5 minutes"
    )


def test_refusals_by_own_limits_are_excused_as_far_as_they_are_known() -> None:
    assert judged(0, 0, 0, limited=1000, limited_before=1000, doubt=0.0).verdict == "holds"
    assert judged(0, 0, 0, limited=1000, limited_before=1000).verdict == "cannot tell"
    assert judged(0, 0, 0, limited=1000, limited_before=300).verdict == "breaks"


def test_one_thing_that_breaks_breaks_all() -> None:
    good, bad = judged(0, 0, 0), judged(500, 500, 500)
    assert overall([good]) == "holds"
    assert overall([good, SUBJECT]) == "cannot tell"
    assert overall([good, SUBJECT, bad]) == "breaks"
    assert overall([]) == "cannot tell"
