"""The estimator state's contract: one suite for every store, and what only some of them can.

`kept`: what was published is heard by a later process. `shared`: by others at the same time.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

import pytest

from bench.common.redis_server import RedisServer
from gateway.errors import StateFailure
from gateway.estimate.merge import Learned, PartState
from gateway.ports import EstimatorState
from gateway.replicas.estimator_sync import NoState
from gateway.store.backends import open_state
from gateway.store.redis import estimators as redis_adapter
from gateway.store.redis.estimators import KIND, RedisState
from gateway.store.redis.exchange import key_of
from tests.fakes import FakeShared, FakeState

M = "default:m"
PERSISTENT = ["fake", "sqlite", pytest.param("redis", marks=pytest.mark.redis)]
SHARED = ["fake", pytest.param("redis", marks=pytest.mark.redis)]


def record(mean: float = 4.25, n: int = 7) -> dict[str, PartState]:
    """One part, of floats that decimal text would have to spell out."""
    sums = {"total": mean / 3, "weight": 1 / 3, "spread_total": 1e-17, "spread_weight": 0.1 + 0.2}
    return {"ratio.prose": PartState(epoch=2, n=n, rate=1 / 7, sums=sums)}


class Stores(Protocol):
    """Opens one more process's view of the same store."""

    def __call__(self) -> EstimatorState:
        """A new process."""


