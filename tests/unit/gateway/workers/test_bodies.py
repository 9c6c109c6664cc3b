"""Large bodies are read in another process: with the same facts, and while the loop goes on."""

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

import gateway.workers.pool
from gateway.errors import BadRequest, Unavailable
from gateway.payload.body import (
    HEAVY_BYTES,
    LIGHT_BYTES,
    LOOP_US,
    TakesLong,
    is_heavy,
    read_body,
)
from gateway.payload.members import edits, locate
from gateway.pipeline.plan import read as read_at_once
from gateway.records.endpoint import CHAT, COMPLETIONS, RERANK, RESPONSES, TRANSCRIPTIONS, Endpoint
from gateway.records.request import BodyFacts, RequestHead
from gateway.workers.pool import BodyReader, FairQueue, Job, TooManyWait

MESSAGE = b'{"role":"user","content":"x"}'
PLAIN = b'{"model":"m","messages":[%b],"n":2,"max_tokens":null,"priority":1}' % MESSAGE


@pytest.fixture
async def reader() -> AsyncIterator[BodyReader]:
    made = BodyReader()
    yield made
    await made.close()


def worst(size: int) -> dict[str, tuple[Endpoint, bytes]]:
    """Bodies of about so many bytes that take longest to read."""

    def chat(unit: bytes) -> bytes:
        return b'{"model":"m","messages":[{"role":"user","content":%b}]}' % unit

    def filled(unit: bytes, last: bytes) -> bytes:
        return unit * (size // len(unit)) + last

    small = MESSAGE + b","
    return {
        "escapes": (CHAT, chat(b'"%b"' % filled(b'\\"', b"x"))),
        "parts": (CHAT, chat(b"[%b]" % filled(b'"",', b'"x"'))),
        "messages": (CHAT, b'{"model":"m","messages":[%b]}' % filled(small, MESSAGE)),
        "ids": (COMPLETIONS, b'{"model":"m","prompt":[%b]}' % filled(b"1,", b"1")),
        "lists of ids": (COMPLETIONS, b'{"model":"m","prompt":[%b]}' % filled(b"[1],", b"[1]")),
        "unknown": (CHAT, PLAIN[:-1] + b',"x":[%b]}' % filled(b"[[[]]],", b"1")),
        "tools": (CHAT, PLAIN[:-1] + b',"tools":[%b]}' % filled(b"1,", b"1")),
    }


def worst_unknown(size: int) -> dict[str, tuple[Endpoint, bytes]]:
    """The same with unknown members, each of which is looked at."""

    def filled(unit: bytes) -> bytes:
        return b",".join([unit] * (size // (len(unit) + 1)))

    def of(name: bytes, unit: bytes) -> bytes:
        return b'{"model":"m","%b":[%b]}' % (name, filled(unit))

    wide = b",".join(b'"%d":1' % number for number in range(size // 9))
    part = b'{"role":"u","content":[%b]}' % filled(b'{"type":"text","text":"","x":1}')
    return {
        "messages": (CHAT, of(b"messages", b'{"role":"u","x":1}')),
        "calls": (CHAT, of(b"messages", b'{"role":"u","tool_calls":[{"x":1}]}')),
        "members": (CHAT, b'{"model":"m","messages":[{"role":"u",%b}]}' % wide),
        "parts": (CHAT, b'{"model":"m","messages":[%b]}' % part),
        "items": (RESPONSES, of(b"input", b'{"role":"u","x":1}')),
        "documents": (RERANK, b'{"query":"q",' + of(b"documents", b'{"text":"","x":1}')[1:]),
    }


def held(endpoint: Endpoint, body: bytes) -> bool:
    """Whether the event loop reads the body itself."""
    try:
        read_at_once(endpoint, body, RequestHead(), LOOP_US)
    except TakesLong:
        return False
    return True


async def test_facts_are_those_of_reading_it_here(reader: BodyReader) -> None:
    there, here = await reader.read(CHAT, PLAIN, "a"), read_body(CHAT, PLAIN)
    assert {name: bytes(value) for name, value in there.members.items()} == {
        name: bytes(value) for name, value in here.members.items()
    }
    assert there.places == tuple(locate(PLAIN))

    def rest(facts: BodyFacts) -> BodyFacts:
        return msgspec.structs.replace(facts, members={}, places=())

    assert rest(there) == rest(here)
    replace, remove = {"max_tokens": b"5"}, there.steering_fields
    edited = edits(PLAIN, replace=replace, remove=remove)
    assert edits(PLAIN, replace=replace, remove=remove, places=there.places) == edited


async def test_a_refusal_is_that_of_reading_it_here(reader: BodyReader) -> None:
    with pytest.raises(BadRequest) as here:
        read_body(CHAT, b'{"model":"m","messages":[]}')
    with pytest.raises(BadRequest) as there:
        await reader.read(CHAT, b'{"model":"m","messages":[]}', "a")
    assert there.value.__dict__ == here.value.__dict__


async def test_a_process_that_died_or_was_not_waited_for_is_replaced(reader: BodyReader) -> None:
    await reader.read(CHAT, PLAIN, "a")
    assert reader.pid is not None
    os.kill(reader.pid, signal.SIGKILL)
    with contextlib.suppress(BadRequest):  # it may not be known yet that it died
        await reader.read(CHAT, PLAIN, "a")
    await reader.read(CHAT, PLAIN, "a")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await reader.read(*worst(8 * 2**20)["ids"], "a")
    other = PLAIN.replace(b'"n":2', b'"n":3')
    assert (await reader.read(CHAT, other, "a")).sequences_per_prompt == 3


async def test_while_no_process_can_be_started_bodies_are_refused_at_once(
    reader: BodyReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And read as soon as one can, whatever pause the next try was to keep."""
    monkeypatch.setattr(gateway.workers.pool, "_FIRST_PAUSE_S", 60.0)
    monkeypatch.setattr(subprocess, "Popen", Mock(side_effect=OSError("too many processes")))
    async with asyncio.timeout(30.0):
        for _ in range(3):
            with pytest.raises(Unavailable, match="cannot be read"):
                await reader.read(CHAT, PLAIN, "a")
        monkeypatch.undo()
        await reader.read(CHAT, PLAIN, "a")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
async def test_what_was_read_leaves_no_memory_behind(reader: BodyReader) -> None:
    await reader.read(CHAT, PLAIN, "a")

    def resident_mib() -> float:
        pages = int(Path(f"/proc/{reader.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 2**20

    before_mib = resident_mib()
    for shape in ("parts", "messages", "escapes"):
        await reader.read(*worst(4 * 2**20)[shape], "a")
    assert resident_mib() - before_mib < 15  # glibc would keep 30 and more


async def test_ordinary_bodies_are_read_at_once() -> None:
    assert held(CHAT, PLAIN)
    assert held(CHAT, PLAIN[:-1] + b',"messages2":[%b]}' % (b"[1]," * 4000 + b"1"))
    text = b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % (
        b"words and more words, " * 10_000
    )
    assert held(CHAT, text)
    assert not held(CHAT, text.replace(b"words", b"words " * 20)), "large"


@pytest.mark.parametrize("shape", worst(10))
def test_what_takes_long_is_not_read_by_the_loop(shape: str) -> None:
    endpoint, body = worst(8 * LIGHT_BYTES)[shape]
    assert shape == "escapes" or not held(endpoint, body)


@pytest.mark.parametrize("shape", worst_unknown(10))
def test_a_small_body_that_takes_long_is_not_read_by_the_loop(shape: str) -> None:
    endpoint, body = worst_unknown(LIGHT_BYTES - 100)[shape]
    assert len(body) <= LIGHT_BYTES
    assert not held(endpoint, body)


def test_a_member_with_a_name_of_megabytes_is_refused() -> None:
    with pytest.raises(BadRequest, match="a name of more than 256 characters"):
        read_body(CHAT, PLAIN[:-1] + b',"%b":1}' % (b"\\n" * LIGHT_BYTES))


@pytest.mark.parametrize("shape", worst_unknown(10))
async def test_far_too_many_values_are_refused_and_not_read(reader: BodyReader, shape: str) -> None:
    endpoint, body = worst_unknown(8 << 20)[shape]
    with pytest.raises(BadRequest, match="has too many values"):
        await reader.read(endpoint, body, "a")


async def test_a_body_that_takes_longer_than_estimated_ends_its_process_alone(
    reader: BodyReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway.workers.pool, "OVERRUN", 0.01)
    with pytest.raises(BadRequest, match="took too long to read"):
        await reader.read(*worst_unknown(1 << 20)["messages"], "a")
    monkeypatch.undo()
    assert (await reader.read(CHAT, PLAIN, "a")).model == "m"


async def test_one_tenant_s_slow_bodies_do_not_hold_up_another_s(reader: BodyReader) -> None:
    """They took turns body by body: another's waited for a slow one each time."""
    slow = worst_unknown(2 << 20)["messages"]
    greedy = [asyncio.create_task(reader.read(*slow, "greedy")) for _ in range(3)]
    await asyncio.sleep(0)
    for _ in range(20):
        await reader.read(CHAT, PLAIN, "other")
    assert not any(task.done() for task in greedy[1:])
    for task in greedy:
        task.cancel()
    await asyncio.gather(*greedy, return_exceptions=True)


@pytest.mark.alone
@pytest.mark.parametrize("shape", worst(10))
async def test_the_loop_goes_on_while_a_large_body_is_read(reader: BodyReader, shape: str) -> None:
    endpoint, body = worst(32 * 2**20)[shape]
    assert not held(endpoint, body)
    await reader.read(CHAT, PLAIN, "a")
    longest_s, ended = 0.0, asyncio.Event()

    async def watch() -> None:
        nonlocal longest_s
        while not ended.is_set():
            began_s = time.thread_time()  # of this loop alone: others may have the processor
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.thread_time() - began_s)

    watching = asyncio.create_task(watch())
    with contextlib.suppress(BadRequest):  # more lists of ids than a batch may have
        await reader.read(endpoint, body, "a")
    ended.set()
    await watching
    assert longest_s < 0.05


async def test_a_large_form_is_read_there_as_here(reader: BodyReader) -> None:
    media = b"multipart/form-data; boundary=x"
    body = (
        b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--x\r\n'
        b'content-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        + b"RIFF" * 4 * HEAVY_BYTES
        + b"\r\n--x--\r\n"
    )
    assert is_heavy(body, form=True)
    there = await reader.read(TRANSCRIPTIONS, body, "a", [media])
    assert there == read_body(TRANSCRIPTIONS, body, content_types=[media])


def job() -> Job:
    return Job(asyncio.get_running_loop().create_future())


def taken(queue: FairQueue, took_s: float = 1.0) -> str:
    owner, _ = queue.take()
    queue.charge(owner, took_s)
    return owner


async def test_owners_take_turns_however_many_one_has_waiting() -> None:
    queue = FairQueue(1000)
    for owner in ("greedy",) * 50 + ("a", "a", "b"):
        queue.put(owner, job())
    served = [taken(queue) for _ in range(53)]
    assert sorted(served[:8]) == ["a", "a", "b", *["greedy"] * 5]
    assert not queue.waiting


async def test_turns_go_by_the_time_they_take() -> None:
    queue = FairQueue(1000)
    for owner in ("slow",) * 5 + ("quick",) * 30:
        queue.put(owner, job())
    served = []
    for _ in range(35):
        owner, _ = queue.take()
        served.append(owner)
        queue.charge(owner, 1.0 if owner == "slow" else 0.1)
    assert served[1:11] == ["quick"] * 10, "until both had the same time"
    assert served[:22].count("slow") == 2


async def test_one_owner_leaves_room_for_others_to_wait() -> None:
    queue = FairQueue(8)
    for _ in range(4):
        queue.put("greedy", job())
    with pytest.raises(TooManyWait) as mine:
        queue.put("greedy", job())
    assert mine.value.own
    for n in range(4):
        queue.put(f"{n}", job())
    with pytest.raises(TooManyWait) as full:
        queue.put("late", job())
    assert not full.value.own


async def test_whoever_leaves_gives_its_place_back() -> None:
    queue, left, stays = FairQueue(2), job(), job()
    queue.put("a", left)
    queue.discard("a", left)
    queue.discard("a", left)
    queue.put("a", stays)
    assert queue.take() == ("a", stays)
    assert not queue.waiting
