"""Entitlements and tenants as the dashboard shows them: terms, keys, use, debt and refusals.

A tenant's row sums the counters of its entitlements. Budgets, where there are any, belong into
`use` beside them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from gateway.dashboard.view import PAGE_ROWS, EntitlementOrder, View, page_of
from gateway.ports import AccountView
from gateway.records.entitlement import Entitlement, kv_limit
from gateway.tenancy.tenant_admin import TenantAdmin

MAX_ROWS: Final = 2000
"""Entitlements that the dashboard counts; the oldest ones. /admin/entitlements pages all."""
MAX_KEYS: Final = 12
"""Keys of a tenant that its row names."""
MAX_ENTITLEMENTS: Final = 12


class CountedEntitlement(NamedTuple):
    """One entitlement at a moment."""

    terms: Entitlement
    account: AccountView | None
    """None on a model without limits."""
    refused: Mapping[str, int]
    attainment: float | None

    @property
    def inflight(self) -> int:
        """Its sequences with a lease."""
        return 0 if self.account is None else sum(self.account.inflight)


_KEYS: Final[Mapping[EntitlementOrder, Callable[[CountedEntitlement], Any]]] = {
    "load": lambda e: (-e.inflight, e.terms.name),
    "refused": lambda e: (-sum(e.refused.values()), e.terms.name),
    "debt": lambda e: (0.0 if e.account is None else -e.account.debt, e.terms.name),
    "priority": lambda e: (0.0 if e.account is None else -e.account.weight, e.terms.name),
    "name": lambda e: e.terms.name,
}


def entitlements_page(known: Sequence[CountedEntitlement], view: View) -> dict[str, Any]:
    """The page of entitlements that a viewer looks at."""
    text = view.entitlements
    found = [each for each in known if not text or text in _names(each.terms)]
    found.sort(key=_KEYS[view.entitlements_order])
    return page_of(found, len(known), view.entitlements_page, _entitlement_row)


def _names(terms: Entitlement) -> str:
    return f"{terms.name} {terms.tenant} {terms.model} {terms.service_class}".casefold()


def _entitlement_row(counted: CountedEntitlement) -> dict[str, Any]:
    terms, account = counted.terms, counted.account
    return {
        "name": terms.name,
        "tenant": terms.tenant,
        "model": terms.model,
        "class": terms.service_class,
        "state": "" if account is None else account.state,
        "inflight": counted.inflight,
        "baseline": sum(terms.baseline) or None,
        "limit": terms.limit or None,
        "tokens_per_s": terms.tokens_per_s or None,
        "bucket": None if account is None or not terms.tokens_per_s else account.level_tokens,
        "bucket_depth": None if account is None else account.depth_tokens,
        "kv_bytes": None if account is None else account.kv_bytes,
        "kv_limit": kv_limit(terms) or None,
        "used_tokens": None if account is None else account.used,
        "debt": None if account is None else account.debt,
        "burst": None if account is None else account.burst,
        "priority": None if account is None else account.weight,
        "slo_ms": terms.slo_ms or None,
        "attainment": counted.attainment,
        "refused": sum(counted.refused.values()),
        "refused_by": counted.refused,
    }


def tenants_page(
    service: TenantAdmin | None, known: Mapping[str, CountedEntitlement], view: View
) -> dict[str, Any]:
    """The page of tenants that a viewer looks at; `known` has counters by entitlement."""
    if service is None:
        return {"rows": [], "found": 0, "total": 0, "page": 0, "pages": 1}
    found = service.search(view.tenants, view.tenants_page, PAGE_ROWS, MAX_KEYS)
    return {**found, "rows": [_tenant_row(each, known) for each in found["rows"]]}


def _tenant_row(
    tenant: Mapping[str, Any], known: Mapping[str, CountedEntitlement]
) -> dict[str, Any]:
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
