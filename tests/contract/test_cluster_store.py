"""What a controller publishes and gateways read, over a real Redis."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from bench.common.fleet import RedisServer
from gateway.errors import StateFailure
from gateway.records.tenancy import ClusterEntitlement, ClusterState
from gateway.store.redis import cluster
from gateway.store.redis.cluster import ClusterStore, Fenced, OtherNamespace

pytestmark = pytest.mark.redis
Make = Callable[[], ClusterStore]


@pytest.fixture
async def make(redis_server: RedisServer) -> AsyncIterator[Make]:
    """Opens one more process's view of the same set."""
    async with AsyncExitStack() as stack:

        def opened() -> ClusterStore:
            store = ClusterStore(redis_server.url)
            stack.push_async_callback(store.close)
            return store

        yield opened


def granted(*names: str, **more: Any) -> dict[str, ClusterEntitlement]:
    return {
        name: ClusterEntitlement(
            name=name,
            fields={"name": name, "tenant": "acme", "model": "m", "kv_cache_gib": 0.125},
            digests=("a" * 64,),
            created=1_900_000_000_123,
            source=f"TokenEntitlement team/{name}",
            uid=f"uid-{name}",
            **more,
        )
        for name in names
    }


class Reader:
    """A gateway: what it holds after each read."""

    def __init__(self, store: ClusterStore) -> None:
        self.store = store
        self.held: dict[str, ClusterEntitlement] = {}
        self.last = ClusterState()

    async def read(self) -> ClusterState | None:
        state = await self.store.read(self.last.version)
        if state is not None:
            assert state.version >= self.last.version
            if state.whole:
                self.held = {}
            self.held.update({each.name: each for each in state.entitlements})
            for name in state.removed:
                self.held.pop(name, None)
            self.last = state
        return state


async def test_a_gateway_holds_what_the_controller_published(make: Make) -> None:
    writer, reader = make(), Reader(make())
    assert await reader.read() is None
    for wanted in (
        granted("a", "b"),
        granted("b", "c", message="of ½ a GPU"),
        granted(),
        granted("c", verdict="degraded"),
    ):
        await writer.publish(1, wanted, age_s=0.0)
        await reader.read()
        assert reader.held == wanted
    for wanted in (granted(), granted("c")):  # it may miss that something was away
        await writer.publish(1, wanted, age_s=0.0)
    await reader.read()
    assert reader.held == granted("c")


async def test_an_empty_set_is_news_to_a_gateway_that_waits_for_it(make: Make) -> None:
    await make().publish(0, {}, age_s=0.0)
    state = await make().read()
    assert state is not None
    assert (state.whole, state.entitlements) == (True, ())


async def test_only_what_changed_travels_and_a_heartbeat_changes_nothing(make: Make) -> None:
    writer, reader = make(), Reader(make())
    await writer.publish(1, granted("a", "b"), age_s=0.0)
    await reader.read()
    await writer.publish(1, granted("a", "b"), age_s=0.0)
    again = await reader.read()
    assert again is not None
    assert (again.whole, again.entitlements, again.removed) == (False, (), ())
    await writer.publish(1, granted("a", "c"), age_s=0.0)
    changed = await reader.read()
    assert changed is not None
    assert [e.name for e in changed.entitlements] == ["c"]
    assert (changed.whole, changed.removed) == (False, ("b",))


async def test_its_age_is_that_of_the_controllers_knowledge(make: Make) -> None:
    """A heartbeat of one who does not hear of the cluster himself is no news of it."""
    writer, reader = make(), Reader(make())
    for age_s in (5000.0, 0.0):
        await writer.publish(1, granted("a"), age_s=age_s)
        state = await reader.read()
        assert state is not None
        assert age_s <= state.age_s < age_s + 60.0


async def test_who_was_replaced_can_write_no_more(make: Make) -> None:
    former, later, reader = make(), make(), Reader(make())
    await former.publish(3, granted("a"), age_s=0.0)
    await later.publish(4, granted("b"), age_s=0.0)
    for names in ("a", "b"):
        with pytest.raises(Fenced, match="epoch 4") as fenced:
            await former.publish(3, granted(names), age_s=0.0)
        assert fenced.value.epoch == 4
    await reader.read()
    assert (reader.held, reader.last.version[0]) == (granted("b"), 4)


async def test_the_controller_of_another_namespace_is_refused(
    make: Make, redis_server: RedisServer
) -> None:
    first, other, reader = ClusterStore(redis_server.url, "team"), make(), Reader(make())
    await first.publish(3, granted("a"), age_s=0.0)
    for epoch in (3, 4):
        with pytest.raises(OtherNamespace, match="namespace team publishes in this Redis"):
            await other.publish(epoch, granted("b"), age_s=0.0)
    await first.publish(3, granted("a", "c"), age_s=0.0)
    await first.close()
    await reader.read()
    assert reader.held == granted("a", "c")
    with redis_server.client() as client:  # as the refusal says
        client.hdel("sluice:1:{cluster}:head", "namespace")
    with pytest.raises(Fenced):
        await other.publish(2, granted("b"), age_s=0.0)
    await other.publish(4, granted("b"), age_s=0.0)
    await reader.read()
    assert reader.held == granted("b")


