"""Operations on tenants: what is refused, what the file keeps, what is audited."""

import json
from typing import Any

import msgspec
import pytest

from gateway.errors import BadRequest, Conflict, Forbidden, NotFound
from gateway.records.limit import Budget, KeyLimits, key_limits
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
        ({"name": "x", "entitlements": ["chat"]}, "entitlements", "has no 'chat'"),
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


# -- keys of tenants: checked as the file's, given, changed, rotated, revoked


FULL = {"tokens": 1000, "window": "day", "timezone": "UTC", "on_exceed": "refuse"}
LIMITS = ("requests_per_minute", "max_concurrency", "budgets")


async def rotated(made: TenancyRig, key: str = "web", **fields: Any) -> str:
    """A key's new value."""
    return str((await made.tenants.rotate_key("acme", key, fields, WHO))["key"])


async def changed(made: TenancyRig, **fields: Any) -> None:
    """A change of the key `web`."""
    await made.tenants.change_key("acme", "web", fields, WHO)


def suspended(made: TenancyRig, *keys: str) -> bool:
    """Whether all of these keys are refused as suspended."""
    for key in keys:
        with pytest.raises(Forbidden, match="suspended"):
            made.asks(key)
    return True


async def test_a_bad_field_is_refused_of_a_new_key_and_of_a_known_one() -> None:
    made = await acme()
    await made.add("known")
    bad = {"budgets": [{"tokens": 5}, {"tokens": 6, "timezone": "Mars"}]}
    for send in (
        made.tenants.add_key("acme", {"name": "web", **bad}, WHO),
        made.tenants.change_key("acme", "known", bad, WHO),
    ):
        with pytest.raises(BadRequest) as caught:
            await send
        assert (caught.value.code, caught.value.param) == ("invalid_tenant", "budgets[1].timezone")


async def test_a_key_s_lists_are_checked_against_the_tenant_s_entitlements() -> None:
    made = await acme()
    for fields, near in (
        ({"entitlements": ["caht"]}, "Did you mean 'chat'"),
        ({"models": ["o"]}, "It has: 'm', 'm-lora', 'n', 'n-lora'"),
    ):
        with pytest.raises(BadRequest, match=near):
            await made.tenants.add_key("acme", {"name": "web", **fields}, WHO)
    key = await made.add("web", entitlements=["code"])
    assert made.asks(key, "n") == "code"
    with pytest.raises(Forbidden):
        made.asks(key, "m")


async def test_a_key_may_list_an_adapter_of_a_model_and_opens_it_alone() -> None:
    made = await acme()
    key = await made.add("sql", models=["m-lora"])
    assert made.asks(key, "m", "m-lora") == "chat"
    for model, adapter in (("m", ""), ("m", "other-lora"), ("n", "n-lora")):
        with pytest.raises(Forbidden, match="It opens: 'm-lora'"):
            made.asks(key, model, adapter)


async def test_a_key_that_exists_may_be_given_by_its_hash_once() -> None:
    made = await acme()
    hashed = "sha256:" + digest("sk-mine").hex().upper()
    answer = await made.tenants.add_key("acme", {"name": "mine", "sha256": hashed}, WHO)
    assert "key" not in answer
    assert made.asks("sk-mine") == "chat"
    await made.tenants.create({"name": "beta"}, WHO)
    for tenant in ("acme", "beta"):
        with pytest.raises(Conflict, match="is known here"):
            await made.tenants.add_key(tenant, {"name": "again", "sha256": hashed}, WHO)
    await made.tenants.revoke_key("acme", "mine", WHO)
    with pytest.raises(Conflict, match="was revoked"):
        await made.tenants.add_key("acme", {"name": "mine", "sha256": hashed}, WHO)


