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

from bench.common.redis_server import RedisServer
from gateway.adapters.store.backends import open_directory
from gateway.adapters.store.directory import MemoryDirectory
from gateway.adapters.store.sqlite.directory import TOMBSTONE_S, SqliteDirectory
from gateway.adapters.store.sqlite.estimators import SqliteState, open_file
from gateway.errors import StateFailure
from gateway.policy.entitlements.entitlement import Entitlement
from gateway.policy.estimate.merge import PartState
from gateway.ports import Directory, DirectoryState, EntitlementEntry, Removal
from tests.fakes import FakeClock

REDIS = pytest.param("redis", marks=pytest.mark.redis)
ANYONE = ["memory", "sqlite", REDIS]
PERSISTENT = ["sqlite", REDIS]

Entitlements = Directory[EntitlementEntry]
State = DirectoryState[EntitlementEntry]
Make = Callable[[], Entitlements]


async def opened(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Make]:
    """Opens one more process's view of the same directory."""
    url = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path / 'state' / 'sluice.db'}"}
    if name == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        url["redis"] = server.url
    async with AsyncExitStack() as stack:

        def make() -> Entitlements:
            directory = open_directory(url[name], EntitlementEntry, "entitlements")
            stack.push_async_callback(directory.close)
            return directory

        yield make


@pytest.fixture(params=ANYONE)
async def anyone(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Entitlements]:
    async for make in opened(request.param, request, tmp_path):
        yield make()


@pytest.fixture(params=PERSISTENT)
async def kept(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Make]:
    async for make in opened(request.param, request, tmp_path):
        yield make


def entry(name: str, *, slo_ms: int = 0, model: str = "m", version: int = 0) -> EntitlementEntry:
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
        terms=terms,
        key_sha256=("ab" * 32, "cd" * 32),
        origin="admin",
        file_digest="d",
        id="i",
        version=version,
        revoked_sha256=("ef" * 32,),
    )


def named(entries: list[EntitlementEntry]) -> list[str]:
    return sorted(e.terms.name for e in entries)


async def heard(directory: Entitlements, since: int, mark: str) -> State:
    """What changed, where nothing was lost."""
    found = await directory.changes(since, mark)
    assert found is not None
    return found


async def kept_entry(directory: Entitlements, name: str = "a") -> EntitlementEntry:
    """An entry as it is kept, with its version."""
    (found,) = [e for e in (await directory.load()).entries if e.terms.name == name]
    return found


def unversioned(entries: list[EntitlementEntry]) -> list[EntitlementEntry]:
    found = [msgspec.structs.replace(e, version=0) for e in entries]
    return sorted(found, key=lambda e: e.terms.name)


async def test_an_untouched_directory_is_at_revision_zero(
    anyone: Entitlements,
) -> None:
    empty = State(revision=0, mark="", entries=[], removals=[])
    assert await anyone.load() == empty
    assert await anyone.changes(0, "") == empty


async def test_what_was_put_is_loaded_bit_for_bit(anyone: Entitlements) -> None:
    written = await anyone.put(entry("a"))
    found = await kept_entry(anyone)
    assert found == msgspec.structs.replace(entry("a"), version=written.revision)


async def test_many_are_put_at_once(anyone: Entitlements) -> None:
    many = [entry(f"e{n}") for n in range(500)]
    await anyone.put(*many)
    assert named((await anyone.load()).entries) == named(many)


async def test_an_entry_is_replaced_from_its_version_only(
    anyone: Entitlements,
) -> None:
    first = await anyone.put(entry("a"))
    assert (await anyone.put(entry("a", slo_ms=9))).conflicts == ("a",)
    assert (await anyone.put(entry("a", slo_ms=9, version=7))).conflicts == ("a",)
    assert (await anyone.load()).revision == first.revision
    second = await anyone.put(entry("a", slo_ms=9, version=first.revision))
    assert second.conflicts == ()
    assert unversioned((await anyone.load()).entries) == [entry("a", slo_ms=9)]
    assert (await anyone.put(entry("a", version=first.revision))).conflicts == ("a",)


async def test_of_several_those_that_are_of_their_version_are_kept(
    anyone: Entitlements,
) -> None:
    await anyone.put(entry("a"))
    written = await anyone.put(entry("a", slo_ms=9), entry("b"))
    assert written.conflicts == ("a",)
    assert unversioned((await anyone.load()).entries) == [entry("a"), entry("b")]


async def test_only_a_version_that_is_kept_is_deleted(anyone: Entitlements) -> None:
    first = await anyone.put(entry("a"))
    second = await anyone.put(entry("a", slo_ms=9, version=first.revision))
    assert (await anyone.delete(entry("a", version=first.revision))).conflicts == ("a",)
    assert (await anyone.delete(entry("b", version=3))).conflicts == ("b",)
    assert (await anyone.delete(entry("b"))).conflicts == ("b",)
    assert (await anyone.delete(entry("a", version=second.revision))).conflicts == ()
    assert (await anyone.load()).entries == []


