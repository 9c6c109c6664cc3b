"""Which calls and posts share a round trip; no Redis needed."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.store.redis import link as redis_link
from gateway.store.redis.link import Op, RedisAway, RedisLink
from gateway.store.redis.route import route_of
from gateway.store.redis.scripts import MAX_GROUPED, Calls, Scripts
from tests.fakes import FakeClock

TURNS = 20
"""Of the event loop, more than a round trip of the link below takes."""


class NotedLink(RedisLink):
    """A link to nowhere that notes what each round trip carried."""

    def __init__(self) -> None:
        super().__init__(
            route_of("redis://127.0.0.1:1"),
            Calls(Scripts(), "m", 1),
            clock=FakeClock(0.0),
            chance=lambda: 0.5,
            prepare=prepared,
            on_up=lambda: None,
        )
        self.trips: list[list[str]] = []
        self.missing = 0
        """Answers that the next round trip lacks."""

    async def _connect(self) -> None:
        """See RedisLink."""

    async def _load_scripts(self) -> None:
        """See RedisLink."""

    async def _answers(self, ops: Sequence[Op]) -> list[Any]:
        """See RedisLink."""
        self.trips.append([op.name for op in ops])
        await asyncio.sleep(0)
        missing, self.missing = self.missing, 0
        return [1] * (len(ops) - missing)


async def prepared(_: RedisLink) -> None:
    """Nothing to prepare."""


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[NotedLink, list[list[str]]]]:
    """A link that is up, and its round trips."""
    link = NotedLink()
    await link.start()
    try:
        yield link, link.trips
    finally:
        await link.close()


async def turns(holds: Callable[[], bool] = lambda: False) -> None:
    for _ in range(TURNS):
        if holds():
            return
        await asyncio.sleep(0)


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Posts wait for a call however long it takes."""
    monkeypatch.setattr(redis_link, "POST_WAIT_S", 3600.0)


@pytest.mark.usefixtures("never")
async def test_a_settlement_waits_and_travels_with_the_next_call_in_order() -> None:
    async with linked() as (link, trips):
        link.post("settle", b"")
        link.post("resize", b"")
        await turns()
        assert trips == []
        await link.call("admit", b"")
        assert trips == [["settle", "resize", "admit"]]


@pytest.mark.usefixtures("never")
async def test_a_settlement_that_comes_during_a_round_trip_waits_for_the_next() -> None:
    async with linked() as (link, trips):
        op = link.begin("admit", b"")
        await turns(lambda: bool(trips))
        link.post("settle", b"")
        assert op.done is not None
        await op.done
        await turns()
        assert trips == [["admit"]]
        await link.call("admit", b"")
        assert trips[1:] == [["settle", "admit"]]


async def test_a_settlement_that_no_call_follows_goes_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redis_link, "POST_WAIT_S", 0.0)
    async with linked() as (link, trips):
        for _ in range(2):
            link.post("settle", b"")
            await turns(lambda: not link._queue)
            await turns()
            assert not link._queue
        assert trips == [["settle"], ["settle"]]


@pytest.mark.usefixtures("never")
async def test_other_posts_and_a_full_script_go_at_once() -> None:
    async with linked() as (link, trips):
        link.post("settle", b"")
        link.post("adopt", b"")
        await turns(lambda: bool(trips))
        assert trips == [["settle", "adopt"]]
        for _ in range(MAX_GROUPED):
            link.post("settle", b"")
        await turns(lambda: len(trips) > 1)
        assert trips[1:] == [["settle"] * MAX_GROUPED]


@pytest.mark.usefixtures("never")
async def test_closing_sends_settlements_that_wait() -> None:
    async with linked() as (link, trips):
        link.post("settle", b"")
    assert trips == [["settle", "view"]]


@pytest.mark.usefixtures("never")
async def test_a_round_trip_with_too_few_answers_fails_its_calls_and_repeats_its_posts() -> None:
    async with linked() as (link, trips):
        link.post("settle", b"")
        link.missing = 1
        with pytest.raises(RedisAway):
            await asyncio.wait_for(link.call("admit", b""), 1.0)
        await turns(lambda: len(trips) > 1)
        assert trips == [["settle", "admit"], ["settle"]]
