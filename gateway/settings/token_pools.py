"""Configuration -> tenancy, and the shapes and terms of token pools, for policy and adapters.

A model is managed if one of its entitlements states a service class or a limit, or a cluster's
controller may. A model that is not managed only checks keys: its requests are counted and spill
over, but are never refused for load.
"""

import hashlib
import json
from collections.abc import Iterator
from itertools import count
from typing import Any

from gateway.admission.capacity import WorkerShare, capacity_of, max_capacity
from gateway.admission.entitlement_terms import GIB, ModelShape, terms_from
from gateway.admission.terms import Terms
from gateway.fleet.fleet import DECODE_TOKENS_PER_S
from gateway.records.entitlement import PROFILES, Entitlement
from gateway.records.limit import Limit, Scope, budget_limits, key_limits
from gateway.records.request import TenantKey
from gateway.records.tenancy import FileEntitlement, FileTenant, TenancyFile
from gateway.settings.config import Config
from gateway.settings.model import ModelConfig
from gateway.settings.tenants import (
    Budgets,
    EntitlementConfig,
    stated_budgets,
    stated_limits,
)

LIMITS = (
    *("slo_target_ms", "tokens_per_second", "max_tokens_per_second", "kv_cache_gib"),
    *("max_kv_cache_gib", "concurrency", "max_concurrency"),
)


def managed(config: Config, model: ModelConfig) -> bool:
    """Whether an entitlement of the model states a class or a limit, so load may be refused.

    Limits of tenants and keys are counted where a lease is taken, so with them every model is. So
    is it with a cluster's controller, which may grant any model's entitlements limits.
    """
    may_be = config.state.controller is not None or limits_tenants(config)
    return may_be or any(
        "service_class" in e.model_fields_set
        or e.budgets
        or any(getattr(e, name) is not None for name in LIMITS)
        for e in config.entitlements
        if e.model == model.name
    )


def limits_tenants(config: Config) -> bool:
    """Whether a tenant or a key has limits of its own, over all models."""
    return any(
        tenant.budgets
        or any(key.budgets or key.max_concurrency or key.requests_per_minute for key in tenant.keys)
        for tenant in config.tenants
    )


def limits_of(config: Config) -> dict[tuple[str, str], tuple[Limit, ...]]:
    """Budgets of entitlements and tenants, by which of both and by name."""
    owners: list[tuple[Scope, str, Budgets]] = []
    owners += [("tenant", tenant.name, tenant.budgets) for tenant in config.tenants]
    owners += [("entitlement", e.name, e.budgets) for e in config.entitlements]
    return {
        (scope, name): budget_limits(scope, name, stated_budgets(budgets), config.currency)
        for scope, name, budgets in owners
        if budgets
    }


def shared_limits(config: Config) -> list[Limit]:
    """All budgets of entitlements and tenants."""
    return [limit for limits in limits_of(config).values() for limit in limits]


def every_limit(config: Config) -> list[Limit]:
    """All limits of the file that span models: of keys, entitlements and tenants."""
    return shared_limits(config) + [limit for key in tenant_keys(config) for limit in key.limits]


def base_terms(model: ModelConfig) -> Terms:
    """A model's admission rules, and its capacity with every listed worker ready.

    `mean_slo_ms` 0 means the mean over entitlements; `kv_bytes` 0 means as the engines report.
    """
    listed = [[share.kv_bytes] * many for share, many in _workers(model)]
    capacity = capacity_of(worker_shares(model), listed, prefill_places(model))
    return Terms(
        slots=capacity.slots,
        kv_bytes=capacity.kv_bytes,
        tokens_per_s=capacity.tokens_per_s,
        largest_tokens=max(pool.max_model_len for pool in model.pools.values()),
        mean_slo_ms=model.admission.mean_slo_ms or 0.0,
        headroom=model.admission.headroom,
        spill_queue=model.spill_queue,
        reclaim_spot=model.admission.reclaim == "cancel",
        profile=PROFILES[model.admission.profile],
    )


def slot_tokens_per_s(model: ModelConfig) -> float:
    """Average tokens/s of one slot of the model.

    If pools state no rate, the slowest decode rate of an engine.
    """
    rates = [(share, workers or 1) for share, workers in _workers(model)]
    tokens_per_s = sum(share.tokens_per_s * workers for share, workers in rates)
    slots = sum(share.slots * workers for share, workers in rates)
    return tokens_per_s / slots if tokens_per_s else DECODE_TOKENS_PER_S


def _workers(model: ModelConfig) -> Iterator[tuple[WorkerShare, int]]:
    """By pool, what one worker adds, and how many are listed."""
    for share, pool in zip(worker_shares(model), model.all_pools.values(), strict=True):
        yield share, pool.worker_count


