"""OpenTelemetry over real sockets: traces are complete, and no collector can hold a request."""

import asyncio
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
import pytest

from bench.common.fleet import MODEL, Fleet
from gateway.metrics import Metrics
from gateway.records.record import Trace
from gateway.telemetry.otlp import MAX_QUEUED, Telemetry
from sluice.children import free_ports
from tests.builders import decision
from tests.otlp import Collector, SpanSent

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
PARENT = "00f067aa0ba902b7"


@contextmanager
def traced_fleet(url: str, **telemetry: Any) -> Iterator[Fleet]:
    """A fleet whose gateway exports to a collector."""
    fleet = Fleet(short=1, long=1, config={"telemetry": {"otlp": True, **telemetry}})
    fleet.replicas[0].env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        "OTEL_METRIC_EXPORT_INTERVAL": "300",
        "OTEL_SERVICE_NAME": "my-gateway",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
    }
    with fleet:
        yield fleet


def ask(fleet: Fleet, client: httpx.Client, number: int, flags: str = "01") -> httpx.Response:
    """A stream; of every second number with a trace of the client's."""
    headers = {"x-request-id": f"r-{number}"}
    if number % 2:
        headers["traceparent"] = f"00-{number:032x}-{PARENT}-{flags}"
    return client.post(fleet.url + CHAT, json=BODY | {"stream": True}, headers=headers)


def ask_many(fleet: Fleet, count: int, flags: str = "01") -> list[int]:
    with httpx.Client(trust_env=False, timeout=30) as client, ThreadPoolExecutor(16) as pool:
        answers = pool.map(lambda n: ask(fleet, client, n, flags), range(count))
        return [answer.status_code for answer in answers]


def roots_of(spans: list[SpanSent]) -> dict[str, SpanSent]:
    """The request's own spans by its id."""
    found = [span for span in spans if "sluice.request_id" in span.attributes]
    return {span.attributes["sluice.request_id"]: span for span in found}


def test_every_request_is_a_complete_trace_under_the_clients_span() -> None:
    count = 600
    with Collector() as collector, traced_fleet(collector.url) as fleet:
        assert ask_many(fleet, count) == [200] * count
        collector.wait_for(lambda c: len(roots_of(c.spans)) == count)
        engine = fleet.pool("short")[0]
        received = [request["headers"]["traceparent"] for request in engine.last(20)]
        assert fleet.metrics().get('sluice_telemetry_dropped_total{cause="queue_full"}', 0) == 0
        collector.wait_for(lambda c: "gen_ai.client.token.usage" in c.histograms)
        duration = "gen_ai.server.request.duration"
        collector.wait_for(lambda c: c.histograms[duration][0].values == count)
    roots = roots_of(collector.spans)
    attempts = {s.parent_id: s for s in collector.spans if s.name == "attempt"}
    assert len(collector.spans) == 2 * count
    for name, root in roots.items():
        number = int(name.removeprefix("r-"))
        assert root.name == f"chat {MODEL}"
        assert root.parent_id == (PARENT if number % 2 else "")
        if number % 2:
            assert root.trace_id == f"{number:032x}"
        attempt = attempts[root.span_id]
        assert attempt.trace_id == root.trace_id
        assert root.start_ns <= attempt.start_ns < attempt.end_ns <= root.end_ns + 1_000_000
        assert root.attributes["gen_ai.usage.output_tokens"] == 4
        assert not root.failed
    assert len({root.trace_id for root in roots.values()}) == count
    ours = {f"00-{a.trace_id}-{a.span_id}-01" for a in attempts.values()}
    assert set(received) <= ours, "engines hang their spans under the attempt"
    assert collector.resources[0]["service.name"] == "my-gateway"
    assert collector.resources[0]["deployment.environment.name"] == "test"
    assert collector.histograms["gen_ai.server.time_to_first_token"][0].values == count
    assert collector.histograms[duration][0].bounds[:3] == (0.01, 0.02, 0.04)


def test_a_share_is_sampled_and_the_clients_flag_goes_before_it() -> None:
    with Collector() as collector, traced_fleet(collector.url, sample=0) as fleet:
        assert ask_many(fleet, 20) == [200] * 20
        collector.wait_for(lambda c: len(roots_of(c.spans)) == 10)
        assert ask_many(fleet, 20, flags="00") == [200] * 20
        last = fleet.pool("short")[0].last()[-1]
        assert last["headers"]["traceparent"].endswith("-00")
        duration = "gen_ai.server.request.duration"
        collector.wait_for(lambda c: duration in c.histograms)
        collector.wait_for(lambda c: c.histograms[duration][0].values == 40)
    assert {span.parent_id for span in roots_of(collector.spans).values()} == {PARENT}


def test_failures_are_told_by_their_reason() -> None:
    with Collector() as collector, traced_fleet(collector.url) as fleet:
        body = BODY | {"model": "nobody-serves-this"}
        answer = httpx.post(fleet.url + CHAT, json=body, trust_env=False)
        assert answer.status_code == 404
        collector.wait_for(lambda c: len(c.spans) == 1)
    (span,) = collector.spans
    assert (span.name, span.failed) == ("chat", True)
    assert span.attributes["error.type"] == "model_not_found"


def test_a_collector_that_is_away_costs_spans_and_nothing_else() -> None:
    (port,) = free_ports(1)
    dropped = 'sluice_telemetry_dropped_total{cause="not_delivered"}'
    with traced_fleet(f"http://127.0.0.1:{port}") as fleet:
        assert ask_many(fleet, 50) == [200] * 50
        until_s = time.monotonic() + 20
        while not fleet.metrics().get(dropped):
            assert time.monotonic() < until_s
            time.sleep(0.2)


# -- without a fleet


def traced(number: int) -> Any:
    trace = Trace(trace_id=f"{number + 1:032x}", span_id="4" + "0" * 15, sampled=True)
    return decision(f"r-{number}", duration_s=0.1, trace=msgspec.to_builtins(trace))


async def test_a_collector_that_hangs_holds_no_request_and_grows_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metrics = Metrics()
    with Collector(hangs=True) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        telemetry = Telemetry(metrics, version="1", sample=1.0)
        for number in range(MAX_QUEUED + 500):
            telemetry.append(traced(number))
        assert metrics.telemetry_dropped.values == {("queue_full",): 500}
        await asyncio.to_thread(collector.wait_for, lambda c: c.requests > 0)
        await asyncio.wait_for(telemetry.close(), 60)


async def test_what_waits_is_delivered_before_a_gateway_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        telemetry = Telemetry(Metrics(), version="1", sample=1.0)
        for number in range(40):
            telemetry.append(traced(number))
        await telemetry.close()
        assert len(roots_of(collector.spans)) == 40
        assert collector.histograms["gen_ai.server.request.duration"][0].values == 40


async def test_an_outage_is_logged_once_not_for_every_batch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    metrics = Metrics()
    telemetry = Telemetry(metrics, version="1", sample=1.0)
    with caplog.at_level(logging.WARNING):
        for number in range(64):
            telemetry.append(traced(number))
        await telemetry.close()
    assert metrics.telemetry_dropped.values == {("not_delivered",): 64}
    assert [record.name for record in caplog.records] == ["sluice.telemetry"]
