"""`python -m bench quartz live`: QUARTZ and the peers' routers before the same mock engines.

Four engines of one pool, each with a prefix cache of 160,000 tokens; by turns, three times, each
time with fresh engines: the gateway with `policy: quartz` (its default) and `least-loaded`, two
with `quartz` on one Redis, to which a client's requests go by turns, and sglang-router and
vllm-router (PyPI) with their cache-aware policies. Mixed: chat in turns and retrieval, at .8 and
1.1 of what the engines can do. Agents: 30,000 tokens of prompt, 80 % of it the same for 20 turns.
A run whose engines were late by more than 10 % of the P99 is void.

Asked: no request fails; QUARTZ's P99 time to the first token on Mixed and its violations anywhere
are no worse than those of the better router; its prefix hit rate on the agents is at least 90 %
of what an infinite index would find, and that of two gateways 90 % of one's.
"""

import asyncio
import signal
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, Final

import msgspec
import orjson

from bench.common.fleet import MODEL, Fleet, RedisServer, read_metrics, redis_program
from bench.common.raw_client import (
    TimedAnswer,
    TimedLoad,
    TimedRequest,
    chat_body,
    lag_s,
    text,
    write_profile,
)
from bench.common.report import (
    Report,
    Row,
    at_least,
    at_most,
    between,
    equals,
    quantile,
    scaled,
    tracked,
)
from bench.overhead.field import CACHE_AWARE, installed
from simulator.engine.engine import EngineProfile
from sluice.children import Children, free_ports

SEVERAL: Final = "quartz x 2"
"""Two gateways on one Redis; a client's requests go to each by turns."""
SYSTEMS: Final = ("quartz", SEVERAL, "least-loaded", *CACHE_AWARE)
ROUNDS: Final = scaled(3)
WORKERS: Final = 4
SPEED: Final = 2.0
KNEE_PER_S: Final = 29.4
"""Mixed requests a second, in real time, that the engines complete (`quartz knees`)."""
LOADS: Final[dict[str, float]] = {"mixed at .8": 0.8, "mixed at 1.1": 1.1}
WORKLOADS: Final = (*LOADS, "agents")
REQUESTS: Final = scaled(500, 100)
AGENTS: Final = 12
TURNS: Final = scaled(20, 4)
AGENT_SPEED: Final = 4.0
PAUSE_S: Final = 0.4
_LATE_SHARE: Final = 0.10
_WINDOW: Final = 65_536
_HEARD_S: Final = 3.0
_RETAINED: Final = 0.9
"""Of one gateway's hit rate, by two."""

ENGINE: Final = EngineProfile(
    name="quartz-bench",
    w_s=0.024,
    h_s=0.0004,
    max_num_batched_tokens=2048,
    kv_blocks=32_768,
    max_model_len=_WINDOW,
    max_num_seqs=128,
    prefix_cache_tokens=160_000,
    # 2,048 tokens in 0.2276 s: 9,000 tokens a second.
    prefill_s_per_token=(2048 / 9000 - 0.024) / 2048,
)


def mixed(number: int, rate_per_s: float, count: int, speed: float) -> list[TimedRequest]:
    """Chat in turns (55 %) and retrieval over shared documents (45 %), of 28 clients; Poisson.

    The objectives are 2 s and 4 s of model time (QUARTZ, section 5.2).
    """
    draw = Random(f"mixed/{number}")
    turns: dict[int, list[tuple[str, str]]] = {}
    out = []
    at_s = 0.0
    for serial in range(count):
        at_s += draw.expovariate(rate_per_s)
        client = draw.randrange(28)
        if draw.random() < 0.55:
            told = turns.get(client)
            if told is None or len(told) > 16:
                told = [("system", text("chat system", 300))]
            asked = text(f"chat {number} {serial}", draw.randrange(40, 300))
            told = [*told, ("user", asked)]
            output = draw.randrange(30, 150)
            turns[client] = [*told, ("assistant", text(f"answer {number} {serial}", output))]
            body, slo_s = chat_body(told, output), 2.0
        else:
            documents = [draw.randrange(40) for _ in range(4)]
            passages = "\n\n".join(text(f"document {d}", 500 + 60 * d) for d in documents)
            question = text(f"question {number} {serial}", 40)
            told = [
                ("system", text("rag system", 200)),
                ("user", f"Context:\n{passages}\n\nQuestion: {question}"),
            ]
            body, slo_s = chat_body(told, draw.randrange(20, 90)), 4.0
        out.append(TimedRequest(at_s=at_s, client=f"c{client}", body=body, slo_s=slo_s / speed))
    return out


