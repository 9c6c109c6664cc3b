"""The task between estimators and store: what it publishes, and when nobody answers."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping

import pytest

from gateway.errors import StateFailure
from gateway.estimate.estimator import LengthEstimator
from gateway.fleet.breaker import MAX_PAUSE_S
from gateway.ports import ExchangeResult
from gateway.records.estimate import Observation
from gateway.records.request import Measure
from gateway.replicas.estimator_sync import EstimatorSync, NoState
from tests.fakes import FakeClock, FakeShared, FakeState

M = "default:m"
AWAY = StateFailure("scripted absence")


def teach(estimator: LengthEstimator, ratio: float, count: int = 1) -> None:
    measure = Measure(
        text_bytes=round(900 * ratio),
        longest_text_bytes=round(900 * ratio),
        messages=1,
        category="prose",
    )
    for _ in range(count):
        estimator.learn(
            Observation(
                endpoint="chat",
                tenant="t",
                measure=measure,
                prompt_tokens=907,
                completion_tokens=5,
                sequences=1,
                output_censored=False,
            )
        )


def mean(estimator: LengthEstimator) -> float:
    found: float = estimator.snapshot()["categories"]["prose"]["mean"]
    return found


class Node:
    """One gateway's part of it."""

    def __init__(self, shared: FakeShared, name: str = "one") -> None:
        self.state = FakeState(shared, name)
        self.estimator = LengthEstimator()
        self.clock = shared.clock
        self.learning = EstimatorSync(
            self.state, {M: self.estimator}, clock=self.clock, chance=lambda: 0.5
        )


def is_up(node: Node) -> bool:
    return node.learning.up


@pytest.fixture
def shared() -> FakeShared:
    return FakeShared()


async def test_without_a_store_it_is_up_and_does_nothing() -> None:
    learning = EstimatorSync(NoState(), {M: LengthEstimator()}, clock=FakeClock())
    await learning.start()
    assert learning.up
    await learning.close()


async def test_it_is_up_from_the_first_exchange_on(shared: FakeShared) -> None:
    node = Node(shared)
    seen = [node.learning.up]
    await node.learning.exchange()
    assert [*seen, node.learning.up] == [False, True]


async def test_only_news_is_published(shared: FakeShared) -> None:
    node = Node(shared)
    for _ in range(3):
        await node.learning.exchange()
    assert shared.revision == 0
    teach(node.estimator, 4.5)
    for _ in range(3):
        await node.learning.exchange()
    assert shared.revision == 1


async def test_a_store_that_lost_the_record_gets_it_again(shared: FakeShared) -> None:
    node = Node(shared)
    teach(node.estimator, 4.5)
    await node.learning.exchange()
    shared.records.clear()
    await node.learning.exchange()
    await node.learning.exchange()
    assert shared.records[M]["one"][2]["ratio.prose@t"].n == 1


async def test_two_share_what_one_learned(shared: FakeShared) -> None:
    one, two = Node(shared, "one"), Node(shared, "two")
    teach(one.estimator, 5.0, 30)
    await one.learning.exchange()
    await two.learning.exchange()
    assert mean(two.estimator) == mean(one.estimator) == pytest.approx(5.0)


async def test_away_it_goes_on_learning_and_is_told_once(
    shared: FakeShared, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sluice.state")
    node, other = Node(shared), Node(shared, "other")
    await node.learning.exchange()
    node.state.fail_with = AWAY
    teach(node.estimator, 5.0, 10)
    for _ in range(100):
        await node.learning.exchange()
        shared.clock.advance(0.25)
    assert not is_up(node)
    assert mean(node.estimator) == pytest.approx(5.0)
    assert len(caplog.records) == 1
    assert "scripted absence" in caplog.text
    assert node.state.exchanges < 20, "the breaker pauses"
    node.state.fail_with = None
    shared.clock.advance(MAX_PAUSE_S)
    await node.learning.exchange()
    assert is_up(node)
    assert [record.message for record in caplog.records[1:]] == ["the state store is back"]
    await other.learning.exchange()
    assert mean(other.estimator) == pytest.approx(5.0), "what was learned meanwhile is shared"


async def test_what_both_learned_apart_is_merged_when_the_store_returns(
    shared: FakeShared,
) -> None:
    one, two = Node(shared, "one"), Node(shared, "two")
    teach(one.estimator, 4.0, 200)
    teach(two.estimator, 5.0, 200)
    for _ in range(2):
        await one.learning.exchange()
        await two.learning.exchange()
    assert 4.2 < mean(one.estimator) < 4.8
    assert 4.2 < mean(two.estimator) < 4.8


async def test_a_defect_of_a_store_does_not_end_the_task(
    shared: FakeShared, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(shared)
    node.state.fail_with = ZeroDivisionError("defect")
    await node.learning.exchange()
    assert not node.learning.up
    assert "ZeroDivisionError" in caplog.text


class Hanging:
    """A store that never answers and counts how often it was left."""

    interval_s = 1.0

    def __init__(self) -> None:
        self.left = 0

    async def exchange(self, records: Mapping[str, object]) -> ExchangeResult:
        """See EstimatorState."""
        never: asyncio.Future[ExchangeResult] = asyncio.get_running_loop().create_future()
        try:
            return await never
        finally:
            self.left += 1

    async def close(self) -> None:
        """See EstimatorState."""


async def test_a_hanging_store_is_left_after_the_limit() -> None:
    state = Hanging()
    learning = EstimatorSync(state, {M: LengthEstimator()}, clock=time.monotonic)
    await learning.exchange(limit_s=0.01)
    assert (state.left, learning.up) == (1, False)


async def test_it_can_be_cancelled_at_any_moment() -> None:
    state = Hanging()
    learning = EstimatorSync(state, {M: LengthEstimator()}, clock=time.monotonic)
    task = asyncio.create_task(learning.start())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await learning.close()


async def test_closing_publishes_what_is_new(shared: FakeShared) -> None:
    node = Node(shared)
    await node.learning.start()
    teach(node.estimator, 4.5)
    await node.learning.close()
    assert shared.records[M]["one"][2]["ratio.prose@t"].n == 1
    assert node.state.closed


async def test_closing_while_away_asks_no_more(shared: FakeShared) -> None:
    node = Node(shared)
    node.state.fail_with = AWAY
    await node.learning.start()
    asked = node.state.exchanges
    await node.learning.close()
    assert (node.state.exchanges, node.state.closed) == (asked, True)
