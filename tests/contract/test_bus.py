"""Replicas of one Redis hear of one another, agree on a seed, and go on when Redis is away."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.crc import key_slot

from bench.common.fleet import RedisServer
from gateway.replicas.bus import LASTING, LIMIT_S, MAX_BYTES, SILENT_S, Bus, Presence, Seed
from gateway.replicas.calls import Address
from gateway.store.redis.exchange import RedisExchange, key_of
from gateway.store.redis.route import TIMEOUT_S
from tests.fakes import FakeClock
from tests.redis_nodes import RedisCluster

pytestmark = pytest.mark.redis


class Board(Bus):
    """A replica's bus, on which its presence is told."""

    presence: Presence

    def replicas(self, model: str) -> int:
        return self.presence.replicas(model)

    def heard(self, name: str) -> list[bytes]:
        return [*self.peers(name).values()]


class Fleet:
    """Replicas, and the seeds that they were told to use."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.clock = FakeClock(100.0)
        self.seeds: dict[str, int] = {}
        self.boards: list[Board] = []

    def join(self, name: str, began_unix_s: float, *, models: tuple[str, ...] = ("m",)) -> Board:
        store = RedisExchange(self.url, name)
        board = Board(store, replica=name, clock=self.clock, chance=lambda: 0.5)
        board.presence = Presence(
            board,
            models,
            address=Address(f"http://{name}:1", f"token-{name}"),
            seed=Seed(since_unix_s=began_unix_s, value=hash(name) & 0xFFFF),
            on_seed=lambda seed: self.seeds.__setitem__(name, seed),
        )
        self.boards.append(board)
        return board

    async def exchange(self) -> None:
        """Twice, so that each hears what the last one told."""
        for _ in range(2):
            self.clock.advance(1.0)
            for board in self.boards:
                await board.exchange()


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    with RedisServer() as server:
        made = Fleet(server.url)
        yield made
        for board in made.boards:
            await board.close()


async def test_notes_reach_all_others_and_not_oneself(fleet: Fleet) -> None:
    one, two, three = (fleet.join(name, 1.0) for name in "abc")
    one.publish("m/0", b"from one")
    two.publish("m/0", b"from two")
    two.publish("m/1", b"other pool")
    await fleet.exchange()
    assert sorted(three.heard("m/0")) == []  # it has no such note itself, and asks for none
    three.publish("m/0", b"")
    await fleet.exchange()
    assert sorted(three.heard("m/0")) == [b"from one", b"from two"]
    assert one.heard("m/0") == [b"from two"]
    assert [board.replicas("m") for board in (one, two, three)] == [3, 3, 3]


async def test_replicas_of_another_model_are_not_counted(fleet: Fleet) -> None:
    one, other = fleet.join("a", 1.0), fleet.join("b", 1.0, models=("m", "n"))
    await fleet.exchange()
    assert (one.replicas("m"), other.replicas("m"), other.replicas("n")) == (2, 2, 1)


async def test_the_newest_note_counts_and_a_silent_replica_is_gone(fleet: Fleet) -> None:
    one, two = fleet.join("a", 1.0), fleet.join("b", 1.0)
    for number in range(3):
        one.publish("m/0", b"%d" % number)
        two.publish("m/0", b"x")
        await fleet.exchange()
    assert two.heard("m/0") == [b"2"]
    fleet.boards.remove(one)
    fleet.clock.advance(SILENT_S + 1)
    assert (two.heard("m/0"), two.replicas("m")) == ([], 1)
    await one.close()


async def test_all_use_the_seed_of_whoever_began_first(fleet: Fleet) -> None:
    names = {"c": 30.0, "a": 10.0, "b": 20.0}
    for name, began in names.items():
        fleet.join(name, began)
    await fleet.exchange()
    oldest = hash("a") & 0xFFFF
    assert fleet.seeds == {"b": oldest, "c": oldest}
    first = fleet.boards.pop(1)  # "a" ends; its seed stays, for who joins later, too
    await first.close()
    fleet.clock.advance(SILENT_S + 1)
    fleet.join("d", 40.0)
    await fleet.exchange()
    assert fleet.seeds == {"b": oldest, "c": oldest, "d": oldest}


async def test_a_note_that_is_too_large_stays_away_and_is_logged_once(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = fleet.join("a", 1.0), fleet.join("b", 1.0)
    two.publish("m/0", b"y")
    for _ in range(2):
        one.publish("m/0", b"x" * (MAX_BYTES + 1))
        await fleet.exchange()
    assert (two.heard("m/0"), one.heard("m/0")) == ([], [b"y"])
    assert caplog.text.count(f"the note m/0 is too large to tell: {MAX_BYTES + 1} bytes") == 1


async def test_a_replica_that_ends_is_gone_at_once_and_its_last_notes_are_heard(
    fleet: Fleet,
) -> None:
    one, two = fleet.join("a", 1.0), fleet.join("b", 1.0)
    two.publish("m/0", b"")
    await fleet.exchange()
    assert (two.replicas("m"), len(two.presence.others())) == (2, 1)
    one.publish("m/0", b"the last")
    await fleet.boards.pop(0).close()
    await two.exchange()
    assert (two.replicas("m"), two.presence.others()) == (1, [])
    assert two.heard("m/0") == [b"the last"]
    late = fleet.join("c", 3.0)
    await fleet.exchange()
    assert (late.replicas("m"), two.replicas("m")) == (2, 2)


class Listener:
    """Tells a number that grows, and keeps what it heard."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.told = 0
        self.heard: list[bytes] = []
        board.listen(self.send, self.receive)

    def send(self) -> Iterator[None]:
        self.told += 1
        self.board.publish("m/0", b"%d" % self.told)
        yield

    def receive(self) -> Iterator[None]:
        yield
        self.heard = self.board.heard("m/0")


