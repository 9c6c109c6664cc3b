"""The controller's copy of the cluster: whole, current, and without keys in clear text."""

import asyncio
import base64
import copy
import gc
import hashlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import pytest

from controller.kube import ApiFailure, Away, Change, Expired, Forbidden, Listing, NotFound
from controller.mirror import RESYNC_S, WATCH_S, Mirror, digests_of
from controller.records import (
    BACKENDS,
    NODES,
    PODS,
    SECRETS,
    TOKEN_ENTITLEMENTS,
    TOKEN_POOLS,
    Object,
    Resource,
)
from controller.virtual_node import POD_LABEL, POOL_LABEL, pool_label
from tests.virtual_time import run


class Api:
    """Collections of one namespace, with their history."""

    def __init__(self) -> None:
        self.namespace = "team"
        self.objects: dict[Resource, dict[str, Object]] = {}
        self.version = 100
        self.oldest = 0
        """Watches from before this version are too old."""
        self.away = False
        self.absent: set[Resource] = set()
        """Kinds that the cluster does not have."""
        self.unwatched: set[Resource] = set()
        self.failing: set[Resource] = set()
        """Kinds that the API fails to list."""
        self.lists: list[tuple[Resource, str]] = []
        self.watching: list[tuple[Resource, str]] = []
        self._history: list[tuple[int, Resource, str, Object]] = []
        self._news = asyncio.Condition()

    async def put(self, resource: Resource, name: str, **more: Any) -> Object:
        held = self.objects.setdefault(resource, {})
        kind = "MODIFIED" if name in held else "ADDED"
        self.version += 1
        version = str(self.version)
        made = {"metadata": {"name": name, "resourceVersion": version, "managedFields": []}} | more
        held[name] = made
        await self._note(kind, resource, made)
        return copy.deepcopy(made)

    async def delete(self, resource: Resource, name: str) -> None:
        gone = copy.deepcopy(self.objects[resource].pop(name))
        self.version += 1
        gone["metadata"]["resourceVersion"] = str(self.version)
        await self._note("DELETED", resource, gone)

    async def interrupt(self, *, away: bool = False, compact: bool = False) -> None:
        """End the watches, as the server's end or the network's does."""
        async with self._news:
            self.away = away
            self.oldest = self.version + 1 if compact else self.oldest
            self.version += compact
            self.watching, ended = [], self.watching
            assert ended
            self._news.notify_all()

    async def list(self, resource: Resource, *, labels: str = "") -> Listing:
        await asyncio.sleep(0.01)
        self.lists.append((resource, labels))
        if self.away:
            raise Away("nobody answers")
        if resource in self.absent:
            raise NotFound("no such kind")
        if resource in self.failing:
            raise ApiFailure("conversion webhook failed")
        objects = copy.deepcopy(tuple(self.objects.get(resource, {}).values()))
        return Listing(objects=objects, version=str(self.version))

    async def watch(
        self, resource: Resource, version: str, *, labels: str = "", limit_s: int
    ) -> AsyncGenerator[Change, None]:
        loop = asyncio.get_running_loop()
        ends_s, mine = loop.time() + limit_s, (resource, labels)
        if self.away:
            raise Away("nobody answers")
        if resource in self.unwatched:
            raise Forbidden("watch is not allowed")
        if int(version) < self.oldest:
            raise Expired("too old")
        self.watching.append(mine)
        seen = int(version)
        while True:
            for number, of, kind, told in self._history:
                if number > seen and of == resource:
                    yield kind, copy.deepcopy(told)  # type: ignore[misc]
            seen = self.version
            try:
                async with asyncio.timeout_at(ends_s), self._news:
                    await self._news.wait()
            except TimeoutError:
                yield "BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}}
                self.watching.remove(mine)
                return
            if mine not in self.watching:
                if self.away:
                    raise Away("the connection broke")
                return

    async def _note(self, kind: str, resource: Resource, told: Object) -> None:
        async with self._news:
            self._history.append((self.version, resource, kind, copy.deepcopy(told)))
            self._news.notify_all()


