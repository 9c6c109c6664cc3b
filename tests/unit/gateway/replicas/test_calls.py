"""Replicas ask one another over HTTP; whoever does not answer, or may not, is left out."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest
import respx

from gateway.errors import Unavailable
from gateway.replicas import calls as replica_calls
from gateway.replicas.calls import MAX_CONCURRENT, PATH, Address, ReplicaCalls

ONE = Address("http://one:1", "t1")
TWO = Address("http://two:2", "t2")


@pytest.fixture
async def calls() -> AsyncIterator[ReplicaCalls]:
    made = ReplicaCalls(lambda: [ONE, TWO])
    yield made
    await made.close()


@respx.mock
async def test_each_is_asked_with_its_own_token(calls: ReplicaCalls) -> None:
    for address, answer in ((ONE, b"1"), (TWO, b"2")):
        respx.post(
            address.url + PATH + "load",
            headers={"authorization": f"Bearer {address.token}"},
            content=b"asked",
        ).respond(200, content=answer)
    assert await calls.ask("load", b"asked") == [b"1", b"2"]


WRONG: tuple[httpx.Response | Exception, ...] = (
    *(httpx.Response(status) for status in (400, 401, 413)),
    httpx.Response(200, content=b"x" * 11),
    httpx.ConnectError("refused"),
    httpx.ReadTimeout("silent"),
)


@respx.mock
@pytest.mark.parametrize("answer", [httpx.Response(204), *WRONG])
async def test_whoever_has_no_answer_is_left_out(
    calls: ReplicaCalls, answer: httpx.Response | Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_calls, "MAX_ANSWER_BYTES", 10)
    respx.post(ONE.url + PATH + "load").mock(side_effect=[answer])
    respx.post(TWO.url + PATH + "load").respond(200, content=b"2")
    assert await calls.ask("load") == [b"2"]


@respx.mock
async def test_only_the_word_of_every_replica_makes_something_unknown(
    calls: ReplicaCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_calls, "MAX_ANSWER_BYTES", 10)
    one, two = (respx.post(address.url + PATH + "usage") for address in (ONE, TWO))
    one.respond(204)
    two.respond(204)
    assert await calls.search("usage", b"?") == []
    two.respond(200, content=b"here")
    assert await calls.search("usage", b"?") == [b"here"]
    for wrong in WRONG:
        one.mock(side_effect=[wrong] * 2)
        assert await calls.search("usage", b"?") == [b"here"]
        two.respond(204)
        with pytest.raises(Unavailable) as refused:
            await calls.search("usage", b"?")
        assert (refused.value.reason, refused.value.status) == ("replica_silent", 503)
        two.respond(200, content=b"here")


@respx.mock
async def test_nobody_is_waited_for_longer_than_the_limit(
    calls: ReplicaCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_calls, "LIMIT_S", 0.05)

    async def never(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(60)
        return httpx.Response(200)

    respx.post(ONE.url + PATH + "load").mock(side_effect=never)
    respx.post(TWO.url + PATH + "load").respond(200, content=b"2")
    async with asyncio.timeout(5):
        assert await calls.ask("load") == [b"2"]


def test_what_this_replica_says() -> None:
    calls = ReplicaCalls(list)

    def length(payload: bytes) -> bytes | None:
        if payload == b"?":
            raise ValueError
        if payload == b"!":
            return msgspec.msgpack.encode(msgspec.msgpack.decode(payload, type=str))
        return b"%d" % len(payload) if payload else None

    calls.on("length", length)
    assert calls.answer("length", b"four") == b"4"
    assert calls.answer("length", b"") is None
    for topic, question in (("length", b"?"), ("length", b"!"), ("unknown", b"four")):
        with pytest.raises((KeyError, ValueError, msgspec.MsgspecError)):
            calls.answer(topic, question)  # of another version
    assert calls.knows(calls.token)
    assert not any(map(calls.knows, ("", "x", ReplicaCalls(list).token, "\u00e9")))


@respx.mock
async def test_a_flood_of_questions_is_asked_a_few_at_a_time(calls: ReplicaCalls) -> None:
    running, most = Counter[str](), Counter[str]()

    async def slowly(request: httpx.Request) -> httpx.Response:
        host = request.url.host
        running[host] += 1
        most[host] = max(most[host], running[host])
        await asyncio.sleep(0.01)
        running[host] -= 1
        return httpx.Response(200, content=b"1")

    for address in (ONE, TWO):
        respx.post(address.url + PATH + "load").mock(side_effect=slowly)
    found = await asyncio.gather(*(calls.ask("load") for _ in range(50)))
    assert found == [[b"1", b"1"]] * 50
    assert most == {"one": MAX_CONCURRENT, "two": MAX_CONCURRENT}
