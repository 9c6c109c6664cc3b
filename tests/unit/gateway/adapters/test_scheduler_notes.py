"""Processes that share workers learn from one another and take their share of every gate."""

from collections import deque
from collections.abc import Iterator

import msgspec
import pytest

from gateway.adapters.scheduler_notes import SchedulerNotes
from gateway.policy.prefix_index import PrefixIndex
from gateway.policy.prefix_news import PrefixNews
from gateway.policy.quartz import Quartz
from gateway.policy.quartz_profile import DEFAULT
from gateway.policy.scheduling import Job
from gateway.policy.served import ServedModel
from predictor.online import PrefillPredictor
from tests.builders import served_model


def all_of(exchange: Iterator[None]) -> None:
    """To its end."""
    deque(exchange, maxlen=0)


class Boards:
    """One board, seen by several replicas."""

    def __init__(self) -> None:
        self.notes: dict[str, dict[str, bytes]] = {}

    def of(self, process: str) -> "View":
        return View(self, process)


class View:
    def __init__(self, boards: Boards, process: str) -> None:
        self.boards = boards
        self.process = process

    def publish(self, name: str, payload: bytes) -> None:
        self.boards.notes.setdefault(self.process, {})[name] = payload

    def peers(self, name: str) -> list[bytes]:
        others = (held for who, held in self.boards.notes.items() if who != self.process)
        return [held[name] for held in others if name in held]


def process() -> tuple[ServedModel, Quartz, PrefillPredictor]:
    plain = served_model(workers=(2, 1))
    predictor = PrefillPredictor(workers=2)
    scheduler = Quartz(plain.pools[0], predictor, DEFAULT)
    served = msgspec.structs.replace(
        plain,
        schedulers=(scheduler, None),
        predictors=(predictor, predictor),
        prefixes=(PrefixIndex(2), PrefixIndex(1)),
        news=(PrefixNews(), PrefixNews()),
    )
    return served, scheduler, predictor


def job(tokens: int, client: str = "c") -> Job:
    return Job(owner=None, prompt_tokens=tokens, output_tokens=10, arrived_s=0.0, client=client)


def test_each_process_takes_its_share_of_the_gate() -> None:
    served, scheduler, _ = process()
    all_of(SchedulerNotes([served], Boards().of("a"), "a", lambda _model: 4).exchange(1.0))
    assert scheduler.replicas == 4


def test_what_one_process_served_counts_in_the_others() -> None:
    boards = Boards()
    one, scheduler, _ = process()
    two, other, _ = process()
    first = SchedulerNotes([one], boards.of("a"), "a", lambda _model: 2)
    second = SchedulerNotes([two], boards.of("b"), "b", lambda _model: 2)
    for notes in (first, second):
        all_of(notes.exchange(0.0))
    (sent,) = scheduler.submit(job(4000), 0.1)
    scheduler.first_token(sent, 0.4)
    all_of(first.exchange(0.5))
    all_of(second.exchange(0.5))
    assert other.shares.kilotokens("c", 0.5) == pytest.approx(4.0, rel=0.05)


def test_work_that_one_process_assigned_is_backlog_for_the_others() -> None:
    boards = Boards()
    one, scheduler, _ = process()
    two, other, _ = process()
    (sent,) = scheduler.submit(job(8000), 0.0)
    all_of(SchedulerNotes([one], boards.of("a"), "a", lambda _model: 2).exchange(0.0))
    all_of(SchedulerNotes([two], boards.of("b"), "b", lambda _model: 2).exchange(0.0))
    assert other.wait_s(sent.worker, 0.0) > 0
    assert other.wait_s(1 - sent.worker, 0.0) == 0


def test_prompts_that_one_process_sent_are_expected_at_their_worker_by_the_others() -> None:
    boards = Boards()
    one, _, _ = process()
    two, _, _ = process()
    points = ((512, 1), (1024, 2), (2048, 3))
    first = SchedulerNotes([one], boards.of("a"), "a", lambda _model: 2)
    all_of(first.exchange(0.0))
    one.news[0].sent(points, 1, 0.25)
    all_of(first.exchange(1.0))
    all_of(SchedulerNotes([two], boards.of("b"), "b", lambda _model: 2).exchange(0.0))
    assert two.prefixes[0].match(points, 0.25)[0] == (512, 0b10)


def test_alone_nothing_is_kept_nor_told() -> None:
    boards = Boards()
    served, _, _ = process()
    others = 2
    notes = SchedulerNotes([served], boards.of("a"), "a", lambda _model: others)
    all_of(notes.exchange(0.0))
    for digest in range(10):
        served.news[0].sent(((512, digest),), 1, 0.25)
    assert len(served.news[0]) == 10
    others = 1
    all_of(notes.exchange(1.0))  # the last word, and hearing that nobody is left
    boards.notes.clear()
    for now_s in (2.0, 3.0):
        served.news[0].sent(((512, 1),), 1, 0.25)
        all_of(notes.exchange(now_s))
    assert len(served.news[0]) == 0
    assert boards.notes == {}


def test_what_is_no_note_is_ignored() -> None:
    boards = Boards()
    served, scheduler, _ = process()
    boards.notes["x"] = {"m/0": b"\xc1nonsense"}
    boards.notes["y"] = {"m/0": msgspec.msgpack.encode({"process": 3})}
    all_of(SchedulerNotes([served], boards.of("a"), "a", lambda _model: 2).exchange(0.0))
    assert scheduler.wait_s(0, 0.0) == 0.0


def test_a_pool_with_other_workers_is_another_pool() -> None:
    boards = Boards()
    one, scheduler, _ = process()
    two, other, _ = process()
    two.pools[0].workers = tuple(reversed(two.pools[0].workers))
    first = SchedulerNotes([one], boards.of("a"), "a", lambda _model: 2)
    second = SchedulerNotes([two], boards.of("b"), "b", lambda _model: 2)
    scheduler.submit(job(4000), 0.1)
    for notes in (first, second):
        all_of(notes.exchange(1.0))
    assert other.shares.state() == {}
    assert second._told == {"m/0"}