def agents(number: int) -> list[list[TimedRequest]]:
    """Agents whose every prompt has 30,000 tokens, 80 % of them the same in each of its turns."""

    def turn(agent: int, turn: int) -> TimedRequest:
        held = text(f"agent {number} {agent}", 24_000)
        new = text(f"seen {number} {agent} {turn}", 6_000)
        body = chat_body([("system", held), ("user", new)], 40)
        return TimedRequest(at_s=0.0, client=f"a{agent}", body=body, slo_s=4.0 / AGENT_SPEED)

    return [[turn(agent, number) for number in range(TURNS)] for agent in range(AGENTS)]


class Run(msgspec.Struct, kw_only=True):
    """One system under one workload, once."""

    p50_s: float
    p99_s: float
    violations: float
    hit_rate: float
    failed: int
    lag_s: float

    @property
    def void(self) -> bool:
        """Whether the engines were too late for the figure to mean anything."""
        return self.lag_s > _LATE_SHARE * self.p99_s


Found = dict[tuple[str, str], list[Run]]
"""By workload and system."""
_P99: Final = "P99 TTFT, s"
_LATE: Final = "violations, %"
_FIGURES: Final[dict[str, Callable[[Run], float]]] = {
    "P50 TTFT, s": lambda r: r.p50_s,
    _P99: lambda r: r.p99_s,
    _LATE: lambda r: 100 * r.violations,
    "prefix hit rate, %": lambda r: 100 * r.hit_rate,
}


def run() -> Report:
    """All systems on all workloads, by turns."""
    there = {
        SEVERAL: redis_program() is not None,
        **{name: installed(name) for name in CACHE_AWARE},
    }
    systems = [name for name in SYSTEMS if there.get(name, True)]
    found: Found = defaultdict(list)
    turns = list(product(range(ROUNDS), WORKLOADS, range(len(systems))))
    for number, workload, place in tracked(turns, "runs"):
        name = systems[(place + number) % len(systems)]
        found[workload, name].append(measure(name, workload, number))
    rows = [row for workload in WORKLOADS for row in rows_of(workload, systems, found)]
    missing = [name for name in SYSTEMS if name not in systems]
    if missing:
        rows.append(Row("not installed (make bench-peers)", ", ".join(missing)))
    return Report(name="quartz live", rows=rows)


def rows_of(workload: str, systems: Sequence[str], found: Found) -> list[Row]:
    """Middles of the runs that count, and what is asked of them."""
    sound = {name: [r for r in found[workload, name] if not r.void] for name in systems}
    rows = []
    for name in systems:
        runs, all_runs = sound[name], found[workload, name]
        lag_ms = 1000 * max(r.lag_s for r in all_runs)
        note = f"{len(runs)} of {len(all_runs)} runs count; engines at most {lag_ms:.0f} ms late"
        for label, figure in _FIGURES.items():
            values = [figure(r) for r in runs]
            told = ", ".join(f"{v:.3g}" for v in values)
            middle = median(values) if values else None
            rows.append(Row(f"{workload}: {name}: {label}", middle, f"{told}; {note}"))
        failed = sum(r.failed for r in all_runs)
        rows.append(equals(f"{workload}: {name}: requests failed", failed, 0))
    return [*rows, *_verdicts(workload, sound)]


