"""Cost of the gateway with every feature on, compared with its peers on the same machine.

CPU is the kernel's accounting of the process tree, so waiting does not count. The gateway is that
of `bench.common.everything_on`, with embedded state and on a Redis of its own; a leaner one,
`sluice, least-loaded`, matches earlier measurements. Four engines serve all contenders. How rounds
go is in `bench.overhead.rounds`.
"""

import contextlib
import re
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

import httpx

from bench.common.everything_on import MODEL
from bench.common.report import Report, Row, at_least, at_most, equals
from bench.common.steps import scaled, scaled_s
from bench.common.tools import Figures, HttpLoad, bodies, build_tools, rss_kib, scratch
from bench.overhead.field import EMBEDDED, LEAST_LOADED, NAMES, ON_REDIS, ROUTER, field, may_open
from bench.overhead.peers import Make, sluice
from bench.overhead.rate import rate_rows
from bench.overhead.rounds import CONNECTIONS, RUN_S, Case, counting, measured, rows_of

CHUNKS: Final = 64
TICK_US: Final = 1000
MANY: Final = 5000
"""Open connections, used by turns."""
NEAR: Final = (EMBEDDED, ON_REDIS, ROUTER, "nginx")
"""Beside the gateway, where not all contenders are measured."""
Tools = tuple[Path, Path]


def main() -> Report:
    """A whole answer and a 64-chunk stream at saturation, first bytes at 50/s, memory; all."""
    with _tools() as (folder, tools):
        if tools is None:
            return _no_compiler()
        body = bodies(folder, MODEL, max_tokens=CHUNKS)
        aims = {
            "whole": {EMBEDDED: 2.0, ON_REDIS: 3.0, LEAST_LOADED: 1.6},
            "stream": {EMBEDDED: 1.5, ON_REDIS: 1.7, LEAST_LOADED: 1.5},
        }
        first = {EMBEDDED: 1.5, LEAST_LOADED: 1.0}
        cases = [
            Case(f"CPU us of a {kind} answer", body[kind], kind, CONNECTIONS[kind], aims=aims[kind])
            for kind in body
        ]
        cases += [
            Case(
                *(f"added first byte at 50/s, {kind}, p50 us", body[kind], kind, 8),
                *(scaled_s(3.0, 1.0), 50.0),
                aims=first,
            )
            for kind in body
        ]
        return _by_rounds("main", folder, tools, NAMES, cases, TICK_US)


def variants() -> Report:
    """Other answers, bodies and numbers of open connections.

    Bodies of 200 KB are prompts of some 44,000 tokens: they go to the long pool.
    """
    with _tools() as (folder, tools):
        if tools is None:
            return _no_compiler()
        cases = [
            _variant(folder, chunks, body_kb, connections)
            for chunks, body_kb in ((0, 2), (64, 2), (1000, 2), (0, 200), (64, 200))
            for connections in (1, CONNECTIONS["stream" if chunks else "whole"], MANY)
            if connections in (1, MANY) or body_kb > 2 or chunks == 1000  # `main` has the others
        ]
        return _by_rounds("variants", folder, tools, NEAR, cases, TICK_US)


def _variant(folder: Path, chunks: int, body_kb: int, connections: int) -> Case:
    kind = "stream" if chunks else "whole"
    answer = f"stream of {chunks:,}" if chunks else "whole"
    text_bytes = body_kb * 1000 - 150
    body = bodies(folder, MODEL, text_bytes=text_bytes, max_tokens=chunks or CHUNKS)[kind]
    run_s = scaled_s(1.0, 0.5) if chunks >= 1000 else scaled_s(0.6, 0.3)  # a stream takes a second
    label = f"{answer}, {body_kb} KB, {connections:,} open: CPU us"
    return Case(label, body, kind, connections, run_s, saturates=connections > 1)


