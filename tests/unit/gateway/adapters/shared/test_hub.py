"""Workers and their parent: who is there, who is asked, what is on the board."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest

from gateway.adapters.shared.board import PeerBoard
from gateway.adapters.shared.hub import Session
from gateway.adapters.shared.wire import Op
from gateway.errors import StateFailure
from tests.shared import Family


def name(index: int, payload: bytes) -> bytes:
    return payload + b"%d" % index


@pytest.fixture
async def family() -> AsyncIterator[Family]:
    found = Family()
    yield found
    await found.close()


async def test_every_worker_knows_who_is_live_and_one_leads(family: Family) -> None:
    one, two = await family.join(), await family.join()
    await family.quiet()
    assert (one.live, two.live) == ((0, 1), (0, 1))
    assert (one.replicas, one.leads, two.leads) == (2, True, False)
    await family.die(one)
    await family.quiet()
    assert (two.live, two.replicas, two.leads) == ((1,), 1, True)


async def test_a_question_is_answered_by_all_others(family: Family) -> None:
    links = [await family.join() for _ in range(3)]
    for link in links:
        link.on("who", partial(name, link.index))
    assert await links[1].ask("who", b"worker ") == [b"worker 0", b"worker 2"]


async def test_who_has_no_answer_or_fails_is_left_out(
    family: Family, caplog: pytest.LogCaptureFixture
) -> None:
    links = [await family.join() for _ in range(4)]

    def fails(_: bytes) -> bytes:
        raise ValueError("scripted defect")

    async def later(_: bytes) -> bytes:
        await asyncio.sleep(0)
        return b"later"

    links[1].on("who", lambda _: None)
    links[2].on("who", fails)
    links[3].on("who", later)
    session = family.hub.sessions[0]
    found = await family.hub.gather("who", b"", family.hub.others(session), limit_s=5)
    assert found == {3: b"later"}
    assert "failed" in caplog.text


async def test_a_worker_that_dies_while_it_is_asked_is_not_waited_for(family: Family) -> None:
    one, two = await family.join(), await family.join()
    two.on("who", lambda _: asyncio.Event().wait())  # type: ignore[arg-type,return-value]
    asked = asyncio.ensure_future(one.ask("who"))
    await family.quiet(two)
    await family.die(two)
    assert await asyncio.wait_for(asked, 0.5) == []


async def test_a_call_that_the_parent_cannot_answer_fails(family: Family) -> None:
    link = await family.join()

    async def fails(_session: Session, _value: object) -> None:
        raise StateFailure("the disk is full")

    family.hub.serves("known", fails)
    with pytest.raises(StateFailure, match="the disk is full"):
        await link.call("known")
    with pytest.raises(StateFailure, match="has no other"):
        await link.call("other")


async def test_without_its_parent_everything_fails_at_once(family: Family) -> None:
    link = await family.join()
    lost: list[bool] = []
    link.on_lost = lambda: lost.append(True)
    asked = link.begin(Op.CALL, "never", b"\xc0")
    family.hub.sessions[0].wire.close()
    with pytest.raises(StateFailure):
        await asked
    await asyncio.sleep(0.01)
    assert lost == [True]
    assert not link.up
    assert await link.ask("who") == []
    with pytest.raises(StateFailure):
        await link.call("known")


async def test_notes_reach_the_others_newcomers_too_and_go_with_their_worker(
    family: Family,
) -> None:
    links = [await family.join() for _ in range(2)]
    one, two = map(PeerBoard, links)
    one.publish("counters", b"1")
    one.publish("counters", b"2")
    two.publish("counters", b"9")
    one.flush()
    two.flush()
    await family.quiet()
    assert (one.peers("counters"), two.peers("counters")) == ([b"9"], [b"2"])
    assert one.peers("unknown") == []
    boards: list[PeerBoard] = []
    await family.join(prepare=lambda link: boards.append(PeerBoard(link)))
    await family.quiet()
    (three,) = boards
    assert three.peers("counters") == [b"2", b"9"]
    await family.die(links[0])
    await family.quiet()
    assert three.peers("counters") == [b"9"]


async def test_an_unchanged_note_is_not_sent_again(family: Family) -> None:
    link = await family.join()
    board = PeerBoard(link)
    board.publish("counters", b"1")
    board.flush()
    sent: list[object] = []
    link.post = lambda *message: sent.append(message)  # type: ignore[method-assign]
    board.publish("counters", b"1")
    board.flush()
    assert sent == []


def test_a_process_that_is_alone_has_no_peers() -> None:
    board = PeerBoard()
    board.publish("counters", b"1")
    board.flush()
    assert board.peers("counters") == []
