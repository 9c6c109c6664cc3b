"""What a worker did with leases is told late, in one message, and never twice."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from gateway.adapters.shared.link import Link
from gateway.adapters.shared.pledges import Pledge
from gateway.adapters.shared.untold import MOST_ENTRIES, YOUNG_S, Untold
from gateway.adapters.shared.wire import Op
from gateway.domain import Ask, Lease, Usage
from gateway.ports import Settlement
from tests.fakes import FakeClock

USED = Settlement(usage=Usage(prompt_tokens=60, completion_tokens=4), dispatched=True)


class Deaf:
    """A link that goes nowhere, and counts how often it is told to send."""

    def __init__(self) -> None:
        self.expected = self.hastened = 0
        self.gathered: Callable[[], tuple[Any, ...] | None] = lambda: None

    def gathers(self, gathered: Callable[[], tuple[Any, ...] | None]) -> None:
        self.gathered = gathered

    def expect(self, within_s: float) -> None:
        assert within_s > 0
        self.expected += 1

    def hasten(self) -> None:
        self.hastened += 1


class Worker:
    """Its pledge, and what it has not told."""

    def __init__(self) -> None:
        self.link = Deaf()
        self.clock = FakeClock(1_000.0)
        self.untold = Untold(cast("Link", self.link), self.clock)
        self.pledge = Pledge(7, ("m", "e", 0), 64, 10_000, 6_400, self.clock() + 1, 32, 5_000)

    def take(self, lease_id: str) -> Lease:
        ask = Ask(
            lease_id=lease_id,
            model="m",
            entitlement="e",
            pool=0,
            alternates=(),
            cost_tokens=100,
            sequences=1,
            kv_bytes=10,
        )
        self.pledge.sequences -= 1
        self.pledge.tokens -= 100
        self.pledge.kv_bytes -= 10
        self.untold.take(self.pledge, ask, self.clock())
        return Lease(
            id=lease_id,
            model="m",
            entitlement="e",
            pool=0,
            spilled=False,
            cost_tokens=100,
            sequences=1,
            kv_bytes=10,
        )


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_a_lease_that_has_ended_is_a_sum_without_a_name_and_gives_its_room_back(
    worker: Worker,
) -> None:
    lease = worker.take("a")
    worker.clock.advance(0.02)
    assert worker.untold.end(lease, USED)
    assert (worker.pledge.sequences, worker.pledge.kv_bytes) == (64, 6_400)
    assert worker.pledge.tokens == 9_900, "what was spent is spent"
    message = worker.link.gathered()
    assert message is not None
    op, _, taken, passed, settled = message
    assert (op, taken, settled) == (Op.LEASES, [], [])
    [(number, model, name, pool, [told])] = passed
    assert (number, model, name, pool) == (7, "m", "e", 0)
    assert told == (100, 1, 10, pytest.approx(0.02), (60, 4, 0))
    assert worker.link.gathered() is None


def test_one_in_force_is_told_when_it_is_older_and_then_settled_by_name(worker: Worker) -> None:
    old = worker.take("old")
    worker.clock.advance(YOUNG_S + 0.01)
    worker.take("young")
    message = worker.link.gathered()
    assert message is not None
    assert [told[2] for told in message[2]] == ["old"]
    assert message[2][0][:2] == (7, 1_000.0)
    assert worker.link.expected == 2, "the young one is told by itself, later"
    assert not worker.untold.end(old, USED)
    worker.untold.settle(("old", "m", 0.0, None))
    worker.clock.advance(YOUNG_S + 0.01)
    message = worker.link.gathered()
    assert message is not None
    assert ([told[2] for told in message[2]], message[4]) == (["young"], [("old", "m", 0.0, None)])
    assert worker.link.gathered() is None


def test_whatever_is_said_of_a_lease_comes_after_it(worker: Worker) -> None:
    worker.take("a")
    worker.untold.speak_of("another")
    assert worker.link.gathered() is None
    worker.untold.speak_of("a")
    message = worker.link.gathered()
    assert message is not None
    assert [told[2] for told in message[2]] == ["a"]


def test_when_pledges_are_called_back_all_is_told(worker: Worker) -> None:
    worker.untold.tell_all()
    worker.take("a")
    assert worker.link.gathered() is None, "that was for what there was then: nothing"
    worker.take("b")
    worker.untold.tell_all()
    message = worker.link.gathered()
    assert message is not None
    assert [told[2] for told in message[2]] == ["a", "b"]


def test_a_pledge_that_is_half_used_is_told_at_once_and_once(worker: Worker) -> None:
    for number in range(32):
        worker.take(f"{number}")
    assert worker.link.hastened == 0
    for number in range(4):
        worker.take(f"more {number}")
    assert worker.link.hastened == 1


def test_what_waits_is_bounded(worker: Worker) -> None:
    worker.pledge.low_sequences = worker.pledge.low_tokens = -(1 << 40)
    for number in range(MOST_ENTRIES - 1):
        worker.untold.settle((f"{number}", "m", 0.0, None))
    assert worker.link.hastened == 0
    worker.untold.settle(("last", "m", 0.0, None))
    assert (worker.link.hastened, worker.link.expected) == (1, 1)
