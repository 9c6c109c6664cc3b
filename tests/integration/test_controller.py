"""The control plane as a whole: an emulated cluster over HTTP, a real Redis, the real plan."""

import asyncio
import hashlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.common.fleet import RedisServer
from controller.kube import Away
from controller.loop import LEASE
from controller.records import (
    BACKENDS,
    EVENTS,
    LEASES,
    NODES,
    SECRETS,
    TOKEN_ENTITLEMENTS,
    TOKEN_POOLS,
    Call,
    Object,
)
from gateway.records.tenancy import ClusterEntitlement
from gateway.store.redis.cluster import ClusterStore, Fenced
from tests.controlling import (
    PRIORITIES,
    SPACE,
    controlling,
    entitlement,
    expire_lease,
    granted,
    lease_pods,
    secret,
    states,
    token_pool,
    until,
)
from tests.kube.cluster import Cluster, Fault, emulated_cluster

pytestmark = pytest.mark.redis
ALLOCATORS = ("internal", "virtual-node")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are a tenth of what they are in production, or less."""
    monkeypatch.setattr("controller.election.DURATION_S", 2)
    monkeypatch.setattr("controller.election.RENEWAL_LIMIT_S", 1.2)
    monkeypatch.setattr("controller.election.RENEW_EVERY_S", 0.2)
    monkeypatch.setattr("controller.publisher.HEARTBEAT_S", 0.2)
    monkeypatch.setattr("controller.publisher.RETRY_S", 0.1)
    monkeypatch.setattr("controller.mirror.PAUSES_S", (0.05, 0.2))
    monkeypatch.setattr("controller.writes.PAUSES_S", (0.05, 0.2))
    monkeypatch.setattr("controller.loop.TOGETHER_S", 0.01)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with emulated_cluster(*PRIORITIES) as running:
        yield running


def scene(cluster: Cluster) -> None:
    """Two reserving entitlements that fill a pool, one that waits, one that reserves nothing."""
    cluster.apply(
        token_pool("chat"),
        entitlement("search", "chat", 6, "guaranteed"),
        entitlement("support", "chat", 4),
        entitlement("trial", "chat", 4),
        entitlement("spare", "chat", 1, "spot"),
        *(secret(name, f"sk-{name}") for name in ("search", "support", "trial", "spare")),
    )


SETTLED = {"search": "Bound", "support": "Bound", "trial": "Pending", "spare": "Bound"}


@pytest.mark.parametrize("allocator", ALLOCATORS)
async def test_it_converges_from_empty(
    cluster: Cluster, redis_server: RedisServer, allocator: str
) -> None:
    scene(cluster)
    async with controlling(cluster, redis_server.url, allocator=allocator):
        await until(lambda: states(cluster) == SETTLED, lambda: states(cluster))
        found = await granted(redis_server.url)
        verdicts = {name: it.verdict for name, it in found.items()}
        assert verdicts == {"search": "", "support": "", "trial": "pending", "spare": ""}
        digest = hashlib.sha256(b"sk-search").hexdigest()
        assert found["search"].digests == (digest,)
        await until(lambda: bool(cluster.list(EVENTS, SPACE)))
        # At rest nothing is written but Leases.
        await asyncio.sleep(0.5)
        before = len(cluster.calls)
        await asyncio.sleep(0.5)
        written = [it for it in cluster.calls[before:] if it.method != "GET"]
        assert [it.path for it in written if "/leases/" not in it.path] == []
        # What goes is not granted any more.
        cluster.delete(TOKEN_ENTITLEMENTS, "search", SPACE)
        await until(lambda: states(cluster).get("trial") == "Bound", lambda: states(cluster))
        assert "search" not in await granted(redis_server.url)


async def test_virtual_nodes_stay_alive_by_their_leases(
    cluster: Cluster, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.loop.NODE_BEAT_S", 0.05)
    scene(cluster)
    async with controlling(cluster, redis_server.url, allocator="virtual-node"):
        await until(lambda: states(cluster) == SETTLED, lambda: states(cluster))
        for _ in range(20):
            await cluster.advance(10)
            await asyncio.sleep(0.1)
        (node,) = cluster.list(NODES)
        ready = next(it for it in node["status"]["conditions"] if it["type"] == "Ready")
        assert ready["status"] == "True"
        assert states(cluster) == SETTLED


async def test_while_the_api_is_away_the_last_set_stays_and_its_age_grows(
    cluster: Cluster, redis_server: RedisServer
) -> None:
    scene(cluster)
    gateway = ClusterStore(redis_server.url)
    async with controlling(cluster, redis_server.url):
        await until(lambda: states(cluster) == SETTLED, lambda: states(cluster))
        before = await granted(redis_server.url)
        await cluster.stop()
        await asyncio.sleep(2.5)
        state = await gateway.read()
        assert state is not None
        assert state.age_s >= 2.0
        assert await granted(redis_server.url) == before
        cluster.delete(TOKEN_ENTITLEMENTS, "support", SPACE)
        await cluster.start()
        await until(lambda: states(cluster).get("trial") == "Bound", lambda: states(cluster))
        for _ in range(200):
            state = await gateway.read()
            assert state is not None
            if state.age_s < 2.0:
                break
            await asyncio.sleep(0.1)
        assert state.age_s < 2.0
        assert "support" not in await granted(redis_server.url)
    await gateway.close()


async def test_replicas_follow_the_gateways_demand_and_capacity_follows_the_replicas(
    cluster: Cluster, redis_server: RedisServer
) -> None:
    deployments = BACKENDS["Deployment"]
    reference = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "engines"}
    spec: dict[str, Any] = {"pool": "short", "backendRef": reference, "scaling": {"maxReplicas": 3}}
    cluster.apply(token_pool("chat", **spec), entitlement("search", "chat", 10))
    cluster.apply(secret("search", "sk-search"))

    def replicas() -> int:
        found = cluster.get(deployments, "engines", SPACE)
        return 0 if found is None else int(found["spec"]["replicas"])

    def become_ready(ready: int) -> None:
        status = {"status": {"replicas": ready, "readyReplicas": ready}}
        cluster.patch(deployments, "engines", status, SPACE, sub="status")

    gateway = ClusterStore(redis_server.url)
    async with controlling(cluster, redis_server.url):
        await until(lambda: states(cluster) == {"search": "Pending"}, lambda: states(cluster))
        labels = {"app": "engines"}
        template = {"metadata": {"labels": labels}, "spec": {"containers": []}}
        deployment = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
        cluster.apply(
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": "engines", "namespace": SPACE},
                "spec": deployment,
            }
        )
        become_ready(1)
        await until(lambda: states(cluster) == {"search": "Bound"}, lambda: states(cluster))
        await gateway.report({"chat": {"short": 2}})
        await until(lambda: replicas() == 2, replicas)
        await gateway.report({"chat": {"short": 9}})
        await until(lambda: replicas() == 3, replicas)
        become_ready(0)
        await until(lambda: states(cluster) == {"search": "Degraded"}, lambda: states(cluster))
    await gateway.close()


@pytest.mark.parametrize("as_event", [True, False])
async def test_forgotten_history_is_read_anew(
    cluster: Cluster, redis_server: RedisServer, as_event: bool
) -> None:
    scene(cluster)
    cluster.gone_as_event = as_event
    async with controlling(cluster, redis_server.url):
        await until(lambda: states(cluster) == SETTLED, lambda: states(cluster))
        for version in range(3):
            cluster.cut()
            cluster.patch(TOKEN_POOLS, "chat", {"spec": {"replicas": 2 + version}}, SPACE)
            cluster.compact()
            await until(lambda: states(cluster)["trial"] == "Bound", lambda: states(cluster))
            cluster.patch(TOKEN_POOLS, "chat", {"spec": {"replicas": 1}}, SPACE)
            await until(lambda: states(cluster)["trial"] != "Bound", lambda: states(cluster))


async def test_where_another_namespace_is_published_it_is_not_ready_and_says_so(
    cluster: Cluster, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    scene(cluster)
    other = ClusterStore(redis_server.url, "other")
    await other.publish(1, {}, age_s=0.0)
    await other.close()
    async with controlling(cluster, redis_server.url) as controller:
        await until(lambda: any("namespace other" in text for text in caplog.messages))
        await asyncio.sleep(0.3)
        assert not controller.ready()
        assert await granted(redis_server.url) == {}
        with redis_server.client() as client:
            client.hdel("sluice:1:{cluster}:head", "namespace")
        await until(controller.ready)
        assert await granted(redis_server.url) != {}
    assert sum("namespace other" in text for text in caplog.messages) == 1


async def test_a_failing_call_is_logged_once_and_holds_nothing_else_up(
    cluster: Cluster, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    scene(cluster)
    fault = Fault(lambda method, path: path.endswith("tokenentitlements/search/status"), status=422)
    cluster.faults.append(fault)
    async with controlling(cluster, redis_server.url):
        await until(lambda: states(cluster) == SETTLED | {"search": ""}, lambda: states(cluster))
        await until(lambda: fault.seen > 3)
        said = [it for it in caplog.messages if "TokenEntitlement search" in it]
        assert len(said) == 1
        assert said[0].startswith("cannot write the status of TokenEntitlement search: ")
        cluster.faults.clear()
        await until(lambda: states(cluster) == SETTLED, lambda: states(cluster))


class Mortal:
    """An API whose caller dies at its nth write, without the answer; 0: before the first."""

    def __init__(self, api: Any, nth: int) -> None:
        self._api = api
        self._left = nth
        self.died = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    async def make(self, call: Call) -> Object:
        if self.died.is_set():
            raise Away("dead")
        counts = call.resource not in (LEASES, EVENTS)
        if counts and self._left == 0:
            self.died.set()
            raise Away("dead")
        self._left -= counts
        last = counts and self._left == 0
        made: Object = await self._api.make(call)
        if last:
            self.died.set()
            raise Away("dead")
        return made


class Books:
    """Checks at each change of the cluster that no lease pod is there twice, or beyond capacity."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._seen = cluster.store.version

    def check(self) -> None:
        """All changes since the last check. Scenes have no growing entitlements."""
        pods: dict[tuple[str, ...], Object] = {}
        for change in self._cluster.store.log:
            if change.key[0] != "pods":
                continue
            if change.after is None:
                pods.pop(change.key, None)
            else:
                pods[change.key] = change.after
            of = [it["metadata"]["labels"]["sluice.dev/entitlement"] for it in pods.values()]
            assert len(of) == len(set(of)), f"two lease pods at {change.version}"
            bound = [it for it in pods.values() if it["spec"].get("nodeName")]
            held = sum(_requested(it) for it in bound)
            assert held <= 10, f"{held} bound at {change.version}"


