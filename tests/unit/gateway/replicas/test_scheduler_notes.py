"""Replicas that share workers learn from one another and take their share of every gate."""

from collections import deque
from collections.abc import Callable
from itertools import chain

import msgspec
import pytest

from gateway.fleet.model_runtime import ModelRuntime
from gateway.pipeline.request_progress import require
from gateway.replicas.notes import SchedulerNotes
from gateway.scheduling.prefix_gossip import PrefixGossip
from gateway.scheduling.prefix_index import PrefixIndex
from gateway.scheduling.quartz import Quartz
from gateway.scheduling.quartz_score import DEFAULT
from gateway.scheduling.scheduler import Job
from predictor.online import PrefillPredictor
from tests.builders import changed, served_model
from tests.fakes import FakeClock
from tests.unit.gateway.scheduling.scheduled import wait_s


def exchange(notes: SchedulerNotes) -> None:
    """Tell and hear, to the end."""
    deque(chain(notes.send(), notes.receive()), maxlen=0)


def notes_of(
    served: ModelRuntime,
    boards: "Boards",
    replica: str,
    replicas: Callable[[], int] = lambda: 2,
    clock: Callable[[], float] = lambda: 0.0,
) -> SchedulerNotes:
    view = boards.of(replica)
    return SchedulerNotes([served], view.publish, view.peers, lambda _model: replicas(), clock)


class Boards:
    """One board, seen by several replicas."""

    def __init__(self) -> None:
        self.notes: dict[str, dict[str, bytes]] = {}

    def of(self, replica: str) -> "View":
        return View(self, replica)


class View:
    def __init__(self, boards: Boards, replica: str) -> None:
        self.boards = boards
        self.replica = replica

    def publish(self, name: str, payload: bytes) -> None:
        self.boards.notes.setdefault(self.replica, {})[name] = payload

    def peers(self, name: str) -> dict[str, bytes]:
        others = {who: held for who, held in self.boards.notes.items() if who != self.replica}
        return {who: held[name] for who, held in others.items() if name in held}


def replica() -> tuple[ModelRuntime, Quartz, PrefillPredictor]:
    plain = served_model(workers=(2, 1))
    predictor = PrefillPredictor(workers=2)
    scheduler = Quartz(plain.fleet.pools[0], predictor, DEFAULT)
    served = changed(
        plain,
        scheduler=(scheduler, plain.fleet.pools[1].scheduler),
        predictor=(predictor, predictor),
        prefixes=(PrefixIndex(2), PrefixIndex(1)),
    )
    return served, scheduler, predictor


def gossip_of(served: ModelRuntime) -> PrefixGossip:
    gossip = served.fleet.pools[0].gossip
    assert gossip is not None
    return gossip


def job(tokens: int, client: str = "c") -> Job:
    return Job(owner=None, prompt_tokens=tokens, output_tokens=10, arrived_s=0.0, client=client)


def test_each_replica_takes_its_share_of_the_gate() -> None:
    served, scheduler, _ = replica()
    exchange(notes_of(served, Boards(), "a", lambda: 4))
    assert scheduler.replicas == 4


def test_what_one_replica_served_counts_in_the_others() -> None:
    boards = Boards()
    one, scheduler, _ = replica()
    two, other, _ = replica()
    clock = FakeClock(0.0)
    first = notes_of(one, boards, "a", clock=clock)
    second = notes_of(two, boards, "b", clock=clock)
    for notes in (first, second):
        exchange(notes)
    (sent,) = scheduler.submit(job(4000), 0.1)
    scheduler.first_token(sent, 0.4)
    clock.advance(0.5)
    exchange(first)
    exchange(second)
    assert other.shares.kilotokens("c", 0.5) == pytest.approx(4.0, rel=0.05)


def test_alone_nothing_is_kept_nor_told() -> None:
    boards = Boards()
    served, _, _ = replica()
    others = 2
    notes = notes_of(served, boards, "a", lambda: others)
    exchange(notes)
    for digest in range(10):
        gossip_of(served).sent(((512, digest),), 1, 0.25)
    assert len(gossip_of(served)) == 10
    others = 1
    exchange(notes)  # the last word, and hearing that nobody is left
    boards.notes.clear()
    for _ in range(2):
        gossip_of(served).sent(((512, 1),), 1, 0.25)
        exchange(notes)
    assert len(gossip_of(served)) == 0
    assert boards.notes == {}


def test_what_is_no_note_is_ignored() -> None:
    boards = Boards()
    served, scheduler, _ = replica()
    boards.notes["x"] = {"m/0": b"\xc1nonsense"}
    boards.notes["y"] = {"m/0": msgspec.msgpack.encode({"replica": 3})}
    exchange(notes_of(served, boards, "a"))
    assert wait_s(scheduler, 0, 0.0) == 0.0


def test_a_pool_with_other_workers_is_another_pool() -> None:
    boards = Boards()
    one, scheduler, _ = replica()
    two, other, _ = replica()
    two.fleet.pools[0].workers[:] = ["other-0", "other-1"]
    first = notes_of(one, boards, "a")
    second = notes_of(two, boards, "b")
    scheduler.submit(job(4000), 0.1)
    for notes in (first, second):
        exchange(notes)
    assert other.shares.state() == {}
    assert second._sent == {"m/0"}


def test_replicas_that_list_workers_in_other_orders_learn_of_the_same_ones() -> None:
    boards = Boards()
    one, scheduler, predictor = replica()
    two, other, others_predictor = replica()
    two.fleet.pools[0].workers[:] = ["short-1", "short-0"]
    first, second = notes_of(one, boards, "a"), notes_of(two, boards, "b")
    exchange(first)
    exchange(second)
    (sent,) = scheduler.submit(job(4000), 0.0)
    assert sent.worker == 0
    for worker in [0, 1] * 200:
        x, mean_s, high_s, bucket = predictor.predict_request(
            worker, 1000, 0, None, 10, 0, 0, 0.0, stream=True
        )
        actual_s = mean_s if worker else 3 * mean_s
        predictor.observe(worker, x, mean_s, high_s, bucket, actual_s)
    require(one.fleet.pools[0].gossip).sent(((512, 77),), 0, 0.25)
    exchange(first)
    exchange(second)
    assert wait_s(other, 1, 0.0) > 0 == wait_s(other, 0, 0.0)
    assert others_predictor.slowness(1) > others_predictor.slowness(0)
    assert require(two.fleet.pools[0].prefixes).match(((512, 77),), 0.25) == [(128, 0b10)]
