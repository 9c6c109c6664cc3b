"""`python -m bench quartz-live`: QUARTZ and the peers' routers before the same mock engines.

Four engines of one pool, each with a prefix cache of 160,000 tokens; by turns, three times, each
time with fresh engines: the gateway with `policy: quartz` (its default) and `least-loaded`, two
with `quartz` on one Redis, to which a client's requests go by turns, and sglang-router and
vllm-router (PyPI) with their cache-aware policies. Mixed: chat in turns and retrieval, at .8 and
1.1 of what the engines can do. Agents: 30,000 tokens of prompt, 80 % of it the same for 20 turns.
A run whose engines were late by more than 10 % of the P99 is void.

Asked: no request fails; QUARTZ's P99 time to the first token on Mixed and its violations anywhere
are no worse than those of the better router; its prefix hit rate on the agents is at least 90 %
of what an infinite index would find, and that of two gateways 90 % of one's.
`SLUICE_BENCH_ROUNDS` makes it shorter.
"""

import asyncio
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.progress import Progress

from bench.common.fleet import Fleet, read_metrics
from bench.common.redis_server import RedisServer
from bench.common.report import Report, Row, at_least, at_most, equals
from bench.quartz_live.load import (
    PEER_SYSTEMS,
    SEVERAL,
    SYSTEMS,
    TimedLoad,
    agents,
    installed,
    mixed,
    router,
    write_profile,
)
from bench.token_pools.records import quantile
from simulator.engine.engine import EngineProfile
from sluice.children import Children

ROUNDS: Final = int(os.environ.get("SLUICE_BENCH_ROUNDS", "3"))
WORKERS: Final = 4
SPEED: Final = 2.0
KNEE_PER_S: Final = 29.4
"""Mixed requests a second, in real time, that the engines complete (`quartz_loads.scenes`)."""
LOADS: Final[dict[str, float]] = {"mixed at .8": 0.8, "mixed at 1.1": 1.1}
WORKLOADS: Final = (*LOADS, "agents")
REQUESTS: Final = 500
AGENTS: Final = 12
TURNS: Final = 20
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


class Run(msgspec.Struct, kw_only=True):
    """One system under one workload, once."""

    p50_s: float
    p99_s: float
    violations: float
    hit_rate: float
    failed: int
    lag_s: float
    requests: int

    @property
    def void(self) -> bool:
        """Whether the engines were too late for the figure to mean anything."""
        return self.lag_s > _LATE_SHARE * self.p99_s


def run(plot: Path | None = None) -> Report:
    """All systems on both workloads, by turns."""
    systems = [name for name in SYSTEMS if installed(name)]
    found: dict[tuple[str, str], list[Run]] = defaultdict(list)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("runs", total=ROUNDS * len(WORKLOADS) * len(systems))
        for number in range(ROUNDS):
            for workload in WORKLOADS:
                for place in range(len(systems)):
                    name = systems[(place + number) % len(systems)]
                    found[workload, name].append(measure(name, workload, number))
                    progress.advance(bar)
    if plot is not None:
        from bench.quartz_live.plot import draw

        draw(found, plot)
    rows = [row for workload in WORKLOADS for row in rows_of(workload, systems, found)]
    missing = [name for name in SYSTEMS if name not in systems]
    if missing:
        rows.append(Row(metric="not installed (make bench-peers)", measured=", ".join(missing)))
    return Report(name="quartz-live", rows=rows)


def rows_of(
    workload: str, systems: Sequence[str], found: dict[tuple[str, str], list[Run]]
) -> list[Row]:
    """Middles of the runs that count, and what is asked of them."""
    sound = {name: [r for r in found[workload, name] if not r.void] for name in systems}
    rows = []
    for name in systems:
        runs = sound[name]
        all_runs = found[workload, name]
        lag_ms = 1000 * max(r.lag_s for r in all_runs)
        note = f"{len(runs)} of {len(all_runs)} runs count; engines at most {lag_ms:.0f} ms late"
        for label, figure in _FIGURES.items():
            values = [figure(r) for r in runs]
            told = ", ".join(f"{v:.3g}" for v in values)
            rows.append(
                Row(
                    metric=f"{workload}: {name}: {label}",
                    measured=median(values) if values else None,
                    note=f"{told}; {note}",
                )
            )
        rows.append(
            equals(f"{workload}: {name}: requests failed", sum(r.failed for r in all_runs), 0)
        )
    return [*rows, *_verdicts(workload, systems, sound), *_kept(workload, sound)]


def _kept(workload: str, sound: dict[str, list[Run]]) -> list[Row]:
    """The hit rate of two gateways on one Redis over that of one."""
    one, two = (sound.get(name) for name in ("quartz", SEVERAL))
    if not one or not two:
        return []
    rates = [median(run.hit_rate for run in runs) for runs in (two, one)]
    note = f"{rates[0]:.3g} and {rates[1]:.3g}"
    return [
        at_least(
            f"{workload}: hit rate, {SEVERAL} over quartz", rates[0] / rates[1], _RETAINED, note
        )
    ]


