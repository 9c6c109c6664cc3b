"""Operations on tenants: what is refused, what the file keeps, what is audited."""

import json
from typing import Any

import msgspec
import pytest

from gateway.adapters.tenants import registry
from gateway.adapters.tenants.entries import FileTenant, TenantFile
from gateway.errors import BadRequest, Conflict, Forbidden, NotFound, PreconditionFailed
from gateway.records.request import Principal
from tests.builders import OUT_OF_RANGE
from tests.tenant_fakes import WHO, TenantRig, digest, file_key, file_of


async def rig(*files: Any) -> TenantRig:
    found = await TenantRig(None, *files).start()
    if not files:
        await found.registry.create({"name": "acme"}, WHO)
    return found


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "name"),
        ({"name": "a b"}, "name"),
        ({"name": "x", "max_budget": 4}, None),
        ({"name": "x", "labels": {"a b": "c"}}, "labels"),
        ({"name": "x", "suspended": "yes"}, "suspended"),
        ({"name": "x\n"}, "name"),
        ({"name": "x", "labels": {"a\n": "c"}}, "labels"),
        ({"name": "x", "entitlements": ["chat"]}, "entitlements"),
    ],
)
async def test_a_bad_field_is_named(fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(BadRequest) as caught:
        await (await rig()).registry.create(fields, WHO)
    assert (caught.value.code, caught.value.param) == ("invalid_tenant", param)


async def test_a_key_s_lists_are_checked_against_the_tenant_s_entitlements() -> None:
    made = await rig()
    for fields, near in (
        ({"entitlements": ["caht"]}, "Did you mean 'chat'"),
        ({"models": ["o"]}, "It has: 'm', 'm-lora', 'n', 'n-lora'"),
    ):
        with pytest.raises(BadRequest, match=near):
            await made.registry.add_key("acme", {"name": "web", **fields}, WHO)
    key = await made.add("web", entitlements=["code"])
    assert made.asks(key, "n") == "code"
    with pytest.raises(Forbidden):
        made.asks(key, "m")


async def test_a_key_may_list_an_adapter_of_a_model_and_opens_it_alone() -> None:
    made = await rig()
    key = await made.add("sql", models=["m-lora"])
    assert made.asks(key, "m", "m-lora") == "chat"
    for model, adapter in (("m", ""), ("m", "other-lora"), ("n", "n-lora")):
        with pytest.raises(Forbidden, match="It opens: 'm-lora'"):
            made.asks(key, model, adapter)


async def test_numbers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = await rig()
    monkeypatch.setattr("gateway.adapters.tenants.keys.MAX_KEYS", 2)
    monkeypatch.setattr(registry, "MAX_TENANTS", 1)
    for name in ("a", "b"):
        await made.add(name)
    with pytest.raises(Conflict, match="has 2 keys"):
        await made.add("c")
    with pytest.raises(Conflict, match="which is the most"):
        await made.registry.create({"name": "beta"}, WHO)


async def test_a_key_that_exists_may_be_given_by_its_hash_once() -> None:
    made = await rig()
    hashed = "sha256:" + file_key("mine").sha256.hex().upper()
    answer = await made.registry.add_key("acme", {"name": "mine", "sha256": hashed}, WHO)
    assert "key" not in answer
    assert made.asks("sk-mine") == "chat"
    await made.registry.create({"name": "beta"}, WHO)
    for tenant in ("acme", "beta"):
        with pytest.raises(Conflict, match="is known here"):
            await made.registry.add_key(tenant, {"name": "again", "sha256": hashed}, WHO)
    await made.registry.revoke_key("acme", "mine", WHO)
    with pytest.raises(Conflict, match="was revoked"):
        await made.registry.add_key("acme", {"name": "mine", "sha256": hashed}, WHO)


async def test_a_hash_with_a_line_break_is_refused_and_opens_nothing() -> None:
    made = await rig()
    hashed = file_key("mine").sha256.hex() + "\n"
    await made.add("web")
    for work in (
        made.registry.add_key("acme", {"name": "mine", "sha256": hashed}, WHO),
        made.registry.rotate_key("acme", "web", {"sha256": hashed}, WHO),
    ):
        with pytest.raises(BadRequest) as caught:
            await work
        assert caught.value.param == "sha256"
    assert not made.opens("sk-mine")


async def test_after_a_rotation_both_keys_open_until_the_grace_ends() -> None:
    made = await rig()
    old = await made.add("web", models=["m"])
    fresh = str((await made.registry.rotate_key("acme", "web", {"grace_s": 60}, WHO))["key"])
    assert (made.asks(old), made.asks(fresh)) == ("chat", "chat")
    assert [(row["name"], row["former"]) for row in made.rows()] == [("web", False), ("web", True)]
    with pytest.raises(Conflict, match="still opens"):
        await made.registry.rotate_key("acme", "web", {"grace_s": 60}, WHO)
    made.clock.advance(60)
    with pytest.raises(Forbidden):
        made.asks(old)
    third = str((await made.registry.rotate_key("acme", "web", {}, WHO))["key"])
    last = str((await made.registry.rotate_key("acme", "web", {"grace_s": 0}, WHO))["key"])
    assert [made.opens(key) for key in (old, fresh, third, last)] == [False, False, False, True]


async def test_the_key_before_a_rotation_can_be_revoked_by_its_fingerprint() -> None:
    made = await rig()
    old = await made.add("web")
    fresh = str((await made.registry.rotate_key("acme", "web", {}, WHO))["key"])
    former = next(row["fingerprint"] for row in made.rows() if row["former"])
    await made.registry.revoke_key("acme", former, WHO)
    assert (made.opens(old), made.opens(fresh)) == (False, True)
    await made.registry.revoke_key("acme", "web", WHO)
    assert not made.opens(fresh)
    with pytest.raises(NotFound):
        await made.registry.revoke_key("acme", "web", WHO)


async def test_a_suspended_tenant_is_refused_and_resumed() -> None:
    made = await rig()
    key = await made.add("web")
    await made.registry.change("acme", {"suspended": True}, WHO)
    with pytest.raises(Forbidden, match="tenant 'acme' is suspended"):
        made.asks(key)
    await made.registry.change("acme", {"suspended": False}, WHO)
    assert made.asks(key) == "chat"


def own_key(made: TenantRig) -> str:
    """A key of the entitlement `chat`'s own, of the tenant `acme`."""
    chat = Principal(entitlement="chat", tenant="acme", model="m")
    made.keyring.put(chat, [digest("sk-own")])
    return "sk-own"


async def test_a_suspension_holds_where_no_section_names_the_tenant() -> None:
    here = await rig(file_of("acme"))
    await here.registry.change("acme", {"suspended": True}, WHO)
    there = await TenantRig(here.directory, file_of("beta")).start()
    for made in (here, there):
        with pytest.raises(Forbidden, match="tenant 'acme' is suspended"):
            made.asks(own_key(made))
    here.sync.adopt(file_of("beta"))
    with pytest.raises(Forbidden, match="tenant 'acme' is suspended"):
        here.asks("sk-own")
    await there.registry.create({"name": "acme", "suspended": False}, WHO)
    await here.sync.poll()
    assert (here.asks("sk-own"), there.asks("sk-own")) == ("chat", "chat")


async def test_a_suspended_tenant_with_entitlements_cannot_be_deleted() -> None:
    made = await rig()
    key = own_key(made)
    await made.registry.change("acme", {"suspended": True}, WHO)
    with pytest.raises(Conflict, match="2 entitlements name it"):
        await made.registry.delete("acme", WHO)
    with pytest.raises(Forbidden, match="tenant 'acme' is suspended"):
        made.asks(key)
    for name in ("chat", "code"):
        made.keyring.remove(name)
    await made.registry.delete("acme", WHO)


async def test_a_key_expires_at_its_time_and_null_takes_that_back() -> None:
    made = await rig()
    key = await made.add("web", expires_at="2030-03-17T17:46:50Z")
    made.clock.advance(1_900_000_011 - made.clock())
    with pytest.raises(Forbidden, match="has expired"):
        made.asks(key)
    assert made.rows()[0]["state"] == "expired"
    await made.registry.change_key("acme", "web", {"expires_at": None}, WHO)
    assert made.asks(key) == "chat"


@pytest.mark.parametrize("at", OUT_OF_RANGE)
@pytest.mark.parametrize("files", [(), (file_of("acme", web=file_key("web")),)])
async def test_an_expiry_out_of_range_is_refused(files: tuple[Any, ...], at: str) -> None:
    made = await rig(*files)
    if not files:
        await made.add("web")
    with pytest.raises(BadRequest) as caught:
        await made.registry.change_key("acme", "web", {"expires_at": at}, WHO)
    assert caught.value.param == "expires_at"
    assert [row["expires_at"] for row in made.rows()] == [None]


async def test_a_tenant_of_the_file_takes_keys_and_keeps_its_own_fields() -> None:
    made = await rig(file_of("acme", web=file_key("web")))
    key = await made.add("extra")
    assert (made.asks(key), made.asks("sk-web")) == ("chat", "chat")
    assert [row["origin"] for row in made.rows()] == ["file", "admin"]
    with pytest.raises(Conflict, match="Change it there"):
        await made.registry.change("acme", {"display_name": "x"}, WHO)
    with pytest.raises(Conflict, match="Change it there"):
        await made.registry.change_key("acme", "web", {"models": ["m"]}, WHO)
    with pytest.raises(Conflict, match="There is a tenant"):
        await made.registry.create({"name": "acme"}, WHO)
    with pytest.raises(Conflict, match="has a key 'web'"):
        await made.add("web")


async def test_a_reload_keeps_an_admin_s_keys_and_what_was_taken_away() -> None:
    made = await rig(file_of("acme", web=file_key("web"), old=file_key("old")))
    extra = await made.add("extra")
    await made.registry.change_key("acme", "web", {"suspended": True}, WHO)
    await made.registry.revoke_key("acme", "old", WHO)
    web = file_key("web", models=frozenset({"m"}))
    made.sync.adopt(file_of("acme", web=web, old=file_key("old"), new=file_key("new")))
    assert (made.asks(extra), made.asks("sk-new"), made.opens("sk-old")) == ("chat", "chat", False)
    with pytest.raises(Forbidden, match="suspended"):
        made.asks("sk-web")
    made.sync.adopt(file_of("beta"))  # the tenant left the file: nothing of it opens
    assert not made.opens(extra)
    with pytest.raises(NotFound):
        made.registry.get("acme")
    made.sync.adopt(file_of("acme", web=web))
    assert made.opens(extra)


async def test_a_rotated_key_of_the_file_is_the_file_s_again_once_it_lists_the_new_hash() -> None:
    made = await rig(file_of("acme", web=file_key("web")))
    hashed = file_key("fresh").sha256
    await made.registry.rotate_key("acme", "web", {"grace_s": 60, "sha256": hashed.hex()}, WHO)
    assert [row["origin"] for row in made.rows()] == ["admin", "admin"]
    made.sync.adopt(file_of("acme", web=file_key("fresh")))
    assert [(row["origin"], row["former"]) for row in made.rows()] == [
        *(("file", False), ("admin", True)),
    ]
    assert (made.asks("sk-fresh"), made.asks("sk-web")) == ("chat", "chat")


def suspended(made: TenantRig, *keys: str) -> bool:
    """Whether all of these keys are refused as suspended."""
    for key in keys:
        with pytest.raises(Forbidden, match="suspended"):
            made.asks(key)
    return True


async def test_rotating_a_key_of_the_file_again_keeps_what_is_in_force() -> None:
    made = await rig(file_of("acme", web=file_key("web")))
    first = str((await made.registry.rotate_key("acme", "web", {"grace_s": 60}, WHO))["key"])
    listed = msgspec.structs.replace(file_key("web", models=frozenset({"n"})), sha256=digest(first))
    made.sync.adopt(file_of("acme", web=listed))
    await made.registry.change_key("acme", "web", {"suspended": True}, WHO)
    assert suspended(made, first, "sk-web")
    made.clock.advance(60)
    second = str((await made.registry.rotate_key("acme", "web", {"grace_s": 60}, WHO))["key"])
    assert suspended(made, first, second)
    assert not made.opens("sk-web")
    await made.registry.change_key("acme", "web", {"suspended": False}, WHO)
    for key in (first, second):
        assert made.asks(key, "n") == "code"
        with pytest.raises(Forbidden, match="does not open the model 'm'"):
            made.asks(key)


async def test_a_suspended_key_stays_so_when_the_file_lists_it_and_when_it_leaves_the_file() -> (
    None
):
    made = await rig(file_of("acme", web=file_key("web")))
    key = str((await made.registry.rotate_key("acme", "web", {}, WHO))["key"])
    await made.registry.change_key("acme", "web", {"suspended": True}, WHO)
    listed = msgspec.structs.replace(file_key("web"), sha256=digest(key))
    made.sync.adopt(file_of("acme", web=listed))
    assert suspended(made, key, "sk-web")
    await made.registry.change_key("acme", "web", {"expires_at": "2031-01-01T00:00:00Z"}, WHO)
    assert suspended(made, key)
    await made.registry.change_key("acme", "web", {"suspended": False}, WHO)
    assert made.asks(key) == "chat"
    await made.registry.change_key("acme", "web", {"suspended": True}, WHO)
    made.sync.adopt(file_of("acme"))
    assert suspended(made, key, "sk-web")


async def test_the_file_still_takes_away_from_a_key_that_was_rotated() -> None:
    made = await rig(file_of("acme", web=file_key("web")))
    key = str((await made.registry.rotate_key("acme", "web", {}, WHO))["key"])
    made.sync.adopt(file_of("acme", web=file_key("web", suspended=True)))
    assert suspended(made, key, "sk-web")
    made.sync.adopt(file_of("acme", web=file_key("web", entitlements=("code",), only_listed=True)))
    assert made.asks(key, "n") == "code"
    with pytest.raises(Forbidden, match="does not open the model 'm'"):
        made.asks(key)
    made.sync.adopt(file_of("acme", web=file_key("web", models=frozenset({"n"}))))
    with pytest.raises(Forbidden, match="does not open the model 'm'"):
        made.asks(key)
    made.sync.adopt(file_of("acme", web=file_key("web", expires_unix_s=made.clock() + 10)))
    made.clock.advance(11)
    for refused in (key, "sk-web"):
        with pytest.raises(Forbidden, match="has expired"):
            made.asks(refused)


async def test_tokens_follow_the_tenant_s_list_in_the_file_and_an_admin_s() -> None:
    made = await rig(file_of("acme"))
    made.keyring.put(Principal(entitlement="batch", tenant="acme", model="m"), ())
    assert made.of_token() == ["chat", "batch"], "in the file's order, the others after it"
    made.sync.adopt(TenantFile(tenants={"acme": FileTenant(entitlements=("batch",))}))
    assert made.of_token() == ["batch"]
    made.sync.adopt(TenantFile(order={"acme": ("batch",)}))
    assert made.of_token() == ["batch", "chat"]
    await made.registry.create({"name": "acme", "entitlements": ["chat"]}, WHO)
    assert made.of_token() == ["chat"]
    await made.registry.change("acme", {"entitlements": None}, WHO)
    assert made.of_token() == ["batch", "chat"]


async def test_an_answer_to_another_revision_changes_nothing() -> None:
    made = await rig()
    shown: Any = made.registry.get("acme")
    await made.add("web")
    with pytest.raises(PreconditionFailed):
        await made.registry.change("acme", {"display_name": "late"}, WHO, version=shown["revision"])
    assert made.registry.get("acme")["display_name"] is None


async def test_pages_are_in_order_of_names() -> None:
    made = await rig()
    for name in ("delta", "beta", "gamma"):
        await made.registry.create({"name": name}, WHO)
    first: Any = await made.registry.page(after=None, limit=2)
    rest: Any = await made.registry.page(after=first["next"], limit=2)
    names = [[row["name"] for row in page["data"]] for page in (first, rest)]
    assert names == [["acme", "beta"], ["delta", "gamma"]]
    assert rest["next"] is None


async def test_the_audit_tells_every_change_and_no_digest() -> None:
    made = await rig()
    key = await made.add("web")
    await made.registry.change_key("acme", "web", {"suspended": True}, WHO)
    await made.registry.rotate_key("acme", "web", {}, WHO)
    await made.registry.revoke_key("acme", "web", WHO)
    for suspended in (True, False):
        await made.registry.change("acme", {"suspended": suspended}, WHO)
    await made.registry.delete("acme", WHO)
    said = made.trail.latest(10)[::-1]
    assert [(record["what"], record["tenant"], record["who"]) for record in said] == [
        (what, "acme", WHO)
        for what in (
            *("create", "add_key", "change_key", "rotate_key", "revoke_key"),
            *("suspend", "resume", "delete"),
        )
    ]
    assert said[2]["after"]["key web"]["suspended"] is True  # type: ignore[index]
    text = json.dumps(said)
    assert file_key("x").sha256.hex() not in text
    assert key not in text
    assert all(len(part) < 40 for part in text.split('"'))