def _verdicts(workload: str, sound: dict[str, list[Run]]) -> Iterator[Row]:
    """QUARTZ beside the better of the routers by each figure, and two gateways beside one."""
    ours, two = sound.get("quartz"), sound.get(SEVERAL)
    peers = [sound[name] for name in CACHE_AWARE if sound.get(name)]
    if ours and peers:
        for label, figure in list(_FIGURES.items())[:3]:
            best = min(median(map(figure, runs)) for runs in peers)
            mine = median(map(figure, ours))
            metric = f"{workload}: {label}, quartz less the better router's"
            asked = label == _LATE or (label == _P99 and workload in LOADS)
            note = f"{mine:.3g} and {best:.3g}"
            row = at_most(metric, mine - best, 0.0, note)
            yield row if asked else Row(metric, mine - best, note)
    if ours and workload == "agents":
        oracle = 0.8 * (TURNS - 1) / TURNS
        rate = median(r.hit_rate for r in ours) / oracle
        yield at_least("agents: quartz's hit rate over an infinite index's", rate, 0.9)
    if ours and two:
        rates = [median(run.hit_rate for run in runs) for runs in (two, ours)]
        metric = f"{workload}: hit rate, {SEVERAL} over quartz"
        note = f"{rates[0]:.3g} and {rates[1]:.3g}"
        yield at_least(metric, rates[0] / rates[1], _RETAINED, note)


def engines_of(folder: str, policy: str, speed: float, **more: Any) -> Fleet:
    """Four of these engines before a gateway with a policy."""
    profile = write_profile(Path(folder), ENGINE)
    return Fleet(
        short=WORKERS,
        long=0,
        short_window=_WINDOW,
        mock=("--profile-file", str(profile), "--speed", str(speed)),
        model={"scheduling": {"policy": policy}},
        **more,
    )


def measure(name: str, workload: str, number: int) -> Run:
    """One run with engines and a router of its own."""
    speed = SPEED if workload in LOADS else AGENT_SPEED
    policy = "least-loaded" if name in CACHE_AWARE else name.removesuffix(" x 2")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        several: dict[str, Any] = {}
        if name == SEVERAL:
            state = {"state": {"url": stack.enter_context(RedisServer()).url}}
            several = {"config": state, "further": [state]}
        fleet = stack.enter_context(engines_of(folder, policy, speed, **several))
        urls = [replica.url for replica in fleet.replicas]
        engines = [engine.url for engine in fleet.engines]
        if name in CACHE_AWARE:
            children = stack.enter_context(Children())
            port = free_ports(1)[0]
            children.start(CACHE_AWARE[name](port, engines), quiet=True, silent=True)
            urls = [f"http://127.0.0.1:{port}"]
            children.wait_for(f"{urls[0]}/health")
        load = TimedLoad(urls)
        asyncio.run(_drive(load, urls, workload, number, speed))
        return _judge(load, [read_metrics(engine) for engine in engines])


async def _drive(
    load: TimedLoad, urls: Sequence[str], workload: str, number: int, speed: float
) -> None:
    # A few requests first: routers take a moment to find their workers, replicas one another.
    first = TimedLoad(urls)
    await asyncio.sleep(_HEARD_S if len(urls) > 1 else 0.0)
    for _ in range(40):
        await first.open_loop(mixed(10_000, 100.0, 4, 1.0))
        if all(seen.whole for seen in first.seen[-4:]):
            break
        await asyncio.sleep(0.5)
    if workload in LOADS:
        rate_per_s = LOADS[workload] * KNEE_PER_S
        await load.open_loop(mixed(number, rate_per_s, REQUESTS, speed))
    else:
        await load.closed_loops(agents(number), PAUSE_S)


def _judge(load: TimedLoad, engines: Sequence[dict[str, float]]) -> Run:
    def total(name: str) -> float:
        return float(sum(v for m in engines for k, v in m.items() if k.startswith(name)))

    answered = [seen.first_s for seen in load.seen if seen.first_s is not None]
    bad = [s for s in load.seen if s.status != 200 or not s.whole or s.first_s is None]
    late = [s for s in load.seen if s.first_s is None or s.first_s > s.ask.slo_s]
    queries = total("vllm:prefix_cache_queries_total")
    return Run(
        p50_s=quantile(answered, 0.5),
        p99_s=quantile(answered, 0.99),
        violations=len(late) / len(load.seen),
        hit_rate=total("vllm:prefix_cache_hits_total") / max(1.0, queries),
        failed=len(bad),
        lag_s=lag_s(engines),
    )


# -- `python -m bench quartz shadow`: what the shadow says of QUARTZ, and what a switch brings


SHADOW_REQUESTS: Final = scaled(2000, 1200)
SETTLED: Final = 1000
"""Requests after which coverage is counted."""
LOAD: Final = 0.5
"""Of the rate that the engines complete under the best policy."""
COVERAGE: Final = (0.93, 0.96)
GAIN_ERROR: Final = 0.25
"""Of the measured gain."""
_SERIES: Final = f'sluice_predictor_coverage{{model="{MODEL}",pool="short"}}'


