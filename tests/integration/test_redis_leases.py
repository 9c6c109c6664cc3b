"""Token pools on a real Redis: scripts, outages, replicas, a cluster and a sentinel.

What is decided is the differential test's subject (`tests/contract/test_store_differential.py`).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from redis.crc import key_slot

from bench.common.fleet import RedisServer, redis_program
from gateway.admission.terms import AdmissionRequest, Terms
from gateway.admission.token_pool import LEASE_TTL_S, TokenPool
from gateway.errors import RateLimited, Refusal, Unavailable
from gateway.ports import AccountView, Settlement
from gateway.records.attempt import Usage
from gateway.records.entitlement import Entitlement, ServiceClass
from gateway.records.tenancy import DirectoryChange, Row
from gateway.replicas.bus import LASTING
from gateway.store.backends import open_directory, open_notes
from gateway.store.memory_leases import MemoryLeases
from gateway.store.redis import link as redis_link
from gateway.store.redis.leases import RedisLeases
from gateway.store.redis.link import RedisAway
from gateway.store.redis.model import FailMode
from gateway.store.redis.scripts import Calls, Scripts, argument, grouped
from tests.asking import eventually
from tests.builders import LONG, SHORT, served_model
from tests.fakes import FakeClock
from tests.redis_nodes import RedisCluster, SentinelledRedis
from tests.token_pools import NOW_S

pytestmark = pytest.mark.redis
ANSWERED_WITHIN_S = 1.5
"""Two round trips of .25 s each, and a busy machine."""
REFUND = Settlement(usage=None, dispatched=False)


def used(prompt: int, completion: int) -> Settlement:
    return Settlement(
        usage=Usage(prompt_tokens=prompt, completion_tokens=completion), dispatched=True
    )


def tenant(
    name: str = "e",
    *,
    model: str = "m",
    limit: int = 0,
    service_class: ServiceClass = "elastic",
    baseline: tuple[int, ...] = (),
    tokens_per_s: float = 0.0,
) -> Entitlement:
    return Entitlement(
        name=name,
        model=model,
        limit=limit,
        service_class=service_class,
        baseline=baseline,
        tokens_per_s=tokens_per_s,
        tokens_per_s_limit=tokens_per_s,
    )


def asked(
    lease_id: str, *, model: str = "m", entitlement: str = "e", pool: int = SHORT, tokens: int = 100
) -> AdmissionRequest:
    return AdmissionRequest(
        lease_id=lease_id,
        model=model,
        entitlement=entitlement,
        pool=pool,
        alternates=(),
        estimate_tokens=tokens,
        sequences=1,
    )


@asynccontextmanager
async def opened(
    url: str,
    *entitlements: Entitlement,
    models: tuple[str, ...] = ("m",),
    terms: Terms | None = None,
    owner: str = "o",
    fail_mode: FailMode = "local_share",
    clock: Callable[[], float] | None = None,
) -> AsyncIterator[RedisLeases]:
    """A started store of one process."""
    served = {name: served_model(name=name) for name in models}
    token_pools = {name: TokenPool(terms or Terms(slots=(8, 8))) for name in models}
    for one in entitlements:
        token_pools[one.model].define(one)
    store = RedisLeases(
        url,
        served,
        token_pools,
        clock or time.monotonic,
        local=MemoryLeases(served, time.monotonic),
        fail_mode=fail_mode,
        owner=owner,
        wall_clock=clock or time.time,
        jitter=lambda: 0.5,
        script_clock=clock,
    )
    await store.start()
    try:
        yield store
    finally:
        await store.close()


async def account(store: RedisLeases, name: str = "e", model: str = "m") -> AccountView:
    (found,) = await store.view(model, [name])
    return found


async def inflight(store: RedisLeases, model: str = "m") -> int:
    return sum(pool.inflight for pool in await store.pools(model))


# -- the scripts


async def test_a_server_that_forgot_its_scripts_is_told_them_again(
    redis_server: RedisServer,
) -> None:
    async with opened(redis_server.url, tenant()) as store:
        lease = await store.admit(asked("a"))
        with redis_server.client() as client:
            client.script_flush()
        store.settle(lease, used(30, 12))
        second = await store.admit(asked("b"))
        seen = await account(store)
        assert (seen.debited, seen.refunded, seen.used) == (200, 58, 42)
        assert (second.weight > 0, store.failures_total) == (True, 0)


async def test_every_key_is_one_that_the_script_was_given_and_of_its_model(
    redis_server: RedisServer,
) -> None:
    async with opened(
        redis_server.url, tenant(), tenant("p", service_class="preemptible")
    ) as store:
        await store.admit(asked("a"))
        await store.admit(asked("b", entitlement="p"))
        await store.tick()
        with redis_server.client() as client:
            found = {key.decode() for key in client.scan_iter()}
        calls = Calls(Scripts(), "m", 2)
        assert found <= {*calls.all_keys(), calls.limits_key(one_server=True)}


async def test_a_lease_that_another_process_took_can_be_settled_here(
    redis_server: RedisServer,
) -> None:
    async with (
        opened(redis_server.url, tenant(), owner="a") as one,
        opened(redis_server.url, tenant(), owner="b") as two,
    ):
        lease = await one.admit(asked("a"))
        two.settle(lease, used(10, 10))
        assert (await account(two)).used == 20
        one.settle(lease, used(10, 10))
        assert (await account(one)).used == 20


async def test_a_cancelled_admission_leaves_nothing(redis_server: RedisServer) -> None:
    async with opened(redis_server.url, tenant()) as store:
        for n in range(50):
            admission = asyncio.ensure_future(store.admit(asked(f"l{n}")))
            for _ in range(n % 5):
                await asyncio.sleep(0)
            admission.cancel()
            await asyncio.gather(admission, return_exceptions=True)
            if not admission.cancelled():
                store.settle(admission.result(), REFUND)
        seen = await account(store)
        assert (sum(seen.inflight), seen.debited - seen.refunded, store.active) == (0, 0, 0)


async def test_evicted_leases_are_told_to_the_process_that_holds_them(
    redis_server: RedisServer,
) -> None:
    spot = tenant("p", service_class="preemptible")
    paid = tenant("g", service_class="guaranteed", baseline=(2, 0))
    terms = Terms(slots=(2, 2), headroom=0)
    told: list[str] = []
    async with (
        opened(redis_server.url, spot, paid, terms=terms, owner="a") as one,
        opened(redis_server.url, spot, paid, terms=terms, owner="b") as two,
    ):
        one.on_evict(told.append)
        two.on_evict(lambda lease_id: told.append(f"wrong: {lease_id}"))
        for n in range(2):
            await one.admit(asked(f"p{n}", entitlement="p"))
        waiting = await two.admit(asked("g", entitlement="g"))
        assert (waiting.contended, waiting.protected) == (True, True)
        await two.reclaim(waiting)
        await eventually(lambda: told == ["p1"], 5.0)
        await two.reclaim(waiting)
        await asyncio.sleep(0.3)
        assert told == ["p1"]


# -- many replicas


async def client_of(
    store: RedisLeases, name: str, rounds: int, held: list[int], peaks: list[int]
) -> int:
    """Requests one after the other; the tokens that it used."""
    total = 0
    for n in range(rounds):
        try:
            lease = await store.admit(asked(f"{name}-{n}", tokens=50 + n % 7))
        except RateLimited:
            await asyncio.sleep(0.001)
            continue
        held[0] += 1
        peaks[0] = max(peaks[0], held[0])
        store.resize(lease, lease.cost_tokens + n % 11, 0)
        await asyncio.sleep(0.002 * (n % 3))
        held[0] -= 1
        if n % 5:
            store.settle(lease, used(20 + n % 9, n % 13))
            total += 20 + n % 9 + n % 13
        else:
            store.settle(lease, REFUND)
    return total


async def test_replicas_together_never_exceed_a_limit_and_count_every_token(
    redis_server: RedisServer,
) -> None:
    held, peaks = [0], [0]
    async with (
        opened(redis_server.url, tenant(limit=5), owner="a") as a,
        opened(redis_server.url, tenant(limit=5), owner="b") as b,
        opened(redis_server.url, tenant(limit=5), owner="c") as c,
    ):
        totals = await asyncio.gather(
            *(
                client_of(store, f"{n}{m}", 60, held, peaks)
                for n, store in enumerate((a, b, c))
                for m in range(10)
            )
        )
        for store in (a, b, c):
            await store.tick()
        seen = await account(a)
        assert peaks[0] == 5
        assert (sum(seen.inflight), seen.used) == (0, sum(totals))
        assert seen.debited - seen.refunded == seen.used
        assert [store.replicas("m") for store in (a, b, c)] == [1, 2, 3]
        assert [store._models["m"].leads for store in (a, b, c)].count(True) == 1


async def test_a_replica_that_dies_gives_all_back_after_the_time_to_live(
    redis_server: RedisServer,
) -> None:
    clock = FakeClock(1_700_000_000.0)
    async with opened(redis_server.url, tenant(), owner="survivor", clock=clock) as survivor:
        async with opened(redis_server.url, tenant(), owner="dying", clock=clock) as dying:
            for n in range(6):
                await dying.admit(asked(f"d{n}"))
        own = await survivor.admit(asked("own"))
        clock.advance(LEASE_TTL_S - 1)
        await survivor.renew()
        await survivor.tick()
        assert await inflight(survivor) == 7
        clock.advance(1)
        await survivor.tick()
        assert await inflight(survivor) == 1
        seen = await account(survivor)
        assert (seen.used, seen.debited) == (600, 700)
        survivor.settle(own, used(1, 1))
        assert await inflight(survivor) == 0


# -- Redis away


async def load_during(store: RedisLeases, *events: Callable[[], None]) -> int:
    """Concurrent requests before, between and after events; the tokens they used."""
    ending = asyncio.Event()
    slowest = [0.0]

    async def one(name: str) -> int:
        total, n = 0, 0
        while not ending.is_set():
            n += 1
            began = time.monotonic()
            try:
                lease = await store.admit(asked(f"{name}-{n}", tokens=40))
            except Refusal:
                lease = None
            slowest[0] = max(slowest[0], time.monotonic() - began)
            if lease is None:
                await asyncio.sleep(0.01)
                continue
            store.resize(lease, 60, 0)
            if n % 4 == 0:
                began = time.monotonic()
                await store.transfer(lease, LONG)
                slowest[0] = max(slowest[0], time.monotonic() - began)
            await asyncio.sleep(0.005)
            store.settle(lease, used(15, n % 5))
            total += 15 + n % 5
        return total

    tasks = [asyncio.create_task(one(f"c{n}")) for n in range(12)]
    for event in events:
        await asyncio.sleep(0.3)
        event()
        await asyncio.sleep(1.5)
    ending.set()
    totals = await asyncio.gather(*tasks)
    assert slowest[0] < ANSWERED_WITHIN_S
    return sum(totals)


async def test_a_redis_that_hangs_leaves_each_replica_its_share_and_is_told_all_later(
    own_server: RedisServer,
) -> None:
    async with opened(own_server.url, tenant(limit=6)) as store:
        total = await load_during(store, own_server.hang)
        assert store.alone_total > 0
        own_server.resume()
        await eventually(lambda: store.up)
        seen = await account(store)
        assert (seen.inflight, seen.used) == ((0, 0), total)
        assert seen.debited - seen.refunded == seen.used
        assert store.active == 0
        lease = await store.admit(asked("after"))
        assert await inflight(store) == 1
        store.settle(lease, REFUND)


async def test_an_admission_whose_answer_was_lost_is_given_back(
    own_server: RedisServer,
) -> None:
    async with opened(own_server.url, tenant(), fail_mode="closed") as store:
        own_server.hang()
        # Sent, and carried out once Redis goes on: nobody is there to settle them.
        lost = await asyncio.gather(
            *(store.admit(asked(f"l{n}")) for n in range(5)), return_exceptions=True
        )
        assert all(isinstance(one, Unavailable) for one in lost)
        own_server.resume()
        await eventually(lambda: store.up)
        seen = await account(store)
        assert (sum(seen.inflight), seen.debited, seen.refunded) == (0, 500, 500)


async def test_a_lease_taken_alone_is_told_twice_and_counted_once(
    redis_server: RedisServer,
) -> None:
    async with opened(redis_server.url, tenant()) as store:
        link = store._models["m"].link
        alone = {
            "id": "a+",
            "entitlement": "e",
            "pool": 0,
            "sequences": 1,
            "estimate_tokens": 100,
            "kv_bytes": 0,
            "weight": 1.0,
            "spilled": False,
            "issued_s": 1.0,
            "held": (),
        }
        adopt = argument(owner="o", limits="limits", leases=[(alone, "")])
        settle = grouped("settle", lease_id="a+", charge=30, timely=False, spent=None)
        answers = [
            await link.call(name, packed)
            for _ in range(2)
            for name, packed in (("adopt", adopt), ("adopt", adopt), ("settle", settle))
        ]
        assert answers == [1, 0, 1, 0, 0, 0]
        seen = await account(store)
        assert (sum(seen.inflight), seen.debited, seen.refunded, seen.used) == (0, 100, 70, 30)


async def test_redis_may_be_started_anew_under_load_and_nothing_stays_in_flight(
    own_server: RedisServer,
) -> None:
    async with opened(own_server.url, tenant(limit=6)) as store:
        total = await load_during(store, own_server.kill, own_server.start)
        await eventually(lambda: store.up)
        seen = await account(store)
        assert seen.inflight == (0, 0)
        assert 0 < seen.used == seen.debited - seen.refunded < total


async def test_the_share_of_one_of_two_replicas_is_half(own_server: RedisServer) -> None:
    async with (
        opened(own_server.url, tenant(limit=6), owner="a") as one,
        opened(own_server.url, tenant(limit=6), owner="b") as two,
    ):
        await two.tick()
        await one.tick()
        first = await one.admit(asked("before"))
        own_server.kill()
        for n in range(2):  # and the one from before: 6 / 2
            await one.admit(asked(f"l{n}"))
        with pytest.raises(RateLimited):
            await one.admit(asked("too many"))
        one.settle(first, REFUND)
        await one.admit(asked("again"))


async def takes(store: RedisLeases, lease_id: str, tokens: int) -> bool:
    """Whether so many tokens are let in."""
    try:
        await store.admit(asked(lease_id, tokens=tokens))
    except RateLimited:
        return False
    return True


async def test_a_redis_that_flaps_fills_no_bucket(own_server: RedisServer) -> None:
    """The clock stands still: a bucket of 100 tokens pays 100 tokens, and is in debt where more
    was used."""
    paying = tenant(tokens_per_s=10.0)
    async with opened(own_server.url, paying, clock=FakeClock(NOW_S)) as store:
        held = await store.admit(asked("a", tokens=30))
        own_server.hang()
        assert not await takes(store, "b", 71), "what Redis told is left"
        assert await takes(store, "c", 70)
        own_server.resume()
        await eventually(lambda: store.up)
        own_server.hang()
        assert not await takes(store, "d", 1), "Redis told nothing since"
        own_server.resume()
        await eventually(lambda: store.up)
        store.settle(held, used(10, 30))
        assert not await takes(store, "e", 1), "Redis knows what was taken without it"
        own_server.hang()
        assert not await takes(store, "f", 1)
        await eventually(lambda: not store.up)
        assert (await account(store)).level_tokens == -10
        own_server.resume()
        await eventually(lambda: store.up)
        assert (await account(store)).level_tokens == -10


async def test_a_bucket_that_others_emptied_lends_no_replica_a_full_one(
    own_server: RedisServer,
) -> None:
    paying, clock = tenant(tokens_per_s=10.0), FakeClock(NOW_S)
    async with (
        opened(own_server.url, paying, owner="a", clock=clock) as one,
        opened(own_server.url, paying, owner="b", clock=clock) as two,
    ):
        for each in (one, two, one):
            await each.tick()
        await two.admit(asked("a", tokens=80))
        assert (await account(one)).level_tokens == 20, "as the leader reads them"
        own_server.kill()
        assert not await takes(one, "b", 11)
        assert await takes(one, "c", 10)
        assert not await takes(two, "d", 11)
        assert await takes(two, "e", 10)


async def test_fail_mode_closed_refuses_at_once_and_recovers_by_itself(
    own_server: RedisServer,
) -> None:
    async with opened(own_server.url, tenant(), fail_mode="closed") as store:
        lease = await store.admit(asked("held"))
        own_server.hang()
        for n in range(20):
            began = time.monotonic()
            with pytest.raises(Unavailable) as refused:
                await store.admit(asked(f"l{n}"))
            assert time.monotonic() - began < ANSWERED_WITHIN_S
            assert (refused.value.reason, refused.value.retry_after_s) == ("state_unavailable", 1.0)
        with pytest.raises(Unavailable):
            await store.transfer(lease, LONG, force=False)
        store.settle(lease, used(1, 1))
        own_server.resume()
        await eventually(lambda: store.up)
        seen = await account(store)
        assert (seen.inflight, seen.used, store.alone_total) == ((0, 0), 2, 0)
        await store.admit(asked("after"))


async def test_a_redis_that_comes_back_empty_is_told_everything(own_server: RedisServer) -> None:
    paid = tenant("g", service_class="guaranteed", baseline=(2, 0))
    async with opened(own_server.url, tenant(limit=6), paid) as store:
        held = [await store.admit(asked(f"h{n}")) for n in range(3)]
        own_server.kill()
        alone = await store.admit(asked("alone"))
        await store.define(tenant(limit=5))
        own_server.start()
        await eventually(lambda: store.up)
        seen = await account(store)
        assert (sum(seen.inflight), seen.debited) == (4, 400)
        assert (await store.admit(asked("g", entitlement="g"))).protected
        await store.admit(asked("fifth"))
        with pytest.raises(RateLimited):
            await store.admit(asked("sixth"))
        for lease in (*held, alone):
            store.settle(lease, used(2, 3))
        seen = await account(store)
        assert (sum(seen.inflight), seen.used) == (1, 20)


async def test_a_redis_that_fell_behind_is_told_the_latest_leases_before_it_decides(
    redis_server: RedisServer,
) -> None:
    async with opened(redis_server.url, tenant(limit=2)) as store:
        held = [await store.admit(asked("a"))]
        with redis_server.client() as client:
            older = {key: client.dump(key) for key in client.scan_iter()}
            held.append(await store.admit(asked("b")))
            client.flushall()
            for key, value in older.items():
                client.restore(key, 0, value)
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        with pytest.raises(RateLimited):
            await store.admit(asked("c"))
        await eventually(lambda: store.up)
        with pytest.raises(RateLimited):
            await store.admit(asked("d"))
        assert await inflight(store) == 2
        for lease in held:
            store.settle(lease, REFUND)
        assert await inflight(store) == 0


async def test_a_lease_that_expired_while_redis_was_away_is_taken_up_again(
    own_server: RedisServer,
) -> None:
    clock = FakeClock(1_700_000_000.0)
    async with (
        opened(own_server.url, tenant(), owner="a", clock=clock) as store,
        opened(own_server.url, tenant(), owner="b", clock=clock) as other,
    ):
        lease = await store.admit(asked("a"))
        clock.advance(LEASE_TTL_S + 1)
        await other.tick()
        assert await inflight(other) == 0
        await store.renew()
        seen = await account(store)
        assert (sum(seen.inflight), seen.debited, seen.refunded, seen.used) == (1, 100, 0, 0)
        store.settle(lease, used(30, 30))
        seen = await account(store)
        assert (sum(seen.inflight), seen.debited, seen.refunded, seen.used) == (0, 100, 40, 60)


async def test_what_waits_for_redis_is_bounded(
    own_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_link, "MAX_POSTS", 10)
    async with opened(own_server.url, tenant()) as store:
        own_server.kill()
        for n in range(30):
            store.settle(await store.admit(asked(f"l{n}")), used(1, 1))
        assert store.dropped_total >= 40
        own_server.start()
        await eventually(lambda: store.up)
        assert await inflight(store) == 0


# -- cluster and sentinel


async def test_a_cluster_keeps_each_model_on_one_node_and_loses_only_the_lost_ones(
    tmp_path: Path,
) -> None:
    if redis_program() is None:
        pytest.skip("redis-server is not on PATH")
    with RedisCluster(tmp_path) as cluster:
        names = tuple(f"model-{n}" for n in range(6))
        by_node = {n: cluster.owner(key_slot(Calls(Scripts(), n, 2).key.encode())) for n in names}
        assert len(set(by_node.values())) > 1
        tenants = [tenant(model=name, limit=4) for name in names]
        async with opened(cluster.url, *tenants, models=names) as store:
            assert store.up
            leases = {name: await store.admit(asked(f"{name} 1", model=name)) for name in names}
            for name in names:
                assert (await account(store, model=name)).inflight == (1, 0)
            lost = by_node[names[0]]
            cluster.kill(lost)
            for name in names:
                began = time.monotonic()
                leases[f"{name} 2"] = await store.admit(asked(f"{name} 2", model=name))
                assert time.monotonic() - began < ANSWERED_WITHIN_S
            assert store.alone_total == sum(port == lost for port in by_node.values())
            cluster.start(lost)
            await eventually(lambda: store.up, 30.0)
            for name in names:
                assert (await account(store, model=name)).inflight == (2, 0)
            for lease in leases.values():
                store.settle(lease, used(1, 1))
            for name in names:
                assert await inflight(store, name) == 0


async def test_what_is_learned_and_who_is_entitled_is_shared_through_a_cluster(
    tmp_path: Path,
) -> None:
    if redis_program() is None:
        pytest.skip("redis-server is not on PATH")
    with RedisCluster(tmp_path) as cluster:
        one, other = open_notes(cluster.url, "one"), open_notes(cluster.url, "other")
        assert one is not None
        assert other is not None
        notes = {f"{LASTING}p:{n}": b"note %d" % n for n in range(1, 7)}
        await one.exchange(notes)
        heard = await other.exchange(dict.fromkeys(notes, b""))
        assert {name: received.notes[0][1] for name, received in heard.items()} == notes
        first, second = open_directory(cluster.url), open_directory(cluster.url)
        row = Row(kind="entitlement", name="e", uid="u", fields={"model": "m"})
        assert (await first.write(DirectoryChange(puts=(row,)), floor=0, after="")).revision == 1
        heard_of = await second.read(0, "")
        assert heard_of is not None
        assert heard_of.rows == (msgspec.structs.replace(row, revision=1),)
        for opened_one in (one, other, first, second):
            await opened_one.close()


async def test_a_sentinel_names_the_master_and_its_successor(tmp_path: Path) -> None:
    if redis_program() is None:
        pytest.skip("redis-server is not on PATH")
    with SentinelledRedis(tmp_path) as redis:
        async with opened(redis.url, tenant()) as store:
            assert store.up
            await store.admit(asked("a"))
            redis.kill(redis.master)
            await store.admit(asked("b"))
            assert store.alone_total == 1
            await eventually(lambda: store.up, 30.0)
            await store.admit(asked("c"))
            assert await inflight(store) == 3


async def test_a_call_that_meets_no_redis_says_that_it_was_not_sent(
    own_server: RedisServer,
) -> None:
    own_server.kill()
    async with opened(own_server.url, tenant()) as store:
        link = store._models["m"].link
        with pytest.raises(RedisAway) as away:
            await link.call("view", b"")
        assert not away.value.sent
