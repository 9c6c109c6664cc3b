"""Entitlements changed at run time: kept, acted on, audited, or refused and nothing changed."""

import json
import logging
from typing import Any

import pytest

from gateway.errors import (
    BadRequest,
    Conflict,
    Forbidden,
    NotFound,
    Refusal,
    StateFailure,
    Unavailable,
)
from gateway.records.request import Principal
from gateway.records.tenancy import NO_FILE, fingerprint
from tests.tenancy_fakes import WHO, TenancyRig, digest, entitling, section


@pytest.fixture
async def rig() -> TenancyRig:
    return await TenancyRig().start()


def wanted(name: str = "a", **fields: Any) -> dict[str, Any]:
    return {"name": name, "tenant": "acme", "model": "m", **fields}


def owner(rig: TenancyRig, key: object) -> Principal:
    found = rig.keyring.find(digest(str(key)))
    assert found is not None
    return found


async def test_a_new_entitlement_is_kept_defined_and_let_in_at_once(rig: TenancyRig) -> None:
    made = await rig.entitlements.create(
        wanted(service_class="guaranteed", concurrency=8, slo_target_ms=500), WHO
    )
    key = str(made["key"])
    assert key.startswith("sk-sluice-")
    assert len(key) == len("sk-sluice-") + 43
    hashed = digest(key).hex()
    assert made["keys"] == [hashed[:8]]
    assert owner(rig, key) == Principal(
        entitlement="a", tenant="acme", service_class="guaranteed", model="m", slo_ms=500
    )
    assert rig.store.defined["m", "a"].baseline == (6, 2)
    kept, own_key = (await rig.directory.read(0, "")).rows
    assert kept.fields == wanted(service_class="guaranteed", concurrency=8, slo_target_ms=500)
    assert (own_key.digests, own_key.of) == ((hashed,), kept.uid)
    assert made["created"] == rig.clock() * 1000
    assert rig.changed == ["m"]


async def test_a_key_is_shown_once_and_never_its_digest(rig: TenancyRig) -> None:
    key = await rig.entitle("a")
    hashed = digest(key).hex()
    page = await rig.entitlements.page(model=None, tenant=None, after=None, limit=10)
    for shown in (await rig.entitlements.get("a"), page, rig.entitlements.audit(10)):
        text = json.dumps(shown)
        assert key not in text
        assert hashed not in text
        assert hashed[:8] in text


async def test_get_shows_terms_counters_and_state(rig: TenancyRig) -> None:
    await rig.entitle("a", kv_cache_gib=2, max_concurrency=4, tokens_per_second=10.5)
    rig.store.inflight["a"] = 3
    shown: Any = await rig.entitlements.get("a")
    fields = ("kv_cache_gib", "max_concurrency", "tokens_per_second")
    assert [shown[field] for field in fields] == [2, 4, 10.5]
    assert (shown["state"], shown["origin"], shown["suspended"]) == ("bound", "admin", False)
    usage = shown["usage"]
    assert usage["inflight"] == {"short": 3, "long": 0}
    assert (usage["kv_cache_gib"], usage["bucket_tokens"], usage["used_tokens"]) == (1.0, 90, 6)


