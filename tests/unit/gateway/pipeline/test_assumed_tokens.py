"""First tokens that nobody sees: assumed in time, all by one timer."""

import asyncio

import pytest

from gateway.pipeline.assumed_tokens import AssumedTokens
from gateway.scheduling.scheduler import Job, Scheduler


class Timers:
    """What of an event loop is used, with a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.set: list[tuple[float, object]] = []
        self.made = 0

    def time(self) -> float:
        return self.now_s

    def call_at(self, at_s: float, call, *args):  # type: ignore[no-untyped-def]
        self.made += 1
        entry = (at_s, lambda: call(*args))
        self.set.append(entry)
        timers = self

        class Handle:
            def cancel(self) -> None:
                timers.set.remove(entry)

        return Handle()

    def advance(self, to_s: float) -> None:
        while due := [entry for entry in self.set if entry[0] <= to_s]:
            entry = min(due, key=lambda e: e[0])
            self.set.remove(entry)
            self.now_s = max(self.now_s, entry[0])
            entry[1]()  # type: ignore[operator]
        self.now_s = to_s


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    found = Timers()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: found)
    return found


def sent(expected_s: float) -> Job:
    job = Job(owner=None, prompt_tokens=10, output_tokens=1, arrived_s=0.0, stream=False)
    job.state = "sent"
    job.expected_s = expected_s
    return job


def told_of(reported: list[Job]) -> AssumedTokens:
    def tell(scheduler: Scheduler, job: Job, now_s: float) -> None:
        job.state = "answering"
        reported.append(job)

    return AssumedTokens(lambda: 0.0, tell)


NOBODY: Scheduler = None  # type: ignore[assignment]


def test_each_is_told_when_it_is_due_whatever_the_order_they_came_in(timers: Timers) -> None:
    reported: list[Job] = []
    assumed = told_of(reported)
    late, soon = sent(2.0), sent(0.5)
    assumed.expect(NOBODY, late)
    assumed.expect(NOBODY, soon)
    timers.advance(0.4)
    assert reported == []
    timers.advance(0.6)
    assert reported == [soon]
    timers.advance(3.0)
    assert reported == [soon, late]
    assert len(assumed) == 0
    assert timers.set == []


def test_what_has_ended_is_not_told_and_needs_no_timer_of_its_own(timers: Timers) -> None:
    reported: list[Job] = []
    assumed = told_of(reported)
    for number in range(100):
        job = sent(1.0 + number / 100)
        assumed.forget(assumed.expect(NOBODY, job), job)
    assert len(assumed) == 0
    assert timers.made == 1
    timers.advance(5.0)
    assert reported == []
    assert timers.made == 1
    assert timers.set == []


def test_who_ends_leaves_the_others_of_its_turn(timers: Timers) -> None:
    reported: list[Job] = []
    assumed = told_of(reported)
    gone, stays = sent(1.0), sent(1.0)
    turn = assumed.expect(NOBODY, gone)
    assert assumed.expect(NOBODY, stays) == turn
    assumed.forget(turn, gone)
    assumed.forget(turn, gone)  # again: nothing happens
    timers.advance(1.1)
    assert reported == [stays]
    assumed.forget(turn, stays)
    assert len(assumed) == 0


def test_none_is_told_early_nor_much_later_than_due(timers: Timers) -> None:
    reported: list[Job] = []
    assumed = told_of(reported)
    for number in range(50):
        job = sent(0.1 + number / 7000)
        assumed.expect(NOBODY, job)
    for step in range(200):
        timers.advance(step / 1000)
        assert all(job.expected_s <= timers.now_s for job in reported)
        assert sum(job.expected_s + 0.0041 < timers.now_s for job in reported) == sum(
            0.1 + number / 7000 + 0.0041 < timers.now_s for number in range(50)
        )


def test_one_who_is_told_may_send_another_and_end_a_third(timers: Timers) -> None:
    reported: list[Job] = []
    first, second, third = sent(1.0), sent(1.0), sent(1.0)

    def tell(scheduler: Scheduler, job: Job, now_s: float) -> None:
        reported.append(job)
        job.state = "answering"
        if job is first:
            second.state = "gone"
            assumed.forget(turn, second)
            assumed.expect(NOBODY, third)

    assumed = AssumedTokens(lambda: 0.0, tell)
    turn = assumed.expect(NOBODY, first)
    assumed.expect(NOBODY, second)
    timers.advance(3.0)
    assert reported == [first, third]
    assert timers.set == []


def test_one_who_is_told_may_end_one_of_a_later_turn_and_hide_none(timers: Timers) -> None:
    reported: list[Job] = []
    first, ended, between, sent_then = sent(1.0), sent(1.01), sent(2.0), sent(3.0)

    def tell(scheduler: Scheduler, job: Job, now_s: float) -> None:
        reported.append(job)
        job.state = "answering"
        if job is first:
            assumed.forget(turn, ended)
            assumed.expect(NOBODY, sent_then)

    assumed = AssumedTokens(lambda: 0.0, tell)
    assumed.expect(NOBODY, first)
    turn = assumed.expect(NOBODY, ended)
    assumed.expect(NOBODY, between)
    timers.now_s = 1.5  # the timer is late: both of the first are due
    timers.advance(1.6)
    assert reported == [first]
    timers.advance(2.5)
    assert reported == [first, between], "not kept until the one that was sent later is due"
    timers.advance(9.0)
    assert reported == [first, between, sent_then]
