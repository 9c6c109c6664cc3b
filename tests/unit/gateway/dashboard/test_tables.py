"""The dashboard's tables: workers that come and go; tenants' sums, bounded lists, pages by name."""

from typing import Any

from gateway.control.admin import describe_fleet
from gateway.dashboard.snapshot import (
    MAX_KEYS,
    CountedEntitlement,
    View,
    pool_rows,
    tenants_page,
    worker_rows,
)
from gateway.fleet import members, model_runtime
from gateway.fleet.engine_metrics import EngineSample, record
from gateway.fleet.model_runtime import ModelRuntime
from gateway.ports import AccountView
from gateway.records.entitlement import Entitlement
from predictor.online import PrefillPredictor
from tests.builders import address, changed, routing, served_model
from tests.tenancy_fakes import WHO, TenancyRig, file_of


def fleet_of(workers: int) -> ModelRuntime:
    plain = served_model(table=routing(("only", 8192, None)), workers=(workers,))
    return changed(
        plain,
        predictor=(PrefillPredictor(workers=workers),),
        reads_metrics=True,
    )


def usage_of(served: ModelRuntime, described: dict[str, object]) -> dict[str, float | None]:
    """KV usage by worker, as shown."""
    return {row["id"]: row["kv"] for row in worker_rows(served, described, 1.0)}


def test_present_workers_are_shown_with_their_own_figures() -> None:
    served = fleet_of(2)
    pool, view = served.fleet.pools[0], served.fleet.pools[0].view
    served.fleet.pools[0].join((address("new"),), 0.0, up=True)
    for place, usage in enumerate((0.1, 0.2, 0.3)):
        record(view, place, EngineSample(kv_usage=usage), 0.5)
    members.leave(pool, 0)
    described = describe_fleet(served, (), 1.0)
    (leaving, *_) = worker_rows(served, described, 1.0)
    assert (leaving["id"], leaving["state"]) == (pool.workers[0], "draining")
    model_runtime.vacate(served, served.fleet.pools[0], [0], 1.0)
    shown = describe_fleet(served, (), 1.0)
    assert usage_of(served, shown) == {pool.workers[1]: 0.2, "new": 0.3}
    (row,) = pool_rows(served, shown)
    assert (row["workers"], row["ready"]) == (2, 2)


def test_a_worker_that_left_since_it_was_described_has_no_figures_of_another() -> None:
    served = fleet_of(2)
    pool, view = served.fleet.pools[0], served.fleet.pools[0].view
    for place, usage in enumerate((0.1, 0.2)):
        record(view, place, EngineSample(kv_usage=usage), 0.5)
    described = describe_fleet(served, (), 1.0)
    members.leave(pool, 0)
    model_runtime.vacate(served, served.fleet.pools[0], [0], 1.0)
    assert usage_of(served, described) == {pool.workers[0]: None, pool.workers[1]: 0.2}


def used(name: str, inflight: int, limit: int, account: bool = True) -> CountedEntitlement:
    view = AccountView(
        name=name,
        state="bound",
        inflight=(inflight,),
        kv_bytes=0,
        level_tokens=0.0,
        depth_tokens=0.0,
        debt=0.0,
        burst=0.0,
        weight=1.0,
        debited=0,
        refunded=0,
        used=40,
    )
    terms = Entitlement(name=name, tenant="acme", model="m", limit=limit)
    return CountedEntitlement(terms, view if account else None, {"tokens": 2}, None)


async def page(*known: CountedEntitlement, view: View | None = None) -> dict[str, Any]:
    rig = await TenancyRig().start(file_of())
    await rig.tenants.create({"name": "acme", "display_name": "Acme"}, WHO)
    await rig.tenants.create({"name": "beta"}, WHO)
    for number in range(MAX_KEYS + 2):
        await rig.add(f"k{number:02}")
    return tenants_page(rig.tenants, {each.terms.name: each for each in known}, view or View())


async def test_a_row_sums_use_and_limits_of_its_entitlements() -> None:
    found = await page(used("chat", 3, 8), used("code", 1, 8))
    acme, beta = found["rows"]
    assert (acme["inflight"], acme["limit"], acme["used_tokens"], acme["refused"]) == (4, 16, 80, 4)
    assert [each["name"] for each in acme["entitlements"]] == ["chat", "code"]
    assert (len(acme["keys"]), acme["key_count"]) == (MAX_KEYS, MAX_KEYS + 2)
    assert acme["keys"][0] == {"name": "k00", "state": "live"}
    assert (beta["inflight"], beta["limit"], beta["keys"]) == (None, None, [])


async def test_without_a_limit_at_one_entitlement_there_is_no_limit_of_all() -> None:
    (acme, _) = (await page(used("chat", 3, 8), used("code", 1, 0, account=False)))["rows"]
    assert (acme["inflight"], acme["limit"]) == (3, None)


async def test_a_search_begins_names_and_a_page_past_the_end_is_the_last() -> None:
    found = await page(view=View(tenants="be", tenants_page=7))
    assert ([row["name"] for row in found["rows"]], found["found"], found["total"]) == (
        *(["beta"], 1, 2),
    )
    assert (found["page"], found["pages"]) == (0, 1)
