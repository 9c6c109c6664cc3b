"""Build a simulated gateway from a sluice.yaml: the gateway's own objects, with engine models."""

from collections.abc import Sequence
from typing import get_args

import msgspec
import numpy as np

from gateway.records.entitlement import Entitlement
from gateway.records.request import Category
from gateway.settings import Config, ModelConfig
from gateway.settings.token_pools import base_terms, managed, terms_of
from gateway.wiring.models import served_model
from planner.errors import PlanError
from planner.profile import NodeProfile
from planner.workload.workload import Workload
from simulator.fleet.traffic import Random, Traffic
from simulator.pipeline.records import (
    KV_TOKENS_PER_S,
    Gateway,
    TenantTraffic,
    with_tenants,
)
from sluice.simulated.fleet import Counting, engine_of_pool, fleet_of_model
from sluice.simulated.recorded import RecordedTraffic

_NAMES = {
    "Quartz": "quartz",
    "RankGroup": "bfio",
    "Sticky": "sticky",
    "RoundRobin": "round-robin",
    "LeastLoaded": "least-loaded",
}
_CATEGORIES: dict[str, Category] = {name: name for name in get_args(Category)}


class Tenants(msgspec.Struct, frozen=True, kw_only=True):
    """How the requests are shared among a model's entitlements."""

    names: tuple[str, ...]
    shares: tuple[float, ...]
    said: str
    """What the shares come from, in words."""


def gateway_of(
    config: Config,
    model: ModelConfig,
    node: NodeProfile,
    *,
    counting: Counting,
    compressible: float = 1.0,
) -> Gateway:
    """One model of a file as the gateway serves it: its policies, admission and compression.

    A model that only observes is simulated as if it enforced: nothing else could be proven of it.
    """
    quiet = model.scheduling.model_copy(update={"shadow": False})
    enforced = model.model_copy(update={"mode": "enforce", "scheduling": quiet})
    spec = fleet_of_model(model, node, counting=counting, compressible=compressible)
    return Gateway(
        served=served_model(config, enforced),
        profiles=(
            *(pool.profile for pool in spec.pools),
            *(
                engine_of_pool(model, pool.prefill, pool.max_model_len, node, counting)
                for pool in model.pools.values()
                if pool.prefill is not None
            ),
        ),
        kv_tokens_per_s=_kv_tokens_per_s(model, node),
        entitlements=entitlements_of(config, model),
        terms=base_terms(model) if managed(config, model) else None,
        compressible=compressible,
    )


def _kv_tokens_per_s(model: ModelConfig, node: NodeProfile) -> float:
    """How fast KV is handed over, by the slowest link that the file states."""
    per_token = model.kv_bytes_per_token or node.kv_bytes_per_token
    links = [pool.transfer.bytes_per_second for pool in model.pools.values() if pool.transfer]
    stated = [link for link in links if link]
    return min(stated) / per_token if stated and per_token else KV_TOKENS_PER_S


def policies_of(gateway: Gateway) -> tuple[str, ...]:
    """In words, what decides in each pool and at the door."""
    served = gateway.served
    pools = ", ".join(
        f"{pool.name} {_NAMES[type(pool.scheduler).__name__]}" for pool in served.fleet.pools
    )
    admission = "by token pool" if gateway.terms is not None else "open"
    compression = "off"
    if served.compression is not None:
        gamma = served.compression.rules.gamma
        compression = f"gamma {gamma:g}, p_c {gateway.compressible:.2g}"
    return (f"scheduling: {pools}", f"admission: {admission}", f"compression: {compression}")


def entitlements_of(config: Config, model: ModelConfig) -> tuple[Entitlement, ...]:
    """The model's entitlements, in order of creation."""
    return tuple(
        terms_of(entitlement, model, place)
        for place, entitlement in enumerate(config.entitlements, start=1)
        if entitlement.model == model.name
    )


def tenants_of(entitlements: Sequence[Entitlement], workload: Workload | None) -> Tenants:
    """Shares by the log's own entitlements, else by what was promised, else equal ones."""
    names = tuple(e.name for e in entitlements) or ("open",)
    if len(names) == 1:
        return Tenants(names=names, shares=(1.0,), said="one tenant")
    logged = workload.entitlements if workload is not None else None
    counts = [0 if logged is None else logged.count(name) for name in names]
    if any(counts):
        shares, said = [float(c) for c in counts], "as the log has them"
    else:
        shares, said = _promised(entitlements)
    total = sum(shares)
    return Tenants(names=names, shares=tuple(s / total for s in shares), said=said)


def _promised(entitlements: Sequence[Entitlement]) -> tuple[list[float], str]:
    rates = [e.tokens_per_s for e in entitlements]
    if all(rates):
        return rates, "in proportion to tokens_per_second"
    slots = [float(sum(e.baseline)) for e in entitlements]
    if all(slots):
        return slots, "in proportion to concurrency"
    return [1.0] * len(entitlements), "equal"


def tenant_traffic(
    traffic: Traffic,
    tenants: Tenants,
    random: Random,
    recorded: RecordedTraffic | None = None,
) -> TenantTraffic:
    """The requests with their tenants and bodies; a recording's own where it tells."""
    if recorded is None:
        return with_tenants(traffic, tenants.shares, random)
    index = {name: i for i, name in enumerate(tenants.names)}
    owners = [index.get(name, -1) for name in recorded.entitlements]
    kinds = [_CATEGORIES.get(kind, "prose") for kind in recorded.categories]
    return with_tenants(
        traffic,
        tenants.shares,
        random,
        entitlement=np.array(owners, dtype=np.int64) if owners else None,
        text_bytes=recorded.text_bytes,
        asked=recorded.asked,
        categories=kinds or None,
    )


def model_named(config: Config, name: str | None, origin: str) -> ModelConfig:
    """The model of a file by name, or its only one; PlanError lists those there are."""
    chosen = [model for model in config.models if name in {None, model.name}]
    if len(chosen) != 1:
        listed = ", ".join(model.name for model in config.models)
        count = len(config.models)
        problem = f"{origin} has no model {name}" if name else f"{origin} has {count} models"
        raise PlanError(problem, f"give --serves with one of: {listed}")
    return chosen[0]
