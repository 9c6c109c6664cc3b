"""The token pools' state in a file: what a restart keeps, and what a bad file costs."""

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.admission import admission
from gateway.admission.limit_book import LimitBook
from gateway.admission.terms import AdmissionRequest
from gateway.admission.token_pool import LEASE_TTL_S, Journal, TokenPool
from gateway.ports import Settlement
from gateway.records.attempt import Usage
from gateway.records.entitlement import Entitlement
from gateway.records.lease import Lease
from gateway.records.limit import Limit
from gateway.store import sqlite_leases
from gateway.store.memory_leases import MemoryLeases
from gateway.store.sqlite_leases import ACCOUNT, FORGET_S, SqliteLeases, collect
from tests.builders import served_model
from tests.fakes import FakeClock
from tests.token_pools import NOW_S, entitled, granted, pool
from tests.unit.gateway.store.test_sqlite_file import read, write

ELASTIC = entitled("e", tokens_per_s=100.0, baseline=4)
SPOT = entitled("s", "spot")


class Process:
    """One run of a gateway: the store and its file."""

    def __init__(
        self, path: Path, clock: FakeClock, *entitlements: Entitlement, **terms: Any
    ) -> None:
        terms = {"slots": (8, 8), "tokens_per_s": 500.0, **terms}
        self.book: TokenPool = pool(*(entitlements or (ELASTIC, SPOT)), **terms)
        self.store = MemoryLeases({"m": served_model()}, clock, {"m": self.book}, wall_clock=clock)
        self.file = SqliteLeases(path, self.store.token_pools, self.store.limits, wall_clock=clock)

    async def admit(self, lease_id: str, name: str = "e", **more: Any) -> Lease:
        known = {"pool": 0, "alternates": (), "estimate_tokens": 100, "sequences": 1, **more}
        return await self.store.admit(
            AdmissionRequest(lease_id=lease_id, model="m", entitlement=name, **known)
        )

    def counters(self) -> dict[str, list[float]]:
        return {
            name: [getattr(account, field) for field in ACCOUNT]
            for name, account in self.book.accounts.items()
        }


@asynccontextmanager
async def running(
    path: Path, clock: FakeClock, *entitlements: Entitlement
) -> AsyncIterator[Process]:
    process = Process(path, clock, *entitlements)
    await process.file.start()
    yield process
    await process.file.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sluice.db"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOW_S)


def used(tokens: int) -> Settlement:
    return Settlement(usage=Usage(prompt_tokens=tokens, completion_tokens=0), dispatched=True)


def rows(path: Path, *kinds: str) -> list[int]:
    """How many there are of each kind."""
    query = "SELECT count(*) FROM token_pool WHERE kind = ?"
    with closing(sqlite3.connect(path)) as file:
        return [int(file.execute(query, (kind,)).fetchone()[0]) for kind in kinds]


async def lived(path: Path, clock: FakeClock) -> Process:
    """A process that served, was interrupted with two leases in force, and saved."""
    async with running(path, clock) as first:
        first.store.settle(await first.admit("done", estimate_tokens=300), used(120))
        await first.admit("a", sequences=2, kv_bytes=70)
        await first.admit("b", "s", pool=1)
        account = first.book.accounts["e"]
        account.debt, account.burst = 0.25, 0.5
        first.book.pools[0].service_s = 2.5
        first.book.ticked_s = NOW_S - 1
    return first


async def test_a_restart_keeps_buckets_debt_ledgers_and_means(path: Path, clock: FakeClock) -> None:
    first = await lived(path, clock)
    async with running(path, clock) as second:
        assert second.counters() == first.counters()
        assert second.book.accounts["e"].level == 1000 - 120 - 100
        assert second.book.pools[0].service_s == 2.5
        assert (second.book.surplus, second.book.ticked_s) == (first.book.surplus, NOW_S - 1)
        assert second.book.settled == 1
        assert "e" in second.book.active


