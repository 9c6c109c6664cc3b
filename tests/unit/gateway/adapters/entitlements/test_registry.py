"""Entitlements changed at run time: kept, acted on, audited, or refused and nothing changed."""

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from gateway.adapters.entitlements.index import File
from gateway.adapters.entitlements.reconciler import EntitlementSync
from gateway.adapters.entitlements.registry import Registry
from gateway.adapters.store.memory.leases import MemoryLeases
from gateway.errors import BadRequest, Conflict, NotFound, Refusal, StateFailure, Unavailable
from gateway.policy.request.head import digest_of
from gateway.policy.token_pool.terms import Terms
from gateway.policy.token_pool.token_pool import TokenPool
from gateway.ports import PoolView, Settlement
from gateway.records.lease import Ask
from gateway.records.request import Principal
from gateway.stages.authenticate import Keyring
from tests.builders import ask, served_model, short_and_long
from tests.entitlement_fakes import MODELS, SHAPE, EntitlementRig, FlakyDirectory, from_file
from tests.fakes import FakeClock

WHO = "adm1n000"
D1, D2 = "11" * 32, "22" * 32


@pytest.fixture
async def rig() -> EntitlementRig:
    return await EntitlementRig().start()


def wanted(name: str = "a", **fields: Any) -> dict[str, Any]:
    return {"name": name, "tenant": "acme", "model": "m", **fields}


async def created(rig: EntitlementRig, name: str = "a", **fields: Any) -> str:
    """A new entitlement; its key."""
    return str((await rig.registry.create(wanted(name, **fields), WHO))["key"])


def owner(rig: EntitlementRig, key: object) -> Principal | None:
    return rig.keyring.find(digest_of(str(key).encode()))


async def test_a_new_entitlement_is_kept_defined_and_let_in_at_once(rig: EntitlementRig) -> None:
    made = await rig.registry.create(
        wanted(service_class="guaranteed", concurrency=8, slo_target_ms=500), WHO
    )
    key = str(made["key"])
    assert key.startswith("sk-sluice-")
    assert len(key) == len("sk-sluice-") + 43
    digest = hashlib.sha256(key.encode()).hexdigest()
    assert made["keys"] == [digest[:8]]
    assert owner(rig, key) == Principal(
        entitlement="a", tenant="acme", service_class="guaranteed", model="m", slo_ms=500
    )
    assert rig.store.defined["m", "a"].baseline == (6, 2)
    (state,) = (await rig.directory.load()).entries
    assert (state.origin, state.key_sha256, state.terms) == (
        "admin",
        (digest,),
        rig.store.defined["m", "a"],
    )
    assert rig.changed == ["m"]


async def test_a_key_is_shown_once_and_never_its_digest(rig: EntitlementRig) -> None:
    key = await created(rig)
    digest = hashlib.sha256(key.encode()).hexdigest()
    page = await rig.registry.page(model=None, tenant=None, after=None, limit=10)
    for shown in (await rig.registry.get("a"), page, rig.registry.audit(10)):
        text = json.dumps(shown)
        assert key not in text
        assert digest not in text
        assert digest[:8] in text


async def test_get_shows_terms_counters_and_state(rig: EntitlementRig) -> None:
    await created(rig, kv_cache_gib=2, max_concurrency=4, tokens_per_second=10.5)
    rig.store.inflight["a"] = 3
    shown = await rig.registry.get("a")
    assert (shown["kv_cache_gib"], shown["max_concurrency"], shown["tokens_per_second"]) == (
        2,
        4,
        10.5,
    )
    assert (shown["state"], shown["origin"], shown["suspended"]) == ("bound", "admin", False)
    usage = shown["usage"]
    assert isinstance(usage, dict)
    assert usage["inflight"] == {"short": 3, "long": 0}
    assert (usage["kv_cache_gib"], usage["bucket_tokens"], usage["used_tokens"]) == (1.0, 90, 6)


