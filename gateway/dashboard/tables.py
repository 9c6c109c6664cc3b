"""The long tables, cut to what one viewer looks at: by text, page and order.

Rows are the fields of /admin with what is counted beside them; the page shapes them. A tenant's row
sums the counters of its entitlements.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Annotated, Any, Final, Literal, NamedTuple

from msgspec.structs import asdict
from pydantic import AfterValidator, BaseModel, Field

from gateway.fleet import members
from gateway.fleet.engine_telemetry import EngineSample
from gateway.fleet.model_runtime import ModelRuntime
from gateway.ports import AccountView
from gateway.records.entitlement import Entitlement, kv_limit
from gateway.tenancy.tenant_admin import TenantAdmin

PAGE_ROWS: Final = 50
"""Rows of a table that a viewer gets at once."""
MAX_ROWS: Final = 2000
"""Entitlements that the dashboard counts; the oldest ones. /admin/entitlements pages all."""
MAX_KEYS: Final = 12
"""Keys of a tenant that its row names."""
MAX_ENTITLEMENTS: Final = 12

Row = dict[str, Any]
WorkerOrder = Literal["load", "name", "state"]
EntitlementOrder = Literal["load", "refused", "debt", "priority", "name"]
Text = Annotated[str, Field(max_length=128)]
Casefolded = Annotated[Text, AfterValidator(str.casefold)]
Page = Annotated[int, Field(ge=0, le=10_000)]


class View(BaseModel, frozen=True):
    """Search, page and order of each table, as the query gives them."""

    workers: Casefolded = ""
    workers_page: Page = 0
    workers_order: WorkerOrder = "load"
    entitlements: Casefolded = ""
    entitlements_page: Page = 0
    entitlements_order: EntitlementOrder = "load"
    tenants: Text = ""
    tenants_page: Page = 0
    decisions: Casefolded = ""


def _page_of(found: Sequence[Any], total: int, page: int) -> Row:
    """One page of sorted rows; a page past the end is the last one."""
    pages = max(1, -(-len(found) // PAGE_ROWS))
    page = min(page, pages - 1)
    rows = found[page * PAGE_ROWS : (page + 1) * PAGE_ROWS]
    return {"rows": rows, "found": len(found), "total": total, "page": page, "pages": pages}


# -- pools and workers


def pool_rows(served: ModelRuntime, described: Row) -> list[Row]:
    """One row a pool, with its queue, the predictor's coverage and how many workers serve."""
    return [
        {
            **pool,
            "model": described["model"],
            "pool": pool["name"],
            "workers": len(pool["workers"]),
            "ready": sum(worker["in_rotation"] for worker in pool["workers"]),
            "queue": list(state.scheduler.waiting),
            "coverage": state.scheduler.coverage,
        }
        for pool, state in zip(described["pools"], served.fleet.pools, strict=True)
    ]


_NO_SAMPLE: Final = EngineSample()
_STATE_ORDER: Final = ("down", "ejected", "draining", "up")


def worker_rows(served: ModelRuntime, described: Row, now_s: float) -> list[Row]:
    """One row a worker, with its engine's own figures where those are read."""
    rows = []
    for pool, state in zip(described["pools"], served.fleet.pools, strict=True):
        view, predictor = state.view, state.predictor
        # Workers may have left since they were described.
        places = {name: place for place, name in members.present(state)}
        for worker in pool["workers"]:
            at = places.get(worker["id"])
            sample = (None if at is None else view.fresh(at, now_s)) or _NO_SAMPLE
            # Of looked-up tokens, those that the engine found in its prefix cache since its start.
            queries, hits = sample.prefix_queries_total, sample.prefix_hits_total
            health = "ejected" if worker["ejected_for_s"] > 0 else "up"
            if worker["draining"] or not worker["up"]:
                health = "draining" if worker["draining"] else "down"
            rows.append(
                {
                    **worker,
                    "model": described["model"],
                    "pool": pool["name"],
                    "slots": pool["max_num_seqs"],
                    "state": health,
                    "kv": sample.kv_usage,
                    "hit_rate": hits / queries if queries and hits is not None else sample.hit_rate,
                    "slowness": None if predictor is None or at is None else predictor.slowness(at),
                }
            )
    return rows


def workers_page(rows: Sequence[Row], view: View) -> Row:
    """The page of workers that a viewer looks at."""
    text = view.workers
    found = [
        row
        for row in rows
        if not text or text in f"{row['model']} {row['pool']} {row['id']} {row['state']}"
    ]
    if view.workers_order == "load":
        found.sort(key=lambda row: (-row["active_sequences"], row["id"]))
    elif view.workers_order == "name":
        found.sort(key=itemgetter("id"))
    else:
        found.sort(key=lambda row: (_STATE_ORDER.index(row["state"]), row["id"]))
    return _page_of(found, len(rows), view.workers_page)


# -- entitlements and tenants


class CountedEntitlement(NamedTuple):
    """One entitlement at a moment."""

    terms: Entitlement
    account: AccountView | None
    """None on a model without limits."""
    refused: Mapping[str, int]
    attainment: float | None

    @property
    def names(self) -> str:
        """What a search looks in."""
        terms = self.terms
        return f"{terms.name} {terms.tenant} {terms.model} {terms.service_class}".casefold()

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


def entitlements_page(known: Sequence[CountedEntitlement], view: View) -> Row:
    """The page of entitlements that a viewer looks at."""
    text = view.entitlements
    found = [each for each in known if not text or text in each.names]
    found.sort(key=_KEYS[view.entitlements_order])
    page = _page_of(found, len(known), view.entitlements_page)
    page["rows"] = [
        {
            **asdict(each.terms),
            "account": None if each.account is None else asdict(each.account),
            "inflight": each.inflight,
            "kv_limit": kv_limit(each.terms),
            "refused_by": each.refused,
            "attainment": each.attainment,
        }
        for each in page["rows"]
    ]
    return page


def tenants_page(service: TenantAdmin, known: Mapping[str, CountedEntitlement], view: View) -> Row:
    """The page of tenants that a viewer looks at; `known` has counters by entitlement."""
    found = service.search(view.tenants, view.tenants_page, PAGE_ROWS, MAX_KEYS)
    for tenant in found["rows"]:
        names = tenant.pop("uses")
        own = [known[name] for name in names if name in known]
        accounts = [each.account for each in own if each.account is not None]
        limits = [each.terms.limit for each in own]
        tenant |= {
            "entitlements": [
                {"name": each.terms.name, "inflight": each.inflight, "limit": each.terms.limit}
                for each in own[:MAX_ENTITLEMENTS]
            ],
            "entitlement_count": len(names),
            "inflight": sum(each.inflight for each in own) if accounts else None,
            "limit": sum(limits) if limits and all(limits) else None,
            "used_tokens": sum(account.used for account in accounts) if accounts else None,
            "refused": sum(sum(each.refused.values()) for each in own),
        }
    return found