async def test_every_change_raises_the_revision(anyone: Entitlements) -> None:
    seen = [0, (await anyone.put(entry("a"))).revision]
    seen.append((await anyone.put(entry("a", version=seen[-1]))).revision)
    seen.append((await anyone.delete(entry("a", version=seen[-1]))).revision)
    assert seen == sorted(set(seen))
    assert (await anyone.load()).revision == seen[-1]


async def test_a_revision_is_above_what_the_writer_knows(
    anyone: Entitlements,
) -> None:
    assert (await anyone.put(entry("a"), floor=41)).revision == 42
    assert (await anyone.put(entry("b"), floor=7)).revision == 43
    assert (await anyone.delete(entry("a", version=42), 99)).revision == 100


async def test_changes_are_those_after_the_revision(anyone: Entitlements) -> None:
    first = await anyone.put(entry("a"))
    second = await anyone.put(entry("b"))
    await anyone.put(entry("c"))
    newest = await anyone.put(entry("a", slo_ms=9, version=first.revision))
    found = await heard(anyone, second.revision, second.mark)
    assert (found.revision, found.mark) == (newest.revision, newest.mark)
    assert unversioned(found.entries) == [entry("a", slo_ms=9), entry("c")]
    assert found.removals == []
    assert (await heard(anyone, newest.revision, newest.mark)).entries == []


async def test_a_removal_is_heard_and_no_longer_loaded(anyone: Entitlements) -> None:
    first = await anyone.put(entry("a"), entry("b"))
    gone = msgspec.structs.replace(entry("a", version=first.revision), file_unix_s=123.25)
    newest = await anyone.delete(gone)
    found = await heard(anyone, first.revision, first.mark)
    removal = Removal(name="a", id="i", revision=newest.revision, file_unix_s=123.25)
    assert (found.revision, found.entries, found.removals) == (newest.revision, [], [removal])
    state = await anyone.load()
    assert (named(state.entries), state.removals) == (["b"], [removal])


async def test_what_was_deleted_comes_back_under_another_id_only(
    anyone: Entitlements,
) -> None:
    first = await anyone.put(entry("a"))
    await anyone.delete(entry("a", version=first.revision))
    assert (await anyone.put(entry("a"))).conflicts == ("a",)
    again = msgspec.structs.replace(entry("a"), id="other")
    assert (await anyone.put(again)).conflicts == ()
    found = await heard(anyone, first.revision, first.mark)
    assert unversioned(found.entries) == [again]
    assert [(r.name, r.id) for r in found.removals] == [("a", "i")]


async def test_closing_twice_is_no_failure(anyone: Entitlements) -> None:
    await anyone.put(entry("a"))
    await anyone.close()
    await anyone.close()


@pytest.fixture(params=["memory", REDIS])
async def marking(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Entitlements]:
    """Those that tell whether they lost a write."""
    async for make in opened(request.param, request, tmp_path):
        yield make()


async def test_a_write_that_is_not_known_was_lost(marking: Entitlements) -> None:
    written = await marking.put(entry("a"))
    assert await marking.changes(written.revision, "unheard of") is None
    assert await marking.changes(written.revision, "") is None
    assert (await marking.put(entry("b"), after="unheard of")).conflicts == ("b",)
    gone = entry("a", version=written.revision)
    lost = await marking.delete(gone, after="unheard of")
    assert (lost.conflicts, lost.mark) == (("a",), "")
    assert (await marking.delete(gone, after=written.mark)).conflicts == ()


async def test_a_later_process_finds_what_was_kept(kept: Make) -> None:
    first = kept()
    one = await first.put(entry("a"), entry("b"))
    newest = await first.delete(entry("b", version=one.revision))
    await first.close()
    later = kept()
    found = await later.load()
    assert (found.revision, unversioned(found.entries)) == (newest.revision, [entry("a")])
    assert [r.name for r in (await heard(later, one.revision, one.mark)).removals] == ["b"]


async def test_another_process_hears_of_changes(kept: Make) -> None:
    one, other = kept(), kept()
    before = await other.load()
    await one.put(entry("a"))
    found = await heard(other, before.revision, before.mark)
    assert (unversioned(found.entries), found.removals) == ([entry("a")], [])
    mine = await other.put(entry("b"))
    assert mine.revision > found.revision
    assert (await one.load()).revision == mine.revision


async def test_of_two_processes_that_change_one_entry_one_comes_first(kept: Make) -> None:
    one, other = kept(), kept()
    version = (await one.put(entry("a"))).revision
    await other.load()
    found = await asyncio.gather(
        one.put(entry("a", slo_ms=1, version=version)),
        other.put(entry("a", slo_ms=2, version=version)),
    )
    assert sorted(written.conflicts for written in found) == [(), ("a",)]


