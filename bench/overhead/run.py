"""Cost of the gateway with every feature on, compared with its peers on the same machine.

CPU is the kernel's accounting of the process tree, so waiting does not count. The gateway is that
of `bench.common.tools`, with embedded state and on a Redis of its own; a leaner one,
`sluice, least-loaded`, matches earlier measurements. Four engines serve all contenders. How rounds
go is in `bench.overhead.run`.
"""

import contextlib
import re
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

import httpx
import msgspec

from bench.common.report import Report, Row, at_least, at_most, bars, equals, scaled, scaled_s
from bench.common.tools import (
    MODEL,
    Figures,
    HttpLoad,
    bodies,
    build_tools,
    cpu_ns,
    rss_kib,
    scratch,
    spent,
)
from bench.overhead.field import (
    EMBEDDED,
    LEAST_LOADED,
    LITELLM,
    NAMES,
    ON_REDIS,
    ROUTER,
    Contender,
    Field,
    Make,
    alone,
    by_turns,
    field,
    is_gateway,
    may_open,
    own_core,
    sluice,
)

# -- how `bench overhead` measures: cases in rounds, all contenders by turns in each


ROUNDS: Final = scaled(5)
"""That must count."""
MOST_TIMES: Final = 3
"""So many times as many rounds are measured at most."""
RUN_S: Final = scaled_s(1.5, 0.3)
CONNECTIONS: Final = {"whole": 64, "stream": 128}
ON_REDIS_TIMES: Final = {"whole": 4, "stream": 2}
SLOW_TIMES: Final = 4
"""So many times as long for LiteLLM: it answers the 64 requests in flight nearly at once, two or
three such lots in RUN_S, and one more or less would be a third of its figure."""
MIN_UTILISATION: Final = 0.9

Round = dict[str, Figures]
"""By contender."""


class Case(msgspec.Struct, frozen=True):
    """One way to ask. `rate` 0: a closed loop, and CPU counts; else the time to the first byte."""

    label: str
    body: Path
    kind: str
    connections: int
    run_s: float = RUN_S
    rate: float = 0.0
    per: int = 1
    """What CPU is divided by: the chunks of a stream."""
    aims: dict[str, float] = {}
    """By contender: times the router's."""
    saturates: bool = True


Seen = dict[str, tuple[Case, list[Round]]]
"""By the case's label."""


def counting(case: Case, rounds: Sequence[Round], name: str) -> list[Round]:
    """Rounds that count for a contender."""
    if not is_gateway(name) or case.rate or not case.saturates:
        return list(rounds)
    return [figures for figures in rounds if figures[name]["utilisation"] >= MIN_UTILISATION]


def enough(case: Case, rounds: Sequence[Round]) -> bool:
    """Whether so many rounds count for each gateway."""
    return len(rounds) >= ROUNDS and all(
        len(counting(case, rounds, name)) >= ROUNDS for name in rounds[0] if is_gateway(name)
    )


def measured(found: Field, cases: Sequence[Case], label: str) -> Seen:
    """Rounds of every case; one with enough rounds that count is done."""
    seen: Seen = {case.label: (case, []) for case in cases}
    with by_turns(found), bars() as bar:
        step = bar(label, (1 + ROUNDS) * len(cases))
        for number in range(1 + MOST_TIMES * ROUNDS):
            for case, rounds in seen.values():
                if enough(case, rounds):
                    continue
                direct = _first_byte(found, case, found.engine_ports[0]) if case.rate else {}
                figures: Round = {}
                for name, contender in found.contenders.items():
                    with alone(contender):
                        if case.rate:
                            first = _first_byte(found, case, contender.port)
                            figures[name] = {k: v - direct[k] for k, v in first.items()}
                        else:
                            figures[name] = cost(found, case, contender, number)
                step()
                if number:  # the first round warms everybody up
                    rounds.append(figures)
    return seen


def cost(found: Field, case: Case, contender: Contender, turn: int) -> Figures:
    """CPU-us of a request in a closed loop, and what else the run showed."""
    times = ON_REDIS_TIMES[case.kind] if contender.name == ON_REDIS else 1
    load = HttpLoad(found.load, contender.port, case.body)
    run_s = case.run_s * (SLOW_TIMES if contender.name == LITELLM else 1)
    with ExitStack() as stack:
        if is_gateway(contender.name) or contender.name == LITELLM:
            stack.enter_context(own_core(contender.pids["self"], turn))
        run = stack.enter_context(load.start(times * case.connections, run_s))
        seen, cpu_s = spent(run, contender.pids)
    answered = max(1.0, seen["requests"])
    figures = {
        "us": cpu_s["self"] * 1e6 / answered / case.per,
        "utilisation": cpu_s["self"] / seen["seconds"],
        **{key: seen[key] for key in ("rps", "errors", "gap_p50_us", "gap_p99_us")},
    }
    if "redis" in cpu_s:
        figures["redis_us"] = cpu_s["redis"] * 1e6 / answered
    return figures