def _requested(pod: Mapping[str, Any]) -> int:
    requests = pod["spec"]["containers"][0]["resources"]["requests"]
    return int(requests["sluice.dev/concurrency"])


def within_capacity(found: Mapping[str, ClusterEntitlement], capacity: int) -> None:
    """What gateways grant of reserving entitlements fits."""
    held = [
        it.fields["concurrency"]
        for it in found.values()
        if not it.verdict and it.fields["service_class"] in ("guaranteed", "elastic")
    ]
    assert sum(held) <= capacity


@pytest.mark.parametrize("allocator", ALLOCATORS)
async def test_killed_at_any_call_another_one_goes_on(
    redis_server: RedisServer, allocator: str
) -> None:
    """First from empty; then with a smaller pool, a smaller request, and one that is gone.

    Who died before a call took effect leaves what one leaves who died after the call before it.
    """
    for nth in range(100):
        if await _killed_at(redis_server, nth, allocator=allocator):
            break
    assert nth > 5


async def _killed_at(redis_server: RedisServer, nth: int, *, allocator: str) -> bool:
    """Whether the whole story took fewer writes."""
    with redis_server.client() as client:
        client.flushall()
    url = redis_server.url
    async with emulated_cluster(*PRIORITIES) as cluster:
        books, died = Books(cluster), False
        scene(cluster)
        mortal: list[Mortal] = []

        def wrapped(api: Any) -> Any:
            mortal.append(Mortal(api, nth))
            return mortal[0]

        async def settled(wanted: dict[str, str]) -> bool:
            """Whether it came to that; False when the controller died before."""
            await until(
                lambda: mortal[0].died.is_set() or states(cluster) == wanted,
                lambda: (nth, states(cluster)),
            )
            return not mortal[0].died.is_set()

        changed = {"search": "Bound", "support": "Degraded", "spare": "Bound"}
        async with controlling(cluster, url, allocator=allocator, around=wrapped):
            if await settled(SETTLED):
                _change(cluster)
                died = not await settled(changed)
            else:
                died = True
        if died:
            expire_lease(cluster)
            if "trial" in states(cluster):
                async with controlling(cluster, url, allocator=allocator, name="two"):
                    await until(lambda: states(cluster) == SETTLED, lambda: (nth, states(cluster)))
                    _change(cluster)
                    await until(lambda: states(cluster) == changed, lambda: (nth, states(cluster)))
            else:
                async with controlling(cluster, url, allocator=allocator, name="two"):
                    await until(lambda: states(cluster) == changed, lambda: (nth, states(cluster)))
        books.check()
        if allocator == "virtual-node":
            assert all(len(pods) == 1 for pods in lease_pods(cluster).values())
        within_capacity(await granted(url), 7)
        return not died


