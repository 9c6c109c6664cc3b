"""OTLP collectors: one that keeps the ids of spans, and one that never answers."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class SpanIds(NamedTuple):
    """Of one span; `parent` is empty for a root."""

    name: str
    trace: bytes
    span: bytes
    parent: bytes


class Collector:
    """Takes spans over OTLP/HTTP in a thread."""

    def __init__(self) -> None:
        self.spans: list[SpanIds] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.path == "/v1/traces":
                    spans.extend(_ids_of(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextlib.contextmanager
    def running(self) -> Iterator["Collector"]:
        """Take spans during the block."""
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()


@contextlib.contextmanager
def hung_collector() -> Iterator[str]:
    """The URL of a port that takes connections and never reads from them."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def complete(spans: list[SpanIds], parent: bytes) -> int:
    """Requests whose own span hangs under `parent` and has one attempt under it."""
    attempts = {(s.trace, s.parent) for s in spans if s.name == "attempt"}
    return sum(s.parent == parent and (s.trace, s.span) in attempts for s in spans)


def _ids_of(body: bytes) -> list[SpanIds]:
    return [
        SpanIds(span.name, span.trace_id, span.span_id, span.parent_span_id)
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in of_resource.scope_spans
        for span in scope.spans
    ]
