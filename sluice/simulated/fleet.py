"""Build a simulated fleet and its traffic from a command line, a sluice.yaml or a plan."""

import json
from typing import Literal

import msgspec
import numpy as np

from gateway.settings import ModelConfig
from gateway.settings.model import EnginesConfig
from planner.errors import PlanError
from planner.fleets import pool_names
from planner.phases import decode_node
from planner.profile import NodeProfile
from planner.records import FleetPlan
from planner.workload.workload import Workload
from simulator.engine.profiles import PAPER_WINDOW_TOKENS, EngineProfile
from simulator.fleet import arrivals
from simulator.fleet.fleet import FleetSpec, PoolSpec
from simulator.fleet.spec import PrefillSpec
from simulator.fleet.traffic import CdfLengths, Floats, Lengths, PairLengths, Traffic, traffic

Counting = Literal["paged", "slots"]
Arrivals = Literal["poisson", "gamma", "bursty", "recorded"]

_GIB = 1 << 30
_LONGEST_PRACTICAL = 20_000_000
"""Most requests of a run; their columns take 2 GB."""


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """The arrival process, and how many requests to draw."""

    arrivals: Arrivals
    rate_per_s: float
    requests: int
    cv: float = 2.0
    """For `gamma`: coefficient of variation of the gaps."""
    peak: float = 3.0
    """For `bursty`: the rate in a burst over the mean."""
    burst_share: float = 0.2
    burst_s: float = 30.0