def streams() -> Report:
    """CPU of a chunk with 32 and 120 streams at an engine's pace, 5 ms a chunk.

    An unsaturated gateway wakes for each chunk, so one costs more than if many are read at once.
    """
    with _tools() as (folder, tools):
        if tools is None:
            return _no_compiler()
        body = bodies(folder, MODEL, max_tokens=CHUNKS)["stream"]
        aims = {EMBEDDED: 1.4, LEAST_LOADED: 1.4}
        cases = [
            Case(
                *(f"CPU us of a chunk, {count} streams", body, "stream", count),
                run_s=scaled_s(4.0),
                per=CHUNKS,
                aims=aims,
                saturates=False,
            )
            for count in (32, 120)
        ]
        names = (EMBEDDED, LEAST_LOADED, ROUTER, "nginx")
        return _by_rounds("streams", folder, tools, names, cases, 5000)


def _by_rounds(
    name: str,
    folder: Path,
    tools: Tools,
    names: Sequence[str],
    cases: Sequence[Case],
    tick_us: int,
) -> Report:
    if lacking := may_open(2 * MANY):
        return Report(name=f"overhead {name}", rows=[Row(name, None, lacking)])
    with ExitStack() as stack:
        found = field(stack, folder, tools, names, tick_us=tick_us)
        seen = measured(found, cases, name)
        rows = [*rows_of(seen), *found.missing]
        for contender in found.contenders.values():
            mib = rss_kib(contender.pids["self"]) / 1024
            rows.append(Row(f"{contender.name}: RSS MiB after the rounds", mib))
    detail: dict[str, object] = {label: rounds for label, (_, rounds) in seen.items()}
    return Report(name=f"overhead {name}", rows=rows, detail=detail)


def rate() -> Report:
    """Chunks/s per core while the p99 between two pieces is at most 5 ms above the engines' own."""
    with _tools() as (folder, tools):
        if tools is None:
            return _no_compiler()
        return Report(name="overhead rate", rows=rate_rows(folder, tools))


# -- slow streams

STREAMS: Final = scaled(8000, 800)
SLOW_TICK_US: Final = 500_000
BEGIN_S: Final = 16.0
LOADS: Final = 2
MAX_KIB: Final = 45.0


def slow() -> Report:
    """Memory of 8,000 slow streams at a time on one gateway process.

    Two load processes start them evenly over 16 s, four engines give each a chunk every half second
    for 24 s: all are open together for some eight seconds.
    """
    with _tools() as (folder, tools):
        if tools is None:
            return _no_compiler()
        label = f"{STREAMS:,} slow streams"
        if lacking := may_open(2 * STREAMS + 1000):
            return Report(name="overhead slow", rows=[Row(label, None, lacking)])
        with ExitStack() as stack, ThreadPoolExecutor() as pool:
            found = field(stack, folder, tools, (EMBEDDED,), tick_us=SLOW_TICK_US)
            gateway = found.contenders[EMBEDDED]
            pid = gateway.pids["self"]
            for body in bodies(folder, MODEL, max_tokens=2).values():
                HttpLoad(found.load, gateway.port, body).run(64, 1.0)
            idle_kib = rss_kib(pid)
            body = bodies(folder, MODEL, max_tokens=48)["stream"]
            load, each = HttpLoad(found.load, gateway.port, body), STREAMS // LOADS
            runs = [stack.enter_context(load.start(each, BEGIN_S, each / BEGIN_S))
                    for _ in range(LOADS)]  # fmt: skip
            for run in runs:
                run.ready()
            for run in runs:
                run.begin()
            waits = [pool.submit(run.found) for run in runs]
            most_kib = most_open = 0.0
            while not all(future.done() for future in waits):
                most_kib = max(most_kib, rss_kib(pid))
                most_open = max(most_open, sum(map(_running, found.engine_ports)))
                time.sleep(0.5)
            seen: list[Figures] = [future.result() for future in waits]
        ended = sum(figures["requests"] for figures in seen)
        p99_ms = max(figures["gap_p99_us"] for figures in seen) / 1000
        note = f"as the engines say; between chunks {SLOW_TICK_US // 1000} ms, p99 {p99_ms:.0f} ms"
        errors = sum(figures["errors"] for figures in seen)
        rows = [
            equals(f"{label}: errors", errors, 0, f"{ended:.0f} ended with [DONE]"),
            at_least(f"{label}: open at once", most_open, 0.99 * STREAMS, note),
            at_most(f"{label}: KiB each", (most_kib - idle_kib) / STREAMS, MAX_KIB),
        ]
        return Report(name="overhead slow", rows=rows)