POOL: dict[str, Any] = {"model": "m", "perReplica": {"concurrency": 1}}
LWS = {
    "apiVersion": "leaderworkerset.x-k8s.io/v1",
    "kind": "LeaderWorkerSet",
    "name": "engine",
}


class Scene:
    """A mirror that follows an API, and how often it told of changes."""

    def __init__(self, *, virtual_nodes: bool = False) -> None:
        self.api = Api()
        self.changes = 0
        self.mirror = Mirror(
            self.api,  # type: ignore[arg-type]
            virtual_nodes=virtual_nodes,
            on_change=self._changed,
        )

    def _changed(self) -> None:
        self.changes += 1

    def pools(self) -> set[str]:
        world = self.mirror.world(0.0)
        assert world is not None
        return set(world.pools)


def played(play: Callable[[Scene], Coroutine[Any, Any, None]], **more: bool) -> None:
    async def scene() -> None:
        made = Scene(**more)
        await made.api.put(TOKEN_POOLS, "first", spec={"model": "m"})
        following = asyncio.ensure_future(made.mirror.run())
        assert made.mirror.world(0.0) is None
        await asyncio.sleep(1)
        try:
            await play(made)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    run(scene())


def test_changes_arrive_by_the_watch() -> None:
    async def play(scene: Scene) -> None:
        before = scene.changes
        await scene.api.put(TOKEN_POOLS, "second", spec={})
        await scene.api.delete(TOKEN_POOLS, "first")
        await asyncio.sleep(0.1)
        assert scene.pools() == {"second"}
        assert scene.changes == before + 2
        assert len(scene.api.lists) == 3

    played(play)


def test_a_version_that_is_too_old_is_listed_anew_with_what_went_meanwhile() -> None:
    async def play(scene: Scene) -> None:
        await scene.api.interrupt(away=True)
        await asyncio.sleep(1)
        await scene.api.delete(TOKEN_POOLS, "first")
        await scene.api.put(TOKEN_POOLS, "second", spec={})
        scene.api.oldest, scene.api.away = scene.api.version + 1, False
        scene.api.version += 1
        await asyncio.sleep(60)
        assert scene.pools() == {"second"}

    played(play)


def test_the_last_set_stays_and_ages_while_the_api_is_away() -> None:
    async def play(scene: Scene) -> None:
        await asyncio.sleep(300)
        assert scene.mirror.age_s() <= 1.1 * WATCH_S
        await scene.api.interrupt(away=True)
        await asyncio.sleep(1_000)
        assert scene.pools() == {"first"}
        assert scene.mirror.age_s() >= 1_000
        scene.api.away = False
        await asyncio.sleep(60)
        assert scene.mirror.age_s() <= 1.1 * WATCH_S

    played(play)


def test_collections_are_listed_anew_now_and_then_but_not_together() -> None:
    async def play(scene: Scene) -> None:
        first = len(scene.api.lists)
        await asyncio.sleep(0.75 * RESYNC_S)
        assert len(scene.api.lists) == first
        await asyncio.sleep(0.5 * RESYNC_S + 1.1 * WATCH_S)
        assert len(scene.api.lists) >= 2 * first
        assert scene.changes == 3  # of the first lists

    played(play)


def test_only_backends_that_token_pools_name_are_read() -> None:
    async def play(scene: Scene) -> None:
        deployments, engines = BACKENDS["Deployment"], BACKENDS["InferencePool"]
        await scene.api.put(deployments, "engine", spec={})
        await scene.api.put(engines, "pool", spec={"selector": {"matchLabels": {"app": "vllm"}}})
        await scene.api.put(PODS, "vllm-0", spec={})
        await asyncio.sleep(1)
        world = scene.mirror.world(0.0)
        assert world is not None
        assert not world.backends
        assert not world.pods
        reference = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "engine"}
        await scene.api.put(TOKEN_POOLS, "first", spec=POOL | {"backendRef": reference})
        version = "inference.networking.k8s.io/v1"
        other = {"apiVersion": version, "kind": "InferencePool", "name": "pool"}
        await scene.api.put(TOKEN_POOLS, "second", spec=POOL | {"backendRef": other})
        await asyncio.sleep(1)
        world = scene.mirror.world(0.0)
        assert world is not None
        assert set(world.backends) == {("Deployment", "engine"), ("InferencePool", "pool")}
        assert set(world.pods) == {"vllm-0"}
        assert (PODS, "app=vllm") in scene.api.watching
        await scene.api.delete(TOKEN_POOLS, "second")
        await asyncio.sleep(1)
        world = scene.mirror.world(0.0)
        assert world is not None
        assert set(world.backends) == {("Deployment", "engine")}
        assert not world.pods

    played(play)


