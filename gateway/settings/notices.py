"""Notices about settings of a valid configuration that may surprise, one line each."""

from collections.abc import Iterator

from gateway.fleet.model_runtime import PRIORITY_FLAGS
from gateway.records.entitlement import BACKFILL
from gateway.settings.config import Config
from gateway.settings.model import ModelConfig
from gateway.settings.tenants import EntitlementConfig
from gateway.settings.token_pools import every_limit, managed, tenant_keys, terms_of


def remarks(config: Config) -> list[str]:
    """One notice per surprising setting."""
    found = []
    if not config.entitlements and not config.auth.jwt:
        found.append("no entitlements: the gateway is open to any key, or none")
    if not config.administered:
        reads = config.server.viewer_key is not None or config.server.admin_keys
        closed = "entitlements cannot be changed" if reads else "the admin routes are closed"
        found.append(f"no server.admin_key: {closed}")
    for model in config.models:
        found.extend(_about_model(config, model))
    found.extend(_about_money(config))
    by_name = {model.name: model for model in config.models}
    used = {name for key in tenant_keys(config) for name in key.entitlements}
    by_tokens = bool(config.auth.jwt)
    for entitlement in config.entitlements:
        opened = by_tokens or bool(entitlement.api_keys) or entitlement.name in used
        about = _about_entitlement(entitlement, by_name[entitlement.model], opened=opened)
        found.extend(f"entitlement {entitlement.name}: {line}" for line in about)
    return found


def _about_money(config: Config) -> Iterator[str]:
    spenders = {
        limit.name.partition("/")[0] if limit.scope == "key" else limit.name
        for limit in every_limit(config)
        if limit.unit == "money"
    }
    by_hour = {m.name for m in config.models if any(p.gpu_hour for p in m.pools.values())}
    free = {model.name for model in config.models if model.price is None} - by_hour
    for entitlement in config.entitlements:
        if entitlement.model in free and spenders & {entitlement.tenant, entitlement.name}:
            yield (
                f"entitlement {entitlement.name}: a budget is in money, and the model "
                f"{entitlement.model} has no price, so that its use is free"
            )


def _about_model(config: Config, model: ModelConfig) -> Iterator[str]:
    if len(model.pools) == 1 and model.boundary.b_short:
        yield f"model {model.name}: boundary.b_short has no effect with one pool"
    if model.engine_priority != "none":
        yield (
            f"model {model.name}: engine_priority: {model.engine_priority} has no effect unless "
            f"every engine is started with {PRIORITY_FLAGS[model.engine_priority]}; some versions "
            "refuse each request instead"
        )
    if config.entitlements and not managed(config, model):
        yield (
            f"model {model.name}: no entitlement states a service_class or a limit, so keys are "
            "checked and nobody is refused for load"
        )


def _about_entitlement(
    entitlement: EntitlementConfig, model: ModelConfig, *, opened: bool
) -> Iterator[str]:
    if not opened:
        yield "no api_keys, so nobody can use it"
    service_class = entitlement.service_class
    if service_class in BACKFILL and entitlement.concurrency is not None:
        yield f"{service_class} reserves nothing: concurrency only says where its burst begins"
    if service_class == "guaranteed":
        baseline = terms_of(entitlement, model).baseline
        none = [name for name, part in zip(model.pools, baseline, strict=True) if not part]
        if none:
            yield f"no baseline in {', '.join(none)}, so what belongs there is refused"