def _running(port: int) -> float:
    """Streams that an engine has under way."""
    page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10.0, trust_env=False).text
    sample = re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", page, re.MULTILINE)
    return float(sample[1]) if sample else 0.0


# -- features on and off

TENANTS: Final = "sluice, tenants"
TRACED: Final = "sluice, traced"
HANGS: Final = "sluice, collector hangs"
VIEWED: Final = "sluice, viewed"
FEATURES: Final = {
    TENANTS: "a tenant's key with a model list, two limits and two budgets, prices, the ledger",
    TRACED: "a tenth of the requests traced",
    HANGS: "the same, and the collector never answers",
    VIEWED: "one viewer of the dashboard",
}
MAX_GROWTH_MIB: Final = 20.0
"""By a collector that hangs; the SDK's modules are part of it."""


def features() -> Report:
    """What a feature adds to a request of a gateway with all others on, within each round."""
    with _tools() as (folder, tools), ExitStack() as stack:
        if tools is None:
            return _no_compiler()
        traced = "telemetry: {otlp: true, sample: 0.1}\n"
        collectors = {TRACED: _collector(), HANGS: _hung_collector()}
        makers: dict[str, Make] = {EMBEDDED: sluice, TENANTS: partial(sluice, tenants=True)}
        for name, collector in collectors.items():
            env = {"OTEL_EXPORTER_OTLP_ENDPOINT": stack.enter_context(collector)}
            makers[name] = partial(sluice, env=env, more=traced)
        makers[VIEWED] = partial(sluice, server="open_dashboard: true, ")
        found = field(stack, folder, tools, makers, tick_us=TICK_US, makers=makers)
        if VIEWED in found.contenders:
            port = found.contenders[VIEWED].port
            stack.enter_context(_viewer(f"http://127.0.0.1:{port}/dashboard/events"))
        body = bodies(folder, MODEL, max_tokens=CHUNKS)
        cases = [
            Case(f"{kind} answer, CPU us", body[kind], kind, CONNECTIONS[kind], RUN_S)
            for kind in body
        ]
        seen = measured(found, cases, "features")
        rows = [*rows_of(seen), *found.missing]
        for name, text in FEATURES.items():
            for case, rounds in seen.values():
                both = [r for r in counting(case, rounds, EMBEDDED) if name in r]
                more = sorted(r[name]["us"] - r[EMBEDDED]["us"] for r in both)
                if more:
                    note = " ".join(f"{value:.1f}" for value in more)
                    metric = f"{text}: adds to a {case.label}"
                    rows.append(Row(metric, statistics.median(more), note))
        mib = {name: rss_kib(c.pids["self"]) / 1024 for name, c in found.contenders.items()}
        if HANGS in mib:
            more_mib = mib[HANGS] - mib[EMBEDDED]
            note = f"{mib[EMBEDDED]:.0f} -> {mib[HANGS]:.0f} MiB, the SDK's modules included"
            rows.append(at_most(f"{HANGS}: MiB more", more_mib, MAX_GROWTH_MIB, note))
    return Report(name="overhead features", rows=rows)


@contextlib.contextmanager
def _collector() -> Iterator[str]:
    """The URL of an OTLP collector that takes everything."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def _hung_collector() -> Iterator[str]:
    """The URL of a port that takes connections and never reads from them."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def _viewer(url: str) -> Iterator[None]:
    """Reads the dashboard's figures in a thread, while the block runs."""
    going = threading.Event()
    going.set()

    def read() -> None:
        while going.is_set():
            with (
                contextlib.suppress(httpx.HTTPError),
                httpx.Client(trust_env=False, timeout=None) as client,
                client.stream("GET", url) as answer,
            ):
                for _ in answer.iter_raw():
                    if not going.is_set():
                        return
            time.sleep(0.2)

    threading.Thread(target=read, daemon=True).start()
    try:
        yield
    finally:
        going.clear()


# -- shared


@contextlib.contextmanager
def _tools() -> Iterator[tuple[Path, Tools | None]]:
    with scratch() as name:
        yield Path(name), build_tools(Path(name))


def _no_compiler() -> Report:
    row = Row("not measured", None, "needs a C compiler (cc or gcc)")
    return Report(name="overhead", rows=[row])