async def test_a_model_that_is_gone_is_forgotten_in_time(path: Path, clock: FakeClock) -> None:
    await lived(path, clock)

    async def left() -> list[int]:
        """Rows after a start without the model."""
        file = SqliteLeases(path, {}, LimitBook(), wall_clock=clock)
        await file.start()
        await file.close()
        return rows(path, "account", "pool", "lease")

    assert await left() == [2, 1, 2]
    clock.advance(FORGET_S + 1)
    async with running(path, clock):
        pass
    assert rows(path, "account") == [2]
    clock.advance(FORGET_S + 1)
    assert await left() == [0, 0, 0]


async def test_leases_of_the_former_process_count_until_they_expire(
    path: Path, clock: FakeClock
) -> None:
    first = await lived(path, clock)
    clock.advance(5.0)
    async with running(path, clock) as second:
        assert [p.inflight for p in second.book.pools] == [2, 1]
        assert second.book.pools[0].kv_bytes == 70
        assert second.book.leases["a"].owner == first.store.owner != second.store.owner
        for seconds, inflight in ((LEASE_TTL_S - 6, [2, 1]), (1.0, [0, 0])):
            clock.advance(seconds)
            await second.store.renew()
            await second.store.tick()
            assert [p.inflight for p in second.book.pools] == inflight
        account = second.book.accounts["e"]
        assert account.used == 120 + 100
        assert account.debited - account.refunded == account.used


async def test_usage_of_a_former_process_s_lease_is_still_posted(
    path: Path, clock: FakeClock
) -> None:
    """Another proxy may have asked for it, and outlived the gateway."""
    lease = await (await lived(path, clock)).admit("a", sequences=2)
    async with running(path, clock) as second:
        second.store.settle(lease, used(10))
        assert second.book.accounts["e"].used == 130
        assert second.book.pools[0].inflight == 0
    clock.advance(LEASE_TTL_S)
    async with running(path, clock) as third:
        assert list(third.book.leases) == ["b"]
        await third.store.tick()
    assert rows(path, "lease", "tombstone") == [0, 1]
    async with running(path, clock) as fourth:
        admission.settle(fourth.book, "b", 7, clock())
        assert fourth.book.accounts["s"].used == 7
    assert rows(path, "tombstone") == [0]


async def test_nobody_of_a_former_process_is_asked_to_give_way(
    path: Path, clock: FakeClock
) -> None:
    for _ in range(2):
        async with running(path, clock, entitled("p", "preemptible")) as process:
            await process.admit("a", "p")
    assert (list(process.book.leases), process.book.pools[0].evictable) == (["a"], {})


async def test_only_what_changed_is_written(path: Path, clock: FakeClock) -> None:
    async with running(path, clock, *(entitled(f"e{n}") for n in range(50))) as process:
        await process.file.save()
        assert rows(path, "account") == [0]
        await process.admit("a", "e7")
        await process.file.save()
        assert rows(path, "account", "lease") == [1, 1]
        admission.settle(process.book, "a", 5, clock())
        await process.file.save()
        assert rows(path, "account", "lease") == [1, 0]


async def test_a_renewed_lease_is_remembered_as_renewed(path: Path, clock: FakeClock) -> None:
    async with running(path, clock) as first:
        await first.admit("a")
        clock.advance(20.0)
        await first.store.renew()
    clock.advance(LEASE_TTL_S - 1)
    async with running(path, clock) as second:
        await second.store.tick()
        assert list(second.book.leases) == ["a"]


async def test_entitlements_that_are_no_more_are_forgotten_after_a_while(
    path: Path, clock: FakeClock
) -> None:
    await lived(path, clock)
    for seconds, left in ((0.0, 2), (FORGET_S + 1, 1)):
        clock.advance(seconds)
        async with running(path, clock, SPOT) as process:
            assert list(process.book.accounts) == ["s"]
            assert "a" not in process.book.leases
        assert rows(path, "account", "lease") == [left, 1]


async def test_a_removed_entitlement_leaves_the_file(path: Path, clock: FakeClock) -> None:
    await lived(path, clock)
    clock.advance(LEASE_TTL_S)
    async with running(path, clock) as process:
        await process.store.tick()
        assert await process.store.remove("m", "e")
    assert rows(path, "account") == [1]


