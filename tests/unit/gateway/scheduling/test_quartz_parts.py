from math import exp
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.scheduling.baselines import pick_sticky
from gateway.scheduling.fairness import ServedShares
from gateway.scheduling.quartz import EVEN_TOKENS, Quartz, Worker
from gateway.scheduling.quartz_score import DEFAULT, hits_of
from gateway.scheduling.scheduler import Job, Match
from tests.unit.gateway.scheduling.scheduled import (
    Proportional,
    job_of,
    pool_of,
    quartz_of,
    submit_all,
)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.floats(-1e6, 1e6), st.booleans()), min_size=1, max_size=200
    )
)
def test_a_queue_gives_the_least_key_of_the_lowest_class_and_forgets_the_cancelled(
    drawn: list[tuple[int, float, bool]],
) -> None:
    worker = Worker()
    jobs = []
    for order, (priority_class, key, _) in enumerate(drawn):
        job = job_of(priority_class=priority_class)
        job.key, job.order = key, order
        worker.push(job)
        jobs.append(job)
    for job, (_, _, cancelled) in zip(jobs, drawn, strict=True):
        if cancelled:
            worker.cancel(job)
    left = [job for job in jobs if job.state == "waiting"]
    assert worker.waiting == len(left)
    assert len(worker.heap) <= 2 * len(left) + 64 + 1
    given_out = []
    while (first := worker.first()) is not None:
        worker.pop()
        given_out.append(first)
    assert given_out == sorted(left, key=lambda job: (job.priority_class, job.key, job.order))
    assert worker.waiting == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(("bind", "send", "leave", "unbind")), st.integers(0, 4)),
        max_size=200,
    )
)
def test_backlogs_are_what_is_bound_less_the_progress_of_the_oldest(
    steps: list[tuple[str, int]],
) -> None:
    worker = Worker()
    bound: list[Job] = []
    sent: list[Job] = []
    for now_s, (what, pick) in enumerate(steps):
        if what == "bind":
            job = job_of(100 * (pick + 1))
            job.mean_s = float(pick)
            worker.bound_s += job.mean_s
            bound.append(job)
        elif what == "send" and bound:
            job = bound.pop(pick % len(bound))
            worker.send(job, job.prompt_tokens, now_s)
            sent.append(job)
        elif what == "leave" and sent:
            worker.leave(sent.pop(pick % len(sent)), now_s)
        elif what == "unbind" and bound:
            worker.unbind(bound.pop(pick % len(bound)))
        total_s = sum(job.mean_s for job in (*bound, *sent))
        oldest_s = sent[0].mean_s if sent else 0.0
        assert total_s - oldest_s - 1e-6 <= worker.wait_s(now_s, 1) <= total_s + 1e-6
        assert worker.wait_s(now_s + 1e9, 1) == pytest.approx(total_s - oldest_s, abs=1e-6)
        assert worker.sent_tokens == sum(job.prompt_tokens for job in sent)


def test_u_decays_by_e_in_tau_and_is_evicted_when_idle() -> None:
    shares = ServedShares(10.0)
    shares.served("a", 5000, 0.0)
    assert shares.kilotokens("a", 0.0) == 5.0
    assert shares.kilotokens("a", 10.0) == pytest.approx(5.0 / 2.718281828)
    shares.sweep(10.0)
    assert len(shares) == 1
    shares.sweep(200.0)
    assert len(shares) == 0
    assert shares.state() == {}
    assert shares.kilotokens("a", 200.0) == 0.0


def test_there_are_never_more_clients_than_allowed() -> None:
    shares = ServedShares(10.0, most=100)
    for i in range(1000):
        shares.served(str(i), 1000, float(i) / 1000)
    assert len(shares) == len(shares.state()) == 100


def test_what_others_served_is_counted_once_and_not_from_before_they_were_known() -> None:
    here, there = ServedShares(10.0), ServedShares(10.0)
    there.served("a", 9000, 0.0)
    here.merge({"there": there.state()}, 0.0)
    assert here.kilotokens("a", 0.0) == 0.0
    there.served("a", 2000, 0.0)
    for _ in range(3):
        here.merge({"there": there.state()}, 0.0)
    assert here.kilotokens("a", 0.0) == pytest.approx(2.0)
    there.sweep(1000.0)
    there.served("a", 1000, 1000.0)
    here.merge({"there": there.state()}, 1000.0)
    assert here.kilotokens("a", 1000.0) == pytest.approx(1.0)


@given(
    st.floats(0.05, 2.0),
    st.lists(st.tuples(st.integers(1, 20_000), st.floats(0, 5)), min_size=2, max_size=30),
)
def test_without_fairness_a_job_is_overtaken_only_within_the_bound(
    aging: float, drawn: list[tuple[int, float]]
) -> None:
    scheduler = quartz_of(pool_of(1), aging=aging, fairness_s_per_kilotoken=0.0)
    blocker = job_of(50_000)
    scheduler.submit(blocker, 0.0)
    now_s = 0.0
    jobs: list[Job] = []
    for tokens, later_s in drawn:
        now_s += later_s
        jobs.append(job_of(tokens, now_s))
        submit_all(scheduler, [jobs[-1]], now_s)
    sizes = {id(job): job.quantile_s for job in jobs}
    order = [job for job in jobs if job.state == "sent"]
    waiting = [job for job in jobs if job.state == "waiting"]
    order += scheduler.first_token(blocker, now_s)
    for job in order:
        order += scheduler.first_token(job, now_s)
    for first, job in enumerate(order):
        for later in order[first + 1 :]:
            if later in waiting and job in waiting and later.arrived_s < job.arrived_s:
                bound_s = (sizes[id(later)] - sizes[id(job)]) / aging
                assert job.arrived_s - later.arrived_s <= bound_s + 1e-6


