"""The trace through a simulated gateway: the same configuration, the same engines."""

from typing import Any

import msgspec
import numpy as np
import yaml

from bench.everything.scene import (
    ENGINE,
    RANKS,
    REPLICAS,
    TENANTS,
    RunFigures,
    TraceRequest,
    figures,
)
from bench.everything.systems import Switches, config_of
from gateway.settings import ConfigError, parse
from planner.profile import NodeProfile
from simulator.fleet.traffic import Traffic
from simulator.pipeline.records import TenantTraffic
from simulator.pipeline.run import run_pipeline
from sluice.simulated.gateway import gateway_of

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
