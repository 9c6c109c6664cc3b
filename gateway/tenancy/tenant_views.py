"""Tenants and their keys as administrators see them: keys by name and fingerprint, never more."""

from datetime import UTC, datetime

import msgspec

from gateway.records.limit import KeyLimits
from gateway.records.tenancy import fingerprint
from gateway.tenancy.rights import KeyInForce, TenantInForce


def tenant_fields(tenant: TenantInForce) -> dict[str, object]:
    """A tenant's own fields."""
    given = tenant.entitlements
    return {
        "name": tenant.name,
        "display_name": tenant.display_name,
        "labels": dict(tenant.labels),
        "entitlements": None if given is None else list(given),
        "suspended": tenant.suspended,
    }


def key_row(found: KeyInForce, now_s: float) -> dict[str, object]:
    """A key for people."""
    key = found.key
    ends = key.expires_unix_s
    expired = ends is not None and ends <= now_s
    return {
        "name": key.name,
        "fingerprint": fingerprint(found.sha256),
        "models": None if key.models is None else sorted(key.models),
        "entitlements": list(key.entitlements) if key.only_listed else None,
        "expires_at": None if ends is None else datetime.fromtimestamp(ends, UTC).isoformat(),
        "suspended": key.suspended,
        **limit_fields(key.stated),
        "state": "expired" if expired else "suspended" if key.suspended else "live",
        "origin": found.origin,
        "former": found.former,
    }


def limit_fields(limits: KeyLimits) -> dict[str, object]:
    """A key's own limits as in the file, every field of a budget included."""
    budgets = [msgspec.structs.asdict(budget) for budget in limits.budgets]
    return {
        "requests_per_minute": limits.requests_per_minute,
        "max_concurrency": limits.max_concurrency,
        "budgets": [{k: v for k, v in each.items() if v is not None} for each in budgets],
    }


def audited(tenant: TenantInForce) -> dict[str, object]:
    """The fields that changes can differ in, each key by itself."""
    found = tenant_fields(tenant)
    for each in tenant.keys:
        row = key_row(each, 0.0)
        former = " before its rotation" if each.former else ""
        found[f"key {row.pop('name')}{former}"] = row
    return found
