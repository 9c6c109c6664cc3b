"""Workers that admit by themselves while there is plenty: as exact as if all had asked."""

import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from gateway.adapters.shared.hub import Session
from gateway.adapters.shared.leases import SharedLeases
from gateway.adapters.shared.leases_desk import LeasesDesk
from gateway.adapters.shared.pledges import PLEDGE_S, Purse, room_of
from gateway.adapters.shared.wire import Message, Op
from gateway.adapters.store.memory import MemoryLeases
from gateway.domain import Ask, Lease, Usage
from gateway.errors import RateLimited, Refusal
from gateway.policy.ledger import TokenPool
from gateway.ports import Settlement
from tests.builders import served_model
from tests.fakes import FakeClock
from tests.shared import Family
from tests.token_pools import NOW_S, entitled, granted, pool

USED = Settlement(usage=Usage(prompt_tokens=60, completion_tokens=0), dispatched=True)


def ask(lease_id: str, name: str = "e", cost_tokens: int = 100, **more: int) -> Ask:
    return Ask(
        lease_id=lease_id,
        model="m",
        entitlement=name,
        pool=0,
        alternates=(),
        cost_tokens=cost_tokens,
        sequences=more.get("sequences", 1),
        kv_bytes=more.get("kv_bytes", 0),
    )


class Workers:
    """Two workers, their parent, and how often they asked it."""

    def __init__(self, book: TokenPool) -> None:
        self.book = book
        self.clock = FakeClock(NOW_S)
        self.family = Family()
        self.parent = MemoryLeases(
            {"m": served_model()}, self.clock, {"m": book}, wall_clock=self.clock
        )
        self.desk = LeasesDesk(self.family.hub, self.parent)
        self.asked = 0
        desk = self.desk._admit

        def counted(session: Session, message: Message) -> None:
            self.asked += 1
            desk(session, message)

        self.family.hub.desk(Op.ADMIT, counted)

    async def start(self) -> "Workers":
        self.links = [await self.family.join() for _ in range(2)]
        self.stores = [SharedLeases(link, {"m": served_model()}) for link in self.links]
        return self

    async def quiet(self) -> None:
        """Return once the parent knows all that the workers did."""
        for store in self.stores:
            if store.up:
                await store.view("m", [])


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    found = await Workers(pool(entitled(limit=400), entitled("o"), slots=(800,))).start()
    yield found
    await found.family.close()


async def test_with_plenty_of_room_few_are_asked_and_all_are_entered(workers: Workers) -> None:
    leases = [await workers.stores[n % 2].admit(ask(f"{n}")) for n in range(60)]
    assert workers.asked <= 10
    await workers.quiet()
    account = workers.book.accounts["e"]
    assert (account.total, account.debited, workers.parent.active) == (60, 6000, 60)
    assert all(lease.limits is not None and lease.weight > 0 for lease in leases)
    assert all(lease.issued_unix_s > 0 for lease in leases)
    for number, lease in enumerate(leases):
        workers.stores[number % 2].settle(lease, USED)
    await workers.quiet()
    assert (account.total, account.used, workers.parent.active) == (0, 60 * 60, 0)
    assert account.debited - account.refunded == account.used


async def test_a_limit_is_reached_and_never_passed(workers: Workers) -> None:
    for count in range(400):
        await workers.stores[count % 2].admit(ask(f"{count}"))
    for store in workers.stores:
        with pytest.raises(RateLimited) as refused:
            await store.admit(ask("one more"))
        assert refused.value.reason == "concurrency"
    await workers.quiet()
    assert workers.book.accounts["e"].total == 400


async def test_what_one_worker_was_pledged_is_given_back_for_another(workers: Workers) -> None:
    for number in range(200):
        await workers.stores[0].admit(ask(f"{number}"))
    large = await workers.stores[1].admit(ask("large", sequences=200))
    assert large.limits is not None
    assert large.limits.sequences_free == 0
    with pytest.raises(RateLimited):
        await workers.stores[0].admit(ask("one more"))


async def test_small_limits_are_asked_for_every_time() -> None:
    found = await Workers(pool(entitled(limit=8), slots=(800,))).start()
    for number in range(8):
        await found.stores[0].admit(ask(f"{number}"))
    assert found.asked == 8
    await found.family.close()


async def test_whoever_leaves_while_pledges_are_called_back_takes_nothing(
    workers: Workers,
) -> None:
    for number in range(20):
        await workers.stores[0].admit(ask(f"{number}"))
    before = workers.book.accounts["e"].total
    session = workers.family.hub.sessions[1]
    message = [Op.ADMIT, 99, "leaves", "m", "e", 0, [], 100, 380, 0]
    workers.desk._admit(session, message)
    workers.desk._settle(session, [Op.SETTLE, 0, "leaves", "m", 0.0, None])
    await workers.quiet()
    assert "leaves" not in workers.book.leases
    assert workers.book.accounts["e"].total >= before


async def test_changed_terms_hold_for_the_very_next_request(workers: Workers) -> None:
    for number in range(20):
        await workers.stores[0].admit(ask(f"{number}"))
    await workers.parent.define(entitled(limit=20))
    await workers.desk.pledges.recall_all()
    with pytest.raises(RateLimited):
        await workers.stores[0].admit(ask("one more"))


