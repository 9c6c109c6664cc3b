"""The keeper: terms follow the fleet and the entitlements, ticks and renewals come in time."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from gateway.admission import admission
from gateway.admission.capacity import ASSESS_SLICE, WorkerShare
from gateway.admission.terms import AdmissionRequest, Terms
from gateway.admission.token_pool import LEASE_TTL_S, TokenPool
from gateway.errors import Refusal
from gateway.fleet import fleet
from gateway.fleet.model_runtime import ModelRuntime
from gateway.records.entitlement import Entitlement
from gateway.store.memory_leases import MemoryLeases
from gateway.store.upkeep import DEMAND_EVERY_S, STEP_S, ModelSpec, StoreUpkeep
from tests.around import Around
from tests.builders import served_model
from tests.fakes import FakeClock
from tests.token_pools import NOW_S, entitled

SHARES = (
    WorkerShare(slots=4, kv_bytes=100, tokens_per_s=10.0, replicas=(1, 5)),
    WorkerShare(slots=2, kv_bytes=0, tokens_per_s=5.0, replicas=(1, 2)),
)
OLD = entitled("old", "guaranteed", baseline=(4, 1), slo_ms=1000, created=1)
NEW = entitled("new", "guaranteed", baseline=(4, 1), slo_ms=3000, created=2)
SPOT = entitled("spot", "spot", created=3)


class Recording(Around):
    """The embedded store, which remembers what was published and can fail."""

    def __init__(self, served: ModelRuntime, clock: FakeClock, token_pool: TokenPool) -> None:
        super().__init__(MemoryLeases({"m": served}, clock, {"m": token_pool}, wall_clock=clock))
        self.published: list[Terms] = []
        self.ticks = 0
        self.failing = False

    async def change(self, model: str, terms: Terms) -> None:
        if self.failing:
            raise ConnectionError("away")
        self.published.append(terms)
        await self.inner.change(model, terms)

    async def tick(self) -> None:
        self.ticks += 1
        await self.inner.tick()


class UpkeepRig:
    """A fleet of two and one workers, its store and its keeper; one clock for all."""

    def __init__(
        self,
        *entitlements: Entitlement,
        base: Terms | None = None,
        shares: tuple[WorkerShare, ...] = SHARES,
    ) -> None:
        self.clock = FakeClock(NOW_S)
        self.served = served_model(workers=(2, 1), slots=4)
        base = base or Terms(slots=(8, 2), largest_tokens=100, tokens_per_s=25.0)
        self.book = TokenPool(base)
        self.entitlements: Sequence[Entitlement] = entitlements
        for each in entitlements:
            self.book.define(each)
        self.store = Recording(self.served, self.clock, self.book)
        self.engine_kv = 0
        self.spec = ModelSpec(
            base=base,
            pools=self.served.fleet.pools,
            shares=shares,
            entitlements=lambda: self.entitlements,
            kv_bytes=lambda _pool, _worker: self.engine_kv,
        )
        self.keeper = StoreUpkeep(self.store, {"m": self.spec}, self.clock, self.clock)

    async def step(self, seconds: float = STEP_S) -> None:
        self.clock.advance(seconds)
        await self.keeper.step()

    def worker(self, *, up: bool) -> None:
        fleet.probed(self.served.fleet.pools[0], 1, ok=up)

    @property
    def terms(self) -> Terms:
        return self.book.terms

    async def admit(
        self, lease_id: str, entitlement: str, tokens: int = 10, kv_bytes: int = 0
    ) -> None:
        asked: dict[str, Any] = {"estimate_tokens": tokens, "kv_bytes": kv_bytes, "pool": 0}
        await self.store.admit(
            AdmissionRequest(lease_id=lease_id, model="m", entitlement=entitlement, **asked)
        )

    async def states(self, *names: str) -> list[str]:
        return [view.state for view in await self.store.view("m", names)]

    def survey(self, entitlements: Callable[[], Iterator[Entitlement]]) -> None:
        """Keep the store by other entitlements from now on."""
        self.spec = msgspec.structs.replace(self.spec, entitlements=entitlements)
        self.keeper = StoreUpkeep(self.store, {"m": self.spec}, self.clock, self.clock)


async def test_the_first_step_publishes_what_the_workers_hold() -> None:
    kept = UpkeepRig(OLD, NEW)
    await kept.step()
    terms = kept.terms
    assert (terms.slots, terms.kv_bytes, terms.tokens_per_s) == ((8, 2), (200, 0), 25)
    assert (terms.mean_slo_ms, terms.largest_tokens) == (2000, 100)
    kept.engine_kv = 70
    await kept.step()
    assert kept.terms.kv_bytes == (200, 70), "what engines say counts where nothing is stated"


async def test_a_worker_that_goes_degrades_the_newest_and_its_return_recovers_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = UpkeepRig(OLD, NEW)
    await kept.step()
    kept.worker(up=False)
    with caplog.at_level(logging.WARNING, "sluice.pools"):
        for _ in range(3):
            await kept.step()
        assert kept.terms.slots == (4, 2)
        assert await kept.states("old", "new") == ["bound", "degraded"]
        kept.worker(up=True)
        await kept.step()
    assert await kept.states("new") == ["bound"]
    assert [record.getMessage() for record in caplog.records] == [
        (
            "model m: capacity (slots: short 4, long 2) does not hold the baselines of 1 "
            "entitlements; the newest wait"
        ),
        "model m: capacity holds all baselines again",
    ]


async def test_one_that_never_fitted_is_pending() -> None:
    kept = UpkeepRig(OLD)
    await kept.step()
    third = msgspec.structs.replace(NEW, baseline=(5, 0))
    kept.entitlements = (OLD, third)
    await kept.store.define(third)
    kept.keeper.entitlements_changed("m")
    kept.keeper.entitlements_changed("another")
    await kept.step()
    assert await kept.states("old", "new") == ["bound", "pending"]


async def test_an_expiry_makes_room_for_others() -> None:
    expiring = msgspec.structs.replace(
        OLD, service_class="dedicated", baseline=(5, 0), expires_unix_s=NOW_S + 60
    )
    kept = UpkeepRig(expiring, NEW)
    await kept.step()
    assert await kept.states("old", "new") == ["bound", "pending"]
    assert kept.book.pools[0].idle_dedicated == 5
    await kept.step(60.0)
    assert await kept.states("old", "new") == ["expired", "bound"]
    assert kept.book.pools[0].idle_dedicated == 0


async def test_leases_are_renewed_before_they_expire() -> None:
    kept = UpkeepRig(SPOT)
    await kept.step()
    await kept.admit("a", "spot")
    for _ in range(int(4 * LEASE_TTL_S)):
        await kept.step(1.0)
    assert list(kept.book.leases) == ["a"]


async def test_a_step_that_fails_is_logged_once_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = UpkeepRig(OLD)
    kept.store.failing = True
    with caplog.at_level(logging.ERROR, "sluice.pools"):
        for _ in range(5):
            await kept.step()
        assert [record.getMessage() for record in caplog.records] == [
            "keeping the capacity of m failed, trying again"
        ]
        assert kept.store.ticks == 5
        kept.store.failing = False
        await kept.step()
        assert len(kept.store.published) == 1
        kept.store.failing = True
        kept.worker(up=False)
        await kept.step()
    assert len(caplog.records) == 2


async def test_replicas_hold_what_is_reserved_admitted_and_denied() -> None:
    kept = UpkeepRig(OLD, SPOT)
    await kept.step()
    assert kept.keeper.desired_replicas("m", 0) == 2  # 4 reserved of 4 * .85 usable
    for number in range(3):
        await kept.admit(f"s{number}", "spot")
    await kept.admit("o", "old")
    await kept.step(5.0)
    assert kept.keeper.desired_replicas("m", 0) == 2  # 4 reserved + 3, the one within counts once
    await kept.admit("s3", "spot")
    await kept.step(5.0)
    await kept.step(5.0)
    assert kept.keeper.desired_replicas("m", 0) == 3  # all 8 slots would be taken
    (short, long) = await kept.keeper.pools("m")
    assert (short.desired_replicas, long.desired_replicas) == (3, 1)
    assert kept.keeper.desired_replicas("unmanaged", 0) == 0


@pytest.mark.parametrize(
    ("terms", "asked"),
    [
        (SPOT, {"tokens": 1, "kv_bytes": 100}),  # KV is full at 24 of 128 slots
        (SPOT, {"tokens": 40, "kv_bytes": 1}),  # of 320 tokens/s there are 200
        (entitled("spot", tokens_per_s=100.0), {"tokens": 40, "kv_bytes": 1}),
    ],
)
async def test_replicas_follow_the_resource_that_is_short(
    terms: Entitlement, asked: dict[str, int]
) -> None:
    """Requests of 5 s for two minutes, of which two engines with free slots refuse a part."""
    share = WorkerShare(slots=64, kv_bytes=1200, tokens_per_s=100.0, replicas=(1, 9))
    short = UpkeepRig(terms, shares=(share, SHARES[1]))
    running: list[str] = []
    refused = 0
    for number in range(960):
        if number >= 40 and f"{number - 40}" in running:
            running.remove(f"{number - 40}")
            admission.settle(short.book, f"{number - 40}", asked["tokens"], short.clock())
        try:
            await short.admit(f"{number}", "spot", **asked)
        except Refusal:
            refused += 1
        else:
            running.append(f"{number}")
        assert len(running) <= 41
        await short.step(0.125)
    assert refused > 96
    assert short.keeper.desired_replicas("m", 0) > 2


async def test_a_pending_entitlement_within_the_most_replicas_starts_scaling() -> None:
    kept = UpkeepRig(OLD, msgspec.structs.replace(NEW, baseline=(12, 0)))
    await kept.step()
    assert await kept.states("new") == ["pending"]
    assert kept.keeper.desired_replicas("m", 0) == 5


async def test_of_many_entitlements_a_slice_is_read_at_a_time() -> None:
    kept = UpkeepRig()
    most = read = 0

    def entitlements() -> Iterator[Entitlement]:
        nonlocal read
        for number in range(5 * ASSESS_SLICE):
            read += 1
            yield entitled(f"e{number}", baseline=(), created=number + 1)

    async def others() -> None:
        nonlocal most, read
        while True:
            most, read = max(most, read), 0
            await asyncio.sleep(0)

    kept.survey(entitlements)
    turns = asyncio.create_task(others())
    await kept.step()
    turns.cancel()
    assert 0 < most <= ASSESS_SLICE


async def test_what_changes_while_it_is_surveyed_is_surveyed_again() -> None:
    kept = UpkeepRig()
    looks = 0

    def entitlements() -> Iterator[Entitlement]:
        nonlocal looks
        looks += 1
        if looks == 1:
            kept.keeper.entitlements_changed("m")
        yield from (OLD, NEW)

    kept.survey(entitlements)
    await kept.step()
    first = looks
    await kept.step()
    second = looks - first
    await kept.step()
    assert (second, looks - first - second) == (first, 0)


async def test_a_pool_whose_workers_all_missed_their_probes_keeps_its_places() -> None:
    kept = UpkeepRig(OLD)
    await kept.step()
    (worker,) = kept.served.fleet.pools[1].engine_of[0].ranks
    fleet.missed(kept.served.fleet.pools[1], worker, "no answer", answers=False)
    await kept.step()
    assert kept.store.published[-1].slots == (8, 2)
    fleet.unreachable(kept.served.fleet.pools[1], worker)
    await kept.step()
    assert kept.store.published[-1].slots == (8, 0)


async def test_each_phase_is_desired_by_what_is_in_it() -> None:
    """The store counts a lease once; the prefill pool knows which sequences are still there."""
    decode = WorkerShare(slots=4, tokens_per_s=10.0, replicas=(1, 9), cooldown_s=0.0)
    prefill = WorkerShare(slots=2, tokens_per_s=1000.0, replicas=(1, 9), cooldown_s=0.0)
    rig = UpkeepRig(SPOT, base=Terms(slots=(4,), largest_tokens=100))
    rig.spec = msgspec.structs.replace(rig.spec, shares=(decode, prefill), prefills={0: 1})
    rig.keeper.respecify("m", rig.spec)
    await rig.keeper.step()
    assert rig.store.published[-1].slots == (2 * 4 + 1 * 2,)
    routed, prefill_pool = rig.served.fleet.pools
    ask = AdmissionRequest(
        lease_id="a",
        model="m",
        entitlement="spot",
        pool=0,
        alternates=(),
        pools=(routed,),
        estimate_tokens=10,
        sequences=8,
        kv_bytes=0,
    )
    await rig.store.admit(ask)

    async def desired(tokens: int = 0) -> list[int]:
        for _ in range(8):  # longer than demand is averaged over
            fleet.start(prefill_pool, 0, 0, tokens)
            rig.clock.advance(DEMAND_EVERY_S)
            await rig.keeper.step()
        return [view.desired_replicas for view in await rig.keeper.pools("m")]

    assert await desired() == [3, 1]  # 8 sequences of 4 slots, used to 85 %
    fleet.start(prefill_pool, 0, 8, 400)
    assert await desired() == [1, 5]  # all 8 are in prefill, of 2 slots
    fleet.finish(prefill_pool, 0, 8, 400)
    assert await desired(tokens=15_000) == [3, 4]  # 3,000 tokens/s
