"""The embedded store: its ledger and upkeep, and how long it holds the loop.

Its contract is in tests/contract/test_lease_store.py.
"""

import asyncio
import gc
from collections.abc import Awaitable, Coroutine, Iterator
from typing import Any

import msgspec
import pytest

from gateway.admission.capacity import ASSESS_SLICE, Capacity, assess_capacity
from gateway.admission.terms import AdmissionRequest
from gateway.admission.token_pool import LEASE_TTL_S, Journal, TokenPool
from gateway.fleet import fleet
from gateway.ports import Settlement
from gateway.records.attempt import Usage
from gateway.records.entitlement import Entitlement
from gateway.records.lease import Lease
from gateway.store.memory_leases import SLICE, MemoryLeases
from gateway.store.sqlite_leases import collect
from tests.builders import LONG, SHORT, ask, changed, served_model
from tests.fakes import FakeClock
from tests.token_pools import NOW_S, entitled, pool

USED = Settlement(usage=Usage(prompt_tokens=50, completion_tokens=0), dispatched=True)


class Opened:
    def __init__(self, *entitlements: Entitlement, observe: bool = False, **terms: Any) -> None:
        self.clock = FakeClock(NOW_S)
        self.book = pool(*entitlements, **{"slots": (4, 4), **terms})
        self.served = changed(served_model(), observe=observe)
        self.store = MemoryLeases(
            {"m": self.served}, self.clock, {"m": self.book}, wall_clock=self.clock
        )

    async def admit(self, lease_id: str, name: str = "e", **more: Any) -> Lease:
        known = {"pool": 0, "alternates": (), "estimate_tokens": 100, "sequences": 1, **more}
        return await self.store.admit(
            AdmissionRequest(lease_id=lease_id, model="m", entitlement=name, **known)
        )


async def test_settling_goes_by_the_request_s_own_time() -> None:
    opened = Opened(entitled())
    lease = await opened.admit("a")
    opened.clock.advance(18.0)
    opened.store.settle(lease, msgspec.structs.replace(USED, unix_s=NOW_S + 15))
    assert opened.book.pools[0].service_s == pytest.approx(6.0)


@pytest.mark.parametrize("renewed", [True, False])
async def test_a_tick_reaps_all_that_expired_and_renewing_keeps_it(renewed: bool) -> None:
    opened = Opened(entitled(baseline=600), slots=(600, 1))
    for number in range(600):
        await opened.admit(f"{number}", estimate_tokens=1)
    opened.clock.advance(LEASE_TTL_S - 1)
    if renewed:
        await opened.store.renew()
    opened.clock.advance(2.0)
    await opened.store.tick()
    assert opened.book.pools[0].inflight == 600 * renewed
    assert opened.store.active == 600, "their requests still run here"


async def test_who_gives_way_is_told_and_frees_its_place_by_settling() -> None:
    opened = Opened(entitled("g", "guaranteed", baseline=4), entitled("p", "preemptible"))
    reported: list[str] = []
    opened.store.on_evict(reported.append)
    leases = {}
    for name in "abc":
        leases[name] = await opened.admit(name, "p")
        opened.clock.advance(1.0)
    for number in range(2):
        protected = await opened.admit(f"g{number}", "g")
    assert protected.contended
    for _ in range(2):
        await opened.store.reclaim(protected)
    assert reported == ["c"]
    opened.store.settle(protected, USED)
    await opened.store.reclaim(protected)
    assert reported == ["c"], "none for a lease that has ended"
    opened.store.settle(leases["c"], USED)
    assert opened.book.pools[0].inflight == 3


async def test_an_entitlement_goes_once_nothing_of_it_is_in_flight() -> None:
    opened = Opened(entitled())
    lease = await opened.admit("a")
    assert not await opened.store.remove("m", "e")
    opened.store.settle(lease, USED)
    assert await opened.store.remove("m", "e")
    assert await opened.store.view("m", ["e"]) == []


