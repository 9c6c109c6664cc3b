"""The contract of documents: one suite for every implementation, and what only lasting ones can.

`lasting`: a later process finds them, and others see them while both run.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.common.fleet import RedisServer
from gateway.errors import StateFailure
from gateway.ports import Changed, Documents, Full
from gateway.records.record import Document
from gateway.store.backends import open_documents

REDIS = pytest.param("redis", marks=pytest.mark.redis)
Make = Callable[[], Documents]


async def opened(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Make]:
    """Opens one more process's view of the same documents."""
    url = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path / 'sluice.db'}"}
    if name == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        url["redis"] = server.url
    async with AsyncExitStack() as stack:

        def make() -> Documents:
            documents = open_documents(url[name])
            stack.push_async_callback(documents.close)
            return documents

        yield make


@pytest.fixture(params=["memory", "sqlite", REDIS])
async def anyone(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Documents]:
    async for make in opened(request.param, request, tmp_path):
        yield make()


@pytest.fixture(params=["sqlite", REDIS])
async def lasting(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Make]:
    async for make in opened(request.param, request, tmp_path):
        yield make


class Job(Document, frozen=True, kw_only=True):
    """A kind of documents."""

    text: str = ""
    ended: bool = False

    @property
    def is_open(self) -> bool:
        return not self.ended


class Note(Job, frozen=True, kw_only=True):
    """Another one, and unlike the first."""

    number: int


def job(name: str, text: str = "", *, tenant: str = "t", ended: bool = False) -> Job:
    return Job(id=name, tenant=tenant, text=text, ended=ended)


async def names(documents: Documents, after: str = "", limit: int = 9, **how: bool) -> list[str]:
    return [d.id for d, _ in await documents.page(Job, "t", after, limit, **how)]


async def test_a_document_is_read_as_it_was_written_last(anyone: Documents) -> None:
    odd = job("a", "1 1 \n{}\x00\N{SNOWMAN}")
    assert await anyone.get(Job, "a") is None
    first = await anyone.put(job("a", "one"), 0)
    second = await anyone.put(odd, first)
    assert second > first > 0
    assert await anyone.get(Job, "a") == (odd, second)
    assert await anyone.get(Note, "a") is None


async def test_a_change_of_another_version_changes_nothing(anyone: Documents) -> None:
    first = await anyone.put(job("a", "one"), 0)
    second = await anyone.put(job("a", "two"), first)
    for version in (0, first, second + 1):
        with pytest.raises(Changed):
            await anyone.put(job("a", "late"), version)
        with pytest.raises(Changed):
            await anyone.delete(job("a"), version)
    with pytest.raises(Changed):
        await anyone.put(job("never"), 1)
    assert await anyone.get(Job, "a") == (job("a", "two"), second)


async def test_of_concurrent_changes_one_wins_or_all_in_turn(anyone: Documents) -> None:
    version = await anyone.put(job("a"), 0)
    puts = (anyone.put(job("a", str(n)), version) for n in range(8))
    answers = await asyncio.gather(*puts, return_exceptions=True)
    assert [isinstance(answer, Changed) for answer in answers].count(False) == 1
    changes = (anyone.change(job("a"), version, lambda j: job("a", j.text + "x")) for _ in range(8))
    await asyncio.gather(*changes)
    stored = await anyone.get(Job, "a")
    assert stored is not None
    assert stored[0].text.count("x") == 8
    await anyone.delete(*stored)
    with pytest.raises(Changed):
        await anyone.change(*stored, lambda j: j)


async def test_a_deleted_document_is_gone_everywhere(anyone: Documents) -> None:
    version = await anyone.put(job("a"), 0, most=1)
    await anyone.delete(job("a"), version)
    assert await anyone.get(Job, "a") is None
    assert await names(anyone) == await anyone.open_names(Job) == []
    await anyone.put(job("b"), 0, most=1)


async def test_pages_follow_the_order_of_creation_within_the_tenant(anyone: Documents) -> None:
    for name in "cabed":
        await anyone.put(job(name), 0)
        await anyone.put(job(f"{name}2", tenant="other"), 0)
    await anyone.put(job("a", "later"), 1)
    assert await names(anyone) == list("debac")
    assert await names(anyone, limit=2) == ["d", "e"]
    assert await names(anyone, "e", 2) == ["b", "a"]
    assert await names(anyone, "c") == []
    assert await names(anyone, "a", oldest_first=True) == list("bed")
    # The place of another tenant's document tells nothing.
    assert await names(anyone, "b2") == await names(anyone, "never") == []


async def test_most_counts_the_tenants_open_ones(anyone: Documents) -> None:
    a = await anyone.put(job("a"), 0, most=2)
    await anyone.put(job("b"), 0, most=2)
    with pytest.raises(Full):
        await anyone.put(job("c"), 0, most=2)
    assert await anyone.get(Job, "c") is None
    await anyone.put(job("d", tenant="other"), 0, most=1)
    await anyone.put(Note(id="e", tenant="t", number=1), 0, most=1)
    a = await anyone.put(job("a", "y"), a, most=2)  # open already
    a = await anyone.put(job("a", "z", ended=True), a)
    await anyone.put(job("c"), 0, most=2)
    with pytest.raises(Full):
        await anyone.put(job("a", "again"), a, most=2)
    assert await anyone.open_names(Job) == ["b", "d", "c"]
    assert await names(anyone) == ["c", "b", "a"]
    assert await anyone.count(Job, "t") == 3
    await anyone.delete(job("a"), a)
    assert [await anyone.count(Job, who) for who in ("t", "other", "never")] == [2, 1, 0]


async def test_concurrent_puts_keep_to_most(anyone: Documents) -> None:
    puts = (anyone.put(job(f"n{n}"), 0, most=3) for n in range(9))
    answers = await asyncio.gather(*puts, return_exceptions=True)
    assert [isinstance(answer, Full) for answer in answers].count(True) == 6
    assert len(await anyone.open_names(Job)) == 3


async def test_a_refused_change_fails_no_other_call(anyone: Documents) -> None:
    await anyone.put(job("a"), 0)
    calls = [
        call
        for n in range(20)
        for call in (
            anyone.put(job(f"n{n}"), 0, most=1),
            anyone.put(job("a"), 99),
            anyone.get(Job, "a"),
        )
    ]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert answers[2::3] == [(job("a"), 1)] * 20
    assert {type(answer) for answer in answers[::3]} == {Full}


async def test_another_process_sees_and_changes_them(lasting: Make) -> None:
    one, other = lasting(), lasting()
    version = await one.put(job("a", "one"), 0)
    assert await other.get(Job, "a") == (job("a", "one"), version)
    await other.put(job("a", "two"), version)
    with pytest.raises(Changed):
        await one.put(job("a", "three"), version)
    await one.close()
    await other.close()
    later = await lasting().get(Job, "a")
    assert later is not None
    assert later[0].text == "two"


async def test_what_is_of_another_version_is_a_state_failure(lasting: Make) -> None:
    await lasting().put(job("a"), 0)
    other: Any = type("Job", (Note,), {}, frozen=True, kw_only=True)
    with pytest.raises(StateFailure):
        await lasting().get(other, "a")


@pytest.mark.redis
async def test_gateways_on_redis_have_its_time(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window that is over for one is over for all."""
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 86_400)
    documents = open_documents(redis_server.url)
    await documents.get(Job, "a")
    assert documents.unix_s() == pytest.approx(now_s, abs=30)
    await documents.close()
