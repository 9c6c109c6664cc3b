"""One contract for every source of engines: the current set, each change, passing failures."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path

import pytest

from gateway.background_task import BackgroundTasks
from gateway.fleet import discovery as runner
from gateway.fleet import discovery_dns as dns_source
from gateway.fleet import fleet, kubernetes
from gateway.fleet.discovery import Source
from gateway.ports import DiscoveryFailure, Sets
from gateway.settings.worker import WorkerConfig
from tests.unit.gateway.fleet.test_rotation import Bench
from tests.worlds import KINDS, World, world_of

PORT = 8000


@pytest.fixture(params=KINDS)
async def world(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[World]:
    for module, name in (
        (dns_source, "MIN_TTL_S"),
        (dns_source, "EMPTY_TTL_S"),
        (kubernetes, "RETRY_PAUSE_S"),
        (runner, "FIRST_PAUSE_S"),
        (runner, "MAX_PAUSE_S"),
    ):
        monkeypatch.setattr(module, name, 0.01)
    async with world_of(request.param, tmp_path, PORT) as made:
        yield made


async def exhausted(sets: Sets) -> None:
    """Read sets for ever."""
    async for _ in sets:
        pass


async def until(named: Sets, ips: Sequence[str]) -> None:
    """Follow a source until it names exactly the engines at these addresses."""
    wanted = {f"http://{ip}:{PORT}" for ip in ips}
    async with asyncio.timeout(10), aclosing(named) as sets:
        async for found in sets:
            if {url for engine in found for url in engine.urls} == wanted:
                return


async def test_the_first_set_is_the_current_one(world: World) -> None:
    await world.names(["127.0.0.2", "127.0.0.3"])
    async with asyncio.timeout(10), aclosing(world.sets()) as sets:
        found = await anext(sets)
    assert {url for engine in found for url in engine.urls} == {
        f"http://127.0.0.{n}:{PORT}" for n in (2, 3)
    }


async def test_engines_that_come_and_go_are_seen_one_set_after_another(world: World) -> None:
    await world.names(["127.0.0.2"])
    sizes: list[int] = []
    async with asyncio.timeout(20), aclosing(world.sets()) as sets:
        async for found in sets:
            if sizes[-1:] == [len(found)]:
                continue
            sizes.append(len(found))
            if len(sizes) == 1:
                await world.names(["127.0.0.2", "127.0.0.3"])
            elif len(sizes) == 2:
                await world.names([])
            elif len(found) == 0:
                break
    assert sizes[:2] == [1, 2]
    assert sizes[-1] == 0


async def test_a_source_that_fails_says_so_and_can_be_asked_again(world: World) -> None:
    await world.names(["127.0.0.2"])
    async with asyncio.timeout(10), aclosing(world.sets()) as sets:
        await anext(sets)
        await world.away(on=True)
        with pytest.raises(DiscoveryFailure, match=r"\w"):
            await exhausted(sets)
    await world.away(on=False)
    await world.names(["127.0.0.2", "127.0.0.4"])
    await until(world.sets(), ["127.0.0.2", "127.0.0.4"])


class Followed:
    """A rotation that follows a world's source."""

    def __init__(self, world: World) -> None:
        self.bench = Bench()
        self.worker = WorkerConfig(discover="file:///unused")
        self.source = Source(
            "m",
            "only",
            "test://source",
            world.sets,
            self.worker.addresses_for,
            partial(self.bench.rotation.apply_to, "m", "only", "test://source"),
        )
        self.running = BackgroundTasks()

    async def until(self, *ips: str) -> None:
        async with asyncio.timeout(10):
            while self.bench.available != {f"{ip}:{PORT}" for ip in ips}:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        await self.running.close()
        await self.bench.prober.close()


async def test_a_pool_follows_its_source_and_keeps_the_last_set_while_that_is_away(
    world: World,
) -> None:
    await world.names(["127.0.0.2", "127.0.0.3"])
    followed = Followed(world)
    followed.running.start(followed.source.run())
    await followed.until("127.0.0.2", "127.0.0.3")
    await world.away(on=True)
    async with asyncio.timeout(10):
        while not followed.source.failing:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert followed.bench.available == {f"127.0.0.2:{PORT}", f"127.0.0.3:{PORT}"}
    await world.away(on=False)
    await world.names(["127.0.0.3", "127.0.0.5"])
    await followed.until("127.0.0.3", "127.0.0.5")
    assert followed.source.failing == ""
    await followed.close()


async def test_a_dropped_engine_drains(world: World) -> None:
    await world.names(["127.0.0.2"])
    followed = Followed(world)
    followed.running.start(followed.source.run())
    await followed.until("127.0.0.2")
    pool = followed.bench.pool
    fleet.start(pool, 0, 1, 10)
    await world.names([])
    await followed.until()
    followed.bench.rotation.sweep()
    assert followed.bench.names == [f"127.0.0.2:{PORT}"]
    fleet.finish(pool, 0, 1, 10)
    followed.bench.rotation.sweep()
    assert followed.bench.names == []
    await followed.close()
