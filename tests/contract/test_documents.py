"""The contract of documents: one suite for every implementation, and what only lasting ones can.

`kept`: a later process finds them, and others see them while both run.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from bench.common.fleet import RedisServer
from gateway.ports import Changed, Document, Documents, Full
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
async def kept(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Make]:
    async for make in opened(request.param, request, tmp_path):
        yield make


async def names(documents: Documents, after: str = "", limit: int = 9, **how: bool) -> list[str]:
    return [d.id for d in await documents.page("batch", "t", after, limit, **how)]


async def test_a_document_is_read_as_it_was_written_last(anyone: Documents) -> None:
    odd = bytes(range(256)) * 3
    assert await anyone.get("batch", "a") is None
    first = await anyone.put("batch", "t", "a", b"1 1 \n{}", 0)
    second = await anyone.put("batch", "t", "a", odd, first)
    found = await anyone.get("batch", "a")
    assert found is not None
    assert (found.value, found.version) == (odd, second)
    assert second > first > 0
    assert await anyone.get("file", "a") is None


async def test_a_change_of_another_version_changes_nothing(anyone: Documents) -> None:
    first = await anyone.put("batch", "t", "a", b"one", 0)
    second = await anyone.put("batch", "t", "a", b"two", first)
    for version in (0, first, second + 1):
        with pytest.raises(Changed):
            await anyone.put("batch", "t", "a", b"late", version)
        with pytest.raises(Changed):
            await anyone.delete("batch", "t", "a", version)
    with pytest.raises(Changed):
        await anyone.put("batch", "t", "never", b"x", 1)
    found = await anyone.get("batch", "a")
    assert found is not None
    assert found.value == b"two"


async def test_of_concurrent_changes_one_wins(anyone: Documents) -> None:
    version = await anyone.put("batch", "t", "a", b"0", 0)
    puts = (anyone.put("batch", "t", "a", b"%d" % n, version) for n in range(8))
    answers = await asyncio.gather(*puts, return_exceptions=True)
    assert [isinstance(answer, Changed) for answer in answers].count(False) == 1


async def test_a_deleted_document_is_gone_everywhere(anyone: Documents) -> None:
    version = await anyone.put("batch", "t", "a", b"x", 0, most=1)
    await anyone.delete("batch", "t", "a", version)
    assert await anyone.get("batch", "a") is None
    assert await names(anyone) == await anyone.open_names("batch") == []
    await anyone.put("batch", "t", "b", b"x", 0, most=1)


async def test_pages_follow_the_order_of_creation_within_the_tenant(anyone: Documents) -> None:
    for name in "cabed":
        await anyone.put("batch", "t", name, b"x", 0)
        await anyone.put("batch", "other", f"{name}2", b"x", 0)
    await anyone.put("batch", "t", "a", b"later", 1)
    assert await names(anyone) == list("debac")
    assert await names(anyone, limit=2) == ["d", "e"]
    assert await names(anyone, "e", 2) == ["b", "a"]
    assert await names(anyone, "c") == []
    assert await names(anyone, "a", oldest_first=True) == list("bed")
    # The place of another tenant's document tells nothing.
    assert await names(anyone, "b2") == await names(anyone, "never") == []


async def test_most_counts_the_tenants_open_ones(anyone: Documents) -> None:
    a = await anyone.put("batch", "t", "a", b"x", 0, most=2)
    await anyone.put("batch", "t", "b", b"x", 0, most=2)
    with pytest.raises(Full):
        await anyone.put("batch", "t", "c", b"x", 0, most=2)
    assert await anyone.get("batch", "c") is None
    await anyone.put("batch", "other", "d", b"x", 0, most=1)
    await anyone.put("file", "t", "e", b"x", 0, most=1)
    a = await anyone.put("batch", "t", "a", b"y", a, most=2)  # open already
    a = await anyone.put("batch", "t", "a", b"z", a, is_open=False)
    await anyone.put("batch", "t", "c", b"x", 0, most=2)
    with pytest.raises(Full):
        await anyone.put("batch", "t", "a", b"again", a, most=2)
    assert await anyone.open_names("batch") == ["b", "d", "c"]
    assert await names(anyone) == ["c", "b", "a"]
    assert await anyone.count("batch", "t") == 3
    await anyone.delete("batch", "t", "a", a)
    assert [await anyone.count("batch", who) for who in ("t", "other", "never")] == [2, 1, 0]


async def test_concurrent_puts_keep_to_most(anyone: Documents) -> None:
    puts = (anyone.put("batch", "t", f"n{n}", b"x", 0, most=3) for n in range(9))
    answers = await asyncio.gather(*puts, return_exceptions=True)
    assert [isinstance(answer, Full) for answer in answers].count(True) == 6
    assert len(await anyone.open_names("batch")) == 3


async def test_a_refused_change_fails_no_other_call(anyone: Documents) -> None:
    await anyone.put("batch", "t", "a", b"x", 0)
    calls = [
        call
        for n in range(20)
        for call in (
            anyone.put("batch", "t", f"n{n}", b"x", 0, most=1),
            anyone.put("batch", "t", "a", b"x", 99),
            anyone.get("batch", "a"),
        )
    ]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(answer) for answer in answers[2::3]} == {Document}
    assert {type(answer) for answer in answers[::3]} == {Full}


async def test_another_process_sees_and_changes_them(kept: Make) -> None:
    one, other = kept(), kept()
    version = await one.put("batch", "t", "a", b"one", 0)
    found = await other.get("batch", "a")
    assert found is not None
    await other.put("batch", "t", "a", b"two", found.version)
    with pytest.raises(Changed):
        await one.put("batch", "t", "a", b"three", version)
    await one.close()
    await other.close()
    later = await kept().get("batch", "a")
    assert later is not None
    assert later.value == b"two"
