"""Configuration -> tenancy, and the shapes and terms of token pools, for policy and adapters.

A model is managed if one of its entitlements states a service class or a limit. A model that is
not managed only checks keys: its requests are counted and spill over, but are never refused for
load.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from gateway.admission.capacity import WorkerShare
from gateway.admission.entitlement_terms import GIB, ModelShape, terms_from
from gateway.admission.terms import Terms
from gateway.fleet.progress import DECODE_TOKENS_PER_S
from gateway.records.entitlement import PROFILES, Entitlement
from gateway.records.limit import Limit, budget_limits, key_limits
from gateway.records.request import TenantKey
from gateway.records.tenancy import FileEntitlement, FileTenant, TenancyFile
from gateway.settings.config import Config
from gateway.settings.model import ModelConfig, PoolConfig
from gateway.settings.tenants import (
    EntitlementConfig,
    TenantConfig,
    TenantKeyConfig,
    stated_budgets,
    stated_limits,
)

LIMITS = (
    *("slo_target_ms", "tokens_per_second", "max_tokens_per_second", "kv_cache_gib"),
    *("max_kv_cache_gib", "concurrency", "max_concurrency"),
)


def managed(config: Config, model: ModelConfig) -> bool:
    """Whether an entitlement of the model states a class or a limit, so load may be refused.

    Limits of tenants and keys are counted where a lease is taken, so with them every model is.
    """
    return limits_tenants(config) or any(
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
    currency = config.currency
    found = {
        ("tenant", t.name): budget_limits("tenant", t.name, stated_budgets(t.budgets), currency)
        for t in config.tenants
    }
    for e in config.entitlements:
        budgets = stated_budgets(e.budgets)
        found["entitlement", e.name] = budget_limits("entitlement", e.name, budgets, currency)
    return {owner: limits for owner, limits in found.items() if limits}


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
    pools = tuple(model.pools.values())
    return Terms(
        slots=tuple(pool.slots for pool in pools),
        kv_bytes=tuple(_kv_bytes(model, pool) * pool.worker_count for pool in pools),
        tokens_per_s=sum(share.tokens_per_s * p.worker_count for p, share in _shares(model)),
        largest_tokens=max(pool.max_model_len for pool in pools),
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
    rates = [(share, pool.worker_count or 1) for pool, share in _shares(model)]
    tokens_per_s = sum(share.tokens_per_s * workers for share, workers in rates)
    slots = sum(share.slots * workers for share, workers in rates)
    return tokens_per_s / slots if tokens_per_s else DECODE_TOKENS_PER_S


def worker_shares(model: ModelConfig) -> tuple[WorkerShare, ...]:
    """By pool, the capacity that one worker adds to the model."""
    return tuple(share for _, share in _shares(model))


def shape_of(model: ModelConfig) -> ModelShape:
    """The parts of a model that its entitlements' terms depend on."""
    pools = tuple(model.pools.values())
    return ModelShape(
        name=model.name,
        pools=tuple(model.pools),
        # A pool that is empty now has a worker once it serves.
        slots=tuple(pool.slots or pool.max_num_seqs for pool in pools),
        max_slots=tuple(pool.max_num_seqs * pool.replica_bounds[1] for pool in pools),
        max_kv_bytes=sum(_max_kv_bytes(model, pool) for pool in pools),
        max_tokens_per_s=sum(s.tokens_per_s * s.replicas[1] for s in worker_shares(model)),
    )


def tenancy_file(config: Config) -> TenancyFile:
    """The part of a configuration in tenants, entitlements and keys."""
    keys: dict[str, list[TenantKey]] = {}
    for key in tenant_keys(config):
        keys.setdefault(key.tenant, []).append(key)
    return TenancyFile(
        tenants={
            tenant.name: FileTenant(
                display_name=tenant.display_name,
                labels=tenant.labels,
                entitlements=tenant.entitlements,
                suspended=tenant.suspended,
                keys=tuple(keys.get(tenant.name, ())),
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
    own: dict[str, list[str]] = {}
    for entitlement in config.entitlements:
        own.setdefault(entitlement.tenant, []).append(entitlement.name)
    return {tenant: tuple(names) for tenant, names in own.items()}


def tenant_keys(config: Config) -> list[TenantKey]:
    """Every key of the file's tenants."""
    own = entitlements_by_tenant(config)
    return [
        _tenant_key(tenant, key, own.get(tenant.name, ()), config.currency)
        for tenant in config.tenants
        for key in tenant.keys
    ]


def _tenant_key(
    tenant: TenantConfig, key: TenantKeyConfig, own: Sequence[str], currency: str
) -> TenantKey:
    listed = tenant.entitlements if key.entitlements is None else key.entitlements
    stated = stated_limits(key)
    return TenantKey(
        tenant=tenant.name,
        name=key.name,
        sha256=bytes.fromhex(key.sha256.removeprefix("sha256:")),
        models=None if key.models is None else frozenset(key.models),
        entitlements=tuple(own) if listed is None else listed,
        only_listed=listed is not None,
        expires_unix_s=None if key.expires_at is None else key.expires_at.timestamp(),
        suspended=key.suspended,
        stated=stated,
        limits=key_limits(tenant.name, key.name, stated, currency),
    )


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
    said = entitlement.model_dump(mode="json", exclude_defaults=True)
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _shares(model: ModelConfig) -> list[tuple[PoolConfig, WorkerShare]]:
    stated = all(pool.tokens_per_second is not None for pool in model.pools.values())
    return [
        (
            pool,
            WorkerShare(
                slots=pool.max_num_seqs,
                kv_bytes=_kv_bytes(model, pool),
                tokens_per_s=(pool.tokens_per_second or 0.0) if stated else 0.0,
                replicas=pool.replica_bounds,
                cooldown_s=pool.replicas.cooldown_s,
            ),
        )
        for pool in model.pools.values()
    ]


def _kv_bytes(model: ModelConfig, pool: PoolConfig) -> int:
    """KV cache bytes of one worker; 0 if unstated, or without kv_bytes_per_token."""
    if model.kv_bytes_per_token is None or pool.kv_cache_gib is None:
        return 0
    return round(pool.kv_cache_gib * GIB)


def _max_kv_bytes(model: ModelConfig, pool: PoolConfig) -> int:
    """KV cache bytes of a pool at most replicas; if unstated, the need of all slots when full."""
    filled = pool.max_num_seqs * pool.max_model_len * (model.kv_bytes_per_token or 0)
    return (_kv_bytes(model, pool) or filled) * pool.replica_bounds[1]
