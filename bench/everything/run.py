"""`python -m bench everything`: all five systems on against all off, and each one's part.

The same mixed trace with tenants goes through a real gateway before the same mock engines, once
for each configuration of `bench.everything.scene`, in real time. Off is round robin over one
pool without admission. The workers needed for the SLOs are found in virtual time, by the simulated
gateway with the same configuration; two of the live runs are held against it.
"""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
import numpy as np
import yaml

from bench.common.fleet import Fleet
from bench.common.raw_client import TimedAnswer, TimedLoad, TimedRequest, lag_s, write_profile
from bench.common.report import Report, Row, at_least, at_most, scaled_s, tracked
from bench.everything.scene import (
    ALL,
    ENGINE,
    OFF,
    RANKS,
    REPLICAS,
    SLOTS,
    SYSTEMS,
    TENANTS,
    WINDOW_TOKENS,
    RunFigures,
    Switches,
    TraceRequest,
    config_of,
    figures,
    trace,
)
from gateway.settings import ConfigError, parse
from planner.profile import NodeProfile
from simulator.fleet.traffic import Traffic
from simulator.pipeline.records import TenantTraffic
from simulator.pipeline.run import run_pipeline
from sluice.simulated.gateway import gateway_of

# -- the trace through a real gateway before mock engines, in real time


_BUSY: Final = ("vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum")


def live(switches: Switches, requests: list[TraceRequest]) -> RunFigures:
    """One system with fresh engines and a fresh gateway."""
    with tempfile.TemporaryDirectory() as folder:
        profile = ("--profile-file", str(write_profile(Path(folder), ENGINE)))
        shape = {"short_window": WINDOW_TOKENS, "short_slots": SLOTS}
        fleet = Fleet(short=REPLICAS + 1, long=0, mock=profile, **shape)  # type: ignore[arg-type]
        fleet.engines[-1].command += ["--dp-ranks", str(RANKS)]
        urls = [engine.url for engine in fleet.engines]
        config = config_of(switches, urls[:REPLICAS], urls[REPLICAS:], RANKS)
        fleet.replicas[0].config = {**config, "server": {"host": "127.0.0.1", "port": fleet.port}}
        with fleet:
            load = TimedLoad([fleet.url])
            asks = [
                TimedRequest(at_s=r.at_s, client=TENANTS[r.tenant].name, body=r.body)
                for r in requests
            ]
            asyncio.run(load.open_loop(asks))
            engines = [engine.metrics() for engine in fleet.engines]
    seen = sorted(load.seen, key=lambda answer: answer.ask.at_s)
    series = [pair for page in engines for pair in page.items()]
    return figures(
        requests,
        np.array([_ttft_s(answer) for answer in seen]),
        busy_s=sum(value for name, value in series if name.startswith(_BUSY)),
        length_s=max(answer.sent_s + answer.ended_s for answer in seen if answer.status == 200),
        workers=REPLICAS + RANKS,
        compressed=sum(_compressed(answer.head) for answer in seen),
        lag_s=lag_s(engines),
    )


def _ttft_s(answer: TimedAnswer) -> float:
    """Since the request was due; NaN where it was not served."""
    if answer.status != 200 or answer.first_s is None:
        return float("nan")
    return answer.sent_s + answer.first_s - answer.ask.at_s


def _compressed(head: bytes) -> bool:
    _, told, value = head.partition(b"x-sluice-compressed: ")
    return bool(told) and not value.startswith(b"none")


# -- the trace through a simulated gateway: the same configuration, the same engines


NODE = NodeProfile(
    name=ENGINE.name,
    gpu="mock",
    model="mock",
    gpus=1,
    w_s=ENGINE.w_s,
    h_s_per_token=ENGINE.h_s_per_token,
    prefill_s_per_token=ENGINE.prefill_s_per_token,
    kv_tokens=ENGINE.kv_blocks * ENGINE.block_tokens,
)
MAX_WORKERS = 40


def simulated(
    switches: Switches,
    requests: list[TraceRequest],
    *,
    replicas: int = REPLICAS,
    groups: int = 1,
    compressible: float = 1.0,
    seed: int = 0,
) -> RunFigures:
    """One system in virtual time, with so many engines and engines of RANKS ranks.

    `compressible` is p_c: the share of the prompts in the window that the compressor can cut.
    """
    config = parse(yaml.safe_dump(_config(switches, replicas, groups)), "bench", {})
    gateway = gateway_of(
        config, config.models[0], NODE, counting="paged", compressible=compressible
    )
    gateway = msgspec.structs.replace(gateway, profiles=(ENGINE,) * len(gateway.profiles))
    found = run_pipeline(gateway, tenant_traffic(requests), seed=seed).fleet
    busy = found.end_s - found.start_s
    served = found.status == 0
    return figures(
        requests,
        np.where(served, found.ttft_s, np.nan),
        busy_s=float(np.nansum(busy[served])),
        length_s=float(np.nanmax(found.end_s)),
        workers=replicas + RANKS * groups,
        compressed=int(found.compressed.sum()),
    )


def workers_needed(switches: Switches, requests: list[TraceRequest], least: float) -> int | None:
    """Fewest workers by which every promised tenant attains its SLO that often."""
    sizes = sorted(
        (replicas + RANKS * groups, replicas, groups)
        for groups in range(1, 5)
        for replicas in range(1, MAX_WORKERS)
    )
    for workers, replicas, groups in sizes:
        if workers > MAX_WORKERS:
            break
        try:
            found = simulated(switches, requests, replicas=replicas, groups=groups)
        except ConfigError:  # too small to hold what is reserved
            continue
        if found.promised >= least:
            return workers
    return None


