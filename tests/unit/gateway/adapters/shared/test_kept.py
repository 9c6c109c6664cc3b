"""What the parent keeps for its workers: health, drains, what was learned, what was counted."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from gateway.adapters.engine_kv import EngineKv
from gateway.adapters.shared.directory import DirectoryDesk, SharedDirectory
from gateway.adapters.shared.figures import FiguresDesk, SharedFigures
from gateway.adapters.shared.health import DRAIN, Drains, Mirror, Reporter
from gateway.adapters.shared.learned import KEPT, LearnedDesk, SharedState
from gateway.adapters.shared.leases import SharedLeases
from gateway.adapters.shared.leases_desk import LeasesDesk
from gateway.adapters.shared.link import Link
from gateway.adapters.shared.wire import packed, unpacked
from gateway.adapters.store.directory import MemoryDirectory
from gateway.adapters.store.memory import MemoryLeases
from gateway.adapters.store.sqlite import SqliteState
from gateway.policy import fleet
from gateway.policy.entitlements import Entitlement
from gateway.policy.learned import Sums
from gateway.policy.served import ServedModel
from gateway.ports import EntitlementEntry
from tests.builders import served_model
from tests.fakes import FakeClock
from tests.shared import Family

M = "default:m"


@pytest.fixture
async def family() -> AsyncIterator[Family]:
    found = Family()
    yield found
    await found.close()


class Engines:
    """A parent's view of the engines, and two workers that report theirs."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.clock = FakeClock()
        self.parents = served_model()
        self.kv = EngineKv()
        self.kept = True
        LeasesDesk(family.hub, MemoryLeases({"m": self.parents}, self.clock))
        Mirror(family.hub, {"m": self.parents}, self.kv, lambda: self.kept)
        self.theirs: list[ServedModel] = []
        self.reporters: list[Reporter] = []

    async def join(self) -> tuple[ServedModel, Reporter, EngineKv]:
        served, kv = served_model(), EngineKv()
        link = await self.family.join()
        store = SharedLeases(link, {"m": served})
        return served, Reporter(link, store, {"m": served}, kv, self.clock), kv

    def available(self) -> list[int]:
        return list(fleet.available(self.parents.pools[0], self.clock()))


async def test_the_parent_s_capacity_is_what_the_leading_worker_sees(family: Family) -> None:
    engines = Engines(family)
    (one, first, kv), (two, second, _) = await engines.join(), await engines.join()
    fleet.probed(one.pools[0], 0, ok=False)
    fleet.probed(two.pools[0], 1, ok=False)
    kv.kv_bytes_by_worker["m", 0, 1] = 777
    await second.step()
    assert engines.available() == [0], "nobody else has said anything"
    await first.step()
    assert engines.available() == [1]
    assert engines.kv.of("m", 0, 1) == 777
    fleet.probed(one.pools[0], 0, ok=True)
    await first.step()
    assert engines.available() == [0, 1]
    await family.die(family.links[0])
    assert engines.available() == [0], "now the other leads"


async def test_a_worker_hears_whether_the_parent_can_keep_things(family: Family) -> None:
    engines = Engines(family)
    _, reporter, _ = await engines.join()
    await reporter.step()
    assert reporter.up
    engines.kept = False
    await reporter.step()
    assert reporter.up, "it asks once a second"
    engines.clock.advance(1.0)
    await reporter.step()
    assert not reporter.up


async def test_a_drained_engine_is_drained_everywhere_and_in_newcomers(family: Family) -> None:
    Drains(family.hub)
    told: dict[int, list[object]] = {}

    def hear(link: Link) -> None:
        def heard(payload: bytes) -> bytes:
            told.setdefault(link.index, []).append(unpacked(payload))
            return b""

        link.on(DRAIN, heard)

    links = [await family.join(prepare=hear) for _ in range(2)]
    await links[0].call(DRAIN, ("w0", True))
    await links[0].call(DRAIN, ("w1", True))
    await links[1].call(DRAIN, ("w1", False))
    assert told == {1: [["w0", True], ["w1", True]], 0: [["w1", False]]}
    await family.join(prepare=hear)
    await family.quiet()
    assert told[2] == [["w0", True]]


def record(mean: float, n: int = 7, rate: float = 1.0) -> dict[str, Sums]:
    return {"ratio.prose": Sums(epoch=1, n=n, rate=rate, sums={"total": mean, "weight": 1.0})}