async def test_with_the_store_away_terms_are_shown_without_counters(rig: EntitlementRig) -> None:
    await created(rig)
    rig.store.fail_with = StateFailure("away")
    shown = await rig.registry.get("a")
    assert (shown["name"], shown["state"], shown["usage"]) == ("a", None, None)
    assert await rig.registry.pools("m") == []


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        (wanted(model="n"), "model", "no such model"),
        (wanted(model=7), "model", "no such model"),
        ({"tenant": "t", "model": "m"}, "name", "missing"),
        (wanted("a b"), "name", "not a name"),
        (wanted(service_class="gold"), "service_class", "known: dedicated"),
        (wanted(service_clas="spot"), "service_clas", "did you mean `service_class`"),
        (wanted(tokens_per_second=-1), "tokens_per_second", "positive"),
        (wanted(concurrency={"shrt": 1}), "concurrency", "did you mean `short`"),
        (
            wanted(service_class="guaranteed", concurrency={"long": 17}),
            "concurrency.long",
            "16 slots at the most replicas, and 0 are reserved; lower it to 16",
        ),
        (wanted(model="plain", tokens_per_second=5), "tokens_per_second", "no managed capacity"),
    ],
)
async def test_terms_that_cannot_be_are_refused_by_field_and_change_nothing(
    rig: EntitlementRig, fields: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        await rig.registry.create(fields, WHO)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert said in caught.value.message
    state = await rig.directory.load()
    assert (state.revision, state.entries) == (0, [])
    assert rig.store.defined == {}
    assert rig.registry.audit(10) == []
    assert rig.keyring.open


async def test_a_baseline_beyond_today_but_within_the_most_replicas_is_taken(
    rig: EntitlementRig,
) -> None:
    await created(rig, service_class="guaranteed", concurrency={"short": 40})
    with pytest.raises(BadRequest, match="lower it to 8"):
        await created(rig, "b", service_class="dedicated", concurrency={"short": 9})
    await created(rig, "c", service_class="dedicated", concurrency={"short": 8})


async def test_what_an_expired_entitlement_reserved_may_be_reserved_again(
    rig: EntitlementRig,
) -> None:
    await created(rig, service_class="guaranteed", concurrency={"short": 48})
    await rig.registry.expire("a", None, WHO)
    await created(rig, "b", service_class="guaranteed", concurrency={"short": 48})


@pytest.mark.parametrize("until", ["2031-01-02T03:04:05Z", None])
async def test_what_expired_is_extended_only_where_it_still_fits(
    rig: EntitlementRig, until: str | None
) -> None:
    await created(rig, service_class="guaranteed", concurrency={"short": 48})
    await rig.registry.expire("a", None, WHO)
    await created(rig, "b", service_class="guaranteed", concurrency={"short": 48})
    with pytest.raises(BadRequest, match="can never be reserved"):
        await rig.registry.change("a", {"expires_at": until}, WHO)
    await rig.registry.change("a", {"slo_target_ms": 5}, WHO)
    await rig.registry.expire("b", None, WHO)
    assert (await rig.registry.change("a", {"expires_at": until}, WHO))["state"] == "bound"


async def test_ending_asks_for_no_room() -> None:
    directory = FlakyDirectory()
    rig = await EntitlementRig(directory).start(
        from_file("a", service_class="guaranteed", concurrency={"short": 60})
    )
    assert await rig.registry.expire("a", None, WHO)


async def test_a_name_is_taken_once(rig: EntitlementRig) -> None:
    key = await created(rig)
    with pytest.raises(Conflict) as caught:
        await created(rig)
    assert caught.value.status == 409
    assert owner(rig, key)


async def test_a_change_keeps_what_it_does_not_name(rig: EntitlementRig) -> None:
    key = await created(rig, concurrency={"short": 5}, slo_target_ms=500, tenant="acme")
    before = rig.store.defined["m", "a"]
    await rig.registry.suspend("a", WHO)
    await rig.registry.change("a", {"slo_target_ms": None, "tenant": "corp"}, WHO)
    after = rig.store.defined["m", "a"]
    assert (after.slo_ms, after.tenant, after.suspended) == (0, "corp", True)
    assert (after.baseline, after.created) == (before.baseline, before.created)
    found = owner(rig, key)
    assert found is not None
    assert found.tenant == "corp"


@pytest.mark.parametrize("fields", [{"name": "b"}, {"model": "plain"}, {"name": None}])
async def test_name_and_model_cannot_be_changed(
    rig: EntitlementRig, fields: dict[str, Any]
) -> None:
    await created(rig)
    with pytest.raises(BadRequest, match="cannot be changed"):
        await rig.registry.change("a", fields, WHO)
    await rig.registry.change("a", {"name": "a", "model": "m", "slo_target_ms": 5}, WHO)


async def test_other_terms_can_be_changed_after_capacity_fell_below_its_baseline() -> None:
    directory = FlakyDirectory()
    rig = await EntitlementRig(directory).start(
        from_file("a", service_class="guaranteed", concurrency={"short": 60})
    )
    await rig.registry.change("a", {"slo_target_ms": 5}, WHO)
    with pytest.raises(BadRequest, match="can never be reserved"):
        await rig.registry.change("a", {"concurrency": {"short": 59}}, WHO)


async def test_suspending_keeps_the_key_and_resuming_undoes_it(rig: EntitlementRig) -> None:
    key = await created(rig)
    shown = await rig.registry.suspend("a", WHO)
    assert (shown["suspended"], shown["state"]) == (True, "suspended")
    found = owner(rig, key)
    assert found is not None
    assert found.suspended
    shown = await rig.registry.suspend("a", WHO, undo=True)
    assert (shown["suspended"], shown["state"]) == (False, "bound")
    assert not rig.store.defined["m", "a"].suspended


async def test_expiring_is_now_or_at_a_time(rig: EntitlementRig) -> None:
    key = await created(rig)
    await rig.registry.expire("a", "2031-01-02T03:04:05Z", WHO)
    assert rig.store.defined["m", "a"].expires_unix_s == 1925089445.0
    await rig.registry.expire("a", None, WHO)
    found = owner(rig, key)
    assert found is not None
    assert found.expires_unix_s == rig.clock()
    with pytest.raises(BadRequest) as caught:
        await rig.registry.expire("a", "soon", WHO)
    assert caught.value.param == "expires_at"
    shown = await rig.registry.change("a", {"expires_at": None}, WHO)
    assert shown["expires_at"] is None


async def test_keys_are_rotated_two_at_a_time(rig: EntitlementRig) -> None:
    first = await created(rig)
    added = await rig.registry.add_key("a", WHO)
    assert owner(rig, first) is not None
    assert owner(rig, first) == owner(rig, added["key"])
    with pytest.raises(Conflict, match="Revoke one first"):
        await rig.registry.add_key("a", WHO)
    fingerprint = hashlib.sha256(first.encode()).hexdigest()[:8]
    left = await rig.registry.revoke_key("a", fingerprint, WHO)
    assert left["keys"] == [k for k in added["keys"] if k != fingerprint]  # type: ignore[attr-defined]
    assert owner(rig, first) is None
    assert owner(rig, added["key"]) is not None
    with pytest.raises(NotFound, match="no key"):
        await rig.registry.revoke_key("a", fingerprint, WHO)


async def test_deleting_is_refused_while_in_flight(rig: EntitlementRig) -> None:
    key = await created(rig)
    rig.store.inflight["a"] = 2
    with pytest.raises(Conflict, match="2 sequences in flight"):
        await rig.registry.delete("a", WHO)
    assert owner(rig, key)
    rig.store.inflight["a"] = 0
    await rig.registry.delete("a", WHO)
    assert owner(rig, key) is None
    assert rig.store.defined == {}
    with pytest.raises(NotFound):
        await rig.registry.get("a")


async def test_deleting_the_last_one_does_not_open_the_gateway(rig: EntitlementRig) -> None:
    await created(rig)
    await rig.registry.delete("a", WHO)
    assert not rig.keyring.open
    again = await EntitlementRig(rig.directory).start()
    assert not again.keyring.open


async def test_deleting_what_the_file_holds_is_refused(rig: EntitlementRig) -> None:
    rig = await EntitlementRig().start(from_file("a"))
    with pytest.raises(Conflict, match="configuration file"):
        await rig.registry.delete("a", WHO)


async def test_what_came_in_while_it_was_deleted_ends_by_itself(rig: EntitlementRig) -> None:
    key = await created(rig)
    async with rig.sync.lock:
        rig.store.inflight["a"] = 1
        await rig.sync.delete(rig.sync.index.entries["a"])
    assert owner(rig, key) is None
    assert rig.store.defined["m", "a"].suspended
    await rig.sync.poll()
    assert rig.names() == ["a"]
    rig.store.inflight["a"] = 0
    await rig.sync.poll()
    assert rig.names() == []


@pytest.mark.parametrize("what", ["create", "change", "suspend", "delete", "add_key", "revoke"])
async def test_with_the_directory_away_changes_are_refused_and_nothing_changes(
    rig: EntitlementRig, what: str
) -> None:
    key = await created(rig)
    before = rig.registry.audit(10)
    rig.directory.fail_with = StateFailure("away")
    registry, fingerprint = rig.registry, hashlib.sha256(key.encode()).hexdigest()[:8]
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "create": lambda: registry.create(wanted("b"), WHO),
        "change": lambda: registry.change("a", {"slo_target_ms": 5}, WHO),
        "suspend": lambda: registry.suspend("a", WHO),
        "delete": lambda: registry.delete("a", WHO),
        "add_key": lambda: registry.add_key("a", WHO),
        "revoke": lambda: registry.revoke_key("a", fingerprint, WHO),
    }
    for _ in range(3):  # the last ones meet an open breaker
        with pytest.raises(Unavailable) as caught:
            await calls[what]()
        assert (caught.value.status, caught.value.retry_after_s) == (503, 2.0)
    assert not registry.up
    assert rig.registry.audit(10) == before
    assert owner(rig, key)
    assert rig.names() == ["a"]


