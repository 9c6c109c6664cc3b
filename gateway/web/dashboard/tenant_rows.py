"""Tenants as the dashboard shows them: keys by name, entitlements, and use against limits.

A tenant's row sums the counters of its entitlements. Budgets, where there are any, belong into
`use` beside them.
"""

from collections.abc import Mapping
from typing import Any, Final

from gateway.web.control.surface import TenantService
from gateway.web.dashboard.entitlement_rows import CountedEntitlement
from gateway.web.dashboard.view import PAGE_ROWS, View

MAX_KEYS: Final = 12
"""Keys of a tenant that its row names."""
MAX_ENTITLEMENTS: Final = 12


def tenants_page(
    service: TenantService | None, known: Mapping[str, CountedEntitlement], view: View
) -> dict[str, Any]:
    """The page of tenants that a viewer looks at; `known` has counters by entitlement."""
    if service is None:
        return {"rows": [], "found": 0, "total": 0, "page": 0, "pages": 1}
    found = service.search(view.tenants, view.tenants_page, PAGE_ROWS, MAX_KEYS)
    return {**found, "rows": [_row(each, known) for each in found["rows"]]}


def _row(tenant: Mapping[str, Any], known: Mapping[str, CountedEntitlement]) -> dict[str, Any]:
    names = tenant["uses"]
    own = [known[name] for name in names if name in known]
    counted = [each for each in own if each.account is not None]
    limits = [each.terms.limit for each in own]
    return {
        "tenant": tenant["name"],
        "display_name": tenant["display_name"],
        "suspended": tenant["suspended"],
        "keys": tenant["keys"],
        "key_count": tenant["key_count"],
        "entitlements": [
            {
                "name": each.terms.name,
                "inflight": each.inflight,
                "limit": each.terms.limit or None,
            }
            for each in own[:MAX_ENTITLEMENTS]
        ],
        "entitlement_count": len(names),
        "inflight": sum(each.inflight for each in counted) if counted else None,
        "limit": sum(limits) if limits and all(limits) else None,
        "used_tokens": sum(a.used for each in counted if (a := each.account)) if counted else None,
        "refused": sum(sum(each.refused.values()) for each in own),
    }
