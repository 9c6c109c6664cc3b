"""The directory's contract: one suite for every implementation, and what only files can.

`kept`: a later process finds it, and others hear of it while both run.
"""

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

from bench.common.fleet import RedisServer
from gateway.errors import StateFailure
from gateway.ports import Directory
from gateway.records.tenancy import Denial, DirectoryChange, DirectoryState, Row, Written
from gateway.replicas.bus import LASTING
from gateway.store.backends import open_directory
from gateway.store.sqlite_directory import SqliteDirectory
from gateway.store.sqlite_file import SqliteNotes, open_file
from gateway.tenancy.known import Known

REDIS = pytest.param("redis", marks=pytest.mark.redis)
ANYONE = ["memory", "sqlite", REDIS]
PERSISTENT = ["sqlite", REDIS]
Make = Callable[[], Directory]
AT_MS = 1_900_000_000_123


async def opened(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Make]:
    """Opens one more process's view of the same directory."""
    url = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path / 'state' / 'sluice.db'}"}
    if name == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        url["redis"] = server.url
    async with AsyncExitStack() as stack:

        def make() -> Directory:
            directory = open_directory(url[name])
            stack.push_async_callback(directory.close)
            return directory

        yield make


@pytest.fixture(params=ANYONE)
async def anyone(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Directory]:
    async for make in opened(request.param, request, tmp_path):
        yield make()


@pytest.fixture(params=PERSISTENT)
async def kept(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Make]:
    async for make in opened(request.param, request, tmp_path):
        yield make


def row(name: str, *, uid: str = "i", revision: int = 0, at: int = 0, **fields: object) -> Row:
    return Row(
        kind="entitlement",
        name=name,
        uid=uid,
        fields={"name": name, "rate": 0.1 + 0.2, **fields},
        of="s",
        created=AT_MS,
        changed=AT_MS + at,
        revision=revision,
    )


def gone(subject: str) -> Denial:
    return Denial(what="gone", subject=subject, changed=AT_MS)


def held(value: float, at: int = 0) -> Denial:
    return Denial(what="suspended", subject="tenant t", of="tenant t", value=value, changed=at)


async def put(directory: Directory, *rows: Row, floor: int = 0, after: str = "") -> Written:
    return await directory.write(DirectoryChange(puts=rows), floor=floor, after=after)


async def remove(directory: Directory, removed: Row, after: str = "") -> Written:
    change = DirectoryChange(removes=(removed,), denials=(gone(removed.uid),))
    return await directory.write(change, floor=0, after=after)


async def deny(directory: Directory, *denials: Denial) -> Written:
    return await directory.write(DirectoryChange(denials=denials), floor=0, after="")


async def everything(directory: Directory) -> DirectoryState:
    """All that is kept, in an order of its own, without the rows whose uid is gone."""
    state = await directory.read(0, "")
    assert state is not None
    known = Known()
    known.take(state.rows, state.denials)
    return msgspec.structs.replace(
        state,
        rows=tuple(sorted(known.rows.values(), key=lambda row: row.name)),
        denials=tuple(sorted(state.denials, key=lambda denial: denial.id)),
    )


async def names(directory: Directory) -> list[str]:
    return [row.name for row in (await everything(directory)).rows]


async def test_an_untouched_directory_is_at_revision_zero(anyone: Directory) -> None:
    assert await anyone.read(0, "") == DirectoryState()


async def test_what_was_written_is_read_bit_for_bit(anyone: Directory) -> None:
    change = DirectoryChange(puts=(row("a"), row("b", uid="j")), denials=(gone("x"), held(1)))
    written = await anyone.write(change, floor=0, after="")
    at = written.revision
    for state in (await everything(anyone), await anyone.read(0, "")):
        assert state is not None
        assert (state.revision, state.mark) == (at, written.mark)
        found = sorted(state.rows, key=lambda each: each.name)
        assert found == [row("a", revision=at), row("b", uid="j", revision=at)]
        assert {d.id: d for d in state.denials} == {
            d.id: msgspec.structs.replace(d, revision=at) for d in change.denials
        }


