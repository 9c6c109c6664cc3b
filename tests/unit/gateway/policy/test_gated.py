"""The gate by the clock: a late gateway takes first tokens for come, one that is on time none."""

from math import inf
from typing import Any

import pytest

from gateway.policy import fleet
from gateway.policy.owed import LATE_TAU_S, LEAST_LATE_S, Owed
from gateway.policy.quartz import Quartz
from gateway.policy.quartz_profile import PROFILES, QuartzProfile
from gateway.policy.scheduling import Job
from gateway.policy.token_fair import TokenFair
from tests.unit.gateway.policy.scheduled import (
    Proportional,
    job_of,
    pool_of,
    quartz_of,
    submit_all,
)


def full(workers: int = 1, **profile: float) -> tuple[Quartz, list[Job]]:
    """One worker (the first) with a gate's worth sent at 0 s, due at .25 s, and five who wait."""
    more: dict[str, Any] = {"chunk_tokens": 1000, **profile}
    scheduler = quartz_of(pool_of(workers), **more)
    jobs = [job_of(2500, home=0) for _ in range(6)]
    assert submit_all(scheduler, jobs) == jobs[:1]
    return scheduler, jobs


def test_it_says_when_the_next_prefill_should_be_done() -> None:
    scheduler, jobs = full()
    assert scheduler.due_s == pytest.approx(0.25)
    for job in jobs[1:]:
        scheduler.cancel(job, 0.1)
    assert not scheduler.pump(0.25)
    assert scheduler.due_s == inf


def test_where_nobody_waits_nothing_is_due() -> None:
    scheduler = quartz_of(pool_of(1))
    scheduler.submit(job_of(1000), 0.0)
    assert scheduler.due_s == inf


def test_a_tick_does_not_hide_that_the_call_is_late() -> None:
    scheduler, jobs = full()
    assert not scheduler.tick(0.3)
    assert scheduler.pump(0.35) == [jobs[1]]


def test_on_time_an_overdue_first_token_is_the_engines() -> None:
    scheduler, jobs = full()
    assert not scheduler.pump(0.25 + LEAST_LATE_S / 2)
    assert not scheduler.pump(0.4)
    assert scheduler.first_token(jobs[0], 0.5) == [jobs[1]]


def test_late_the_clock_opens_the_gate_for_a_gates_worth() -> None:
    scheduler, jobs = full()
    assert scheduler.pump(0.35) == [jobs[1]]
    assert scheduler.due_s == pytest.approx(0.6)
    assert scheduler.backlog_tokens == [5000]
    # What is taken for answered is not ahead of the next.
    assert jobs[1].backlog_tokens == 0


def test_a_first_token_that_is_seen_later_counts_once() -> None:
    scheduler, jobs = full()
    scheduler.pump(0.35)
    assert not scheduler.first_token(jobs[0], 0.4)
    assert scheduler.backlog_tokens == [2500]
    assert scheduler.first_token(jobs[1], 0.5) == [jobs[2]]
    assert scheduler.finished(jobs[2], 0.55) == [jobs[3]]
    assert scheduler.backlog_tokens == [2500]


def test_an_engine_slower_than_predicted_is_left_alone() -> None:
    scheduler, jobs = full()
    assert scheduler.pump(0.35) == [jobs[1]]  # .1 s late: forgives .2 s
    assert scheduler.due_s == pytest.approx(0.6)
    # The first is overdue by .35 s, of which the gateway's lateness excuses less.
    assert not scheduler.pump(0.6)
    assert scheduler.first_token(jobs[0], 0.7) == [jobs[2]]


def test_no_more_than_the_bound_is_ever_ahead() -> None:
    sent = {}
    for ahead in (1.0, 2.0, 3.0):
        scheduler, jobs = full(gates_ahead=ahead)
        scheduler.pump(2.25)  # two seconds late: forgives four
        while scheduler.due_s < inf:
            scheduler.pump(scheduler.due_s)
        sent[ahead] = sum(job.state == "sent" for job in jobs)
    # Gates of 2,000 tokens, prompts of 2,500: the last one sent may reach beyond.
    assert sent == {1.0: 1, 2.0: 2, 3.0: 3}


def test_gateways_that_share_workers_share_the_bound() -> None:
    scheduler, jobs = full(gates_ahead=4.0)
    scheduler.replicas = 4
    assert not scheduler.pump(0.35)
    scheduler.replicas = 2
    assert scheduler.pump(0.36) == [jobs[1]]


def test_on_probation_the_clock_sends_nothing() -> None:
    scheduler = quartz_of(pool_of(1))
    stuck = job_of(100)
    scheduler.submit(stuck, 0.0)
    scheduler.tick(10.0)
    scheduler.finished(stuck, 11.0)
    scheduler.tick(11.1)
    trial = [job_of(100), job_of(100)]
    assert submit_all(scheduler, trial, 11.2) == trial[:1]
    assert scheduler.due_s == inf
    assert not scheduler.pump(11.3)


def test_a_stalled_worker_is_sent_nothing_by_the_clock() -> None:
    scheduler, jobs = full()
    scheduler.pump(2.25)  # two seconds late
    assert jobs[1].state == "sent"
    assert not scheduler.tick(20.0)  # 8 x the quantile of .5 s: no other worker
    assert not scheduler.pump(20.1)
    assert scheduler.due_s == inf
    assert [job.state for job in jobs[2:]] == ["waiting"] * 4


def test_a_worker_that_is_away_is_sent_nothing_by_the_clock() -> None:
    pool = pool_of(1)
    scheduler = quartz_of(pool, chunk_tokens=1000)
    jobs = [job_of(2500), job_of(2500)]
    submit_all(scheduler, jobs)
    fleet.unreachable(pool, 0)
    assert not scheduler.pump(0.4)
    assert jobs[1].state == "waiting"


def test_without_predictions_only_first_tokens_open_the_gate() -> None:
    scheduler = TokenFair(pool_of(1), QuartzProfile(chunk_tokens=1000))
    jobs = [job_of(2500), job_of(2500)]
    assert submit_all(scheduler, jobs) == jobs[:1]
    assert scheduler.due_s == inf
    assert not scheduler.pump(100.0)
    assert scheduler.first_token(jobs[0], 100.0) == [jobs[1]]


def test_lateness_is_the_worst_and_fades() -> None:
    owed = Owed(1)
    assert owed.late_s(5.0) == 0.0
    owed.called_late(0.5, 5.0)
    owed.called_late(0.1, 5.0)
    assert owed.late_s(5.0) == pytest.approx(0.5)
    assert owed.late_s(5.0 + LATE_TAU_S) == pytest.approx(0.5 / 2.718281828)
    owed.called_late(3600.0, 6.0)
    assert owed.late_s(6.0) == 2.0


def test_prompts_are_due_in_the_order_they_were_sent() -> None:
    owed = Owed(1)
    first, second = job_of(1000), job_of(10)
    first.worker = second.worker = 0
    owed.add(first, 1000, 2.0)
    owed.add(second, 10, 1.0)
    owed.let_go(0, 1.9)
    assert owed.overdue_tokens == [0]
    owed.let_go(0, 2.0)
    assert owed.overdue_tokens == owed.tokens == [1010]
    owed.remove(second)
    assert owed.overdue_tokens == owed.tokens == [1000]
    assert owed.oldest(0) is first


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="gates_ahead"):
        QuartzProfile(gates_ahead=-1.0)
    assert Quartz(pool_of(1), Proportional(), PROFILES["default"]).due_s == inf