def test_a_kind_of_backend_that_the_cluster_lacks_counts_as_empty() -> None:
    async def play(scene: Scene) -> None:
        scene.api.absent.add(BACKENDS["LeaderWorkerSet"])
        await scene.api.put(TOKEN_POOLS, "first", spec=POOL | {"backendRef": LWS})
        await asyncio.sleep(1_000)
        assert scene.pools() == {"first"}
        assert scene.mirror.age_s() < 100

    played(play)


def test_a_kind_of_backend_that_cannot_be_listed_holds_nothing_else_up() -> None:
    async def play(scene: Scene) -> None:
        scene.api.failing.add(BACKENDS["LeaderWorkerSet"])
        await scene.api.put(BACKENDS["LeaderWorkerSet"], "engine", spec={})
        await scene.api.put(TOKEN_POOLS, "first", spec=POOL | {"backendRef": LWS})
        await asyncio.sleep(60)
        world = scene.mirror.world(0.0)
        assert world is not None
        assert world.unread == {"LeaderWorkerSet"}
        scene.api.failing.clear()
        await asyncio.sleep(60)
        world = scene.mirror.world(0.0)
        assert world is not None
        assert not world.unread
        assert set(world.backends) == {("LeaderWorkerSet", "engine")}

    played(play)


def test_where_only_watches_fail_lists_have_to_do_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def play(scene: Scene) -> None:
        scene.api.unwatched.add(TOKEN_POOLS)
        await scene.api.interrupt()
        await asyncio.sleep(RESYNC_S / 2)
        listed = [resource for resource, _ in scene.api.lists].count(TOKEN_POOLS)
        assert 5 < listed < 30
        await scene.api.put(TOKEN_POOLS, "late", spec=POOL)
        await asyncio.sleep(60)
        assert "late" in scene.pools()
        assert scene.mirror.age_s() < 100
        assert len([line for line in caplog.messages if "watch is not allowed" in line]) == 1

    played(play)


@pytest.mark.parametrize("spec", [None, [], "x", {"backendRef": "x"}, {"backendRef": [1]}])
def test_a_malformed_token_pool_stops_nothing(spec: object) -> None:
    async def play(scene: Scene) -> None:
        await scene.api.put(TOKEN_POOLS, "broken", spec=spec)
        await scene.api.put(TOKEN_POOLS, "good", spec=POOL)
        await asyncio.sleep(1)
        assert scene.pools() >= {"broken", "good"}

    played(play)


def test_a_late_answer_brings_back_nothing_that_was_deleted_since() -> None:
    async def play(scene: Scene) -> None:
        answer = await scene.api.put(TOKEN_ENTITLEMENTS, "search", spec={}, status={})
        await scene.api.delete(TOKEN_ENTITLEMENTS, "search")
        await asyncio.sleep(1)
        scene.mirror.written(TOKEN_ENTITLEMENTS, answer)
        await asyncio.sleep(1)
        world = scene.mirror.world(0.0)
        assert world is not None
        assert not world.entitlements

    played(play)


def test_an_own_write_counts_at_once_and_is_not_undone_by_older_news() -> None:
    async def play(scene: Scene) -> None:
        early = await scene.api.put(TOKEN_ENTITLEMENTS, "search", spec={}, status={"state": "1"})
        written = await scene.api.put(TOKEN_ENTITLEMENTS, "search", spec={}, status={"state": "2"})
        scene.mirror.written(TOKEN_ENTITLEMENTS, copy.deepcopy(written))
        states: list[str] = []
        for _ in range(20):
            world = scene.mirror.world(0.0)
            assert world is not None
            states.append(world.entitlements["search"]["status"]["state"])
            await asyncio.sleep(0)
        assert set(states) == {"2"}
        scene.mirror.written(TOKEN_ENTITLEMENTS, early)
        world = scene.mirror.world(0.0)
        assert world is not None
        assert world.entitlements["search"]["status"]["state"] == "2"
        await scene.api.put(TOKEN_ENTITLEMENTS, "search", spec={}, status={"state": "3"})
        await asyncio.sleep(0.1)
        world = scene.mirror.world(0.0)
        assert world is not None
        assert world.entitlements["search"]["status"]["state"] == "3"

    played(play)


