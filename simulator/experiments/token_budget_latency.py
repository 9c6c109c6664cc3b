"""Latency of token-budget pool routing: one pool against two (token-budget paper, Table 3).

The paper's engine (appendix A): t_iter = W + H n_active, one prefill chunk of 512 tokens per
iteration for all prompts, KV blocks of final lengths. Its table stems from 10,000 requests at
1,000/s: ten seconds, a fraction of one long service, so queues have hardly begun to form. A
longer run (by `requests`) of the same fleets gives a different result.
"""

from typing import Final, Literal

import msgspec
import numpy as np

from simulator.engine.profiles import PROFILES
from simulator.fleet import arrivals
from simulator.fleet.fleet import FleetSpec, PoolSpec, simulate
from simulator.fleet.summary import summarise
from simulator.fleet.traffic import Breakpoints, SplitLengths, traffic

WINDOW_TOKENS: Final = 65_536
BOUNDARY_TOKENS: Final = 8192
_SHORT_SLOTS: Final = 128
_LONG_SLOTS: Final = 16
_PAPER: Final = PROFILES["llama-3-70b-a100-reserved"]


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """A row of Table 3 after a warm-up of 20 %, and whether the pools had settled."""

    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    wait_p99_s: dict[str, float]
    """By pool."""
    drifting: tuple[str, ...]
    """Pools whose waits rise through the run."""


def pool(
    name: str, instances: int, window: int, slots: int, prefill: Literal["shared", "independent"]
) -> PoolSpec:
    """Instances of the paper's engine; the boundary is the window."""
    profile = msgspec.structs.replace(
        _PAPER,
        name=f"{_PAPER.name}-{window}-{prefill}",
        prefill=prefill,
        max_model_len=window,
        max_num_seqs=slots,
    )
    boundary = None if window == WINDOW_TOKENS else window
    return PoolSpec(name=name, instances=instances, profile=profile, boundary_tokens=boundary)


def latencies(
    breakpoints: Breakpoints,
    *,
    output_mean: float,
    output_std: float,
    one: int,
    short: int,
    long: int,
    rate_per_s: float = 1000.0,
    requests: int = 10_000,
    prefill: Literal["shared", "independent"] = "shared",
) -> tuple[Latency, Latency]:
    """One pool of `one` instances, and a short and a long one, on the same requests."""
    random = np.random.default_rng(0)
    lengths = SplitLengths(breakpoints, output_mean, output_std)
    asked = traffic(lengths, arrivals.poisson(rate_per_s, requests, random), random)
    wide = pool("all", one, WINDOW_TOKENS, _LONG_SLOTS, prefill)
    pools = (
        pool("short", short, BOUNDARY_TOKENS, _SHORT_SLOTS, prefill),
        pool("long", long, WINDOW_TOKENS, _LONG_SLOTS, prefill),
    )
    found = []
    for spec in (FleetSpec(pools=(wide,)), FleetSpec(pools=pools)):
        seen = summarise(spec, simulate(spec, asked))
        found.append(
            Latency(
                ttft_p50_s=seen.whole.ttft.p50_s,
                ttft_p99_s=seen.whole.ttft.p99_s,
                tpot_p50_s=seen.whole.tpot.p50_s,
                tpot_p99_s=seen.whole.tpot.p99_s,
                wait_p99_s={p.name: p.wait.p99_s for p in seen.pools},
                drifting=tuple(p.name for p in seen.pools if p.drifting),
            )
        )
    return found[0], found[1]