class ShadowRun(msgspec.Struct, frozen=True, kw_only=True):
    """One policy under the workload."""

    answers: list[TimedAnswer]
    records: list[dict[str, Any]]
    """Decision records, by arrival."""
    coverage: float
    """The gateway's metric at the end."""
    lag_s: float
    """How late the engines were at most (P99)."""


def shadow() -> Report:
    """Both policies, on the same requests."""
    before, after = shadowed("least-loaded"), shadowed("quartz")
    return Report(name="quartz shadow", rows=list(shadow_rows(before, after)))


def shadowed(policy: str) -> ShadowRun:
    """One shadow with engines and a gateway of its own."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "requests.jsonl"
        config = {"request_log": {"path": str(log)}}
        with engines_of(folder, policy, SPEED, config=config) as fleet:
            load = TimedLoad([fleet.url])
            asyncio.run(load.open_loop(mixed(0, LOAD * KNEE_PER_S, SHADOW_REQUESTS, SPEED)))
            fleet.wait_until_idle()
            coverage = fleet.metrics()[_SERIES]
            late_s = lag_s([engine.metrics() for engine in fleet.engines])
            fleet.kill_replica(fleet.replicas[0], signal.SIGTERM)  # which writes the log's end
        records = [orjson.loads(line) for line in log.read_bytes().splitlines()]
    records.sort(key=lambda record: record["time_unix_s"])
    return ShadowRun(answers=load.seen, records=records, coverage=coverage, lag_s=late_s)


def shadow_rows(before: ShadowRun, after: ShadowRun) -> Iterator[Row]:
    """The shadow's accuracy, and its advice beside what the switch brought."""
    sections = [record["scheduling"] for record in before.records]
    judged = [s for s in sections[SETTLED:] if "prefill_s" in s and "predicted_prefill_q_s" in s]
    within = [s["prefill_s"] <= s["predicted_prefill_q_s"] for s in judged]
    metric = f"coverage of shadow predictions after {SETTLED:,} requests"
    note = f"of {len(within):,}; the metric at the end {before.coverage:.3f}"
    yield between(metric, sum(within) / len(within), *COVERAGE, note)
    wide = median(s["predicted_prefill_q_s"] / s["prefill_s"] for s in judged)
    late = f"engines at most {1000 * before.lag_s:.0f} ms late"
    yield Row("predicted quantile over the actual prefill, median", wide, late)
    advised = [r for r in before.records if "would_prefill_s" in r.get("scheduling", {})]
    elsewhere = [r["scheduling"]["would_bind"] != r["worker"] for r in advised]
    share = 100 * sum(elsewhere) / len(elsewhere)
    yield Row("requests that quartz would have bound elsewhere, %", share)
    plans = [r["scheduling"] for r in advised]
    would_s = fmean(s["predicted_prefill_s"] - s["would_prefill_s"] for s in plans)
    first_s, then_s = _mean_s(before.answers), _mean_s(after.answers)
    yield Row("would-be gain in mean TTFT, ms", 1000 * would_s)
    metric = "gain in mean TTFT after the switch, ms"
    yield Row(metric, 1000 * (first_s - then_s), f"{1000 * first_s:.0f} to {1000 * then_s:.0f}")
    metric, note = "would-be gain over the measured one", "the rest is what a switch does to caches"
    yield between(metric, would_s / (first_s - then_s), 1 - GAIN_ERROR, 1 + GAIN_ERROR, note)
    for name, found in (("least-loaded", before), ("quartz", after)):
        times = [a.first_s for a in found.answers if a.first_s is not None]
        missed = sum(a.first_s is None or a.first_s > a.ask.slo_s for a in found.answers)
        note = f"violations {100 * missed / len(found.answers):.1f} %"
        yield Row(f"{name}: P99 TTFT, s", quantile(times, 0.99), note)
        failed = sum(not a.whole for a in found.answers)
        yield equals(f"{name}: requests failed", failed, 0)


def _mean_s(answers: Sequence[TimedAnswer]) -> float:
    return fmean(a.first_s for a in answers if a.first_s is not None)
