"""Large bodies are read in another process: with the same facts, and while the loop goes on."""

import asyncio
import contextlib
import os
import resource
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from gateway.adapters.bodies.reader import BodyReader
from gateway.errors import BadRequest
from gateway.policy.request.body import read_body
from gateway.policy.request.members import locate, splice
from gateway.records.endpoint import CHAT, COMPLETIONS, TRANSCRIPTIONS, Endpoint
from gateway.records.request import BodyFacts
from gateway.stages.estimate import HEAVY_BYTES, LIGHT_BYTES, is_heavy

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


async def test_facts_are_those_of_reading_it_here(reader: BodyReader) -> None:
    there, here = await reader.read(CHAT, PLAIN, "a"), read_body(CHAT, PLAIN)
    assert {name: bytes(value) for name, value in there.members.items()} == {
        name: bytes(value) for name, value in here.members.items()
    }
    assert there.places == tuple(locate(PLAIN))

    def rest(facts: BodyFacts) -> BodyFacts:
        return msgspec.structs.replace(facts, members={}, places=())

    assert rest(there) == rest(here)
    edit = {"replace": {"max_tokens": b"5"}, "remove": there.steering_fields}
    assert splice(PLAIN, **edit, places=there.places) == splice(PLAIN, **edit)  # type: ignore[arg-type]


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
    assert not is_heavy(CHAT, PLAIN)
    text = b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % (b"words, " * 300_000)
    assert is_heavy(CHAT, text), "as many commas as a megabyte of text has, and more"
    assert not is_heavy(CHAT, text.replace(b",", b" ").replace(b'm" "', b'm","'))


@pytest.mark.parametrize("shape", worst(10))
def test_what_takes_long_is_heavy(shape: str) -> None:
    assert is_heavy(*worst(8 * LIGHT_BYTES)[shape]) or shape == "escapes"


@pytest.mark.alone
@pytest.mark.parametrize("shape", worst(10))
async def test_the_loop_goes_on_while_a_large_body_is_read(reader: BodyReader, shape: str) -> None:
    endpoint, body = worst(32 * 2**20)[shape]
    assert is_heavy(endpoint, body)
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


async def test_many_large_bodies_of_one_key_do_not_hold_up_those_of_others(
    reader: BodyReader,
) -> None:
    """They were read in the order they came."""
    read: list[str] = []

    async def one(owner: str) -> None:
        await reader.read(CHAT, PLAIN, owner)
        read.append(owner)

    async with asyncio.TaskGroup() as group:
        for _ in range(20):
            group.create_task(one("greedy"))
        await asyncio.sleep(0)
        group.create_task(one("other"))
    assert read.index("other") <= 2


async def test_a_large_form_is_read_there_as_here(reader: BodyReader) -> None:
    media = b"multipart/form-data; boundary=x"
    body = (
        b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--x\r\n'
        b'content-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        + b"RIFF" * HEAVY_BYTES
        + b"\r\n--x--\r\n"
    )
    assert is_heavy(TRANSCRIPTIONS, body)
    there = await reader.read(TRANSCRIPTIONS, body, "a", [media])
    assert there == read_body(TRANSCRIPTIONS, body, content_types=[media])