def _change(cluster: Cluster) -> None:
    cluster.patch(TOKEN_POOLS, "chat", {"spec": {"perReplica": {"concurrency": 7}}}, SPACE)
    smaller = {"spec": {"resources": {"concurrency": 5}}}
    cluster.patch(TOKEN_ENTITLEMENTS, "search", smaller, SPACE)
    cluster.delete(TOKEN_ENTITLEMENTS, "trial", SPACE)


class Recreating:
    """An API where an entitlement is replaced by one of the same name just before its status."""

    def __init__(self, api: Any, replace: Callable[[], None]) -> None:
        self._api = api
        self._replace = replace
        self.replaced = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    async def make(self, call: Call) -> Object:
        if call.verb == "patch_status" and call.name == "search" and not self.replaced:
            self.replaced = True
            self._replace()
        made: Object = await self._api.make(call)
        return made


async def test_an_entitlement_created_anew_has_nothing_of_the_former_one(
    cluster: Cluster, redis_server: RedisServer
) -> None:
    cluster.apply(token_pool("chat"), entitlement("search", "chat", 6, tenantId="former"))

    def replace() -> None:
        cluster.delete(TOKEN_ENTITLEMENTS, "search", SPACE)
        cluster.apply(entitlement("search", "chat", 60, tenantId="latter"))

    async with controlling(cluster, redis_server.url, around=lambda api: Recreating(api, replace)):
        await until(lambda: states(cluster) == {"search": "Pending"}, lambda: states(cluster))
        await asyncio.sleep(0.5)
        found = cluster.get(TOKEN_ENTITLEMENTS, "search", SPACE)
        assert found is not None
        assert found["status"]["tenantId"] == "latter"
        assert found["status"].keys().isdisjoint({"boundAt", "allocated"})
        assert (await granted(redis_server.url))["search"].verdict == "pending"


