"""Any history of controllers that publish through a Redis that fails: gateways end with their set.

Calls are lost on the way, or answered too late, or arrive after their successor; Redis comes back
empty or older; controllers are replaced, and replaced ones still write. Whatever happened, once the
present controller has published without failure, a gateway that reads holds exactly that set.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any, Final

import pytest

from bench.common.fleet import RedisServer
from gateway.errors import StateFailure
from gateway.records.tenancy import ClusterEntitlement, KnownCluster
from gateway.store.redis import cluster
from gateway.store.redis.cluster import ClusterStore, Fenced
from gateway.tenancy.known import joined
from tests.contract.test_cluster_store import granted

pytestmark = pytest.mark.redis
NAMES: Final = [f"e{number}" for number in range(6)]
EVENTS: Final = (*["publish"] * 6, *["read"] * 4, "copy", "restore", "flush", "replace", "former")
APART_S: Final = 0.01
"""Losses are apart from writes: revisions go by the server's milliseconds."""


class FailingStore(ClusterStore):
    """A controller's, whose writes may fail."""

    def __init__(self, url: str, chance: random.Random) -> None:
        super().__init__(url)
        self.fails = False
        self.late: list[tuple[object, ...]] = []
        """Calls that were given up, and have not arrived yet."""
        self._chance = chance

    async def _run(self, *arguments: object) -> Any:
        fate = self._chance.choice(["", "", "lost", "arrived", "late"]) if self.fails else ""
        if fate == "late":
            self.late.append(arguments)
        if fate not in {"lost", "late"}:
            answer = await super()._run(*arguments)
            if not fate:
                if self.late and self._chance.random() < 0.5:
                    await super()._run(*self.late.pop())
                return answer
        raise StateFailure("no answer from Redis within 0.25 s")


class Gateway:
    def __init__(self, store: ClusterStore) -> None:
        self.store, self.known = store, KnownCluster()

    async def read(self) -> None:
        before = self.known.version
        state = await self.store.read(before)
        self.known, _ = joined(self.known, state, frozenset())
        assert self.known.version >= before


@pytest.fixture
async def opened(redis_server: RedisServer) -> AsyncIterator[Callable[..., Any]]:
    async with AsyncExitStack() as stack:

        def opening(kind: type[ClusterStore], *arguments: Any) -> ClusterStore:
            store = kind(redis_server.url, *arguments)
            stack.push_async_callback(store.close)
            return store

        yield opening


@pytest.mark.parametrize("seed", range(40))
async def test_gateways_end_with_what_the_controller_publishes(
    seed: int,
    opened: Callable[..., Any],
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "BATCH", 2)
    monkeypatch.setattr(cluster, "MISSED_MOST", 3)
    chance, epoch, wanted = random.Random(seed), 1, dict[str, ClusterEntitlement]()
    writers = [opened(FailingStore, chance)]
    gateways = [Gateway(opened(ClusterStore)) for _ in range(2)]
    copies: list[Any] = [{}]
    with redis_server.client() as client:
        for event in chance.choices(EVENTS, k=chance.randint(3, 25)):
            if event == "publish":
                some = [name for name in NAMES if chance.random() < 0.6]
                wanted = granted(*some, verdict=chance.choice(["", "pending"]))
                writers[-1].fails = chance.random() < 0.4
                with contextlib.suppress(StateFailure):
                    await writers[-1].publish(epoch, wanted, age_s=0.0)
            elif event == "read":
                await chance.choice(gateways).read()
            elif event == "copy":
                copies.append({key: client.dump(key) for key in client.scan_iter()})
            elif event == "replace":
                epoch += 1
                writers.append(opened(FailingStore, chance))
            elif event == "former":
                of = chance.randrange(len(writers))
                with contextlib.suppress(StateFailure, Fenced):
                    await writers[of].publish(of + 1, wanted, age_s=0.0)
            else:
                client.flushall()
                await asyncio.sleep(APART_S)
                for key, value in (chance.choice(copies) if event == "restore" else {}).items():
                    client.restore(key, 0, value)
    writers[-1].fails = False
    for _ in range(2):
        await writers[-1].publish(epoch, wanted, age_s=0.0)
    for gateway in [*gateways, Gateway(opened(ClusterStore))]:
        for _ in range(2):  # the first may find a set half written
            await gateway.read()
        assert gateway.known.entitlements == wanted