def first_of(jobs: list[Job], patience_s: float = 15.0) -> Job:
    """The job that goes first of those that wait together."""
    scheduler = quartz_of(pool_of(1), fairness_s_per_kilotoken=0.0, patience_s=patience_s)
    blocker = job_of(50_000)
    submit_all(scheduler, [blocker, job_of()], 0.0)
    for job in jobs:
        submit_all(scheduler, [job], job.arrived_s)
        assert job.state == "waiting"
    return scheduler.first_token(blocker, jobs[-1].arrived_s)[0]


@pytest.mark.parametrize(
    ("targets_s", "first"),
    [
        ((30.0, 0.5), 1),
        ((0.0, 0.5), 1),
        ((30.0, 60.0), 0),
        ((0.0, 30.0), 0),
        ((0.5, 0.5), 0),
        ((0.0, 0.0), 0),
    ],
    ids=["tight", "stated", "both-patient", "patient-is-none", "alike", "none"],
)
def test_a_tight_target_counts_as_an_earlier_arrival(
    targets_s: tuple[float, float], first: int
) -> None:
    jobs = [job_of(1000, at_s, slo_s=s) for at_s, s in zip((0.0, 9.0), targets_s, strict=True)]
    assert first_of(jobs) is jobs[first]


def test_what_comes_after_a_prefill_leaves_it_less_of_its_target() -> None:
    jobs = [job_of(1000, 0.0, slo_s=12.0), job_of(1000, 3.0, slo_s=12.0, after_s=5.0)]
    assert first_of(jobs) is jobs[1]


@pytest.mark.parametrize(
    ("patience_s", "later_s", "first"), [(15.0, 14.0, 1), (15.0, 14.6, 0), (0.0, 0.1, 0)]
)
def test_a_tight_target_overtakes_only_as_far_as_patience(
    patience_s: float, later_s: float, first: int
) -> None:
    jobs = [job_of(1000, 0.0, slo_s=30.0), job_of(1000, later_s, slo_s=0.5)]
    assert first_of(jobs, patience_s=patience_s) is jobs[first]


@given(st.data())
def test_hits_are_each_workers_longest(data: st.DataObject) -> None:
    levels = data.draw(st.lists(st.integers(1, 255), max_size=6))
    match = tuple((1000 - i, mask) for i, mask in enumerate(levels))
    hits = hits_of(match, 255)
    for worker in range(8):
        longest = next((tokens for tokens, mask in match if mask >> worker & 1), 0)
        assert hits.get(worker, 0) == longest


class Looked(list[float]):
    """Loads that are counted when they are looked at."""

    times = 0

    def __getitem__(self, index: Any) -> Any:
        self.times += 1
        return super().__getitem__(index)


def test_of_many_workers_a_few_are_looked_at() -> None:
    workers = range(2000)
    everywhere = (900, (1 << 2000) - 1)
    matches: tuple[Match, ...] = ((), (everywhere,), ((950, 0b1010), everywhere))
    for match in matches:
        load = Looked([5.0] * 2000)
        chosen = {pick_sticky(match, workers, load, cursor, mean=5.0) for cursor in range(100)}
        assert load.times < 100 * 200
        assert all(0 <= worker < 2000 for worker in chosen)
        assert len(chosen) > 20 or chosen <= {1, 3}


def test_of_many_workers_the_holder_of_a_prefix_is_found_and_a_crowded_one_left() -> None:
    load = [5.0] * 2000
    for cursor in range(40):
        assert pick_sticky(((900, 1 << 1234),), range(2000), load, cursor, mean=5.0) == 1234
    load[1234] = 50.0
    assert pick_sticky(((900, 1 << 1234),), range(2000), load, 0, mean=5.0) != 1234
    assert pick_sticky(((900, 1 << 1234), (9, 1 << 7)), range(2000), load, 0, mean=5.0) == 7
    away = [w for w in range(2000) if w not in {7, 1234}]
    assert pick_sticky(((900, 1 << 1234), (9, 1 << 7)), away, load, 0, mean=5.0) in away


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 50_000), st.floats(0, 4000)),
        min_size=1,
        max_size=40,
    )
)
def test_recent_writes_are_decayed_counts(
    steps: list[tuple[int, int, float]],
) -> None:
    scheduler = Quartz(pool_of(4), Proportional(), DEFAULT)
    naive = [0.0] * 4
    now_s = 1e6
    for worker, tokens, later_s in steps:
        now_s += later_s
        naive = [value * exp(-later_s / DEFAULT.writes_tau_s) for value in naive]
        naive[worker] += tokens
        job = job_of(tokens)
        job.worker = worker
        scheduler._take(job, now_s)
    unit = scheduler._even / EVEN_TOKENS
    for place, value in enumerate(naive):
        assert scheduler._workers[place].written / unit == pytest.approx(value, rel=1e-6, abs=1e-6)
    assert scheduler._written / unit == pytest.approx(sum(naive), rel=1e-6)