def prefill_places(model: ModelConfig) -> dict[int, int]:
    """Of pools in phases: place in `pools` -> place of their prefill engines in `all_pools`."""
    phased = [place for place, pool in enumerate(model.pools.values()) if pool.only_decodes]
    return dict(zip(phased, count(len(model.pools)), strict=False))


def worker_shares(model: ModelConfig) -> tuple[WorkerShare, ...]:
    """By pool, of all pools, the capacity that one worker adds to the model.

    No KV cache where it is not stated, or without kv_bytes_per_token.
    """
    pools = model.all_pools.values()
    stated = all(pool.tokens_per_second is not None for pool in pools)
    return tuple(
        WorkerShare(
            slots=pool.max_num_seqs,
            kv_bytes=round((pool.kv_cache_gib or 0) * GIB) if model.kv_bytes_per_token else 0,
            tokens_per_s=(pool.tokens_per_second or 0.0) if stated else 0.0,
            replicas=pool.replica_bounds,
            cooldown_s=pool.replicas.cooldown_s,
        )
        for pool in pools
    )


def shape_of(model: ModelConfig) -> ModelShape:
    """The parts of a model that its entitlements' terms depend on.

    Where a pool's KV cache is not stated, it has what all of its slots need when full.
    """
    pools, shares, prefills = model.pools.values(), worker_shares(model), prefill_places(model)
    # A pool that is empty now has a worker once it serves.
    serving = capacity_of(
        shares, [[0] * (workers or 1) for _, workers in _workers(model)], prefills
    )
    most = max_capacity(shares, prefills)
    filled = [p.max_num_seqs * p.max_model_len * (model.kv_bytes_per_token or 0) for p in pools]
    return ModelShape(
        name=model.name,
        pools=tuple(model.pools),
        slots=serving.slots,
        max_slots=most.slots,
        max_kv_bytes=sum(
            (s.kv_bytes or full) * s.replicas[1] for s, full in zip(shares, filled, strict=False)
        ),
        max_tokens_per_s=most.tokens_per_s,
    )


def tenancy_file(config: Config) -> TenancyFile:
    """The part of a configuration in tenants, entitlements and keys."""
    keys = tenant_keys(config)
    return TenancyFile(
        tenants={
            tenant.name: FileTenant(
                display_name=tenant.display_name,
                labels=tenant.labels,
                entitlements=tenant.entitlements,
                suspended=tenant.suspended,
                keys=tuple(key for key in keys if key.tenant == tenant.name),
            )
            for tenant in config.tenants
        },
        entitlements={
            e.name: FileEntitlement(
                fields=fields_of(e),
                digests=tuple(key.removeprefix("sha256:") for key in e.api_keys),
                section=digest_of(e),
                place=place,
            )
            for place, e in enumerate(config.entitlements, start=1)
        },
        order=entitlements_by_tenant(config),
        currency=config.currency,
        unix_s=config.origin.modified_unix_s,
    )


def entitlements_by_tenant(config: Config) -> dict[str, tuple[str, ...]]:
    """Names of the file's entitlements by tenant, in the file's order."""
    own: dict[str, tuple[str, ...]] = {}
    for entitlement in config.entitlements:
        own[entitlement.tenant] = (*own.get(entitlement.tenant, ()), entitlement.name)
    return own


def tenant_keys(config: Config) -> list[TenantKey]:
    """Every key of the file's tenants."""
    own = entitlements_by_tenant(config)
    keys = []
    for tenant in config.tenants:
        for key in tenant.keys:
            listed = tenant.entitlements if key.entitlements is None else key.entitlements
            stated = stated_limits(key)
            keys.append(
                TenantKey(
                    tenant=tenant.name,
                    name=key.name,
                    sha256=bytes.fromhex(key.sha256.removeprefix("sha256:")),
                    models=None if key.models is None else frozenset(key.models),
                    entitlements=own.get(tenant.name, ()) if listed is None else listed,
                    only_listed=listed is not None,
                    queue_status=key.queue_status,
                    expires_unix_s=None if key.expires_at is None else key.expires_at.timestamp(),
                    suspended=key.suspended,
                    stated=stated,
                    limits=key_limits(tenant.name, key.name, stated, config.currency),
                )
            )
    return keys


def terms_of(entitlement: EntitlementConfig, model: ModelConfig, created: int = 0) -> Entitlement:
    """An entitlement's terms. Raises BadTerms, but never for a checked configuration."""
    return terms_from(fields_of(entitlement), shape_of(model), created)


def fields_of(entitlement: EntitlementConfig) -> dict[str, Any]:
    """The fields that are given, as JSON, without keys and budgets: input of `terms_from`."""
    return entitlement.model_dump(
        mode="json", exclude={"api_keys", "budgets"}, exclude_unset=True, exclude_none=True
    )


def digest_of(entitlement: EntitlementConfig) -> str:
    """SHA-256 of a section, in hex; layout and fields at their default do not change it."""
    stated = entitlement.model_dump(mode="json", exclude_defaults=True)
    return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()