async def test_a_worker_that_dies_takes_its_pledges_with_it(workers: Workers) -> None:
    for number in range(40):
        await workers.stores[0].admit(ask(f"{number}"))
    await workers.quiet()
    await workers.family.die(workers.links[0])
    account = workers.book.accounts["e"]
    assert account.total == 0
    await workers.stores[1].admit(ask("all", sequences=400))
    assert account.total == 400


async def test_removed_entitlements_have_no_use_for_pledges(workers: Workers) -> None:
    workers.book.define(entitled("gone"))
    for number in range(10):
        lease = await workers.stores[0].admit(ask(f"{number}", "gone"))
        workers.stores[0].settle(lease, USED)
    await workers.quiet()
    assert await workers.parent.remove("m", "gone")
    await workers.desk.pledges.recall_all()
    with pytest.raises(Refusal):
        await workers.stores[0].admit(ask("late", "gone"))


@pytest.mark.parametrize("seed", range(6))
async def test_every_decision_is_that_of_one_process(seed: int) -> None:
    """Two workers and a store of one process get the same requests, one after the other."""
    rng = random.Random(seed)
    terms = (
        entitled(limit=60, kv_bytes_limit=40_000),
        entitled("rate", tokens_per_s=40.0, limit=300),
        entitled("g", "guaranteed", baseline=45),
        entitled("spot", "spot"),
    )
    shape = {"slots": (220,), "kv_bytes": (120_000,), "largest_tokens": 4_000}
    found = await Workers(pool(*terms, **shape)).start()  # type: ignore[arg-type]
    book = pool(*terms, **shape)  # type: ignore[arg-type]
    alone = MemoryLeases({"m": served_model()}, found.clock, {"m": book}, wall_clock=found.clock)
    held: list[tuple[int, Lease, Lease]] = []
    seen: Counter[str] = Counter()
    for number in range(1000):
        found.clock.advance(rng.choice((0.0, 0.0001, 0.01)))
        growing = (number // 250) % 2 == 0
        if held and rng.random() > (0.85 if growing else 0.25):
            worker, lease, reference = held.pop(rng.randrange(len(held)))
            settled = Settlement(usage=USED.usage, dispatched=True, unix_s=found.clock())
            found.stores[worker].settle(lease, settled)
            alone.settle(reference, settled)
            if not found.desk.pledges.any_of("m"):  # without pledges the parent is told later
                await found.quiet()
            continue
        worker, name = rng.randrange(2), rng.choice(("e", "e", "rate", "g", "spot"))
        wanted = ask(f"{number}", name, rng.choice((50, 100, 400)), kv_bytes=rng.randrange(900))
        outcome, lease_or_none = await decided(found.stores[worker], wanted)
        expected, reference_or_none = await decided(alone, wanted)
        assert outcome == expected, f"request {number} of {name}"
        seen[outcome] += 1
        if lease_or_none is not None and reference_or_none is not None:
            held.append((worker, lease_or_none, reference_or_none))
    await found.quiet()
    for name, account in book.accounts.items():
        mine = found.book.accounts[name]
        assert (mine.total, mine.kv_bytes) == (account.total, account.kv_bytes)
        assert (mine.debited, mine.refunded, mine.used) == (
            account.debited,
            account.refunded,
            account.used,
        )
    assert found.asked < 0.9 * seen.total(), "some were decided in advance"
    assert {"granted", "concurrency", "tokens"} <= set(seen)
    await found.family.close()


async def decided(store: SharedLeases | MemoryLeases, wanted: Ask) -> tuple[str, Lease | None]:
    try:
        return "granted", await store.admit(wanted)
    except Refusal as refusal:
        return refusal.reason, None


def test_a_pledge_ends_with_its_time_and_its_room() -> None:
    clock = FakeClock(10.0)
    purse = Purse(clock, clock)
    grant = [0, False, 1.0, False, False, "", 1.0, None]

    def put() -> None:
        purse.put([Op.PLEDGE, 0, 7, ["m", "e", 0], 2, 250, 100, clock() + PLEDGE_S, list(grant)])

    put()
    assert purse.admit(ask("a", "other")) is None
    pledge, lease = purse.admit(ask("a", kv_bytes=90)) or (None, None)
    assert pledge is not None
    assert lease is not None
    assert pledge.number == 7
    assert (lease.id, lease.issued_unix_s) == ("a", 10.0)
    assert purse.admit(ask("b", kv_bytes=11)) is None, "and what is left is void"
    assert purse.admit(ask("b")) is None
    put()
    clock.advance(PLEDGE_S)
    assert purse.admit(ask("c")) is None
    put()
    purse.recalled(b"other")
    assert purse.admit(ask("d")) is not None
    purse.recalled(b"m")
    assert purse.admit(ask("e")) is None


def test_room_is_the_least_of_all_limits() -> None:
    book = pool(
        entitled(limit=10, tokens_per_s=10.0, kv_bytes_limit=5_000),
        entitled("g", "guaranteed", baseline=3),
        slots=(20,),
        kv_bytes=(9_000,),
        tokens_per_s=1_000.0,
    )
    granted(book, "a", kv_bytes=1_000)
    room = room_of(book, book.accounts["e"], 0)
    assert (room.sequences, room.kv_bytes) == (9, 4_000)
    assert (room.pool_sequences, room.pool_kv_bytes) == (20 - 1 - 1, 8_000)
    assert room.tokens == book.accounts["e"].level
    granted(book, "b", "g")
    assert room_of(book, book.accounts["g"], 0).sequences == 2