class Slow:
    """An API that takes its time for each status."""

    def __init__(self, api: Any) -> None:
        self._api = api

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    async def make(self, call: Call) -> Object:
        await asyncio.sleep(1.0 * (call.verb == "patch_status"))
        made: Object = await self._api.make(call)
        return made


async def test_a_key_is_taken_back_before_a_long_pass_has_ended(
    cluster: Cluster, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.loop.WRITING_S", 0.2)
    names = ["search", *(f"other-{at}" for at in range(160))]
    cluster.apply(token_pool("chat"), secret("search", "sk-former"))
    cluster.apply(*(entitlement(name, "chat", 1) for name in names))
    digest = hashlib.sha256(b"sk-latter").hexdigest()
    async with controlling(cluster, redis_server.url, around=Slow):
        await until(lambda: "".join(states(cluster).values()) != "")
        cluster.patch(SECRETS, "search-key", {"data": secret("search", "sk-latter")["data"]}, SPACE)
        for _ in range(16):
            found = await granted(redis_server.url)
            if found["search"].digests == (digest,):
                break
            await asyncio.sleep(0.5)
        assert found["search"].digests == (digest,)
        assert "" in states(cluster).values()


class Cut:
    """An API whose caller loses the network."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self.away = False

    def __getattr__(self, name: str) -> Any:
        if self.away:
            raise Away("cut off")
        return getattr(self._api, name)


async def test_a_second_controller_takes_over_and_the_first_is_fenced(
    cluster: Cluster, redis_server: RedisServer
) -> None:
    scene(cluster)
    url, cut = redis_server.url, list[Cut]()

    def wrapped(api: Any) -> Any:
        cut.append(Cut(api))
        return cut[0]

    def holder() -> tuple[str, int]:
        lease = cluster.get(LEASES, LEASE, SPACE)
        spec: Mapping[str, Any] = {} if lease is None else lease["spec"]
        return spec.get("holderIdentity", ""), spec.get("leaseTransitions", 0)

    async with controlling(cluster, url, around=wrapped) as first:
        await until(lambda: states(cluster) == SETTLED, lambda: states(cluster))
        assert holder() == ("one", 1)
        late = ClusterStore(url, SPACE)
        await late.publish(1, await granted(url), age_s=0.0)  # knows what Redis holds
        async with controlling(cluster, url, name="two"):
            await asyncio.sleep(0.5)
            assert holder() == ("one", 1)
            cut[0].away = True
            await until(lambda: holder() == ("two", 2), holder)
            assert first.metrics().get_sample_value("sluice_controller_leading") == 0
            cluster.delete(TOKEN_ENTITLEMENTS, "search", SPACE)
            await until(lambda: states(cluster).get("trial") == "Bound", lambda: states(cluster))
            with pytest.raises(Fenced):
                await late.publish(1, {}, age_s=0.0)
            assert set(await granted(url)) == {"support", "trial", "spare"}
            cut[0].away = False
            await asyncio.sleep(0.5)
            assert holder() == ("two", 2)
        # Stopped cleanly, it gives the Lease back.
        await until(lambda: holder() == ("one", 3), holder)
        await late.close()


async def test_the_command_serves_until_sigterm_and_gives_the_lease_back(
    cluster: Cluster, redis_server: RedisServer, tmp_path: Path
) -> None:
    scene(cluster)
    config = tmp_path / "kubeconfig"
    config.write_text(json.dumps(cluster.kubeconfig()), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sluice", "controller", "--namespace", SPACE),
        *("--host", "127.0.0.1", "--port", "0"),
        env={**os.environ, "KUBECONFIG": str(config), "SLUICE_STATE_URL": redis_server.url},
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        await until(lambda: states(cluster) == SETTLED, lambda: states(cluster))
        log = (await process.stderr.readuntil(b"leading")).decode()
        (port,) = re.findall(r"health and metrics on 127.0.0.1:(\d+)", log)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/ready")).status_code == 200
            text = (await client.get("/metrics")).text
        assert "sluice_controller_leading 1.0" in text
        assert 'sluice_controller_entitlements{state="bound"} 3.0' in text
        process.send_signal(signal.SIGTERM)
        rest = (await process.stderr.read()).decode()
        assert await process.wait() == 0
        assert "sk-" not in log + rest
        assert "Traceback" not in rest
        lease = cluster.get(LEASES, LEASE, SPACE)
        assert lease is not None
        assert lease["spec"]["holderIdentity"] == ""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
