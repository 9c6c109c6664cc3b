"""Decision records as spans: parents, times, names and attributes of the conventions."""

from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode

from gateway.records.decision import DecisionRecord
from gateway.records.record import Trace
from gateway.telemetry.spans import address_of, spans_of
from tests.builders import decision

RESOURCE = Resource({"service.name": "here"})
TRACE = Trace(trace_id="a" * 32, span_id="4" + "0" * 15, parent_span_id="b" * 16, sampled=True)


def served(**more: Any) -> DecisionRecord:
    """A stream that waited 50 ms, failed at one worker, and was served by the next."""
    fields: dict[str, Any] = {
        "time_unix_s": 1000.0,
        "model": "llama",
        "asked_model": "gpt-4o",
        "tenant": "acme",
        "entitlement": "prod",
        "stream": True,
        "pool": "short",
        "worker": "10.0.0.2:8000",
        "finish_reason": "stop",
        "cap_tokens": 64,
        "sequences": 1,
        "prompt_tokens": 100,
        "completion_tokens": 20,
        "cached_tokens": 40,
        "queue_ms": 50.0,
        "ttft_s": 0.3,
        "duration_s": 2.0,
        "attempts": [
            {"pool": "short", "worker": "10.0.0.1:8000", "result": "connect"}
            | {"start_ms": 60.0, "duration_ms": 5.0},
            {"pool": "short", "worker": "10.0.0.2:8000", "result": "ok"}
            | {"start_ms": 70.0, "duration_ms": 1900.0},
        ],
        "trace": msgspec.to_builtins(TRACE),
        **more,
    }
    return decision("r-1", **fields)


def times(span: ReadableSpan) -> tuple[float, float]:
    """Start and end in milliseconds after the request's arrival."""
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.start_time - 1000 * 10**9) / 1e6, (span.end_time - 1000 * 10**9) / 1e6


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_request_is_one_span_with_its_wait_and_its_attempts_as_children() -> None:
    spans = spans_of(served(), RESOURCE)
    assert [span.name for span in spans] == ["chat llama", "queue", "attempt", "attempt"]
    assert [span.kind for span in spans][0::2] == [SpanKind.SERVER, SpanKind.CLIENT]
    assert [times(span) for span in spans] == [(0, 2000), (10, 60), (60, 65), (70, 1970)]
    root = spans[0].context
    assert root is not None
    assert (f"{root.trace_id:x}", f"{root.span_id:016x}") == (TRACE.trace_id, TRACE.span_id)
    assert spans[0].parent is not None
    assert f"{spans[0].parent.span_id:x}" == TRACE.parent_span_id
    assert spans[0].parent.is_remote
    assert all(span.parent == root for span in spans[1:])
    assert len({span.context.span_id for span in spans if span.context}) == 4
    assert {span.resource for span in spans} == {RESOURCE}


def test_the_request_s_attributes_are_named_by_the_conventions() -> None:
    found = attributes(spans_of(served(), RESOURCE)[0])
    assert (
        found.items()
        >= {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "sluice",
            "gen_ai.request.model": "gpt-4o",
            "gen_ai.request.max_tokens": 64,
            "gen_ai.response.model": "llama",
            "gen_ai.response.finish_reasons": ("stop",),
            "gen_ai.usage.input_tokens": 100,
            "gen_ai.usage.output_tokens": 20,
            "sluice.request_id": "r-1",
            "sluice.entitlement": "prod",
            "sluice.pool": "short",
            "sluice.worker": "10.0.0.2:8000",
            "sluice.queue_ms": 50.0,
            "sluice.spilled": False,
            "sluice.compressed": "none",
        }.items()
    )
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI")}
    assert {name for name in found if name.startswith("gen_ai.")} <= known
    assert "error.type" not in found
    assert None not in found.values()


def test_a_failed_attempt_says_its_fault_and_its_server() -> None:
    first, second = spans_of(served(), RESOURCE)[2:]
    assert attributes(first) == {
        "server.address": "10.0.0.1",
        "server.port": 8000,
        "sluice.pool": "short",
        "sluice.worker": "10.0.0.1:8000",
        "error.type": "connect",
    }
    assert first.status.status_code is StatusCode.ERROR
    assert second.status.status_code is StatusCode.UNSET


def test_a_request_that_gave_up_in_the_queue_waited_until_its_end() -> None:
    record = served(outcome="refused", status=429, reason="queue_timeout", attempts=[])
    assert times(spans_of(record, RESOURCE)[1]) == (1950, 2000)


def test_a_name_that_a_client_made_up_is_cut_and_names_no_span() -> None:
    record = served(model=None, asked_model="x" * 100_000, outcome="refused", attempts=[])
    span = spans_of(record, RESOURCE)[0]
    assert span.name == "chat"
    assert attributes(span)["gen_ai.request.model"] == "x" * 256


def test_no_span_holds_the_prompt() -> None:
    secret = "the prompt that nobody else may read"
    shown = [span.to_json() for span in spans_of(served(prompt=secret), RESOURCE)]
    assert secret not in "".join(shown)


@pytest.mark.parametrize(
    ("worker", "host", "port"),
    [
        ("gpu-1:8000", "gpu-1", 8000),
        ("gpu-1:8000/engine-2", "gpu-1", 8000),
        ("gpu-1:8000#3", "gpu-1", 8000),
        ("[::1]:8000/v#1", "::1", 8000),
        ("w", "w", None),
    ],
)
def test_a_worker_s_id_names_its_address(worker: str, host: str, port: int | None) -> None:
    assert address_of(worker) == (host, port)
