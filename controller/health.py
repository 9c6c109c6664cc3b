"""Health and metrics of a controller, on a port of its own."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

HEAD_S: Final = 5.0
HEAD_BYTES: Final = 8192


class Figures:
    """The controller's metrics; names start with `sluice_controller_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"sluice_controller_{name}", text, labels, registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"sluice_controller_{name}", text, labels, registry=self.registry)

        self.leading = gauge("leading", "1 on the replica that acts, 0 on one that waits.")
        self.epoch = gauge("epoch", "Epoch of its leadership; 0 while it waits.")
        self.age = gauge("snapshot_age_seconds", "Time since the API last confirmed what is known.")
        self.entitlements = gauge("entitlements", "TokenEntitlements by what gateways do.", "state")
        self.waiting = gauge("failing_calls", "Changes of the cluster that wait to be tried again.")
        self.passes = counter("passes", "Reconciliations by result: done or failed.", "result")
        self.calls = counter("calls", "Changes of the cluster by result.", "verb", "kind", "result")
        self.published = counter("published", "Publications to the gateways by result.", "result")
        self.published_at = gauge("published_timestamp_seconds", "Time of the last publication.")
        self.pass_seconds = Histogram(
            "sluice_controller_pass_seconds",
            "Duration of a reconciliation, its calls included.",
            buckets=(0.05, 0.2, 1, 5, 20, 60, 300),
            registry=self.registry,
        )


class HealthPort:
    """`/health`, `/ready` and `/metrics` by HTTP/1.1, one request a connection."""

    def __init__(
        self,
        *,
        healthy: Callable[[], bool],
        ready: Callable[[], bool],
        metrics: Callable[[], CollectorRegistry],
    ) -> None:
        self._healthy = healthy
        self._ready = ready
        self._metrics = metrics
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which the system chooses for 0. Raises OSError."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=HEAD_BYTES)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        broken = (OSError, TimeoutError, ValueError, EOFError, asyncio.LimitOverrunError)
        with contextlib.suppress(*broken):
            async with asyncio.timeout(HEAD_S):
                head = await reader.readuntil(b"\r\n\r\n")
                method, path, *_ = (*head.split()[:2], b"", b"")
                status, kind, body = self._answer(method, path)
                writer.write(
                    f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\n"
                    f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
                )
                writer.write(body)
                await writer.drain()
        writer.close()

    def _answer(self, method: bytes, path: bytes) -> tuple[str, str, bytes]:
        tests = {b"/health": self._healthy, b"/ready": self._ready}
        name = path.partition(b"?")[0]
        if method != b"GET":
            return "405 Method Not Allowed", "text/plain", b""
        if name == b"/metrics":
            text = generate_latest(self._metrics())
            return "200 OK", "text/plain; version=0.0.4; charset=utf-8", text
        if name not in tests:
            return "404 Not Found", "text/plain", b""
        return (
            ("200 OK", "text/plain", b"ok\n")
            if tests[name]()
            else ("503 Service Unavailable", "text/plain", b"no\n")
        )