def engine_of(
    node: NodeProfile,
    window_tokens: int,
    counting: Counting,
    *,
    max_num_seqs: int | None = None,
    kv_tokens: int | None = None,
) -> EngineProfile:
    """The engine model of a node; raises PlanError if the window does not fit its KV cache.

    paged: as vLLM, KV by block and prompts packed. slots: as the papers, a window of KV for each
    sequence and one chunk per iteration for each prompt; prefill costs iterations only.
    """
    kv_blocks = (node.kv_tokens if kv_tokens is None else kv_tokens) // node.block_tokens
    blocks = -(-window_tokens // node.block_tokens)
    if kv_blocks < blocks:
        raise PlanError(
            f"a window of {window_tokens} tokens does not fit the KV cache of "
            f"{kv_blocks * node.block_tokens} tokens",
            "give a smaller window or a larger node",
        )
    slots = max_num_seqs or (node.max_num_seqs if counting == "paged" else kv_blocks // blocks)
    paged = counting == "paged"
    return EngineProfile(
        name=node.name,
        w_s=node.w_s,
        h_s=node.h_s_per_token * PAPER_WINDOW_TOKENS,
        h_s_per_token=node.h_s_per_token,
        timing="kv",
        prefill="packed" if paged else "independent",
        load="growing" if paged else "reserved",
        prefill_s_per_token=node.prefill_s_per_token if paged else 0.0,
        attention_s_per_pair=node.attention_s_per_pair if paged else 0.0,
        max_num_batched_tokens=max(node.max_num_batched_tokens, slots),
        chunk_tokens=node.chunk_tokens,
        kv_blocks=kv_blocks,
        block_tokens=node.block_tokens,
        max_model_len=window_tokens,
        max_num_seqs=slots,
        prefix_cache_tokens=0,
    )


def fleet_of(
    nodes: str,
    b_short: str,
    node: NodeProfile,
    *,
    window_tokens: int,
    counting: Counting,
    gamma: float = 1.0,
    compressible: float = 1.0,
    dispatch: str = "least-loaded",
    spill_queue: int | None = None,
) -> FleetSpec:
    """Build a fleet of `nodes` such as 80+2, `b_short` such as 4096 or 1536,8192."""
    counts = _numbers("--fleet", nodes.replace("+", ","))
    boundaries = _numbers("--b-short", b_short) if b_short else []
    if len(boundaries) != len(counts) - 1:
        raise PlanError(
            f"{len(counts)} pools and {len(boundaries)} boundaries",
            "give one boundary fewer than pools: --fleet 80+2 --b-short 4096",
        )
    windows = [*boundaries, window_tokens]
    pools = tuple(
        PoolSpec(
            name=name,
            instances=count,
            profile=engine_of(node, window, counting),
            boundary_tokens=boundary,
        )
        for name, count, window, boundary in zip(
            pool_names(len(counts)), counts, windows, [*boundaries, None], strict=True
        )
    )
    return _spec(pools, gamma, compressible, dispatch, spill_queue)


def fleet_of_model(
    model: ModelConfig,
    node: NodeProfile,
    *,
    counting: Counting,
    compressible: float = 1.0,
) -> FleetSpec:
    """The pools of a sluice.yaml: windows, slots, workers, KV cache, boundaries, spillover.

    The node gives the timing, and the KV cache if the file does not. Compression counts if it is
    enabled.
    """
    boundaries = (*model.boundaries, None)
    pools = []
    for (name, pool), boundary in zip(model.pools.items(), boundaries, strict=True):
        pools.append(
            PoolSpec(
                name=name,
                instances=max(1, pool.worker_count, pool.replica_bounds[0]),
                profile=engine_of_pool(model, pool, pool.max_model_len, node, counting),
                boundary_tokens=boundary,
            )
        )
    gamma = model.boundary.gamma if model.compression.enabled else 1.0
    spec = _spec(tuple(pools), gamma, compressible, "least-loaded", model.spill_queue)
    return msgspec.structs.replace(spec, max_cut=model.compression.max_cut)


def engine_of_pool(
    model: ModelConfig,
    pool: EnginesConfig,
    window_tokens: int,
    node: NodeProfile,
    counting: Counting,
) -> EngineProfile:
    """The engine model of a pool, or of its prefill engines: their slots and KV cache."""
    kv_tokens = None
    if pool.kv_cache_gib is not None:
        per_token = model.kv_bytes_per_token or node.kv_bytes_per_token
        kv_tokens = int(pool.kv_cache_gib * _GIB / per_token) if per_token else None
    slots = pool.max_num_seqs
    return engine_of(node, window_tokens, counting, max_num_seqs=slots, kv_tokens=kv_tokens)


def fleet_of_plan(
    planned: FleetPlan,
    *,
    counting: Counting,
    compressible: float = 1.0,
    max_cut: float = 1.0,
    dispatch: str = "least-loaded",
    transfer_bytes_per_s: float | None = None,
) -> FleetSpec:
    """A planned fleet in the form that `simulator.experiments.fleet_verdicts.judge` takes.

    Contains serving nodes only: spares replace nodes that are away. Raises PlanError for a fleet
    without pools.
    """
    if not planned.feasible:
        raise PlanError(f"{planned.label} is no fleet", "simulate one that meets the goals")
    pools = []
    for pool in planned.pools:
        profile, prefill = engine_of(pool.node, pool.window_tokens, counting), None
        if pool.phases is not None and transfer_bytes_per_s is not None:
            prefill = PrefillSpec(
                instances=pool.phases.prefill_serving,
                profile=profile,
                transfer_s_per_token=pool.node.kv_bytes_per_token / transfer_bytes_per_s,
            )
            profile = engine_of(decode_node(pool.node), pool.window_tokens, counting)
        pools.append(
            PoolSpec(
                name=pool.name,
                instances=pool.decode_serving,
                profile=profile,
                boundary_tokens=pool.boundary_tokens,
                prefill=prefill,
            )
        )
    spec = _spec(tuple(pools), planned.gamma, compressible, dispatch, None)
    return msgspec.structs.replace(spec, max_cut=max_cut)


def lengths_of(workload: Workload) -> Lengths:
    """A workload of the planner as a distribution to draw from."""
    if workload.pairs is not None:
        pairs = workload.pairs
        return PairLengths(pairs.prompts, pairs.answers, pairs.weights)
    return CdfLengths(workload.as_cdf().points, workload.input_share)


def traffic_of(workload: Workload, stream: Stream, random: np.random.Generator) -> Traffic:
    """Requests of a workload as a stream; PlanError says what to change."""
    if not 1 <= stream.requests <= _LONGEST_PRACTICAL:
        raise PlanError(
            f"{stream.requests} requests", f"ask for 1 to {_LONGEST_PRACTICAL:,} of them"
        )
    try:
        return traffic(lengths_of(workload), _times(stream, random), random)
    except ValueError as error:
        raise PlanError(str(error), "see `sluice simulate --help`") from None


def _times(stream: Stream, random: np.random.Generator) -> Floats:
    rate, count = stream.rate_per_s, stream.requests
    if stream.arrivals == "gamma":
        return arrivals.gamma(rate, stream.cv, count, random)
    if stream.arrivals == "bursty":
        return arrivals.bursty(
            rate,
            count,
            random,
            peak=stream.peak,
            share=stream.burst_share,
            burst_s=stream.burst_s,
        )
    return arrivals.poisson(rate, count, random)


def _spec(
    pools: tuple[PoolSpec, ...],
    gamma: float,
    compressible: float,
    dispatch: str,
    spill_queue: int | None,
) -> FleetSpec:
    if not gamma >= 1 or not 0 <= compressible <= 1:
        raise PlanError(
            f"gamma {gamma:g} and p_c {compressible:g}",
            "gamma is at least 1, p_c between 0 and 1",
        )
    try:
        return FleetSpec(
            pools=pools,
            gamma=gamma,
            compressible=compressible,
            dispatch=dispatch,
            spill_queue=spill_queue,
        )
    except ValueError as error:
        raise PlanError(str(error), "see `sluice simulate --help`") from None


def _numbers(flag: str, text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise PlanError(f"{flag} {text}", "give whole numbers of at least 1")
    return found


def plain(document: object) -> object:
    """Convert structs to JSON-ready builtins; NaN becomes null."""
    return json.loads(msgspec.json.encode(document))
