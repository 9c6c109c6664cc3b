"""The directory's contract: one suite for every implementation, and what only files can.

`kept`: a later process finds it. `shared`: others hear of it while both run.
"""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, closing
from pathlib import Path

import msgspec
import pytest

from bench.redis_server import RedisServer
from gateway.adapters.shared.directory import DirectoryDesk, SharedDirectory
from gateway.adapters.store.directory import (
    TOMBSTONE_S,
    MemoryDirectory,
    SqliteDirectory,
    open_directory,
)
from gateway.adapters.store.sqlite import SqliteState, open_file
from gateway.errors import StateFailure
from gateway.policy.entitlements import Entitlement
from gateway.policy.learned import Sums
from gateway.ports import Directory, EntitlementEntry
from tests.fakes import FakeClock
from tests.shared import Family

REDIS = pytest.param("redis", marks=pytest.mark.redis)
ANYONE = ["memory", "workers", "sqlite", REDIS]
KEPT = ["workers", "sqlite", REDIS]

Make = Callable[[], Directory]


async def take_over() -> None:
    """A parent whose token pools know everything."""


async def opened(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Make]:
    """Opens one more process's view of the same directory."""
    url = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path / 'state' / 'sluice.db'}"}
    if name == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        url["redis"] = server.url
    family = Family()
    async with AsyncExitStack() as stack:
        if name == "workers":
            stack.push_async_callback(family.close)
            DirectoryDesk(family.hub, MemoryDirectory(), take_over)
            links = [await family.join() for _ in range(4)]

        def make() -> Directory:
            if name == "workers":
                return SharedDirectory(links.pop())
            directory = open_directory(url[name])
            stack.push_async_callback(directory.close)
            return directory

        yield make


@pytest.fixture(params=ANYONE)
async def anyone(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Directory]:
    async for make in opened(request.param, request, tmp_path):
        yield make()


@pytest.fixture(params=KEPT)
async def kept(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Make]:
    async for make in opened(request.param, request, tmp_path):
        yield make


def entry(name: str, *, slo_ms: int = 0, model: str = "m") -> EntitlementEntry:
    terms = Entitlement(
        name=name,
        model=model,
        tenant="t",
        service_class="guaranteed",
        slo_ms=slo_ms,
        baseline=(3, 1),
        limit=4,
        tokens_per_s=0.1 + 0.2,
        kv_bytes=1 << 40,
        expires_unix_s=1.9e9 + 1 / 3,
        suspended=True,
        created=7,
    )
    return EntitlementEntry(
        terms=terms, key_sha256=("ab" * 32, "cd" * 32), origin="admin", file_digest="d"
    )


def named(entries: list[EntitlementEntry]) -> list[str]:
    return sorted(e.terms.name for e in entries)


async def test_an_untouched_directory_is_at_revision_zero(anyone: Directory) -> None:
    assert await anyone.load() == (0, [])
    assert await anyone.changes(0) == (0, [], [])


async def test_what_was_put_is_loaded_bit_for_bit(anyone: Directory) -> None:
    await anyone.put(entry("a"))
    _, found = await anyone.load()
    assert found == [entry("a")]


async def test_many_are_put_at_once(anyone: Directory) -> None:
    many = [entry(f"e{n}") for n in range(500)]
    await anyone.put(*many)
    _, found = await anyone.load()
    assert named(found) == named(many)


async def test_a_namesake_is_replaced(anyone: Directory) -> None:
    await anyone.put(entry("a"))
    await anyone.put(entry("a", slo_ms=9))
    assert (await anyone.load())[1] == [entry("a", slo_ms=9)]


async def test_every_change_raises_the_revision(anyone: Directory) -> None:
    seen = [0, await anyone.put(entry("a")), await anyone.put(entry("a")), await anyone.delete("a")]
    assert seen == sorted(set(seen))
    assert (await anyone.load())[0] == seen[-1]


async def test_changes_are_those_after_the_revision(anyone: Directory) -> None:
    await anyone.put(entry("a"))
    revision = await anyone.put(entry("b"))
    await anyone.put(entry("c"))
    newest = await anyone.put(entry("a", slo_ms=9))
    found = await anyone.changes(revision)
    assert (found[0], named(found[1]), found[2]) == (newest, ["a", "c"], [])
    assert entry("a", slo_ms=9) in found[1]
    assert await anyone.changes(newest) == (newest, [], [])


async def test_a_removal_is_heard_and_no_longer_loaded(anyone: Directory) -> None:
    revision = await anyone.put(entry("a"), entry("b"))
    newest = await anyone.delete("a")
    assert await anyone.changes(revision) == (newest, [], ["a"])
    assert named((await anyone.load())[1]) == ["b"]


async def test_removing_an_unknown_name_changes_nothing(anyone: Directory) -> None:
    revision = await anyone.put(entry("a"))
    await anyone.delete("nobody")
    _, entries, removed = await anyone.changes(revision)
    assert (entries, removed) == ([], [])


async def test_what_comes_back_after_a_removal_is_there(anyone: Directory) -> None:
    revision = await anyone.put(entry("a"))
    await anyone.delete("a")
    await anyone.put(entry("a", slo_ms=9))
    _, entries, removed = await anyone.changes(revision)
    assert (entries, removed) == ([entry("a", slo_ms=9)], [])
    assert (await anyone.load())[1] == [entry("a", slo_ms=9)]


