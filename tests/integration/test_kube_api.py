"""The adapter of the Kubernetes API, over HTTP: what its callers get, and how it fails."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest
from lightkube.config.kubeconfig import KubeConfig
from lightkube.config.models import Cluster as Server

from controller.kube import (
    Away,
    Change,
    Conflict,
    Expired,
    Forbidden,
    Invalid,
    KubeApi,
    NotFound,
    connection,
)
from controller.records import PODS, SECRETS, TOKEN_ENTITLEMENTS, TOKEN_POOLS, Call, Resource
from tests.controlling import SPACE, entitlement, secret, token_pool
from tests.kube.cluster import Cluster, Fault, emulated_cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with emulated_cluster() as running:
        running.apply(token_pool("chat"), entitlement("search", "chat", 2), secret("search", "sk"))
        yield running


@asynccontextmanager
async def api_of(cluster: Cluster, token: str = "admin-token") -> AsyncIterator[KubeApi]:
    api = KubeApi(connection(KubeConfig.from_dict(cluster.kubeconfig(token))), SPACE)
    try:
        yield api
    finally:
        await api.close()


def patched(name: str, **spec: object) -> Call:
    return Call(verb="patch", resource=TOKEN_POOLS, name=name, body={"spec": spec})


async def test_lists_come_in_pages_and_whole(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.kube.PAGE", 3)
    cluster.apply(*(token_pool(f"pool-{i}") for i in range(7)))
    async with api_of(cluster) as api:
        listing = await api.list(TOKEN_POOLS)
        assert [it["metadata"]["name"] for it in listing.objects] == [
            "chat",
            *(f"pool-{i}" for i in range(7)),
        ]
        assert {it["kind"] for it in listing.objects} == {"TokenPool"}
        assert int(listing.version) >= max(
            int(it["metadata"]["resourceVersion"]) for it in listing.objects
        )
        assert (await api.list(PODS, labels="a=b")).objects == ()


async def watched(api: KubeApi, resource: Resource, version: str, many: int) -> list[Change]:
    """That many changes after a version."""
    changes: list[Change] = []
    async with aclosing(api.watch(resource, version, limit_s=30)) as watch:
        async for change in watch:
            changes.append(change)
            if len(changes) == many:
                break
    return changes


async def test_a_watch_gives_changes_and_bookmarks(cluster: Cluster) -> None:
    async with api_of(cluster) as api:
        version = (await api.list(TOKEN_POOLS)).version
        cluster.patch(TOKEN_POOLS, "chat", {"spec": {"replicas": 2}}, SPACE)
        cluster.delete(TOKEN_POOLS, "chat", SPACE)
        cluster.apply(secret("another", "sk"))  # of another collection: a bookmark here
        changes = await watched(api, TOKEN_POOLS, version, 3)
        assert [kind for kind, _ in changes] == ["MODIFIED", "DELETED", "BOOKMARK"]
        assert changes[0][1]["spec"]["replicas"] == 2


async def test_a_watch_ends_at_its_limit(cluster: Cluster) -> None:
    async with api_of(cluster) as api:
        version = (await api.list(TOKEN_POOLS)).version
        async with (
            asyncio.timeout(20),
            aclosing(api.watch(TOKEN_POOLS, version, limit_s=1)) as all_,
        ):
            assert [kind async for kind, _ in all_ if kind != "BOOKMARK"] == []


@pytest.mark.parametrize("as_event", [True, False])
async def test_a_version_that_is_too_old_is_told(cluster: Cluster, as_event: bool) -> None:
    cluster.gone_as_event = as_event
    async with api_of(cluster) as api:
        version = (await api.list(TOKEN_POOLS)).version
        cluster.patch(TOKEN_POOLS, "chat", {"spec": {"replicas": 2}}, SPACE)
        cluster.compact()
        with pytest.raises(Expired, match="too old resource version"):
            await watched(api, TOKEN_POOLS, version, 1)


async def test_changes_by_each_verb(cluster: Cluster) -> None:
    async with api_of(cluster) as api:
        made = await api.make(
            Call(verb="create", resource=TOKEN_POOLS, name="code", body=token_pool("code"))
        )
        assert made["metadata"]["uid"]
        changed = await api.make(patched("code", replicas=3))
        assert changed["spec"]["replicas"] == 3
        body = {"status": {"replicas": 1}, "spec": {"replicas": 9}}
        status = await api.make(
            Call(verb="patch_status", resource=TOKEN_POOLS, name="code", body=body)
        )
        assert (status["status"]["replicas"], status["spec"]["replicas"]) == (1, 3)
        await api.make(
            Call(
                verb="patch_scale",
                resource=TOKEN_POOLS,
                name="code",
                body={"spec": {"replicas": 5}},
            )
        )
        found = await api.get(TOKEN_POOLS, "code")
        assert found["spec"]["replicas"] == 5
        other = Call(verb="delete", resource=TOKEN_POOLS, name="code", uid="of-another")
        with pytest.raises(Conflict):
            await api.make(other)
        await api.make(
            Call(verb="delete", resource=TOKEN_POOLS, name="code", uid=made["metadata"]["uid"])
        )
        with pytest.raises(NotFound):
            await api.get(TOKEN_POOLS, "code")


async def test_what_the_api_refuses_is_told_apart(cluster: Cluster) -> None:
    async with api_of(cluster) as api:
        with pytest.raises(Conflict, match="already exists"):
            await api.make(
                Call(verb="create", resource=TOKEN_POOLS, name="chat", body=token_pool("chat"))
            )
        stale = {"metadata": {"resourceVersion": "1"}, "spec": {"replicas": 2}}
        with pytest.raises(Conflict):
            await api.make(Call(verb="patch", resource=TOKEN_POOLS, name="chat", body=stale))
        with pytest.raises(Invalid):
            await api.make(patched("chat", replicas=-1))
        with pytest.raises(NotFound):
            await api.make(patched("nobody", replicas=1))
        absent = Resource(kind="Absent", plural="absents", group="example.org")
        with pytest.raises(NotFound):
            await api.list(absent)
    async with api_of(cluster, "of-nobody") as api:
        with pytest.raises(Forbidden):
            await api.list(SECRETS)


async def test_an_api_that_is_away_is_told(cluster: Cluster) -> None:
    async with api_of(cluster) as api:
        version = (await api.list(TOKEN_ENTITLEMENTS)).version
        cluster.faults.append(Fault(lambda method, path: method == "PATCH", status=None))
        with pytest.raises(Away):
            await api.make(patched("chat", replicas=2))
        cluster.faults[:] = [Fault(status=503)]
        with pytest.raises(Away, match="injected"):
            await api.list(TOKEN_POOLS)
        cluster.faults.clear()
        watching = asyncio.ensure_future(watched(api, TOKEN_ENTITLEMENTS, version, 1))
        await asyncio.sleep(0.3)
        await cluster.stop()
        with pytest.raises(Away):
            await watching
        with pytest.raises(Away, match="no answer from the API"):
            await api.get(TOKEN_POOLS, "chat")
        await cluster.start()


async def test_a_watch_that_falls_silent_is_given_up(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one whose connection a firewall dropped."""
    monkeypatch.setattr("controller.kube.SILENCE_S", -29.5)

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        await writer.drain()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
        number = server.sockets[0].getsockname()[1]
        config = KubeConfig.from_one(cluster=Server(server=f"http://127.0.0.1:{number}"))
        api = KubeApi(connection(config), SPACE)
        with pytest.raises(Away):
            await watched(api, TOKEN_POOLS, "1", 1)
        await api.close()