async def test_with_the_store_away_terms_are_shown_without_counters(rig: TenancyRig) -> None:
    await rig.entitle("a")
    rig.store.fail_with = StateFailure("away")
    shown = await rig.entitlements.get("a")
    assert (shown["name"], shown["state"], shown["usage"]) == ("a", None, None)
    assert await rig.entitlements.pools("m") == []


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        (wanted(model="x"), "model", "no such model; give one of `m`, `n`, `plain`"),
        ({"tenant": "t", "model": "m"}, "name", "missing"),
        (wanted(concurrency={"shrt": 1}), "concurrency.shrt", "did you mean `short`"),
        (
            wanted(service_class="guaranteed", concurrency={"long": 17}),
            "concurrency.long",
            "16 slots at the most replicas, and 0 are reserved; lower it to 16",
        ),
        (wanted(model="plain", tokens_per_second=5), "tokens_per_second", "no managed capacity"),
    ],
)
async def test_terms_that_cannot_be_are_refused_by_field_and_change_nothing(
    rig: TenancyRig, fields: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        await rig.entitlements.create(fields, WHO)
    refused = caught.value
    assert (refused.status, refused.code, refused.param) == (400, "invalid_entitlement", param)
    assert said in refused.message
    state = await rig.directory.read(0, "")
    assert (state.revision, state.rows) == (0, ())
    assert rig.store.defined == {}
    assert rig.entitlements.audit(10) == []
    assert rig.keyring.open


async def test_a_baseline_beyond_today_but_within_the_most_replicas_is_taken(
    rig: TenancyRig,
) -> None:
    await rig.entitle("a", service_class="guaranteed", concurrency={"short": 40})
    with pytest.raises(BadRequest, match="lower it to 8"):
        await rig.entitle("b", service_class="dedicated", concurrency={"short": 9})
    await rig.entitle("c", service_class="dedicated", concurrency={"short": 8})


@pytest.mark.parametrize("until", ["2031-01-02T03:04:05Z", None])
async def test_what_an_expired_one_reserved_is_free_and_extended_only_where_it_still_fits(
    rig: TenancyRig, until: str | None
) -> None:
    await rig.entitle("a", service_class="guaranteed", concurrency={"short": 48})
    await rig.entitlements.expire("a", None, WHO)
    await rig.entitle("b", service_class="guaranteed", concurrency={"short": 48})
    with pytest.raises(BadRequest, match="can never be reserved"):
        await rig.entitlements.change("a", {"expires_at": until}, WHO)
    await rig.entitlements.change("a", {"slo_target_ms": 5}, WHO)
    await rig.entitlements.expire("b", None, WHO)
    assert (await rig.entitlements.change("a", {"expires_at": until}, WHO))["state"] == "bound"


async def test_a_baseline_that_no_longer_fits_keeps_other_changes_and_its_end_possible() -> None:
    rig = await TenancyRig().start(
        entitling(section("a", service_class="guaranteed", concurrency={"short": 60}))
    )
    await rig.entitlements.change("a", {"slo_target_ms": 5}, WHO)
    with pytest.raises(BadRequest, match="can never be reserved"):
        await rig.entitlements.change("a", {"concurrency": {"short": 59}}, WHO)
    assert await rig.entitlements.expire("a", None, WHO)


async def test_a_change_keeps_what_it_does_not_name(rig: TenancyRig) -> None:
    key = await rig.entitle("a", concurrency={"short": 5}, slo_target_ms=500, trusted_usage=True)
    before = rig.store.defined["m", "a"]
    await rig.entitlements.suspend("a", WHO)
    await rig.entitlements.change("a", {"slo_target_ms": None, "tenant": "corp"}, WHO)
    after = rig.store.defined["m", "a"]
    assert (after.slo_ms, after.tenant, after.suspended) == (0, "corp", True)
    assert (after.baseline, after.created) == (before.baseline, before.created)
    assert (owner(rig, key).tenant, owner(rig, key).trusted_usage) == ("corp", True)


@pytest.mark.parametrize("fields", [{"name": "b"}, {"model": "plain"}, {"name": None}])
async def test_name_and_model_cannot_be_changed(rig: TenancyRig, fields: dict[str, Any]) -> None:
    await rig.entitle("a")
    with pytest.raises(BadRequest, match="cannot be changed"):
        await rig.entitlements.change("a", fields, WHO)
    await rig.entitlements.change("a", {"name": "a", "model": "m", "slo_target_ms": 5}, WHO)


async def test_deleting_is_refused_while_in_flight_and_of_what_the_file_has() -> None:
    rig = await TenancyRig().start(entitling(section("of-file")))
    key = await rig.entitle("a")
    rig.store.inflight["a"] = 2
    for name, said in (("a", "2 sequences in flight"), ("of-file", "configuration file")):
        with pytest.raises(Conflict, match=said):
            await rig.entitlements.delete(name, WHO)
    assert rig.opens(key)
    rig.store.inflight["a"] = 0
    await rig.entitlements.delete("a", WHO)
    assert (rig.opens(key), rig.names()) == (False, ["of-file"])
    with pytest.raises(NotFound):
        await rig.entitlements.get("a")


async def test_deleting_the_last_one_does_not_open_the_gateway(rig: TenancyRig) -> None:
    await rig.entitle("a")
    await rig.entitlements.delete("a", WHO)
    assert not rig.keyring.open
    assert not (await TenancyRig(rig.directory).start()).keyring.open


async def test_a_deleted_one_s_suspension_and_end_are_not_its_successor_s(rig: TenancyRig) -> None:
    await rig.entitle("a")
    await rig.entitlements.suspend("a", WHO)
    await rig.entitlements.expire("a", None, WHO)
    await rig.entitlements.delete("a", WHO)
    key = await rig.entitle("a")
    assert rig.asks(key) == "a"


async def test_what_came_in_while_it_was_deleted_elsewhere_ends_by_itself(rig: TenancyRig) -> None:
    key = await rig.entitle("a")
    rig.store.inflight["a"] = 1
    other = await TenancyRig(rig.directory).start()
    await other.entitlements.delete("a", WHO)
    await rig.sync.poll()
    assert not rig.opens(key)
    assert rig.store.defined["m", "a"].suspended
    await rig.sync.poll()
    assert rig.names() == ["a"]
    rig.store.inflight["a"] = 0
    await rig.sync.poll()
    assert rig.names() == []


async def test_with_the_directory_away_changes_are_refused_and_nothing_changes(
    rig: TenancyRig,
) -> None:
    key = await rig.entitle("a")
    admin, before = rig.entitlements, rig.entitlements.audit(10)
    rig.directory.fail_with = StateFailure("away")
    for refused in (  # the last ones meet an open breaker
        admin.create(wanted("b"), WHO),
        admin.change("a", {"slo_target_ms": 5}, WHO),
        admin.suspend("a", WHO),
        admin.delete("a", WHO),
        admin.add_key("a", WHO),
        admin.revoke_key("a", fingerprint(digest(key).hex()), WHO),
    ):
        with pytest.raises(Unavailable) as caught:
            await refused
        assert (caught.value.status, caught.value.retry_after_s) == (503, 2.0)
    assert not admin.up
    assert admin.audit(10) == before
    assert (rig.asks(key), rig.names()) == ("a", ["a"])


async def test_a_store_that_fails_is_told_again(
    rig: TenancyRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.store.fail_with = StateFailure("away")
    key = await rig.entitle("a")
    await rig.sync.poll()
    assert rig.opens(key)
    assert rig.store.defined == {}
    rig.store.fail_with = None
    await rig.sync.poll()
    assert rig.names() == ["a"]
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1


async def test_each_change_is_audited_with_what_changed(
    rig: TenancyRig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="sluice.audit")
    await rig.entitle("a")
    await rig.entitlements.change("a", {"slo_target_ms": 250}, WHO)
    await rig.entitlements.suspend("a", WHO)
    added: Any = await rig.entitlements.add_key("a", WHO)
    await rig.entitlements.revoke_key("a", added["keys"][0], WHO)
    await rig.entitlements.delete("a", WHO)
    newest_first: list[Any] = rig.entitlements.audit(100)
    whats = ["delete", "revoke_key", "add_key", "suspend", "change", "create"]
    assert [record["what"] for record in newest_first] == whats
    assert {(r["who"], r["entitlement"], r["time_unix_s"]) for r in newest_first} == {
        (WHO, "a", rig.clock())
    }
    changed = newest_first[4]
    slo = ({"slo_target_ms": None}, {"slo_target_ms": 250})
    assert (changed["before"], changed["after"]) == slo
    assert newest_first[2]["after"] == {"keys": added["keys"]}
    assert rig.entitlements.audit(2) == newest_first[:2]
    lines = [json.loads(r.message) for r in caplog.records if r.name == "sluice.audit"]
    assert lines[::-1] == newest_first
    assert str(added["key"]) not in caplog.text


@pytest.mark.parametrize("after", ["", "x", "1", ":a", "-1:a", "9" * 30 + ":a", "²:a"])
async def test_a_cursor_that_no_page_gave_is_refused(rig: TenancyRig, after: str) -> None:
    with pytest.raises(Refusal) as caught:
        await rig.entitlements.page(model=None, tenant=None, after=after, limit=3)
    assert (caught.value.status, caught.value.param) == (400, "after")


async def test_entitlements_of_a_model_that_is_leaving_are_not_shown(rig: TenancyRig) -> None:
    await rig.entitle("stays")
    await rig.entitle("goes", model="plain")
    del rig.shapes["plain"]
    page: Any = await rig.entitlements.page(model=None, tenant=None, after=None, limit=9)
    assert [row["name"] for row in page["data"]] == ["stays"]
    with pytest.raises(NotFound):
        await rig.entitlements.get("goes")
    with pytest.raises(NotFound):
        await rig.entitlements.suspend("goes", WHO)


async def test_a_model_without_managed_capacity_has_keys_only(rig: TenancyRig) -> None:
    key = await rig.entitle("a", model="plain", trusted_usage=True)
    assert (owner(rig, key).model, owner(rig, key).trusted_usage) == ("plain", True)
    shown = await rig.entitlements.get("a")
    assert (shown["state"], shown["usage"]) == (None, None)
    await rig.entitlements.delete("a", WHO)
    assert rig.store.calls == 0


async def test_a_suspension_of_what_the_file_has_outlives_a_namesake_made_since() -> None:
    rig = await TenancyRig().start(entitling(section("a")))
    await rig.entitlements.suspend("a", WHO)
    await rig.tenancy.adopt(NO_FILE)
    with pytest.raises(Forbidden):
        rig.asks(await rig.entitle("a"))
    await rig.tenancy.adopt(entitling(section("a")))
    assert rig.store.defined["m", "a"].suspended
