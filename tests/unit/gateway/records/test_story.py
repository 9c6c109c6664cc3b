"""The story of a request: every step that it reached, in words, with its own figures."""

from typing import Any, get_args

import msgspec
import pytest

from gateway.admission.terms import DenialReason
from gateway.records.attempt import Attempt
from gateway.records.decision import (
    AdmissionSection,
    CompressionSection,
    DecisionRecord,
    EstimateSection,
    PlanSection,
    PrefillSection,
    RequestSection,
    SchedulingSection,
    TimingSection,
    UsageSection,
)
from gateway.records.story import FAULTS, REFUSALS, SKIPS, steps_of, story_of
from gateway.routing.retry import FaultKind
from tests.builders import decision

SERVED = DecisionRecord(
    schema=2,
    time_unix_s=1000.0,
    request_id="r-1",
    endpoint="chat",
    outcome="ok",
    status=200,
    model="llama",
    asked_model="gpt-4o-mini",
    tenant="acme",
    entitlement="acme-prod",
    stream=True,
    pool="short",
    worker="w1",
    finish_reason="stop",
    request=RequestSection(body_bytes=4132, messages=3),
    estimate=EstimateSection(
        category="prose",
        bytes_per_token_conservative=3.24,
        input_tokens=8110,
        output_tokens=256,
        total_tokens=8366,
        cap_tokens=512,
        sequences=1,
    ),
    plan=PlanSection(pool="long", reason="within_gamma"),
    admission=AdmissionSection(
        lease_id="l",
        service_class="guaranteed",
        admitted_unix_s=1000.0,
        reserved_tokens=12299,
        priority=501.0,
        charge_tokens=8210,
    ),
    compression=CompressionSection(compressed="12043->8110", kept_share=0.67),
    scheduling=SchedulingSection(
        candidates=(("w1", 1.0), ("w2", 2.0)),
        worker_active=3,
        backlog_tokens=2000,
        expected_hit_tokens=1024,
        predicted_prefill_s=0.2,
    ),
    attempts=(Attempt(pool="short", worker="w1", result="ok"),),
    usage=UsageSection(prompt_tokens=8010, completion_tokens=200, source="engine"),
    timing=TimingSection(
        queue_ms=120.0, overhead_ms=40.0, compress_ms=38.0, ttft_s=0.5, tpot_s=0.02, duration_s=4.5
    ),
)


def changed(**fields: Any) -> DecisionRecord:
    return msgspec.structs.replace(SERVED, **fields)


def test_every_step_of_a_served_request_is_told_in_order() -> None:
    steps = steps_of(SERVED)
    assert [step.name for step in steps] == [
        *("request", "estimate", "plan", "admission", "compression", "queue"),
        *("prefill", "decode", "settle"),
    ]
    told = {step.name: step.text for step in steps}
    assert told["request"] == (
        "acme-prod asked llama (as gpt-4o-mini) for a stream on the chat endpoint, with a body of "
        "4,132 bytes and 3 messages."
    )
    assert "12,043 prompt tokens at 3.24 bytes per token of prose text" in told["estimate"]
    assert "(the client's limit is 512): 12,299 in total" in told["estimate"]
    assert told["plan"] == (
        "The plan was pool long, over the boundary by so little that compression may fit the "
        "smaller pool."
    )
    assert told["admission"] == (
        "Admission granted a lease as guaranteed, reserving 12,299 tokens, at weight 501."
    )
    assert "from 12,043 to 8,110 tokens in 38 ms and kept 67% of its text" in told["compression"]
    assert "waited 120 ms" in told["queue"]
    assert "Worker w1 of pool short served it, the best of 2 compared" in told["queue"]
    assert "3 sequences ran there, 2,000 tokens of prefill were ahead and" in told["queue"]
    assert told["prefill"].startswith("The first token came 500 ms after the arrival")
    assert "expected 200 ms" in told["prefill"]
    assert "for 4.00 s at 20.0 ms per token, using 8,010 prompt tokens and 200" in told["decode"]
    assert told["settle"] == "The request was served; acme-prod was charged 8,210 tokens."
    assert story_of(SERVED) == [step.text for step in steps]


def test_the_steps_follow_one_another_in_time_and_fill_it() -> None:
    steps = {step.name: step for step in steps_of(SERVED)}
    expected = {
        "plan": (0.0, 2.0),
        "compression": (2.0, 38.0),
        "queue": (40.0, 120.0),
        "prefill": (160.0, 340.0),
        "decode": (500.0, 4000.0),
        "settle": (4500.0, 0.0),
    }
    found = {name: (steps[name].start_ms, steps[name].duration_ms) for name in expected}
    assert found == expected


def test_a_request_that_was_refused_says_why_and_stops_there() -> None:
    record = changed(
        outcome="refused",
        status=429,
        reason="priority",
        retry_after_s=7.0,
        figures="limit 4, used 4, requested 1",
        admission=AdmissionSection(lease_id="the gateway's own id"),
        **{name: getattr(decision(), name) for name in ("compression", "usage", "timing")},
        worker=None,
    )
    assert [step.name for step in steps_of(record)] == [
        *("request", "estimate", "plan", "ending", "settle")
    ]
    told = story_of(record)
    assert told[3] == (
        "The gateway refused the request with 429: the pool is full of work of at least this "
        "priority (limit 4, used 4, requested 1); it was told to try again in 7 s."
    )
    assert told[-1] == "The request ended there; nothing was charged."