async def test_a_controller_that_restarts_goes_on(make: Make) -> None:
    """In the same epoch, and it takes away what it would not grant now."""
    reader = Reader(make())
    for names in (("a", "b"), ("b",), ("c",)):
        await make().publish(2, granted(*names), age_s=0.0)
        await reader.read()
        assert reader.held == granted(*names)


async def test_a_redis_that_was_emptied_is_written_anew(
    make: Make, redis_server: RedisServer
) -> None:
    writer, reader, new = make(), Reader(make()), Reader(make())
    await writer.publish(1, granted("a", "b"), age_s=0.0)
    await reader.read()
    known = reader.last
    with redis_server.client() as client:
        client.flushall()
    assert await reader.read() is None  # and it keeps what it knows
    await writer.publish(1, granted("a", "b"), age_s=0.0)
    for each in (reader, new):
        await each.read()
        assert each.held == granted("a", "b")
        assert each.last.version > known.version


@pytest.mark.parametrize("same", [True, False])
async def test_what_an_older_copy_of_redis_says_is_corrected(
    make: Make, redis_server: RedisServer, *, same: bool
) -> None:
    """Also where the controller wants again what the copy has, and gateways heard otherwise."""
    writer, reader = make(), Reader(make())
    await writer.publish(1, granted("a"), age_s=0.0)
    with redis_server.client() as client:
        older: Any = {key: client.dump(key) for key in client.scan_iter()}
        await writer.publish(1, granted("a", "b"), age_s=0.0)
        await reader.read()
        client.flushall()
        for key, held in older.items():
            client.restore(key, 0, held)
    wanted = granted("a") if same else granted("b")
    await writer.publish(1, wanted, age_s=0.0)
    await reader.read()
    assert reader.held == wanted


async def test_rows_that_a_server_short_of_memory_dropped_come_back(
    make: Make, redis_server: RedisServer
) -> None:
    writer, reader = make(), Reader(make())
    await writer.publish(1, granted("a", "b"), age_s=0.0)
    with redis_server.client() as client:
        client.delete("sluice:1:{cluster}:rows")
    for _ in range(2):  # noticed, then mended
        await writer.publish(1, granted("a", "b"), age_s=0.0)
    await reader.read()
    assert reader.held == granted("a", "b")