def _verdicts(workload: str, systems: Sequence[str], sound: dict[str, list[Run]]) -> list[Row]:
    """QUARTZ beside the better of the routers, by each figure."""
    ours = sound.get("quartz", [])
    peers = [sound[name] for name in systems if name in PEER_SYSTEMS and sound[name]]
    if not ours or not peers:
        return []
    rows = []
    for label, figure in _FIGURES.items():
        if label not in _COMPARED:
            continue
        best = min(median(map(figure, runs)) for runs in peers)
        mine = median(map(figure, ours))
        metric = f"{workload}: {label}, quartz less the better router's"
        asked = label == _LATE or (label == _P99 and workload in LOADS)
        note = f"{mine:.3g} and {best:.3g}"
        rows.append(
            at_most(metric, mine - best, 0.0, note)
            if asked
            else Row(metric=metric, measured=mine - best, note=note)
        )
    if workload == "agents":
        oracle = 0.8 * (TURNS - 1) / TURNS
        rate = median(r.hit_rate for r in ours) / oracle
        rows.append(at_least("agents: quartz's hit rate over an infinite index's", rate, 0.9))
    return rows


_P50: Final = "P50 TTFT, s"
_P99: Final = "P99 TTFT, s"
_LATE: Final = "violations, %"
_COMPARED: Final = frozenset({_P50, _P99, _LATE})
_FIGURES: Final[dict[str, Callable[[Run], float]]] = {
    _P50: lambda r: r.p50_s,
    _P99: lambda r: r.p99_s,
    _LATE: lambda r: 100 * r.violations,
    "prefix hit rate, %": lambda r: 100 * r.hit_rate,
}


def measure(name: str, workload: str, number: int) -> Run:
    """One run with engines and a router of its own."""
    speed = SPEED if workload in LOADS else AGENT_SPEED
    policy = name.removesuffix(" x 2")
    if name in PEER_SYSTEMS:
        policy = "least-loaded"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        several: list[dict[str, Any]] = []
        if name == SEVERAL:
            several = 2 * [{"state": {"url": stack.enter_context(RedisServer()).url}}]
        profile = write_profile(Path(folder), ENGINE)
        options = ("--profile-file", str(profile), "--speed", str(speed))
        fleet = Fleet(
            short=WORKERS,
            long=0,
            short_window=_WINDOW,
            mock=options,
            model={"scheduling": {"policy": policy}},
            config=several[0] if several else None,
            further=several[1:],
        )
        with fleet, Children() as children:
            urls = [replica.url for replica in fleet.replicas]
            engines = [engine.url for engine in fleet.engines]
            if name in PEER_SYSTEMS:
                command, url = router(name, engines)
                children.start(command, quiet=True, silent=True)
                children.wait_for(f"{url}/health")
                urls = [url]
            load = TimedLoad(urls)
            asyncio.run(_drive(load, urls, workload, number, speed))
            return _judge(load, [read_metrics(engine) for engine in engines])


async def _drive(
    load: TimedLoad, urls: Sequence[str], workload: str, number: int, speed: float
) -> None:
    await _warm_up(urls)
    if workload in LOADS:
        rate_per_s = LOADS[workload] * KNEE_PER_S
        await load.open_loop(mixed(number, rate_per_s, REQUESTS, speed))
    else:
        await load.closed_loops(agents(number, AGENTS, TURNS, speed), PAUSE_S)


async def _warm_up(urls: Sequence[str]) -> None:
    """A few requests first: routers take a moment to find their workers, replicas one another."""
    load = TimedLoad(urls)
    await asyncio.sleep(_HEARD_S if len(urls) > 1 else 0.0)
    for _ in range(40):
        await load.open_loop(mixed(10_000, 100.0, 4, 1.0))
        if all(seen.whole for seen in load.seen[-4:]):
            return
        await asyncio.sleep(0.5)


def _judge(load: TimedLoad, engines: Sequence[dict[str, float]]) -> Run:
    answered = [seen.first_s for seen in load.seen if seen.first_s is not None]
    bad = [s for s in load.seen if s.status != 200 or not s.whole or s.first_s is None]
    late = [s for s in load.seen if s.first_s is None or s.first_s > s.ask.slo_s]
    queries = _sum(engines, "vllm:prefix_cache_queries_total")
    return Run(
        p50_s=quantile(answered, 0.5),
        p99_s=quantile(answered, 0.99),
        violations=len(late) / len(load.seen),
        hit_rate=_sum(engines, "vllm:prefix_cache_hits_total") / max(1.0, queries),
        failed=len(bad),
        lag_s=max(v for m in engines for k, v in m.items() if k.startswith("mock_lag_p99_seconds")),
        requests=len(load.seen),
    )


def _sum(engines: Sequence[dict[str, Any]], name: str) -> float:
    return float(sum(v for m in engines for k, v in m.items() if k.startswith(name)))