async def test_many_are_written_at_once(anyone: Directory) -> None:
    many = [row(f"e{n}", uid=f"u{n}") for n in range(500)]
    await put(anyone, *many)
    assert await names(anyone) == sorted(each.name for each in many)


async def test_a_row_is_replaced_from_its_revision_only(anyone: Directory) -> None:
    first = await put(anyone, row("a"))
    for wrong in (0, 7):
        assert (await put(anyone, row("a", slo=9, revision=wrong))).conflict
    second = await put(anyone, row("a", slo=9, revision=first.revision))
    assert not second.conflict
    assert (await put(anyone, row("a", revision=first.revision))).conflict
    assert (await everything(anyone)).rows == (row("a", slo=9, revision=second.revision),)


async def test_a_change_is_written_whole_or_not_at_all(anyone: Directory) -> None:
    written = await put(anyone, row("a"))
    change = DirectoryChange(puts=(row("b", uid="j"), row("a", slo=9)), denials=(gone("x"),))
    assert (await anyone.write(change, floor=0, after="")).conflict
    state = await everything(anyone)
    assert (state.revision, [r.name for r in state.rows]) == (written.revision, ["a"])
    assert state.denials == ()


async def test_what_is_gone_never_comes_back(anyone: Directory) -> None:
    first = await put(anyone, row("a"))
    assert (await remove(anyone, row("a"))).conflict, "of another revision"
    assert not (await remove(anyone, row("a", revision=first.revision))).conflict
    assert await names(anyone) == []
    assert (await put(anyone, row("a"))).conflict
    await anyone.give_back(DirectoryState(rows=(row("a", at=99),)), floor=0)
    assert await names(anyone) == []
    assert not (await put(anyone, row("a", uid="other"))).conflict
    assert await names(anyone) == ["a"]


async def test_every_change_raises_the_revision_above_what_the_writer_knows(
    anyone: Directory,
) -> None:
    assert (await put(anyone, row("a"), floor=41)).revision == 42
    assert (await put(anyone, row("b", uid="j"), floor=7)).revision == 43
    assert (await deny(anyone, gone("x"))).revision == 44
    assert (await anyone.give_back(DirectoryState(), floor=99)).revision >= 100


async def test_changes_are_those_after_the_revision(anyone: Directory) -> None:
    first = await put(anyone, row("a"), row("b", uid="j"))
    await deny(anyone, gone("x"))
    newest = await put(anyone, row("a", slo=9, revision=first.revision))
    state = await anyone.read(first.revision, first.mark)
    assert state is not None
    assert (state.revision, state.mark) == (newest.revision, newest.mark)
    assert state.rows == (row("a", slo=9, revision=newest.revision),)
    assert [denial.id for denial in state.denials] == ["gone x"]
    later = await anyone.read(newest.revision, newest.mark)
    assert later == DirectoryState(revision=newest.revision, mark=newest.mark)


async def test_a_write_that_is_not_known_was_lost(anyone: Directory) -> None:
    written = await put(anyone, row("a"))
    assert await anyone.read(written.revision, "unheard of") is None
    assert await anyone.read(written.revision, "") is None
    assert await anyone.read(written.revision + 1, written.mark) is None
    assert (await put(anyone, row("b", uid="j"), after="unheard of")).conflict
    assert not (await put(anyone, row("b", uid="j"), after=written.mark)).conflict


async def test_a_denial_is_replaced_by_a_later_one_or_a_stricter_one_at_once(
    anyone: Directory,
) -> None:
    for value, at, conflict in ((0, 5, False), (1, 5, False), (0, 5, True), (0, 4, True)):
        assert (await deny(anyone, held(value, at=at))).conflict == conflict
        (denial,) = (await everything(anyone)).denials
        assert denial.value == (value if not conflict else 1)
    assert not (await deny(anyone, held(0, at=6))).conflict