async def test_nobody_reads_a_set_that_is_half_written(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever took it for the whole would refuse the keys of the rest."""
    monkeypatch.setattr(cluster, "BATCH", 2)
    names = [f"e{number}" for number in range(7)]
    writer, other = make(), make()
    halves: list[ClusterState | None] = []
    run = writer._run

    async def spied(*arguments: object) -> Any:
        answer = await run(*arguments)
        halves.append(await other.read())
        return answer

    monkeypatch.setattr(writer, "_run", spied)
    await writer.publish(1, granted(*names), age_s=0.0)
    assert halves[:-1] == [None] * (len(halves) - 1)
    assert halves[-1] is not None
    assert {e.name for e in halves[-1].entitlements} == set(names)


async def test_a_gateway_that_missed_more_than_is_kept_reads_all(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "MISSED_MOST", 3)
    writer, late, prompt = make(), Reader(make()), Reader(make())
    names = [f"e{number}" for number in range(9)]
    await writer.publish(1, granted(*names), age_s=0.0)
    await late.read()
    for left in range(8, 2, -1):
        await prompt.read()
        await writer.publish(1, granted(*names[:left]), age_s=0.0)
    missed, heard = await late.read(), await prompt.read()
    assert missed is not None
    assert heard is not None
    assert (missed.whole, heard.whole) == (True, False)
    assert late.held == prompt.held == granted("e0", "e1", "e2")


async def test_more_than_the_most_is_refused_and_what_there_was_stays(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "MAX_ENTITLEMENTS", 2)
    writer, reader = make(), Reader(make())
    await writer.publish(1, granted("a"), age_s=0.0)
    with pytest.raises(StateFailure, match="3 entitlements"):
        await writer.publish(1, granted("a", "b", "c"), age_s=0.0)
    await reader.read()
    assert reader.held == granted("a")


async def test_the_controller_reads_the_demand_that_gateways_measured(
    make: Make, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, controller = make(), make(), make()
    assert await controller.demand() == {}
    await one.report({"m": {"short": 2, "long": 1}})
    await other.report({"org/n": {"only": 3}})
    await one.report({"m": {"short": 4, "long": 1}})
    await one.report({"m": {}})  # not measured yet
    expected = {("m", "short"): 4, ("m", "long"): 1, ("org/n", "only"): 3}
    assert await controller.demand() == expected
    monkeypatch.setattr(cluster, "DEMAND_S", -1.0)  # nobody measures any more
    assert await controller.demand() == {}


async def test_a_redis_that_is_away_is_told_as_such(own_server: RedisServer) -> None:
    store = ClusterStore(own_server.url)
    own_server.kill()
    for call in (
        store.publish(1, granted("a"), age_s=0.0),
        store.read(),
        store.demand(),
        store.report({"m": {"short": 1}}),
    ):
        with pytest.raises(StateFailure):
            await call
    own_server.start()
    await store.publish(1, granted("a"), age_s=0.0)
    assert await store.read() is not None
    await store.close()


async def test_what_another_version_wrote_is_left_out_alone(
    make: Make, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where it was another before, since it may be withheld now."""
    writer, reader, late = make(), Reader(make()), Reader(make())
    await writer.publish(1, granted("a", "b"), age_s=0.0)
    await reader.read()
    await writer.publish(1, granted("a", "b", verdict="pending"), age_s=0.0)
    with redis_server.client() as client:
        row = b'{"name":"b","fields":{},"verdict":"quarantined"}'
        client.hset("sluice:1:{cluster}:rows", "b", row)
    for each in (reader, late):
        await each.read()
        assert each.held == granted("a", verdict="pending")
        assert "['b']: Invalid enum value 'quarantined'" in caplog.text
        caplog.clear()


async def test_a_later_controllers_set_is_read_whatever_its_revision(
    make: Make, redis_server: RedisServer
) -> None:
    """Redis was emptied, and its clock is behind since: revisions begin lower."""
    reader = Reader(make())
    await make().publish(1, granted("a", "b"), age_s=0.0)
    await reader.read()
    reader.last = ClusterState(version=(1, reader.last.version[1] + 3_600_000))
    with redis_server.client() as client:
        client.flushall()
    await make().publish(2, granted("b"), age_s=0.0)
    await reader.read()
    assert reader.held == granted("b")


async def test_a_write_that_was_cut_off_goes_on_where_it_ended(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow Redis that fails one call of hundreds gets 100,000 written all the same."""
    monkeypatch.setattr(cluster, "BATCH", 2)
    names = [f"e{number}" for number in range(7)]
    writer, reader = make(), Reader(make())
    sent: list[object] = []
    run, fails = writer._run, [False, False, True]

    async def cut(*arguments: object) -> Any:
        if fails and fails.pop(0):
            raise StateFailure("no answer from Redis within 0.25 s")
        sent.extend(each for each in arguments if each in names)
        return await run(*arguments)

    monkeypatch.setattr(writer, "_run", cut)
    with pytest.raises(StateFailure):
        await writer.publish(1, granted(*names), age_s=0.0)
    assert await reader.read() is None
    await writer.publish(1, granted(*names), age_s=0.0)
    await reader.read()
    assert reader.held == granted(*names)
    assert sorted(map(str, sent)) == names


@pytest.mark.parametrize("arrived", [True, False])
async def test_a_change_that_was_cut_off_is_read_as_a_change(
    make: Make, monkeypatch: pytest.MonkeyPatch, *, arrived: bool
) -> None:
    """Whether or not Redis did what it did not answer."""
    writer, reader = make(), Reader(make())
    await writer.publish(1, granted("a", "b"), age_s=0.0)
    await reader.read()
    run = writer._run

    async def cut(*arguments: object) -> Any:
        if arrived:
            await run(*arguments)
        raise StateFailure("no answer from Redis within 0.25 s")

    held, cut_off = granted("a", "b"), granted("b", "c", verdict="pending")
    for wanted in (held, cut_off):
        with monkeypatch.context() as patched:
            patched.setattr(writer, "_run", cut)
            with pytest.raises(StateFailure):
                await writer.publish(1, cut_off, age_s=0.0)
        await writer.publish(1, wanted, age_s=0.0)
        state = await reader.read()
        assert reader.held == wanted
        assert state is not None
        assert not state.whole


async def test_a_call_that_redis_gets_late_changes_nothing_any_more(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was not answered in time, and comes after the one that was sent instead."""
    writer, reader = make(), Reader(make())
    await writer.publish(1, granted("a", "b"), age_s=0.0)
    run, late = writer._run, list[tuple[object, ...]]()

    async def held_up(*arguments: object) -> Any:
        late.append(arguments)
        raise StateFailure("no answer from Redis within 0.25 s")

    with monkeypatch.context() as patched:
        patched.setattr(writer, "_run", held_up)
        with pytest.raises(StateFailure):
            await writer.publish(1, granted("a", verdict="pending"), age_s=0.0)
    await writer.publish(1, granted("a"), age_s=0.0)
    assert await run(*late[0]) == [0]
    await reader.read()
    assert reader.held == granted("a")
