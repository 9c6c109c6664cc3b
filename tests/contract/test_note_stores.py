"""The contract of the bus's stores: one suite for every store, and what only some of them can.

`kept`: what was published is heard by a later process. `shared`: by others at the same time.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

import pytest

from bench.common.fleet import RedisServer
from gateway.errors import StateFailure
from gateway.replicas.bus import LASTING, NoteStore
from gateway.store.backends import open_notes
from gateway.store.redis import exchange as redis_adapter
from gateway.store.redis import route
from gateway.store.redis.exchange import LASTING_KIND, RedisExchange, key_of
from tests.fakes import FakeNotes, FakeShared

M = LASTING + "default:m"
KEPT = ["fake", "sqlite", pytest.param("redis", marks=pytest.mark.redis)]
SHARED = ["fake", pytest.param("redis", marks=pytest.mark.redis)]


class Stores(Protocol):
    """Opens one more process's view of the same store."""

    def __call__(self) -> NoteStore:
        """A new process."""


async def opened(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[Stores]:
    shared = FakeShared()
    count = iter(range(100))
    url = f"sqlite:///{tmp_path / 'state' / 'sluice.db'}"
    if name == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        url = server.url
    async with AsyncExitStack() as stack:

        def make() -> NoteStore:
            replica = f"replica-{next(count)}"
            store = FakeNotes(shared, replica) if name == "fake" else open_notes(url, replica)
            assert store is not None
            stack.push_async_callback(store.close)
            return store

        yield make


@pytest.fixture(params=KEPT)
async def kept(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    async for make in opened(request.param, request, tmp_path):
        yield make


@pytest.fixture(params=SHARED)
async def shared(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    async for make in opened(request.param, request, tmp_path):
        yield make


async def publish(store: NoteStore, note: bytes, name: str = M) -> None:
    """A failed exchange is repeated, as by the bus: Redis may be on a busy machine."""
    try:
        await store.exchange({name: note})
    except StateFailure:
        await store.exchange({name: note})


async def heard(store: NoteStore, name: str = M) -> list[bytes]:
    return [note for _, note in (await store.exchange({name: b""}))[name].notes]


async def holds(store: NoteStore, note: bytes = b"") -> bool:
    return (await store.exchange({M: note}))[M].held


async def test_an_empty_store_says_nothing(kept: Stores) -> None:
    assert await heard(kept()) == []


async def test_nobody_hears_itself(kept: Stores) -> None:
    store = kept()
    await publish(store, b"note")
    assert await heard(store) == []


async def test_a_closed_store_may_be_closed_again(kept: Stores) -> None:
    store = kept()
    await publish(store, b"note")
    await store.close()


async def test_what_was_published_is_heard_later_bit_for_bit(kept: Stores) -> None:
    note = bytes(range(256))
    await publish(kept(), note)
    assert await heard(kept()) == [note]


async def test_a_new_process_s_note_is_not_held_until_it_publishes(kept: Stores) -> None:
    store = kept()
    assert [await holds(store), await holds(store, b"note"), await holds(store)] == [
        *(False, True, True)
    ]


async def test_the_newer_note_replaces_the_older(kept: Stores) -> None:
    store = kept()
    await publish(store, b"old")
    await publish(store, b"new")
    assert await heard(kept()) == [b"new"]


async def test_nothing_new_leaves_the_note_as_it_was(kept: Stores) -> None:
    store = kept()
    await publish(store, b"note")
    await store.exchange({M: b""})
    assert await heard(kept()) == [b"note"]


async def test_names_do_not_mix(kept: Stores) -> None:
    a, b, c = (LASTING + name for name in ("default:a", "default:{b} \n", "default:c"))
    store = kept()
    await publish(store, b"4", a)
    await store.exchange({b: b"5"})
    found = await kept().exchange({a: b"", b: b"", c: b""})
    assert {name: [note for _, note in received.notes] for name, received in found.items()} == {
        a: [b"4"],
        b: [b"5"],
        c: [],
    }


async def test_ages_are_not_negative(kept: Stores) -> None:
    await publish(kept(), b"note")
    ((age_s, _),) = (await kept().exchange({M: b""}))[M].notes
    assert 0.0 <= age_s < 60.0


async def test_a_note_is_heard_once(shared: Stores) -> None:
    writer, reader = shared(), shared()
    await publish(writer, b"4")
    assert await heard(reader) == [b"4"]
    assert await heard(reader) == []
    await publish(writer, b"5")
    assert await heard(reader) == [b"5"]


async def test_publishing_does_not_keep_one_from_hearing(shared: Stores) -> None:
    first, second = shared(), shared()
    await publish(first, b"4")
    found = await second.exchange({M: b"5"})
    assert [note for _, note in found[M].notes] == [b"4"]
    assert await heard(first) == [b"5"]


async def test_every_replica_hears_every_other(shared: Stores) -> None:
    stores = [shared() for _ in range(5)]
    for n, store in enumerate(stores):
        await publish(store, b"%d" % n)
    assert sorted(await heard(stores[0])) == [b"1", b"2", b"3", b"4"]


# What is particular to Redis


@pytest.fixture
def server(redis_server: RedisServer) -> RedisServer:
    return redis_server


@pytest.mark.redis
async def test_a_late_repetition_changes_nothing(server: RedisServer) -> None:
    store = RedisExchange(server.url, "one")
    await publish(store, b"4")
    await store.exchange({M: b"5"})
    store._sequence -= 2
    await store.exchange({M: b"4"})
    await store.exchange({M: b"4"})
    other = RedisExchange(server.url, "other")
    assert await heard(other) == [b"5"]
    await store.close()
    await other.close()


@pytest.mark.redis
async def test_a_name_s_key_vanishes_when_nobody_asks(server: RedisServer) -> None:
    store = RedisExchange(server.url, "one")
    await publish(store, b"note")
    with server.client() as client:
        assert 0 < int(str(client.ttl(key_of(M)))) <= LASTING_KIND.ttl_s
        assert client.dbsize() == 1
    await store.close()


@pytest.mark.redis
async def test_silent_replicas_are_dropped_by_one_that_has_heard_them(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_adapter, "LASTING_KIND", LASTING_KIND._replace(silent_s=0))
    dead, living = (RedisExchange(server.url, name) for name in ("dead", "living"))
    await publish(dead, b"4")
    found = await living.exchange({M: b"5"})
    assert [note for _, note in found[M].notes] == [b"4"], "heard before it is dropped"
    with server.client() as client:
        assert client.hlen(key_of(M)) == 3
        await dead.exchange({LASTING + "other": b""})
        await dead.exchange({M: b""})
        await publish(dead, b"4")
        await living.exchange({M: b"5"})
        assert client.hlen(key_of(M)) == 2, "one note and the revision"
    await dead.close()
    await living.close()


@pytest.mark.redis
async def test_a_server_that_forgot_its_scripts_is_taught_again(server: RedisServer) -> None:
    store, other = (RedisExchange(server.url, name) for name in ("one", "other"))
    await publish(store, b"4")
    with server.client() as client:
        client.script_flush()
    await store.exchange({M: b"5"})
    assert await heard(other) == [b"5"]
    await store.close()
    await other.close()


@pytest.mark.redis
async def test_a_server_that_was_emptied_does_not_hold_the_note(server: RedisServer) -> None:
    store, other = (RedisExchange(server.url, name) for name in ("one", "other"))
    await publish(store, b"4")
    await heard(other)
    with server.client() as client:
        client.flushall()
    assert not await holds(store)
    await store.exchange({M: b"4"})
    assert await heard(other) == [b"4"]
    await store.close()
    await other.close()


@pytest.mark.redis
async def test_what_is_no_note_is_ignored(server: RedisServer) -> None:
    store = RedisExchange(server.url, "one")
    with server.client() as client:
        client.hset(key_of(M), "r:junk", "nonsense")
        client.hset(key_of(M), "rev", "9")
    assert await heard(store) == []
    await publish(store, b"note")
    await store.close()


@pytest.mark.redis
async def test_a_key_of_another_type_is_a_failure_and_no_more(server: RedisServer) -> None:
    store = RedisExchange(server.url, "one")
    with server.client() as client:
        client.set(key_of(M), "x")
        with pytest.raises(StateFailure, match="WRONGTYPE"):
            await heard(store)
        client.delete(key_of(M))
    assert await heard(store) == []
    await store.close()


@pytest.mark.redis
async def test_a_dead_and_a_hanging_server_fail_fast_and_return(own_server: RedisServer) -> None:
    store = RedisExchange(own_server.url, "one")
    await publish(store, b"note")
    own_server.hang()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(route, "TIMEOUT_S", 0.25)
        for _ in range(2):
            with pytest.raises(StateFailure, match="no answer"):
                await store.exchange({M: b"note"})
    own_server.resume()
    await store.exchange({M: b"note"})
    own_server.kill()
    with pytest.raises(StateFailure):
        await store.exchange({M: b"note"})
    own_server.start()
    assert not await holds(store)
    await store.close()


@pytest.mark.redis
async def test_a_password_stands_in_no_failure(server: RedisServer) -> None:
    store = RedisExchange(server.url.replace("//", "//user:sesame@"), "one")
    with pytest.raises(StateFailure) as caught:
        await heard(store)
    assert "sesame" not in str(caught.value)
    await store.close()