async def test_listeners_tell_right_before_each_exchange_and_hear_right_after(
    fleet: Fleet,
) -> None:
    one, two = (Listener(fleet.join(name, 1.0)) for name in "ab")
    for number in range(1, 4):
        await one.board.exchange()
        await two.board.exchange()
        assert two.heard == [b"%d" % number]
    fleet.clock.advance(SILENT_S + 1)
    await two.board.exchange()
    assert two.heard == [], "also that nobody is there any more"


async def test_whoever_starts_has_heard_of_the_others_notes(fleet: Fleet) -> None:
    Listener(fleet.join("a", 1.0))
    await fleet.exchange()
    late = Listener(fleet.join("b", 1.0))
    await late.board.start()
    assert late.heard == [b"2"]


async def test_a_listener_that_fails_silences_no_other(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Listener):
        def send(self) -> Iterator[None]:
            yield
            raise ValueError("a defect")

        receive = send

    board = fleet.join("a", 1.0)
    Failing(board)
    two = Listener(fleet.join("b", 1.0))
    one = Listener(board)
    await fleet.exchange()
    assert (one.heard, two.heard) == ([b"1"], [b"2"])
    assert "a defect" in caplog.text


async def test_junk_in_redis_is_ignored(fleet: Fleet) -> None:
    import redis

    one, two = fleet.join("a", 1.0), fleet.join("b", 2.0)
    await fleet.exchange()
    with redis.Redis.from_url(fleet.url) as client:
        (key,) = client.keys("*notes4")
        for number, junk in enumerate((b"", b"9 9 junk", b"9 99999999999999999 \x81\xff")):
            client.hset(key, f"r:junk{number}", junk)
    await fleet.exchange()
    assert (one.replicas("m"), two.replicas("m")) == (2, 2)


async def test_away_each_goes_on_alone_and_back_they_hear_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with RedisServer() as server:
        fleet = Fleet(server.url)
        one, two = fleet.join("a", 1.0), fleet.join("b", 2.0)
        await fleet.exchange()
        server.kill()
        for _ in range(8):
            await fleet.exchange()
        assert (one.up, one.replicas("m")) == (False, 1)
        assert caplog.text.count("do not hear of one another") == 2  # each says so once
        server.start()
        for _ in range(4):
            fleet.clock.advance(LIMIT_S * 3)
            await fleet.exchange()
        assert (one.up, one.replicas("m"), two.replicas("m")) == (True, 2, 2)
        for board in fleet.boards:
            await board.close()


@pytest.mark.parametrize("silent", [False, True])
async def test_a_cluster_s_dead_node_takes_only_its_own_notes_along(
    tmp_path: Path, silent: bool
) -> None:
    with RedisCluster(tmp_path) as cluster:
        fleet = Fleet(cluster.url)
        models = tuple("abcdefgh")
        one, two = fleet.join("a", 1.0, models=models), fleet.join("b", 2.0, models=models)
        owners = {
            model: cluster.owner(key_slot(key_of(f"replicas:{model}").encode())) for model in models
        }
        dead = owners["a"]
        assert len(set(owners.values())) > 1
        for _ in range(5):  # a busy machine's first connections may be late
            await fleet.exchange()
        assert {one.replicas(model) for model in models} == {2}
        if silent:
            cluster.hang(dead)
        else:
            cluster.kill(dead)
        for _ in range(4):
            began_s = time.monotonic()
            await fleet.exchange()
            assert time.monotonic() - began_s < 4 * (2 * TIMEOUT_S + 0.25)
        for board in (one, two):
            seen = {model: board.replicas(model) for model in models}
            assert seen == {model: 1 if owner == dead else 2 for model, owner in owners.items()}
            assert board.up
            await board.close()


async def test_lasting_notes_that_a_dead_node_did_not_take_are_not_held(tmp_path: Path) -> None:
    with RedisCluster(tmp_path) as cluster:
        store = RedisExchange(cluster.url, "one")
        notes = dict.fromkeys((LASTING + name for name in "abcdefgh"), b"note")
        owners = {name: cluster.owner(key_slot(key_of(name).encode())) for name in notes}

        async def held() -> set[str]:
            found = await store.exchange(notes)
            return {name for name, received in found.items() if received.held}

        for _ in range(100):  # nodes on a busy machine doubt one another at first
            if await held() == notes.keys():
                break
            await asyncio.sleep(0.1)
        dead = owners[LASTING + "a"]
        cluster.kill(dead)
        assert await held() == {name for name, owner in owners.items() if owner != dead}
        await store.close()


async def test_each_knows_where_the_others_are_asked(fleet: Fleet) -> None:
    one = fleet.join("a", 1.0, models=("m", "n"))
    fleet.join("b", 1.0, models=("m", "n"))
    fleet.join("c", 1.0, models=("other",))
    await fleet.exchange()
    assert one.presence.others() == [Address("http://b:1", "token-b")]
    await fleet.boards.pop(1).close()
    await fleet.exchange()
    fleet.clock.advance(SILENT_S + 1)
    assert one.presence.others() == []


async def test_news_in_a_hurry_does_not_wait_for_the_next_exchange(fleet: Fleet) -> None:
    one, two = fleet.join("a", 1.0), fleet.join("b", 1.0)
    two.publish("m/0", b"")
    await two.exchange()
    await one.start()
    one.publish("m/0", b"news")
    one.hurry()
    async with asyncio.timeout(0.5):
        while two.heard("m/0") != [b"news"]:
            fleet.clock.advance(0.01)
            await two.exchange()
            await asyncio.sleep(0.02)
