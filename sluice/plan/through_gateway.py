"""A planned fleet behind the gateway that `-o` configures, in virtual time."""

import os
from math import ceil
from typing import Final

import msgspec
import numpy as np

from gateway.settings import parse
from planner.gateway_file import gateway_file
from planner.records import PlanResult
from simulator.experiments.verdict_records import ArrivalProgress
from simulator.fleet.arrivals import poisson
from simulator.fleet.outcome import FleetOutcome
from simulator.fleet.traffic import Ints, traffic
from simulator.pipeline.records import Gateway
from simulator.pipeline.run import run_pipeline
from simulator.pipeline.tenants import TenantSummary, tenants
from sluice.simulated.fleet import Counting, engine_of, lengths_of
from sluice.simulated.gateway import (
    gateway_of,
    model_named,
    policies_of,
    tenant_traffic,
    tenants_of,
)

GATEWAY: Final = "gateway"
MIN_REQUESTS: Final = 20_000
_SERVICES: Final = 10
"""Mean services that a run should last."""


class GatewayRun(msgspec.Struct, frozen=True, kw_only=True):
    """What each tenant gets of the planned fleet."""

    tenants: tuple[TenantSummary, ...]
    policies: tuple[str, ...]
    shares_said: str
    requests: int
    pool_shares: tuple[tuple[str, float, float], ...]
    """(pool, share of the requests that belong there, share that the estimates sent there)."""
    covered: float | None
    """Share of prefills within their predicted quantile."""

    @property
    def holds(self) -> bool:
        """Whether every promise to every tenant was kept."""
        return not any(tenant.faults for tenant in self.tenants)


def through_gateway(
    plan: PlanResult,
    counting: Counting,
    base: str = "",
    model: str = "",
    *,
    most_requests: int,
    seed: int = 0,
    progress: ArrivalProgress | None = None,
) -> GatewayRun:
    """Serve the workload by the configuration that `-o` writes: its policies, from estimates."""
    question = plan.question
    gateway = planned_gateway(plan, counting, base, model)
    random = np.random.default_rng(seed)
    count = min(most_requests, max(MIN_REQUESTS, ceil(_SERVICES * _running(plan))))
    arrivals = poisson(question.goals.rate_per_s, count, random)
    shares = tenants_of(gateway.entitlements, question.workload)
    requests = tenant_traffic(
        traffic(lengths_of(question.workload), arrivals, random), shares, random
    )
    found = run_pipeline(
        gateway,
        requests,
        seed=seed,
        progress=None if progress is None else lambda n: progress(GATEWAY, n, total=count),
    )
    return GatewayRun(
        tenants=tenants(gateway, found, question.goals.ttft_s),
        policies=policies_of(gateway),
        shares_said=shares.said,
        requests=count,
        pool_shares=_pool_shares(plan, found.fleet, requests.traffic.total_tokens),
        covered=found.covered,
    )


def _pool_shares(
    plan: PlanResult, found: FleetOutcome, total_tokens: Ints
) -> tuple[tuple[str, float, float], ...]:
    pools = plan.chosen.pools
    belongs = np.searchsorted(np.array(plan.chosen.boundaries), total_tokens, side="left")
    return tuple(
        (pool.name, float((belongs == i).mean()), float((found.pool == i).mean()))
        for i, pool in enumerate(pools)
    )


_KEYS: Final = {"SLUICE_ADMIN_KEY": "not-served", "SLUICE_KEY_HASH": f"sha256:{'0' * 64}"}
"""The variables of a planned file; a simulation asks for no key."""


def planned_gateway(
    plan: PlanResult, counting: Counting, base: str = "", model: str = ""
) -> Gateway:
    """The gateway that `-o` configures, before the serving nodes and with the plan's p_c.

    Spares replace nodes that are away.
    """
    pools = plan.chosen.pools
    serving = {pool.name: pool.decode_serving for pool in pools}
    serving |= {f"{p.name}/prefill": p.phases.prefill_serving for p in pools if p.phases}
    urls = {
        name: [f"http://{name.replace('/', '-')}-{i}.invalid:8000" for i in range(count)]
        for name, count in serving.items()
    }
    text = gateway_file(plan, urls, base, model)
    config = parse(text, "the planned file", {**os.environ, **_KEYS})
    served = model_named(config, model or None, "the planned file")
    compressible = plan.question.compressed_share(plan.chosen)
    node = {pool.name: pool.node for pool in pools}
    engines = tuple(
        engine_of(
            node[routed := name.removesuffix("/prefill")],
            served.pools[routed].max_model_len,
            counting,
            max_num_seqs=each.max_num_seqs,
        )
        for name, each in served.all_pools.items()
    )
    return msgspec.structs.replace(
        gateway_of(config, served, pools[0].node, counting=counting, compressible=compressible),
        profiles=engines,
    )


def _running(plan: PlanResult) -> float:
    """Sequences in service at once; by Little's law the requests of one mean service."""
    return sum(p.utilisation * p.slots_per_node * p.serving_nodes for p in plan.chosen.pools)