@pytest.mark.redis
async def test_redis_is_not_asked_for_more_than_it_answers_in_one_call(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.redis.directory.READ_MOST", 2)
    directory = open_directory(redis_server.url)
    first = await deny(directory, gone("x"))
    await put(directory, row("a"), row("b", uid="j"))
    assert await directory.read(first.revision, first.mark) is not None
    await deny(directory, *(gone(f"y{n}") for n in range(3)))
    assert await directory.read(first.revision, first.mark) is None
    await directory.close()


@pytest.mark.parametrize(("first", "last"), [(1, 2), (2, 1)])
async def test_of_two_that_were_made_under_one_name_the_later_stays(
    anyone: Directory, first: int, last: int
) -> None:
    await put(anyone, row("a", uid=f"uid-{first}", at=first))
    given = DirectoryState(rows=(row("a", uid=f"uid-{last}", at=last),))
    await anyone.give_back(given, floor=0)
    state = await everything(anyone)
    assert [each.uid for each in state.rows] == ["uid-2"]
    assert [denial.id for denial in state.denials] == ["gone uid-1"]


async def test_the_same_row_of_a_later_revision_is_written_anew(anyone: Directory) -> None:
    """So that whoever knows the later revision can change it."""
    await put(anyone, row("a"))
    written = await anyone.give_back(DirectoryState(rows=(row("a", revision=7),)), floor=7)
    assert (await everything(anyone)).rows == (row("a", revision=written.revision),)
    assert written.revision > 7


ROWS = st.builds(
    lambda name, at, slo: row(name, uid=f"uid-{name}", at=at, slo=slo),
    st.sampled_from("ab"),
    st.integers(0, 3),
    st.integers(0, 1),
)
DENIALS = st.one_of(
    st.builds(lambda name: gone(f"uid-{name}"), st.sampled_from("ab")),
    st.builds(lambda value, at: held(value, at=at), st.sampled_from([0, 1]), st.integers(0, 3)),
    st.builds(
        lambda value, at: Denial(what="ends", subject="tenant t", value=value, changed=at),
        st.sampled_from([0.0, 1.9e9, 1.8e9 + 1 / 3]),
        st.integers(0, 3),
    ),
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(states=st.lists(st.tuples(st.lists(ROWS, max_size=4), st.lists(DENIALS, max_size=4))))
@pytest.mark.parametrize("name", ANYONE)
def test_what_is_given_back_is_joined_as_a_process_joins_it(
    name: str,
    states: list[tuple[list[Row], list[Denial]]],
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async def joined() -> None:
        known = Known()
        async for make in opened(name, request, tmp_path_factory.mktemp("state")):
            directory = make()
            for rows, denials in states:
                # Of one name or id a process knows one.
                own = Known()
                own.take(rows, denials)
                part = (tuple(own.rows.values()), tuple(own.denials.values()))
                known.take(*part)
                await directory.give_back(DirectoryState(rows=part[0], denials=part[1]), floor=0)
            state = await everything(directory)
            assert [unversioned(each) for each in state.rows] == [
                unversioned(known.rows[key]) for key in sorted(known.rows)
            ]
            assert [(d.id, d.value, d.changed) for d in state.denials] == [
                (d.id, d.value, d.changed) for _, d in sorted(known.denials.items())
            ]

    if name == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        with server.client() as client:
            client.flushall()
    asyncio.run(joined())


def unversioned(kept_row: Row) -> Row:
    return msgspec.structs.replace(kept_row, revision=0)


async def test_closing_twice_is_no_failure(anyone: Directory) -> None:
    await put(anyone, row("a"))
    await anyone.close()
    await anyone.close()


async def test_a_later_process_finds_what_was_kept(kept: Make) -> None:
    first = kept()
    one = await put(first, row("a"), row("b", uid="j"))
    newest = await remove(first, row("b", uid="j", revision=one.revision))
    await first.close()
    later = kept()
    state = await everything(later)
    assert (state.revision, state.mark) == (newest.revision, newest.mark)
    assert [each.name for each in state.rows] == ["a"]
    heard = await later.read(one.revision, one.mark)
    assert heard is not None
    assert [denial.id for denial in heard.denials] == ["gone j"]


async def test_another_process_hears_of_changes(kept: Make) -> None:
    one, other = kept(), kept()
    assert await other.read(0, "") == DirectoryState()
    await put(one, row("a"))
    assert await names(other) == ["a"]
    mine = await put(other, row("b", uid="j"))
    assert (await everything(one)).revision == mine.revision


async def test_of_two_processes_that_change_one_row_one_comes_first(kept: Make) -> None:
    one, other = kept(), kept()
    at = (await put(one, row("a"))).revision
    await other.read(0, "")
    found = await asyncio.gather(
        put(one, row("a", slo=1, revision=at)), put(other, row("a", slo=2, revision=at))
    )
    assert sorted(written.conflict for written in found) == [False, True]


# What is particular to Redis


def followed(client: Redis) -> None:
    """Wait until a replica has all; it first loads everything."""
    client.set("anything", time.monotonic())
    while client.wait(1, 1_000) < 1:
        time.sleep(0.05)


async def replicated(directory: Directory) -> bool:
    """Whether one of some denials reaches a replica in time, on a busy machine, too."""
    return any([(await deny(directory, gone(f"r{n}"))).replicated for n in range(5)])


@pytest.mark.redis
async def test_a_denial_says_whether_a_replica_has_it(redis_server: RedisServer) -> None:
    with RedisServer() as replica:
        with replica.client() as client:
            client.replicaof("127.0.0.1", redis_server.port)
        directory = open_directory(redis_server.url)
        with redis_server.client() as client:
            await asyncio.to_thread(followed, client)
            assert await replicated(directory)
            replica.hang()
            assert not (await deny(directory, gone("y"))).replicated
            assert (await put(directory, row("a"))).replicated, "nothing is denied"
            replica.resume()
            await asyncio.to_thread(followed, client)
            assert await replicated(directory)
        await directory.close()


# What is particular to the file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sluice.db"


async def test_the_file_holds_notes_too_in_either_order(path: Path) -> None:
    directory, notes = SqliteDirectory(path), SqliteNotes(path)
    await put(directory, row("a"))
    name = LASTING + "m"
    await notes.exchange({name: b"note"})
    await notes.close()
    await directory.close()
    again, reader = SqliteNotes(path), SqliteDirectory(path)
    ((_, note),) = (await again.exchange({name: b""}))[name].notes
    assert note == b"note"
    assert await names(reader) == ["a"]
    await again.close()
    await reader.close()


async def test_an_unreadable_row_is_a_failure_that_says_so(path: Path) -> None:
    directory = SqliteDirectory(path)
    await put(directory, row("a"))
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE directory_row SET row = 'x'")
    with pytest.raises(StateFailure, match="damaged"):
        await directory.read(0, "")
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
        await put(directory, row("a"))
    await directory.close()


async def test_a_locked_file_refuses_and_serves_again_once_it_is_free(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.sqlite_file.BUSY_S", 0.05)
    directory = SqliteDirectory(path)
    await put(directory, row("a"))
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.execute("BEGIN IMMEDIATE")
        with pytest.raises(StateFailure, match="locked"):
            await put(directory, row("b", uid="j"))
        file.execute("ROLLBACK")
    await put(directory, row("c", uid="k"))
    assert await names(directory) == ["a", "c"]
    await directory.close()


async def test_fields_of_a_later_version_are_passed_over(path: Path) -> None:
    directory = SqliteDirectory(path)
    written = await put(directory, row("a"))
    kept_row = row("a", revision=written.revision)
    text = msgspec.json.encode({**msgspec.to_builtins(kept_row), "later": 1}).decode()
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE directory_row SET row = ?", (text,))
    assert (await everything(directory)).rows == (kept_row,)
    await directory.close()


async def test_a_disk_that_hangs_is_given_one_piece_of_work_at_a_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    opened_paths = []

    def hanging(path: Path | None) -> sqlite3.Connection:
        opened_paths.append(path)
        goes_on.wait(10)
        return open_file(path)

    monkeypatch.setattr("gateway.store.sqlite_file.open_file", hanging)
    directory = SqliteDirectory(path)
    for number, name in enumerate(("a", "b", "c")):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await put(directory, row(name, uid=f"u{number}"))
    goes_on.set()
    assert await names(directory) == ["a"]
    assert opened_paths == [path]
    await directory.close()
