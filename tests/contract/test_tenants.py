"""Tenants and keys at run time: one suite over every directory, shared or kept."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from bench.common.fleet import RedisServer
from gateway.errors import Conflict, Forbidden, Unauthorized
from gateway.store.backends import open_directory
from tests.tenancy_fakes import WHO, FlakyDirectory, TenancyRig, file_key, file_of

REDIS = pytest.param("redis", marks=pytest.mark.redis)
Replica = Callable[[], TenancyRig]
FILE = file_of()
"""Entitles the tenant `acme` to two models."""


@pytest.fixture(params=["memory", "sqlite", REDIS])
async def replica(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Replica]:
    """Makes one more gateway over the same directory."""
    url = f"sqlite:///{tmp_path / 'sluice.db'}"
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        url = server.url
    shared = FlakyDirectory() if request.param == "memory" else None
    async with AsyncExitStack() as stack:

        def make() -> TenancyRig:
            directory = shared or open_directory(url)
            stack.push_async_callback(directory.close)
            return TenancyRig(directory)

        yield make


async def test_a_key_opens_here_at_once_and_elsewhere_with_a_poll(replica: Replica) -> None:
    one, other = await replica().start(FILE), await replica().start(FILE)
    await one.tenants.create({"name": "acme", "display_name": "Acme"}, WHO)
    key = await one.add("web", models=["n"])
    assert one.asks(key, "n") == "code"
    with pytest.raises(Unauthorized):
        other.asks(key, "n")
    await other.sync.poll()
    assert other.asks(key, "n") == "code"
    assert other.tenants.get("acme") == one.tenants.get("acme")
    await other.tenants.revoke_key("acme", "web", WHO)
    await one.sync.poll()
    assert not one.opens(key)


async def test_what_was_made_is_there_after_a_restart(replica: Replica) -> None:
    first = await replica().start(FILE)
    await first.tenants.create({"name": "acme", "labels": {"cost": "7"}}, WHO)
    keys = [await first.add(name) for name in ("web", "old")]
    await first.tenants.change_key("acme", "old", {"suspended": True}, WHO)
    again = await replica().start(FILE)
    assert again.asks(keys[0]) == "chat"
    with pytest.raises(Forbidden, match="'old' is suspended"):
        again.asks(keys[1])
    assert again.tenants.get("acme")["labels"] == {"cost": "7"}
    assert not again.keyring.open


async def test_changes_of_one_tenant_on_several_gateways_are_all_kept(replica: Replica) -> None:
    rigs = [await replica().start(FILE) for _ in range(3)]
    await rigs[0].tenants.create({"name": "acme"}, WHO)
    keys = await asyncio.gather(
        *(rig.add(f"{at}-{n}") for at, rig in enumerate(rigs) for n in range(3))
    )
    for rig in rigs:
        await rig.sync.poll()
        assert all(map(rig.opens, keys))
        assert len(rig.rows()) == 9


async def test_a_key_s_limits_are_shared_kept_and_counted_by_its_name(replica: Replica) -> None:
    one, other = await replica().start(FILE), await replica().start(FILE)
    await one.tenants.create({"name": "acme"}, WHO)
    budget = {"money": 2.5, "timezone": "Europe/Berlin", "warn_at": 0.8}
    key = await one.add("web", requests_per_minute=60, max_concurrency=4, budgets=[budget])
    await other.sync.poll()
    found = {
        "key:acme/web:sequences": 4,
        "key:acme/web:requests:minute": 60,
        "key:acme/web:money:month": 2_500_000_000,
    }
    assert one.limited(key) == other.limited(key) == found
    assert other.limits["acme"] == list(found)
    assert other.counted

    fresh = await other.tenants.rotate_key("acme", "web", {"grace_s": 60}, WHO)
    assert other.limited(key) == other.limited(str(fresh["key"])) == found
    assert other.limits["acme"] == list(found), "both values of the key count as one"
    changes = {"requests_per_minute": 90, "max_concurrency": None, "budgets": None}
    await other.tenants.change_key("acme", "web", changes, WHO)
    for rig in (one, other, again := await replica().start(FILE)):
        await rig.sync.poll()
        assert rig.limited(key) == rig.limited(str(fresh["key"]))
        assert rig.limited(key) == {"key:acme/web:requests:minute": 90}
    await again.tenants.revoke_key("acme", "web", WHO)
    assert again.limits["acme"] == []


async def test_a_deleted_tenant_stays_deleted_and_its_name_is_free(replica: Replica) -> None:
    one, other = await replica().start(), await replica().start()
    await one.tenants.create({"name": "acme"}, WHO)
    key = await one.add("web")
    await other.sync.poll()
    await one.tenants.delete("acme", WHO)
    await other.sync.poll()
    assert not one.opens(key)
    assert not other.opens(key)
    assert (await other.tenants.page(after=None, limit=9))["data"] == []
    await other.tenants.create({"name": "acme"}, WHO)
    assert other.rows() == []


async def test_what_an_admin_takes_from_a_key_of_the_file_outlives_a_restart(
    replica: Replica,
) -> None:
    file = file_of("acme", web=file_key("web"), old=file_key("old"), more=file_key("more"))
    first = await replica().start(file)
    await first.tenants.change_key("acme", "web", {"suspended": True}, WHO)
    await first.tenants.revoke_key("acme", "old", WHO)
    fresh = await first.tenants.rotate_key("acme", "more", {"grace_s": 60}, WHO)
    again = await replica().start(file)
    with pytest.raises(Forbidden, match="suspended"):
        again.asks("sk-web")
    assert not again.opens("sk-old")
    assert (again.asks("sk-more"), again.asks(str(fresh["key"]))) == ("chat", "chat")
    again.clock.advance(61)
    with pytest.raises(Forbidden, match="expired"):
        again.asks("sk-more")
    assert again.asks(str(fresh["key"])) == "chat"


async def test_another_fleet_s_file_removes_nothing_of_this_one_s(replica: Replica) -> None:
    one = await replica().start(file_of("acme", web=file_key("web")))
    extra = await one.add("extra")
    other = await replica().start(file_of("beta", far=file_key("far", "beta")))
    await one.sync.poll()
    assert (one.asks("sk-web"), one.asks(extra)) == ("chat", "chat")
    assert not other.opens(extra)  # a tenant that only the other fleet's file knows
    with pytest.raises(Conflict, match="is in the configuration file"):
        await one.tenants.delete("acme", WHO)
