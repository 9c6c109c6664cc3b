"""Operations on tenants: what is refused, what the file keeps, what is audited."""

import json
from typing import Any

import pytest

from gateway.errors import BadRequest, Conflict, Forbidden, NotFound
from gateway.records.tenancy import FileTenant, TenancyFile
from gateway.tenancy import tenant_admin
from tests.tenancy_fakes import (
    WHO,
    SaysTenant,
    TenancyRig,
    acme,
    digest,
    file_key,
    file_of,
    section,
)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({}, "name", "missing"),
        ({"name": "a b"}, "name", "not a usable name"),
        ({"name": "x\n"}, "name", "not a usable name"),
        ({"name": "x", "labels": {"a b": "c"}}, "labels", "not a usable name"),
        ({"name": "x", "labels": {"a\n": "c"}}, "labels", "not a usable name"),
        ({"name": "x", "dispaly_name": "X"}, "dispaly_name", "did you mean `display_name`"),
        ({"name": "x", "suspended": "yes"}, "suspended", "expected true or false"),
        ({"name": "x", "entitlements": ["chat"]}, "entitlements", "has no 'chat'"),
        ({"name": "x", "keys": []}, "keys", "POST /admin/tenants/{name}/keys"),
        ({"name": "x", "budgets": []}, "budgets", "in the configuration file"),
    ],
)
async def test_a_bad_field_is_named(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(BadRequest, match=said) as caught:
        await (await acme()).tenants.create(fields, WHO)
    assert caught.value.code == "invalid_tenant"
    assert str(caught.value.param).partition(".")[0] == param


async def test_a_tenant_is_shown_as_it_was_made_and_changed() -> None:
    made = await acme()
    given = {"name": "beta", "display_name": "Beta", "labels": {"cost": "7"}}
    shown = await made.tenants.create(given, WHO)
    assert shown.items() >= {**given, "origin": "admin", "suspended": False, "keys": []}.items()
    shown = await made.tenants.change("beta", {"display_name": None, "suspended": True}, WHO)
    expected = {"display_name": None, "labels": {"cost": "7"}, "suspended": True}
    assert shown.items() >= expected.items()
    with pytest.raises(BadRequest, match="cannot be changed"):
        await made.tenants.change("beta", {"name": "gamma"}, WHO)
    with pytest.raises(Conflict, match="There is a tenant"):
        await made.tenants.create(given, WHO)


async def test_numbers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = await acme()
    monkeypatch.setattr("gateway.tenancy.tenant_admin.MAX_KEYS", 2)
    monkeypatch.setattr(tenant_admin, "MAX_TENANTS", 1)
    for name in ("a", "b"):
        await made.add(name)
    with pytest.raises(Conflict, match="has 2 keys"):
        await made.add("c")
    with pytest.raises(Conflict, match="which is the most"):
        await made.tenants.create({"name": "beta"}, WHO)


async def test_not_even_force_deletes_what_the_file_has() -> None:
    made = await acme()
    await made.entitle("mine")
    with pytest.raises(Conflict, match="'chat' is in the configuration file") as caught:
        await made.tenants.delete("acme", WHO, force=True)
    assert caught.value.code == "tenant_in_use"
    assert made.names() == ["chat", "mine"]


async def test_a_deleted_tenant_s_suspension_stays_under_its_name_but_not_its_keys() -> None:
    made = await TenancyRig().start()
    await made.tenants.create({"name": "acme"}, WHO)
    old = await made.add("web")
    await made.tenants.change("acme", {"suspended": True}, WHO)
    await made.tenants.delete("acme", WHO)
    key = await made.entitle("a")
    with pytest.raises(Forbidden, match="tenant 'acme' is suspended"):
        made.asks(key)
    await made.tenants.create({"name": "acme"}, WHO)
    with pytest.raises(Forbidden, match="tenant 'acme' is suspended"):
        made.asks(key)
    await made.tenants.change("acme", {"suspended": False}, WHO)
    assert (made.asks(key), made.opens(old)) == ("a", False)


async def test_a_tenant_of_the_file_takes_keys_and_keeps_its_own_fields() -> None:
    made = await acme(file_of("acme", web=file_key("web")))
    key = await made.add("extra")
    assert (made.asks(key), made.asks("sk-web")) == ("chat", "chat")
    assert [row["origin"] for row in made.rows()] == ["file", "admin"]
    with pytest.raises(Conflict, match="Change it there"):
        await made.tenants.change("acme", {"display_name": "x"}, WHO)
    with pytest.raises(Conflict, match="Change it there"):
        await made.tenants.change_key("acme", "web", {"models": ["m"]}, WHO)
    with pytest.raises(Conflict, match="There is a tenant"):
        await made.tenants.create({"name": "acme"}, WHO)
    with pytest.raises(Conflict, match="has a key 'web'"):
        await made.add("web")
    with pytest.raises(Conflict, match="Remove it there"):
        await made.tenants.delete("acme", WHO, force=True)


async def test_a_reload_keeps_an_admin_s_keys_and_what_was_taken_away() -> None:
    made = await acme(file_of("acme", web=file_key("web"), old=file_key("old")))
    extra = await made.add("extra")
    await made.tenants.change_key("acme", "web", {"suspended": True}, WHO)
    await made.tenants.revoke_key("acme", "old", WHO)
    web = file_key("web", models=frozenset({"m"}))
    await made.tenancy.adopt(file_of("acme", web=web, old=file_key("old"), new=file_key("new")))
    assert (made.asks(extra), made.asks("sk-new"), made.opens("sk-old")) == ("chat", "chat", False)
    with pytest.raises(Forbidden, match="suspended"):
        made.asks("sk-web")
    await made.tenancy.adopt(file_of("beta"))  # the tenant left the file: nothing of it opens
    assert not made.opens(extra)
    with pytest.raises(NotFound):
        made.tenants.get("acme")
    await made.tenancy.adopt(file_of("acme", web=web))
    assert made.opens(extra)


async def test_a_new_tenant_of_a_name_that_left_the_file_has_none_of_its_keys() -> None:
    made = await acme(file_of("acme"))
    old = await made.add("web")
    await made.tenancy.adopt(file_of())
    await made.tenants.create({"name": "acme"}, WHO)
    assert (made.opens(old), made.rows()) == (False, [])
    key = await made.add("web")
    assert made.opens(key)
    await made.tenancy.adopt(file_of("acme"))
    assert (made.opens(old), made.opens(key)) == (False, True)


async def test_tokens_follow_the_tenant_s_list_in_the_file_and_an_admin_s() -> None:
    chat, code, batch = section("chat"), section("code", model="n"), section("batch")
    made = await TenancyRig(verifier=SaysTenant()).start(
        file_of("acme", entitlements=[chat, code, batch])
    )
    assert made.of_token() == ["chat", "batch"], "in the file's order"
    listed = FileTenant(entitlements=("batch",))
    file = made.tenancy.file
    await made.tenancy.adopt(TenancyFile(entitlements=file.entitlements, tenants={"acme": listed}))
    assert made.of_token() == ["batch"]
    await made.tenancy.adopt(file_of(entitlements=[batch, code]))
    await made.entitle("also")
    assert made.of_token() == ["batch", "also"], "the others after it"
    await made.tenants.create({"name": "acme", "entitlements": ["also"]}, WHO)
    assert made.of_token() == ["also"]
    await made.tenants.change("acme", {"entitlements": None}, WHO)
    assert made.of_token() == ["batch", "also"]


async def test_pages_are_in_order_of_names() -> None:
    made = await acme()
    for name in ("delta", "beta", "gamma"):
        await made.tenants.create({"name": name}, WHO)
    first: Any = await made.tenants.page(after=None, limit=2)
    rest: Any = await made.tenants.page(after=first["next"], limit=2)
    names = [[row["name"] for row in page["data"]] for page in (first, rest)]
    assert names == [["acme", "beta"], ["delta", "gamma"]]
    assert rest["next"] is None


async def test_the_audit_tells_every_change_and_no_digest() -> None:
    made = await TenancyRig().start()
    await made.tenants.create({"name": "acme"}, WHO)
    key = await made.add("web")
    await made.tenants.change_key("acme", "web", {"suspended": True}, WHO)
    await made.tenants.rotate_key("acme", "web", {}, WHO)
    await made.tenants.revoke_key("acme", "web", WHO)
    for suspended in (True, False):
        await made.tenants.change("acme", {"suspended": suspended}, WHO)
    await made.tenants.delete("acme", WHO)
    said: list[Any] = made.trail.latest(10)[::-1]
    whats = ["create", "add_key", "change_key", "rotate_key", "revoke_key"]
    assert [(record["what"], record["tenant"], record["who"]) for record in said] == [
        (what, "acme", WHO) for what in (*whats, "suspend", "resume", "delete")
    ]
    assert said[2]["after"]["key web"]["suspended"] is True
    text = json.dumps(said)
    assert digest(key).hex() not in text
    assert key not in text
    assert all(len(part) < 40 for part in text.split('"'))
