"""One at a time, and nobody waits longer for another who asks more often."""

import asyncio
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.adapters.bodies.fair_turns import FairTurns, TooManyWait


async def _serve(turns: FairTurns, owner: str, served: list[str]) -> None:
    async with turns.turn(owner):
        served.append(owner)
        await asyncio.sleep(0)


async def test_owners_take_turns_however_many_one_has_waiting() -> None:
    turns, served = FairTurns(1000), list[str]()
    async with asyncio.TaskGroup() as group:
        for _ in range(50):
            group.create_task(_serve(turns, "greedy", served))
        await asyncio.sleep(0)
        for owner in ("a", "a", "b"):
            group.create_task(_serve(turns, owner, served))
    assert sorted(served[:8]) == ["a", "a", "b", *["greedy"] * 5]
    assert len(served) == 53


async def test_turns_go_by_the_time_they_take() -> None:
    now_s = 0.0
    turns, served = FairTurns(1000, lambda: now_s), list[str]()

    async def serve(owner: str, taken_s: float) -> None:
        nonlocal now_s
        async with turns.turn(owner):
            served.append(owner)
            for _ in range(3):  # until the others have come
                await asyncio.sleep(0)
            now_s += taken_s

    async with asyncio.TaskGroup() as group:
        for _ in range(5):
            group.create_task(serve("slow", 1.0))
        await asyncio.sleep(0)
        for _ in range(30):
            group.create_task(serve("quick", 0.1))
    assert served[1:11] == ["quick"] * 10, "until both had the same time"
    assert served[:22].count("slow") == 2
    assert len(served) == 35


async def test_one_owner_leaves_room_for_others_to_wait() -> None:
    turns = FairTurns(8)
    async with turns.turn("first"):
        waiting = [asyncio.create_task(_serve(turns, "greedy", [])) for _ in range(20)]
        await asyncio.sleep(0)
        refused = [task for task in waiting if task.done()]
        assert len(refused) == 16
        assert all(isinstance(e := t.exception(), TooManyWait) and e.own for t in refused)
        others = [asyncio.create_task(_serve(turns, f"{n}", [])) for n in range(4)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in others)
        with pytest.raises(TooManyWait) as full:
            await _serve(turns, "late", [])
        assert not full.value.own
    await asyncio.gather(*others, *waiting, return_exceptions=True)


@settings(deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=20), st.randoms())
def test_whoever_leaves_keeps_nobody_waiting(owners: list[str], rng: Random) -> None:
    async def scene() -> None:
        turns, running = FairTurns(100), 0

        async def one(owner: str) -> None:
            nonlocal running
            async with turns.turn(owner):
                running += 1
                assert running == 1
                try:
                    await asyncio.sleep(0)
                finally:
                    running -= 1

        tasks = [asyncio.create_task(one(owner)) for owner in owners]
        for _ in range(10):
            await asyncio.sleep(0)
            if tasks:
                rng.choice(tasks).cancel()
        async with asyncio.timeout(5):
            await asyncio.gather(*tasks, return_exceptions=True)
            await _serve(turns, "last", [])

    asyncio.run(scene())