async def test_a_hash_with_a_line_break_is_refused_and_opens_nothing() -> None:
    made = await acme()
    hashed = digest("sk-mine").hex() + "\n"
    await made.add("web")
    for work in (
        made.tenants.add_key("acme", {"name": "mine", "sha256": hashed}, WHO),
        made.tenants.rotate_key("acme", "web", {"sha256": hashed}, WHO),
    ):
        with pytest.raises(BadRequest) as caught:
            await work
        assert caught.value.param == "sha256"
    assert not made.opens("sk-mine")


@pytest.mark.parametrize("file", [file_of("acme", web=file_key("web")), file_of("acme")])
async def test_a_key_ends_at_its_time_and_null_takes_that_back(file: TenancyFile) -> None:
    made = await acme(file)
    key = "sk-web" if file.tenants["acme"].keys else await made.add("web")
    await changed(made, expires_at="2030-03-17T17:46:50Z")
    made.clock.advance(11)
    with pytest.raises(Forbidden, match="has expired"):
        made.asks(key)
    assert made.rows()[0]["state"] == "expired"
    await changed(made, expires_at=None)
    assert made.asks(key) == "chat"


async def test_a_key_s_row_and_the_audit_show_its_limits_and_null_removes_them() -> None:
    made = await acme()
    budget = {"tokens": 1000, "window": "day"}
    key = await made.add("web", requests_per_minute=60, max_concurrency=4, budgets=[budget])
    assert [made.rows()[0][name] for name in LIMITS] == [60, 4, [FULL]]
    assert made.limits["acme"] == list(made.limited(key))

    await changed(made, suspended=True)
    await changed(made, max_concurrency=5, suspended=False)
    assert [made.rows()[0][name] for name in LIMITS] == [60, 5, [FULL]]
    after: Any = made.trail.latest(1)[0]["after"]
    assert after["key web"]["max_concurrency"] == 5

    await changed(made, **dict.fromkeys(LIMITS))
    assert [made.rows()[0][name] for name in LIMITS] == [None, None, []]
    assert (made.limited(key), made.limits["acme"], made.tenancy.limited) == ({}, [], set())


async def test_limits_of_a_key_of_the_file_stay_the_file_s_also_once_it_is_rotated() -> None:
    stated = KeyLimits(max_concurrency=3)
    limits = key_limits("acme", "web", stated, "EUR")
    made = await acme(file_of("acme", web=file_key("web", stated=stated, limits=limits)))
    assert made.rows()[0]["max_concurrency"] == 3
    with pytest.raises(Conflict, match="Change it there"):
        await changed(made, max_concurrency=9)
    fresh = await rotated(made)
    with pytest.raises(Conflict, match="limits of the key 'web' are in the configuration file"):
        await changed(made, max_concurrency=9)
    assert made.limited(fresh) == made.limited("sk-web") == {limits[0].id: 3}
    await made.tenancy.adopt(file_of("acme"))  # the key that was rotated is removed from the file
    assert made.limited(fresh) == {limits[0].id: 3}
    await changed(made, max_concurrency=9)
    assert made.limited(fresh) == {limits[0].id: 9}


async def test_a_reload_keeps_limits_from_an_administrator_in_the_file_s_currency() -> None:
    made = await acme(file_of("acme", old=file_key("old")))
    key = await made.add("web", budgets=[{"money": 7}])
    await made.tenancy.adopt(file_of("acme", new=file_key("new")))
    assert made.limited(key) == {"key:acme/web:money:month": 7 * 10**9}
    await made.tenancy.adopt(msgspec.structs.replace(file_of("acme"), currency="USD"))
    (found,) = made.tenancy.tenant("acme").keys
    assert found.key.stated == KeyLimits(budgets=(Budget(money=7),))
    assert [limit.currency for limit in found.key.limits] == ["USD"]


async def test_after_a_rotation_both_keys_open_until_the_grace_ends() -> None:
    made = await acme()
    old = await made.add("web", models=["m"])
    fresh = await rotated(made, grace_s=60)
    assert (made.asks(old), made.asks(fresh)) == ("chat", "chat")
    assert [(row["name"], row["former"]) for row in made.rows()] == [("web", False), ("web", True)]
    with pytest.raises(Conflict, match="still opens"):
        await rotated(made, grace_s=60)
    made.clock.advance(60)
    with pytest.raises(Forbidden):
        made.asks(old)
    third = await rotated(made)
    last = await rotated(made, grace_s=0)
    assert [made.opens(key) for key in (old, fresh, third, last)] == [False, False, False, True]


