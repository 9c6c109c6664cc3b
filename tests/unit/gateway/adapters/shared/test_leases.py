"""Leases of several workers in one parent: one limit, and none left by a worker that dies."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.adapters.shared.leases import SharedLeases
from gateway.adapters.shared.leases_desk import SLICE, LeasesDesk
from gateway.adapters.store.memory import MemoryLeases
from gateway.domain import Ask, Lease, Usage
from gateway.errors import RateLimited, Unavailable
from gateway.policy.ledger import LEASE_TTL_S, TokenPool
from gateway.ports import Settlement
from tests.builders import served_model
from tests.fakes import FakeClock
from tests.shared import Family
from tests.token_pools import NOW_S, entitled, pool

USED = Settlement(usage=Usage(prompt_tokens=60, completion_tokens=0), dispatched=True)


class Workers:
    """Two workers and their parent, whose clock is told."""

    def __init__(self, book: TokenPool) -> None:
        self.clock = FakeClock(NOW_S)
        self.book = book
        self.family = Family()
        self.parent = MemoryLeases(
            {"m": served_model()}, self.clock, {"m": book}, wall_clock=self.clock
        )
        LeasesDesk(self.family.hub, self.parent)

    async def start(self) -> "Workers":
        self.links = [await self.family.join() for _ in range(2)]
        self.stores = [SharedLeases(link, {"m": served_model()}) for link in self.links]
        return self

    async def quiet(self) -> None:
        """Return once the parent knows all that the workers did."""
        for store in self.stores:
            if store.up:
                await store.view("m", [])

    async def admit(self, worker: int, lease_id: str, name: str = "e", **more: object) -> Lease:
        known = {"pool": 0, "alternates": (), "cost_tokens": 100, "sequences": 1, **more}
        ask = Ask(lease_id=lease_id, model="m", entitlement=name, **known)  # type: ignore[arg-type]
        return await self.stores[worker].admit(ask)


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    book = pool(
        entitled(limit=2), entitled("p", "preemptible"), entitled("g", "guaranteed", baseline=2)
    )
    found = await Workers(book).start()
    yield found
    await found.family.close()


async def test_a_limit_holds_over_all_workers(workers: Workers) -> None:
    await workers.admit(0, "a")
    held = await workers.admit(1, "b")
    for worker in (0, 1):
        with pytest.raises(RateLimited) as refused:
            await workers.admit(worker, f"c{worker}")
        assert refused.value.reason == "concurrency"
    workers.stores[1].settle(held, USED)
    await workers.quiet()
    assert (await workers.admit(0, "d")).limits is not None
    assert [store.active for store in workers.stores] == [2, 0]


async def test_the_leases_of_a_worker_that_dies_end_as_if_their_time_were_up(
    workers: Workers,
) -> None:
    await workers.admit(0, "a")
    await workers.admit(1, "b")
    await workers.family.die(workers.links[0])
    account = workers.book.accounts["e"]
    assert set(workers.book.leases) == {"b"}
    assert workers.book.leases["b"].owner != ""
    assert (account.total, account.used, account.debited) == (1, 100, 200)
    assert workers.parent.active == 1
    workers.stores[0].settle((await workers.admit(1, "c")), USED)
    await workers.quiet()
    assert account.used == 100, "what a dead worker would say is heard by nobody"


async def test_many_leases_of_a_dead_worker_all_end() -> None:
    found = await Workers(pool(entitled(limit=5000), slots=(5000,))).start()
    count = 2 * SLICE + 7
    await asyncio.gather(*(found.admit(0, f"{n}") for n in range(count)))
    assert found.book.accounts["e"].total == count
    await found.family.die(found.links[0])
    await found.family.quiet(found.links[1])
    for _ in range(5):
        await asyncio.sleep(0)
    assert (found.book.accounts["e"].total, found.parent.active) == (0, 0)
    assert found.book.accounts["e"].used == 100 * count, "each once"
    await found.family.close()


async def test_a_worker_that_hangs_loses_its_leases_as_they_expire(workers: Workers) -> None:
    await workers.admit(0, "hangs")
    await workers.admit(1, "lives")
    for _ in range(3):
        workers.clock.advance(LEASE_TTL_S - 1)
        await workers.stores[1].renew()
        await workers.quiet()
        await workers.parent.tick()
    assert set(workers.book.leases) == {"lives"}


async def test_who_has_to_give_way_hears_it_from_its_own_worker(workers: Workers) -> None:
    told: list[list[str]] = [[], []]
    for store, heard in zip(workers.stores, told, strict=True):
        store.on_evict(heard.append)
    for number in range(3):
        await workers.admit(number % 2, f"p{number}", "p")
        workers.clock.advance(1.0)
    await workers.admit(1, "g1", "g")
    protected = await workers.admit(1, "g2", "g")
    assert protected.contended
    await workers.stores[1].reclaim(protected)
    await workers.quiet()
    assert told == [["p2"], []], "the youngest is the other worker's"


async def test_an_admission_that_is_cancelled_is_given_back(workers: Workers) -> None:
    asked = asyncio.ensure_future(workers.admit(0, "a"))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await workers.quiet()
    await asyncio.sleep(0.01)
    account = workers.book.accounts["e"]
    assert (account.total, account.debited - account.refunded) == (0, 0)
    assert workers.parent.active == 0


async def test_without_the_parent_nobody_is_admitted_and_nothing_raises(workers: Workers) -> None:
    lease = await workers.admit(0, "a")
    for session in list(workers.family.hub.sessions.values()):
        session.wire.close()
    await asyncio.sleep(0.01)
    with pytest.raises(Unavailable) as refused:
        await workers.admit(0, "b")
    assert refused.value.reason == "state_unavailable"
    store = workers.stores[0]
    assert not store.up
    store.resize(lease, 1, 1)
    await store.reclaim(lease)
    await store.renew()
    store.settle(lease, USED)
    assert store.active == 0
