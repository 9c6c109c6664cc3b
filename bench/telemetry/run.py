"""`python -m bench telemetry`: what tracing costs a request, and what a dead collector does.

The work on the request's own path is timed in this process, interpreted unless COMPILED=1. Then
three gateways before the same engines take turns: without telemetry, with a tenth of requests
traced, and with a tenth traced to a collector that hangs. Last, every request is traced, and all
of its spans must arrive under the client's. SLUICE_BENCH_REQUESTS sets how many (10,000).
"""

import asyncio
import os
import secrets
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import msgspec

from bench.common.fleet import MODEL, Fleet, GatewayProcess
from bench.common.raw_client import RawClient
from bench.common.report import Report, Row, at_least, at_most
from bench.common.tools import rss_kib
from bench.telemetry.collectors import Collector, complete, hung_collector
from gateway.metrics import Metrics
from gateway.payload.head import lines_to_engine
from gateway.records.decision import DECISION_SCHEMA, DecisionRecord, TimingSection, UsageSection
from gateway.telemetry.otlp import Telemetry

_BODY = msgspec.json.encode(
    {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
        "stream": True,
    }
)
_PARENT = "00f067aa0ba902b7"
_HEADERS = b"accept: */*\r\ncontent-type: application/json\r\nuser-agent: bench\r\n"
_SHARE = 0.1
_CALLS = 20_000
_ROUNDS = 30
_IN_ROUND = 100
_CLIENTS = 4
_MAX_GROWTH_MIB = 20.0


def run() -> Report:
    """All of it."""
    count = int(os.environ.get("SLUICE_BENCH_REQUESTS", "10000"))
    return Report(name="telemetry", rows=[*path_rows(), *fleet_rows(_ROUNDS, count)])


def path_rows() -> list[Row]:
    """Microseconds that a request's own path spends, by where its trace begins."""
    with hung_collector() as url:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = url
        telemetry = Telemetry(Metrics(), version="bench", sample=_SHARE)
        theirs = _HEADERS + f"traceparent: 00-{'a' * 32}-{_PARENT}-00\r\n".encode()
        record = DecisionRecord(
            schema=DECISION_SCHEMA,
            time_unix_s=time.time(),
            request_id="r",
            endpoint="chat",
            outcome="ok",
            status=200,
            model=MODEL,
            stream=True,
            usage=UsageSection(prompt_tokens=100, completion_tokens=20),
            timing=TimingSection(ttft_s=0.1, tpot_s=0.01, duration_s=0.5),
        )
        found = []
        for where, headers in (("here", _HEADERS), ("with the client", theirs)):

            def one(headers: bytes = headers) -> None:
                trace = telemetry.begin(headers)
                lines_to_engine(headers, trace, 1)
                telemetry.append(msgspec.structs.replace(record, trace=trace))

            us = _least_us(one)
            name = f"request path, {_SHARE:.0%} sampled, trace begun {where}, us"
            found.append(Row(metric=name, measured=us, note="least of 7 rounds"))
        return found


def _least_us(call: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(7):
        began_s = time.thread_time()  # of the processor: other processes may use it meanwhile
        for _ in range(_CALLS):
            call()
        best = min(best, time.thread_time() - began_s)
    return best / _CALLS * 1e6


def fleet_rows(rounds: int, count: int) -> list[Row]:
    """Paired rounds over three gateways, and `count` requests all traced by a fourth."""
    collector = Collector()
    traced = {"telemetry": {"otlp": True, "sample": _SHARE}}
    whole = {"telemetry": {"otlp": True}}
    with ExitStack() as stack:
        stack.enter_context(collector.running())
        hung = stack.enter_context(hung_collector())
        fleet = Fleet(short=2, long=0, further=[traced, traced, whole])
        off, on, dead, every = fleet.replicas
        for replica, url in ((on, collector.url), (dead, hung), (every, collector.url)):
            replica.env = {"OTEL_EXPORTER_OTLP_ENDPOINT": url}
        stack.enter_context(fleet)
        times = asyncio.run(_paired({"off": off, "on": on, "dead": dead}, rounds))
        rows = [
            _delay("median, 10 % traced, us over off", times["on"], times["off"]),
            _delay(
                "median, collector hangs, us over off", times["dead"], times["off"], nothing=True
            ),
            _grown(off, dead),
        ]
        collector.spans.clear()
        asyncio.run(_ask(every, count, clients=16, traced=True))
        until_s = time.monotonic() + 30
        while _complete(collector) < count and time.monotonic() < until_s:
            time.sleep(0.2)
        rows.append(at_least(f"complete traces of {count} requests", _complete(collector), count))
    return rows


def _complete(collector: Collector) -> int:
    return complete(list(collector.spans), bytes.fromhex(_PARENT))


def _delay(metric: str, times: list[float], without: list[float], *, nothing: bool = False) -> Row:
    """The rounds' differences: their median, and whether they are `nothing`, as they must be."""
    differences = [(a - b) * 1e6 for a, b in zip(times, without, strict=True)]
    low, middle, high = statistics.quantiles(differences, n=4)
    note = f"quartiles of {len(differences)} paired rounds: {low:.0f} to {high:.0f}; "
    note += f"off: {statistics.median(without) * 1e6:.0f}"
    row = Row(metric=metric, measured=middle, note=note)
    if not nothing:
        return row
    target = "not above 0 in a quarter of the rounds"
    return msgspec.structs.replace(row, target=target, holds=low <= 0)


def _grown(off: GatewayProcess, dead: GatewayProcess) -> Row:
    sizes = [rss_kib(r.process.pid) / 1024 for r in (off, dead) if r.process is not None]
    name = "memory with a collector that hangs, MiB over off"
    note = f"{sizes[0]:.0f} -> {sizes[1]:.0f} MiB, the SDK's modules included"
    return at_most(name, sizes[1] - sizes[0], _MAX_GROWTH_MIB, note)


async def _paired(gateways: Mapping[str, GatewayProcess], rounds: int) -> dict[str, list[float]]:
    """Each gateway's median latency of each round, in seconds; turns rotate."""
    found: dict[str, list[float]] = {name: [] for name in gateways}
    names = list(gateways)
    for name in names:
        await _ask(gateways[name], _IN_ROUND, clients=_CLIENTS)  # warm up
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            latencies = await _ask(gateways[name], _IN_ROUND, clients=_CLIENTS)
            found[name].append(statistics.median(latencies))
    return found


async def _ask(
    gateway: GatewayProcess, count: int, *, clients: int, traced: bool = False
) -> list[float]:
    """Latencies of so many streams, all answered with 200."""
    latencies: list[float] = []

    async def client(share: int) -> None:
        async with RawClient(gateway.url) as connection:
            for _ in range(share):
                if traced:
                    connection.say("traceparent", f"00-{secrets.token_hex(16)}-{_PARENT}-01")
                began_s = time.perf_counter()
                answer = await connection.post("/v1/chat/completions", _BODY)
                latencies.append(time.perf_counter() - began_s)
                if answer.status != 200:
                    raise RuntimeError(f"status {answer.status}")

    shares = [count // clients + (at < count % clients) for at in range(clients)]
    await asyncio.gather(*(client(share) for share in shares))
    return latencies
