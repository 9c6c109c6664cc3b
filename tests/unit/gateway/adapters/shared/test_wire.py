"""The wire: messages arrive whole and in order, however the bytes do."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.adapters.shared import wire as module
from gateway.adapters.shared.wire import Message, Op, Wire, packed

MESSAGES: list[Message] = [
    [Op.ADMIT, 1, "lease", "m", "e", 0, [1], 100, 1, 0],
    [Op.SETTLE, 0, "lease", "m", 1.5, None],
    [Op.CALL, 2, "view", b"x" * 300],
    [Op.ANSWER, 2, {"a": [1, 2.5, True, None]}],
]


def frames() -> bytes:
    bodies = [packed(message) for message in MESSAGES]
    return b"".join(len(body).to_bytes(4, "big") + body for body in bodies)


@given(cuts=st.lists(st.integers(0, len(frames())), max_size=12))
def test_any_cutting_of_the_bytes_gives_the_same_messages(cuts: list[int]) -> None:
    heard: list[Message] = []
    wire = Wire(heard.append, lambda: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire._sock = ours
        for start, end in pairwise([0, *sorted(cuts), len(frames())]):
            if start < end:
                wire._hear(frames()[start:end])
    assert heard == MESSAGES


class Ends:
    """Both ends of a connection."""

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.lost: list[str] = []
        self.one = Wire(self.heard.append, lambda: self.lost.append("one"))
        self.other = Wire(self.hear, lambda: self.lost.append("other"))
        self.fails = False

    def hear(self, message: Message) -> None:
        if self.fails:
            raise ValueError("scripted defect")
        self.heard.append(message)

    async def until(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.heard) + len(self.lost) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    found = Ends()
    ours, theirs = socket.socketpair()
    found.one.open(ours)
    found.other.open(theirs)
    yield found
    found.one.close()
    found.other.close()
    await asyncio.sleep(0)


async def test_what_may_wait_is_never_overtaken(ends: Ends) -> None:
    ends.one.send_lazily(1, 0)
    ends.one.send(2, 0)
    ends.one.send_lazily(3, 0)
    await ends.until(3)
    assert [message[0] for message in ends.heard] == [1, 2, 3]


async def test_what_may_wait_arrives_by_itself(ends: Ends) -> None:
    ends.one.send_lazily(7, 0)
    await ends.until(1)
    assert ends.heard == [[7, 0]]


async def test_what_is_gathered_precedes_whatever_is_said_next(ends: Ends) -> None:
    gathered: list[tuple[object, ...]] = [(5, 0)]
    ends.one.gathered = lambda: gathered.pop() if gathered else None
    ends.one.send(6, 0)
    gathered.append((7, 0))  # by the time it leaves there is more
    await ends.until(3)
    assert [message[0] for message in ends.heard] == [5, 6, 7]


async def test_what_is_gathered_arrives_by_itself_but_for_nothing_heard(ends: Ends) -> None:
    gathered: list[tuple[object, ...]] = [(5, 0)]
    ends.one.gathered = lambda: gathered.pop() if gathered else None
    ends.other.send(1, 0)
    await ends.until(1)
    assert gathered, "what one end says does not have the other speak"
    ends.one.expect(0.001)
    await ends.until(2)
    assert [message[0] for message in ends.heard] == [1, 5]


async def test_what_is_gathered_leaves_at_once_if_it_is_hastened(ends: Ends) -> None:
    gathered: list[tuple[object, ...]] = [(5, 0)]
    ends.one.gathered = lambda: gathered.pop() if gathered else None
    ends.one.expect(60.0)
    ends.one.hasten()
    await ends.until(1)
    assert ends.heard == [[5, 0]]


async def test_more_than_the_socket_holds_arrives_whole(ends: Ends) -> None:
    for n in range(64):
        ends.one.send(n, 0, b"x" * 100_000)
    await ends.until(64)
    assert [message[0] for message in ends.heard] == list(range(64))


async def test_hanging_up_is_told_once_at_either_end(ends: Ends) -> None:
    ends.one.send(1, 0)
    ends.one.close()
    ends.one.close()
    await ends.until(3)
    assert sorted(ends.lost) == ["one", "other"]
    assert ends.heard == [[1, 0]], "what was said before is heard"
    ends.one.send(2, 0)
    ends.other.send(2, 0)
    assert not ends.one.up


async def test_a_message_that_fails_is_logged_and_the_next_is_heard(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    ends.fails = True
    ends.one.send(1, 0)
    while not caplog.records:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    ends.fails = False
    ends.one.send(2, 0)
    await ends.until(1)
    assert ends.heard == [[2, 0]]


async def test_a_frame_too_long_ends_the_connection(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_FRAME_BYTES", 1000)
    ends.one.send(1, 0, b"x" * 2000)
    await ends.until(2)
    assert sorted(ends.lost) == ["one", "other"]
    assert caplog.records[0].levelno == logging.ERROR


async def test_one_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKLOG_BYTES", 100_000)
    ended: list[bool] = []
    wire = Wire(lambda _: None, lambda: ended.append(True))
    ours, theirs = socket.socketpair()
    with theirs:
        wire.open(ours)
        for _ in range(50):
            wire.send(1, 0, b"x" * 100_000)
            await asyncio.sleep(0)
        assert ended == [True]
        assert not wire.up
