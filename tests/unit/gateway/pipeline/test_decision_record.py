"""The line of a request in the log: a section from the records of each stage."""

from dataclasses import replace

import msgspec
import pytest

from gateway.fleet.model_runtime import ModelCompression, ModelRuntime
from gateway.pipeline import estimate as stage_estimate
from gateway.pipeline.decision_record import (
    admission_section,
    compression_section,
    decision_record,
    estimate_section,
    plan_section,
    scheduling_section,
    timing_section,
    usage_section,
)
from gateway.records.attempt import Attempt, Binding, Outcome, Usage
from gateway.records.decision import (
    NO_COMPRESSION,
    NO_ESTIMATE,
    NO_PLAN,
    NO_SCHEDULING,
    NO_USAGE,
    AdmissionSection,
    CompressionSection,
    DecisionRecord,
    PlanSection,
    SchedulingSection,
    TimingSection,
    UsageSection,
)
from gateway.records.estimate import Plan
from gateway.records.lease import Lease, Limits
from gateway.records.request import OPEN, Incoming, Principal, Prompt, RequestHead
from gateway.routing.routing_table import CompressionRules
from gateway.scheduling.scheduler import Job
from tests.builders import chat_body, incoming, length_estimate, served_model

OK = Outcome(label="ok", status=200, finish_reason="stop", ttft_s=0.25, tpot_s=0.01)
USED = Usage(prompt_tokens=100, completion_tokens=20, cached_tokens=40)
LIMITS = Limits(
    sequences=4,
    sequences_free=3,
    sequences_reset_s=0.0,
    tokens=0,
    tokens_free=0,
    tokens_reset_s=0.0,
)


def lease(**more: object) -> Lease:
    held = Lease(
        id="l", model="m", entitlement="e", pool=0, spilled=False, cost_tokens=300, sequences=1
    )
    return msgspec.structs.replace(held, **more)


def plan(pool: int = 0, **more: object) -> Plan:
    return msgspec.structs.replace(Plan(pool=pool, alternates=(1,), reason="fits"), **more)


def observing(served: ModelRuntime) -> ModelRuntime:
    routing = replace(served.routing, observe=True)
    return replace(served, routing=routing)


def record(given: Incoming | None = None, *, prompts: bool = False) -> DecisionRecord:
    """Of a request that was served, but for the sections that tests of their own make."""
    given = given or incoming()
    return decision_record(
        incoming=given,
        principal=OPEN,
        facts=stage_estimate.read(given.endpoint, given.body, RequestHead()),
        served=served_model(),
        outcome=OK,
        told=None,
        binding=Binding(pool=0, worker=0, score=0.5),
        rescued=False,
        estimate=NO_ESTIMATE,
        plan=NO_PLAN,
        admission=AdmissionSection(lease_id="l"),
        compression=NO_COMPRESSION,
        scheduling=NO_SCHEDULING,
        attempts=(Attempt(pool="short", worker="w", result="ok"),),
        usage=NO_USAGE,
        timing=TimingSection(),
        prompts=prompts,
    )


def test_a_served_request_says_whose_it_was_and_where_it_went() -> None:
    served = served_model()
    found = record(incoming(chat_body("hello", stream=True)))
    assert (found.request_id, found.endpoint, found.time_unix_s) == ("r1", "chat", 1_000.0)
    assert (found.model, found.asked_model, found.tenant) == ("m", "m", "open")
    assert (found.outcome, found.status, found.finish_reason) == ("ok", 200, "stop")
    assert (found.pool, found.worker) == (
        served.fleet.pools[0].name,
        served.fleet.pools[0].workers[0],
    )
    assert (found.stream, found.mode, found.reason) == (True, "enforce", None)
    assert found.request.body_bytes == len(chat_body("hello", stream=True))
    assert (found.request.text_bytes, found.request.messages) == (5, 1)


def test_the_body_is_in_it_where_it_was_asked_for_only() -> None:
    assert record().prompt is None
    assert record(prompts=True).prompt == chat_body().decode()