# What is particular to memory and to the file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sluice.db"


async def test_memory_forgets_the_oldest_removals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.adapters.store.directory.TOMBSTONES", 2)
    directory: Entitlements = MemoryDirectory()
    for name in ("a", "b", "c"):
        await directory.put(entry(name))
        await directory.delete(await kept_entry(directory, name))
    state = await directory.load()
    assert [r.name for r in state.removals] == ["b", "c"]
    assert state.complete_since == 4


async def test_the_file_forgets_removals_after_a_day(path: Path) -> None:
    clock = FakeClock(1e9)
    directory = SqliteDirectory(path, EntitlementEntry, wall_clock=clock)
    await directory.put(entry("a"), entry("b"), entry("c"))
    await directory.delete(entry("a", version=1))
    clock.advance(TOMBSTONE_S - 1)
    await directory.delete(entry("b", version=1))
    assert [r.name for r in (await heard(directory, 1, "")).removals] == ["a", "b"]
    clock.advance(2)
    await directory.delete(entry("c", version=1))
    assert [r.name for r in (await heard(directory, 1, "")).removals] == ["b", "c"]
    await directory.close()


async def test_the_file_holds_what_was_learned_too_in_either_order(path: Path) -> None:
    learned = {"ratio.prose": PartState(epoch=0, n=3, rate=3.0, sums={"total": 1.0})}
    directory, state = SqliteDirectory(path, EntitlementEntry), SqliteState(path)
    await directory.put(entry("a"))
    await state.exchange({"default:m": None})
    await state.exchange({"default:m": learned})
    await state.close()
    await directory.close()
    again, reader = SqliteState(path), SqliteDirectory(path, EntitlementEntry)
    (peer,) = (await again.exchange({"default:m": None})).peers["default:m"]
    assert peer.parts == learned
    assert unversioned((await reader.load()).entries) == [entry("a")]
    await again.close()
    await reader.close()


async def test_a_newer_schema_is_left_as_it_is(path: Path) -> None:
    directory = SqliteDirectory(path, EntitlementEntry)
    await directory.put(entry("a"))
    await directory.close()
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE directory SET schema = 7")
    directory = SqliteDirectory(path, EntitlementEntry)
    with pytest.raises(StateFailure, match=r"newer version \(schema 7, this one reads 1\)"):
        await directory.load()
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT schema, revision FROM directory").fetchone() == (7, 1)
    await directory.close()


async def test_an_unreadable_entry_is_a_failure_that_says_so(path: Path) -> None:
    directory = SqliteDirectory(path, EntitlementEntry)
    await directory.put(entry("a"))
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE entitlement SET entry = 'x'")
    with pytest.raises(StateFailure, match="damaged"):
        await directory.load()
    await directory.put(entry("a", version=1))
    assert unversioned((await directory.load()).entries) == [entry("a")]
    await directory.close()


@pytest.fixture
def minutes(path: Path) -> Iterator[Path]:
    """Another program's file, looked at again after the test."""
    path.write_bytes(b"minutes of the meeting")
    yield path
    assert path.read_bytes() == b"minutes of the meeting"


async def test_a_file_of_another_program_is_left_as_it_is(minutes: Path) -> None:
    directory = SqliteDirectory(minutes, EntitlementEntry)
    with pytest.raises(StateFailure, match="not a database"):
        await directory.put(entry("a"))
    await directory.close()


async def test_a_locked_file_refuses_and_serves_again_once_it_is_free(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.adapters.store.sqlite.estimators.BUSY_S", 0.05)
    directory = SqliteDirectory(path, EntitlementEntry)
    await directory.put(entry("a"))
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.execute("BEGIN IMMEDIATE")
        with pytest.raises(StateFailure, match="locked"):
            await directory.put(entry("b"))
        file.execute("ROLLBACK")
    await directory.put(entry("c"))
    assert named((await directory.load()).entries) == ["a", "c"]
    await directory.close()


async def test_fields_of_a_later_version_are_passed_over(path: Path) -> None:
    directory = SqliteDirectory(path, EntitlementEntry)
    await directory.put(entry("a"))
    text = msgspec.json.encode({**msgspec.to_builtins(entry("a")), "later": 1}).decode()
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE entitlement SET entry = ?", (text,))
    assert unversioned((await directory.load()).entries) == [entry("a")]
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

    monkeypatch.setattr("gateway.adapters.store.sqlite.directory.open_file", hanging)
    directory = SqliteDirectory(path, EntitlementEntry)
    for name in ("a", "b", "c"):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await directory.put(entry(name))
    goes_on.set()
    assert named((await directory.load()).entries) == ["a"]
    assert opened == [path]
    await directory.close()