async def test_the_directory_s_absence_is_logged_once_and_its_return(
    rig: EntitlementRig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "sluice")
    rig.directory.fail_with = StateFailure("no route")
    for _ in range(20):
        await rig.sync.poll()
        rig.clock.advance(1.0)
    rig.directory.fail_with = None
    rig.clock.advance(10.0)
    await rig.sync.poll()
    assert [r.message for r in caplog.records] == [
        "the directory of entitlements is away: no route",
        "the directory of entitlements is back",
    ]
    assert rig.registry.up


async def test_an_open_breaker_spares_the_directory(rig: EntitlementRig) -> None:
    rig.directory.fail_with = StateFailure("away")
    for _ in range(50):
        await rig.sync.poll()
    assert rig.directory.calls <= 4


async def test_a_store_that_fails_is_told_again(
    rig: EntitlementRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.store.fail_with = StateFailure("away")
    key = await created(rig)
    await rig.sync.poll()
    assert owner(rig, key)
    assert rig.store.defined == {}
    rig.store.fail_with = None
    await rig.sync.poll()
    assert rig.names() == ["a"]
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1


async def test_each_change_is_audited_with_what_changed(
    rig: EntitlementRig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="sluice.audit")
    await created(rig)
    await rig.registry.change("a", {"slo_target_ms": 250}, WHO)
    await rig.registry.suspend("a", WHO)
    added = await rig.registry.add_key("a", WHO)
    keys = added["keys"]
    assert isinstance(keys, list)
    await rig.registry.revoke_key("a", keys[0], WHO)
    await rig.registry.delete("a", WHO)
    newest_first = rig.registry.audit(100)
    assert [r["what"] for r in newest_first] == [
        *("delete", "revoke_key", "add_key", "suspend", "change", "create"),
    ]
    assert {(r["who"], r["entitlement"], r["time_unix_s"]) for r in newest_first} == {
        (WHO, "a", rig.clock())
    }
    changed = newest_first[4]
    assert (changed["before"], changed["after"]) == (
        {"slo_target_ms": None},
        {"slo_target_ms": 250},
    )
    assert newest_first[2]["after"] == {"keys": keys}
    assert rig.registry.audit(2) == newest_first[:2]
    lines = [json.loads(r.message) for r in caplog.records if r.name == "sluice.audit"]
    assert lines[::-1] == newest_first
    assert str(added["key"]) not in caplog.text


async def test_pages_follow_one_another_and_filters_hold(rig: EntitlementRig) -> None:
    for n in range(7):
        await created(rig, f"e{n}", tenant="even" if n % 2 == 0 else "odd")
    await created(rig, "other", model="plain")

    async def names(**more: Any) -> list[list[str]]:
        pages, after = [], None
        while True:
            page: dict[str, Any] = await rig.registry.page(
                **{"model": None, "tenant": None, "limit": 3, "after": after, **more}
            )
            pages.append([e["name"] for e in page["data"]])
            after = page["next"]
            if after is None:
                return pages

    assert await names() == [["e0", "e1", "e2"], ["e3", "e4", "e5"], ["e6", "other"]]
    assert await names(tenant="even", limit=2) == [["e0", "e2"], ["e4", "e6"]]
    assert await names(model="plain") == [["other"]]
    assert await names(model="nothing") == [[]]


@pytest.mark.parametrize("after", ["", "x", "1", ":a", "-1:a", "9" * 30 + ":a", "²:a"])
async def test_a_cursor_that_no_page_gave_is_refused(rig: EntitlementRig, after: str) -> None:
    with pytest.raises(Refusal) as caught:
        await rig.registry.page(model=None, tenant=None, after=after, limit=3)
    assert (caught.value.status, caught.value.param) == (400, "after")


async def test_entitlements_of_a_model_that_is_leaving_are_not_shown(rig: EntitlementRig) -> None:
    for name, model in (("stays", "m"), ("goes", "plain")):
        await rig.registry.create({"name": name, "tenant": "t", "model": model}, WHO)
    del rig.models["plain"]
    page: Any = await rig.registry.page(model=None, tenant=None, after=None, limit=9)
    assert "goes" not in [row["name"] for row in page["data"]]
    with pytest.raises(NotFound):
        await rig.registry.get("goes")
    with pytest.raises(NotFound):
        await rig.registry.suspend("goes", WHO)


async def test_pools_come_from_where_replicas_are_known_too(rig: EntitlementRig) -> None:
    (first, _) = await rig.registry.pools("m")
    wider = msgspec.structs.replace(first, desired_replicas=9)

    async def pools(model: str) -> list[PoolView]:
        return [wider] if model == "m" else []

    registry = Registry(
        rig.sync, rig.store, MODELS, managed={"m"}, wall_clock=rig.clock, pools=pools
    )
    assert await registry.pools("m") == [wider]
    assert await registry.pools("plain") == []


@pytest.mark.parametrize("model", ["m", "plain"])
async def test_usage_is_trusted_where_an_admin_says_so(rig: EntitlementRig, model: str) -> None:
    key = await created(rig, model=model, trusted_usage=True)
    found = owner(rig, key)
    assert found is not None
    assert found.trusted_usage
    await rig.registry.change("a", {"trusted_usage": None}, WHO)
    found = owner(rig, key)
    assert found is not None
    assert not found.trusted_usage


async def test_a_model_without_managed_capacity_has_keys_only(rig: EntitlementRig) -> None:
    key = await created(rig, model="plain")
    assert rig.store.calls == 0
    found = owner(rig, key)
    assert found is not None
    assert found.model == "plain"
    shown = await rig.registry.get("a")
    assert (shown["state"], shown["usage"]) == (None, None)
    await rig.registry.delete("a", WHO)
    assert rig.store.calls == 0


async def test_two_changes_at_once_are_one_after_the_other(rig: EntitlementRig) -> None:
    await created(rig)
    await asyncio.gather(
        rig.registry.change("a", {"slo_target_ms": 5}, WHO),
        rig.registry.change("a", {"tokens_per_second": 7}, WHO),
    )
    shown = await rig.registry.get("a")
    assert (shown["slo_target_ms"], shown["tokens_per_second"]) == (5, 7)


def asked(lease_id: str) -> Ask:
    return msgspec.structs.replace(ask(lease_id), entitlement="a")


async def test_over_the_embedded_store_what_is_changed_is_what_admission_decides_by() -> None:
    clock = FakeClock(1_900_000_000.0)
    token_pool = TokenPool(Terms(slots=SHAPE.slots))
    models = {"m": served_model(table=short_and_long())}
    store = MemoryLeases(models, clock, {"m": token_pool}, wall_clock=clock)
    sync = EntitlementSync(
        directory=FlakyDirectory(),
        keyring=Keyring(),
        store=store,
        models=MODELS,
        managed={"m"},
        changed=lambda _: None,
        clock=clock,
    )
    registry = Registry(sync, store, MODELS, managed={"m"}, wall_clock=clock)
    await sync.begin(File(), guarded=True)
    await registry.create(wanted(service_class="guaranteed", concurrency={"short": 1}), WHO)
    lease = await store.admit(asked("one"))
    with pytest.raises(Refusal) as caught:
        await store.admit(asked("two"))
    assert caught.value.reason == "concurrency"
    await registry.change("a", {"concurrency": {"short": 2}}, WHO)
    second = await store.admit(asked("two"))
    with pytest.raises(Conflict, match="2 sequences in flight"):
        await registry.delete("a", WHO)
    await registry.suspend("a", WHO)
    with pytest.raises(Refusal) as caught:
        await store.admit(asked("three"))
    assert caught.value.reason == "entitlement_suspended"
    assert (await registry.get("a"))["state"] == "suspended"
    for held in (lease, second):
        store.settle(held, Settlement(usage=None, dispatched=False))
    await registry.delete("a", WHO)
    assert token_pool.accounts == {}
