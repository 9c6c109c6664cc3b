"""What `sluice calibrate` reads off a stream, and what `plan` says of its profile."""

import json

import pytest

from planner.calibration.check import Check
from planner.errors import PlanError
from sluice.calibrate.command import public_url
from sluice.calibrate.report import verdict
from sluice.calibrate.stream import read_stream, trace_of


def event(text: str, *, usage: int | None = None, reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": reason}
    body: dict[str, object] = {"choices": [choice]}
    if usage is not None:
        body["usage"] = {"prompt_tokens": 40, "completion_tokens": usage}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def test_chunks_that_tell_usage_are_counted_by_it() -> None:
    parts = [(1.0, event("a", usage=1)), (2.0, event("b", usage=3)), (3.0, b"data: [DONE]\n\n")]
    seen = read_stream(parts)
    assert (seen.times_s, seen.tokens, seen.prompt_tokens) == ((1.0, 2.0), (1, 3), 40)
    assert not seen.finished


def test_an_event_counts_when_its_line_is_complete_and_those_that_come_together_once() -> None:
    whole = event("a") + event("b")
    last = event("c", reason="length")
    seen = read_stream([(1.0, whole[:10]), (2.0, whole[10:]), (3.0, last)])
    assert (seen.times_s, seen.tokens, seen.finished) == ((2.0, 3.0), (2, 3), True)


def test_a_total_is_spread_over_chunks_without_usage() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 8, "prompt_tokens_details": None}
    tail = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    parts = [(float(n), event("x")) for n in range(4)]
    seen = read_stream([*parts, (9.0, tail)])
    assert seen.tokens == (2, 4, 6, 8)
    assert seen.times_s[-1] == 3.0


def test_cached_prompt_tokens_cost_nothing() -> None:
    usage = {"prompt_tokens": 90, "prompt_tokens_details": {"cached_tokens": 64}}
    body = {"choices": [{"delta": {"content": "x"}}], "usage": {**usage, "completion_tokens": 1}}
    trace = trace_of(read_stream([(1.0, b"data: " + json.dumps(body).encode() + b"\n")]), 0.5, 7)
    assert trace is not None
    assert (trace.prompt_tokens, trace.ttft_s, trace.ended) == (26, 0.5, False)


@pytest.mark.parametrize("data", [b"", b"data: {}\n", b"data: [1]\n", b'data: {"error":"x"}\n'])
def test_a_stream_without_tokens_is_no_trace(data: bytes) -> None:
    assert trace_of(read_stream([(1.0, data)]), 0.0, 1) is None


def test_credentials_never_leave_the_url() -> None:
    assert public_url("https://me:word@Host:8/v1/?key=x#y") == "https://host:8/v1"
    assert public_url("http://[::1]:9") == "http://[::1]:9"
    for bad in ("host:8000", "http://", "http://h:port"):
        with pytest.raises(PlanError):
            public_url(bad)


def test_the_verdict_names_what_was_missed() -> None:
    good = Check(name="TPOT", measured=1.0, modelled=1.1)
    bad = Check(name="TTFT", measured=1.0, modelled=1.2)
    assert verdict([good]).startswith("verified")
    assert verdict([good, bad]) == "unverified: over 15% off in TTFT"
    assert verdict([]).startswith("unverified")


def test_a_tail_is_judged_from_its_bounds_and_a_median_from_its_value() -> None:
    # Of 96 requests the P99 is nearly the slowest one: 1.0 s measured, but .45 s may be true.
    tail = Check(name="TTFT p99", measured=1.0, modelled=0.54, bounds=(0.45, 1.2))
    assert tail.holds
    assert tail.off == pytest.approx(-0.46)
    assert not Check(name="TTFT p99", measured=1.0, modelled=0.3, bounds=(0.45, 1.2)).holds
    assert not Check(name="TTFT p99", measured=1.0, modelled=1.5, bounds=(0.45, 1.2)).holds
    assert not Check(name="TTFT p50", measured=1.0, modelled=0.54).holds
