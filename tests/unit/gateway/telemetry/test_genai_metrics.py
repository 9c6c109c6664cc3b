"""Histograms by the GenAI conventions: names, units, and what counts."""

from typing import Any

from opentelemetry.sdk.metrics.export import Histogram, HistogramDataPoint
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics

from gateway.telemetry import genai_metrics
from gateway.telemetry.genai_metrics import GenAiMetrics
from tests.builders import decision

STREAM: dict[str, Any] = {
    "model": "llama",
    "stream": True,
    "prompt_tokens": 100,
    "completion_tokens": 20,
    "ttft_s": 0.3,
    "tpot_s": 0.02,
    "duration_s": 0.9,
}


def points(metrics: GenAiMetrics) -> dict[str, list[HistogramDataPoint]]:
    found = {}
    for metric in metrics.collect(now_ns=2_000):
        assert isinstance(metric.data, Histogram)
        found[metric.name] = list(metric.data.data_points)
    return found


def test_names_and_units_are_those_of_the_conventions() -> None:
    metrics = GenAiMetrics(start_ns=1_000)
    metrics.count(decision(**STREAM))
    known = {value for name, value in vars(gen_ai_metrics).items() if name.startswith("GEN_AI")}
    assert len(points(metrics)) == 4
    assert points(metrics).keys() <= known
    for point, *_ in points(metrics).values():
        assert (point.start_time_unix_nano, point.time_unix_nano) == (1_000, 2_000)
    units = {metric.name: metric.unit for metric in metrics.collect(now_ns=2_000)}
    assert units.pop("gen_ai.client.token.usage") == "{token}"
    assert set(units.values()) == {"s"}


def test_a_stream_counts_in_each() -> None:
    metrics = GenAiMetrics(start_ns=0)
    metrics.count(decision(**STREAM))
    found = points(metrics)
    first = found["gen_ai.server.time_to_first_token"][0]
    assert (first.count, first.sum, first.min, first.max) == (1, 0.3, 0.3, 0.3)
    assert list(first.bucket_counts).index(1) == 9, "above 0.25, up to 0.5"
    assert len(first.bucket_counts) == len(first.explicit_bounds) + 1
    assert first.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "sluice",
        "gen_ai.request.model": "llama",
        "gen_ai.response.model": "llama",
    }
    tokens = found["gen_ai.client.token.usage"]
    kinds = {(p.attributes or {})["gen_ai.token.type"]: p.sum for p in tokens}
    assert kinds == {"input": 100, "output": 20}


def test_a_failure_has_a_duration_and_no_first_token() -> None:
    metrics = GenAiMetrics(start_ns=0)
    metrics.count(decision(**STREAM | {"outcome": "upstream_error", "status": 502}))
    metrics.count(decision(outcome="refused", status=404, reason="unknown_model", duration_s=0.1))
    found = points(metrics)
    errors = {(p.attributes or {})["error.type"] for p in found["gen_ai.server.request.duration"]}
    assert errors == {"upstream_error", "unknown_model"}
    assert "gen_ai.server.time_to_first_token" not in found


def test_the_name_that_a_client_made_up_is_no_label() -> None:
    metrics = GenAiMetrics(start_ns=0)
    for number in range(100):
        metrics.count(decision(**STREAM | {"asked_model": f"name-{number}"}))
    assert [len(found) for found in points(metrics).values()] == [1, 1, 1, 2]


def test_series_are_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(genai_metrics, "MAX_SERIES", 5)
    metrics = GenAiMetrics(start_ns=0)
    for number in range(100):
        metrics.count(decision(outcome="refused", reason=f"r{number}", duration_s=0.1))
    assert [len(found) for found in points(metrics).values()] == [5]