def test_a_retry_has_the_fingerprint_of_its_first_attempt_and_another_body_has_not() -> None:
    first, again = record(incoming(chat_body("hello"))), record(incoming(chat_body("hello")))
    other = record(incoming(chat_body("jello")))
    assert first.request.body_digest == again.request.body_digest != other.request.body_digest
    # Turns of a long conversation begin alike and have different ends.
    long = [record(incoming(chat_body("x" * 200_000 + end))) for end in "ab"]
    assert long[0].request.body_digest != long[1].request.body_digest


def test_sections_that_a_request_did_not_reach_are_left_out_of_its_line() -> None:
    found = decision_record(
        incoming=incoming(),
        principal=None,
        facts=None,
        served=None,
        outcome=Outcome(label="refused", status=401),
        told=None,
        binding=None,
        rescued=False,
        estimate=estimate_section(None),
        plan=plan_section(served=None, planned=None, plan=None),
        admission=AdmissionSection(lease_id="l"),
        compression=compression_section(None, None),
        scheduling=scheduling_section(served=None, binding=None, job=None, first_s=None),
        attempts=(),
        usage=usage_section(None),
        timing=timing_section(
            outcome=Outcome(label="refused", status=401),
            received_s=1.0,
            sent_s=None,
            ended_s=1.5,
            queue_s=0.0,
            compress_s=None,
        ),
        prompts=False,
    )
    line = msgspec.json.decode(msgspec.json.encode(found))
    assert {name for name, value in line.items() if isinstance(value, dict)} == {
        *("request", "admission", "timing"),
    }
    assert line["admission"] == {"lease_id": "l"}
    assert line["timing"] == {"queue_ms": 0.0, "duration_s": 0.5}


def test_an_estimate_is_told_with_its_ratios() -> None:
    found = estimate_section(length_estimate(200, cap=50, sequences=2))
    assert (found.category, found.bytes_per_token) == ("prose", 4.4)
    assert found.bytes_per_token_conservative == 4.0
    assert (found.input_tokens, found.output_tokens, found.cap_tokens) == (200, 50, 50)
    assert (found.total_tokens, found.sequences) == (250, 2)


def test_a_plan_is_the_boundary_s_and_a_compressed_one_says_why() -> None:
    served = served_model()
    names = [pool.name for pool in served.fleet.pools]
    found = plan_section(served=served, planned=plan(1), plan=plan(1))
    assert found == PlanSection(pool=names[1], reason="fits")
    compressed = plan(0, compress=True, reason="within_gamma")
    found = plan_section(served=served, planned=plan(1), plan=compressed)
    assert found == PlanSection(pool=names[1], reason="within_gamma")


def test_observe_mode_says_where_the_boundary_would_have_sent_it() -> None:
    served = observing(served_model())
    elsewhere = plan_section(served=served, planned=plan(0), plan=plan(1, reason="observed"))
    assert (elsewhere.would_route, elsewhere.reason) == (served.fleet.pools[0].name, "fits")
    same = plan_section(served=served, planned=plan(0), plan=plan(0, reason="observed"))
    assert same.would_route is None


def admission(held: Lease, *, charged: Usage | None = USED) -> AdmissionSection:
    return admission_section(
        lease_id="l",
        lease=held,
        asked=plan(),
        taken=lease(limits=LIMITS, kv_bytes=7),
        principal=Principal(entitlement="e", tenant="t", service_class="spot"),
        served=served_model(),
        charged=charged,
        lease_changes=((5.0, "transfer", 1),),
        evicted=False,
        settled_unix_s=9.0,
    )


