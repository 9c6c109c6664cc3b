"""A decision record as spans: the request, its wait in the gateway, and its attempts.

No clock is read: all times are the record's. Nothing here holds text of a request.
"""

from collections.abc import Mapping
from typing import Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AttributeValue

from gateway.payload.head import QUEUE, child_id
from gateway.records.decision import DecisionRecord
from gateway.records.record import Trace

SCOPE: Final = InstrumentationScope("sluice")
PROVIDER: Final = "sluice"
"""The conventions name who serves the model; which engine it is, the gateway does not know."""
_OPERATIONS: Final = {
    "chat": "chat",
    "messages": "chat",
    "responses": "chat",
    "completions": "text_completion",
}
_MAX_NAME: Final = 256
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)

Attributes = Mapping[str, AttributeValue | None]


def operation(record: DecisionRecord) -> str:
    """`gen_ai.operation.name`; the endpoint's own name where the conventions know none."""
    return _OPERATIONS.get(record.endpoint, record.endpoint)


def error_type(record: DecisionRecord) -> str | None:
    """`error.type`: the reason of a refusal, else how the request ended; None of a success."""
    return None if record.outcome == "ok" else record.reason or record.outcome


def context_of(trace: Trace) -> SpanContext:
    """The context of the request's own span."""
    return _context(trace, trace.span_id)


def spans_of(record: DecisionRecord, resource: Resource) -> list[ReadableSpan]:
    """The spans of a record that has a sampled trace, the request's own first."""
    trace, root, timing = record.trace, context_of(record.trace), record.timing
    spans: list[ReadableSpan] = []

    def add(
        name: str,
        kind: SpanKind,
        start_ns: int,
        end_ns: int,
        attributes: Attributes,
        error: str | None = None,
        within: int | None = None,
    ) -> None:
        """The request's own span, or one `within` it, by its number."""
        parent: SpanContext | None = root
        if within is None:
            above = trace.parent_span_id
            parent = _context(trace, above, remote=True) if above else None
        stated = {key: value for key, value in attributes.items() if value is not None}
        if error is not None:
            stated["error.type"] = error
        spans.append(
            ReadableSpan(
                name,
                context=root if within is None else _context(trace, child_id(trace, within)),
                parent=parent,
                resource=resource,
                attributes=stated,
                kind=kind,
                instrumentation_scope=SCOPE,
                status=Status() if error is None else Status(StatusCode.ERROR, error),
                start_time=start_ns,
                end_time=end_ns,
            )
        )

    began_ns = int(record.time_unix_s * 1e9)
    end_ns = began_ns + int((timing.duration_s or 0.0) * 1e9)
    # By the file's name: clients may make up as many names as they like.
    name = operation(record) if record.model is None else f"{operation(record)} {record.model}"
    add(name, SpanKind.SERVER, began_ns, end_ns, _request(record), error_type(record))
    if timing.queue_ms:
        if record.attempts:  # of several waits, all before the first attempt
            end_ns = began_ns + int(record.attempts[0].start_ms * 1e6)
        start_ns = max(began_ns, end_ns - int(timing.queue_ms * 1e6))
        pool: Attributes = {"sluice.pool": record.pool}
        add("queue", SpanKind.INTERNAL, start_ns, end_ns, pool, within=QUEUE)
    for number, attempt in enumerate(record.attempts, 1):
        start_ns = began_ns + int(attempt.start_ms * 1e6)
        end_ns = start_ns + int(attempt.duration_ms * 1e6)
        host, port = address_of(attempt.worker)
        about: Attributes = {
            "server.address": host,
            "server.port": port,
            "sluice.pool": attempt.pool,
            "sluice.worker": attempt.worker,
        }
        failed = None if attempt.result == "ok" else attempt.result
        add("attempt", SpanKind.CLIENT, start_ns, end_ns, about, failed, number)
    return spans


def _context(trace: Trace, span_id: str, *, remote: bool = False) -> SpanContext:
    return SpanContext(int(trace.trace_id, 16), int(span_id, 16), remote, _SAMPLED)


def _request(record: DecisionRecord) -> Attributes:
    estimate, usage, timing = record.estimate, record.usage, record.timing
    return {
        "gen_ai.operation.name": operation(record),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": (record.asked_model or record.model or "")[:_MAX_NAME] or None,
        "gen_ai.request.max_tokens": estimate.cap_tokens,
        "gen_ai.request.choice.count": estimate.sequences if estimate.sequences != 1 else None,
        "gen_ai.request.stream": record.stream or None,
        "gen_ai.response.model": record.model if record.outcome == "ok" else None,
        "gen_ai.response.finish_reasons": (record.finish_reason,) if record.finish_reason else None,
        "gen_ai.response.time_to_first_chunk": timing.ttft_s if record.stream else None,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "http.response.status_code": record.status,
        "sluice.request_id": record.request_id,
        "sluice.tenant": record.tenant,
        "sluice.entitlement": record.entitlement,
        "sluice.pool": record.pool,
        "sluice.worker": record.worker,
        "sluice.plan.reason": record.plan.reason,
        "sluice.reason": record.reason,
        "sluice.estimate.category": estimate.category,
        "sluice.estimate.input_tokens": estimate.input_tokens,
        "sluice.estimate.output_tokens": estimate.output_tokens,
        "sluice.queue_ms": timing.queue_ms,
        "sluice.overhead_ms": timing.overhead_ms,
        "sluice.spilled": record.admission.spilled,
        "sluice.rescued": record.rescued,
        "sluice.compressed": record.compression.compressed,
    }


def address_of(worker: str) -> tuple[str, int | None]:
    """(host, port) of a worker's id, which is `host:port/path#rank`."""
    host, _, rest = worker.rpartition("]") if worker.startswith("[") else ("", "", worker)
    name, _, port = rest.partition("/")[0].partition("#")[0].rpartition(":")
    return (host[1:] or name or worker), int(port) if port.isdigit() else None