async def test_the_file_keeps_the_mean_of_what_all_workers_learned(
    family: Family, tmp_path: Path
) -> None:
    file, clock = tmp_path / "state.db", FakeClock()
    desk = LearnedDesk(family.hub, [M], SqliteState(file), clock)
    await desk.start()
    one, two = [SharedState(await family.join()) for _ in range(2)]
    await one.exchange({M: record(4.0, rate=30.0)})
    await two.exchange({M: record(5.0, n=9, rate=10.0)})
    await desk.close()
    again = Family()
    desk = LearnedDesk(again.hub, [M], SqliteState(file), clock)
    await desk.start()
    state = SharedState(await again.join())
    heard = (await state.exchange({M: None})).peers[M]
    assert [peer.parts["ratio.prose"].sums["total"] for peer in heard] == [
        pytest.approx(4.25, rel=1e-9)
    ]
    assert heard[0].parts["ratio.prose"].n == 9
    assert (await state.exchange({M: None})).peers == {}, "each is heard once"
    await desk.close()
    await again.close()


async def test_what_a_dead_worker_knew_is_told_to_its_successor(family: Family) -> None:
    desk = LearnedDesk(family.hub, [M])
    await desk.start()
    link = await family.join()
    await SharedState(link).exchange({M: record(4.0)})
    await family.die(link)
    heard = await SharedState(await family.join(0)).exchange({M: None})
    assert [peer.parts for peer in heard.peers[M]] == [record(4.0)]
    assert heard.missing == {M}


async def test_what_many_dead_workers_knew_is_bounded(family: Family) -> None:
    LearnedDesk(family.hub, [M])
    for n in range(KEPT + 4):
        link = await family.join(0)
        await SharedState(link).exchange({M: record(float(n))})
        await family.die(link)
    heard = await SharedState(await family.join(0)).exchange({M: None})
    assert len(heard.peers[M]) == KEPT


class Counted:
    """A worker that counted something."""

    def __init__(self, link: Link, count: int) -> None:
        self.count = count
        self.shared = SharedFigures(
            link, lambda: packed([self.count]), lambda: packed([self.count, "gauges"])
        )


async def test_a_page_has_what_the_others_count_now_and_what_the_dead_left(
    family: Family,
) -> None:
    def merge(payloads: list[bytes]) -> bytes:
        return packed([sum(unpacked(payload)[0] for payload in payloads)])

    FiguresDesk(family.hub, merge, lambda: packed([1000]))  # type: ignore[arg-type]
    one, two, three = [Counted(await family.join(), n) for n in (1, 20, 300)]
    two.count = 21
    for worker in (two, three):
        await worker.shared.close()  # sends its counts
    told = [unpacked(payload) for payload in await one.shared.others()]
    assert told == [[1000], [21, "gauges"], [300, "gauges"]]
    await family.die(family.links[2])
    told = [unpacked(payload) for payload in await one.shared.others()]
    assert told == [[1000], [21, "gauges"], [300]]
    await family.die(family.links[1])
    told = [unpacked(payload) for payload in await one.shared.others()]
    assert told == [[1000], [321]]


def entry(name: str) -> EntitlementEntry:
    return EntitlementEntry(terms=Entitlement(name=name, model="m", created=1))


async def test_a_change_is_answered_when_everybody_knows(family: Family) -> None:
    order: list[str] = []
    directory = MemoryDirectory()

    async def take_over() -> None:
        order.append("parent")

    DirectoryDesk(family.hub, directory, take_over)
    views = [SharedDirectory(await family.join()) for _ in range(2)]

    async def poll() -> None:
        await asyncio.sleep(0)
        order.append(f"worker {[e.terms.name for e in (await views[1].load()).entries]}")

    views[1].when_changed(poll)
    written = await views[0].put(entry("a"))
    order.append("answered")
    await views[0].delete(msgspec.structs.replace(entry("a"), version=written.revision))
    assert order == ["parent", "worker ['a']", "answered", "parent", "worker []"]


async def test_a_directory_of_many_entitlements_arrives_whole(family: Family) -> None:
    directory = MemoryDirectory()
    many = [entry(f"e{n:04}") for n in range(1234)]
    await directory.put(*many)

    async def take_over() -> None: ...

    DirectoryDesk(family.hub, directory, take_over)
    kept = await SharedDirectory(await family.join()).load()
    assert kept == await directory.load()
    found = [msgspec.structs.replace(e, version=0) for e in kept.entries]
    assert msgspec.msgpack.encode(found) == msgspec.msgpack.encode(many)
