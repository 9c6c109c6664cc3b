"""What a valid configuration asks for and does not get yet, said in one line each."""

from gateway.settings.config import Config, EntitlementConfig
from gateway.settings.fleet import ModelConfig

BUILT_POLICIES = frozenset({"least-loaded"})
"""Scheduling policies that bind workers today; the others fall back to least-loaded."""
BUILT_PROFILES = frozenset({"default"})

_LIMITS = ("slo_target_ms", "tokens_per_second", "kv_cache_gib", "concurrency", "max_concurrency")


def not_enforced(config: Config) -> list[str]:
    """Settings that are read and have no effect in this version, for people to read."""
    notices = [notice for model in config.models for notice in _model(model)]
    if config.state.fail_mode != "local_share":
        notices.append("state.fail_mode is read but not enforced yet: limits are per process")
    for entitlement in config.entitlements:
        notices.extend(_entitlement(entitlement))
    return notices


def remarks(config: Config) -> list[str]:
    """What is in force and may surprise."""
    found = []
    if not config.entitlements:
        found.append("no entitlements: the gateway is open to any key, or none")
    if config.server.admin_key is None:
        found.append("no server.admin_key: the admin routes are closed")
    found.extend(
        f"model {model.name}: boundary.b_short has no effect with one pool"
        for model in config.models
        if len(model.pools) == 1 and model.boundary.b_short
    )
    found.extend(
        f"entitlement {entitlement.name}: no api_keys, so nobody can use it"
        for entitlement in config.entitlements
        if not entitlement.api_keys
    )
    return found


def _model(model: ModelConfig) -> list[str]:
    found = []
    if model.compression.enabled:
        found.append(f"model {model.name}: compression is read but not active yet")
    if model.boundary.auto:
        found.append(f"model {model.name}: boundary.auto is read but not active yet")
    policy = model.scheduling.policy
    if policy not in BUILT_POLICIES:
        found.append(
            f"model {model.name}: scheduling.policy {policy} is read but not active yet; "
            "workers are bound least-loaded"
        )
    elif model.scheduling.profile not in BUILT_PROFILES:
        found.append(f"model {model.name}: scheduling.profile is read but not active yet")
    return found


def _entitlement(entitlement: EntitlementConfig) -> list[str]:
    fields = [name for name in _LIMITS if getattr(entitlement, name) is not None]
    if "service_class" in entitlement.model_fields_set:
        fields.insert(0, "service_class")
    if not fields:
        return []
    names = fields[0] if len(fields) == 1 else f"{', '.join(fields[:-1])} and {fields[-1]}"
    verb = "is" if len(fields) == 1 else "are"
    return [f"entitlement {entitlement.name}: {names} {verb} read but not enforced yet"]
