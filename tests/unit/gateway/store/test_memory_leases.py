"""What only the embedded ledger does; its contract is in tests/contract/test_lease_store.py."""

from gateway.fleet import fleet
from gateway.store.memory_leases import MemoryLeases
from tests.builders import LONG, SHORT, ask, served_model
from tests.fakes import FakeClock


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


async def test_models_are_counted_apart() -> None:
    one, two = served_model(name="one"), served_model(name="two")
    store = MemoryLeases({"one": one, "two": two}, FakeClock())
    await store.admit(ask("a", model="one"))
    assert (one.fleet.pools[SHORT].inflight, two.fleet.pools[SHORT].inflight) == (1, 0)