def _first_byte(found: Field, case: Case, port: int) -> Figures:
    seen = HttpLoad(found.load, port, case.body).run(8, case.run_s, case.rate)
    return {"us": seen["first_p50_us"], "p99_us": seen["first_p99_us"]}


def rows_of(seen: Seen) -> list[Row]:
    """A row for each case and contender; its ratio is to the router in the same rounds."""
    rows = []
    errors = 0.0
    for case, rounds in seen.values():
        for name in rounds[0] if rounds else ():
            told = sum(figures[name].get("errors", 0.0) for figures in rounds)
            errors += told if is_gateway(name) else 0.0
            rows.append(_row(case, rounds, name, told))
    return [*rows, equals("errors of the gateways", errors, 0)]


def _row(case: Case, rounds: list[Round], name: str, errors: float) -> Row:
    counted = counting(case, rounds, name)
    label = f"{name}: {case.label}"
    if not counted:
        busy = max(figures[name]["utilisation"] for figures in rounds)
        return Row(label, None, f"at most {busy:.2f} cores: never saturated")

    def middle(key: str) -> float:
        return statistics.median(figures[name][key] for figures in counted)

    values = [figures[name]["us"] for figures in counted]
    note = f"{min(values):.1f} to {max(values):.1f}"
    if case.rate:
        note += f"; p99 {middle('p99_us'):.0f}"
    else:
        note += f"; {middle('rps'):.0f}/s at {middle('utilisation'):.2f} cores"
        if case.kind == "stream":
            p50, p99 = (middle(f"gap_{p}_us") / 1000 for p in ("p50", "p99"))
            note += f"; between pieces {p50:.1f} ms, p99 {p99:.1f} ms"
        if "redis_us" in counted[0][name]:
            note += f"; Redis {middle('redis_us'):.0f} us"
    if len(counted) < len(rounds):
        note += f"; {len(counted)} of {len(rounds)} rounds count"
    if errors:
        note += f"; {errors:.0f} errors"
    ratio = None
    if ROUTER in rounds[0] and name != ROUTER:
        ratios = sorted(ratios_of(case, rounds, name))
        ratio = statistics.median(ratios) if ratios else None
        if name in case.aims:
            note += f"; times the router's {ratios[0]:.2f} to {ratios[-1]:.2f}" if ratios else ""
            note += f"; aim: {case.aims[name]:g}"
    return Row(label, statistics.median(values), note, ratio=ratio)


def ratios_of(case: Case, rounds: list[Round], name: str) -> list[float]:
    """A contender's figure over the router's, in each round that counts."""
    counted = [figures for figures in counting(case, rounds, name) if figures[ROUTER]["us"] > 0]
    return [figures[name]["us"] / figures[ROUTER]["us"] for figures in counted]


# -- `bench overhead`, chunks/s per core: the number of paced streams relayed without delay


CONTENDERS: Final = (EMBEDDED, ROUTER, "nginx")
ENGINES: Final = 8
TICK_S: Final = 0.025
PACED_CHUNKS: Final = 80
STREAM_S: Final = PACED_CHUNKS * TICK_S
WARM_UP_S: Final = STREAM_S + 0.5
WINDOW_S: Final = scaled_s(3.0)
MAX_ADDED_US: Final = 5000.0
LADDER: Final = (100, 200, 300, 400, 500, 640, 800, 1000, 1250, 1600, 2000, 2500, 3200, 4000, 5000)
"""Streams at a time."""
FLEET_CHUNKS_PER_S: Final = 60 * 64 * 40
"""60 engines of 64 sequences at 40 tokens/s each."""


def rate_rows(folder: Path, tools: tuple[Path, Path]) -> list[Row]:
    """Of each contender: at its highest step that held, and at the gateway's."""
    with ExitStack() as stack:
        tick_us = round(TICK_S * 1e6)
        found = field(stack, folder, tools, CONTENDERS, tick_us=tick_us, engines=ENGINES)
        body = bodies(folder, MODEL, max_tokens=PACED_CHUNKS)["stream"]
        bar = stack.enter_context(bars())
        steps = _Steps(found, body, bar("steps", 4 * (1 + len(found.contenders))))
        best = {name: steps.best(name) for name in found.contenders}
        ours = best.get(EMBEDDED)
        level = int(ours["streams"]) if ours else LADDER[0]
        beside = {name: steps.at(name, level) for name in found.contenders}
        rows = [*found.missing, _direct_row(steps)]
    for name, figures in best.items():
        rows += rate_rows_of(name, figures, beside[name])
    return rows


