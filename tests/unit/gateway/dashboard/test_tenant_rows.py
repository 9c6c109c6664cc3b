"""Tenants on the dashboard: sums over entitlements, bounded lists, pages by name."""

from typing import Any

from gateway.dashboard.tenant_rows import MAX_KEYS, CountedEntitlement, tenants_page
from gateway.dashboard.view import View
from gateway.ports import AccountView
from gateway.records.entitlement import Entitlement
from tests.tenancy_fakes import WHO, TenancyRig, file_of


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
    assert ([row["tenant"] for row in found["rows"]], found["found"], found["total"]) == (
        *(["beta"], 1, 2),
    )
    assert (found["page"], found["pages"]) == (0, 1)
    assert tenants_page(None, {}, View())["rows"] == []