@pytest.mark.parametrize("reason", get_args(DenialReason))
def test_every_reason_of_admission_has_words(reason: str) -> None:
    assert reason in REFUSALS
    assert REFUSALS[reason] in " ".join(
        story_of(changed(admission=AdmissionSection(admitted_unix_s=1.0, would_deny=reason)))
    )


def test_every_fault_of_an_attempt_has_words() -> None:
    assert set(FAULTS) == {*get_args(FaultKind), "out_of_memory"}


def test_an_unknown_code_is_shown_as_it_is() -> None:
    told = changed(outcome="odd", plan=PlanSection(pool="p", reason="new_reason"))
    assert "new_reason" in " ".join(story_of(told))
    assert "ended as odd" in " ".join(story_of(told))


def test_failed_workers_and_a_rescue_are_named() -> None:
    failed = Attempt(pool="short", worker="w2", result="overflow")
    told = " ".join(story_of(changed(rescued=True, attempts=(failed, *SERVED.attempts))))
    assert "tried w2 (found the prompt too long)" in told
    assert "a larger window took it" in told


def test_a_whole_answer_has_one_step_for_prefill_and_decode() -> None:
    names = [step.name for step in steps_of(changed(stream=False))]
    assert "prefill and decode" in names
    assert "decode" not in names


IN_PHASES = changed(
    worker="d1",
    prefill=PrefillSection(
        pool="short/prefill",
        worker="p2",
        candidates=(("p2", 1.0), ("p3", 2.0)),
        wait_ms=100.0,
        duration_ms=300.0,
        predicted_s=0.4,
        expected_hit_tokens=512,
        transfer_s=0.03,
    ),
    attempts=(
        Attempt(pool="short/prefill", worker="p1", result="reset", start_ms=140, duration_ms=10),
        Attempt(pool="short/prefill", worker="p2", result="ok", start_ms=150, duration_ms=300),
        Attempt(pool="short", worker="d2", result="connect", start_ms=470, duration_ms=1),
        Attempt(pool="short", worker="d1", result="ok", start_ms=471, duration_ms=4000),
    ),
    usage=UsageSection(
        prompt_tokens=8010, completion_tokens=200, cached_tokens=448, source="engine"
    ),
)


def test_both_phases_are_told_with_their_workers_waits_and_times() -> None:
    steps = {step.name: step for step in steps_of(IN_PHASES)}
    assert list(steps)[-5:] == ["prefill", "queue", "hand-over", "decode", "settle"]
    assert steps["prefill"].text == (
        "The request waited 100 ms for a prefill worker. Worker p2 of pool short/prefill computed "
        "the prompt in 300 ms, the best of 2 compared: its prefix cache should hold 512 tokens. "
        "Before that the gateway tried p1 (broke the connection)."
    )
    assert "waited 20 ms in the gateway for a decode worker. Worker d1" in steps["queue"].text
    assert "tried d2 (refused the connection)" in steps["queue"].text
    assert "p1" not in steps["queue"].text
    assert steps["hand-over"].text == (
        "The first token came 500 ms after the arrival (the predictor expected 400 ms), 30 ms of "
        "that for the hand-over."
    )
    assert "8,010 prompt tokens (448 from the prefill worker's cache)" in steps["decode"].text
    times = [(steps[name].start_ms, steps[name].duration_ms) for name in list(steps)[-5:-2]]
    assert times == [(40.0, 410.0), (450.0, 20.0), (470.0, 30.0)]


@pytest.mark.parametrize("reason", SKIPS)
def test_a_prompt_that_decode_computes_is_told_with_the_reason(reason: str) -> None:
    skipped = changed(prefill=PrefillSection(pool="short/prefill", skipped=reason))
    steps = {step.name: step.text for step in steps_of(skipped)}
    assert steps["queue"].startswith("The request waited 120 ms in the gateway for a decode worker")
    assert list(steps)[-5:] == ["phases", "queue", "prefill", "decode", "settle"]
    assert steps["phases"] == f"The decode worker was left to compute the prompt: {SKIPS[reason]}."


def test_a_hand_over_that_failed_is_told_with_what_followed() -> None:
    phase = msgspec.structs.replace(IN_PHASES.prefill, skipped="failed", transfer_s=None)
    attempts = (
        Attempt(pool="short/prefill", worker="p2", result="ok", start_ms=140, duration_ms=300),
        Attempt(pool="short", worker="d2", result="handover", start_ms=460, duration_ms=5),
        Attempt(pool="short", worker="d1", result="ok", start_ms=465, duration_ms=4000),
    )
    told = " ".join(story_of(msgspec.structs.replace(IN_PHASES, prefill=phase, attempts=attempts)))
    assert "left to compute the prompt: the prefill or the hand-over failed." in told
    assert "tried d2 (did not take over the prompt)" in told
    assert "for the hand-over" not in told


@pytest.mark.parametrize(
    ("more", "who"),
    [
        ({}, "A client without a valid key"),
        ({"tenant": "acme", "key": "web"}, "The key web of acme"),
    ],
)
def test_a_request_without_an_entitlement_has_a_story(more: dict[str, str], who: str) -> None:
    told = story_of(decision(outcome="refused", status=401, **more))
    assert told[0].startswith(f"{who} asked an unknown model")