class _Steps:
    """Steps of the ladder, each measured once; one that failed twice, the better one counts."""

    def __init__(self, found: Field, body: Path, tell: Callable[[], None]) -> None:
        self._field = found
        self._body = body
        self._tell = tell
        self._seen: dict[tuple[str | None, int], Figures] = {}

    def best(self, name: str | None) -> Figures | None:
        """The highest step that held; None if none did."""
        streams = highest(LADDER, lambda streams: step_holds(self.at(name, streams)))
        return None if streams is None else self.at(name, streams)

    def at(self, name: str | None, streams: int) -> Figures:
        """A contender's step; None for straight to the engines, whose own pace is the measure."""
        if (name, streams) not in self._seen:
            paced_us = self.at(None, streams)["gap_p99_us"] if name else TICK_S * 1e6
            for _ in range(2):
                seen = self._step(name, streams)
                seen["added_p99_us"] = seen["gap_p99_us"] - paced_us
                known = self._seen.setdefault((name, streams), seen)
                if step_holds(seen) or seen["added_p99_us"] < known["added_p99_us"]:
                    self._seen[name, streams] = seen
                if step_holds(seen):
                    break
        return self._seen[name, streams]

    def _step(self, name: str | None, streams: int) -> Figures:
        contender = self._field.contenders[name] if name else None
        ports = [contender.port] if contender else self._field.engine_ports
        load = HttpLoad(self._field.load, ports, self._body).start(
            round(1.25 * streams) + 64,
            WARM_UP_S + WINDOW_S,
            streams / STREAM_S,
            warm_up_s=WARM_UP_S,
        )
        with load as run:
            run.ready()
            run.begin()
            time.sleep(WARM_UP_S)
            spent = _Spent(contender)
            time.sleep(WINDOW_S)
            cores = spent.cores()
            seen = run.found()
        self._tell()
        return {
            "streams": streams,
            "chunks_per_s": seen["chunks"] / WINDOW_S,
            "offered_per_s": streams / TICK_S,
            "gap_p99_us": seen["gap_p99_us"],
            "errors": seen["errors"],
            **cores,
        }


class _Spent:
    """Cores spent since it was made: by a contender, and by the machine as a whole."""

    def __init__(self, contender: Contender | None) -> None:
        self._pid = contender.pids["self"] if contender else None
        self._began_s, self._contender_s, self._machine_s = self._now()

    def cores(self) -> Figures:
        """The two figures."""
        now_s, contender_s, machine_s = self._now()
        took_s = now_s - self._began_s
        return {
            "cores": (contender_s - self._contender_s) / took_s,
            "machine_cores": (machine_s - self._machine_s) / took_s,
        }

    def _now(self) -> tuple[float, float, float]:
        first = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
        ticks = [int(part) for part in first]
        machine_s = (sum(ticks) - ticks[3] - ticks[4]) / 100  # less idle and waiting for disks
        return time.monotonic(), cpu_ns(self._pid) / 1e9 if self._pid else 0.0, machine_s


def highest(ladder: Sequence[int], holds: Callable[[int], bool]) -> int | None:
    """The highest step that holds, if all below it do: found by halving."""
    low, high = 0, len(ladder)
    while low < high:
        middle = (low + high) // 2
        if holds(ladder[middle]):
            low = middle + 1
        else:
            high = middle
    return ladder[low - 1] if low else None


def step_holds(seen: Figures) -> bool:
    """No error, nothing left behind, nothing late."""
    return (
        seen["errors"] == 0
        and seen["chunks_per_s"] >= 0.95 * seen["offered_per_s"]
        and seen["added_p99_us"] <= MAX_ADDED_US
    )


def _direct_row(steps: _Steps) -> Row:
    label = "engines and load generator alone keep pace up to, chunks/s"
    seen = steps.best(None)
    if seen is None:
        return Row(label, None, "not even with the fewest streams")
    note = f"{seen['streams']:,} streams, p99 {seen['gap_p99_us'] / 1000:.1f} ms"
    if seen["streams"] == LADDER[-1]:
        note += "; the ladder ends here"
    return Row(label, seen["chunks_per_s"], note)


def rate_rows_of(name: str, best: Figures | None, beside: Figures) -> list[Row]:
    """Rows of a contender: at its highest step, and at the gateway's."""
    label = f"{name}: chunks/s per core at added p99 <= {MAX_ADDED_US / 1000:g} ms"
    if best is None:
        rows = [Row(label, None, f"not even {LADDER[0]:,} streams")]
    else:
        per_core = _per_core(best)
        rows = [
            Row(label, per_core, _in_words(best)),
            Row(
                f"{name}: cores for {FLEET_CHUNKS_PER_S:,} chunks/s", FLEET_CHUNKS_PER_S / per_core
            ),
        ]
    level = f"{name}: chunks/s per core with {beside['streams']:,} streams"
    return [*rows, Row(level, _per_core(beside), _in_words(beside))]


def _per_core(seen: Figures) -> float:
    return seen["chunks_per_s"] / max(seen["cores"], 1e-9)


def _in_words(seen: Figures) -> str:
    return (
        f"{seen['streams']:,} streams, {seen['chunks_per_s']:,.0f} chunks/s on "
        f"{seen['cores']:.2f} cores; added p99 {seen['added_p99_us'] / 1000:.1f} ms, "
        f"{seen['errors']:.0f} errors; the machine spent {seen['machine_cores']:.2f} cores"
    )


CHUNKS: Final = 64
TICK_US: Final = 1000
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
    if lacking := may_open(1024):
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
