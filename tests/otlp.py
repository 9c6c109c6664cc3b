"""An OTLP/HTTP collector over real sockets: decodes what it gets, or reads it and says nothing."""

import threading
import time
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class SpanSent(NamedTuple):
    """A span as it came; ids in hexadecimal digits, "" for no parent."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    failed: bool


class PointSent(NamedTuple):
    """One series of a histogram as it came."""

    attributes: dict[str, Any]
    values: int
    bounds: tuple[float, ...]


class Collector:
    """Keeps every span and the newest histograms. `hangs`: it never answers."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.spans: list[SpanSent] = []
        self.histograms: dict[str, list[PointSent]] = {}
        self.resources: list[dict[str, Any]] = []
        self.requests = 0
        self._go = threading.Event()
        if not hangs:
            self._go.set()
        take = self._take

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                take(self.path, self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._go.set()
        self._server.shutdown()
        self._server.server_close()

    def wait_for(self, done: Callable[[Self], bool], limit_s: float = 30.0) -> None:
        """Until it has got so much."""
        until_s = time.monotonic() + limit_s
        while not done(self):
            assert time.monotonic() < until_s, (len(self.spans), sorted(self.histograms))
            time.sleep(0.05)

    def _take(self, path: str, body: bytes) -> None:
        self.requests += 1
        self._go.wait()
        if path == "/v1/traces":
            for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resources.append(_plain(of_resource.resource.attributes))
                for scope in of_resource.scope_spans:
                    self.spans += map(_span, scope.spans)
        elif path == "/v1/metrics":
            for group in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for scope in group.scope_metrics:
                    for metric in scope.metrics:
                        points = [_point(point) for point in metric.histogram.data_points]
                        self.histograms[metric.name] = points
        else:
            raise AssertionError(path)


def _span(span: Any) -> SpanSent:
    return SpanSent(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _plain(span.attributes),
        span.status.code == 2,
    )


def _point(point: Any) -> PointSent:
    return PointSent(_plain(point.attributes), point.count, tuple(point.explicit_bounds))


def _plain(attributes: Iterable[Any]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_value(item) for item in found.values] if kind == "array_value" else found