# -- how long the loop is held

COUNT = 20_000


@pytest.fixture(scope="module")
def crowd() -> Iterator[tuple[TokenPool, list[Entitlement]]]:
    """A model of many entitlements, with the collector away from what stays, as in the gateway."""
    classes = ("dedicated", "guaranteed", "elastic", "spot", "preemptible")
    entitlements = [
        Entitlement(
            name=f"e{n}",
            model="m",
            service_class=classes[n % 5],  # type: ignore[arg-type]
            baseline=(1, 1),
            slo_ms=500 + n % 1000,
            tokens_per_s=10.0,
            created=n,
        )
        for n in range(1, COUNT + 1)
    ]
    made = pool(*entitlements, slots=(1000, 1000), bound_until=(0, 0)), entitlements
    gc.collect()
    gc.freeze()
    yield made
    gc.unfreeze()


async def pauses_of(work: Awaitable[Any]) -> int:
    """How often some work lets requests go between."""
    pauses = 0
    steps = work.__await__()
    while True:
        try:
            next(steps)
        except StopIteration:
            return pauses
        pauses += 1


def test_no_step_of_a_tick_holds_the_loop(crowd: tuple[TokenPool, list[Entitlement]]) -> None:
    token_pool, _ = crowd
    clock = FakeClock(NOW_S)
    store = MemoryLeases({"m": served_model()}, clock, {"m": token_pool}, wall_clock=clock)

    def tick() -> Coroutine[Any, Any, None]:
        clock.advance(5.0)
        token_pool.ticked_s = clock() - 5.0
        for account in token_pool.accounts.values():
            account.debt = 0.5
        token_pool.active = set(token_pool.accounts)
        return store.tick()

    assert asyncio.run(pauses_of(tick())) >= len(token_pool.accounts) // SLICE - 1


def test_no_step_of_a_change_of_capacity_holds_the_loop(
    crowd: tuple[TokenPool, list[Entitlement]],
) -> None:
    token_pool, entitlements = crowd
    store = MemoryLeases({"m": served_model()}, FakeClock(NOW_S), {"m": token_pool})
    slots = [(1000, 1000)]

    async def change() -> None:
        slots[0] = (1000, 1000) if slots[0][0] == 10 else (10, 10)
        capacity = Capacity(slots=slots[0], kv_bytes=(0, 0), tokens_per_s=0.0)
        for state in assess_capacity(entitlements, capacity, NOW_S):
            await asyncio.sleep(0)
            if state is not None:
                terms = msgspec.structs.replace(
                    token_pool.terms, slots=slots[0], bound_until=state.bound_until
                )
                await store.change("m", terms)

    assert asyncio.run(pauses_of(change())) >= len(entitlements) // ASSESS_SLICE


def test_no_step_of_a_copy_holds_the_loop(crowd: tuple[TokenPool, list[Entitlement]]) -> None:
    token_pool, _ = crowd

    def copy() -> Coroutine[Any, Any, Any]:
        token_pool.journal = Journal()
        token_pool.journal.accounts = set(token_pool.accounts)
        return collect({"m": token_pool}, token_pool.limits)

    assert asyncio.run(pauses_of(copy())) >= len(token_pool.accounts) // 250
    token_pool.journal = None


async def test_workers_that_are_ejected_leave_the_pool_overloaded_until_they_return() -> None:
    clock = FakeClock()
    served = served_model(workers=(2, 1), slots=2, spill_queue=0)
    store = MemoryLeases({"m": served}, clock)
    for _ in range(served.fleet.health.eject_after):
        fleet.failed(served.fleet.pools[SHORT], 0, served.fleet.health, clock())
    for n in range(2):
        await store.admit(ask(f"{n}"))
    assert (await store.admit(ask("x", alternates=(LONG,)))).pool == LONG
    clock.advance(5.0)
    assert (await store.admit(ask("y", alternates=(LONG,)))).pool == SHORT