@pytest.mark.parametrize("content", [b"not a database", b"SQLite format 3\0" + b"\0" * 500])
async def test_a_file_that_is_no_good_is_left_and_there_is_no_past(
    path: Path, clock: FakeClock, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, content)
    with caplog.at_level(logging.WARNING, "sluice.state"):
        async with running(path, clock) as process:
            await process.admit("a")
    assert not process.file.up
    assert read(path) == content
    assert ["not kept across restarts" in r.getMessage() for r in caplog.records] == [True]
    assert process.book.journal is None


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("PRAGMA user_version = 9", "newer version (schema 9, this one reads 1)"),
        ("UPDATE token_pool SET record = '[1]' WHERE kind = 'account'", "sluice.db"),
        ("UPDATE token_pool SET record = 'x' WHERE kind = 'lease'", "sluice.db"),
    ],
)
async def test_rows_that_cannot_be_read_are_left(
    path: Path, clock: FakeClock, statement: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    await lived(path, clock)
    with closing(sqlite3.connect(path)) as file, file:
        file.execute(statement)
    with caplog.at_level(logging.WARNING, "sluice.state"):
        async with running(path, clock):
            pass
    assert says in caplog.text
    assert rows(path, "lease") == [2]


async def test_a_file_that_cannot_be_written_is_tried_again_with_everything(
    path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(path, clock) as process:
        await process.admit("old")
        await process.file.save()
        with closing(sqlite3.connect(path)) as other:
            other.execute("BEGIN EXCLUSIVE")
            await process.admit("new", "s")
            admission.settle(process.book, "old", 5, clock())
            for _ in range(2):
                await process.file.save()
            up = [process.file.up]
            other.execute("COMMIT")
            await process.file.save()
            assert [*up, process.file.up] == [False, True]
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "limits cannot be kept across restarts, trying again",
        "limits are kept across restarts again",
    ]
    async with running(path, clock) as again:
        assert list(again.book.leases) == ["new"]
        assert again.counters() == process.counters()


async def test_a_copy_taken_in_slices_is_of_one_instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests go on while it is taken; every charge in it has its lease in it."""
    monkeypatch.setattr(sqlite_leases, "SLICE", 10)
    count = 200
    token_pool = pool(*(entitled(f"e{n}", baseline=9) for n in range(count)), slots=(10_000,))
    token_pool.journal = Journal()
    for number in range(count):
        granted(token_pool, f"first{number}", f"e{number}")
    ended, number = False, 0

    async def requests() -> None:
        nonlocal number
        while not ended and number < 60:
            granted(token_pool, f"more{number}", f"e{number}")
            admission.settle(token_pool, f"first{number + 100}", 40, NOW_S)
            number += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(requests())
    rows = await collect({"m": token_pool}, token_pool.limits)
    ended = True
    await running
    found = {key: msgspec.json.decode(record) for key, record in rows.items() if record}
    reserved = dict.fromkeys(token_pool.accounts, 0)
    for (kind, _, _), record in found.items():
        if kind == "lease":
            reserved[record["entitlement"]] += record["estimate_tokens"]
    accounts = {name: record for (kind, _, name), record in found.items() if kind == "account"}
    for name, account in accounts.items():
        assert account["debited"] - account["refunded"] - account["used"] == reserved[name]
    assert len(accounts) == count
    assert number > 20


async def test_a_clock_that_leaps_ahead_for_a_moment_deletes_no_counter(
    path: Path, clock: FakeClock
) -> None:
    budget = Limit(
        id="tenant:t:tokens:month",
        scope="tenant",
        name="t",
        unit="tokens",
        amount=10_000,
        window="month",
    )
    wall = FakeClock(NOW_S)
    first = Process(path, clock)
    first.file = SqliteLeases(path, first.store.token_pools, first.store.limits, wall_clock=wall)
    await first.file.start()
    await first.admit("a", limits=(budget,))
    admission.settle(first.book, "a", 100, clock())
    await first.file.save()
    wall.advance(200 * 86_400.0)
    await first.admit("b")
    await first.file.save()
    await first.file.close()
    async with running(path, clock) as second:
        (view,) = await second.store.levels([budget])
        assert view.used == 100