def tenant_traffic(requests: list[TraceRequest]) -> TenantTraffic:
    """The trace as a gateway reads it."""
    columns = np.array(
        [
            (r.prompt_tokens, r.output_tokens, r.tenant, r.text_bytes, r.cap_tokens)
            for r in requests
        ],
        dtype=np.int64,
    ).T
    return TenantTraffic(
        traffic=Traffic(
            arrival_s=np.array([request.at_s for request in requests]),
            prompt_tokens=columns[0],
            output_tokens=columns[1],
        ),
        entitlement=columns[2],
        text_bytes=columns[3],
        asked_tokens=columns[4],
        categories=["prose"] * len(requests),
    )


def _config(switches: Switches, replicas: int, groups: int) -> dict[str, Any]:
    urls = [f"http://replica-{i}.invalid" for i in range(replicas)]
    ranked = [f"http://ranks-{i}.invalid" for i in range(groups)]
    config = config_of(switches, urls, ranked, RANKS)
    if len(config["entitlements"]) != len(TENANTS):
        raise ValueError("every tenant has an entitlement")
    return config


SECONDS: Final = scaled_s(60.0, 15.0)
ATTAINED: Final = 0.95
"""Share in time by which the workers needed are counted."""
_P99_WITHIN: Final = 0.30
_USE_WITHIN: Final = 0.05
_COMPARED: Final = (ALL, OFF)
_SEEDS: Final = range(9)


def run() -> Report:
    """Every system live, then in virtual time."""
    requests = trace(SECONDS)
    found: dict[str, RunFigures] = {}
    for name in tracked(SYSTEMS, "live"):
        found[name] = live(SYSTEMS[name], requests)
    needed = {
        name: workers_needed(SYSTEMS[name], requests, ATTAINED)
        for name in tracked(SYSTEMS, "workers needed")
    }
    rows = [
        *(row for name in SYSTEMS for row in _system(name, found[name], needed[name])),
        *_parts(found),
        *_agreement(requests, found),
    ]
    detail: dict[str, Any] = {
        "requests": len(requests),
        "workers": REPLICAS + RANKS,
        "systems": {name: msgspec.to_builtins(figures) for name, figures in found.items()},
        "needed": needed,
    }
    return Report(name="everything", rows=rows, detail=detail)


def _system(name: str, found: RunFigures, needed: int | None) -> Iterator[Row]:
    """One system's row of the table."""
    by_tenant = "; ".join(
        f"{tenant.name} {100 * seen.attained:.1f} % in time, P99 {seen.p99_ttft_s:.2f} s, "
        f"{100 * seen.refused:.0f} % refused"
        for tenant, seen in zip(TENANTS, found.tenants, strict=True)
    )
    yield Row(
        f"{name}: attainment of the worst promised tenant, %", 100 * found.promised, by_tenant
    )
    yield Row(f"{name}: P99 TTFT of all, s", found.p99_ttft_s)
    yield Row(
        f"{name}: tokens/s",
        found.tokens_per_s,
        f"{100 * found.utilisation:.0f} % of the slots in use, {found.compressed} compressed",
    )
    yield Row(
        f"{name}: workers for {100 * ATTAINED:g} % of every promised tenant, simulated",
        f"over {MAX_WORKERS}" if needed is None else float(needed),
    )


def _parts(found: dict[str, RunFigures]) -> Iterator[Row]:
    """What all together give over none, and each system's part in it."""
    on, off = found[ALL], found[OFF]
    gain = 100 * (on.promised - off.promised)
    yield at_least("all on over all off: attainment of the worst promised tenant, points", gain, 10)
    yield at_least(
        "all on over all off: chat's P99 TTFT, times lower",
        off.tenants[0].p99_ttft_s / on.tenants[0].p99_ttft_s,
        2,
    )
    for name, one in found.items():
        if name not in {ALL, OFF}:
            points = ", ".join(
                f"{tenant.name} {100 * (a.attained - b.attained):+.1f}"
                for tenant, a, b in zip(TENANTS, on.tenants, one.tenants, strict=True)
            )
            yield Row(
                f"all on over {name}: worst promised tenant, points",
                100 * (on.promised - one.promised),
                points,
            )


def _agreement(requests: list[TraceRequest], found: dict[str, RunFigures]) -> Iterator[Row]:
    """Simulated against live: the median of runs that differ in what could be compressed.

    p_c is what the live run showed: what share of the prompts in the window the compressor cut.
    """
    for name in _COMPARED:
        seen, most = found[name], simulated(SYSTEMS[name], requests).compressed
        share = min(1.0, seen.compressed / most) if most else 1.0
        runs = [
            simulated(SYSTEMS[name], requests, compressible=share, seed=seed) for seed in _SEEDS
        ]
        p99_s = median(run.p99_ttft_s for run in runs)
        use = median(run.utilisation for run in runs)
        lag = f"engines at most {1000 * seen.lag_s:.0f} ms late; p_c {share:.2f}"
        yield at_most(
            f"{name}: P99 TTFT, simulated over live, off by",
            abs(p99_s / seen.p99_ttft_s - 1),
            _P99_WITHIN,
            f"{p99_s:.2f} s, live {seen.p99_ttft_s:.2f} s; {lag}",
        )
        yield at_most(
            f"{name}: use of slots, simulated over live, off by",
            abs(use / seen.utilisation - 1),
            _USE_WITHIN,
            f"{100 * use:.1f} %, live {100 * seen.utilisation:.1f} %",
        )