def test_a_managed_lease_is_told_from_its_admission_to_its_end() -> None:
    served = served_model()
    found = admission(
        lease(limits=LIMITS, cost_tokens=120, spilled=True, weight=2.0, issued_unix_s=4.0)
    )
    assert (found.asked_pool, found.alternates) == (
        served.fleet.pools[0].name,
        (served.fleet.pools[1].name,),
    )
    assert (found.reserved_tokens, found.reserved_kv_bytes) == (300, 7), "as it was taken"
    assert (found.admitted_unix_s, found.settled_unix_s) == (4.0, 9.0)
    assert (found.service_class, found.priority, found.spilled) == ("spot", 2.0, True)
    assert found.lease_changes == ((5.0, "transfer", 1),)
    assert found.charge_tokens is not None


def test_a_lease_without_limits_has_no_figures_of_a_pool() -> None:
    found = admission(lease(would_deny="rate", contended=True), charged=None)
    assert found == AdmissionSection(lease_id="l", would_deny="rate", contended=True)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (Prompt(body=b""), CompressionSection()),
        (
            Prompt(body=b"", not_compressed="tools"),
            CompressionSection(not_compressed="tools", when="any"),
        ),
        (
            Prompt(body=b"", compressed="9->4", only_pool=0, kept_share=0.5),
            CompressionSection(compressed="9->4", kept_share=0.5, when="any"),
        ),
    ],
)
def test_compression_is_told_where_it_was_asked_for(
    prompt: Prompt, expected: CompressionSection
) -> None:
    compression = ModelCompression(rules=CompressionRules(when="any"))
    served = replace(served_model(), compression=compression)
    assert compression_section(served, prompt) == expected


def test_a_worker_that_no_scheduler_chose_has_a_score_only() -> None:
    bound = Binding(pool=0, worker=0, score=0.5, candidates=(("w", 0.5),))
    found = scheduling_section(served=None, binding=bound, job=None, first_s=3.0)
    assert found == SchedulingSection(score=0.5, candidates=(("w", 0.5),))


@pytest.mark.parametrize(("stream", "prefill_s"), [(True, 1.5), (False, None)])
def test_the_prefill_of_a_stream_is_measured(stream: bool, prefill_s: float | None) -> None:
    job = Job(None, 100, 10, 0.0, stream=stream)
    job.sent_s, job.hit_tokens, job.backlog_tokens = 2.0, 30, 8
    job.active, job.mean_s, job.quantile_s = 3, 0.4, 0.0
    found = scheduling_section(served=None, binding=None, job=job, first_s=3.5)
    assert (found.expected_hit_tokens, found.backlog_tokens, found.worker_active) == (30, 8, 3)
    assert (found.predicted_prefill_s, found.predicted_prefill_q_s) == (0.4, None)
    assert found.prefill_s == prefill_s


def test_the_worker_that_quartz_would_have_chosen_is_named() -> None:
    served, job = served_model(), Job(None, 100, 10, 0.0)
    bound = Binding(pool=0, worker=0, score=0.5)
    job.mean_s, job.expected_s, job.quantile_s = 0.3, 0.4, 0.9
    found = scheduling_section(served=served, binding=bound, job=job, first_s=None)
    assert (found.would_bind, found.would_prefill_s) == (None, None)
    job.would_bind, job.would_s = 0, 0.2
    found = scheduling_section(served=served, binding=bound, job=job, first_s=None)
    assert (found.would_bind, found.would_prefill_s) == (served.fleet.pools[0].workers[0], 0.2)
    assert (found.predicted_prefill_s, found.predicted_prefill_q_s) == (0.4, 0.9)


def test_usage_is_what_was_charged() -> None:
    assert usage_section(USED) == UsageSection(
        prompt_tokens=100, completion_tokens=20, cached_tokens=40, source="engine"
    )


def test_time_in_the_queue_is_not_the_gateway_s_own() -> None:
    found = timing_section(
        outcome=OK, received_s=10.0, sent_s=10.75, ended_s=12.0, queue_s=0.5, compress_s=0.125
    )
    assert found == TimingSection(
        queue_ms=500.0,
        overhead_ms=250.0,
        compress_ms=125.0,
        ttft_s=0.25,
        tpot_s=0.01,
        duration_s=2.0,
    )