def test_an_answer_that_comes_late_brings_nothing_back() -> None:
    """The watch may tell of a change, and of a deletion after it, before the answer arrives."""

    async def play(scene: Scene) -> None:
        late = await scene.api.put(TOKEN_POOLS, "first", spec={}, status={"replicas": 1})
        await scene.api.delete(TOKEN_POOLS, "first")
        await asyncio.sleep(0.1)
        scene.mirror.written(TOKEN_POOLS, late)
        assert scene.pools() == set()

    played(play)


def test_lease_pods_are_followed_where_the_scheduler_allocates() -> None:
    async def play(scene: Scene) -> None:
        assert (PODS, POD_LABEL) in scene.api.watching

    played(play, virtual_nodes=True)


@pytest.mark.parametrize("namespace", ["team", "n" * 60])
def test_virtual_nodes_are_those_of_the_own_namespace(namespace: str) -> None:
    async def play(scene: Scene) -> None:
        scene.api.namespace = namespace
        for name, space in (("own", namespace), ("other", "team-two"), ("another", "a")):
            labels = {POOL_LABEL: pool_label(space, "chat")}
            metadata = {"name": name, "resourceVersion": "999", "labels": labels}
            scene.mirror.written(NODES, {"metadata": metadata})
        world = scene.mirror.world(0.0)
        assert world is not None
        assert set(world.nodes) == {"own"}

    played(play, virtual_nodes=True)


def encoded(value: bytes) -> str:
    return base64.b64encode(value).decode()


@pytest.mark.parametrize(
    ("value", "digest"),
    [
        (b"sk-1", hashlib.sha256(b"sk-1").hexdigest()),
        (b"sk-1\n", hashlib.sha256(b"sk-1").hexdigest()),
        (b"sk-1\r\n", hashlib.sha256(b"sk-1").hexdigest()),
        (b"sha256:" + b"ab" * 32 + b"\n", "ab" * 32),
        (b"sha256:" + b"AB" * 32, "ab" * 32),
        (b"sha256:ab", None),
        (b"\n", None),
        (b"", None),
    ],
)
def test_a_secret_holds_a_key_or_its_hash(value: bytes, digest: str | None) -> None:
    found = digests_of({"data": {"api-key": encoded(value), "none": None}})
    assert found == ({} if digest is None else {"api-key": digest})


def test_no_key_in_clear_text_stays_in_memory() -> None:
    key = b"sk-a-key-that-nobody-may-read"

    async def play(scene: Scene) -> None:
        for name in ("one", "two"):
            await scene.api.put(SECRETS, name, data={"api-key": encoded(key)})
            await asyncio.sleep(RESYNC_S)
        world = scene.mirror.world(0.0)
        assert world is not None
        assert world.digests["two"] == {"api-key": hashlib.sha256(key).hexdigest()}
        texts = _texts(vars(scene.mirror) | {"_api": None}, skip=scene)
        assert hashlib.sha256(key).hexdigest() in texts
        assert not [text for text in texts if key.decode() in text or encoded(key) in text]

    played(play)


def _texts(root: object, *, skip: Scene) -> set[str]:
    """All texts that a value leads to, but those of the scene's server."""
    found: set[str] = set()
    seen = {id(skip), id(skip.api), id(skip.api.objects)}
    left: list[object] = [root]
    while left:
        item = left.pop()
        if id(item) in seen or isinstance(item, type) or callable(item):
            continue
        seen.add(id(item))
        if isinstance(item, str):
            found.add(item)
        elif isinstance(item, bytes):
            found.add(item.decode("latin-1"))
        elif not isinstance(item, asyncio.Task):
            left += gc.get_referents(item)
    return found