async def test_closing_twice_is_no_failure(anyone: Directory) -> None:
    await anyone.put(entry("a"))
    await anyone.close()
    await anyone.close()


async def test_a_later_process_finds_what_was_kept(kept: Make) -> None:
    first = kept()
    revision = await first.put(entry("a"), entry("b"))
    newest = await first.delete("b")
    await first.close()
    later = kept()
    assert await later.load() == (newest, [entry("a")])
    assert await later.changes(revision) == (newest, [], ["b"])


async def test_another_process_hears_of_changes(kept: Make) -> None:
    one, other = kept(), kept()
    revision, _ = await other.load()
    await one.put(entry("a"))
    newest, entries, removed = await other.changes(revision)
    assert (entries, removed) == ([entry("a")], [])
    mine = await other.put(entry("b"))
    assert mine > newest
    assert (await one.load())[0] == mine


# What is particular to memory and to the file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sluice.db"


async def test_memory_forgets_the_oldest_removals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.adapters.store.directory.TOMBSTONES", 2)
    directory = MemoryDirectory()
    for name in ("a", "b", "c"):
        await directory.put(entry(name))
        await directory.delete(name)
    assert (await directory.changes(0))[2] == ["c", "b"]


async def test_the_file_forgets_removals_after_a_day(path: Path) -> None:
    clock = FakeClock(1e9)
    directory = SqliteDirectory(path, wall_clock=clock)
    await directory.put(entry("a"), entry("b"), entry("c"))
    await directory.delete("a")
    clock.advance(TOMBSTONE_S - 1)
    await directory.delete("b")
    assert (await directory.changes(1))[2] == ["a", "b"]
    clock.advance(2)
    await directory.delete("c")
    assert (await directory.changes(1))[2] == ["b", "c"]
    await directory.close()


async def test_the_file_holds_what_was_learned_too_in_either_order(path: Path) -> None:
    learned = {"ratio.prose": Sums(epoch=0, n=3, rate=3.0, sums={"total": 1.0})}
    directory, state = SqliteDirectory(path), SqliteState(path)
    await directory.put(entry("a"))
    await state.exchange({"default:m": None})
    await state.exchange({"default:m": learned})
    await state.close()
    await directory.close()
    again, reader = SqliteState(path), SqliteDirectory(path)
    (peer,) = (await again.exchange({"default:m": None})).peers["default:m"]
    assert peer.parts == learned
    assert (await reader.load())[1] == [entry("a")]
    await again.close()
    await reader.close()


async def test_a_newer_schema_is_left_as_it_is(path: Path) -> None:
    directory = SqliteDirectory(path)
    await directory.put(entry("a"))
    await directory.close()
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE directory SET schema = 7")
    directory = SqliteDirectory(path)
    with pytest.raises(StateFailure, match=r"newer version \(schema 7, this one reads 1\)"):
        await directory.load()
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT schema, revision FROM directory").fetchone() == (7, 1)
    await directory.close()


async def test_an_unreadable_entry_is_a_failure_that_says_so(path: Path) -> None:
    directory = SqliteDirectory(path)
    await directory.put(entry("a"))
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE entitlement SET entry = 'x'")
    with pytest.raises(StateFailure, match="damaged"):
        await directory.load()
    await directory.put(entry("a"))
    assert (await directory.load())[1] == [entry("a")]
    await directory.close()


@pytest.fixture
def minutes(path: Path) -> Iterator[Path]:
    """Another program's file, looked at again after the test."""
    path.write_bytes(b"minutes of the meeting")
    yield path
    assert path.read_bytes() == b"minutes of the meeting"


async def test_a_file_of_another_program_is_left_as_it_is(minutes: Path) -> None:
    directory = SqliteDirectory(minutes)
    with pytest.raises(StateFailure, match="not a database"):
        await directory.put(entry("a"))
    await directory.close()


async def test_a_locked_file_refuses_and_serves_again_once_it_is_free(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.adapters.store.sqlite.BUSY_S", 0.05)
    directory = SqliteDirectory(path)
    await directory.put(entry("a"))
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.execute("BEGIN IMMEDIATE")
        with pytest.raises(StateFailure, match="locked"):
            await directory.put(entry("b"))
        file.execute("ROLLBACK")
    await directory.put(entry("c"))
    assert named((await directory.load())[1]) == ["a", "c"]
    await directory.close()


async def test_fields_of_a_later_version_are_passed_over(path: Path) -> None:
    directory = SqliteDirectory(path)
    await directory.put(entry("a"))
    text = msgspec.json.encode({**msgspec.to_builtins(entry("a")), "later": 1}).decode()
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE entitlement SET entry = ?", (text,))
    assert (await directory.load())[1] == [entry("a")]
    await directory.close()


async def test_a_disk_that_hangs_is_given_one_piece_of_work_at_a_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    opened = []

    def hanging(path: Path) -> sqlite3.Connection:
        opened.append(path)
        goes_on.wait(10)
        return open_file(path)

    monkeypatch.setattr("gateway.adapters.store.directory.open_file", hanging)
    directory = SqliteDirectory(path)
    for name in ("a", "b", "c"):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await directory.put(entry(name))
    goes_on.set()
    assert named((await directory.load())[1]) == ["a"]
    assert opened == [path]
    await directory.close()