async def opened(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[Stores]:
    shared = FakeShared()
    count = iter(range(100))
    url = ""
    if name == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        url = server.url
    async with AsyncExitStack() as stack:

        def make() -> EstimatorState:
            state: EstimatorState
            if name == "memory":
                state = NoState()
            elif name == "fake":
                state = FakeState(shared, f"replica-{next(count)}")
            else:
                state = open_state(url or f"sqlite:///{tmp_path / 'state' / 'sluice.db'}")
            stack.push_async_callback(state.close)
            return state

        yield make


@pytest.fixture(params=["memory", *PERSISTENT])
async def anyone(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    async for make in opened(request.param, request, tmp_path):
        yield make


@pytest.fixture(params=PERSISTENT)
async def kept(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    async for make in opened(request.param, request, tmp_path):
        yield make


@pytest.fixture(params=SHARED)
async def shared(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    async for make in opened(request.param, request, tmp_path):
        yield make


async def publish(state: EstimatorState, given: Learned, model: str = M) -> None:
    """As the task does: the first exchange only hears, and one that fails is repeated."""
    for wanted in (None, given):
        try:
            await state.exchange({model: wanted})
        except StateFailure:  # Redis on a busy machine
            await state.exchange({model: wanted})


async def heard(state: EstimatorState, model: str = M) -> list[Learned]:
    found = await state.exchange({model: None})
    return [peer.parts for peer in found.peers.get(model, ())]


async def test_an_empty_store_says_nothing(anyone: Stores) -> None:
    assert await heard(anyone()) == []


async def test_nobody_hears_itself(anyone: Stores) -> None:
    state = anyone()
    await publish(state, record())
    assert await heard(state) == []


async def test_publishing_again_and_again_is_no_failure(anyone: Stores) -> None:
    state = anyone()
    for n in range(5):
        await publish(state, record(n=n + 1))


async def test_a_closed_store_may_be_closed_again(anyone: Stores) -> None:
    state = anyone()
    await publish(state, record())
    await state.close()


async def test_what_was_published_is_heard_later_bit_for_bit(kept: Stores) -> None:
    await publish(kept(), record())
    assert await heard(kept()) == [record()]


async def test_a_new_process_s_record_is_missing_until_it_publishes(kept: Stores) -> None:
    state = kept()
    assert (await state.exchange({M: None})).missing == {M}
    assert (await state.exchange({M: record()})).missing == frozenset()
    assert (await state.exchange({M: None})).missing == frozenset()


async def test_the_newer_record_replaces_the_older(kept: Stores) -> None:
    state = kept()
    await publish(state, record(4.0))
    await state.exchange({M: record(5.0)})
    assert await heard(kept()) == [record(5.0)]


async def test_nothing_new_leaves_the_record_as_it_was(kept: Stores) -> None:
    state = kept()
    await publish(state, record())
    await state.exchange({M: None})
    assert await heard(kept()) == [record()]


async def test_models_do_not_mix(kept: Stores) -> None:
    state = kept()
    await publish(state, record(4.0), "default:a")
    await state.exchange({"default:{b} \n": record(5.0)})
    reader = kept()
    found = await reader.exchange({"default:a": None, "default:{b} \n": None, "default:c": None})
    assert {name: [peer.parts for peer in peers] for name, peers in found.peers.items()} == {
        "default:a": [record(4.0)],
        "default:{b} \n": [record(5.0)],
    }


async def test_ages_are_not_negative(kept: Stores) -> None:
    await publish(kept(), record())
    (peer,) = (await kept().exchange({M: None})).peers[M]
    assert 0.0 <= peer.age_s < 60.0


async def test_a_record_is_heard_once(shared: Stores) -> None:
    writer, reader = shared(), shared()
    await publish(writer, record(4.0))
    assert await heard(reader) == [record(4.0)]
    assert await heard(reader) == []
    await writer.exchange({M: record(5.0)})
    assert await heard(reader) == [record(5.0)]


async def test_publishing_does_not_keep_one_from_hearing(shared: Stores) -> None:
    first, second = shared(), shared()
    await publish(first, record(4.0))
    found = await second.exchange({M: record(5.0)})
    assert [peer.parts for peer in found.peers[M]] == [record(4.0)]
    assert await heard(first) == [record(5.0)]


async def test_every_replica_hears_every_other(shared: Stores) -> None:
    states = [shared() for _ in range(5)]
    for n, state in enumerate(states):
        await publish(state, record(n=n + 1))
    found = await heard(states[0])
    assert sorted(parts["ratio.prose"].n for parts in found) == [2, 3, 4, 5]


# What is particular to Redis


@pytest.fixture
def server(redis_server: RedisServer) -> RedisServer:
    return redis_server


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.mark.redis
async def test_a_late_repetition_changes_nothing(server: RedisServer) -> None:
    state = RedisState(server.url, replica="one")
    await publish(state, record(4.0))
    await state.exchange({M: record(5.0)})
    state._exchange._sequence -= 2
    await state.exchange({M: record(4.0)})
    await state.exchange({M: record(4.0)})
    other = RedisState(server.url)
    assert await heard(other) == [record(5.0)]
    await state.close()
    await other.close()


@pytest.mark.redis
async def test_a_model_s_key_vanishes_when_nobody_asks(server: RedisServer) -> None:
    state = RedisState(server.url)
    await publish(state, record())
    with server.client() as client:
        assert 0 < int(str(client.ttl(key_of(M, KIND)))) <= redis_adapter.TTL_S
        assert client.dbsize() == 1
    await state.close()


@pytest.mark.redis
async def test_silent_replicas_are_dropped_by_one_that_has_heard_them(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_adapter, "SILENT_S", 0)
    dead, living = RedisState(server.url), RedisState(server.url)
    await publish(dead, record(4.0))
    found = await living.exchange({M: record(5.0)})
    assert [peer.parts for peer in found.peers[M]] == [record(4.0)], "heard before it is dropped"
    with server.client() as client:
        assert client.hlen(key_of(M, KIND)) == 3
        await dead.exchange({"default:other": None})
        await publish(dead, record(4.0))
        await living.exchange({M: record(5.0)})
        assert client.hlen(key_of(M, KIND)) == 2, "one record and the revision"
    await dead.close()
    await living.close()


@pytest.mark.redis
async def test_a_server_that_forgot_its_scripts_is_taught_again(server: RedisServer) -> None:
    state = RedisState(server.url)
    await publish(state, record(4.0))
    with server.client() as client:
        client.script_flush()
    await state.exchange({M: record(5.0)})
    other = RedisState(server.url)
    assert await heard(other) == [record(5.0)]
    await state.close()
    await other.close()


@pytest.mark.redis
async def test_a_server_that_was_emptied_misses_the_record(server: RedisServer) -> None:
    state, other = RedisState(server.url), RedisState(server.url)
    await publish(state, record(4.0))
    await heard(other)
    with server.client() as client:
        client.flushall()
    assert (await state.exchange({M: None})).missing == {M}
    await state.exchange({M: record(4.0)})
    assert await heard(other) == [record(4.0)]
    await state.close()
    await other.close()


@pytest.mark.redis
async def test_records_of_another_make_are_ignored(server: RedisServer) -> None:
    state = RedisState(server.url)
    with server.client() as client:
        for n, junk in enumerate(("1 5 \x00\xff{", "1 6 ", "nonsense", "1 7 " + "x" * 2_000_000)):
            client.hset(key_of(M, KIND), f"r:{n}", junk)
        client.hset(key_of(M, KIND), "rev", "9")
    assert await heard(state) == []
    await publish(state, record())
    await state.close()


@pytest.mark.redis
async def test_a_key_of_another_type_is_a_failure_and_no_more(server: RedisServer) -> None:
    state = RedisState(server.url)
    with server.client() as client:
        client.set(key_of(M, KIND), "x")
        with pytest.raises(StateFailure, match="WRONGTYPE"):
            await heard(state)
        client.delete(key_of(M, KIND))
    assert await heard(state) == []
    await state.close()


@pytest.mark.redis
async def test_a_dead_and_a_hanging_server_fail_fast_and_return(own_server: RedisServer) -> None:
    state = RedisState(own_server.url)
    await publish(state, record())
    own_server.hang()
    with pytest.raises(StateFailure, match="no answer"):
        await state.exchange({M: record()})
    with pytest.raises(StateFailure, match="no answer"):
        await state.exchange({M: record()})
    own_server.resume()
    await state.exchange({M: record()})
    own_server.kill()
    with pytest.raises(StateFailure):
        await state.exchange({M: record()})
    own_server.start()
    assert (await state.exchange({M: None})).missing == {M}
    await state.close()


@pytest.mark.redis
async def test_a_password_stands_in_no_failure(server: RedisServer) -> None:
    state = RedisState(server.url.replace("//", "//user:sesame@"))
    with pytest.raises(StateFailure) as caught:
        await heard(state)
    assert "sesame" not in str(caught.value)
    await state.close()
