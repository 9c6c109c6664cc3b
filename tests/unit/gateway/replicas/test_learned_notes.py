"""The bus, and what estimators learned on it: what is published, and when nobody answers."""

import logging

import pytest

from gateway.errors import StateFailure
from gateway.estimate.estimator import LengthEstimator
from gateway.fleet.breaker import MAX_PAUSE_S
from gateway.records.estimate import Observation
from gateway.records.request import Measure
from gateway.replicas import bus
from gateway.replicas.bus import LASTING, Bus
from gateway.replicas.notes import LearnedNotes
from tests.fakes import FakeNotes, FakeShared

M = "default:m"
AWAY = StateFailure("scripted absence")


def teach(estimator: LengthEstimator, ratio: float, count: int = 1) -> None:
    size = round(900 * ratio)
    seen = Observation(
        endpoint="chat",
        tenant="t",
        measure=Measure(text_bytes=size, longest_text_bytes=size, messages=1, category="prose"),
        prompt_tokens=907,
        completion_tokens=5,
        sequences=1,
        output_censored=False,
    )
    for _ in range(count):
        estimator.learn(seen)


def mean(estimator: LengthEstimator) -> float:
    found: float = estimator.snapshot()["categories"]["prose"]["mean"]
    return found


class Node:
    """One gateway's part of it."""

    def __init__(self, shared: FakeShared, name: str = "one") -> None:
        self.store = FakeNotes(shared, name)
        self.estimator = LengthEstimator()
        self.clock = shared.clock
        self.bus = Bus(self.store, replica=name, clock=self.clock, chance=lambda: 0.5)
        self.notes = LearnedNotes(self.bus, {M: self.estimator}, self.clock)

    async def exchange(self) -> None:
        self.clock.advance(1.0)
        await self.bus.exchange()


def notes_of(shared: FakeShared) -> dict[str, tuple[int, float, bytes]]:
    return shared.notes[LASTING + M]


@pytest.fixture
def shared() -> FakeShared:
    return FakeShared()


async def test_only_news_is_published(shared: FakeShared) -> None:
    node = Node(shared)
    for _ in range(3):
        await node.exchange()
    assert shared.revision == 0
    teach(node.estimator, 4.5)
    for _ in range(3):
        await node.exchange()
    assert shared.revision == 1


async def test_an_idle_gateway_is_outvoted_also_where_the_store_lost_its_note(
    shared: FakeShared,
) -> None:
    idle, busy = Node(shared, "idle"), Node(shared, "busy")
    teach(idle.estimator, 5.0, 300)
    await idle.exchange()
    shared.clock.advance(600.0)
    shared.notes.clear()
    teach(busy.estimator, 3.0, 50)
    for node in (busy, idle, idle, busy):
        await node.exchange()
    assert list(notes_of(shared)) == ["busy", "idle"]
    assert mean(busy.estimator) == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize("note", [b"\x00\xff{", b"\x81\xa1a\x05", b"x" * (bus.MAX_BYTES + 1)])
async def test_notes_of_another_make_are_ignored(
    shared: FakeShared, note: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    node, other = Node(shared), FakeNotes(shared, "other")
    for _ in range(2):
        await other.exchange({LASTING + M: note})
        await node.exchange()
    assert node.bus.up
    assert caplog.text.count("not of this version") == 1


async def test_a_model_that_is_gone_is_published_no_more(shared: FakeShared) -> None:
    node = Node(shared)
    teach(node.estimator, 5.0)
    await node.exchange()
    node.notes.replace({"default:n": LengthEstimator()})
    shared.notes.clear()
    await node.exchange()
    assert list(shared.notes) == [LASTING + "default:n"]


async def test_a_model_that_goes_while_notes_are_made_is_published_no_more(
    shared: FakeShared,
) -> None:
    node = Node(shared)
    gone = LengthEstimator()
    node.notes.replace({M: node.estimator, "default:gone": gone})
    teach(gone, 5.0)
    steps = node.notes.send()
    next(steps)
    node.notes.replace({M: node.estimator})
    for _ in steps:
        pass
    await node.bus.exchange()
    assert list(shared.notes) == [LASTING + M]


async def test_no_name_of_a_model_makes_its_other_notes_lasting(shared: FakeShared) -> None:
    one, two = Node(shared, "one"), Node(shared, "two")
    one.bus.publish("learned:m/0", b"from one")
    two.bus.publish("learned:m/0", b"from two")
    for node in (one, two):
        await node.exchange()
    assert two.bus.peers("learned:m/0") == {"one": b"from one"}


async def test_away_it_goes_on_learning_and_is_told_once(
    shared: FakeShared, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sluice.state")
    node, other = Node(shared), Node(shared, "other")
    await node.exchange()
    node.store.fail_with = AWAY
    teach(node.estimator, 5.0, 10)
    for _ in range(100):
        await node.bus.exchange()
        shared.clock.advance(0.25)
    up = [node.bus.up]
    assert mean(node.estimator) == pytest.approx(5.0)
    assert [r.getMessage() for r in caplog.records] == ["the fake is away: scripted absence"]
    assert node.store.exchanges < 20, "the breaker pauses"
    node.store.fail_with = None
    shared.clock.advance(MAX_PAUSE_S)
    await node.exchange()
    assert [*up, node.bus.up] == [False, True]
    assert caplog.records[-1].getMessage() == "the fake is back"
    await other.exchange()
    assert mean(other.estimator) == pytest.approx(5.0), "what was learned meanwhile is shared"


async def test_a_defect_of_a_store_does_not_end_the_task(
    shared: FakeShared, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(shared)
    node.store.fail_with = ZeroDivisionError("defect")
    await node.exchange()
    assert not node.bus.up
    assert "ZeroDivisionError" in caplog.text
