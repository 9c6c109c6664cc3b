"""The arithmetic of `bench scale`, and that its load is one."""

import asyncio

import pytest

from bench.scale.points import KINDS
from bench.scale.run import Point, rows_of
from bench.scale.traffic import ChatBodies, Loaded, Size, finished


def test_a_coroutine_that_waits_is_not_taken_for_finished() -> None:
    async def done() -> int:
        return 3

    async def waits() -> None:
        await asyncio.sleep(0)

    assert finished(done()) == 3
    with pytest.raises(RuntimeError, match="wait for nothing"):
        finished(waits())


def test_conversations_grow_and_begin_alike() -> None:
    first, second = (b for b in (ChatBodies(1).body(), ChatBodies(1).body()))
    assert first == second
    talk = ChatBodies(1)
    bodies = [talk.body() for _ in range(9)]
    sizes = [len(body) for body in bodies]
    assert sizes[:8] == sorted(sizes[:8])
    assert sizes[8] < sizes[7]
    assert bodies[1].startswith(bodies[0].removesuffix(b"]}"))


@pytest.mark.parametrize("policy", ["quartz", "least-loaded", "sticky"])
def test_the_load_is_as_it_says(policy: str) -> None:
    loaded = Loaded(Size(workers=4, policy=policy, entitlements=3))
    loaded.run(400)
    waiting = sum(loaded.pool.scheduler.waiting)
    assert sum(loaded.pool.active) + waiting == loaded.store.active
    assert 4 * 16 < loaded.store.active < 4 * 48
    assert loaded.cpu.mean_us("bind") > 0


def test_tenants_are_judged_by_memory_and_growth() -> None:
    sizes = [Size(entitlements=10), Size(entitlements=40), Size(entitlements=40, active=5)]
    points = [Point(kind="tenants", size=size, figures=KINDS["tenants"](size)) for size in sizes]
    rows = {row.metric: row for row in rows_of(points)}
    assert rows["40 tenants with 3 keys: start, CPU-s"].target is None
    assert rows["40 tenants with 3 keys: KiB a key"].target == "<= 2.5"
    assert "40 tenants with 3 keys: poll: longest hold of the event loop, ms" in rows
    first, last = points[0].figures["request_p50_us"], points[-1].figures["request_p50_us"]
    times = rows["40 tenants with 3 keys, 5 active over 10 tenants with 3 keys: a request, times"]
    assert times.measured == pytest.approx(last / first)
