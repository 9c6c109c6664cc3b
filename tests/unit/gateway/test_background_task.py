"""Background work is ended and waited for; what failed is told."""

import asyncio
import logging

import pytest

from gateway.background_task import BackgroundTasks, PeriodicTask


async def test_who_is_cancelled_while_it_waits_for_the_end_is_cancelled() -> None:
    """Also in the very turn in which the wait ends."""

    async def work() -> None:
        await asyncio.sleep(0)

    for turns in range(5):
        task = PeriodicTask(work, 60.0)
        task.start()
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(task.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        if not closing.done() and closing.cancel():
            with pytest.raises(asyncio.CancelledError):
                await closing


async def test_closing_cancels_all_and_waits_for_their_last_words() -> None:
    ended: list[int] = []

    async def work(number: int) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            ended.append(number)

    tasks = BackgroundTasks()
    tasks.start(work(1), work(2))
    tasks.start(work(3))
    await asyncio.sleep(0)
    assert await tasks.close()
    assert sorted(ended) == [1, 2, 3]
    assert not await tasks.close()


async def test_a_task_that_failed_is_logged_and_does_not_fail_the_shutdown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        raise ValueError("a defect")

    tasks = BackgroundTasks()
    tasks.start(work())
    await asyncio.sleep(0)
    with caplog.at_level(logging.ERROR, "sluice"):
        await tasks.close()
    assert "a defect" in caplog.text


async def test_tasks_that_ended_well_are_let_go_of() -> None:
    async def work() -> None:
        pass

    tasks = BackgroundTasks()
    for _ in range(3):
        tasks.start(work())
        await asyncio.sleep(0)
    assert len(tasks._tasks) == 1
    await tasks.close()


async def test_whoever_is_cancelled_while_it_closes_hears_of_it() -> None:
    release = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await release.wait()

    tasks = BackgroundTasks()
    tasks.start(work())
    await asyncio.sleep(0)
    closing = asyncio.create_task(tasks.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    release.set()


async def test_a_periodic_call_is_never_cut_short() -> None:
    calls: list[str] = []
    begun = asyncio.Event()

    async def work() -> None:
        calls.append("begins")
        begun.set()
        await asyncio.sleep(0)
        calls.append("ends")

    periodic = PeriodicTask(work, 0.0)
    periodic.start()
    await begun.wait()
    assert await periodic.close()
    assert calls == ["begins", "ends"] * (len(calls) // 2)
    assert not await periodic.close()


async def test_closing_a_periodic_task_does_not_wait_for_its_next_turn() -> None:
    calls: list[None] = []

    async def work() -> None:
        calls.append(None)

    periodic = PeriodicTask(work, 3600.0)
    periodic.start()
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        assert await periodic.close()
    assert len(calls) == 1
