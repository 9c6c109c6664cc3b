"""The arithmetic of `bench scale`, and that its load is one."""

import asyncio

import pytest

from bench.scale.measure import Cpu, finished, pauses, quantile, watched
from bench.scale.points import KINDS
from bench.scale.rows import Point, growth, rows_of
from bench.scale.run import ladders
from bench.scale.traffic import ChatBodies, Size, entitlement_rows
from bench.scale.workers import Loaded


def point(workers: int, **figures: float) -> Point:
    return Point(kind="workers", size=Size(workers=workers), figures=figures)


def test_growth_compares_the_largest_with_the_smallest() -> None:
    assert growth([point(4, a=2.0), point(8, a=9.0), point(16, a=5.0)], "a") == 2.5


def test_growth_of_one_point_is_not_told() -> None:
    assert growth([point(4, a=2.0)], "a") is None
    assert growth([point(4, a=0.0), point(8, a=1.0)], "a") is None


def test_nothing_measured_gives_no_row() -> None:
    assert rows_of([]) == []


def test_a_quantile_is_one_of_the_values() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [quantile(values, share) for share in (0.0, 0.5, 1.0)] == [1.0, 3.0, 5.0]
    assert quantile([], 0.5) == 0.0


def test_cpu_takes_off_what_a_reading_costs_and_is_never_negative() -> None:
    cpu = Cpu()
    cpu.add("a", 0, 1)
    cpu.add("a", 0, 10_000_000)
    assert cpu.quantile_us("a", 0.0) == 0.0
    assert 9_000 < cpu.quantile_us("a", 1.0) < 10_000
    cpu.clear()
    assert cpu.mean_us("a") == 0.0


def test_a_coroutine_that_waits_is_not_taken_for_finished() -> None:
    async def done() -> int:
        return 3

    async def waits() -> None:
        await asyncio.sleep(0)

    assert finished(done()) == 3
    with pytest.raises(RuntimeError, match="wait for nothing"):
        finished(waits())


def test_the_longest_turn_of_a_loop_is_told() -> None:
    def busy() -> None:
        for _ in range(300_000):
            pass

    async def work(slices: int) -> int:
        for _ in range(slices):
            busy()
            await asyncio.sleep(0)
        return slices

    result, spent_ms, hold_ms = watched(lambda: work(8))
    assert result == 8
    assert hold_ms < spent_ms / 3


def test_runs_of_the_collector_are_seen() -> None:
    import gc

    with pauses() as seen:
        gc.collect()
    count = len(seen)
    gc.collect()
    assert count >= 1
    assert len(seen) == count


def test_ladders_stop_at_the_largest_size_asked() -> None:
    asked = list(ladders(100, 50, redis=False))
    assert {kind for kind, _ in asked} == {
        "workers",
        "entitlements",
        "leases",
        "index",
        "tenants",
    }
    assert max(size.workers for _, size in asked) == 64
    assert max(size.entitlements for _, size in asked) == 100
    assert max(size.leases for _, size in asked) == 100


def test_large_ladders_have_few_active_ones_too() -> None:
    sizes = [s for kind, s in ladders(100_000, 50, redis=True) if kind == "redis"]
    assert [(s.entitlements, s.active) for s in sizes] == [
        (1, 1), (10, 10), (100, 100), (10_000, 10_000), (10_000, 100),
        (100_000, 100_000), (100_000, 100),
    ]  # fmt: skip


def test_conversations_grow_and_begin_alike() -> None:
    first, second = (b for b in (ChatBodies(1).body(), ChatBodies(1).body()))
    assert first == second
    talk = ChatBodies(1)
    bodies = [talk.body() for _ in range(9)]
    sizes = [len(body) for body in bodies]
    assert sizes[:8] == sorted(sizes[:8])
    assert sizes[8] < sizes[7]
    assert bodies[1].startswith(bodies[0].removesuffix(b"]}"))


def test_every_entitlement_has_a_key_of_its_own() -> None:
    made = list(entitlement_rows(50))
    own, keys = made[::2], made[1::2]
    assert len({key.digests for key in keys}) == 50
    assert [key.of for key in keys] == [each.uid for each in own]
    assert [each.created for each in own] == list(range(1, 51))


@pytest.mark.parametrize("policy", ["quartz", "least-loaded", "sticky"])
def test_the_load_is_as_it_says(policy: str) -> None:
    loaded = Loaded(Size(workers=4, policy=policy, entitlements=3))
    loaded.run(400)
    served = loaded.served
    waiting = sum(sum(s.waiting) for s in served.scheduling.schedulers)
    assert sum(loaded.pool.active) + waiting == loaded.store.active
    assert 4 * 16 < loaded.store.active < 4 * 48
    assert loaded.cpu.mean_us("bind") > 0


def test_tenants_are_judged_by_memory_and_growth() -> None:
    sizes = [Size(entitlements=10), Size(entitlements=40), Size(entitlements=40, active=5)]
    points = [Point(kind="tenants", size=size, figures=KINDS["tenants"](size)) for size in sizes]
    rows = {row.metric: row for row in rows_of(points)}
    assert rows["40 tenants with 3 keys: start, CPU-s"].target is None
    assert rows["40 tenants with 3 keys: KiB a key"].target == "<= 1.5"
    assert "40 tenants with 3 keys: poll: longest hold of the event loop, ms" in rows
    first, last = points[0].figures["request_p50_us"], points[-1].figures["request_p50_us"]
    times = rows["40 tenants with 3 keys, 5 active over 10 tenants with 3 keys: a request, times"]
    assert times.measured == pytest.approx(last / first)