async def test_the_key_before_a_rotation_can_be_revoked_by_its_fingerprint() -> None:
    made = await acme()
    old = await made.add("web")
    fresh = await rotated(made)
    former = next(row["fingerprint"] for row in made.rows() if row["former"])
    await made.tenants.revoke_key("acme", former, WHO)
    assert (made.opens(old), made.opens(fresh)) == (False, True)
    await made.tenants.revoke_key("acme", "web", WHO)
    assert not made.opens(fresh)
    with pytest.raises(NotFound):
        await made.tenants.revoke_key("acme", "web", WHO)


async def test_revoking_a_rotated_key_of_the_file_ends_what_the_file_lists_too() -> None:
    file = file_of("acme", web=file_key("web"))
    made = await acme(file)
    fresh = await rotated(made)
    await made.tenants.revoke_key("acme", "web", WHO)
    for each in (made, await TenancyRig(made.directory).start(file)):
        assert (each.opens("sk-web"), each.opens(fresh), each.rows()) == (False, False, [])


async def test_a_rotated_key_of_the_file_is_the_file_s_again_once_it_lists_the_new_hash() -> None:
    made = await acme(file_of("acme", web=file_key("web")))
    hashed = digest("sk-fresh").hex()
    await made.tenants.rotate_key("acme", "web", {"grace_s": 60, "sha256": hashed}, WHO)
    assert [(row["origin"], row["former"]) for row in made.rows()] == [
        *(("admin", False), ("admin", True)),
    ]
    await made.tenancy.adopt(file_of("acme", web=file_key("fresh")))
    assert [(row["origin"], row["former"]) for row in made.rows()] == [
        *(("file", False), ("admin", True)),
    ]
    assert (made.asks("sk-fresh"), made.asks("sk-web")) == ("chat", "chat")
    made.clock.advance(60)
    with pytest.raises(Forbidden):
        made.asks("sk-web")


async def test_rotating_a_key_of_the_file_again_keeps_what_is_in_force() -> None:
    made = await acme(file_of("acme", web=file_key("web")))
    first = await rotated(made, grace_s=60)
    listed = msgspec.structs.replace(file_key("web", models=frozenset({"n"})), sha256=digest(first))
    await made.tenancy.adopt(file_of("acme", web=listed))
    await changed(made, suspended=True)
    assert suspended(made, first, "sk-web")
    made.clock.advance(60)
    second = await rotated(made, grace_s=60)
    assert suspended(made, first, second)
    assert not made.opens("sk-web")
    await changed(made, suspended=False)
    for key in (first, second):
        assert made.asks(key, "n") == "code"
        with pytest.raises(Forbidden, match="does not open the model 'm'"):
            made.asks(key)


async def test_the_file_still_takes_away_from_a_key_that_was_rotated() -> None:
    made = await acme(file_of("acme", web=file_key("web")))
    key = await rotated(made)

    async def listed(**fields: Any) -> None:
        await made.tenancy.adopt(file_of("acme", web=file_key("web", **fields)))

    await listed(suspended=True)
    assert suspended(made, key, "sk-web")
    await listed(entitlements=("code",), only_listed=True)
    assert made.asks(key, "n") == "code"
    with pytest.raises(Forbidden, match="does not open the model 'm'"):
        made.asks(key)
    await listed(models=frozenset({"n"}))
    with pytest.raises(Forbidden, match="does not open the model 'm'"):
        made.asks(key)
    await listed(expires_unix_s=made.clock() + 10)
    made.clock.advance(11)
    for refused in (key, "sk-web"):
        with pytest.raises(Forbidden, match="has expired"):
            made.asks(refused)
