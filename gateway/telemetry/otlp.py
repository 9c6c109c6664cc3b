"""Exports spans and metrics over OTLP/HTTP by the official SDK, beside the request path.

A request pays for its ids, for the sampler's decision, and for counting. If it is sampled, its
record waits in the SDK's queue, and the SDK's thread makes the spans and sends them. The queue is
bounded; where the collector is away or slow, further records are dropped and counted.

The SDK itself reads the standard variables: `OTEL_EXPORTER_OTLP_*`, `OTEL_SERVICE_NAME`,
`OTEL_RESOURCE_ATTRIBUTES`, `OTEL_METRIC_EXPORT_*`, and `OTEL_TRACES_SAMPLER*` where the
configuration states no share.
"""

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    TraceFlags,
    set_span_in_context,
)

from gateway.metrics import Metrics
from gateway.payload.head import parent_of
from gateway.records.decision import DecisionRecord
from gateway.records.record import Trace
from gateway.telemetry.genai_metrics import GenAiMetrics
from gateway.telemetry.spans import context_of, spans_of

MAX_QUEUED: Final = 2048
"""Records that wait for the exporting thread."""
_BATCH: Final = 16
"""Records in one request to the collector: the thread holds the interpreter while it encodes."""
_DELAY_MS: Final = 1000
_CLOSE_S: Final = 3.0
"""How long a gateway that stops waits for the collector."""
_NO_PARENT: Final = Context()

_log = logging.getLogger("sluice.telemetry")


class Telemetry:
    """Traces requests, and takes their records. One instance serves a process."""

    def __init__(self, metrics: Metrics, *, version: str, sample: float | None) -> None:
        """`sample`: the share of traces without a sampled parent that is exported.

        Without it the SDK's own setting decides, which is OTEL_TRACES_SAMPLER.
        """
        # The SDK warns for every batch that it cannot deliver; we warn once (`_Delivery`).
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        named = Resource.create({"service.name": "sluice", "service.version": version})
        self._resource = resource = named.merge(OTELResourceDetector().detect())
        self._sampler = TracerProvider(shutdown_on_exit=False).sampler
        self._bound = None if sample is None else TraceIdRatioBased.get_bound_for_rate(sample)
        """Trace ids below it are sampled, by the conventions; None to ask the sampler."""
        self._dropped = metrics.telemetry_dropped
        self._genai = GenAiMetrics(time.time_ns())
        self._spans = _SpanDelivery(metrics, resource)
        self._queue: SpanProcessor = BatchSpanProcessor(
            self._spans,
            max_queue_size=MAX_QUEUED,
            schedule_delay_millis=_DELAY_MS,
            max_export_batch_size=_BATCH,
        )
        self._queued = 0
        """Records given to the queue so far."""
        self._meters = MeterProvider(
            [PeriodicExportingMetricReader(_MetricDelivery(self._genai))],
            resource=resource,
            shutdown_on_exit=False,
        )
        self._meters.get_meter("sluice").create_observable_counter(
            "sluice.telemetry.dropped",
            [lambda _: [Observation(int(sum(list(self._dropped.values.values()))))]],
            "{record}",
            "Records not exported.",
        )

    def begin(self, forwarded: bytes) -> Trace:
        """The place of a request in a trace, by the headers that it came with."""
        span_id = f"{random.getrandbits(54) | 1 << 54:014x}00"
        parent = parent_of(forwarded)
        if parent is None:
            number = random.getrandbits(128) or 1
            if self._bound is None:
                sampled = self._asked(number, _NO_PARENT)
            else:
                sampled = number & TraceIdRatioBased.TRACE_ID_LIMIT < self._bound
            return Trace(trace_id=f"{number:032x}", span_id=span_id, sampled=sampled)
        trace_id, parent_id, sampled = parent
        if self._bound is None:
            number, of = int(trace_id, 16), int(parent_id, 16)
            context = SpanContext(number, of, is_remote=True, trace_flags=TraceFlags(sampled))
            within = set_span_in_context(NonRecordingSpan(context), _NO_PARENT)
            sampled = self._asked(number, within)
        return Trace(trace_id=trace_id, span_id=span_id, parent_span_id=parent_id, sampled=sampled)

    def append(self, record: msgspec.Struct) -> None:
        if not isinstance(record, DecisionRecord) or record.endpoint == "admission":
            return
        self._genai.count(record)
        if not record.trace.sampled:
            return
        if self._queued - self._spans.taken >= MAX_QUEUED:
            self._dropped.add("queue_full")
            return
        self._queued += 1
        self._queue.on_end(_Pending(record, self._resource))

    async def close(self) -> None:
        """Export what waits, for a limited time. The SDK's threads never keep a process alive."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            metrics = threading.Thread(target=self._meters.shutdown, daemon=True)
            metrics.start()
            self._queue.shutdown()
            metrics.join()
            with contextlib.suppress(RuntimeError):  # nobody waits any longer
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=shut_down, daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await ended.wait()

    def _asked(self, trace_id: int, parent: Context) -> bool:
        """What the sampler of the environment says; asking it takes some microseconds."""
        decision = self._sampler.should_sample(parent, trace_id, "").decision
        return decision is Decision.RECORD_AND_SAMPLE


class _Pending(ReadableSpan):
    """Stands in the SDK's queue for all spans of a record; the SDK's thread makes them of it."""

    def __init__(self, record: DecisionRecord, resource: Resource) -> None:
        super().__init__("", context=context_of(record.trace), resource=resource)
        # A request's body may be recorded in the log only, and would fill the queue's memory.
        self.record = msgspec.structs.replace(record, prompt=None) if record.prompt else record


class _SpanDelivery(SpanExporter):
    """Makes the spans of pending records and sends them."""

    def __init__(self, metrics: Metrics, resource: Resource) -> None:
        self._exporter: SpanExporter = OTLPSpanExporter()
        self._dropped = metrics.telemetry_dropped
        self._resource = resource
        self._failing = False
        self.taken = 0
        """Records taken from the queue and done with."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        made: list[ReadableSpan] = []
        for pending in spans:
            if isinstance(pending, _Pending):
                made += spans_of(pending.record, self._resource)
                time.sleep(0)  # lets the event loop have the interpreter
        result = self._exporter.export(made)
        failed = result is not SpanExportResult.SUCCESS
        if failed:
            self._dropped.add("not_delivered", by=len(spans))
        if failed != self._failing:
            self._failing = failed
            _log.warning("the OTLP collector %s", "takes no spans" if failed else "takes spans")
        self.taken += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _MetricDelivery(OTLPMetricExporter):
    """Sends the GenAI histograms with what the SDK itself has counted."""

    def __init__(self, genai: GenAiMetrics) -> None:
        super().__init__()
        self._genai = genai

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: object
    ) -> MetricExportResult:
        own = self._genai.collect(time.time_ns())
        resources = []
        for of_resource in metrics_data.resource_metrics:
            scopes = [replace(s, metrics=[*s.metrics, *own]) for s in of_resource.scope_metrics]
            resources.append(replace(of_resource, scope_metrics=scopes))
        return super().export(MetricsData(resources), timeout_millis, **kwargs)
